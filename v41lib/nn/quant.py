"""The three number formats of the cache, as the values that survive a round trip (SPEC 4.1).

A block is a run of consecutive channels that shares a scale; an incomplete last block is padded with zeros. All
arithmetic is FP32. The gradient passes straight through, because the release rounds in training too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def power_of_two_above(x: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """``2^ceil(log2 x)`` for positive normal FP32, from the exponent bits: a floating log misses exact powers."""
    mantissa, exponent = torch.frexp(x.float())  # x = mantissa * 2^exponent, 1/2 <= mantissa < 1
    return torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))


def round_e4m3(x: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """The nearest FP8 E4M3 value, ties to even, clamped to +-448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_e2m1(x: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with x's sign, ties to the even code, clamped to +-6."""
    size = x.abs()
    # The grid is uniform below 2 (step .5), from 2 to 4 (step 1) and above (step 2); torch.round breaks ties to the
    # even multiple of the step, which is the even code.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((x / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """``[..., D] -> [..., ceil(D/block), block]`` FP32, zero-padded."""
    return F.pad(x.float(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))


def _out_of_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., : like.shape[-1]].to(like.dtype)


def fp8_round_trip(x: Float[Tensor, "... D"], block: int = 32) -> Float[Tensor, "... D"]:
    """Window KV: E4M3 with one power-of-two scale a block."""
    blocks = _in_blocks(x, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = power_of_two_above(amax.clamp_min(1e-4) / E4M3_MAX)
    return _out_of_blocks(round_e4m3(blocks / scale) * scale, x)


def mxfp4_round_trip(x: Float[Tensor, "... D"], block: int = 32) -> Float[Tensor, "... D"]:
    """Index queries and keys: E2M1 with one power-of-two scale a block.

    The scale is the smallest power of two under which the block fits (ceil; the OCP document's rule is floor).
    """
    blocks = _in_blocks(x, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = power_of_two_above(amax.clamp_min(E2M1_MAX * 2.0**-126) / E2M1_MAX)
    return _out_of_blocks(round_e2m1(blocks / scale) * scale, x)


def fp4_round_trip(x: Float[Tensor, "... D"], block: int = 16) -> Float[Tensor, "... D"]:
    """Main KV: E2M1 with one E4M3 scale a block and no global scale."""
    blocks = _in_blocks(x, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = round_e4m3(amax.clamp_min(E2M1_MAX * 2.0**-9) / E2M1_MAX)
    return _out_of_blocks(round_e2m1(blocks / scale) * scale, x)


class _StraightThrough(torch.autograd.Function):
    """Apply a rounding forward and nothing backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, name: str) -> Tensor:
        return _ROUND_TRIPS[name](x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


_ROUND_TRIPS = {"fp8": fp8_round_trip, "mxfp4": mxfp4_round_trip, "fp4": fp4_round_trip}


def straight_through(x: Float[Tensor, "... D"], fmt: str) -> Float[Tensor, "... D"]:
    """``x`` after a round trip through ``fmt`` (``fp8``, ``mxfp4`` or ``fp4``), with the identity as its gradient."""
    if x.requires_grad:
        rounded: Tensor = _StraightThrough.apply(x, fmt)
        return rounded
    return _ROUND_TRIPS[fmt](x)
