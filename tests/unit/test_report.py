"""Numbers and tables as pages show them."""

from __future__ import annotations

import pandas as pd
import pytest

from v41lib import report


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (763205315794, "763,205,315,794"),
        (890.0, "890"),
        (0.09517, "0.0952"),
        (3514.25, "3,514"),
        (True, "yes"),
        (None, ""),
        (float("nan"), ""),
        (pd.NA, ""),
        ("text", "text"),
        (999.6, "1,000"),
        (-1234567.8, "-1,234,568"),
    ],
)
def test_number(value: object, shown: str) -> None:
    assert report.number(value) == shown


def test_a_table_aligns_numbers_escapes_text_and_marks_verdicts() -> None:
    data = pd.DataFrame({"n": [1000, 2], "what": ["a<b", "c"], "verdict": ["reproduced", "open"]})
    html = report.table(data)._repr_html_()
    assert '<td class="n">1,000</td>' in html
    assert "<td>a&lt;b</td>" in html
    assert '<span class="verdict reproduced">reproduced</span>' in html
    assert "1,000" in repr(report.table(data))


def test_a_named_index_is_the_first_column() -> None:
    html = report.table(pd.DataFrame({"n": [1]}, index=pd.Index(["x"], name="part")))._repr_html_()
    assert "<thead><tr><th>part</th>" in html
    assert "<tr><th>x</th>" in html


def test_a_column_with_gaps_is_still_numeric() -> None:
    data = pd.DataFrame({"n": [1, None]}).astype("Int64")
    assert '<td class="n"></td>' in report.table(data)._repr_html_()
