"""nbval's comparison of stored outputs with computed ones, applied to an execution that has happened already.

nbval itself would run every chapter a second time. Its rules are used as they are: what its tags and comments switch
off, how it joins streams, how it sanitises, and its strict equality. Pictures and stderr are never compared.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nbval.plugin import (
    IPyNbCell,
    coalesce_streams,
    find_comment_markers,
    find_metadata_tags,
    get_sanitize_patterns,
    nocolors,
)

from v41lib import notebook

SANITIZE = Path(__file__).with_name("sanitize.cfg")
# nbval's own list, then what is different from one machine to the next.
NOT_COMPARED = ("metadata", "traceback", "prompt_number", "output_type", "name", "execution_count")
NOT_COMPARED += ("image/png", "image/jpeg", "stderr")
NOT_COMPARED += ("application/papermill.record/image/png", "application/papermill.record/image/jpeg")  # glued figures


class _Judge:
    """nbval's cell as far as comparing goes: a whole one can only be made by pytest, together with a kernel."""

    compare_outputs = IPyNbCell.compare_outputs
    format_output_compare = IPyNbCell.format_output_compare
    sanitize = IPyNbCell.sanitize

    def __init__(self) -> None:
        patterns = dict(get_sanitize_patterns(SANITIZE.read_text(encoding="utf-8")))
        self.parent = SimpleNamespace(skip_compare=NOT_COMPARED, sanitize_patterns=patterns)
        self.colors = nocolors
        self.config = None
        self.ihook = SimpleNamespace(pytest_assertrepr_compare=lambda **_: [])


def differences(stored: Any, executed: Any) -> list[str]:
    """What an execution has other than the stored notebook, one entry a cell; an unexecuted stored cell is one too."""
    ours, theirs = notebook.code_cells(stored), notebook.code_cells(executed)
    if [cell.source for cell in ours] != [cell.source for cell in theirs]:
        return ["the execution is not of these cells"]
    found = []
    for number, (cell, run) in enumerate(zip(ours, theirs, strict=True), start=1):
        options = dict(find_metadata_tags(cell.metadata)) | dict(find_comment_markers(cell.source))
        if options.get("skip"):
            continue
        if cell.execution_count is None:  # nbval would pass it without a look
            found.append(f"code cell {number} is stored without having been executed: make accept")
            continue
        judge = _Judge()
        same = judge.compare_outputs(coalesce_streams(run.outputs), coalesce_streams(cell.outputs))
        if options.get("check", True) and not same:
            report = "\n".join(str(line) for line in judge.comparison_traceback)
            found.append(f"code cell {number} has other outputs than stored:\n{cell.source}\n{report}")
    return found
