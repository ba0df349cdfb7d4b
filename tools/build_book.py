"""Runs the chapters and builds the book: `book/_build/html`.

python tools/build_book.py --profile ci

The pages are built from `build/site`, a copy of `book/` with every chapter replaced by its executed notebook, into
`build/pages`. Only a build without a single warning replaces `book/_build/html`; otherwise the old pages stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import yaml

from v41lib import ledger, notebook, runner

RUNS = "<!-- runs -->"  # where the status page takes its table
CLAIM = re.compile(r":class: claim\n(.*?)\n:::", re.DOTALL)  # the box that opens a chapter
ROOT = Path(__file__).resolve().parent.parent
# Not the `jupyter-book` script: its first line names the place of `.venv` and breaks when a checkout is moved.
JUPYTER_BOOK = "from jupyter_book.cli.main import main; main()"
# What a page or a style sheet makes the browser fetch from another host.
REMOTE = re.compile(r"""<(?:script|img|iframe)\b[^>]*?\bsrc="((?:https?:)?//[^"]+)"|"""
                    r"""<link\b[^>]*?\brel="(?:stylesheet|preload|icon)"[^>]*?\bhref="((?:https?:)?//[^"]+)"|"""
                    r"""url\(["']?((?:https?:)?//[^)"']+)""")  # fmt: skip


def assemble(book: Path, runs: list[runner.Run], site: Path) -> None:
    """Copies the book's sources to ``site``, with the executed chapters in place of the stored ones."""
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(book, site, ignore=shutil.ignore_patterns("_build", ".*", "__pycache__"))
    records = {run.chapter.path.stem: json.loads(run.record.read_text(encoding="utf-8")) for run in runs}
    for run in runs:
        executed = notebook.normalise(notebook.read(run.output))
        verified = last_verified(records[run.chapter.path.stem])
        if claim := CLAIM.search(executed.cells[0].source):  # what a search engine shows under the title
            description = " ".join(claim.group(1).split())
            executed.metadata["myst"] = {"html_meta": {"description": description}}
        executed.cells.append(nbformat.v4.new_markdown_cell(verified, id="last-verified"))
        notebook.write(executed, site / run.chapter.path.name)
    status = (site / "status.md").read_text(encoding="utf-8")
    (site / "status.md").write_text(status.replace(RUNS, runs_table(records)), encoding="utf-8")


def last_verified(record: dict[str, Any]) -> str:
    """The line at the foot of a chapter: when it ran and on what."""
    facts = ", ".join(_conditions(record))
    return f"---\n\n*Last verified {record['started'][:10]}: {facts}. See [](status).*"


def runs_table(records: dict[str, dict[str, Any]]) -> str:
    """The status page's table, one row a chapter, in MyST."""
    rows = ["| chapter | date | profile | device | versions | seconds |", "|---|---|---|---|---|---:|"]
    for page, record in records.items():
        _, device, versions, _ = _conditions(record)
        date = record["started"][:16].replace("T", " ")
        cells = [f"[](./{page})", date, record["profile"], device, versions, f"{record['seconds']:.0f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _conditions(record: dict[str, Any]) -> tuple[str, str, str, str]:
    versions = record["versions"]
    return (
        f"profile {record['profile']}",
        record["device"],
        f"torch {versions['torch']}, Python {versions['python']}",
        f"{record['seconds']:.0f} s",
    )


def refuse_untrue_ledger(runs: list[runner.Run]) -> None:
    """Stops the build on a ledger that does not hold: see ``ledger.audit``."""
    chapters = {run.chapter.number for run in runs}
    if problems := ledger.audit(ledger.load_claims(), ledger.accepted_records(), chapters):
        raise runner.RunError("the ledger does not hold:\n  " + "\n  ".join(problems))


def effective_config(config: Path) -> str:
    """The settings as text, with the doors to the repository opened once its address is known."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    if settings["repository"]["url"]:
        buttons = ("use_repository_button", "use_edit_page_button", "use_issues_button")
        settings["html"].update(dict.fromkeys(buttons, True))
        settings["launch_buttons"] = {
            "colab_url": "https://colab.research.google.com",
            "binderhub_url": "https://mybinder.org",
        }
    return yaml.safe_dump(settings, sort_keys=False)


def remote_loads(pages: Path) -> dict[str, list[str]]:
    """Every address on another host that pages or style sheets load by themselves, with the files that do."""
    found: dict[str, list[str]] = {}
    for path in sorted([*pages.rglob("*.html"), *pages.rglob("*.css")]):
        for groups in REMOTE.findall(path.read_text(encoding="utf-8", errors="replace")):
            found.setdefault("".join(groups), []).append(path.relative_to(pages).as_posix())
    return found


def build(root: Path, profile: runner.Profile) -> Path:
    """Runs stale chapters, builds the pages, and returns the front page. Raises ``RunError`` if anything is amiss."""
    book = runner.find_book(root / "book")
    runs = runner.run_all(book, profile)
    refuse_untrue_ledger(runs)
    site, pages = root / "build" / "site", root / "build" / "pages"
    assemble(book, runs, site)
    config = root / "build" / "_config.yml"
    config.write_text(effective_config(root / "_config.yml"), encoding="utf-8")
    shutil.rmtree(pages, ignore_errors=True)  # a page or a warning of an earlier build must not be kept
    pages.mkdir(parents=True)

    print("building the pages", flush=True)
    command = [sys.executable, "-c", JUPYTER_BOOK, "build", str(site), "--config", str(config)]
    command += ["--path-output", str(pages), "-n", "-W", "--keep-going", "-q"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # Sphinx loads tools.*
    environment = {**os.environ, "PYTHONPATH": paths}
    made = subprocess.run(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if made.returncode != 0:
        raise runner.RunError(f"the pages did not build without warnings:\n{runner.plain(made.stdout)}")

    html = pages / "_build" / "html"
    front = runs[0].chapter.path.stem
    shutil.copyfile(html / f"{front}.html", html / "index.html")  # in place of a page that only forwards
    replace_folder(html, book / "_build" / "html")
    return book / "_build" / "html" / "index.html"


def replace_folder(new: Path, old: Path) -> None:
    """Puts ``new`` in the place of ``old``, which stays until the new one is there."""
    aside = old.with_name(f"{old.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    old.parent.mkdir(parents=True, exist_ok=True)
    if old.exists():
        os.replace(old, aside)
    os.replace(new, old)
    shutil.rmtree(aside, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="ci", choices=["ci", "full", "gpu"])
    try:
        page = build(ROOT, parser.parse_args().profile)
    except (runner.RunError, notebook.NotebookError) as error:
        sys.exit(f"\nmake book stopped: {error}")
    if remote := remote_loads(page.parent):
        sys.exit(f"\nmake book stopped: pages load from other hosts: {', '.join(remote)}")
    print(f"The book: {page.as_uri()}")


if __name__ == "__main__":
    main()
