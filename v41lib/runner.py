"""Runs chapters: which there are, with which parameters, and whether an earlier run is still good.

A chapter is ``book/NN_name.ipynb``; its experiment is ``v41lib.experiments.name`` with a class ``Params``. papermill
executes it; the result is ``build/run/<profile>/NN_name.ipynb`` with a run record beside it. Each is complete or
absent. A run is not repeated while its key holds: a hash of the chapter's cells, the library, the data, the locked
packages and the parameters.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from v41lib import notebook
from v41lib.experiments.base import BaseParams, Profile

PACKAGE = Path(__file__).resolve().parent
CELL_TIMEOUT = {"ci": 300, "full": 4 * 3600, "gpu": 4 * 3600}  # seconds
FRONT_PAGE = "00"  # the one chapter that shows the accepted records


class RunError(Exception):
    """A chapter that cannot be run, or whose run failed; the message is for a person."""


# --- chapters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chapter:
    """One chapter file."""

    path: Path

    @property
    def number(self) -> str:
        return self.path.stem[:2]

    @property
    def name(self) -> str:
        return self.path.stem[3:]

    def params_class(self) -> type[BaseParams]:
        """The chapter's ``Params``; ``BaseParams`` for a chapter without an experiment."""
        module = f"v41lib.experiments.{self.name}"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            return BaseParams
        params: type[BaseParams] = found.Params
        return params


def find_book(start: Path | None = None) -> Path:
    """The book's folder: the given one, or ``book/`` here or in a folder above. Raises ``RunError`` without one."""
    if start is not None:
        if not (start / "_toc.yml").is_file():
            raise RunError(f"{start} is not the book's folder: it has no _toc.yml")
        return start.resolve()
    here = Path.cwd()
    for folder in (here, *here.parents):
        for candidate in (folder / "book", folder):
            if (candidate / "_toc.yml").is_file():
                return candidate.resolve()
    raise RunError("no book here: go to a checkout of the book, or name its folder with --book")


def chapters(book: Path) -> list[Chapter]:
    """All chapters in order."""
    return [Chapter(path) for path in sorted(book.glob("[0-9][0-9]_*.ipynb"))]


def find_chapter(book: Path, wanted: str) -> Chapter:
    """A chapter by number, name or file name. Raises ``RunError`` that lists those that exist."""
    there = chapters(book)
    for chapter in there:
        names = (chapter.number, str(int(chapter.number)), chapter.name, chapter.path.stem)
        if wanted.removesuffix(".ipynb") in names:
            return chapter
    known = ", ".join(chapter.path.stem for chapter in there) or "none"
    raise RunError(f"no chapter {wanted}; there are: {known}")


# --- parameters -----------------------------------------------------------------------------------------------------


