"""The three number formats of the cache: as values that survive a round trip, and as packed bytes (SPEC 4.1).

A block is a run of consecutive channels that shares a scale; an incomplete last block is padded with zeros. All
arithmetic is FP32. Rounding and packing share one step, so they cannot disagree. The gradient of a round trip passes
straight through, because the release rounds in training too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; bit 3 is the sign


@dataclass(frozen=True)
class Format:
    """A block format: what an element is, how many share a scale, what a scale is, and the smallest amax it serves."""

    element: Literal["e2m1", "e4m3"]
    block: int
    scale: Literal["e8m0", "e4m3"]
    smallest: float

    @property
    def largest_element(self) -> float:
        return E2M1_MAX if self.element == "e2m1" else E4M3_MAX

    def row_bytes(self, width: int) -> int:
        """The packed bytes of a row of ``width`` channels: elements, then one scale byte a block."""
        elements = -(-width // 2) if self.element == "e2m1" else width
        return elements + -(-width // self.block)


FP8 = Format("e4m3", 32, "e8m0", 1e-4)
MXFP4 = Format("e2m1", 32, "e8m0", E2M1_MAX * 2.0**-126)
FP4 = Format("e2m1", 16, "e4m3", E2M1_MAX * 2.0**-9)
FORMATS = {"fp8": FP8, "mxfp4": MXFP4, "fp4": FP4}


def power_of_two_above(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``2^ceil(log2 x)`` for positive normal FP32, from the exponent bits: a floating log misses exact powers."""
    bits = x.float().view(torch.int32) + 0x7FFFFF  # any mantissa bit carries into the exponent
    return (bits & 0x7F800000).view(torch.float32)


def round_e4m3(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The nearest FP8 E4M3 value, ties to even, clamped to +-448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_e2m1(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with x's sign, ties to the even code, clamped to +-6."""
    size = x.abs()
    # The grid is uniform below 2 (step .5), from 2 to 4 (step 1) and above (step 2); torch.round breaks ties to the
    # even multiple of the step, which is the even code.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((x / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)


def block_scale(amax: Float[Tensor, "..."], fmt: Format) -> Float[Tensor, "..."]:
    """The scale of a block whose largest magnitude is ``amax``, as the format can store it.

    A power of two is rounded up, so that the block fits (the OCP document rounds down); an E4M3 scale to nearest.
    """
    wanted = amax.clamp_min(fmt.smallest) / fmt.largest_element
    return power_of_two_above(wanted) if fmt.scale == "e8m0" else round_e4m3(wanted)


def quantise(
    x: Float[Tensor, "... D"], fmt: Format
) -> tuple[Float[Tensor, "... blocks block"], Float[Tensor, "... blocks 1"]]:
    """Rounded elements and scales, whose product is the value that is kept; the last block is padded with zeros."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % fmt.block)).unflatten(-1, (-1, fmt.block))
    scale = block_scale(blocks.abs().amax(-1, keepdim=True), fmt)
    rounded = round_e2m1(blocks / scale) if fmt.element == "e2m1" else round_e4m3(blocks / scale)
    return rounded, scale


def round_trip(x: Float[Tensor, "... D"], fmt: Format) -> Float[Tensor, "... D"]:
    """``x`` after being stored in ``fmt`` and read back, in its own dtype."""
    elements, scale = quantise(x, fmt)
    return (elements * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def fp8_round_trip(x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    """Window KV: E4M3 with one power-of-two scale for 32 channels."""
    return round_trip(x, FP8)


def mxfp4_round_trip(x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    """Index queries and keys: E2M1 with one power-of-two scale for 32 channels."""
    return round_trip(x, MXFP4)


def fp4_round_trip(x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
    """Main KV: E2M1 with one E4M3 scale for 16 channels and no global scale."""
    return round_trip(x, FP4)


class _StraightThrough(torch.autograd.Function):
    """Apply a rounding forward and nothing backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, name: str) -> Tensor:
        return round_trip(x, FORMATS[name])

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Float[Tensor, "... D"], name: str) -> Float[Tensor, "... D"]:
    """``x`` after a round trip through ``FORMATS[name]``, with the identity as its gradient."""
    if x.requires_grad:
        rounded: Tensor = _StraightThrough.apply(x, name)
        return rounded
    return round_trip(x, FORMATS[name])


