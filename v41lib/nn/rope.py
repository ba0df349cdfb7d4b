"""Rotary positions: adjacent channel pairs, on the last channels of a head, with YaRN frequencies where asked."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from v41lib.config import TextConfig, YarnScaling


class Rotation(NamedTuple):
    """Cosines and sines of the angles at some positions, FP32."""

    cos: Float[Tensor, "... pairs"]
    sin: Float[Tensor, "... pairs"]


@cache
def frequencies(
    width: int, theta: float, yarn: YarnScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Radians a position for each of the ``width/2`` channel pairs, FP32 (SPEC 4; YaRN, Peng et al. 2023).

    YaRN divides the slow pairs by ``factor``, leaves the fast ones, and blends linearly in between. There is no
    attention-scale factor.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    plain = 1.0 / theta**exponents
    if yarn is None:
        return plain

    def pair_that_turns(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        return width * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float32, device=device)
    slow = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - slow) + plain / yarn.factor * slow


def layer_frequencies(text: TextConfig, ratio: int, device: torch.device | None = None) -> Tensor:
    """The frequencies of one layer: its window and its compressed entries share them (SPEC 4).

    Local layers (ratio 0) use ``rope_theta`` without YaRN, all others ``compress_rope_theta`` with it.
    """
    if ratio == 0:
        return frequencies(text.qk_rope_head_dim, text.rope_theta, device=device)
    return frequencies(text.qk_rope_head_dim, text.compress_rope_theta, text.rope_scaling, device=device)


def rotation(positions: Int[Tensor, ...], freqs: Float[Tensor, " pairs"]) -> Rotation:
    """The rotation at integer positions, its angles computed in FP32 as the release does."""
    angles = positions.float().unsqueeze(-1) * freqs
    return Rotation(angles.cos(), angles.sin())


@lru_cache(maxsize=4)
def rotation_over(positions: range, freqs: Tensor) -> Rotation:
    """:func:`rotation` at consecutive positions, computed once for all the layers of a step."""
    with torch.inference_mode(False):  # it is kept, and a later call may want a gradient
        return rotation(torch.arange(positions.start, positions.stop, device=freqs.device), freqs)


def rotate(x: Float[Tensor, "... D"], by: Rotation, inverse: bool = False) -> Float[Tensor, "... D"]:
    """Rotate the last channels of ``x`` in adjacent pairs; ``inverse`` rotates back.

    ``by`` must broadcast against ``x``'s leading axes. Norms are kept; the result has ``x``'s dtype.
    """
    width = 2 * by.cos.shape[-1]
    plain, pairs = x[..., :-width], x[..., -width:].float().unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    sin = -by.sin if inverse else by.sin
    turned = torch.stack((even * by.cos - odd * sin, even * sin + odd * by.cos), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), dim=-1)
