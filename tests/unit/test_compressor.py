"""The compressor: groups, gates, what an open group does (nothing), and where a latent is rotated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit import reference
from tests.unit.reference import Reference
from tests.unit.support import random_model, released_weights, small_config, small_text, tokens
from v41lib.nn.compressor import Compressor, pad_entries, pool, visible_entries
from v41lib.nn.rope import layer_frequencies, rotate, rotation


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def build(ratio: int, seed: int = 0, **options: Any) -> Compressor:
    module = Compressor(small_text(), ratio, **options)
    for number, weight in enumerate(module.parameters()):
        weight.copy_(random(*weight.shape, seed=seed + number))
    return module


def test_pool_by_hand() -> None:
    """Two tokens, two channels, each with its own softmax: equal gates average, a gate of +50 picks."""
    values = torch.tensor([[[1.0, 10.0], [3.0, 20.0], [99.0, 99.0]]])
    gates = torch.tensor([[[0.0, 50.0], [0.0, 0.0], [99.0, 99.0]]])
    assert torch.equal(pool(values, gates, 2), torch.tensor([[[2.0, 10.0]]]))


@given(ratio=st.integers(1, 5), length=st.integers(0, 13), seed=st.integers(0, 999))
def test_pool_equals_a_loop_over_groups(ratio: int, length: int, seed: int) -> None:
    values, gates = random(2, length, 3, seed=seed), random(2, length, 3, seed=seed + 1)
    rows = pool(values, gates, ratio)
    assert rows.shape == (2, length // ratio, 3)
    for group in range(length // ratio):
        weights = [gates[:, group * ratio + member].exp() for member in range(ratio)]
        mixed = sum(w * values[:, group * ratio + member] for member, w in enumerate(weights)) / sum(weights)
        assert torch.allclose(rows[:, group], mixed, atol=1e-5)


@given(ratio=st.integers(2, 4), length=st.integers(1, 12), seed=st.integers(0, 99), data=st.data())
@torch.no_grad()
def test_a_token_touches_the_row_of_its_own_closed_group_alone(
    ratio: int, length: int, seed: int, data: st.DataObject
) -> None:
    """CASES 3. Groups do not overlap, and a token of an open group touches no stored row, bitwise."""
    module, x = build(ratio, seed), random(1, length, 16, seed=seed)
    at = data.draw(st.integers(0, length - 1))
    changed = x.clone()
    changed[:, at] += 1.0
    same = (module(x) == module(changed)).all(-1)[0]
    assert same.tolist() == [group != at // ratio for group in range(length // ratio)]


@torch.no_grad()
def test_three_tokens_then_three_more_equal_six() -> None:
    """CASES 3, as far as rows go: what three tokens store is what six store first; the fourth closes the pair."""
    module, x = build(2), random(1, 6, 16)
    assert torch.allclose(module(x[:, :3]), module(x)[:, :1], atol=1e-6)
    assert torch.allclose(module(x[:, 2:4]), module(x)[:, 1:2], atol=1e-6)


@torch.no_grad()
def test_ratio_one_has_no_gate_and_ratio_two_does() -> None:
    module, x = build(1), random(1, 4, 16)
    assert not hasattr(module, "wgate")
    assert torch.allclose(module(x), module.norm(x @ module.wkv.weight.T), atol=1e-5)
    assert hasattr(build(2), "wgate")


@torch.no_grad()
def test_norm_comes_after_pooling() -> None:
    module, x = build(2), random(1, 4, 16)
    pooled = pool(x @ module.wkv.weight.T, x @ module.wgate.weight.T, 2)
    assert torch.allclose(module(x), module.norm(pooled), atol=1e-5)
    assert not torch.allclose(
        module(x), pool(module.norm(x @ module.wkv.weight.T), x @ module.wgate.weight.T, 2), atol=0.1
    )


@torch.no_grad()
def test_projections_are_fp32_for_bf16_input() -> None:
    module = build(2, dtype=torch.bfloat16)
    assert module.wkv.weight.dtype == module.wgate.weight.dtype == torch.float32
    x = random(1, 6, 16).bfloat16()
    wide = build(2)
    wide.load_state_dict({name: value.float() for name, value in module.state_dict().items()})
    assert module(x).dtype == torch.bfloat16
    assert torch.equal(module(x), wide(x.float()).bfloat16())


@given(position=st.integers(0, 10_000), ratio=st.integers(1, 7))
def test_an_entry_is_visible_when_its_group_has_closed(position: int, ratio: int) -> None:
    """SPEC 4: entry g when g < (i+1)//ratio, that is when its last token g*ratio + ratio - 1 is at most i."""
    count = int(visible_entries(torch.tensor([position]), ratio))
    assert count * ratio - 1 <= position
    assert (count + 1) * ratio - 1 > position


def test_visible_entries_by_hand() -> None:
    assert visible_entries(torch.arange(6), 1).tolist() == [1, 2, 3, 4, 5, 6]
    assert visible_entries(torch.arange(6), 2).tolist() == [0, 1, 1, 2, 2, 3]
    assert visible_entries(torch.arange(6), 3).tolist() == [0, 0, 1, 1, 1, 2]


def test_padding_adds_absent_entries() -> None:
    assert pad_entries(torch.tensor([[3, -1]]), 4).tolist() == [[3, -1, -1, -1]]
    assert pad_entries(torch.zeros(1, 2, 0, dtype=torch.long), 2).tolist() == [[[-1, -1], [-1, -1]]]


@torch.no_grad()
@pytest.mark.parametrize("source", [2, 4])
def test_a_latent_turns_at_the_first_token_of_its_group(source: int) -> None:
    """CASES 7: row j at position j*ratio, before FP4; any other position fits worse by far."""
    model = random_model(small_config())
    attention, ratio = model.layers[source].attn, model.plans[source].ratio
    x = random(1, 12, 16)
    latent, main = attention.compressor(x), attention.publish(x).main
    freqs = layer_frequencies(model.config.text, ratio)

    def mismatch(positions: torch.Tensor) -> float:
        expected = reference.round_trip(rotate(latent, rotation(positions, freqs)), "fp4")
        return float((expected != main).float().mean())

    rows = torch.arange(12 // ratio)
    assert mismatch(rows * ratio) == 0
    assert all(mismatch(wrong) > 0.05 for wrong in (rows * ratio + 1, rows * ratio - 1))
    if ratio > 1:
        assert mismatch(rows) > 0.05
        assert mismatch(rows * ratio + ratio - 1) > 0.05


@torch.no_grad()
@pytest.mark.parametrize("source", [2, 4])
def test_the_indexer_reads_the_latent_before_rotation_and_rounding(source: int) -> None:
    """CASES 7: keys from the plain latent; from the rotated or the rounded one they would be others."""
    model = random_model(small_config())
    ids, attention, ratio = tokens(13), model.layers[source].attn, model.plans[source].ratio
    ref = Reference(released_weights(model), model.config.text, model.config.image_token_id)
    x = model.trace(ids)[f"attn_in.{source}"]
    kv = attention.publish(x)
    latents = ref.latents(x.double(), source)
    reference.assert_rounded("keys", kv.index_keys, ref.keys_before_rounding(latents, source), "mxfp4")
    rotated = ref.main_before_rounding(latents, source)
    for wrong in (rotated, reference.round_trip(latents, "fp4").double(), kv.main.double()):
        with pytest.raises(AssertionError):
            reference.assert_rounded("keys", kv.index_keys, ref.keys_before_rounding(wrong, source), "mxfp4")
    assert (kv.owner, kv.ratio) == (source, ratio)
    assert kv.main.shape == (1, 13 // ratio, 16)
    assert kv.index_keys.shape == (1, 13 // ratio, 8)
