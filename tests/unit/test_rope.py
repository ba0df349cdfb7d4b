"""Rotary positions: frequencies, pairs, norms, relativity, and the way back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.support import small_text
from v41lib import released
from v41lib.config import YarnScaling
from v41lib.nn.rope import frequencies, layer_frequencies, rotate, rotation

YARN = YarnScaling(factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_plain_frequencies_by_hand() -> None:
    assert torch.allclose(frequencies(4, 10000.0), torch.tensor([1.0, 0.01]), rtol=1e-6, atol=0)
    assert torch.allclose(frequencies(8, 16.0), torch.tensor([1.0, 0.5, 0.25, 0.125]), rtol=1e-6, atol=0)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    """The released table: the fastest pairs as without YaRN, the slowest divided by 16, and in between a blend."""
    plain, yarn = frequencies(64, 160000.0), frequencies(64, 160000.0, YARN)
    turns = plain.double() * 65536 / (2 * math.pi)
    assert torch.equal(yarn[turns > 40], plain[turns > 40])
    assert torch.allclose(yarn[turns < 0.5], plain[turns < 0.5] / 16, rtol=1e-6, atol=0)
    ratio = yarn / plain
    assert ((ratio <= 1) & (ratio >= 1 / 16 - 1e-7)).all()
    assert (ratio.diff() <= 1e-7).all(), "the blend is monotone"
    blended = (ratio < 1 - 1e-6) & (ratio > 1 / 16 + 1e-6)
    assert blended.any()
    steps = ratio[blended].diff()
    assert torch.allclose(steps, steps[0].expand_as(steps), atol=1e-6), "the blend is linear in the pair number"


def test_yarn_blend_by_hand() -> None:
    """SPEC 4 with numbers: pairs that turn 32 times and once, floored and ceiled, bound the blend."""
    low = math.floor(64 * math.log(65536 / (32 * 2 * math.pi)) / (2 * math.log(160000)))
    high = math.ceil(64 * math.log(65536 / (1 * 2 * math.pi)) / (2 * math.log(160000)))
    assert (low, high) == (15, 25)
    yarn, plain = frequencies(64, 160000.0, YARN), frequencies(64, 160000.0)
    assert torch.equal(yarn[: low + 1], plain[: low + 1])
    assert torch.allclose(yarn[high:], plain[high:] / 16, rtol=1e-6, atol=0)
    assert torch.allclose(yarn[20], plain[20] * (0.5 + 0.5 / 16), rtol=1e-6, atol=0)


def test_layer_20_turns_as_layer_2_and_not_as_layer_0() -> None:
    """CASES 6: local layers have their own base and no YaRN; all others share one table, whatever their ratio."""
    text = released().text
    tables = {layer: layer_frequencies(text, text.compress_ratios[layer]) for layer in (0, 1, 2, 20, 39)}
    assert torch.equal(tables[20], tables[2])
    assert torch.equal(tables[20], tables[39])
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])
    assert torch.equal(tables[0], frequencies(64, 10000.0))
    assert torch.equal(tables[2], frequencies(64, 160000.0, YARN))


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_tables_are_finite_at_a_million_and_keep_norms(ratio: int) -> None:
    """CASES 6: no attention-scale factor of YaRN; at 2^20 - 1 the position is still an exact FP32 integer."""
    text = released().text
    positions = torch.tensor([0, 1, 65535, 65536, 1048575])
    by = rotation(positions, layer_frequencies(text, ratio))
    assert by.cos.shape == (5, 32)
    assert by.cos.isfinite().all()
    assert by.sin.isfinite().all()
    assert torch.allclose(by.cos.square() + by.sin.square(), torch.ones(5, 32), atol=1e-6)
    assert torch.equal(by.cos[0], torch.ones(32))
    x = random(5, 512)
    assert torch.allclose(rotate(x, by).norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert by.cos[4, 0] == pytest.approx(math.cos(1048575), abs=1e-6)


def test_the_first_pair_turns_one_radian_a_position() -> None:
    by = rotation(torch.arange(4), frequencies(4, 10000.0))
    x = torch.tensor([[7.0, 1.0, 0.0, 1.0, 0.0]]).expand(4, 5)
    y = rotate(x, by)
    for position in range(4):
        expected = [7.0, math.cos(position), math.sin(position), math.cos(position / 100), math.sin(position / 100)]
        assert y[position].tolist() == pytest.approx(expected, abs=1e-6)


def test_only_the_last_channels_turn_and_in_adjacent_pairs() -> None:
    """Energy stays within each adjacent pair; half-split pairing, first channels, or a wider part would move it."""
    x, by = random(1, 20), rotation(torch.tensor([5]), frequencies(8, 100.0))
    y = rotate(x, by)
    assert torch.equal(y[:, :12], x[:, :12])
    assert not torch.isclose(y[:, 12:], x[:, 12:]).all(1).any()
    energy = [v[:, 12:].unflatten(-1, (4, 2)).square().sum(-1) for v in (x, y)]
    assert torch.allclose(*energy, atol=1e-5)


@given(position=st.integers(0, 1048575), seed=st.integers(0, 999), pairs=st.integers(1, 8), rest=st.integers(0, 9))
def test_norms_are_kept_and_the_inverse_brings_back(position: int, seed: int, pairs: int, rest: int) -> None:
    """1e-5: two FP32 products and a sum an element."""
    x = random(2, 2 * pairs + rest, seed=seed)
    by = rotation(torch.tensor([position, position // 2]), frequencies(2 * pairs, 160000.0, YARN))
    y = rotate(x, by)
    assert torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=1e-6)
    assert torch.allclose(rotate(y, by, inverse=True), x, atol=1e-5)


@given(query=st.integers(0, 500), distance=st.integers(0, 100), shift=st.integers(0, 500), seed=st.integers(0, 99))
def test_products_depend_on_the_distance_alone(query: int, distance: int, shift: int, seed: int) -> None:
    """q at i times k at j equals q at i+s times k at j+s. FP32 angles near 1000 are good to 6e-5 rad: 2e-3 on a product
    of eight terms of order one would already be 30 times that; unrelated rotations differ by order one."""
    freqs = frequencies(8, 10000.0)
    q, k = random(8, seed=seed), random(8, seed=seed + 1000)

    def product(i: int, j: int) -> torch.Tensor:
        return rotate(q, rotation(torch.tensor(i), freqs)) @ rotate(k, rotation(torch.tensor(j), freqs))

    start = query + distance
    assert abs(product(start, query) - product(start + shift, query + shift)) < 2e-3


def test_rotating_back_by_the_query_leaves_a_relative_value() -> None:
    """Why the output is rotated back (SPEC 4): a value stored rotated at j, read at i, comes out rotated by j - i."""
    freqs, value = frequencies(8, 10000.0), random(8)
    stored = rotate(value, rotation(torch.tensor(3), freqs))
    read = rotate(stored, rotation(torch.tensor(10), freqs), inverse=True)
    assert torch.allclose(read, rotate(value, rotation(torch.tensor(7), freqs), inverse=True), atol=1e-6)


def test_dtype_is_kept_and_angles_are_fp32() -> None:
    by = rotation(torch.arange(3), frequencies(4, 10000.0))
    assert by.cos.dtype == torch.float32
    x = random(3, 6).bfloat16()
    assert rotate(x, by).dtype == torch.bfloat16
    assert torch.equal(rotate(x, by), rotate(x.float(), by).bfloat16())


def test_an_extra_axis_broadcasts_over_heads() -> None:
    by = rotation(torch.arange(5), layer_frequencies(small_text(), 1))
    x = random(2, 5, 3, 16)
    apart = torch.stack([rotate(x[:, :, head], by) for head in range(3)], dim=2)
    together = rotate(x, type(by)(by.cos.unsqueeze(1), by.sin.unsqueeze(1)))
    assert torch.equal(apart, together)
