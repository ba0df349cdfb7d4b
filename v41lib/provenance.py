"""What a result depends on: a hash of an experiment's parameters and of the code that it reaches.

Reached code is followed through global names, function by function and class by class, inside v41lib. Comments and
docstrings do not count, so prose may change without a measurement going stale; the shipped configurations do count, and
so do the recorded results that an experiment's module names in ``RECORDED``, as patterns below ``data/``.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import json
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from v41lib.resources import data_path

PACKAGE = __name__.partition(".")[0]


def experiment_hash(experiment: Callable[..., Any], params: BaseModel | Mapping[str, Any]) -> str:
    """Sixteen hex digits that change when the parameters, the reached code or a shipped configuration does."""
    digest = hashlib.sha256()
    plain = params.model_dump(mode="json") if isinstance(params, BaseModel) else dict(params)
    digest.update(json.dumps(plain, sort_keys=True).encode())
    for name, source in sorted(reached_code(experiment).items()):
        digest.update(f"\n{name}\n{source}".encode())
    for path in sorted(data_path("configs").glob("*.json")):
        digest.update(path.name.encode() + path.read_bytes())
    for pattern in getattr(inspect.getmodule(experiment), "RECORDED", ()):
        for path in sorted(path for path in data_path().glob(pattern) if path.is_file()):
            digest.update(path.relative_to(data_path()).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def reached_code(start: Callable[..., Any]) -> dict[str, str]:
    """Every function, class and constant of v41lib that ``start`` reaches: qualified name to normalised source."""
    found: dict[str, str] = {}
    queue: list[Any] = [start]
    while queue:
        item = inspect.unwrap(queue.pop())
        name = f"{item.__module__}.{item.__qualname__}"
        if name in found:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
        found[name] = _dump(_without_docstrings(tree))
        module = inspect.getmodule(item)
        for label, value in _named_in(tree, vars(module) if module else {}):
            if _is_code(value):
                queue.append(value)
            elif label.isupper():
                plain, code = _constant(value)
                queue += code
                if plain is not None:
                    found[f"{name}:{label}"] = plain
    return found


def _constant(value: Any) -> tuple[str | None, list[Any]]:
    """A constant as text, and the code inside it (a table of functions, an instance's class); None for the rest."""
    if _is_code(value):
        return f"{value.__module__}.{value.__qualname__}", [value]
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value), []
    if dataclasses.is_dataclass(value) and _is_code(type(value)):
        plain, code = _constant([getattr(value, field.name) for field in dataclasses.fields(value)])
        return plain, [type(value), *code]
    if isinstance(value, dict):
        value = sorted(value.items(), key=lambda item: repr(item[0]))
    elif isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    elif not isinstance(value, list | tuple):
        return None, []
    parts = [_constant(member) for member in value]
    return str([plain for plain, _ in parts]), [code for _, codes in parts for code in codes]


def _is_code(value: Any) -> bool:
    """A function or class of this package."""
    ours = str(getattr(value, "__module__", "")).startswith(PACKAGE)
    return ours and (isinstance(value, type | types.FunctionType) or hasattr(value, "__wrapped__"))


def _named_in(tree: ast.AST, scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values that a piece of code names, as ``name`` or as ``module.name`` of this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            yield node.id, scope[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            if isinstance(owner, types.ModuleType) and owner.__name__.startswith(PACKAGE) and hasattr(owner, node.attr):
                yield node.attr, getattr(owner, node.attr)


def _dump(node: Any) -> str:
    """A syntax tree as text that is the same for every Python version: what is empty is left out."""
    if isinstance(node, list):
        return f"[{','.join(_dump(member) for member in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(f'{name}={_dump(value)}' for name, value in fields if name != 'kind')})"


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            first = body[0].value
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                node.body = body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree
