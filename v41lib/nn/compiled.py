"""Optional: the token-wise steps of a layer as compiled code, for decode, which is otherwise bound by calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P, T = ParamSpec("P"), TypeVar("T")

_active: ContextVar[bool] = ContextVar("compiled_steps", default=False)


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
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


@cache
def _compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(step, fullgraph=True, options={"guard_filter_fn": _what_may_change})


def _what_may_change(guards: Sequence[Any]) -> list[bool]:
    """Of what a compiler would check in each call: shapes, grad mode and a module's numbers, not the library itself."""
    kinds = ("TENSOR_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "NONE_MATCH", "GRAD_MODE", "SHAPE_ENV")
    return [guard.guard_type in kinds and not guard.is_global for guard in guards]
