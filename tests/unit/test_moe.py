"""The router and the experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.support import IMAGE_TOKEN, random_model, small_config, small_text, tokens
from v41lib.nn.moe import Expert, Experts, MoE, Route, Router, clamped_swiglu


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def build(kind: type, seed: int = 0, dtype: torch.dtype | None = None, **changes: Any) -> Any:
    module = kind(small_text(**changes), dtype)
    for number, weight in enumerate(module.parameters()):
        weight.copy_(random(*weight.shape, seed=seed + number) / (weight.shape[-1] ** 0.5 if weight.dim() > 1 else 3))
    return module


# --- router ----------------------------------------------------------------------------------------------------------


@given(experts=st.integers(1, 9), data=st.data(), seed=st.integers(0, 999), normalise=st.booleans())
def test_routes_are_the_best_of_score_plus_bias_and_weights_are_the_scores(
    experts: int, data: st.DataObject, seed: int, normalise: bool
) -> None:
    k = data.draw(st.integers(1, experts))
    router = build(Router, seed, n_routed_experts=experts, num_experts_per_tok=k, norm_topk_prob=normalise)
    x = random(5, 16, seed=seed + 50)
    with torch.no_grad():
        route = router(x)
    logits, bias = (x.double() @ router.weight.detach().double().T).tolist(), router.bias.tolist()
    for row in range(5):
        scores = [math.sqrt(math.log1p(math.exp(logit))) for logit in logits[row]]
        steered = [score + bias[expert] for expert, score in enumerate(scores)]
        best = sorted(range(experts), key=lambda e: -steered[e])[:k]
        assert set(route.experts[row].tolist()) == set(best)
        total = sum(scores[e] for e in best) if normalise else 1
        for expert, weight in zip(route.experts[row].tolist(), route.weights[row].tolist(), strict=True):
            assert weight == pytest.approx(1.5 * scores[expert] / total, rel=1e-5)


def test_weights_sum_to_the_scaling_factor() -> None:
    with torch.no_grad():
        weights = build(Router)(random(20, 16)).weights
    assert torch.allclose(weights.sum(-1), torch.full((20,), 1.5))


@torch.no_grad()
def test_expert_383_can_be_chosen() -> None:
    """CASES 12: no off-by-one at the release's width."""
    router = build(Router, n_routed_experts=384, num_experts_per_tok=6)
    router.bias.zero_()
    x = 16 * F.normalize(router.weight[383], dim=0)
    assert 383 in router(x.unsqueeze(0)).experts[0].tolist()
    seen = set(router(random(5000, 16)).experts.flatten().tolist())
    assert {0, 383} <= seen <= set(range(384))


@torch.no_grad()
def test_a_bias_of_ten_gets_an_expert_chosen_and_leaves_its_weight_alone() -> None:
    """CASES 12. The weight is the score's share of the chosen scores, as if the bias did not exist."""
    router, x = build(Router, n_routed_experts=8), random(30, 16)
    router.bias.zero_()
    scores = F.softplus(x @ router.weight.T).sqrt()
    unlikely = int(scores.mean(0).argmin())
    router.bias[unlikely] = 10.0
    route = router(x)
    assert (route.experts == unlikely).any(-1).all()
    chosen = scores.gather(-1, route.experts)
    assert torch.allclose(route.weights, 1.5 * chosen / chosen.sum(-1, keepdim=True), rtol=1e-5)


@torch.no_grad()
def test_image_tokens_choose_with_their_own_bias_token_by_token() -> None:
    router, x = build(Router, n_routed_experts=8), random(6, 16)
    router.bias.zero_()
    router.bias_vl.zero_()
    router.bias[1] = router.bias_vl[5] = 10.0
    is_image = torch.tensor([True, False, False, True, False, True])
    route = router(x, is_image)
    assert ((route.experts == 5).any(-1) | ~is_image).all()
    assert ((route.experts == 1).any(-1) | is_image).all()
    text = router(x)
    assert torch.equal(text.experts[~is_image], route.experts[~is_image])
    assert (text.experts == 1).any(-1).all(), "without images every token is text"


@torch.no_grad()
def test_the_model_marks_image_tokens_by_their_id() -> None:
    model = random_model(small_config())
    for layer in model.layers:
        layer.ffn.gate.bias[3], layer.ffn.gate.bias_vl[3] = -10.0, 10.0
    ids = tokens(12)
    ids[ids == IMAGE_TOKEN] = 0
    ids[0, [3, 7]] = IMAGE_TOKEN
    trace = model.trace(ids)
    for layer in range(7):
        chose = (trace[f"route.{layer}"] == 3).any(-1)
        assert torch.equal(chose, ids[0] == IMAGE_TOKEN)


def test_biases_are_not_trained_by_the_language_model() -> None:
    router = build(Router)
    assert not router.bias.requires_grad
    assert not router.bias_vl.requires_grad
    route = router(random(3, 16))
    assert route.weights.requires_grad
    route.weights.square().sum().backward()
    assert router.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_logits_are_fp32_for_bf16_tokens() -> None:
    router = build(Router, dtype=torch.bfloat16)
    x = random(40, 16).bfloat16()
    wide = Router(small_text())
    wide.load_state_dict({name: value.float() for name, value in router.state_dict().items()})
    ours, theirs = router(x), wide(x.float())
    assert ours.weights.dtype == torch.float32
    assert torch.equal(ours.experts, theirs.experts)
    assert torch.equal(ours.weights, theirs.weights)


