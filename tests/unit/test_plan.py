"""Who does what: the release by hand, and what must hold for any schedule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given

from tests.unit.support import schedules, small_config, small_text
from v41lib import Model, plan_layers, released
from v41lib.plan import first_decoder_layer


def test_the_release_has_2_local_4_full_4_reindex_30_reuse() -> None:
    plans = plan_layers(released().text)
    assert Counter(plan.mode for plan in plans) == {"local": 2, "full": 4, "reindex": 4, "reuse": 30}
    assert [plan.layer for plan in plans] == list(range(40))
    assert [plan.layer for plan in plans if plan.mode == "local"] == [0, 1]
    assert [plan.layer for plan in plans if plan.mode == "full"] == [2, 8, 14, 20]
    assert [plan.layer for plan in plans if plan.mode == "reindex"] == [24, 28, 32, 36]


def test_the_release_layer_by_layer() -> None:
    """Written out by hand from SPEC 2, not computed."""
    kv = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    index = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    plans = plan_layers(released().text)
    assert [plan.kv_owner for plan in plans] == kv
    assert [plan.index_owner for plan in plans] == index
    assert [plan.ratio for plan in plans] == [0] * 2 + [2] * 18 + [1] * 20
    assert [plan.stack for plan in plans] == ["encoder"] * 20 + ["decoder"] * 20
    assert {plan.layer: plan.candidate_role for plan in plans if plan.candidate_role} == {
        20: "source", 24: "consumer", 28: "consumer", 32: "consumer", 36: "consumer",
    }  # fmt: skip
    assert [plan.layer for plan in plans if plan.engram] == [1, 14]
    assert [plan.layer for plan in plans if plan.owns_kv] == [2, 8, 14, 20]
    assert [plan.layer for plan in plans if plan.selects] == [2, 8, 14, 20, 24, 28, 32, 36]


@given(schedule=schedules(max_layers=14))
def test_plans_of_any_schedule(schedule: dict[str, Any]) -> None:
    text = small_text(**schedule)
    plans = plan_layers(text)
    cut, cap = first_decoder_layer(text), text.candidate_source_layer_id
    assert [plan.layer for plan in plans] == list(range(text.num_hidden_layers))
    for plan in plans:
        assert plan.ratio == text.compress_ratios[plan.layer]
        assert (plan.mode == "local") == (plan.ratio == 0) == (plan.kv_owner is None) == (plan.index_owner is None)
        assert plan.owns_kv == (plan.mode == "full")
        assert plan.selects == (plan.mode in ("full", "reindex"))
        assert plan.stack == ("decoder" if plan.layer >= cut else "encoder")
        if plan.kv_owner is not None and plan.index_owner is not None:
            assert plan.kv_owner <= plan.index_owner <= plan.layer, "a selection is made over the KV that is read"
            assert plans[plan.kv_owner].mode == "full"
            assert plans[plan.index_owner].selects
            assert plans[plan.kv_owner].ratio == plan.ratio == plans[plan.index_owner].ratio
            assert plans[plan.index_owner].kv_owner == plan.kv_owner
            between = plans[plan.kv_owner + 1 : plan.layer + 1]
            assert not any(p.owns_kv for p in between), "a later KV was published in between"
            between = plans[plan.index_owner + 1 : plan.layer + 1]
            assert not any(p.selects for p in between), "a later selection was published in between"
        if plan.stack == "decoder" and plan.ratio:
            assert plan.kv_owner == cut, "the decoder has one global KV"
        assert (plan.candidate_role == "source") == (plan.layer == cap)
        assert (plan.candidate_role == "consumer") == (cap != -1 and plan.layer > cap and plan.mode == "reindex")
    assert {plan.layer for plan in plans if plan.owns_kv} == set(text.kv_source_layer_ids)
    assert {plan.layer for plan in plans if plan.selects} == set(text.index_source_layer_ids)


@given(schedule=schedules(max_layers=8))
def test_the_model_builds_what_the_plan_says(schedule: dict[str, Any]) -> None:
    model = Model(small_config(**schedule), device="meta")
    for plan, layer in zip(model.plans, model.layers, strict=True):
        assert hasattr(layer.attn, "compressor") == plan.owns_kv
        assert hasattr(layer.attn, "indexer") == plan.selects
        if plan.owns_kv:
            assert hasattr(layer.attn.compressor, "wgate") == (plan.ratio > 1)
            assert hasattr(layer.attn.indexer, "wk")
        elif plan.selects:
            assert not hasattr(layer.attn.indexer, "wk"), "only KV sources own index keys"


@pytest.mark.parametrize(
    ("ratios", "kv", "cut"),
    [([0, 0], [], 2), ([1, 1], [0], 0), ([2, 2, 0, 1, 1], [0, 3], 3), ([0, 3, 0, 3], [1], 1)],
)
def test_the_decoder_begins_at_the_last_kv_source(ratios: list[int], kv: list[int], cut: int) -> None:
    text = small_text(
        num_hidden_layers=len(ratios),
        compress_ratios=ratios,
        kv_source_layer_ids=kv,
        index_source_layer_ids=kv,
        candidate_source_layer_id=-1,
    )
    assert first_decoder_layer(text) == cut
    assert [plan.stack for plan in plan_layers(text)] == ["encoder"] * cut + ["decoder"] * (len(ratios) - cut)


def test_plans_are_frozen() -> None:
    plan = plan_layers(released().text)[0]
    with pytest.raises(AttributeError):
        plan.layer = 3  # type: ignore[misc]
