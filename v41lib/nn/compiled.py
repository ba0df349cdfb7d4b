"""Optional: a layer's token-wise steps as compiled code.

Decoding one token takes thousands of small tensor operations, and on a CPU their number is what it costs. Compiled, a
layer is five calls. Everything that depends on a cache's length stays outside, and one graph serves all layers.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_active: ContextVar[bool] = ContextVar("compiled_steps", default=False)


class CompilerError(RuntimeError):
    """Compiled steps were asked for where they cannot be built; the message names what is missing."""


def check_compiler(device: torch.device) -> None:
    """Raise :class:`CompilerError` unless steps can be compiled for ``device``."""
    if device.type != "cpu":
        raise CompilerError(f"compiled=True on {device}: steps are compiled for a CPU only; leave it out")
    name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if shutil.which(name.split()[0]) is None:
        raise CompilerError(
            f"compiled=True needs a C++ compiler, and there is no {name!r}: install one, name yours in CXX, or leave "
            "compiled out; the results are the same"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise CompilerError(f"compiled=True needs Python's headers, and {headers} has no Python.h: install python3-dev")


def token_wise(step: Callable[P, T]) -> Callable[P, T]:
    """Mark a method that treats every token by itself: within :func:`compiled_steps` it runs as compiled code."""

    @wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if _active.get() and not torch.compiler.is_compiling():
            return _compiled(step)(*args, **kwargs)
        return step(*args, **kwargs)

    return run


@contextmanager
def compiled_steps(active: bool = True) -> Iterator[None]:
    """Run token-wise steps compiled, or plain. They are compiled at their first call."""
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


@cache
def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(step, fullgraph=True, options={"guard_filter_fn": _what_may_change})


def _what_may_change(guards: Sequence[Any]) -> list[bool]:
    """What is checked in each call: shapes, grad mode and a module's numbers. That code did not change is not."""
    kinds = ("TENSOR_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "NONE_MATCH", "GRAD_MODE", "GLOBAL_STATE", "SHAPE_ENV")
    return [guard.guard_type in kinds and not guard.is_global for guard in guards]
