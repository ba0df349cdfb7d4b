"""A batch of any lengths equals its sequences one by one; padding is never looked at, and errors name the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import Golden
from tests.unit.support import without_rounding
from v41lib.cache import CacheError
from v41lib.engine import Engine, EngineError, State

LENGTHS = [13, 21, 13, 1, 8]


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rounding(monkeypatch)


def batch_of(golden: Golden) -> torch.Tensor:
    return torch.cat([golden.ids.roll(shift, 1) for shift in range(len(LENGTHS))])


def padded(ids: torch.Tensor, value: int = -1) -> torch.Tensor:
    beyond = torch.arange(ids.shape[1]) >= torch.tensor(LENGTHS).unsqueeze(1)
    return ids.masked_fill(beyond, value)


def following(ids: torch.Tensor, state: State, count: int) -> torch.Tensor:
    return torch.stack([row[length : length + count] for row, length in zip(ids, state.lengths, strict=True)])


@torch.no_grad()
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_ragged_batch_equals_the_full_pass(golden: Golden, chunk: int | None, packed: bool) -> None:
    """Prefixes of the fixture, whose bar is 1e-4."""
    engine, ids = Engine(golden.model, packed), golden.ids.expand(len(LENGTHS), -1)
    full = golden.model(golden.ids)[0]
    state = engine.prefill(padded(ids), lengths=LENGTHS, chunk=chunk)
    for count in (1, 2, 1, 3):
        state = engine.decode(state, following(ids, state, count))
        for row, length in enumerate(state.lengths):
            assert (state.logits[row] - full[length - count : length]).abs().max() < 1e-4


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"mode": "replay"}, {"mode": "replay", "replay_len": 3}])
def test_a_ragged_batch_equals_its_sequences(golden: Golden, options: dict[str, Any]) -> None:
    engine, ids = Engine(golden.model, packed=False), batch_of(golden)
    state = engine.prefill(padded(ids), lengths=LENGTHS, **options)
    alone = [engine.prefill(ids[row : row + 1, :length], **options) for row, length in enumerate(LENGTHS)]
    for count in (0, 1, 1, 2, 1, 3):  # through the ends of pairs and of windows, at different steps for each sequence
        if count:
            fed = following(ids, state, count)
            state = engine.decode(state, fed)
            alone = [engine.decode(one, fed[row : row + 1]) for row, one in enumerate(alone)]
        for row, one in enumerate(alone):
            assert (state.logits[row] - one.logits[0]).abs().max() < 1e-5
            assert (state.lengths[row], state.skipped[row]) == (one.length, one.skipped[0])
            assert torch.equal(state.cache.tokens[row], ids[row, : one.length])
    assert len(state.cache.lanes) == 4, "two sequences of one length share a lane"
    sizes = [one.cache.nbytes() for one in alone]
    assert state.cache.nbytes() == {name: sum(size[name] for size in sizes) for name in sizes[0]}


@pytest.mark.parametrize("mode", ["exact", "replay"])
def test_padding_is_never_looked_at(golden: Golden, mode: Any) -> None:
    """Not even where it lies outside the vocabulary, or beyond the positions."""
    engine, ids = Engine(golden.model), batch_of(golden)
    expected = engine.prefill(ids, mode, lengths=LENGTHS).logits
    for value in (-1, 0, 10**9):
        assert torch.equal(engine.prefill(padded(ids, value), mode, lengths=torch.tensor(LENGTHS)).logits, expected)


def test_an_old_state_of_a_ragged_batch_stays_usable(golden: Golden) -> None:
    engine, ids = Engine(golden.model, undo=2), batch_of(golden)
    old = engine.prefill(ids, lengths=LENGTHS)
    fed = following(ids, old, 2)
    expected = engine.decode(old, fed).logits
    engine.decode(old, fed + 1)
    branch = engine.decode(old, fed)
    assert torch.equal(branch.logits, expected), "a rejected draft left a trace"
    engine.decode(old, fed[:, :1])
    with pytest.raises(CacheError, match=r"length 3 \(sequence 3\) is gone: the cache went back to 1"):
        engine.decode(branch, fed)
    engine.decode(old, fed.repeat(1, 2)[:, :4])
    with pytest.raises(CacheError, match=r"length 8 \(sequence 4\) is gone: 4 tokens came after it"):
        engine.decode(old, fed)


@pytest.mark.usefixtures("unrounded")
def test_a_refused_restore_changes_nothing(golden: Golden) -> None:
    """The short sequence could go back, the long ones cannot: neither does."""
    engine, ids = Engine(golden.model, packed=False, undo=0), batch_of(golden)
    old = engine.prefill(ids, lengths=LENGTHS)
    last = engine.decode(old, following(ids, old, 3))
    with pytest.raises(CacheError):
        engine.decode(old, following(ids, old, 1))
    assert tuple(last.cache.lengths) == last.lengths
    alone = engine.prefill(ids[3:4, :4])
    after = engine.decode(last, following(ids, last, 1)).logits[3]
    assert (after - engine.decode(alone, ids[3:4, 4:5]).logits[0]).abs().max() < 1e-5


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.8, "seed": 3}])
def test_generation_serves_a_ragged_batch(golden: Golden, options: dict[str, Any]) -> None:
    engine, ids = Engine(golden.model, packed=False), batch_of(golden)
    drawn = torch.stack(list(engine.generate(padded(ids), 5, lengths=LENGTHS, **options)), 1)
    assert torch.equal(drawn, torch.stack(list(engine.generate(padded(ids, 1), 5, lengths=LENGTHS, **options)), 1))
    if not options:
        for row, length in enumerate(LENGTHS):
            alone = torch.stack(list(engine.generate(ids[row : row + 1, :length], 5)), 1)
            assert torch.equal(drawn[row], alone[0])


def test_log_probabilities_are_asked_for_by_each_sequences_own_position(golden: Golden) -> None:
    """CASES 16, in a batch: what replay skipped differs from sequence to sequence."""
    engine, ids = Engine(golden.model), batch_of(golden)
    window = golden.model.config.text.sliding_window
    state = engine.prefill(ids, "replay", lengths=LENGTHS)
    assert state.skipped == tuple(range(0, max(length - window, 0)) for length in LENGTHS)
    found = state.log_probs([length - 1 for length in LENGTHS])
    assert torch.equal(found, state.logits[:, -1].log_softmax(-1))
    with pytest.raises(EngineError, match="position 0 of sequence 0 has no logits: replay skipped 0 to"):
        state.log_probs(0)
    with pytest.raises(EngineError, match="position 0 of sequence 4 has no logits here: this state holds 7 to 7"):
        engine.prefill(ids, lengths=LENGTHS).log_probs([12, 20, 12, 0, 0])
    with pytest.raises(EngineError, match="2 positions: the state holds a batch of 5"):
        state.log_probs([1, 2])


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (lambda engine, ids: engine.prefill(ids, lengths=[3, 0, 1, 1, 1]), r"lengths\[1\] = 0: must be 1 to "),
        (lambda engine, ids: engine.prefill(ids, lengths=[3, 1, 1, 1, 9999]), r"lengths\[4\] = 9999: must be 1 to "),
        (lambda engine, ids: engine.prefill(ids, lengths=[3, 1]), r"lengths = \[3, 1\]: must be 5 integers"),
        (lambda engine, ids: engine.prefill(ids, lengths=LENGTHS, record=print), "4 lengths cannot be recorded"),
        (lambda engine, ids: engine.prefill(padded(ids), lengths=[13, 21, 14, 1, 8]), "input_ids holds -1"),
        (lambda engine, ids: engine.prefill(ids, lengths=LENGTHS).length, r"have \[13, 21, 13, 1, 8\] tokens"),
        (lambda engine, ids: engine.generate(engine.prefill(ids), 1, lengths=LENGTHS), "a state knows its own"),
    ],
)
def test_what_does_not_fit_a_ragged_batch_is_refused(
    tiny: Golden, request_: Callable[[Engine, torch.Tensor], object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        request_(Engine(tiny.model), batch_of(tiny))
