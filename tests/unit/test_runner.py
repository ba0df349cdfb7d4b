"""`v41 run`: parameters by name, one execution that is reused, and results that are complete or absent."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import nbformat
import papermill
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from pydantic import ValidationError

from v41lib import notebook, runner
from v41lib.cli import main
from v41lib.experiments import base


class Params(base.BaseParams):
    PROFILES: ClassVar = {"full": {"layers": 40}}

    layers: int = 4
    rate: float = 0.5
    name: str = "toy"
    lengths: tuple[int, ...] = (1, 2)


PARAMETERS = 'profile = "ci"\nlayers = 4\nrate = 0.5\nname = "toy"\nlengths = [1, 2]'


def write_chapter(path: Path, *sources: str, parameters: str | None = None) -> None:
    cells = [new_markdown_cell(f"# {path.stem}")]
    if parameters is not None:
        cells.append(new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    cells += [new_code_cell(source) for source in sources]
    path.write_text(nbformat.writes(notebook.normalise(new_notebook(cells=cells))))


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in a folder with a space in its name, with one chapter `02_toy`, and its experiment's module."""
    folder = tmp_path / "a checkout" / "book"
    folder.mkdir(parents=True)
    (folder / "_toc.yml").write_text("format: jb-book\nroot: 02_toy\n")
    write_chapter(folder / "02_toy.ipynb", "print(layers * 2, lengths)", parameters=PARAMETERS)
    module = types.ModuleType("v41lib.experiments.toy")
    module.Params = Params  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return folder


def run_of(book: Path, **values: Any) -> runner.Run:
    chapter = runner.find_chapter(book, "02")
    return runner.Run(chapter, runner.make_params(chapter, "ci", values), custom=bool(values))


def printed(run: runner.Run) -> str:
    return "".join(output.text for cell in notebook.code_cells(notebook.read(run.output)) for output in cell.outputs)


