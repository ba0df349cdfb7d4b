"""Every chapter as it is stored: by the guard's rules, and against the execution that the book is built from too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebooks import compare, guard
from v41lib import notebook, runner

BOOK = Path(__file__).resolve().parents[2] / "book"
CHAPTERS = runner.chapters(BOOK)
pytestmark = pytest.mark.notebook


@pytest.fixture(scope="session")
def runs() -> dict[str, runner.Run]:
    """The ci execution of every chapter; stale ones run now, two at a time."""
    return {run.chapter.path.stem: run for run in runner.run_all(BOOK)}


def test_there_are_chapters() -> None:
    assert CHAPTERS, f"no chapter in {BOOK}"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.path.stem)
def test_guard(chapter: runner.Chapter) -> None:
    found = guard.problems(notebook.read(chapter.path), chapter.params_class())
    assert not found, "\n".join(found)


@pytest.mark.timeout(1800)  # the first of these runs the stale chapters
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.path.stem)
def test_outputs_are_those_stored(chapter: runner.Chapter, runs: dict[str, runner.Run]) -> None:
    executed = notebook.read(runs[chapter.path.stem].output)
    found = compare.differences(notebook.read(chapter.path), executed)
    assert not found, "\n\n".join(found)


def test_the_run_leaves_the_checkout_alone(runs: dict[str, runner.Run]) -> None:
    for run in runs.values():
        assert run.output.is_relative_to(BOOK.parent / "build")
    assert not list(BOOK.glob(".*.partial*"))
