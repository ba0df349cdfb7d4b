"""Resuming after a prefix hit: global KV reused untouched, windows kept, rebuilt exactly, or by bounded replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import Golden
from tests.unit.support import random_model, small_config, tokens, without_rounding
from v41lib import Model
from v41lib.cache import CacheError, Rows
from v41lib.engine import Engine, EngineError
from v41lib.model import Residual
from v41lib.nn.quant import Packed
from v41lib.nn.shared import GlobalKV, Shared

# Two sources of other ratios than the release's; groups of five are wider than a window of three.
WIDE_GROUPS = {
    "num_hidden_layers": 5,
    "compress_ratios": [0, 5, 5, 3, 3],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
}


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rounding(monkeypatch)


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@torch.no_grad()
def resumed_by_hand(model: Model, ids: torch.Tensor, hit: int, begin: int, kept: int | None = None) -> torch.Tensor:
    """The last logits of a re-run from ``begin``, without engine, cache, chunks or rounding: exact rows below ``hit``,
    and the decoder on the last ``kept`` rows only where that is given."""
    exact, state, start = model.trace(ids), model.begin(ids[:, begin:]), begin
    residual, shared, is_image = state.residual, Shared(), state.is_image
    for block in model.blocks:
        layer, ratio, attn = block.plan.layer, block.plan.ratio, block.attn
        if block.plan.owns_kv:
            rows, x = hit // ratio, block.attention_input(residual)
            main, keys = attn.compressed(attn.compressor(x[:, rows * ratio - start :]), rows)
            main = torch.cat((exact[f"main.{layer}"][:, :rows], main), 1)
            keys = torch.cat((exact[f"keys.{layer}"][:, :rows], keys), 1)
            shared = shared.publish(GlobalKV(layer, ratio, main, keys))
        if kept is not None and layer == model.cut:
            residual, start = Residual(residual.streams[:, -kept:], residual.pre[:, -kept:]), ids.shape[1] - kept
            is_image = is_image if is_image is None else is_image[:, -kept:]

        def attend(x: torch.Tensor, shared: Shared, attn: Any = attn, start: int = start) -> Any:
            return attn.attend_rows(x, start, attn.window_kv(x, start + torch.arange(x.shape[1])), shared)

        residual, shared = block(residual, shared, is_image, None, attend)
    return model.logits(residual)[:, -1:]


def stored(rows: Rows, count: int) -> tuple[torch.Tensor, ...]:
    packed = rows.read()
    assert isinstance(packed, Packed)
    return packed.elements[:, :count].clone(), packed.scales[:, :count].clone()


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_exact_windows_give_what_a_cold_run_gives(golden: Golden, mode: Any) -> None:
    """Every hit up to past the window, odd and even, then some far ones; more new tokens, or fewer, than a window."""
    model, engine = golden.model, Engine(golden.model, packed=False)
    end, window = golden.ids.shape[1], model.config.text.sliding_window
    cached = engine.prefill(golden.ids).cache
    for hit in [*range(1, window + 4), *range(window + 5, end, 9)]:
        prefix = cached.prefix(hit)
        for more in {1, min(window + 2, end - hit)}:
            cold = engine.prefill(golden.ids[:, : hit + more], mode)
            found = engine.resume(prefix, golden.ids[:, hit : hit + more], "exact", mode)
            assert worst(found.logits, cold.logits) < 1e-5
            if hit + more < end:
                fed = golden.ids[:, hit + more : hit + more + 1]
                assert worst(engine.decode(found, fed).logits, engine.decode(cold, fed).logits) < 1e-5


@torch.no_grad()
def test_exact_windows_of_packed_caches_give_the_full_pass(golden: Golden) -> None:
    ids, engine = golden.ids, Engine(golden.model)
    full, cached = golden.model(ids), engine.prefill(ids).cache
    for hit in (5, 12, ids.shape[1] - 4, ids.shape[1] - 5):
        found = engine.resume(cached.prefix(hit), ids[:, hit : hit + 3], "exact", chunk=7)
        assert worst(found.logits, full[:, hit + 2 : hit + 3]) < 1e-4
        assert worst(engine.decode(found, ids[:, hit + 3 : hit + 4]).logits, full[:, hit + 3 : hit + 4]) < 1e-4


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("seed", range(4))
def test_one_token_fewer_run_again_is_not_exact(seed: int) -> None:
    """W - 1 tokens a layer are enough: the halo of SPEC 6 but for the new token itself, which it counts too."""
    config = small_config(
        num_hidden_layers=3,
        compress_ratios=[0, 2, 1],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2],
        candidate_source_layer_id=2,
        sliding_window=4,
    )
    model, ids, hit = random_model(config, seed), tokens(30), 29
    engine = Engine(model, packed=False)
    cold, prefix = engine.prefill(ids).logits, engine.prefill(ids[:, :hit]).cache.prefix()
    for count, exact in ((9, True), (8, False)):
        again = engine.resume(prefix, ids[:, hit:], "replay", rerun_len=count).logits
        assert (worst(again, cold) < 1e-5) is exact
    assert worst(engine.resume(prefix, ids[:, hit:], "exact").logits, cold) < 1e-5


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_bounded_replay_of_the_windows(golden: Golden, mode: Any, chunk: int | None) -> None:
    """SPEC 6, against a re-run written out by hand; in whatever chunks the new tokens come."""
    engine, window = Engine(golden.model, packed=False), golden.model.config.text.sliding_window
    cached = engine.prefill(golden.ids[:, :28]).cache
    for hit in range(1, window + 4):
        for more in (1, 12) if hit > window else (2,):
            ids = golden.ids[:, : hit + more]
            found = engine.resume(cached.prefix(hit), ids[:, hit:], "replay", mode, chunk)
            if hit <= window:
                expected = engine.prefill(ids, mode, chunk).logits
                assert torch.equal(found.logits, expected), "a hit within the window is a cold run"
            else:
                expected = resumed_by_hand(golden.model, ids, hit, hit - window, window if mode == "replay" else None)
                assert worst(found.logits, expected) < 1e-5


def test_the_result_of_bounded_replay_depends_on_the_hit(golden: Golden) -> None:
    engine, ids, window = Engine(golden.model), golden.ids, golden.model.config.text.sliding_window
    cached, end = engine.prefill(ids).cache, min(ids.shape[1], 3 * window)
    exact = engine.prefill(ids[:, :end]).logits
    early, late = (engine.resume(cached.prefix(hit), ids[:, hit:end], "replay").logits for hit in (end - 3, end - 1))
    assert worst(early, late) > 1e-4
    assert worst(late, exact) > 1e-4


@pytest.mark.parametrize("mode", ["exact", "replay"])
@pytest.mark.parametrize("windows", ["kept", "replay", "exact"])
@pytest.mark.parametrize("odd", [0, 1])
def test_global_kv_of_the_prefix_is_never_written_again(
    golden: Golden, monkeypatch: pytest.MonkeyPatch, windows: Any, mode: Any, odd: int
) -> None:
    """CASES 15, of a resumed prefix: not a byte changes, in the result or in the prefix, which may be hit again."""
    engine, text = Engine(golden.model), golden.model.config.text
    hit = text.num_hidden_layers * (text.sliding_window - 1) + 6 + odd  # no re-run reaches back to the start
    hit -= hit % 2 - odd
    before = engine.prefill(golden.ids[:, :hit]).cache
    cache = before if windows == "kept" else before.prefix()
    [lane] = before.lanes
    written: list[int] = []
    original = Rows.write
    monkeypatch.setattr(Rows, "write", lambda self, first, rows: (written.append(first), original(self, first, rows)))
    state = engine.resume(cache, golden.ids[:, hit : hit + 5], windows, mode)
    monkeypatch.undo()
    rows_of = {source: hit // golden.model.plans[source].ratio for source in lane.sources}
    rings = 0 if windows == "kept" else len(golden.model.layers)  # each new ring is filled with zeros once
    assert written.count(0) == rings
    assert min(first for first in written if first) >= min(rows_of.values())
    for layer, source in state.cache.lanes[0].sources.items():
        for ours, theirs in ((source.main, lane.sources[layer].main), (source.keys, lane.sources[layer].keys)):
            assert theirs.count == rows_of[layer]
            pairs = zip(stored(ours, theirs.count), stored(theirs, theirs.count), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    again = engine.resume(cache, golden.ids[:, hit : hit + 5], windows, mode)
    assert torch.equal(again.logits, state.logits)
    assert (cache.lengths, state.lengths) == ([hit], (hit + 5,))


@pytest.mark.parametrize("hit", [12, 13])
def test_a_prefix_cache_keeps_neither_windows_nor_open_groups(golden: Golden, hit: int) -> None:
    engine = Engine(golden.model)
    cache = engine.prefill(golden.ids[:, :hit]).cache
    prefix = cache.prefix()
    sizes = cache.nbytes()
    assert prefix.nbytes() == {name: size for name, size in sizes.items() if name.startswith(("main.", "keys."))}
    assert any(name.startswith("open.") for name in sizes)
    assert prefix.global_nbytes() == cache.global_nbytes()
    assert torch.equal(prefix.tokens[0], golden.ids[0, :hit])
    assert cache.prefix(5).nbytes() == engine.prefill(golden.ids[:, :5]).cache.prefix().nbytes()
    with pytest.raises(EngineError, match="keeps none; use 'replay' to rebuild them approximately or 'exact' exactly"):
        engine.resume(prefix, golden.ids[:, hit:])
    with pytest.raises(CacheError, match=f"length = {hit + 1}: must be 1 to {hit}, the tokens of sequence 0"):
        cache.prefix(hit + 1)


@pytest.mark.usefixtures("unrounded")
def test_kept_windows_continue(golden: Golden) -> None:
    engine, ids = Engine(golden.model, packed=False), golden.ids
    state = engine.prefill(ids[:, :11])
    expected = engine.decode(state, ids[:, 11:14]).logits[:, -1:]
    cache = engine.prefill(ids[:, :11]).cache
    for chunk in (None, 1, 2):
        assert worst(engine.resume(cache, ids[:, 11:14], chunk=chunk).logits, expected) < 1e-5


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("hit", range(1, 24))
def test_any_ratio_resumes(hit: int) -> None:
    """Groups wider than a window: an open one is rebuilt from its own first token, before the window's."""
    model, ids = random_model(small_config(**WIDE_GROUPS)), tokens(hit + 8)
    engine = Engine(model, packed=False)
    prefix = engine.prefill(ids[:, :hit]).cache.prefix()
    for mode in ("exact", "replay"):
        cold = engine.prefill(ids, mode)
        assert worst(engine.resume(prefix, ids[:, hit:], "exact", mode).logits, cold.logits) < 1e-5
    begin = max(min(hit - 3, hit // 5 * 5, hit // 3 * 3), 0)
    found = engine.resume(prefix, ids[:, hit:], "replay").logits
    assert worst(found, resumed_by_hand(model, ids, hit if begin else 0, begin)) < 1e-5


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("windows", ["kept", "replay", "exact"])
def test_a_ragged_batch_resumes_sequence_by_sequence(golden: Golden, windows: Any) -> None:
    """Prefixes of two lengths, new tokens of two lengths, garbage behind them."""
    engine, ids = Engine(golden.model, packed=False), torch.cat([golden.ids.roll(shift, 1) for shift in range(4)])
    hits, more = [13, 10, 10, 13], [4, 6, 4, 4]
    new = torch.full((4, 6), -1)
    for row in range(4):
        new[row, : more[row]] = ids[row, hits[row] : hits[row] + more[row]]
    cache = engine.prefill(ids, lengths=hits).cache
    cache = cache if windows == "kept" else cache.prefix()
    state = engine.resume(cache, new, windows, lengths=more)
    assert state.lengths == (17, 16, 14, 17)
    for row in range(4):
        one = engine.prefill(ids[row : row + 1, : hits[row]]).cache
        alone = engine.resume(one, new[row : row + 1, : more[row]], windows)
        assert worst(state.logits[row], alone.logits[0]) < 1e-5
    fed = torch.stack([ids[row, length : length + 2] for row, length in enumerate(state.lengths)])
    after = engine.decode(state, fed).logits
    if windows == "exact":
        for row, length in enumerate(state.lengths):
            cold = engine.decode(engine.prefill(ids[row : row + 1, :length]), fed[row : row + 1])
            assert worst(after[row], cold.logits[0]) < 1e-5


def test_a_resumed_replay_skips_and_says_so(tiny: Golden) -> None:
    engine, ids = Engine(tiny.model), tiny.ids
    prefix = engine.prefill(ids[:, :10]).cache.prefix()
    state = engine.resume(prefix, ids[:, 10:16], "replay", "replay")
    assert state.skipped == (range(6, 12),)
    with pytest.raises(EngineError, match="position 11 of sequence 0 has no logits: replay skipped 6 to 11"):
        state.log_probs(11)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"windows": "none"}, "windows = 'none': must be one of kept, replay, exact"),
        ({"windows": "exact", "rerun_len": 4}, "rerun_len = 4: .*windows='replay'"),
        ({"windows": "replay", "rerun_len": 0}, "rerun_len = 0: must be at least 1"),
        ({"windows": "replay", "mode": "replay", "replay_len": 7}, "replay_len = 7: 2 new tokens and the 4 that run"),
        ({"windows": "replay", "mode": "fast"}, "mode = 'fast'"),
        ({"windows": "replay", "ids": torch.zeros(2, 2, dtype=torch.int64)}, "the cache holds a batch of 1"),
        ({"windows": "replay", "lengths": [3]}, r"lengths\[0\] = 3: must be 1 to 2"),
    ],
)
def test_what_cannot_be_resumed_is_refused(tiny: Golden, arguments: dict[str, Any], complaint: str) -> None:
    engine = Engine(tiny.model)
    prefix = engine.prefill(tiny.ids[:, :10]).cache.prefix()
    with pytest.raises(EngineError, match=complaint):
        engine.resume(prefix, **({"ids": tiny.ids[:, 10:12]} | arguments))


def test_a_prefix_that_does_not_fit_the_model_is_refused(tiny: Golden, wide: Golden) -> None:
    prefix = Engine(tiny.model).prefill(tiny.ids[:, :10]).cache.prefix()
    with pytest.raises(EngineError, match="made by another model"):
        Engine(wide.model).resume(prefix, wide.ids[:, :1], "replay")
    model = random_model(small_config(max_position_embeddings=6))
    prefix = Engine(model).prefill(tokens(5)).cache.prefix()
    with pytest.raises(EngineError, match="sequence 0: 5 tokens and 2 more: max_position_embeddings is 6"):
        Engine(model).resume(prefix, tokens(2), "exact")
