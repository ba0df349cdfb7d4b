"""A v41lib model in mlx-lm: the same files, loaded strictly, in FP32 on the CPU backend.

mlx-lm does not round the inputs of linear layers to FP8, so there is nothing of that kind to turn off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

import v41lib
from v41lib import bench

_MISSING = "mlx does not import on this platform (where it can be installed: pip install -r requirements-parity.txt)"
mx = pytest.importorskip("mlx.core", reason=_MISSING, exc_type=ImportError)

# Not importorskip: where mlx imports, an mlx-lm that is absent or too old is a mistake of the set-up, not a reason.
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import deepseek_v41 as other  # noqa: E402


@contextmanager
def one_cpu_thread() -> Iterator[None]:
    """Run both libraries on the CPU. One torch thread: the tensors are small, and results then repeat exactly.

    mlx fuses nothing meanwhile: on a CPU that takes a C++ compiler, and seconds.
    """
    device, threads = mx.default_device(), torch.get_num_threads()
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        mx.enable_compile()
        mx.set_default_device(device)
        torch.set_num_threads(threads)


def to_mlx(x: Tensor) -> mx.array:
    return mx.array(x.detach().contiguous().numpy())


def to_torch(x: mx.array) -> Tensor:
    return torch.from_numpy(np.array(x))


def mlx_model(model: v41lib.Model) -> other.Model:
    """mlx-lm's model with this model's weights, all of them FP32."""
    mirror = bench.mlx_model(model)
    narrow = [name for name, value in tree_flatten(mirror.parameters()) if value.dtype != mx.float32]
    assert not narrow, f"not FP32: {narrow}"
    return mirror


def logits(mirror: other.Model, ids: Tensor) -> Tensor:
    """One full forward pass, ``[B,S] -> [B,S,V]``."""
    return to_torch(mirror(to_mlx(ids)))


def decoded_logits(mirror: other.Model, ids: Tensor, prefix: int) -> Tensor:
    """The logits of every position: a cached prefix in one call, then one call a token."""
    caches = mirror.make_cache()
    parts = [to_torch(mirror(to_mlx(ids[:, :prefix]), caches))]
    for position in range(prefix, ids.shape[1]):
        parts.append(to_torch(mirror(to_mlx(ids[:, position : position + 1]), caches)))
    return torch.cat(parts, dim=1)
