"""Scores, selections and candidate pools.

The function tests use small integers, on which FP32 is exact: scores are then exact too, ties are frequent, and the
expected selection is a plain sort by (score, lower index).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import v41lib.nn.attention
from tests.conftest import Golden
from tests.unit.reference import as_mask
from tests.unit.support import random_model, small_config, tokens
from v41lib import Model
from v41lib.nn import indexer
from v41lib.nn.indexer import best, block_entries, candidate_blocks, score, select_among, select_everywhere


def integers(draw: st.DrawFn, *shape: int, low: int = -3, high: int = 3) -> torch.Tensor:
    return torch.from_numpy(draw(hnp.arrays(np.int64, shape, elements=st.integers(low, high)))).float()


@st.composite
def problems(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Queries, head weights and keys of small integers, and how many entries each query sees (never falling)."""
    batch, length, heads, width, count = (draw(st.integers(1, n)) for n in (2, 5, 3, 3, 14))
    visible = sorted(draw(st.lists(st.integers(0, count), min_size=length, max_size=length)))
    return {
        "queries": integers(draw, batch, length, heads, width),
        "weights": integers(draw, batch, length, heads),
        "keys": integers(draw, batch, count, width),
        "visible": torch.tensor(visible),
    }


def exact_scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """ReLU per head, *then* the weighted sum (CASES 8), written as loops."""
    batch, length, heads, _ = queries.shape
    out = torch.zeros(batch, length, keys.shape[1])
    for b, s, h, c in np.ndindex(batch, length, heads, keys.shape[1]):
        out[b, s, c] += weights[b, s, h] * max(float(queries[b, s, h] @ keys[b, c]), 0.0)
    return out


def first_best(values: dict[int, float], k: int) -> list[int]:
    """The k highest, ties to the lower number, ascending."""
    return sorted(sorted(values, key=lambda entry: (-values[entry], entry))[:k])


def present(entries: torch.Tensor) -> list[int]:
    return [entry for entry in entries.tolist() if entry >= 0]


# --- scores ----------------------------------------------------------------------------------------------------------


@given(problem=problems())
def test_scores_are_relu_per_head_before_the_weighted_sum(problem: dict[str, torch.Tensor]) -> None:
    ours = score(problem["queries"], problem["weights"], problem["keys"])
    assert torch.equal(ours, exact_scores(problem["queries"], problem["weights"], problem["keys"]))


def test_relu_comes_before_the_sum() -> None:
    """CASES 8: two heads that would cancel. Head 0 gives +4, head 1 gives relu(-4) = 0; weights 1 and 1."""
    queries = torch.tensor([[[[2.0], [-2.0]]]])
    assert score(queries, torch.ones(1, 1, 2), torch.tensor([[[2.0]]])).item() == 4.0
    assert score(queries, torch.tensor([[[-1.0, 1.0]]]), torch.tensor([[[2.0]]])).item() == -4.0


@given(problem=problems(), data=st.data())
def test_keys_of_each_query_score_as_shared_keys_do(problem: dict[str, torch.Tensor], data: st.DataObject) -> None:
    keys = problem["keys"]
    batch, length = problem["queries"].shape[:2]
    own = keys.unsqueeze(1).expand(batch, length, *keys.shape[1:])
    shared = score(problem["queries"], problem["weights"], keys)
    assert torch.equal(score(problem["queries"], problem["weights"], own), shared)


def test_head_weights_carry_both_factors() -> None:
    """SPEC 5: weights_proj(x) * width^-0.5 * heads^-0.5, in FP32; queries are rounded to MXFP4, keys too."""
    model = random_model(small_config())
    module, x = model.layers[2].attn.indexer, torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(0))
    by = model.layers[2].attn.rotation_at(torch.arange(2))
    by = type(by)(by.cos.unsqueeze(1), by.sin.unsqueeze(1))
    with torch.no_grad():
        queries, weights = module.queries(x, torch.zeros(1, 2, 8), by)
        assert torch.allclose(weights, x @ module.weights_proj.weight.T * 8**-0.5 * 3**-0.5, atol=1e-6)
        assert not queries.any()


# --- selection -------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    values=hnp.arrays(
        np.float32, st.integers(1, 20), elements=st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1e-30, 1.0, 1.0, 3.0])
    ),
    k=st.integers(1, 24),
)
def test_best_keeps_the_highest_ties_to_the_lower_index(values: np.ndarray, k: int) -> None:
    scores = torch.from_numpy(values)
    chosen = best(scores, k)
    finite = {entry: float(value) for entry, value in enumerate(values) if value > -math.inf}
    assert chosen.shape == (min(k, len(values)),)
    assert present(chosen) == first_best(finite, k)
    assert (chosen[len(present(chosen)) :] == -1).all(), "absent slots come last"


