"""What single steps select, multiply and store, against the full pass; and a published reference's stale keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import Golden
from tests.unit.support import random_model, small_config, tokens, without_rounding
from v41lib import Model
from v41lib.engine import Engine
from v41lib.model import Residual
from v41lib.nn.indexer import select_everywhere
from v41lib.nn.quant import Packed, pack, values
from v41lib.nn.rope import Rotation
from v41lib.nn.shared import Shared


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def present(entries: torch.Tensor) -> list[int]:
    return [entry for entry in entries.tolist() if entry >= 0]


def steps(engine: Engine, ids: torch.Tensor) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Each position from 1 on, and what ``engine`` records in one step there, every step before it being exact."""
    exact = Engine(engine.model, engine.packed)
    state = exact.prefill(ids[:, :1])
    for position in range(1, ids.shape[1]):
        tensors: dict[str, torch.Tensor] = {}
        fed = ids[:, position : position + 1]
        tensors["logits"] = engine.decode(state, fed, record=tensors.__setitem__).logits
        state = exact.decode(state, fed)
        yield position, tensors


def test_a_step_selects_what_the_full_pass_selects(golden: Golden) -> None:
    """CASES 1, at every position: own keys, P // 2 of them at an even P; CASES 5 and 21: everything visible while it
    fits the pool, then nothing from outside it, absent slots -1."""
    model, text = golden.model, golden.model.config.text
    full, pool = model.trace(golden.ids), text.candidate_topk_blocks * text.candidate_block_size
    for position, step in steps(Engine(model), golden.ids):
        for plan in model.plans:
            if not plan.selects:
                continue
            name, visible = f"topk.{plan.layer}", (position + 1) // plan.ratio
            assert torch.equal(step[name][0, 0], full[name][0, position]), (position, name)
            if plan.owns_kv:
                assert step[f"keys.{plan.layer}"].shape[1] == visible
                assert torch.equal(step[f"main.{plan.layer}"], full[f"main.{plan.layer}"][:, :visible])
            if plan.candidate_role:
                candidates = step[f"cand.{plan.layer}"][0, 0]
                assert torch.equal(candidates, full[f"cand.{plan.layer}"][0, position, :visible])
                assert candidates.all() or visible > pool
        chosen = present(step[f"topk.{model.plans[-1].index_owner}"][0, 0])
        assert step[f"cand.{model.plans[-1].index_owner}"][0, 0][chosen].all()


def test_a_selection_larger_than_the_pool_is_filled_with_absent_in_steps_too() -> None:
    """CASES 21: index_topk 10 against a pool of 2 x 2."""
    model = random_model(small_config(index_topk=10, candidate_topk_blocks=2, candidate_block_size=2))
    for position, step in steps(Engine(model), tokens(24)):
        chosen, pool = present(step["topk.5"][0, 0]), step["cand.5"][0, 0]
        assert len(chosen) == int(pool.sum()) == min(position + 1, len(chosen)) <= 4
        assert pool[chosen].all()


# --- keys multiplied -------------------------------------------------------------------------------------------------


def test_the_keys_multiplied_are_counted(golden: Golden) -> None:
    """CASES 4: at most the pool in later indexers, everything visible in the others, nothing where all is kept."""
    model, text = golden.model, golden.model.config.text
    pool, full = text.candidate_topk_blocks * text.candidate_block_size, model.trace(golden.ids)
    capped = 0
    for position, step in steps(Engine(model), golden.ids):
        for plan in model.plans:
            if not plan.selects:
                assert f"scored.{plan.layer}" not in step
                continue
            visible, found = (position + 1) // plan.ratio, int(step[f"scored.{plan.layer}"])
            if plan.candidate_role == "consumer" and visible > pool:
                capped += 1
                assert found == int(step[f"cand.{plan.layer}"].sum()) <= pool
            else:
                assert found == (visible if visible > text.index_topk else 0)
            whole = int(full[f"scored.{plan.layer}"][0, position])  # whose rows may have been scored in company
            assert whole == found or (not found and whole == visible)
    assert capped > 5


