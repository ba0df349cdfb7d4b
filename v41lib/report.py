"""Numbers and tables as a page shows them: every number in prose is glued from a result, never typed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from numbers import Number
from typing import Any

import pandas as pd


def number(value: Any, digits: int = 3) -> str:
    """A value as a page shows it: thousands separated, ``digits`` significant figures for fractions, yes or no."""
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if float(value).is_integer():
        return f"{int(value):,}"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(value) >= 1000 or "e+" in text else text


def billions(value: int) -> str:
    """A count in billions with two decimals."""
    return f"{value / 1e9:.2f} B"


class Table:
    """A result as a page shows it: numbers as text, aligned right; verdicts as badges; the index as a first column."""

    def __init__(self, data: pd.DataFrame, digits: int = 3) -> None:
        self.cells = data.astype(object).map(lambda value: number(value, digits))
        self.numeric = [all(_is_number(value) for value in data[column]) for column in data.columns]

    def __repr__(self) -> str:
        return self.cells.to_string()

    def _repr_html_(self) -> str:
        right = ' class="n"'
        unnamed = self.cells.index.name is None and isinstance(self.cells.index, pd.RangeIndex)
        names = [] if unnamed else [f"<th>{escape(str(self.cells.index.name or ''))}</th>"]
        names += [
            f"<th{right if numeric else ''}>{escape(str(column))}</th>"
            for column, numeric in zip(self.cells.columns, self.numeric, strict=True)
        ]
        rows = []
        for label, row in self.cells.iterrows():
            row_cells = [] if unnamed else [f"<th>{escape(str(label))}</th>"]
            for column, numeric, cell in zip(self.cells.columns, self.numeric, row, strict=True):
                shown = f'<span class="verdict {cell}">{cell}</span>' if column == "verdict" else escape(cell)
                row_cells.append(f"<td{right if numeric else ''}>{shown}</td>")
            rows.append(f"<tr>{''.join(row_cells)}</tr>")
        head = f"<thead><tr>{''.join(names)}</tr></thead>"
        return f'<table class="result">{head}<tbody>\n' + "\n".join(rows) + "\n</tbody></table>"


def _is_number(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, Number) and not isinstance(value, bool))


def table(data: pd.DataFrame, digits: int = 3) -> Table:
    """A result ready to be shown and compared."""
    return Table(data, digits)


def glue(values: Mapping[str, Any], digits: int = 3) -> None:
    """Make named results available to the prose of a page (MyST-NB's glue), formatted by :func:`number`."""
    from myst_nb import glue as stick

    for name, value in values.items():
        stick(name, number(value, digits), display=False)