@given(values=hnp.arrays(np.float32, 12, elements=st.floats(-(2.0**100), 2.0**100, width=32)), k=st.integers(1, 12))
def test_best_orders_any_floats(values: np.ndarray, k: int) -> None:
    """Subnormals, both zeros and large numbers of both signs, through the integer comparison."""
    assert best(torch.from_numpy(values), k).tolist() == first_best(dict(enumerate(values.tolist())), k)


def test_minus_zero_ties_with_zero() -> None:
    assert best(torch.tensor([-0.0, 0.0, -0.0]), 2).tolist() == [0, 1]
    assert best(torch.tensor([-1.0, -0.0, 0.0]), 1).tolist() == [1]


@given(problem=problems(), k=st.integers(1, 16))
def test_selection_over_everything_visible(problem: dict[str, torch.Tensor], k: int) -> None:
    """Top-k of the visible entries, all of them when fewer, absent ones -1; scores -inf where invisible."""
    chosen, scores = select_everywhere(problem["queries"], problem["weights"], problem["keys"], problem["visible"], k)
    exact = exact_scores(problem["queries"], problem["weights"], problem["keys"])
    count = exact.shape[-1]
    assert chosen.shape == (*exact.shape[:2], min(k, count))
    for b, s in np.ndindex(*exact.shape[:2]):
        seen = int(problem["visible"][s])
        assert present(chosen[b, s]) == first_best({c: float(exact[b, s, c]) for c in range(seen)}, k)
        assert torch.equal(scores[b, s, :seen], exact[b, s, :seen])
        assert (scores[b, s, seen:] == -math.inf).all()


# --- candidates ------------------------------------------------------------------------------------------------------


def expected_blocks(scores: torch.Tensor, seen: int, size: int, limit: int) -> list[int]:
    """Best visible entry of each block; the newest visible block first of all; ties to the lower block."""
    value = {
        block: math.inf
        if block == (seen - 1) // size
        else float(scores[block * size : min((block + 1) * size, seen)].max())
        for block in range(math.ceil(seen / size))
    }
    return first_best(value, limit)


@settings(max_examples=80)
@given(problem=problems(), size=st.integers(1, 4), limit=st.integers(1, 6))
def test_candidate_blocks(problem: dict[str, torch.Tensor], size: int, limit: int) -> None:
    _, scores = select_everywhere(problem["queries"], problem["weights"], problem["keys"], problem["visible"], 1)
    blocks = candidate_blocks(scores, problem["visible"], size, limit)
    for b, s in np.ndindex(*scores.shape[:2]):
        seen = int(problem["visible"][s])
        kept = present(blocks[b, s])
        assert kept == expected_blocks(scores[b, s], seen, size, limit)
        if seen:
            assert (seen - 1) // size in kept, "the newest visible entry's block is always kept"
        if math.ceil(seen / size) <= limit:
            assert kept == list(range(math.ceil(seen / size))), "CASES 5: fewer visible than the pool holds"


def test_the_newest_block_is_kept_though_it_scores_worst() -> None:
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0, -9.0, -math.inf, -math.inf]]])
    assert candidate_blocks(scores, torch.tensor([6]), 2, 2).tolist() == [[[0, 2]]]
    assert candidate_blocks(scores, torch.tensor([6]), 2, 1).tolist() == [[[2]]]
    assert candidate_blocks(scores, torch.tensor([5]), 4, 1).tolist() == [[[1]]]


def test_a_block_scores_as_its_best_entry_not_its_sum() -> None:
    scores = torch.tensor([[[3.0, 3.0, 4.0, -9.0, 0.0, 0.0]]])
    assert candidate_blocks(scores, torch.tensor([6]), 2, 2).tolist() == [[[1, 2]]]


def test_block_entries() -> None:
    assert block_entries(torch.tensor([[0, 2, -1]]), 2).tolist() == [[0, 1, 4, 5, -1, -1]]


@settings(max_examples=80)
@given(problem=problems(), size=st.integers(1, 4), limit=st.integers(1, 5), k=st.integers(1, 16))
def test_searching_the_pool_equals_masking_after_full_scoring(
    problem: dict[str, torch.Tensor], size: int, limit: int, k: int
) -> None:
    """CASES 4 and 21: the set that full scoring, then masking gives; surplus slots are -1, never outside the pool."""
    args = problem["queries"], problem["weights"], problem["keys"], problem["visible"]
    blocks = candidate_blocks(select_everywhere(*args, 1)[1], problem["visible"], size, limit)
    chosen, _ = select_among(*args, k, blocks, size)
    scores = select_everywhere(*args, 1)[1]
    count = scores.shape[-1]
    assert chosen.shape == (*scores.shape[:2], min(k, count))
    for b, s in np.ndindex(*scores.shape[:2]):
        seen = int(problem["visible"][s])
        pool = {
            entry for block in present(blocks[b, s]) for entry in range(block * size, min((block + 1) * size, seen))
        }
        assert present(chosen[b, s]) == first_best({entry: float(scores[b, s, entry]) for entry in pool}, k)
        assert (chosen[b, s, len(present(chosen[b, s])) :] == -1).all()