@pytest.fixture
def fake_papermill(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """papermill without a kernel: copies the chapter, and keeps what it was called with."""
    calls: list[dict[str, Any]] = []

    def execute(source: str, target: str, **options: Any) -> None:
        calls.append(options)
        Path(target).write_bytes(Path(source).read_bytes())

    monkeypatch.setattr(papermill, "execute_notebook", execute)
    return calls


# --- which chapter, which parameters ---


@pytest.mark.parametrize("wanted", ["02", "2", "toy", "02_toy", "02_toy.ipynb"])
def test_a_chapter_has_several_names(book: Path, wanted: str) -> None:
    assert runner.find_chapter(book, wanted).path == book / "02_toy.ipynb"


@pytest.mark.parametrize("wanted", ["03", "", "to", "02_"])
def test_an_unknown_chapter_is_refused_with_a_list(book: Path, wanted: str) -> None:
    write_chapter(book / "00_front_page.ipynb", "1")
    with pytest.raises(runner.RunError, match="there are: 00_front_page, 02_toy"):
        runner.find_chapter(book, wanted)


def test_the_book_is_found_from_below_or_missed_clearly(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = book.parent / "v41lib"
    inside.mkdir()
    for folder in (inside, book.parent, book):
        monkeypatch.chdir(folder)
        assert runner.find_book() == book
    monkeypatch.chdir(tmp_path)
    with pytest.raises(runner.RunError, match="--book"):
        runner.find_book()
    with pytest.raises(runner.RunError, match=r"has no _toc\.yml"):
        runner.find_book(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-2E3", -2e3),
        ("1.5", 1.5),
        (".5", 0.5),
        ("010", 10),
        ("-3", -3),
        ("true", True),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("'5'", "5"),
        ("[4, 8]", [4, 8]),
        ("[1e-4, x]", [1e-4, "x"]),
        ("null", None),
        ("", None),
        ("a=b", "a=b"),
    ],
)
def test_values_are_read_as_they_look(text: str, value: object) -> None:
    read = runner.parse_values([f"x={text}"])["x"]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("pair", ["layers", "=3", "x=[1,"])
def test_a_pair_that_is_none_is_refused(pair: str) -> None:
    with pytest.raises(runner.RunError, match="-p"):
        runner.parse_values([pair])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"layer": 3}, "layer: no such parameter"),
        ({"layers": "3"}, "layers='3': .*integer"),
        ({"layers": 3.5}, "layers=3.5: .*integer"),
        ({"layers": True}, "layers=True: .*integer"),
        ({"name": 5}, "name=5: .*string"),
        ({"lengths": 5}, "lengths=5: .*tuple"),
        ({"profile": "full"}, "--profile"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(book: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(runner.RunError, match=said):
        run_of(book, **values)


def test_every_wrong_parameter_and_every_right_one_is_named(book: Path) -> None:
    with pytest.raises(runner.RunError) as caught:
        run_of(book, layer=3, rate="fast")
    for expected in ("layer: no such", "rate='fast'", "layers: int = 4", "lengths: tuple[int, ...] = (1, 2)"):
        assert expected in str(caught.value)


def test_whole_numbers_and_lists_are_taken_where_they_fit(book: Path) -> None:
    params = run_of(book, rate=1, lengths=[4, 8]).params
    assert isinstance(params, Params)
    assert params.rate == 1.0 and params.lengths == (4, 8)


def test_profiles_change_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Params.for_profile("full").layers == 40
    assert Params.for_profile("full", layers=7).layers == 7
    for there, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(base, "_cuda", lambda there=there: there)
        assert Params().device == "cpu" and Params.for_profile("full").device == device
    monkeypatch.setattr(base, "_cuda", lambda: False)
    with pytest.raises(ValidationError, match="needs a CUDA device"):
        Params.for_profile("gpu")


# --- one run ---


def test_a_chapter_runs_with_its_parameters(book: Path) -> None:
    run = run_of(book, layers=5, lengths=[3])
    run.execute()
    assert printed(run) == "10 [3]\n"
    assert run.output == book.parent / "build" / "run" / "custom" / "02_toy.ipynb"
    record = json.loads(run.record.read_text())
    assert record["status"] == "ok" and record["chapter"] == "02_toy" and record["profile"] == "ci"
    assert record["params"]["layers"] == 5 and record["key"] == run.key and len(record["cell_seconds"]) == 3
    assert sorted(path.name for path in book.iterdir()) == ["02_toy.ipynb", "_toc.yml"]  # nothing beside the sources


def test_a_failing_cell_is_shown_and_older_results_stay(book: Path) -> None:
    run_of(book).execute()
    before = run_of(book).output.read_bytes()
    write_chapter(book / "02_toy.ipynb", "print(1)", "raise ValueError('no such thing')", parameters=PARAMETERS)
    changed = run_of(book)
    with pytest.raises(runner.RunError) as caught:
        changed.execute()
    said = str(caught.value)
    assert "02_toy, cell 3 failed" in said and "raise ValueError('no such thing')" in said and "\x1b" not in said
    assert changed.output.read_bytes() == before
    assert not changed.is_fresh()
    assert "build/run/ci/02_toy.failed.ipynb" in said and "no such thing" in changed.failed.read_text()


def test_only_changed_parameters_are_injected(book: Path, fake_papermill: list[dict[str, Any]]) -> None:
    run_of(book).execute()
    run_of(book, rate=0.25, layers=4).execute()
    assert [call["parameters"] for call in fake_papermill] == [{}, {"rate": 0.25}]
    assert fake_papermill[0]["kernel_name"] == "python3" and fake_papermill[0]["cwd"] == str(book)


def test_changed_parameters_keep_their_records_apart(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def execute(source: str, target: str, **_: Any) -> None:
        seen.append(os.environ["V41_BUILD"])
        Path(target).write_bytes(Path(source).read_bytes())

    monkeypatch.setattr(papermill, "execute_notebook", execute)
    run_of(book).execute()
    run_of(book, layers=5).execute()
    build = book.parent / "build"
    assert seen == [str(build), str(build / "custom")] and "V41_BUILD" not in os.environ


@pytest.mark.usefixtures("fake_papermill")
def test_a_run_is_fresh_until_something_it_depends_on_changes(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, data = tmp_path / "library" / "v41lib", tmp_path / "library" / "data"
    for file, text in ((library / "nn" / "x.py", "1"), (data / "c.json", "1"), (data / "records" / "r.json", "1")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(runner, "PACKAGE", library)
    chapter, lock = book / "02_toy.ipynb", book.parent / "requirements.txt"
    lock.write_text("torch==1")

    def change_source() -> None:
        write_chapter(chapter, "print(layers * 3)", parameters=PARAMETERS)

    changes: list[Callable[[], object]] = [
        change_source,
        lambda: (library / "nn" / "x.py").write_text("2"),
        lambda: (library / "new.py").write_text(""),
        lambda: (data / "c.json").write_text("2"),
        lambda: lock.write_text("torch==2"),
        lambda: run_of(book).output.unlink(),
        lambda: run_of(book).record.write_text('{"status": "ok", '),
        lambda: run_of(book).record.unlink(),
    ]
    assert not run_of(book).is_fresh()
    for change in changes:
        run_of(book).execute()
        assert run_of(book).is_fresh()
        change()
        assert not run_of(book).is_fresh()

    run_of(book).execute()
    (data / "records" / "r.json").write_text("2")  # accepting a record leaves chapters as they are
    stored = notebook.read(chapter)
    stored.cells[2].outputs = [nbformat.v4.new_output("stream", text="stored outputs are no source\n")]
    notebook.write(stored, chapter)
    assert run_of(book).is_fresh()


def test_the_front_page_depends_on_the_accepted_records(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "data" / "records"
    records.mkdir(parents=True)
    monkeypatch.setattr(runner, "PACKAGE", tmp_path / "v41lib")
    write_chapter(book / "00_front_page.ipynb", "1")
    chapter = runner.find_chapter(book, "00")
    before = runner.Run(chapter, base.BaseParams()).key
    (records / "r.json").write_text("{}")
    assert runner.Run(chapter, base.BaseParams()).key != before


def test_an_interruption_leaves_the_old_results(
    book: Path, fake_papermill: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(book)
    run.execute()
    before = {path.name: path.read_bytes() for path in run.output.parent.iterdir()}

    def interrupted(source: str, target: str, **_: Any) -> None:
        Path(target).write_text("half a notebo")
        raise KeyboardInterrupt

    monkeypatch.setattr(papermill, "execute_notebook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.execute()
    assert {path.name: path.read_bytes() for path in run.output.parent.iterdir()} == before
    assert run_of(book).is_fresh()


@pytest.mark.usefixtures("fake_papermill")
@pytest.mark.parametrize("stop_at", [0, 1])
def test_a_stop_while_results_are_put_in_place_never_looks_fresh(
    book: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    run_of(book).execute()
    replace, calls = os.replace, []

    def stop(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) > stop_at:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        run_of(book).execute()
    assert not run_of(book).is_fresh()


# --- all runs, and the command ---


@pytest.mark.slow
def test_all_stale_chapters_run_and_only_those_again(book: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (book / "02_toy.ipynb").unlink()  # its experiment is known to this process only
    write_chapter(book / "01_good.ipynb", "print('well')")
    write_chapter(book / "03_bad.ipynb", "raise ValueError('no such thing')")
    with pytest.raises(runner.RunError, match="no such thing"):
        runner.run_all(book)
    good = runner.Run(runner.find_chapter(book, "01"), base.BaseParams())
    assert printed(good) == "well\n" and good.is_fresh()
    write_chapter(book / "03_bad.ipynb", "print('mended')")
    capfd.readouterr()
    first, second = runner.run_all(book)
    said = capfd.readouterr().out
    assert "running 03_bad" in said and "running 01_good" not in said and "1 of 2 chapters" in said
    assert (printed(first), printed(second)) == ("well\n", "mended\n")


def test_no_chapters_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(runner.RunError, match="no chapters"):
        runner.run_all(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run"], 2, "name one chapter"),
        (["run", "02", "--all"], 2, "name one chapter"),
        (["run", "--all", "-p", "layers=3"], 2, "name one chapter"),
        (["run", "07"], 1, "no chapter 07; there are: 02_toy"),
        (["run", "02", "-p", "layer=3"], 1, "layer: no such parameter"),
        (["run", "02", "--profile", "huge"], 2, "huge"),
    ],
)
def test_the_command_refuses_clearly(
    book: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(book)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code and said in result.output


@pytest.mark.usefixtures("fake_papermill")
def test_the_command_runs_once_and_says_where(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(book)
    output = str(book.parent / "build" / "run" / "ci" / "02_toy.ipynb")
    assert CliRunner().invoke(main, ["run", "02"]).output == f"{output}\n"
    assert CliRunner().invoke(main, ["run", "02"]).output.startswith("the last run still holds")
    assert CliRunner().invoke(main, ["run", "02", "--force"]).output == f"{output}\n"