class _PlainLoader(yaml.SafeLoader):
    """YAML with JSON's scalars only. YAML 1.1 reads 1e-4 as text, 010 as 8, `no` as false and 1:30 as 90."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own way)


for _tag, _pattern, _first in (
    ("null", r"null|~|", "n~"),
    ("bool", r"true|false", "tf"),
    ("int", r"[-+]?\d[\d_]*", "-+0123456789"),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?", "-+.0123456789"),
):
    _PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [*_first])
_PlainLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def parse_values(pairs: Iterable[str]) -> dict[str, Any]:
    """``name=value`` pairs with YAML values: ``rate=1e-4``, ``lengths=[4, 8]``, ``name=text``."""
    values = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip():
            raise RunError(f"-p {pair}: write it as name=value")
        try:
            values[name.strip()] = yaml.load(text, Loader=_PlainLoader)
        except yaml.YAMLError as error:
            raise RunError(f"-p {pair}: {text} is not a value that YAML can read") from error
    return values


def make_params(chapter: Chapter, profile: Profile, values: dict[str, Any]) -> BaseParams:
    """The chapter's parameters. Raises ``RunError`` that names every unknown or ill-typed one, and what there is."""
    params_class = chapter.params_class()
    if "profile" in values:
        raise RunError("-p profile=...: choose it with --profile")
    try:
        return params_class.for_profile(profile, **values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name = str(problem["loc"][0]) if problem["loc"] else ""
            if problem["type"] == "extra_forbidden":
                lines.append(f"{name}: no such parameter")
            elif name:
                lines.append(f"{name}={values.get(name)!r}: {problem['msg']}")
            else:
                lines.append(problem["msg"].removeprefix("Value error, "))
        raise RunError(
            "\n".join([f"chapter {chapter.path.stem} cannot run:", *lines, _listing(params_class)])
        ) from error


def _listing(params_class: type[BaseParams]) -> str:
    fields = {name: field for name, field in params_class.model_fields.items() if name != "profile"}
    if not fields:
        return "It has no parameters."
    shown = (f"  {name}: {_type_name(field.annotation)} = {field.default!r}" for name, field in fields.items())
    return "\n".join(["Its parameters, with their types and defaults:", *shown])


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")


# --- one run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One chapter with its parameters, and where its results lie. ``custom``: not simply a profile's defaults."""

    chapter: Chapter
    params: BaseParams
    custom: bool = False

    @property
    def root(self) -> Path:
        return self.chapter.path.parent.parent

    @property
    def build(self) -> Path:
        """Where this run and what its chapter records go; changed parameters must not replace a profile's results."""
        return self.root / "build" / "custom" if self.custom else self.root / "build"

    @property
    def output(self) -> Path:
        folder = "custom" if self.custom else self.params.profile
        return self.root / "build" / "run" / folder / self.chapter.path.name

    @property
    def record(self) -> Path:
        return self.output.with_suffix(".json")

    @property
    def failed(self) -> Path:
        return self.output.with_suffix(".failed.ipynb")

    @cached_property
    def key(self) -> str:
        """What the result depends on, as one hash."""
        digest = hashlib.sha256()
        cells = notebook.read(self.chapter.path).cells
        digest.update(
            json.dumps([[cell.cell_type, cell.source, sorted(notebook.tags(cell))] for cell in cells]).encode()
        )
        digest.update(self.params.model_dump_json().encode())
        digest.update(f"{platform.python_version()} {version('torch')}".encode())
        for name, path in self._files():
            digest.update(f"\n{name}\n".encode() + path.read_bytes())
        return digest.hexdigest()

    def _files(self) -> Iterator[tuple[str, Path]]:
        data = PACKAGE / "data" if (PACKAGE / "data").is_dir() else PACKAGE.parent / "data"
        for folder, pattern in ((PACKAGE, "*.py"), (data, "*")):
            for path in sorted(folder.rglob(pattern)):
                name = path.relative_to(folder).as_posix()
                # Accepting records must not make every chapter stale: only the front page reads them.
                accepted = folder == data and name.startswith("records/") and self.chapter.number != FRONT_PAGE
                if path.is_file() and not accepted and "__pycache__" not in path.parts:
                    yield name, path
        if (lock := self.root / "requirements.txt").is_file():
            yield lock.name, lock

    def is_fresh(self) -> bool:
        """Whether an earlier run with the same key succeeded."""
        try:
            record = json.loads(self.record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return record.get("status") == "ok" and record.get("key") == self.key and self.output.is_file()

    def execute(self) -> None:
        """Runs the chapter. Raises ``RunError`` with the cell and traceback if it fails; older results then stay."""
        import matplotlib.font_manager  # noqa: F401 (builds its font cache here, or a chapter would tell of it)
        import papermill
        from nbclient.exceptions import CellTimeoutError, DeadKernelError

        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_name(f".{self.chapter.path.stem}.partial.ipynb")
        key = self.key  # of what is about to run: files may change meanwhile
        started, clock = datetime.now(UTC), time.monotonic()
        try:
            with _environment(V41_BUILD=str(self.build), JUPYTER_PREFER_ENV_PATH="1", IPYTHONDIR=str(self.ipython)):
                papermill.execute_notebook(
                    str(self.chapter.path),
                    str(partial),
                    parameters=self.injected(),
                    kernel_name="python3",
                    cwd=str(self.chapter.path.parent),
                    progress_bar=sys.stderr.isatty(),
                    execution_timeout=CELL_TIMEOUT[self.params.profile],
                    extra_arguments=["--log-level=CRITICAL"],  # the kernel's own; a chapter's errors are its outputs
                )
        except (papermill.PapermillExecutionError, CellTimeoutError, DeadKernelError) as error:
            if partial.exists():
                os.replace(partial, self.failed)
            raise RunError(_explain(self, error)) from error
        except BaseException:
            partial.unlink(missing_ok=True)  # interrupted
            raise
        record = {"status": "ok", "key": key} | self._describe(
            started, time.monotonic() - clock, notebook.read(partial)
        )
        # In this order a stop in between leaves a run that counts as stale, never a wrong one that counts as fresh.
        self.record.unlink(missing_ok=True)
        os.replace(partial, self.output)
        scratch = self.record.with_suffix(".json.partial")
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, self.record)
        self.failed.unlink(missing_ok=True)

    @property
    def ipython(self) -> Path:
        return self.root / "build" / "ipython"  # not the reader's own, whose start-up files could change a run

    def injected(self) -> dict[str, Any]:
        """What papermill must set: the parameters that differ from those in the chapter."""
        defaults = self.chapter.params_class()().model_dump(mode="json")
        return {name: value for name, value in self.params.model_dump(mode="json").items() if value != defaults[name]}

    def _describe(self, started: datetime, seconds: float, executed: Any) -> dict[str, Any]:
        from v41lib.ledger import device_name, versions

        cells = [cell.metadata.get("papermill", {}).get("duration") for cell in notebook.code_cells(executed)]
        return {
            "chapter": self.chapter.path.stem,
            "profile": self.params.profile,
            "params": self.params.model_dump(mode="json"),
            "device": device_name(self.params.device),
            "versions": versions(),
            "commit": _commit(self.root),
            "started": started.isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "cell_seconds": [None if spent is None else round(spent, 2) for spent in cells],
        }


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def plain(text: str) -> str:
    """Text without a terminal's colours, which are noise in logs and files."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()


def _explain(run: Run, error: Exception) -> str:
    """Which cell failed, its source, and its traceback."""
    source = getattr(error, "source", "")
    trace = "\n".join(getattr(error, "traceback", [])) or str(error)
    count = getattr(error, "exec_count", None)
    where = f", cell {count}" if count else ""
    parts = [f"chapter {run.chapter.path.stem}{where} failed."]
    parts += [source.rstrip(), ""] if source else []
    parts += [plain(trace)]
    if run.failed.exists():
        parts += ["", f"The notebook up to there: {run.failed.relative_to(run.root)}"]
    return "\n".join(parts)


def _commit(root: Path) -> str | None:
    """The commit of the checkout, with a + if files differ from it; None outside a repository."""
    try:
        asked = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"], cwd=root, capture_output=True
        )
    except OSError:
        return None
    return asked.stdout.decode().strip() if asked.returncode == 0 else None


# --- several runs ---------------------------------------------------------------------------------------------------


def run_all(book: Path, profile: Profile = "ci", force: bool = False, jobs: int = 2) -> list[Run]:
    """Runs every chapter that is stale, ``jobs`` at a time, each in a process of its own; returns all runs in order.

    Raises ``RunError`` after the last if any failed, with what each of those said.
    """
    runs = [Run(chapter, make_params(chapter, profile, {})) for chapter in chapters(book)]
    if not runs:
        raise RunError(f"no chapters (NN_name.ipynb) in {book}")
    waiting = [run for run in runs if force or not run.is_fresh()]
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} chapters: the last run ({profile}) still holds", flush=True)
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    running: dict[subprocess.Popen[bytes], tuple[Run, float]] = {}
    failures = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                print(f"running {run.chapter.path.stem} ({profile})", flush=True)
                running[_start(run, environment)] = (run, time.monotonic())
            for process in [process for process in running if process.poll() is not None]:
                run, begun = running.pop(process)
                spent = f"{time.monotonic() - begun:.0f} s"
                print(f"{'done' if process.returncode == 0 else 'FAILED'} {run.chapter.path.stem}, {spent}", flush=True)
                if process.returncode != 0:
                    said = _log(run).read_text(encoding="utf-8", errors="replace")
                    failures.append(said.strip().removeprefix("Error: "))
            time.sleep(0.1)
    finally:
        for process in running:
            process.terminate()
            process.wait()
    if failures:
        raise RunError("\n\n".join(failures))
    return runs


def _log(run: Run) -> Path:
    return run.output.with_suffix(".log")


def _start(run: Run, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    log = _log(run)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "v41lib.cli", "run", run.chapter.path.stem, "--force"]
    command += ["--profile", run.params.profile, "--book", str(run.chapter.path.parent)]
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