@given(problem=problems(), size=st.integers(1, 3), limit=st.integers(1, 3), data=st.data())
def test_a_later_indexers_own_scores_decide_inside_the_pool(
    problem: dict[str, torch.Tensor], size: int, limit: int, data: st.DataObject
) -> None:
    """The pool comes from one layer's scores, the choice from another's."""
    args = problem["queries"], problem["weights"], problem["keys"], problem["visible"]
    blocks = candidate_blocks(select_everywhere(*args, 1)[1], problem["visible"], size, limit)
    others = -problem["weights"]
    chosen, _ = select_among(problem["queries"], others, problem["keys"], problem["visible"], 2, blocks, size)
    exact = exact_scores(problem["queries"], others, problem["keys"])
    for b, s in np.ndindex(*exact.shape[:2]):
        seen = int(problem["visible"][s])
        pool = {
            entry for block in present(blocks[b, s]) for entry in range(block * size, min((block + 1) * size, seen))
        }
        assert present(chosen[b, s]) == first_best({entry: float(exact[b, s, entry]) for entry in pool}, 2)


# --- in the model ----------------------------------------------------------------------------------------------------


class Counter:
    """Stands in for ``indexer.score`` and notes how many keys each call multiplied for each query."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.everywhere: list[int] = []
        self.among: list[int] = []
        original = indexer.score

        def counting(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            (self.everywhere if keys.dim() == 3 else self.among).append(keys.shape[-2])
            return original(queries, weights, keys)

        monkeypatch.setattr(indexer, "score", counting)


@torch.no_grad()
@pytest.mark.parametrize("length", [7, 20, 40, 80, 97])
def test_later_indexers_multiply_at_most_the_pool(wide: Golden, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """CASES 4, counted: layers after the cap source score 20 keys a query however long the prompt, the sources all."""
    text, counter = wide.model.config.text, Counter(monkeypatch)
    pool = text.candidate_topk_blocks * text.candidate_block_size
    wide.model(wide.ids[:, :length])
    if length <= text.index_topk:
        assert not counter.everywhere
        assert not counter.among, "with nothing to choose nothing is scored"
    elif length <= pool:
        assert not counter.among, "while everything fits the pool there is no pool"
        assert max(counter.everywhere) <= length
    else:
        assert set(counter.among) == {pool}, "the later indexer scored more, or fewer, than its candidates"
        assert max(counter.everywhere) == length, "the cap source scans everything visible"
        assert length // 2 in counter.everywhere
        assert counter.everywhere.count(length) == 1, "only the cap source's last queries score them all"


@torch.no_grad()
def test_at_released_sizes_a_later_indexer_reads_16384_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release's pool, 2048 blocks of 8, above a context of 20,000 entries, with one query at the end."""
    counter, generator = Counter(monkeypatch), torch.Generator().manual_seed(0)
    queries, weights, keys = (
        torch.randn(*shape, generator=generator) for shape in ((1, 1, 4, 8), (1, 1, 4), (1, 20_000, 8))
    )
    visible = torch.tensor([20_000])
    _, scores = indexer.select_everywhere(queries, weights, keys, visible, 512)
    blocks = indexer.candidate_blocks(scores, visible, 8, 2048)
    chosen, _ = indexer.select_among(queries, -weights, keys, visible, 512, blocks, 8)
    assert counter.everywhere == [20_000]
    assert counter.among == [16_384]
    assert blocks.shape == (1, 1, 2048)
    pool = as_mask(block_entries(blocks, 8), 20_000)
    masked = indexer.score(queries, -weights, keys).masked_fill(~pool, -math.inf)
    assert set(chosen[0, 0].tolist()) == set(masked[0, 0].topk(512).indices.tolist())