@torch.no_grad()
def test_no_score_at_all_gives_zero_weights_and_no_nan() -> None:
    """softplus underflows below -104: weights are 0 / (0 + 1e-20)."""
    router = build(Router)
    router.weight.fill_(-10.0)
    assert torch.equal(router(torch.full((2, 16), 5.0)).weights, torch.zeros(2, 2))


def test_a_dead_expert_does_not_poison_the_gradient() -> None:
    """One expert whose softplus underflows to zero, chosen or not: sqrt has an infinite slope there."""
    router = build(Router)
    with torch.no_grad():
        router.weight[3] = -10.0
        router.bias[3] = -10.0
    x = torch.full((2, 16), 5.0, requires_grad=True)
    route = router(x)
    assert not (route.experts == 3).any()
    route.weights.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()


# --- experts ---------------------------------------------------------------------------------------------------------


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 2.0, silu(1) * 2),
        (20.0, 1.0, silu(10)),  # the gate is clamped above
        (-20.0, 1.0, silu(-20)),  # and not below
        (-12.0, 3.0, silu(-12) * 3),
        (1.0, 30.0, silu(1) * 10),  # up is clamped on both sides
        (1.0, -30.0, silu(1) * -10),
        (50.0, -50.0, silu(10) * -10),
        (0.0, 7.0, 0.0),
    ],
)
def test_clamped_swiglu_by_hand(gate: float, up: float, expected: float) -> None:
    ours = float(clamped_swiglu(torch.tensor(gate), torch.tensor(up), 10.0))
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_the_product_is_fp32_and_rounded_once() -> None:
    gate, up = random(500).bfloat16(), (20 * random(500, seed=1)).bfloat16()
    assert torch.equal(clamped_swiglu(gate, up, 10.0), clamped_swiglu(gate.float(), up.float(), 10.0).bfloat16())


@given(experts=st.integers(1, 6), rows=st.integers(1, 12), data=st.data(), seed=st.integers(0, 999))
@torch.no_grad()
def test_grouped_experts_equal_one_token_at_a_time(experts: int, rows: int, data: st.DataObject, seed: int) -> None:
    """1e-5: a group's matrix product may add in another order than a single row's."""
    k = data.draw(st.integers(1, experts))
    module = build(Experts, seed, n_routed_experts=experts, num_experts_per_tok=k)
    x, weights = random(rows, 16, seed=seed + 9), random(rows, k, seed=seed + 10)
    chosen = torch.stack(
        [torch.randperm(experts, generator=torch.Generator().manual_seed(seed + r))[:k] for r in range(rows)]
    )
    out = module(x, Route(chosen, weights))
    for row in range(rows):
        alone = torch.zeros(16)
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            hidden = clamped_swiglu(module.w1[expert] @ x[row], module.w3[expert] @ x[row], module.limit)
            alone += weight * (module.w2[expert] @ hidden)
        assert torch.allclose(out[row], alone, atol=1e-5)


@torch.no_grad()
def test_an_expert_without_tokens_is_no_error_and_no_cost() -> None:
    module = build(Experts, n_routed_experts=6)
    module.w1[4] = math.nan
    route = Route(torch.tensor([[0, 5], [2, 0]]), torch.ones(2, 2))
    assert module(random(2, 16), route).isfinite().all()


@torch.no_grad()
def test_the_order_of_choice_carries_no_meaning() -> None:
    module, x = build(Experts), random(7, 16)
    chosen, weights = torch.tensor([[0, 3]]).expand(7, 2), random(7, 2)
    assert torch.equal(module(x, Route(chosen, weights)), module(x, Route(chosen.flip(1), weights.flip(1))))


@torch.no_grad()
def test_the_shared_expert_serves_every_token_without_a_weight() -> None:
    moe, x = build(MoE), random(2, 5, 16)
    out, route = moe(x)
    assert route.experts.shape == (10, 2)
    routed = moe.experts(x.flatten(0, 1), route).unflatten(0, (2, 5))
    assert torch.allclose(out - routed, moe.shared_experts(x), atol=1e-5)
    assert isinstance(moe.shared_experts, Expert)
    assert moe.shared_experts.limit == moe.experts.limit == 2.0, "the shared expert has the same clamp"


@torch.no_grad()
def test_the_shared_expert_clamps() -> None:
    expert = build(Expert)
    x = 100 * random(4, 16)
    expected = (F.silu(expert.w1(x).clamp(max=2.0)) * expert.w3(x).clamp(-2.0, 2.0)) @ expert.w2.weight.T
    assert torch.allclose(expert(x), expected, atol=1e-5)


@torch.no_grad()
def test_tokens_do_not_see_each_other() -> None:
    moe, x = build(MoE), random(1, 6, 16)
    changed = x.clone()
    changed[:, 2] = 7.0
    assert torch.allclose(moe(x)[0][:, [0, 1, 3, 4, 5]], moe(changed)[0][:, [0, 1, 3, 4, 5]], atol=1e-6)


def test_gradients_reach_the_chosen_experts_alone() -> None:
    experts = build(Experts)
    experts(random(3, 16), Route(torch.tensor([[1, 2]] * 3), torch.ones(3, 2))).square().sum().backward()
    for weight in (experts.w1, experts.w2, experts.w3):
        touched = weight.grad.abs().sum((1, 2)) > 0
        assert touched.tolist() == [False, True, True, False]
