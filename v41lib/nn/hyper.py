"""Manifold-constrained hyper-connections (mHC): R residual streams, mixed once a sublayer.

*Single-pass*: a sublayer reads its input through the ``pre`` that the previous sublayer produced, so the streams are
read once (SPEC 3).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from v41lib.nn.linear import linear


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
    streams, comb = logits.shape[-1], logits.softmax(-1) + eps
    if torch.compiler.is_compiling():  # loops over so few numbers are what a compiler unrolls
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return comb
    comb, few = comb.flatten(1), torch.full((1,), eps, device=logits.device)
    of_row, of_column = _sums(streams, logits.device)
    comb = comb / torch.addmm(few, comb, of_column)
    for _ in range(iterations - 1):
        comb = comb / torch.addmm(few, comb, of_row)
        comb = comb / torch.addmm(few, comb, of_column)
    return comb.unflatten(1, (streams, streams))


@cache
def _sums(streams: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The matrices that put in each place of a flat ``[R*R]`` the sum of its row, and of its column.

    One product with them is faster than a reduction over an axis of four, for one token and for thousands.
    """
    with torch.inference_mode(False):  # they are kept, and a later call may want a gradient
        one, all_ones = torch.eye(streams, device=device), torch.ones(streams, streams, device=device)
        return torch.kron(one, all_ones), torch.kron(all_ones, one)


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
        square = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
        raw = linear(flat, self.fn) * torch.rsqrt(square + self.norm_eps)
        sizes = (streams, streams, streams * streams)
        scale = torch.cat([factor.expand(size) for factor, size in zip(self.scale, sizes, strict=True)])
        pre, post, comb = torch.addcmul(self.base, raw, scale).split(sizes, dim=-1)
        comb = comb.reshape(batch * length, streams, streams)
        return Mix(
            pre=torch.sigmoid(pre) + self.eps,
            post=2 * torch.sigmoid(post),
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
    mixed = post.unsqueeze(-1) * out.float().unsqueeze(-2)
    for stream, weights in zip(x.float().split(1, dim=-2), comb.unbind(-2), strict=True):
        mixed.addcmul_(weights.unsqueeze(-1), stream)  # whole rows of M: matrices this small would run one by one
    return mixed.to(x.dtype)
