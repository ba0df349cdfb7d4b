"""Each rule of the guard, and the comparison, on a chapter that breaks it. The good chapter passes all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks import compare, guard
from v41lib import notebook
from v41lib.experiments.base import BaseParams

pytestmark = pytest.mark.notebook


class Params(BaseParams):
    layers: int = 40
    lengths: tuple[int, ...] = (1, 2)


@pytest.fixture
def good() -> Any:
    cells = [
        new_markdown_cell("# A chapter"),
        new_code_cell(
            'profile = "ci"\nlayers = 40\nlengths = [1, 2]', execution_count=1, metadata={"tags": ["parameters"]}
        ),
        new_code_cell("print(layers)", execution_count=2, outputs=[new_output("stream", name="stdout", text="40\n")]),
        new_code_cell(
            "layers / 3",
            execution_count=3,
            outputs=[new_output("execute_result", data={"text/plain": "13.3"}, execution_count=3)],
        ),
    ]
    return notebook.normalise(new_notebook(cells=cells))


def picture(data: str) -> Any:
    return new_output("display_data", data={"image/png": data, "text/plain": "<Figure>"})


BREAKS: list[tuple[str, Callable[[Any], object], str]] = [
    ("no count", lambda nb: nb.cells[2].update(execution_count=None), "execution counts are [1, None, 3]"),
    ("out of order", lambda nb: nb.cells[2].update(execution_count=5), "execution counts are [1, 5, 3]"),
    ("nothing runs", lambda nb: nb.update(cells=nb.cells[:1]), "it executes nothing"),
    (
        "error",
        lambda nb: nb.cells[2].outputs.append(new_output("error", ename="ValueError", evalue="", traceback=[])),
        "code cell 2 stores an error: ValueError",
    ),
    (
        "stderr",
        lambda nb: nb.cells[2].outputs.append(new_output("stream", name="stderr", text="Warning: x\n")),
        "code cell 2 stores text from stderr: Warning: x",
    ),
    ("kernel", lambda nb: nb.metadata.kernelspec.update(name="my-env"), "its kernel is my-env"),
    (
        "large output",
        lambda nb: nb.cells[2].outputs.append(picture("A" * (guard.MAX_OUTPUT + 1))),
        "code cell 2 has an output of",
    ),
    (
        "large notebook",
        lambda nb: nb.cells[0].update(source="A" * (guard.MAX_NOTEBOOK + 1)),
        "more than 3,000,000",
    ),
    ("path in source", lambda nb: nb.cells[2].update(source="open('/home/me/x')"), "a path of a machine: /home/me"),
    (
        "path in output",
        lambda nb: nb.cells[2].outputs[0].update(text="saved to /tmp/out.png"),
        "a path of a machine: /tmp/out.png",
    ),
    ("path in prose", lambda nb: nb.cells[0].update(source="See C:\\Users\\me."), "a path of a machine: C:\\Users"),
    ("papermill", lambda nb: nb.metadata.update(papermill={}), "papermill's metadata is in it"),
    ("injected", lambda nb: nb.cells[2].metadata.update(tags=["injected-parameters"]), "cell 3 is one that papermill"),
    ("timestamps", lambda nb: nb.cells[2].metadata.update(execution={}), "cell 3 has metadata of a run: execution"),
    ("long cell", lambda nb: nb.cells[2].update(source="x = 1\n" * 21), "code cell 2 has 21 lines"),
    ("function", lambda nb: nb.cells[2].update(source="def f():\n    pass"), "code cell 2 defines f"),
    ("class", lambda nb: nb.cells[2].update(source="if 1:\n    class A:\n        pass"), "code cell 2 defines A"),
    ("magic", lambda nb: nb.cells[2].update(source="%time 1"), "code cell 2 is not plain Python"),
    ("empty", lambda nb: nb.cells[2].update(source=""), "code cell 2 is empty"),
    ("half a skip", lambda nb: nb.cells[3].metadata.update(tags=["skip-execution"]), "tagged skip-execution alone"),
    ("no parameters cell", lambda nb: nb.cells[1].metadata.pop("tags"), "no cell is tagged `parameters`"),
    ("missing parameter", lambda nb: nb.cells[1].update(source='profile = "ci"\nlayers = 40'), "not assign lengths"),
    ("unknown parameter", lambda nb: nb.cells[1].update(source=nb.cells[1].source + "\nx = 1"), "assigns x, which"),
    (
        "other default",
        lambda nb: nb.cells[1].update(source=nb.cells[1].source.replace("40", "41")),
        "layers = 41, the default is 40",
    ),
    (
        "other type",
        lambda nb: nb.cells[1].update(source=nb.cells[1].source.replace("40", "40.0")),
        "layers = 40.0, the default is 40",
    ),
    ("computed", lambda nb: nb.cells[1].update(source="layers = 4 * 10"), "may only assign literals, not: layers"),
    ("twice", lambda nb: nb.cells[2].metadata.update(tags=["parameters"]), "more than one cell is tagged"),
]


def test_a_good_chapter_passes(good: Any) -> None:
    assert guard.problems(good, Params) == []


@pytest.mark.parametrize(("name", "spoil", "expected"), BREAKS, ids=[name for name, _, _ in BREAKS])
def test_guard_trips(good: Any, name: str, spoil: Callable[[Any], object], expected: str) -> None:
    spoil(good)
    found = guard.problems(good, Params)
    assert any(expected in problem for problem in found), found


def test_every_rule_is_tripped_by_some_case(good: Any) -> None:
    tripped = set()
    for _, spoil, _ in BREAKS:
        bad = copy.deepcopy(good)
        spoil(bad)
        tripped |= {rule.__name__ for rule in guard.RULES if list(rule(bad))}
    assert tripped == {rule.__name__ for rule in guard.RULES}


def test_skipped_cells_need_no_count(good: Any) -> None:
    good.cells[3].update(execution_count=None, outputs=[])
    good.cells[3].metadata.tags = ["skip-execution", "nbval-skip"]
    assert guard.problems(good, Params) == []


def test_a_web_address_is_no_path(good: Any) -> None:
    good.cells[0].source = "https://example.org/home/page and data/configs/tiny.json and and/or/tmp"
    assert guard.problems(good, Params) == []


# --- the comparison ---


def test_equal_outputs_pass(good: Any) -> None:
    assert compare.differences(good, copy.deepcopy(good)) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda nb: nb.cells[2].outputs[0].update(text="41\n"),
        lambda nb: nb.cells[3].outputs[0].data.update({"text/plain": "13.4"}),
        lambda nb: nb.cells[3].outputs[0].data.update({"text/html": "13.3"}),
        lambda nb: nb.cells[2].update(outputs=[]),
        lambda nb: nb.cells[2].outputs.append(new_output("stream", name="stdout", text="more\n")),
        lambda nb: nb.cells[2].update(source="print(41)"),
        lambda nb: nb.cells.pop(),
    ],
    ids=["stdout", "result", "new kind", "no output", "more output", "other source", "cell gone"],
)
def test_other_outputs_fail(good: Any, spoil: Callable[[Any], object]) -> None:
    stored = copy.deepcopy(good)
    spoil(stored)
    assert compare.differences(stored, good)


def test_the_report_names_cell_and_both_values(good: Any) -> None:
    stored = copy.deepcopy(good)
    stored.cells[3].outputs[0].data["text/plain"] = "13.4"
    (report,) = compare.differences(stored, good)
    assert "code cell 3" in report and "13.4" in report and "13.3" in report


def test_a_stored_cell_without_a_count_fails(good: Any) -> None:
    stored = copy.deepcopy(good)
    stored.cells[2].execution_count = None
    assert "without having been executed" in compare.differences(stored, good)[0]


@pytest.mark.parametrize("tag", ["nbval-ignore-output", "nbval-skip"])
def test_tags_of_nbval_are_honoured(good: Any, tag: str) -> None:
    stored = copy.deepcopy(good)
    stored.cells[2].metadata.tags = [tag]
    stored.cells[2].outputs[0].text = "41\n"
    assert compare.differences(stored, good) == []


def test_pictures_stderr_and_addresses_are_not_compared(good: Any) -> None:
    stored = copy.deepcopy(good)
    stored.cells[2].outputs = [*stored.cells[2].outputs, picture("AAAA")]
    good.cells[2].outputs += [picture("BBBB"), new_output("stream", name="stderr", text="a warning\n")]
    stored.cells[3].outputs[0].data["text/plain"] = "<object at 0x7f00aa11>"
    good.cells[3].outputs[0].data["text/plain"] = "<object at 0x7f00bb22>"
    assert compare.differences(stored, good) == []


def test_normalise_is_stable_and_removes_traces(good: Any) -> None:
    run = copy.deepcopy(good)
    run.metadata.papermill = {"duration": 1}
    run.metadata.language_info.version = "3.12.0"
    run.cells[2].metadata.update(execution={"iopub.status.busy": "now"}, papermill={"duration": 1}, tags=[])
    run.cells[2].update(execution_count=7)
    run.cells[2].outputs = [new_output("stream", name="stdout", text=part) for part in ("4", "0\n")]
    assert nbformat.writes(notebook.normalise(run)) == nbformat.writes(good)
