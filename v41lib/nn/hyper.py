"""Manifold-constrained hyper-connections (mHC): R residual streams, mixed once a sublayer.

*Single-pass*: a sublayer reads its input through the ``pre`` that the previous sublayer produced, so the streams are
read once (SPEC 3).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from v41lib.nn.linear import linear

MANY = 32  # tokens from which on more calls with less in each are faster


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
    if logits.requires_grad and not torch.compiler.is_compiling():
        balanced: Tensor = _Balance.apply(logits, iterations, eps)
        return balanced
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


class _Balance(torch.autograd.Function):
    """:func:`sinkhorn` with a gradient that keeps the sums of each step alone, not 39 matrices a token.

    Tokens are the last axis: every operation then runs along them, and none along an axis of four.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int, eps: float) -> Tensor:
        logits = logits.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        soft = logits.sub_(logits.amax(1, keepdim=True)).exp_()
        soft.div_(soft.sum(1, keepdim=True))
        comb, sums = soft + eps, []
        for step in range(2 * iterations - 1):  # column, then (row, column) over and over
            sums.append(comb.sum(step % 2, keepdim=True).add_(eps))
            comb.div_(sums[-1])
        ctx.save_for_backward(soft, comb, *sums)
        return comb.permute(2, 0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        soft, last, *sums = ctx.saved_tensors
        comb, grad = last.clone(), grads[0].permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        for step in reversed(range(len(sums))):
            grad.sub_((grad * comb).sum(step % 2, keepdim=True)).div_(sums[step])
            comb.mul_(sums[step])
        grad.sub_((grad * soft).sum(1, keepdim=True)).mul_(soft)
        return grad.permute(2, 0, 1).contiguous(), None, None


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
        raw = project(x.flatten(2).float(), self.fn, self.norm_eps)
        sizes = (streams, streams, streams * streams)
        scale = torch.cat([factor.expand(size) for factor, size in zip(self.scale, sizes, strict=True)])
        pre, post, comb = torch.addcmul(self.base, raw, scale).split(sizes, dim=-1)
        comb = comb.reshape(batch * length, streams, streams)
        return Mix(
            pre=torch.sigmoid(pre) + self.eps,
            post=2 * torch.sigmoid(post),
            comb=sinkhorn(comb, self.iterations, self.eps).reshape(batch, length, streams, streams),
        )


def project(flat: Float[Tensor, "B S RM"], fn: Float[Tensor, "P RM"], eps: float) -> Float[Tensor, "B S P"]:
    """``fn`` applied to normed streams. The norm has no weight, so its factor may follow the projection."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raw: Tensor = _Project.apply(flat, fn, eps)
        return raw
    return linear(flat, fn) * _norm_factor(flat, eps)


def _norm_factor(flat: Tensor, eps: float) -> Tensor:
    square = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
    return torch.rsqrt(square + eps)


class _Project(torch.autograd.Function):
    """:func:`project` with a gradient that passes over the streams once."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, fn: Tensor, eps: float) -> Tensor:
        factor = _norm_factor(flat, eps)
        raw = linear(flat, fn) * factor
        ctx.save_for_backward(flat, fn, factor, raw)
        return raw

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        flat, fn, factor, raw = ctx.saved_tensors
        scaled = grads[0] * factor
        along = (grads[0] * raw).sum(-1, keepdim=True) * factor.square() / flat.shape[-1]
        return (scaled @ fn).addcmul_(flat, along, value=-1), scaled.flatten(0, -2).T @ flat.flatten(0, -2), None


def collapse(x: Float[Tensor, "B S R M"], pre: Float[Tensor, "B S R"]) -> Float[Tensor, "B S M"]:
    """A sublayer's input: the streams weighted by the carried ``pre`` and summed."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        collapsed: Tensor = _Collapse.apply(x, pre)
        return collapsed
    return _collapsed(x, pre)


def _collapsed(x: Tensor, pre: Tensor) -> Tensor:
    if x.shape[:-2].numel() >= MANY and not torch.compiler.is_compiling():
        return _weighted(pre, x).to(x.dtype)
    return (pre.unsqueeze(-2) @ x.float()).squeeze(-2).to(x.dtype)


def _weighted(weights: Tensor, x: Tensor, start: Tensor | None = None) -> Tensor:
    """``start + sum_r weights_r * x_r`` by whole rows of M, which a product of matrices this small does one by one."""
    streams = list(zip(weights.unsqueeze(-2).unbind(-1), x.float().unbind(-2), strict=True))
    if start is None:
        (weight, stream), *streams = streams
        start = weight * stream
    for weight, stream in streams:
        start.addcmul_(weight, stream)
    return start


class _Collapse(torch.autograd.Function):
    """:func:`collapse` with a gradient that spreads by broadcasting: a product of vectors, one a token, is slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pre: Tensor) -> Tensor:
        ctx.save_for_backward(x, pre)
        return _collapsed(x, pre)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, pre = ctx.saved_tensors
        grad = grads[0].float()
        d_pre = (x.float() * grad.unsqueeze(-2)).sum(-1)
        return (pre.unsqueeze(-1) * grad.unsqueeze(-2)).to(x.dtype), d_pre


def expand(
    x: Float[Tensor, "B S R M"],
    out: Float[Tensor, "B S M"],
    post: Float[Tensor, "B S R"],
    comb: Float[Tensor, "B S R R"],
) -> Float[Tensor, "B S R M"]:
    """The streams after a sublayer: its ``out`` spread by ``post``, plus the old streams mixed by ``comb``."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        spread: Tensor = _Expand.apply(x, out, post, comb)
        return spread
    return _expanded(x, out, post, comb)


def _expanded(x: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    if x.shape[:-2].numel() >= MANY and not torch.compiler.is_compiling():
        mixed = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for target in range(x.shape[-2]):
            mixed[..., target, :] = _weighted(comb[..., target], x, post[..., target, None] * out.float())
        return mixed.to(x.dtype)
    mixed = post.unsqueeze(-1) * out.float().unsqueeze(-2)
    for stream, weights in zip(x.float().split(1, dim=-2), comb.unbind(-2), strict=True):
        mixed.addcmul_(weights.unsqueeze(-1), stream)  # whole rows of M: matrices this small would run one by one
    return mixed.to(x.dtype)


class _Expand(torch.autograd.Function):
    """:func:`expand` with its gradient as sums of whole rows: autograd's own passes over axes of four are slow."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        ctx.save_for_backward(x, out, post, comb)
        return _expanded(x, out, post, comb)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, out, post, comb = ctx.saved_tensors
        grad = grads[0].float()
        return (
            torch.stack([_weighted(weights, grad) for weights in comb.unbind(-2)], dim=-2).to(x.dtype),
            _weighted(post, grad).to(out.dtype),
            (grad * out.float().unsqueeze(-2)).sum(-1),
            x.float() @ grad.transpose(-1, -2),
        )
