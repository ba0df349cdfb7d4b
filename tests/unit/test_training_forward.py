"""Training's forward pass computes the model, whatever is switched off is off, and each loss reaches what it may."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.support import random_model, small_config, without_rounding
from v41lib.config import preset
from v41lib.engine import Engine
from v41lib.model import Model
from v41lib.nn.attention import attend
from v41lib.training.forward import Switches, Window, forward, joint_attention

LENGTHS = (1, 2, 3, 7, 33, 64)


def tokens(model: Model, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, model.config.text.vocab_size - 1, (rows, length), generator=generator)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(small_config())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("changes", [{}, {"candidate_source_layer_id": -1}, {"index_topk": 64}, {"sliding_window": 8}])
def test_it_computes_the_model(length: int, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    without_rounding(monkeypatch)
    model = random_model(small_config(**changes))
    ids = tokens(model, 2, length)
    with torch.no_grad():
        torch.testing.assert_close(forward(model, ids).logits, model(ids), atol=1e-4, rtol=0)


def test_it_computes_the_trained_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rounding(monkeypatch)
    model = Model(preset("capped"))
    ids = tokens(model, 1, 300)
    with torch.no_grad():
        ours, theirs = forward(model, ids).logits, model(ids)
    # A tie in a selection may fall the other way where sums differ in their last bit, and its position then moves.
    assert ((ours - theirs).abs().amax(-1) < 1e-3).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["each its own", "shared", "none"])
def test_joint_attention_has_the_reference_value_and_gradient(kind: str) -> None:
    torch.manual_seed(0)
    rows, length, heads, width, window, entries = 2, 23, 3, 8, 5, 6
    shared = kind == "shared"
    q, keys, sink = torch.randn(rows, length, heads, width), torch.randn(rows, length, width), torch.randn(heads)
    far = torch.randn(rows, entries, width) if shared else torch.randn(rows, length, entries, width)
    absent = torch.rand(1 if shared else rows, length, entries) < 0.4
    absent[:, 3] = True
    age = torch.arange(length).unsqueeze(1) - torch.arange(length)
    towards, results = torch.randn(rows, length, heads, width), []
    for ours in (True, False):
        leaves = [x.clone().requires_grad_() for x in (q, keys, sink, far)]
        some = None if kind == "none" else leaves[3]
        if ours:
            out, _ = joint_attention(leaves[0], Window(leaves[1], window), leaves[2], some, absent)
        else:
            each = some.unsqueeze(1).expand(-1, length, -1, -1) if shared and some is not None else some
            chosen = torch.where(absent, -1, torch.arange(entries)).expand(rows, -1, -1)
            out = attend(leaves[0], leaves[1], (age >= 0) & (age < window), leaves[2], each, chosen)
        grads = torch.autograd.grad(out, leaves[:3] if some is None else leaves, towards)
        results.append((out, *grads))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_dense_equals_a_selection_that_holds_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    without_rounding(monkeypatch)
    model = random_model(small_config(index_topk=64, candidate_source_layer_id=-1))
    ids = tokens(model, 2, 40)
    with torch.no_grad():
        torch.testing.assert_close(
            forward(model, ids, Switches(dense=True)).logits, forward(model, ids).logits, atol=1e-4, rtol=0
        )


def test_dense_differs_where_a_selection_leaves_something_out(model: Model) -> None:
    ids = tokens(model, 2, 40)
    with torch.no_grad():
        dense, sparse = (forward(model, ids, Switches(dense=dense)).logits for dense in (True, False))
    assert (dense - sparse).abs().amax(-1)[:, -1].min() > 1e-3
    torch.testing.assert_close(dense[:, :4], sparse[:, :4], atol=1e-4, rtol=0)  # top-4 holds all that these see


def test_blind_rows_see_no_global_kv_in_the_encoder_and_the_others_do(model: Model) -> None:
    ids = tokens(model, 2, 40)
    encoder = frozenset(plan.layer for plan in model.plans if plan.stack == "encoder")
    with torch.no_grad():
        mixed = forward(model, ids, Switches(blind=torch.tensor([True, False]))).logits
        off = forward(model, ids, Switches(without_global=encoder)).logits
        on = forward(model, ids).logits
    torch.testing.assert_close(mixed[0], off[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(mixed[1], on[1], atol=1e-4, rtol=0)
    assert (off[0] - on[0]).abs().max() > 1e-2


def test_without_its_global_branch_a_model_reaches_no_farther_than_its_windows(model: Model) -> None:
    every = frozenset(plan.layer for plan in model.plans)
    ids = tokens(model, 1, 60)
    reach = len(model.plans) * (model.config.text.sliding_window - 1)
    changed = ids.clone()
    changed[0, 59 - reach - 1] = (changed[0, 59 - reach - 1] + 1) % 39
    with torch.no_grad():
        for switches, same in ((Switches(without_global=every), True), (Switches(), False)):
            one, other = (forward(model, x, switches).logits[0, -1] for x in (ids, changed))
            assert bool((one - other).abs().max() < 1e-6) == same
        nearer = ids.clone()
        nearer[0, 59 - reach + 3] = (nearer[0, 59 - reach + 3] + 1) % 39
        moved = forward(model, nearer, Switches(without_global=every)).logits[0, -1]
        assert (moved - forward(model, ids, Switches(without_global=every)).logits[0, -1]).abs().max() > 0


@pytest.mark.parametrize("replayed", [1, 3, 10])
def test_a_restart_is_what_a_bounded_replay_computes(replayed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_rounding(monkeypatch)
    model = random_model(small_config())
    ids = tokens(model, 1, 41)
    state = Engine(model, packed=False).prefill(ids, mode="replay", replay_len=replayed)
    with torch.no_grad():
        restarted = forward(model, ids, Switches(restarts=torch.tensor([41 - replayed]))).logits
        plain = forward(model, ids).logits
    torch.testing.assert_close(restarted[:, -1], state.logits.view(1, -1), atol=1e-4, rtol=0)
    torch.testing.assert_close(restarted[:, : 41 - replayed], plain[:, : 41 - replayed], atol=1e-4, rtol=0)
    halo = 3 + (3 - 1) * (3 - 1)  # W + (depth - 1) * (W - 1): from there on a replay is exact
    assert bool((restarted[:, -1] - plain[:, -1]).abs().max() > 1e-3) == (replayed < halo)


def test_the_two_losses_reach_disjoint_parameters_that_are_all_of_them(model: Model) -> None:
    ids = tokens(model, 2, 40)
    out = forward(model, ids)
    assert sorted(out.index_losses) == [2, 4, 5]
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of_language = torch.autograd.grad(
        out.logits.square().sum(), list(weights.values()), retain_graph=True, allow_unused=True
    )
    index = sum(out.index_losses.values(), torch.zeros(()))
    of_index = torch.autograd.grad(index, list(weights.values()), allow_unused=True)
    for name, one, other in zip(weights, of_language, of_index, strict=True):
        if ".indexer." in name:
            assert one is None and other is not None and other.abs().max() > 0, name
        else:
            assert one is not None and other is None, name


def test_loads_count_every_choice(model: Model) -> None:
    out = forward(model, tokens(model, 2, 40))
    assert sorted(out.loads) == list(range(7))
    assert all(int(load.sum()) == 2 * 40 * 2 for load in out.loads.values())
