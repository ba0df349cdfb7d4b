"""The number formats, against tables of their codes (``reference.py`` shares no code with the library)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from tests.unit import reference
from v41lib.nn import quant

ROUND_TRIP = {"fp8": quant.fp8_round_trip, "mxfp4": quant.mxfp4_round_trip, "fp4": quant.fp4_round_trip}
BLOCK = {"fp8": 32, "mxfp4": 32, "fp4": 16}
GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
formats = pytest.mark.parametrize("fmt", ["fp8", "mxfp4", "fp4"])

# Every FP32 that a cache could hold, subnormals, zeros of both signs and numbers on the grid included; beyond 2^120 the
# products overflow and mean nothing.
numbers = st.one_of(
    st.floats(-(2.0**120), 2.0**120, width=32),
    st.floats(-8, 8, width=32),
    st.sampled_from([s * x for x in (*GRID, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 448, 2.0**-126) for s in (1, -1)]),
)
vectors = st.integers(1, 70).flatmap(lambda n: hnp.arrays(np.float32, n, elements=numbers)).map(torch.from_numpy)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@settings(max_examples=150)
@formats
@given(x=vectors)
def test_equals_the_table_bit_for_bit(fmt: str, x: Tensor) -> None:
    assert same_bits(ROUND_TRIP[fmt](x), reference.round_trip(x, fmt))


@settings(max_examples=100)
@formats
@given(x=vectors)
def test_idempotent_bit_for_bit(fmt: str, x: Tensor) -> None:
    """CASES 13. Main-KV FP4 only where its E4M3 scale is normal and not clamped."""
    if fmt == "fp4":
        blocks = torch.nn.functional.pad(x, (0, -len(x) % 16)).unflatten(0, (-1, 16)).abs().amax(-1)
        assume(((blocks / 6 >= 2.0**-6) | (blocks == 0)).all())
    once = ROUND_TRIP[fmt](x)
    assert same_bits(ROUND_TRIP[fmt](once), once)


def test_fp4_is_not_idempotent_below_its_normal_scales() -> None:
    """Why CASES 13 makes the exception: a subnormal scale is coarse, the largest element may round down to 4."""
    x = torch.zeros(16)
    x[0] = 1.5 * 6 * 2.0**-9  # scale 1.5 * 2^-9 rounds to 2 * 2^-9; 4.5 rounds to 4
    once = quant.fp4_round_trip(x)
    assert once[0] == 4 * 2 * 2.0**-9
    assert not torch.equal(quant.fp4_round_trip(once), once)


@formats
def test_zeros_stay_zeros(fmt: str) -> None:
    assert same_bits(ROUND_TRIP[fmt](torch.zeros(3, 64)), torch.zeros(3, 64))


@formats
@given(x=vectors)
def test_zeros_among_others_stay_zeros_and_signs_stay(fmt: str, x: Tensor) -> None:
    y = ROUND_TRIP[fmt](x)
    assert (y[x == 0] == 0).all()
    assert (y * x.sign() >= 0).all()


@formats
@settings(max_examples=100)
@given(values=hnp.arrays(np.float32, 16, elements=st.floats(-6, 6, width=32)), top=st.sampled_from([6.0, 7.5, 448.0]))
def test_monotone_at_a_fixed_scale(fmt: str, values: np.ndarray, top: float) -> None:
    """With the largest element pinned, so the scale is fixed, rounding keeps order."""
    x = torch.from_numpy(np.sort(values)[: BLOCK[fmt] - 1]).clone()
    y = ROUND_TRIP[fmt](torch.cat((x, torch.tensor([top]))))
    assert (y.diff() >= 0).all()


def test_e2m1_ties_go_to_the_even_code() -> None:
    """SPEC 4.1's table, both signs."""
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}
    x, y = torch.tensor(list(ties)), torch.tensor(list(ties.values()))
    assert torch.equal(quant.round_e2m1(x), y)
    assert torch.equal(quant.round_e2m1(-x), -y)


