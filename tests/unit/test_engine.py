"""The engine against the full forward pass: any split, any chunking, replay by the halo, states to go back to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import v41lib
from tests.conftest import Golden
from v41lib.accounting import memory
from v41lib.cache import Cache, CacheError, Lane
from v41lib.engine import Engine, EngineError
from v41lib.nn.quant import FP4, FP8, MXFP4


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.fixture(scope="module")
def full() -> Callable[[Golden], torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}

    def logits(golden: Golden) -> torch.Tensor:
        if golden.name not in kept:
            with torch.no_grad():
                kept[golden.name] = golden.model(golden.ids)
        return kept[golden.name]

    return logits


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 8, 13])
def test_prefill_and_decode_equal_the_full_pass(
    golden: Golden, full: Callable[[Golden], torch.Tensor], chunk: int | None, packed: bool
) -> None:
    """Every kind of split: within a window, within a pair, past the pool. The fixtures' bar is 1e-4."""
    exact, engine = full(golden), Engine(golden.model, packed)
    length = golden.ids.shape[1]
    for prompt in (1, 2, 3, 4, 7, length // 2, length - 3):
        state = engine.prefill(golden.ids[:, :prompt], chunk=chunk)
        assert worst(state.logits[:, -1], exact[:, prompt - 1]) < 1e-4
        assert state.length == prompt
        after = engine.decode(state, golden.ids[:, prompt : prompt + 3])
        assert worst(after.logits, exact[:, prompt : prompt + 3]) < 1e-4
        assert after.length == prompt + 3


def test_one_token_at_a_time_equals_what_others_decoded(golden: Golden) -> None:
    start = int(golden.meta["decode_starts_after"])  # type: ignore[call-overload]
    engine = Engine(golden.model)
    state = engine.prefill(golden.ids[:, :start])
    for position in range(start, golden.ids.shape[1]):
        state = engine.decode(state, golden.ids[:, position : position + 1])
        assert worst(state.logits[:, 0], golden.logits["mlx_decode"][:, position]) < 1e-4


@pytest.mark.parametrize("first", [0, 1])
def test_replay_is_exact_from_the_halo_on_and_not_before(
    golden: Golden, full: Callable[[Golden], torch.Tensor], first: int
) -> None:
    """Halo W + (depth - 1)(W - 1) for the replayed layers, whichever of the two conventions says where they begin."""
    model, last = golden.model, full(golden)[:, -1]
    begin = model.cut + first
    depth, window = len(model.layers) - begin, model.config.text.sliding_window
    halo = window + (depth - 1) * (window - 1)
    engine = Engine(model)
    for length, exact in ((halo, True), (golden.ids.shape[1], True), (halo - 1, False)):
        state = engine.prefill(golden.ids, mode="replay", replay_from=begin, replay_len=length)
        assert (worst(state.logits[:, -1], last) < 1e-5) is exact


def test_replay_does_not_depend_on_chunks_and_leaves_the_global_kv_exact(golden: Golden) -> None:
    engine = Engine(golden.model)
    [exact] = engine.prefill(golden.ids).cache.lanes
    states = [engine.prefill(golden.ids, mode="replay", chunk=chunk) for chunk in (None, 1, 5, 8)]
    for state in states:
        assert worst(state.logits, states[0].logits) < 1e-5
        [lane] = state.cache.lanes
        for layer, source in lane.sources.items():
            rows = source.main.read()
            other = exact.sources[layer].main.read()
            if layer < golden.model.cut:  # the encoder's own sums differ by chunking, in the last bits before rounding
                assert torch.equal(rows.elements, other.elements) and torch.equal(rows.scales, other.scales)
        assert state.skipped == (range(0, golden.ids.shape[1] - golden.model.config.text.sliding_window),)
        with pytest.raises(EngineError, match="position 0 of sequence 0 has no logits: replay skipped 0 to"):
            state.log_probs(0)
        assert state.log_probs(golden.ids.shape[1] - 1).exp().sum() == pytest.approx(1.0, abs=1e-5)


def test_a_prompt_within_the_window_is_replayed_bitwise(golden: Golden) -> None:
    engine, short = Engine(golden.model), golden.ids[:, : golden.model.config.text.sliding_window]
    assert torch.equal(engine.prefill(short, mode="replay").logits, engine.prefill(short).logits)


def test_a_replayed_window_begins_where_the_replay_does(golden: Golden) -> None:
    engine, cut, window = Engine(golden.model), golden.model.cut, golden.model.config.text.sliding_window
    ids = golden.ids
    [lane] = engine.prefill(ids, mode="replay").cache.lanes
    rows = lane.rings[cut]
    assert rows.since == ids.shape[1] - window
    assert rows.before(ids.shape[1]).shape[1] == window - 1


def test_an_old_state_stays_usable_until_the_ring_has_overwritten_it(golden: Golden) -> None:
    engine = Engine(golden.model, undo=2)
    old = engine.prefill(golden.ids[:, :10])
    expected = engine.decode(old, golden.ids[:, 10:11]).logits
    engine.decode(old, golden.ids[:, 12:15])
    assert torch.equal(engine.decode(old, golden.ids[:, 10:11]).logits, expected), "a rejected draft left a trace"
    far = engine.decode(old, golden.ids[:, 10:14])
    with pytest.raises(CacheError, match=r"state of length 10 \(sequence 0\) is gone: 4 tokens came after it"):
        engine.decode(old, golden.ids[:, 10:11])
    engine.decode(far, golden.ids[:, 14:15])


def test_a_state_of_an_abandoned_branch_is_refused(golden: Golden) -> None:
    engine = Engine(golden.model)
    root = engine.prefill(golden.ids[:, :10])
    branch = engine.decode(root, golden.ids[:, 10:12])
    engine.decode(root, golden.ids[:, 11:14])
    with pytest.raises(CacheError, match=r"state of length 12 \(sequence 0\) is gone: the cache went back to 10"):
        engine.decode(branch, golden.ids[:, 12:13])


def test_a_batch_equals_its_sequences(golden: Golden) -> None:
    engine = Engine(golden.model)
    pair = torch.cat((golden.ids, golden.ids.flip(1)))
    both = engine.decode(engine.prefill(pair[:, :11], chunk=4), pair[:, 11:14]).logits
    for row in range(2):
        one = engine.decode(engine.prefill(pair[row : row + 1, :11]), pair[row : row + 1, 11:14]).logits
        assert worst(both[row], one[0]) < 1e-5


@pytest.mark.parametrize("tokens", [1, 4, 5, 10])
def test_the_packed_cache_weighs_what_the_release_says(tokens: int) -> None:
    """890 bytes a token at released widths, by owner, read off the storage; windows are allocated once."""
    text = v41lib.released().text
    lane = Lane(text, [0], like=torch.zeros(1), undo=0)
    for plan in lane.plans:
        if plan.owns_kv:
            rows = tokens // plan.ratio
            lane.sources[plan.layer].main.write(0, torch.randn(1, rows, text.head_dim))
            lane.sources[plan.layer].keys.write(0, torch.randn(1, rows, text.index_head_dim))
    cache = Cache([lane])
    assert cache.global_nbytes() == memory.global_kv_bytes(text, tokens)
    assert (tokens % 2) or cache.global_nbytes() == 890 * tokens
    sizes = cache.nbytes()
    assert sizes["main.20"] == tokens * FP4.row_bytes(512) and sizes["keys.20"] == tokens * MXFP4.row_bytes(128)
    assert sizes["window.0"] == 128 * FP8.row_bytes(512)


def test_generation_streams_repeats_and_counts(golden: Golden) -> None:
    engine, prompt = Engine(golden.model), golden.ids[:, :9]
    greedy = torch.stack(list(engine.generate(prompt, 6)), dim=1)
    ids = prompt
    for step in range(6):
        with torch.no_grad():
            assert golden.model(ids)[:, -1].argmax(-1) == greedy[:, step]
        ids = torch.cat((ids, greedy[:, step : step + 1]), dim=1)
    drawn = [torch.stack(list(engine.generate(prompt, 8, temperature=1.0, seed=seed)), 1) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    narrow = torch.stack(list(engine.generate(prompt, 6, temperature=1.0, top_p=1e-6, seed=5)), dim=1)
    assert torch.equal(narrow, greedy), "a nucleus of one token is greedy"
    assert list(engine.generate(prompt, 0)) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"mode": "fast"}, "mode = 'fast': must be one of exact, replay"),
        ({"chunk": 0}, "chunk = 0"),
        ({"mode": "replay", "replay_len": 0}, "replay_len = 0"),
        ({"mode": "replay", "replay_from": 1}, "replay_from = 1: must be 4 to"),
        ({"replay_len": 4}, "mode='replay' only"),
    ],
)
def test_arguments_out_of_range_are_named(wide: Golden, arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint.replace("(", r"\(")):
        Engine(wide.model).prefill(wide.ids, **arguments)  # type: ignore[arg-type]