@torch.no_grad()
@pytest.mark.parametrize("block_elements", [1, 2000, 1 << 26])
def test_ties_go_to_the_lower_index_however_queries_are_grouped(
    monkeypatch: pytest.MonkeyPatch, block_elements: int
) -> None:
    """All index queries zero: every score is 0, so the first entries win, and the first blocks beside the last."""
    monkeypatch.setattr(v41lib.nn.attention, "BLOCK_ELEMENTS", block_elements)
    model = random_model(small_config())
    text = model.config.text
    for layer in (2, 4, 5):
        model.layers[layer].attn.indexer.wq_b.weight.zero_()
    trace = model.trace(tokens(23, batch=2))
    for layer, ratio in ((2, 2), (4, 1)):
        for row in range(23):
            expected = list(range(min((row + 1) // ratio, text.index_topk)))
            assert present(trace[f"topk.{layer}"][0, row]) == expected
    for row in range(23):
        newest, seen = row // 2, row + 1
        blocks = sorted({*range(min(2, newest)), newest}) if seen > 6 else list(range(math.ceil(seen / 2)))
        pool = [entry for block in blocks for entry in (2 * block, 2 * block + 1) if entry < seen]
        assert trace["cand.4"][1, row].nonzero().flatten().tolist() == pool
        assert present(trace["topk.5"][1, row]) == pool[:4]


@torch.no_grad()
def test_an_even_prompts_next_step_selects_among_its_own_keys(wide: Golden) -> None:
    """CASES 1, as far as a full prefill shows it: row P of a prompt of P + 1 tokens, P even, sees P/2 entries, all
    written by the source itself, and selects the best of exactly those."""
    model = wide.model
    for length in (2, 4, 10, 16, 40):
        trace = model.trace(wide.ids[:, : length + 1])
        for source in (1, 3):
            assert trace[f"main.{source}"].shape[1] == length // 2
            chosen = present(trace[f"topk.{source}"][0, length])
            assert len(chosen) == min(length // 2, model.config.text.index_topk)
            assert max(chosen) < length // 2
            full = present(model.trace(wide.ids)[f"topk.{source}"][0, length])
            assert chosen == full, "row P does not depend on what follows"


@torch.no_grad()
def test_few_visible_entries_are_all_candidates_and_all_selected(wide: Golden) -> None:
    """CASES 5: up to the pool's 20 entries every visible one is a candidate, also in a prompt that has a pool."""
    trace = wide.model.trace(wide.ids)
    for row in range(20):
        assert trace["cand.4"][0, row].nonzero().flatten().tolist() == list(range(row + 1))
    for row in range(8):
        assert present(trace["topk.6"][0, row]) == list(range(row + 1))
    assert not trace["cand.4"][0, 40].all()


@torch.no_grad()
def test_a_selection_larger_than_the_pool_is_filled_with_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 21: index_topk 10 against a pool of 2 x 2. The source itself selects ten; the later layer four at most."""
    model = random_model(small_config(index_topk=10, candidate_topk_blocks=2, candidate_block_size=2))
    trace = model.trace(tokens(30))
    assert all(len(present(trace["topk.4"][0, row])) == min(row + 1, 10) for row in range(30))
    for row in range(30):
        chosen, pool = present(trace["topk.5"][0, row]), trace["cand.5"][0, row]
        assert len(chosen) == int(pool.sum()) <= 4
        assert pool[chosen].all()
        assert (trace["topk.5"][0, row, len(chosen) :] == -1).all()


def test_indexers_get_no_gradient_from_the_language_model() -> None:
    """SPEC 5: a hard top-k passes none; everything else but the selection biases gets some."""
    model = random_model(small_config())
    model(tokens(20, batch=2)).square().mean().backward()
    for name, weight in model.named_parameters():
        silent = ".indexer." in name or "gate.bias" in name
        reached = weight.grad is not None and bool(weight.grad.abs().sum() > 0)
        assert reached != silent, name


@torch.no_grad()
def test_selections_do_not_depend_on_the_scale_of_the_head_weights() -> None:
    """A positive factor on every score (a power of two, so exact) changes no selection and no candidate."""
    model = random_model(small_config())
    before = model.trace(tokens(30))
    for layer in (2, 4, 5):
        model.layers[layer].attn.indexer.weights_proj.weight.mul_(4)
    after = model.trace(tokens(30))
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith(("topk", "cand")))


@torch.no_grad()
def test_selections_do_depend_on_every_indexer_weight() -> None:
    model = random_model(small_config())
    before = model.trace(tokens(30))

    def changes(layer: int, name: str) -> bool:
        weight = dict(model.layers[layer].attn.indexer.named_parameters())[name]
        saved = weight.clone()
        weight.copy_(saved.flip(0))
        after = model.trace(tokens(30))
        weight.copy_(saved)
        return not torch.equal(before[f"topk.{layer}"], after[f"topk.{layer}"])

    for layer in (2, 4):
        assert all(
            changes(layer, name) for name in ("wq_b.weight", "weights_proj.weight", "wk.weight", "k_norm.weight")
        )
    assert all(changes(5, name) for name in ("wq_b.weight", "weights_proj.weight"))
    assert isinstance(model, Model)
