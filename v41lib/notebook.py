"""Chapters as files: their parameters cell, and the plain form in which executed notebooks are stored."""

from __future__ import annotations

import ast
import hashlib
import os
from pathlib import Path
from typing import Any

import nbformat

PARAMETERS = "parameters"
# Tags of cells that are not executed here (papermill's and nbval's); they keep no execution count.
SKIPPED = {"skip-execution", "nbval-skip"}


class NotebookError(ValueError):
    """A notebook that is not what a chapter must be."""


def read(path: Path) -> Any:
    """A notebook. Raises ``NotebookError`` naming a file that is not one."""
    try:
        return nbformat.read(path, as_version=4)
    except (ValueError, AttributeError, KeyError) as error:
        raise NotebookError(f"{path.name} is not a readable notebook: {error}") from error


def write(notebook: Any, path: Path) -> None:
    """Writes a notebook completely or not at all, with sorted keys, so that differences stay small."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    os.replace(partial, path)


def tags(cell: Any) -> set[str]:
    """The tags of a cell."""
    return set(cell.metadata.get("tags", []))


def code_cells(notebook: Any) -> list[Any]:
    """The code cells, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parameter_values(notebook: Any) -> dict[str, Any]:
    """The names and values that the cell tagged ``parameters`` assigns; empty if there is no such cell.

    Raises ``NotebookError`` for a second such cell, and for a line that is not ``name = literal``.
    """
    found = [cell for cell in code_cells(notebook) if PARAMETERS in tags(cell)]
    if len(found) > 1:
        raise NotebookError("more than one cell is tagged `parameters`")
    values: dict[str, Any] = {}
    for line in ast.parse(found[0].source).body if found else []:
        match line:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if _is_literal(value):
                values[name] = ast.literal_eval(value)
            case _:
                raise NotebookError(f"the parameters cell may only assign literals, not: {ast.unparse(line)}")
    return values


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def normalise(notebook: Any) -> Any:
    """The notebook without what changes from run to run: papermill's traces, times, and the machine's Python version.

    The cell that papermill injects stays only if a run had parameters; a run with the ``ci`` defaults has none.
    """
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python", "pygments_lexer": "ipython3"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    count = 0
    for position, cell in enumerate(notebook.cells):
        kept = {key: value for key, value in cell.metadata.items() if key not in ("papermill", "execution")}
        cell.metadata = nbformat.from_dict({key: value for key, value in kept.items() if key != "tags" or value})
        cell.setdefault("id", hashlib.sha256(f"{position}{cell.source}".encode()).hexdigest()[:8])
        if cell.cell_type != "code":
            continue
        if tags(cell) & SKIPPED:
            cell.execution_count, cell.outputs = None, []
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    return notebook


def _joined(outputs: list[Any]) -> list[Any]:
    """Neighbouring pieces of one stream as one output: how a stream is cut up depends on timing."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined
