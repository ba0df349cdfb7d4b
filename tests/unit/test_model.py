"""Building a model: what a seed means, what is refused, and what a model says about itself."""

from __future__ import annotations

import pytest
import torch

from tests.unit.support import random_model, small_config, tokens
from v41lib import Model, plan_layers


def test_a_seed_means_the_same_weights_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = Model(small_config(), seed=3), Model(small_config(), seed=3), Model(small_config(), seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() < 2 or not torch.equal(a, c), name


def test_initial_weights_keep_their_inputs_size() -> None:
    """Matrices are N(0, 1/fan_in), the embedding N(0, 0.02^2), norms and mHC scales one, biases and sinks zero."""
    model = Model(small_config(hidden_size=64, q_lora_rank=64, moe_intermediate_size=64))
    for name, weight in model.named_parameters():
        assert weight.isfinite().all(), name
        if weight.dim() > 1 and weight.numel() > 1000:
            expected = 0.02 if name == "embed.weight" else weight.shape[-1] ** -0.5
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.15), name
        elif weight.dim() == 1:
            assert set(weight.unique().tolist()) == {float(name.endswith(("norm.weight", ".scale")))}, name


def test_bf16_weights_are_the_fp32_weights_rounded() -> None:
    coarse = Model(small_config(), dtype=torch.bfloat16)
    for a, b in zip(Model(small_config()).parameters(), coarse.parameters(), strict=True):
        assert torch.equal(a.to(b.dtype), b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=rf"{dtype}.*float32.*bfloat16"):
        Model(small_config(), dtype=dtype)


def test_engram_is_refused_when_run_and_not_when_built() -> None:
    model = Model(small_config(engram_layer_ids=[1], engram_num_embeddings=[10]))
    with pytest.raises(NotImplementedError, match=r"engram_layer_ids = \[1\]"):
        model(tokens(3))


@torch.no_grad()
def test_a_prompt_may_be_as_long_as_the_positions_and_no_longer() -> None:
    model = random_model(small_config(max_position_embeddings=6))
    assert model(tokens(6)).isfinite().all()
    with pytest.raises(ValueError, match=r"7 tokens: max_position_embeddings is 6"):
        model(tokens(7))


def test_a_model_knows_its_plan_and_its_cut() -> None:
    model = Model(small_config(), device="meta")
    assert model.plans == plan_layers(model.config.text)
    assert model.cut == 4
    assert model.device.type == "meta"
    assert [block.plan.layer for block in model.layers] == list(range(7))


def test_gradients_are_finite_in_every_mode() -> None:
    """Training steps through every kind of layer, quantisers, sinks and caps, in FP32 and in BF16."""
    for dtype in (torch.float32, torch.bfloat16):
        model = random_model(small_config(), dtype=dtype)
        model(tokens(20, batch=2)).logsumexp(-1).mean().backward()
        for name, weight in model.named_parameters():
            assert weight.grad is None or weight.grad.isfinite().all(), name


@torch.no_grad()
def test_recording_changes_nothing() -> None:
    model, ids = random_model(small_config()), tokens(20, batch=2)
    assert torch.equal(model.trace(ids)["logits"], model(ids))
