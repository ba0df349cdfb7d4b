"""RMSNorm in FP32."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight (SPEC 3).

    The result has the input's dtype. The arithmetic is FP32 and the weight multiplies before the cast
    back: the released epsilon, 1e-20, does not exist in FP16.
    """

    def __init__(self, width: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))

    def forward(self, x: Float[Tensor, "... M"]) -> Float[Tensor, "... M"]:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)
