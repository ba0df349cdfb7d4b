"""Numbers and tables as a page shows them: every number in prose is glued from a result, never typed."""

from __future__ import annotations

from collections.abc import Mapping
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
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def billions(value: int) -> str:
    """A count in billions with two decimals."""
    return f"{value / 1e9:.2f} B"


def table(data: pd.DataFrame, digits: int = 3) -> pd.DataFrame:
    """A copy of a result with every cell as text, ready to be shown and compared."""
    return data.astype(object).map(lambda value: number(value, digits))


def glue(values: Mapping[str, Any], digits: int = 3) -> None:
    """Make named results available to the prose of a page (MyST-NB's glue), formatted by :func:`number`."""
    from myst_nb import glue as stick

    for name, value in values.items():
        stick(name, number(value, digits), display=False)