def test_counting_is_for_those_who_record(golden: Golden) -> None:
    engine, names = Engine(golden.model), []
    plain = engine.prefill(golden.ids, chunk=5)
    noted = engine.prefill(golden.ids, chunk=5, record=lambda name, value: names.append(name))
    assert torch.equal(plain.logits, noted.logits)
    layers = [f"scored.{plan.layer}" for plan in golden.model.plans if plan.selects]
    assert {name for name in names if name.startswith("scored.")} == set(layers)
    assert names.count(layers[0]) == -(-golden.ids.shape[1] // 5), "once a chunk"


# --- stale keys ------------------------------------------------------------------------------------------------------


def stale_selection(model: Model, source: int, x: torch.Tensor, position: int, keys: torch.Tensor) -> list[int]:
    """The source's own query and count of entries, another source's keys."""
    attn = model.blocks[source].attn
    by = attn.rotation_at(torch.tensor([position]))
    by = Rotation(by.cos.unsqueeze(1), by.sin.unsqueeze(1))
    queries, weights = attn.indexer.queries(x, attn.q_norm(attn.wq_a(x)), by)
    visible = torch.tensor([(position + 1) // model.plans[source].ratio])
    chosen, _ = select_everywhere(queries, weights, keys[:, : int(visible)], visible, model.config.text.index_topk)
    return present(chosen[0, 0])


@torch.no_grad()
def test_stale_keys_change_the_steps_that_close_no_group(golden: Golden) -> None:
    """CASES 1: there the first pooling source scores the last source's keys of the step before; elsewhere, and while
    there is nothing to choose, the mode changes nothing."""
    model, topk = golden.model, golden.model.config.text.index_topk
    source = model.config.text.kv_source_layer_ids[0]
    full, changed, predicted = model.trace(golden.ids), 0, 0
    own, stale = Engine(model), Engine(model, stale_keys=True)
    exact = {position: step["logits"] for position, step in steps(own, golden.ids)}
    for position, step in steps(stale, golden.ids):
        chosen = present(step[f"topk.{source}"][0, 0])
        assert max(chosen, default=-1) < (position + 1) // 2
        if (position + 1) % 2 == 0 or position // 2 <= topk:
            assert torch.equal(step["logits"], exact[position])
            continue
        keys = full[f"keys.{model.cut}"][:, :position]
        assert chosen == stale_selection(model, source, step[f"attn_in.{source}"], position, keys)
        predicted += 1
        changed += chosen != present(full[f"topk.{source}"][0, position])
    assert predicted > 8
    assert changed > predicted // 2, "other keys choose otherwise, if not always"


def test_stale_keys_are_for_steps_of_one_token(golden: Golden) -> None:
    own, stale, ids = Engine(golden.model), Engine(golden.model, stale_keys=True), golden.ids
    for prompt in (22, 23):
        a, b = own.prefill(ids[:, :prompt], chunk=1), stale.prefill(ids[:, :prompt], chunk=1)
        assert torch.equal(a.logits, b.logits)
        fed = ids[:, prompt : prompt + 3]
        assert torch.equal(own.decode(a, fed).logits, stale.decode(b, fed).logits)


# --- prompts, pairs and replays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_short_prompt_equals_its_tokens_one_by_one(golden: Golden, length: int) -> None:
    """CASES 2: length 1 sees no compressed entry at ratio 2, and nothing is NaN."""
    engine, ids, tensors = Engine(golden.model), golden.ids, {}
    whole = engine.prefill(ids[:, :length], record=tensors.__setitem__)
    state = engine.prefill(ids[:, :1])
    for position in range(1, length):
        state = engine.decode(state, ids[:, position : position + 1])
    assert state.logits.isfinite().all()
    assert worst(state.logits[:, -1], whole.logits[:, -1]) < 1e-5
    for plan in golden.model.plans:
        if plan.selects and plan.ratio == 2:
            assert tensors[f"main.{plan.layer}"].shape[1] == length // 2
            assert (tensors[f"topk.{plan.layer}"][0, 0] == -1).all()


def bytes_of(rows: Any) -> torch.Tensor:
    stored = rows.read()
    assert isinstance(stored, Packed)
    return torch.cat((stored.elements, stored.scales), -1).clone()


def test_three_tokens_and_three_more_close_the_pair_between(golden: Golden) -> None:
    """CASES 3: the open pair touches no stored row; closing it adds one; both ways end in the same bytes."""
    engine, ids, model = Engine(golden.model), golden.ids, golden.model
    source = next(plan.layer for plan in model.plans if plan.owns_kv)
    [three] = engine.prefill(ids[:, :3]).cache.lanes
    before = bytes_of(three.sources[source].main)
    assert before.shape[1] == 1
    assert three.sources[source].pending.values.shape[1] == 1
    [both] = engine.prefill(ids[:, :6], chunk=3).cache.lanes
    [once] = engine.prefill(ids[:, :6]).cache.lanes
    assert torch.equal(bytes_of(both.sources[source].main)[:, :1], before)
    for kind in ("main", "keys"):
        a, b = (bytes_of(getattr(lane.sources[source], kind)) for lane in (both, once))
        assert a.shape[1] == 3
        assert torch.equal(a, b)


def test_a_pending_group_is_not_stored(golden: Golden) -> None:
    """CASES 3, the other side: a row of the cache is what packing one whole pair gives."""
    engine, source = Engine(golden.model), next(plan.layer for plan in golden.model.plans if plan.owns_kv)
    full = golden.model.trace(golden.ids[:, :6])
    [lane] = engine.prefill(golden.ids[:, :7]).cache.lanes
    stored = lane.sources[source].main.read()
    assert torch.equal(values(stored), full[f"main.{source}"])
    assert torch.equal(stored.elements, pack(full[f"main.{source}"], stored.fmt).elements)


@pytest.mark.parametrize("where", ["before", "inside"])
def test_encoder_rows_before_a_replay_do_not_reach_its_first_windows(golden: Golden, where: str) -> None:
    """CASES 15: of the encoder's output, the first replayed layer's window KV sees the replayed rows alone."""
    engine, model, ids = Engine(golden.model), golden.model, golden.ids[:, :25]
    start = ids.shape[1] - model.config.text.sliding_window
    rows = slice(0, start) if where == "before" else slice(start + 1, start + 2)

    def perturb(module: Any, args: Any, result: tuple[Residual, Shared]) -> tuple[Residual, Shared]:
        streams = result[0].streams.clone()
        streams[:, rows] += torch.randn(streams[:, rows].shape, generator=torch.Generator().manual_seed(0))
        return Residual(streams, result[0].pre), result[1]

    def first_windows() -> torch.Tensor:
        [lane] = engine.prefill(ids, "replay").cache.lanes
        return lane.rings[model.cut].before(ids.shape[1])

    before = first_windows()
    hook = model.layers[model.cut - 1].register_forward_hook(perturb)
    try:
        assert torch.equal(first_windows(), before) is (where == "before")
    finally:
        hook.remove()


def test_the_cache_is_as_long_as_what_was_fed(golden: Golden) -> None:
    """CASES 17: the last token drawn was not fed."""
    engine = Engine(golden.model)
    state = engine.prefill(golden.ids[:, :9])
    drawn = torch.stack(list(engine.generate(state, 6)), dim=1)
    assert state.cache.lengths == [9 + 5]
    assert torch.equal(state.cache.tokens[0], torch.cat((golden.ids[0, :9], drawn[0, :5])))
    for layer, source in state.cache.lanes[0].sources.items():
        assert source.main.count == source.keys.count == 14 // golden.model.plans[layer].ratio


# --- every length ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_every_length_to_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of each length, in chunks drawn from it, and two more tokens, equal the full pass."""
    without_rounding(monkeypatch)
    config = small_config(
        num_hidden_layers=4,
        compress_ratios=[0, 2, 1, 1],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2, 3],
        candidate_source_layer_id=2,
    )
    model, ids = random_model(config), tokens(132)
    engine, full = Engine(model, packed=False), model(ids)
    for length in range(1, 131):
        chunk = None if length % 6 == 0 else length // 5 + length % 7 + 1
        state = engine.prefill(ids[:, :length], chunk=chunk)
        assert worst(state.logits[:, -1], full[:, length - 1]) < 1e-4, (length, chunk)
        after = engine.decode(state, ids[:, length : length + 2])
        assert worst(after.logits, full[:, length : length + 2]) < 1e-4, (length, chunk)