def test_e2m1_beside_the_ties() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    grid = torch.tensor(GRID)
    assert torch.equal(quant.round_e2m1(torch.nextafter(ties, torch.tensor(10.0))), grid[1:])
    assert torch.equal(quant.round_e2m1(torch.nextafter(ties, torch.tensor(0.0))), grid[:-1])
    assert torch.equal(quant.round_e2m1(torch.tensor([6.5, 100.0, -7.0])), torch.tensor([6.0, 6.0, -6.0]))


def test_every_e2m1_value_survives() -> None:
    grid = torch.tensor([*GRID, *[-value for value in GRID]])
    assert torch.equal(quant.round_e2m1(grid), grid)


def test_every_e4m3_value_survives_and_midpoints_go_to_even() -> None:
    table = torch.tensor(reference.E4M3, dtype=torch.float32)
    assert len(table) == 127
    assert table[-1] == 448
    assert torch.equal(quant.round_e4m3(table), table)
    middle = (table[1:] + table[:-1]) / 2
    expected = torch.where(torch.arange(126) % 2 == 0, table[:-1], table[1:])
    assert torch.equal(quant.round_e4m3(middle), expected)
    assert torch.equal(quant.round_e4m3(torch.tensor([449.0, 1e9, -1e9])), torch.tensor([448.0, 448.0, -448.0]))


def test_power_of_two_above_is_exact_at_every_power() -> None:
    """The smallest power of two that is not below x, for every normal exponent: at it, just above and just below."""
    powers = torch.tensor([2.0**e for e in range(-126, 127)], dtype=torch.float64).float()
    assert torch.equal(quant.power_of_two_above(powers), powers)
    assert torch.equal(quant.power_of_two_above(torch.nextafter(powers, torch.tensor(math.inf))), 2 * powers)
    assert torch.equal(quant.power_of_two_above(torch.nextafter(powers[1:], torch.tensor(0.0))), powers[1:])


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(6.0, 1.0), (6.01, 2.0), (12.0, 2.0), (3.0, 0.5), (3.001, 1.0), (5.99, 1.0), (0.1, 2.0**-5), (0.0, 2.0**-126)],
)
def test_mxfp4_scale_is_the_ceiling(amax: float, scale: float) -> None:
    """CASES 13: 6.01 takes scale 2; the floor rule would give 1 (for 6.0 too). The step .5*scale shows the scale."""
    x = torch.zeros(32)
    x[0], x[1] = amax, 0.26 * scale  # above the tie at .25 of the right scale, below the tie of any larger one
    y = quant.mxfp4_round_trip(x)
    if amax:
        assert y[1] == 0.5 * scale
        assert y[0] == reference.nearest(np.array(amax / scale), reference.E2M1) * scale
    x[1] = 0.24 * scale
    assert quant.mxfp4_round_trip(x)[1] == 0


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (448.1, 2.0), (447.0, 1.0), (896.0, 2.0), (1.0, 2.0**-8), (1e-4, 2.0**-22), (1e-9, 2.0**-22)],
)
def test_fp8_scale_is_the_ceiling_with_a_floor(amax: float, scale: float) -> None:
    """2^ceil(log2(max(amax, 1e-4)/448)); E4M3's smallest step 2^-9 shows the scale."""
    x = torch.zeros(32)
    x[0], x[1] = amax, 0.6 * 2.0**-9 * scale
    if x[1] <= x[0]:
        assert quant.fp8_round_trip(x)[1] == 2.0**-9 * scale
    x[1] = 0.4 * 2.0**-9 * scale
    assert quant.fp8_round_trip(x)[1] == 0