def test_states_and_prompts_that_do_not_fit_are_refused(tiny: Golden, wide: Golden) -> None:
    engine = Engine(tiny.model)
    state = engine.prefill(tiny.ids[:, :5])
    with pytest.raises(EngineError, match="made by another model"):
        Engine(wide.model).decode(state, wide.ids[:, :1])
    with pytest.raises(EngineError, match="a batch of 1"):
        engine.decode(state, tiny.ids[:, 5:6].repeat(2, 1))
    with pytest.raises(ValueError, match="at least one sequence of one token"):
        engine.prefill(tiny.ids[:, :0])
    with pytest.raises(ValueError, match="token ids are 0 to 63"):
        engine.decode(state, torch.tensor([[64]]))
    text = tiny.model.config.text.replace(max_position_embeddings=6)
    short = v41lib.Model(v41lib.Config.from_dict(tiny.model.config.to_dict() | {"text_config": text.to_dict()}))
    with pytest.raises(EngineError, match="5 tokens and 2 more: max_position_embeddings is 6"):
        Engine(short).decode(Engine(short).prefill(tiny.ids[:, :5]), tiny.ids[:, 5:7])
    with pytest.raises(EngineError, match="temperature"):
        engine.generate(tiny.ids, 1, temperature=-1.0)


def test_a_states_prefix_is_its_own_whatever_came_after(golden: Golden) -> None:
    engine = Engine(golden.model, packed=False)
    root = engine.prefill(golden.ids[:, :10])
    first = engine.decode(root, golden.ids[:, 10:13])
    list(engine.generate(root, 4))  # the cache has moved on, another way
    assert root.prefix().lengths == [10] and root.cache.lengths != [10]
    resumed = engine.resume(root, golden.ids[:, 10:13], windows="exact")
    assert worst(resumed.logits[:, -1], engine.prefill(golden.ids[:, :13]).logits[:, -1]) < 1e-5
    kept = engine.resume(root, golden.ids[:, 10:13])
    assert worst(kept.logits, resumed.logits) < 1e-5
    with pytest.raises(CacheError, match="took another way"):
        first.prefix()
    with pytest.raises(CacheError, match="length = 11: must be 1 to 10"):
        root.prefix(11)


