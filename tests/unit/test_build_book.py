"""Around the pages: what is assembled, what pages load, what is taken into the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tools import accept, build_book
from v41lib import ledger, notebook, runner
from v41lib.experiments.base import BaseParams

ROOT = Path(__file__).resolve().parents[2]


RECORD = {
    "started": "2026-01-02T03:04:05+00:00",
    "profile": "ci",
    "device": "CPU, 2 threads",
    "versions": {"torch": "2.13.0", "python": "3.11.2"},
    "seconds": 12.4,
}


@pytest.fixture
def run(tmp_path: Path) -> runner.Run:
    """A chapter that was stored without outputs, and its execution."""
    chapter = tmp_path / "book" / "01_x.ipynb"
    done = runner.Run(runner.Chapter(chapter), BaseParams())
    for path in (chapter, done.output):
        path.parent.mkdir(parents=True)
    cell = new_code_cell("print(1)")
    notebook.write(new_notebook(cells=[cell]), chapter)
    cell.update(execution_count=1, outputs=[new_output("stream", text="1\n")])
    notebook.write(new_notebook(cells=[cell], metadata={"papermill": {"duration": 1}}), done.output)
    done.record.write_text(json.dumps(RECORD))
    return done


def test_pages_are_built_from_executed_chapters(run: runner.Run, tmp_path: Path) -> None:
    book, site = run.chapter.path.parent, tmp_path / "site"
    for name in ("_toc.yml", "_static/x.css", "_build/html/old.html", ".pytest_cache/README.md"):
        (book / name).parent.mkdir(parents=True, exist_ok=True)
        (book / name).write_text(name)
    (book / "status.md").write_text(f"# Status\n\n{build_book.RUNS}\n")
    build_book.assemble(book, [run], site)
    files = sorted(path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file())
    assert files == ["01_x.ipynb", "_static/x.css", "_toc.yml", "status.md"]
    executed = notebook.read(site / "01_x.ipynb")
    assert executed.cells[0].outputs[0].text == "1\n" and "papermill" not in executed.metadata
    assert "Last verified 2026-01-02: profile ci, CPU, 2 threads, torch 2.13.0" in executed.cells[-1].source
    row = "| [](./01_x) | 2026-01-02 03:04 | ci | CPU, 2 threads | torch 2.13.0, Python 3.11.2 | 12 |"
    assert row in (site / "status.md").read_text()


def test_a_chapter_is_described_by_its_claim(run: runner.Run, tmp_path: Path) -> None:
    executed = notebook.read(run.output)
    box = ":::{admonition} The claim\n:class: claim\nIt takes\n890 bytes.\n:::"
    executed.cells.insert(0, new_markdown_cell(box))
    notebook.write(executed, run.output)
    (run.chapter.path.parent / "status.md").write_text(build_book.RUNS)
    build_book.assemble(run.chapter.path.parent, [run], tmp_path / "site")
    described = notebook.read(tmp_path / "site" / "01_x.ipynb").metadata["myst"]["html_meta"]["description"]
    assert described == "It takes 890 bytes."


def test_an_untrue_ledger_stops_the_build(run: runner.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "accepted_records", dict)
    with pytest.raises(runner.RunError, match="claim layers-full: chapter 01 exists but has no record of it"):
        build_book.refuse_untrue_ledger([run])


def test_the_cell_that_colab_needs_follows_the_repository_address(run: runner.Run) -> None:
    path = run.chapter.path
    before = path.read_bytes()
    for address, cells in (("", 1), ("https://example.org/me/book/", 2), ("https://example.org/me/book/", 2)):
        accept.set_install_cell(path, address)
        assert len(notebook.read(path).cells) == cells
    install = notebook.read(path).cells[1]
    assert 'find_spec("v41lib") is None' in install.source
    assert 'git+https://example.org/me/book"' in install.source
    accept.set_install_cell(path, "")
    assert path.read_bytes() == before


def test_buttons_follow_the_repository_address(tmp_path: Path) -> None:
    config = tmp_path / "_config.yml"
    settings = yaml.safe_load((ROOT / "_config.yml").read_text())
    for url, shown in (("", False), ("https://example.org/me/book", True)):
        settings["repository"]["url"] = url
        config.write_text(yaml.safe_dump(settings))
        effective = yaml.safe_load(build_book.effective_config(config))
        html = effective["html"]
        assert ("launch_buttons" in effective) is shown
        assert [html[f"use_{name}_button"] for name in ("repository", "edit_page", "issues")] == [shown] * 3


def test_nothing_is_executed_while_pages_are_built() -> None:
    assert yaml.safe_load((ROOT / "_config.yml").read_text())["execute"]["execute_notebooks"] == "off"


@pytest.mark.parametrize(
    "loads",
    [
        '<script defer="defer" src="https://cdn.example/x.js"></script>',
        '<link href="a.css" rel="stylesheet"/><link rel="stylesheet" href="//cdn.example/x.css">',
        '<img alt="x" src="http://cdn.example/x.png">',
        "@import url(https://cdn.example/x.css)",
    ],
)
def test_what_pages_load_from_elsewhere_is_found(tmp_path: Path, loads: str) -> None:
    (tmp_path / "index.html").write_text(f"<html>{loads}</html>")
    ((address, files),) = build_book.remote_loads(tmp_path).items()
    assert "cdn.example/x." in address and files == ["index.html"]


def test_links_and_local_files_are_no_loads(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="https://example.org">x</a><script src="_static/x.js"></script>')
    assert build_book.remote_loads(tmp_path) == {}


def test_new_pages_replace_the_old_ones_whole(tmp_path: Path) -> None:
    old, new = tmp_path / "_build" / "html", tmp_path / "new"
    for folder, name in ((old, "old.html"), (new, "new.html")):
        folder.mkdir(parents=True)
        (folder / name).write_text("")
    build_book.replace_folder(new, old)
    assert [path.name for path in old.iterdir()] == ["new.html"] and not new.exists()
    assert [path.name for path in old.parent.iterdir()] == ["html"]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{doc}`nowhere`", "{glue:text}`no_such_number`"])
def test_a_warning_fails_the_build_and_keeps_the_old_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    book = tmp_path / "book"
    (book / "_build" / "html").mkdir(parents=True)
    (book / "_build" / "html" / "index.html").write_text("the last good build")
    (book / "_toc.yml").write_text("format: jb-book\nroot: 00_x\nchapters:\n- file: status\n")
    (book / "status.md").write_text(f"# Status\n\n{build_book.RUNS}\n")
    (book / "references.bib").write_text("")
    (tmp_path / "_config.yml").write_text((ROOT / "_config.yml").read_text())
    cells = [nbformat.v4.new_markdown_cell(f"# A chapter\n\n{text}")]
    run = runner.Run(runner.Chapter(book / "00_x.ipynb"), BaseParams())
    run.output.parent.mkdir(parents=True)
    for path in (run.chapter.path, run.output):
        notebook.write(notebook.normalise(new_notebook(cells=cells)), path)
    run.record.write_text(json.dumps(RECORD))
    monkeypatch.setattr(runner, "run_all", lambda *_: [run])
    monkeypatch.setattr(build_book, "refuse_untrue_ledger", lambda *_: None)
    with pytest.raises(runner.RunError, match=r"no_such_number|nowhere"):
        build_book.build(tmp_path, "ci")
    assert (book / "_build" / "html" / "index.html").read_text() == "the last good build"


# --- make accept ---


def test_accepting_stores_the_plain_execution_once(run: runner.Run) -> None:
    assert accept.accept_notebooks([run]) == ["01_x"]
    stored = notebook.read(run.chapter.path)
    assert stored.cells[0].execution_count == 1 and stored.cells[0].outputs[0].text == "1\n"
    assert "papermill" not in stored.metadata and run.chapter.path.read_text().endswith("}\n")
    assert accept.accept_notebooks([run]) == []


@pytest.mark.parametrize(("tagged", "taken"), [(True, []), (False, ["01_x"])])
def test_other_timings_alone_are_not_taken(run: runner.Run, tagged: bool, taken: list[str]) -> None:
    accept.accept_notebooks([run])
    for path, text in ((run.chapter.path, "1 s"), (run.output, "2 s")):
        chapter = notebook.read(path)
        cell = chapter.cells[0]
        cell.outputs[0].text = text
        cell.metadata["tags"] = ["nbval-ignore-output"] if tagged else []
        notebook.write(chapter, path)
    assert accept.accept_notebooks([run]) == taken


def test_a_chapter_edited_while_it_ran_is_not_overwritten(run: runner.Run) -> None:
    edited = new_notebook(cells=[new_code_cell("print(2)")])
    notebook.write(edited, run.chapter.path)
    with pytest.raises(runner.RunError, match="was edited while it ran"):
        accept.accept_notebooks([run])
    assert notebook.read(run.chapter.path).cells[0].source == "print(2)"


def test_a_record_that_says_nothing_new_stays(tmp_path: Path) -> None:
    fresh, accepted = tmp_path / "fresh", tmp_path / "accepted"
    fresh.mkdir()
    record = {"id": "x", "value": 1, "hash": "a", "date": "2026-01-01"}
    (fresh / "x.json").write_text(json.dumps(record))
    assert accept.accept_records(fresh, accepted) == ["x"]
    (fresh / "x.json").write_text(json.dumps(record | {"date": "2026-02-02"}))
    assert accept.accept_records(fresh, accepted) == []
    assert "2026-01-01" in (accepted / "x.json").read_text()
    (fresh / "x.json").write_text(json.dumps(record | {"value": 2}))
    assert accept.accept_records(fresh, accepted) == ["x"]


# --- the Makefile ---


def test_make_alone_lists_the_targets() -> None:
    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True).stdout
    for target in ("setup", "book", "test", "accept", "clean", "lock"):
        assert f"make {target} " in said


def test_the_tools_start_without_the_library(tmp_path: Path) -> None:
    """The set-up runs before anything is installed: only the standard library, and isolated from ours."""
    command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "bootstrap.py"), "--help"]
    assert "--tests" in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


def test_a_chapter_bears_the_number_of_its_file(tmp_path: Path) -> None:
    """With chapters missing in between: in titles, in sections, in figures, in links, and in the contents."""
    pages = {
        "index": ".. toctree::\n   :numbered:\n\n   01_one\n   08_eight\n   notes\n",
        "01_one": "One\n===\n\nSee :numref:`fig` and :doc:`08_eight`.\n",
        "08_eight": "Eight\n=====\n\nPart\n----\n\n.. _fig:\n\n.. figure:: x.png\n\n   Caption\n",
        "notes": "Notes\n=====\n",
    }
    for name, text in pages.items():
        (tmp_path / f"{name}.rst").write_text(text, encoding="utf-8")
    (tmp_path / "conf.py").write_text(
        "extensions = ['tools.chapter_numbers', 'sphinx_multitoc_numbering']\nnumfig = True\n", encoding="utf-8"
    )
    (tmp_path / "x.png").write_bytes(b"")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", str(tmp_path), str(tmp_path / "out")]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    html = {name: (tmp_path / "out" / f"{name}.html").read_text(encoding="utf-8") for name in pages}
    number = '<span class="section-number">{}. </span>{}'
    assert number.format("8", "Eight") in html["08_eight"]
    assert number.format("8.1", "Part") in html["08_eight"]
    assert "Fig. 8.1" in html["08_eight"] and "Fig. 8.1" in html["01_one"]
    assert "8. Eight" in html["index"] and "8.1. Part" in html["index"] and "1. One" in html["index"]
    assert number.format("3", "Notes") in html["notes"]  # no chapter: numbered by its place
