"""The one linear map of the model: a matrix ``[outputs, inputs]`` without bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


def linear(x: Float[Tensor, "... I"], weight: Float[Tensor, "O I"]) -> Float[Tensor, "... O"]:
    """``x @ weight.T``, at the speed of memory also where ``x`` is a single row, as in decode on a CPU.

    A BLAS reads a matrix for one vector with one thread and at half its speed; as a batch of two half matrices the
    same product is threaded and streams.
    """
    single = x.numel() == x.shape[-1]
    if single and torch.compiler.is_compiling():  # a loop that a compiler fuses with what stands around it
        return (x.float().unsqueeze(-2) * weight.float()).sum(-1).to(x.dtype)
    halved = single and weight.shape[0] % 2 == 0 and weight.device.type == "cpu" and weight.dtype == torch.float32
    if halved and not torch.is_grad_enabled():
        halves = weight.unflatten(0, (2, -1))
        return torch.bmm(halves, x.reshape(1, -1).T.expand(2, -1, 1)).reshape(*x.shape[:-1], -1)
    return F.linear(x, weight)


class Linear(nn.Linear):
    """:func:`linear` as a layer."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype)

    def forward(self, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        return linear(x, self.weight)
