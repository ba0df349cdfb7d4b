"""Manifold-constrained hyper-connections (mHC): R residual streams, mixed once a sublayer.

*Single-pass*: a sublayer reads its input through the ``pre`` that the previous sublayer produced, so the streams are
read once (SPEC 3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class Mix(NamedTuple):
    """The coefficients that a site produces, FP32. ``comb`` is indexed by input stream, then output stream."""

    pre: Float[Tensor, "B S R"]
    post: Float[Tensor, "B S R"]
    comb: Float[Tensor, "B S R R"]


def sinkhorn(logits: Float[Tensor, "N R R"], iterations: int, eps: float) -> Float[Tensor, "N R R"]:
    """Push ``logits`` (input stream, output stream) towards doubly stochastic matrices (SPEC 3).

    Softmax over the output axis, one column normalisation, then ``iterations - 1`` times (row, column). Columns are
    sums over the input axis; they come last, so they sum to one to rounding, the rows only nearly.
    """
    comb = logits.softmax(-1) + eps
    comb = comb.permute(1, 2, 0).contiguous()  # tokens last: every sum below adds whole rows of memory
    comb = comb / (comb.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        comb = comb / (comb.sum(0, keepdim=True) + eps)
    return comb.permute(2, 0, 1)


class HyperConnection(nn.Module):
    """The site before one sublayer: from the streams to the coefficients of its mix (SPEC 3).

    All parameters and arithmetic are FP32. ``fn [R(R+2), R*M]`` holds R rows for pre, R for post, R*R for comb.
    """

    def __init__(self, streams: int, width: int, iterations: int, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.streams, self.iterations, self.eps, self.norm_eps = streams, iterations, eps, norm_eps
        rows = streams * (streams + 2)
        self.fn = nn.Parameter(torch.empty(rows, streams * width, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(rows, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def forward(self, x: Float[Tensor, "B S R M"]) -> Mix:
        batch, length, streams, _ = x.shape
        flat = x.flatten(2).float()
        # The norm has no weight, so its factor may follow the projection: one pass over the streams instead of two.
        raw = F.linear(flat, self.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        pre, post, comb = raw.split((streams, streams, streams * streams), dim=-1)
        pre_base, post_base, comb_base = self.base.split((streams, streams, streams * streams))
        comb = (comb * self.scale[2] + comb_base).reshape(batch * length, streams, streams)
        return Mix(
            pre=torch.sigmoid(pre * self.scale[0] + pre_base) + self.eps,
            post=2 * torch.sigmoid(post * self.scale[1] + post_base),
            comb=sinkhorn(comb, self.iterations, self.eps).reshape(batch, length, streams, streams),
        )


def collapse(x: Float[Tensor, "B S R M"], pre: Float[Tensor, "B S R"]) -> Float[Tensor, "B S M"]:
    """A sublayer's input: the streams weighted by the carried ``pre`` and summed."""
    return (pre.unsqueeze(-2) @ x.float()).squeeze(-2).to(x.dtype)


def expand(
    x: Float[Tensor, "B S R M"],
    out: Float[Tensor, "B S M"],
    post: Float[Tensor, "B S R"],
    comb: Float[Tensor, "B S R R"],
) -> Float[Tensor, "B S R M"]:
    """The streams after a sublayer: its ``out`` spread by ``post``, plus the old streams mixed by ``comb``."""
    mixed = comb.transpose(-1, -2) @ x.float()
    return (mixed + post.unsqueeze(-1) * out.float().unsqueeze(-2)).to(x.dtype)