def test_another_model_of_the_same_configuration_is_another_model(tiny: Golden) -> None:
    other = v41lib.Model(tiny.model.config, seed=7)
    state = Engine(tiny.model).prefill(tiny.ids[:, :5])
    with pytest.raises(EngineError, match="cache was made by another model"):
        Engine(other).resume(state, tiny.ids[:, 5:6])
    with pytest.raises(EngineError, match="state was made by another model"):
        Engine(other).generate(state, 1)


@pytest.mark.parametrize(
    "lengths", [(1.5, 2), torch.tensor([1.0, 2.0]), torch.tensor([[1], [2]]), 2, (True, True), (1,)]
)
def test_lengths_that_are_not_one_integer_a_row_are_refused(tiny: Golden, lengths: object) -> None:
    with pytest.raises(EngineError, match="must be 2 integers, one for each row of ids"):
        Engine(tiny.model).prefill(tiny.ids[:, :4].repeat(2, 1), lengths=lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [({"chunk": 2.5}, "chunk = 2.5: must be an integer"), ({"mode": "replay", "replay_len": 2.5}, "replay_len = 2.5")],
)
def test_counts_must_be_integers(tiny: Golden, arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        Engine(tiny.model).prefill(tiny.ids, **arguments)  # type: ignore[arg-type]


def test_what_an_engine_and_a_draw_cannot_be(tiny: Golden) -> None:
    with pytest.raises(EngineError, match="undo = -1"):
        Engine(tiny.model, undo=-1)
    with pytest.raises(EngineError, match="temperature = nan"):
        Engine(tiny.model).generate(tiny.ids, 1, temperature=float("nan"))
