"""Compare two traces or two checkpoints, and name the first tensor in which they part.

A trace is the dictionary that ``Model.trace`` returns, or its ``.npz`` file; the golden fixtures' traces are such
files. Layers are compared in order, and within a layer the tensors in the order in which they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from v41lib.checkpoint import Reader

# In order of computation inside a layer.
STAGES = (
    "attn_in",
    "main",
    "keys",
    "window",
    "scored",
    "topk",
    "cand",
    "attn_out",
    "ffn_in",
    "route",
    "ffn_out",
    "streams",
)
SETS = ("topk", "route")  # compared as sets: order carries no meaning, nor does the number of absent (-1) slots


@dataclass(frozen=True)
class Difference:
    """One tensor that differs: its name, what differs, and the largest absolute difference (None when not a number)."""

    name: str
    what: str
    largest: float | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


@dataclass(frozen=True)
class Comparison:
    """What two traces or checkpoints share: names compared, differences in order, names on one side only."""

    compared: tuple[str, ...]
    differences: tuple[Difference, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def first(self) -> Difference | None:
        return self.differences[0] if self.differences else None


def save_trace(trace: Mapping[str, Tensor], path: str | Path) -> None:
    """Write a trace as a compressed ``.npz``, under exactly this name; BF16 is written as FP32, which holds it."""
    with open(path, "wb") as file:
        np.savez_compressed(file, **{name: _array(value) for name, value in trace.items()})  # type: ignore[arg-type]


def load_trace(path: str | Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read a trace. Raises ``ValueError`` naming a file that is not a readable ``.npz``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, numpy and zlib each have their own
        raise ValueError(f"{path}: not a readable .npz trace ({error})") from error


def order_of(name: str) -> tuple[int, int, str]:
    """Sort key: embedding first, then layer by layer in order of computation, then the rest."""
    parts = name.split(".")
    if parts[0] == "embed":
        return (-1, 0, name)
    if parts[0] == "layers" and len(parts) > 2 and parts[1].isdigit():
        return (int(parts[1]), 0, name)
    if len(parts) == 2 and parts[1].isdigit():
        stage = STAGES.index(parts[0]) if parts[0] in STAGES else len(STAGES)
        return (int(parts[1]), stage, name)
    return (1 << 30, 0, name)


def diff_traces(a: Mapping[str, Any], b: Mapping[str, Any], atol: float = 1e-4) -> Comparison:
    """Compare two traces, floats to ``atol``, ``topk`` and ``route`` as sets, everything else exactly."""
    common = sorted(set(a) & set(b), key=order_of)
    differences = [found for name in common if (found := _differ(name, _array(a[name]), _array(b[name]), atol))]
    return Comparison(
        tuple(common),
        tuple(differences),
        tuple(sorted(set(a) - set(b), key=order_of)),
        tuple(sorted(set(b) - set(a), key=order_of)),
    )


def diff_checkpoints(a: str | Path, b: str | Path, atol: float = 0.0) -> Comparison:
    """Compare two checkpoint folders tensor by tensor, reading one tensor of each at a time.

    Weights in the released formats are compared by their values, with each other and with plain ones.
    """
    with ExitStack() as stack:
        left, right = (Reader(Path(folder), stack) for folder in (a, b))
        ours, theirs = left.weights(), right.weights()
        common = sorted(ours & theirs, key=order_of)
        differences = [
            found
            for name in common
            if (found := _differ(name, _array(left.read(name)), _array(right.read(name)), atol))
        ]
    only = (tuple(sorted(names, key=order_of)) for names in (ours - theirs, theirs - ours))
    return Comparison(tuple(common), tuple(differences), *only)


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.asarray(value)


def _differ(name: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], atol: float) -> Difference | None:
    kind = name.split(".")[0]
    if kind in SETS and a.ndim and b.ndim and a.shape[:-1] == b.shape[:-1]:
        a, b = (np.sort(x, -1)[..., ::-1] for x in (a, b))  # absent slots last
        width = max(a.shape[-1], b.shape[-1])
        a, b = (np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])], constant_values=-1) for x in (a, b))
    if a.shape != b.shape:
        return Difference(name, f"shapes {list(a.shape)} and {list(b.shape)}")
    if kind == "cand":  # only what is visible counts, and every implementation marks the rest as it likes
        ratio = max(a.shape[-2] // max(a.shape[-1], 1), 1)
        seen = (np.arange(a.shape[-2]) + 1) // ratio
        visible = np.arange(a.shape[-1]) < seen[:, None]
        a, b = a.astype(bool) & visible, b.astype(bool) & visible
    if np.issubdtype(a.dtype, np.floating) and np.issubdtype(b.dtype, np.floating):
        with np.errstate(invalid="ignore"):  # infinities cancel to NaN, and are compared below
            gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
        same_nonfinite = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same_nonfinite, 0.0, gap)
        largest = float(gap.max(initial=0.0)) if not np.isnan(gap).any() else float("nan")
        if largest <= atol:
            return None
        where = tuple(int(i) for i in np.unravel_index(int(np.argmax(np.nan_to_num(gap, nan=np.inf))), gap.shape))
        return Difference(name, f"largest difference {largest:.3g} at {list(where)}, allowed {atol:g}", largest)
    if np.array_equal(a, b):
        return None
    unequal = np.atleast_1d(a != b)
    rows = unequal.reshape(-1, unequal.shape[-1]).any(axis=-1)
    return Difference(name, f"{rows.sum()} of {rows.size} rows differ" + (" as sets" if kind in SETS else ""))
