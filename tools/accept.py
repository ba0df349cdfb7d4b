"""Takes the results of the `ci` profile into the repository, on purpose: `make accept`.

Stale chapters run first. Their records go to `data/records`, their notebooks to `book/`, without anything that changes
from run to run. A record that says the same as before stays as it is, date and all. The front page shows the accepted
records, so it runs again after them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import yaml

from v41lib import notebook, runner
from v41lib.experiments.base import Profile

ROOT = Path(__file__).resolve().parent.parent
PROFILE: Profile = "ci"
INSTALL = "install"  # the tag of the cell that Colab needs
INSTALL_CELL = """\
import importlib.util

if importlib.util.find_spec("v41lib") is None:
    %pip install --quiet "v41lib @ git+{address}"
"""
# When these are equal, the rest of a record (its date, device, versions) says nothing new.
SUBSTANCE = ("value", "spread", "seeds", "params", "hash")


def set_install_cell(path: Path, address: str) -> None:
    """Gives a chapter the cell that installs v41lib where it is missing, or takes it out while there is no address.

    Colab sees a notebook alone. Everywhere else the cell finds the library and does nothing.
    """
    chapter = notebook.read(path)
    cells = [cell for cell in chapter.cells if INSTALL not in notebook.tags(cell)]
    if address:
        source = INSTALL_CELL.format(address=address.rstrip("/"))
        metadata = {"tags": [INSTALL, "remove-cell"]}
        cells.insert(1, nbformat.v4.new_code_cell(source, id="install", metadata=metadata))
    if [cell.source for cell in cells] != [cell.source for cell in chapter.cells]:
        chapter.cells = cells
        notebook.write(chapter, path)


def accept_records(fresh: Path, accepted: Path) -> list[str]:
    """Copies the records that say something new; returns their names."""
    taken = []
    accepted.mkdir(parents=True, exist_ok=True)
    for path in sorted(fresh.glob("*.json")):
        target = accepted / path.name
        if target.is_file() and _substance(target) == _substance(path):
            continue
        shutil.copyfile(path, target)
        taken.append(path.stem)
    return taken


def _substance(path: Path) -> list[object]:
    record = json.loads(path.read_text(encoding="utf-8"))
    return [record.get(name) for name in SUBSTANCE]


def accept_notebooks(runs: list[runner.Run]) -> list[str]:
    """Writes each executed chapter over the stored one; returns the names of those that changed by it.

    A chapter in which nothing but timings differs says the same as before and stays as it is.
    """
    taken = []
    for run in runs:
        stored, executed = run.chapter.path, notebook.read(run.output)
        before = stored.read_bytes()
        if [cell.source for cell in notebook.read(stored).cells] != [cell.source for cell in executed.cells]:
            raise runner.RunError(f"{stored.name} was edited while it ran: make accept again")
        fresh = notebook.normalise(executed)
        if _compared(fresh) == _compared(notebook.read(stored)):
            continue
        notebook.write(fresh, stored)
        if stored.read_bytes() != before:
            taken.append(stored.stem)
    return taken


def _compared(chapter: Any) -> list[object]:
    """What a reader can hold a chapter to: everything but the outputs of cells whose output is not compared."""
    ignored = "nbval-ignore-output"
    return [
        {**cell, "outputs": bool(cell.outputs)} if cell.cell_type == "code" and ignored in notebook.tags(cell) else cell
        for cell in chapter.cells
    ]


def main() -> None:
    try:
        book = runner.find_book(ROOT / "book")
        address = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]["url"]
        for path in sorted(book.glob("[0-9][0-9]_*.ipynb")):
            set_install_cell(path, address)
        runner.run_all(book, PROFILE)
        records = accept_records(ROOT / "build" / "records" / PROFILE, ROOT / "data" / "records")
        notebooks = accept_notebooks(runner.run_all(book, PROFILE))
    except (runner.RunError, notebook.NotebookError) as error:
        sys.exit(f"\nmake accept stopped: {error}")
    print(f"accepted records: {', '.join(records) or 'none new'}")
    print(f"accepted notebooks: {', '.join(notebooks) or 'none new'}")


if __name__ == "__main__":
    main()