def test_fp4_scale_is_e4m3_of_a_sixth() -> None:
    """Scale 1.5 is an E4M3 number and no power of two; 1.55 rounds to it; beyond 448*6 = 2688 the scale is clamped."""
    x = torch.zeros(16)
    x[0], x[1] = 9.0, 1.5
    assert quant.fp4_round_trip(x).tolist()[:2] == [9.0, 1.5]
    x[0], x[1] = 6 * 1.55, 1.4
    assert quant.fp4_round_trip(x).tolist()[:2] == [9.0, 1.5]
    x[0] = 5000.0
    assert quant.fp4_round_trip(x)[0] == 2688.0
    x[0], x[1] = 1e-6, 0.0  # below the smallest scale 2^-9 and half its smallest step: zero
    assert quant.fp4_round_trip(x)[0] == 0


def test_subnormals_do_not_divide_by_zero() -> None:
    tiny = torch.tensor([2.0**-149, -(2.0**-130), 2.0**-126, 0.0])
    for fmt, round_trip in ROUND_TRIP.items():
        y = round_trip(tiny)
        assert y.isfinite().all(), fmt
        assert same_bits(y, reference.round_trip(tiny, fmt)), fmt
    assert quant.mxfp4_round_trip(tiny)[2] == 2.0**-126, "the smallest normal number is on MXFP4's smallest grid"


@formats
@given(x=vectors, extra=st.integers(0, 40))
def test_an_incomplete_block_is_padded_with_zeros(fmt: str, x: Tensor, extra: int) -> None:
    padded = torch.cat((x, torch.zeros(extra)))
    assert same_bits(ROUND_TRIP[fmt](padded)[: len(x)], ROUND_TRIP[fmt](x))
    assert not ROUND_TRIP[fmt](padded)[len(x) :].any()


@formats
def test_blocks_do_not_see_each_other(fmt: str) -> None:
    block = BLOCK[fmt]
    x = torch.randn(3 * block, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[block : 2 * block] *= 1000
    keep = torch.ones(3 * block, dtype=torch.bool)
    keep[block : 2 * block] = False
    assert same_bits(ROUND_TRIP[fmt](x)[keep], ROUND_TRIP[fmt](loud)[keep])
    assert not torch.equal(ROUND_TRIP[fmt](x), x)


@formats
def test_shapes_and_dtypes_are_kept(fmt: str) -> None:
    x = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    assert same_bits(ROUND_TRIP[fmt](x)[1, 2], ROUND_TRIP[fmt](x[1, 2]))
    assert ROUND_TRIP[fmt](x.bfloat16()).dtype == torch.bfloat16
    assert ROUND_TRIP[fmt](x[:, :0]).shape == (2, 0, 40)


@formats
def test_bf16_is_rounded_from_its_fp32_value(fmt: str) -> None:
    """Arithmetic is FP32 whatever comes in, and every value of the formats is a BF16 number when the scale is."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(ROUND_TRIP[fmt](x), reference.round_trip(x.float(), fmt).bfloat16())


@formats
def test_the_gradient_passes_straight_through(fmt: str) -> None:
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(2), requires_grad=True)
    y = quant.straight_through(x, fmt)
    assert same_bits(y.detach(), ROUND_TRIP[fmt](x.detach())), "training rounds as inference does"
    upstream = torch.randn(3, 48, generator=torch.Generator().manual_seed(3))
    y.backward(upstream)
    assert x.grad is not None
    assert same_bits(x.grad, upstream)
    with torch.no_grad():
        assert same_bits(quant.straight_through(x, fmt), y.detach())


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(KeyError, match="int4"):
        quant.straight_through(torch.ones(3), "int4")


def test_the_range_never_clips_a_normed_latent() -> None:
    """SPEC 11: FP4 with E4M3 scales reaches 448*6 = 2688; a normed vector of 512 channels stays within sqrt(512)."""
    latent = torch.zeros(512)
    latent[7] = 512**0.5  # all the energy in one channel: the worst a norm allows
    assert quant.E4M3_MAX * quant.E2M1_MAX == 2688
    assert abs(quant.fp4_round_trip(latent)[7] - 512**0.5) <= 512**0.5 / 16  # half a step of an E4M3 scale
