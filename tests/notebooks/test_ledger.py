"""The ledger and the chapters fit together: what the build refuses, and where each verdict's link leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from v41lib import ledger, notebook

BOOK = Path(__file__).resolve().parents[2] / "book"
CHAPTERS = {path.stem[:2]: path for path in sorted(BOOK.glob("[0-9][0-9]_*.ipynb"))}

pytestmark = pytest.mark.notebook


def test_the_ledger_holds() -> None:
    assert ledger.audit(ledger.load_claims(), ledger.accepted_records(), set(CHAPTERS)) == []


@pytest.mark.parametrize("number", sorted(CHAPTERS))
def test_every_verdict_links_to_a_place_in_its_chapter(number: str) -> None:
    text = "\n".join(cell.source for cell in notebook.read(CHAPTERS[number]).cells if cell.cell_type == "markdown")
    wanted = {c.id for c in ledger.load_claims().values() if c.chapter == number and c.kind != "needs-weights"}
    found = {word.split(")=")[0] for word in text.split("(settles-")[1:]}
    assert found == wanted


@pytest.mark.parametrize("number", sorted(set(CHAPTERS) - {"00"}))
def test_every_chapter_has_the_parts_of_a_chapter(number: str) -> None:
    text = "\n".join(cell.source for cell in notebook.read(CHAPTERS[number]).cells)
    for part in (":class: claim", "**What would refute it.**", "## Verdict", "## Exercises", "## Further reading"):
        assert part in text, part
    assert text.count(":::{dropdown} Answers") == 1
    exercises = text.split("## Exercises")[1].split(":::{dropdown}")[0]
    assert [line[0] for line in exercises.splitlines() if line[:1].isdigit()] == ["1", "2", "3"]