@dataclass(frozen=True)
class Packed:
    """Rows as a cache stores them: element bytes (two E2M1 codes a byte, the even channel low) and one byte a scale."""

    fmt: Format
    width: int
    elements: UInt8[Tensor, "... bytes"]
    scales: UInt8[Tensor, "... blocks"]

    @property
    def shape(self) -> torch.Size:
        """The shape of the values."""
        return torch.Size((*self.elements.shape[:-1], self.width))

    def __getitem__(self, index: Any) -> Packed:
        """Some of the rows, still packed; ``index`` must leave the channels alone."""
        return Packed(self.fmt, self.width, self.elements[index], self.scales[index])

    @property
    def nbytes(self) -> int:
        """The bytes of the storage behind both tensors, as allocated."""
        return sum(t.untyped_storage().nbytes() for t in (self.elements, self.scales))


def pack(x: Float[Tensor, "... D"], fmt: Format) -> Packed:
    """``x`` in packed bytes; :func:`unpack` gives exactly what :func:`round_trip` keeps."""
    elements, scale = quantise(x, fmt)
    elements = elements.flatten(-2)[..., : x.shape[-1]]
    return Packed(fmt, x.shape[-1], encode_elements(elements, fmt), encode_scales(scale.squeeze(-1), fmt))


def unpack(rows: Packed, dtype: torch.dtype = torch.float32) -> Float[Tensor, "... D"]:
    """The values of packed rows. Raises ``ValueError`` when elements, scales and width do not belong together."""
    blocks = -(-rows.width // rows.fmt.block)
    if rows.scales.shape[-1] != blocks or rows.elements.shape[-1] + blocks != rows.fmt.row_bytes(rows.width):
        raise ValueError(
            f"{rows.elements.shape[-1]} element bytes and {rows.scales.shape[-1]} scales: "
            f"a row of {rows.width} channels has {rows.fmt.row_bytes(rows.width) - blocks} and {blocks}"
        )
    elements = decode_elements(rows.elements, rows.fmt, rows.width)
    scales = decode_scales(rows.scales, rows.fmt).repeat_interleave(rows.fmt.block, dim=-1)[..., : rows.width]
    return (elements * scales).to(dtype)


def values(rows: Tensor | Packed) -> Tensor:
    """Rows as values, whichever way they are kept."""
    return unpack(rows) if isinstance(rows, Packed) else rows


def encode_elements(values: Float[Tensor, "... D"], fmt: Format) -> UInt8[Tensor, "... bytes"]:
    """Representable values as bytes: E4M3 one each, E2M1 two to a byte with the even channel in the low nibble."""
    if fmt.element == "e4m3":
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    boundaries = torch.tensor(E2M1_GRID, device=values.device)
    codes = torch.bucketize(values.abs().contiguous(), boundaries).to(torch.uint8)
    codes = codes | (torch.signbit(values).to(torch.uint8) << 3)
    codes = F.pad(codes, (0, values.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_elements(elements: UInt8[Tensor, "... bytes"], fmt: Format, width: int) -> Float[Tensor, "... D"]:
    """The ``width`` values behind element bytes."""
    if fmt.element == "e4m3":
        return elements.view(torch.float8_e4m3fn).float()
    codes = torch.stack((elements & 15, elements >> 4), dim=-1).flatten(-2)[..., :width]
    grid = torch.tensor((*E2M1_GRID, *(-x for x in E2M1_GRID)), device=elements.device)
    return grid[codes.int()]


def encode_scales(scales: Float[Tensor, "... blocks"], fmt: Format) -> UInt8[Tensor, "... blocks"]:
    """Representable scales as bytes: the exponent of a power of two (E8M0), or E4M3."""
    kind = torch.float8_e8m0fnu if fmt.scale == "e8m0" else torch.float8_e4m3fn
    return scales.contiguous().to(kind).view(torch.uint8)


def decode_scales(scales: UInt8[Tensor, "... blocks"], fmt: Format) -> Float[Tensor, "... blocks"]:
    """The scales behind scale bytes."""
    kind = torch.float8_e8m0fnu if fmt.scale == "e8m0" else torch.float8_e4m3fn
    return scales.view(kind).float()
