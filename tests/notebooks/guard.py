"""The rules that every stored chapter obeys. A rule gets a notebook and yields what is wrong with it, one line each."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from v41lib import notebook
from v41lib.experiments.base import BaseParams

MAX_NOTEBOOK = 3_000_000  # bytes; a page has to load on a phone
MAX_OUTPUT = 600_000  # bytes of one output
MAX_LINES = 20  # of one code cell: more is machinery, and belongs to v41lib
ABSOLUTE = re.compile(
    r"(?<![\w./:~-])/(?:home|root|tmp|work|Users|mnt|opt|usr|var|private|content)/[\w.-]+|\b[A-Z]:\\\w+"
)

Rule = Callable[[Any], Iterator[str]]


def executed_in_order(nb: Any) -> Iterator[str]:
    """Counts 1..n. nbval lets a cell without a count pass unseen, so a stripped notebook would be green."""
    live = [cell for cell in notebook.code_cells(nb) if not notebook.tags(cell) & notebook.SKIPPED]
    counts = [cell.execution_count for cell in live]
    if counts != list(range(1, len(live) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(live)}: make accept"
    if not live:
        yield "it executes nothing"


def no_errors(nb: Any) -> Iterator[str]:
    for number, output in _outputs(nb):
        if output.output_type == "error":
            yield f"code cell {number} stores an error: {output.ename}"


def no_stderr(nb: Any) -> Iterator[str]:
    """Warnings and progress bars are not compared, and a reader should not see them."""
    for number, output in _outputs(nb):
        if output.output_type == "stream" and output.name == "stderr":
            yield f"code cell {number} stores text from stderr: {output.text.splitlines()[0][:80]}"


def plain_kernel(nb: Any) -> Iterator[str]:
    name = nb.metadata.get("kernelspec", {}).get("name")
    if name != "python3":
        yield f"its kernel is {name}, not python3"


def small(nb: Any) -> Iterator[str]:
    size = len(json.dumps(nb).encode())
    if size > MAX_NOTEBOOK:
        yield f"it has {size:,} bytes, more than {MAX_NOTEBOOK:,}"
    for number, output in _outputs(nb):
        if (size := len(json.dumps(output).encode())) > MAX_OUTPUT:
            yield f"code cell {number} has an output of {size:,} bytes, more than {MAX_OUTPUT:,}"


def no_absolute_paths(nb: Any) -> Iterator[str]:
    for number, cell in enumerate(nb.cells, start=1):
        texts = [cell.source, *(text for output in cell.get("outputs", []) for text in _texts(output))]
        for found in {match for text in texts for match in ABSOLUTE.findall(text)}:
            yield f"cell {number} names a path of a machine: {found}"


def no_traces_of_runs(nb: Any) -> Iterator[str]:
    """What papermill and front ends leave behind; `make accept` takes it out."""
    if "papermill" in nb.metadata:
        yield "papermill's metadata is in it"
    for number, cell in enumerate(nb.cells, start=1):
        if "injected-parameters" in notebook.tags(cell):
            yield f"cell {number} is one that papermill injected"
        for name in {"papermill", "execution", "collapsed", "scrolled"} & set(cell.metadata):
            yield f"cell {number} has metadata of a run: {name}"


def thin(nb: Any) -> Iterator[str]:
    """A chapter calls the library; it defines nothing."""
    for number, cell in enumerate(notebook.code_cells(nb), start=1):
        lines = len(cell.source.splitlines())
        if not lines:
            yield f"code cell {number} is empty"
        if lines > MAX_LINES:
            yield f"code cell {number} has {lines} lines, more than {MAX_LINES}: move them to v41lib"
        try:
            tree = ast.parse(cell.source)
        except SyntaxError:
            yield f"code cell {number} is not plain Python (magics and shell lines are none)"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield f"code cell {number} defines {node.name}: move it to v41lib"


def skips_in_pairs(nb: Any) -> Iterator[str]:
    """`skip-execution` is papermill's tag and `nbval-skip` is nbval's: one alone is half a skip."""
    for number, cell in enumerate(notebook.code_cells(nb), start=1):
        if len(found := notebook.tags(cell) & notebook.SKIPPED) == 1:
            yield f"code cell {number} is tagged {found.pop()} alone; it takes both of {sorted(notebook.SKIPPED)}"


RULES: list[Rule] = [
    executed_in_order,
    no_errors,
    no_stderr,
    plain_kernel,
    small,
    no_absolute_paths,
    no_traces_of_runs,
    thin,
    skips_in_pairs,
]


def parameters_match(nb: Any, params_class: type[BaseParams]) -> Iterator[str]:
    """The parameters cell assigns exactly the fields of the chapter's ``Params``, with the defaults, which are ci's."""
    fields = params_class().model_dump(mode="json")
    try:
        values = json.loads(json.dumps(notebook.parameter_values(nb)))
    except notebook.NotebookError as error:
        yield str(error)
        return
    if not values and set(fields) == {"profile"}:
        return  # a chapter without an experiment needs no such cell
    if not values:
        yield f"no cell is tagged `{notebook.PARAMETERS}`; Params has {', '.join(fields)}"
        return
    for name in fields.keys() - values.keys():
        yield f"the parameters cell does not assign {name}, a field of Params"
    for name in values.keys() - fields.keys():
        yield f"the parameters cell assigns {name}, which Params does not have"
    for name in fields.keys() & values.keys():
        if type(values[name]) is not type(fields[name]) or values[name] != fields[name]:
            yield f"the parameters cell has {name} = {values[name]!r}, the default is {fields[name]!r}"


def problems(nb: Any, params_class: type[BaseParams]) -> list[str]:
    """Everything that is wrong with a chapter."""
    found = [problem for rule in RULES for problem in rule(nb)]
    return found + list(parameters_match(nb, params_class))


def _outputs(nb: Any) -> Iterator[tuple[int, Any]]:
    for number, cell in enumerate(notebook.code_cells(nb), start=1):
        for output in cell.outputs:
            yield number, output


def _texts(output: Any) -> Iterator[str]:
    """The readable parts of an output; not pictures, whose letters are chance."""
    yield output.get("text", "")
    yield from output.get("traceback", [])
    for kind, content in output.get("data", {}).items():
        if not kind.endswith(("image/png", "image/jpeg")):
            yield content if isinstance(content, str) else json.dumps(content)
