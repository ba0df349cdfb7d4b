"""Every layer of every configuration against mlx-lm's, at every length; layerwise.py says by which rules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.parity import mlx_bridge
from tests.parity.cases import LENGTHS, configs, random_ids, random_model
from tests.parity.layerwise import CUT_SHARE, CUTS, ROUNDED, ROUNDED_SHARE, SURPLUS, TOLERANCE, Outcome, compare
from tests.parity.mlx_bridge import mx, other, to_mlx, to_torch
from tests.parity.mutations import MUTATIONS, Mutation
from tests.parity.recording import cut_margins, rounding_margins, swap_margins
from v41lib import Model, preset
from v41lib.nn import quant

pytestmark = pytest.mark.parity


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with mlx_bridge.one_cpu_thread():
        yield


@cache
def models(name: str) -> tuple[Model, other.Model]:
    model = random_model(configs()[name], seed=0)
    return model, mlx_bridge.mlx_model(model)


@cache
def outcome(name: str, length: int) -> Outcome:
    """One comparison, made once: short sequences come two in a batch."""
    model, mirror = models(name)
    ids = random_ids(model.config, length, seed=length, batch=2 if length < 10 else 1)
    return compare(model, mirror, ids)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", configs())
def test_layers_agree(name: str, length: int) -> None:
    found = outcome(name, length)
    assert not found.failures, "\n".join(found.failures)
    assert found.worst["streams"] <= TOLERANCE and found.worst["logits"] <= TOLERANCE


@pytest.mark.parametrize("name", configs())
def test_few_decisions_are_excused(name: str) -> None:
    """The excuses stay what they are meant to be: rare, and the known error nowhere but where it must occur."""
    total = Outcome()
    for length in LENGTHS:
        total.merge(outcome(name, length))
    assert total.share(ROUNDED) <= ROUNDED_SHARE, f"{total.excused} of {total.compared}"
    assert total.share(CUTS) <= CUT_SHARE, f"{total.excused} of {total.compared}"
    assert (total.excused[SURPLUS] > 0) == (name == "starved-pool"), f"{total.excused}"


def test_ties_are_met() -> None:
    """Scores of exactly 0 do tie at the cut here, so the comparison has seen how each side breaks ties."""
    assert sum(outcome("zero-ties", length).ties for length in LENGTHS) >= 100


# --- the comparison can fail


@pytest.mark.parametrize(("mutation", "stage"), MUTATIONS.items(), ids=[m.__name__ for m in MUTATIONS])
def test_mutation_is_caught(mutation: Mutation, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, mirror = models("wide")
    ids = random_ids(model.config, 33, seed=33)
    with monkeypatch.context() as patch:
        mutation(patch, model)
        failures = compare(model, mirror, ids).failures
    assert failures, "not noticed"
    assert f", {stage}:" in failures[0], failures[0]
    assert not outcome("wide", 33).failures, "noticed without the mutation too"


def test_margins_are_what_they_say() -> None:
    scores = torch.tensor([[4.0, 2.0, 1.0, 1.0 - 1e-6, -torch.inf, torch.inf]])

    def chosen(*entries: int) -> torch.Tensor:
        return torch.zeros(1, 6, dtype=torch.bool).index_fill(1, torch.tensor(entries), True)

    assert float(swap_margins(scores, chosen(0, 2), chosen(0, 3))) == pytest.approx(2.5e-7, rel=0.1)
    assert float(swap_margins(scores, chosen(0, 1), chosen(0, 2))) == pytest.approx(0.25)
    assert float(swap_margins(scores, chosen(0, 1), chosen(1, 0))) == 0
    for theirs in (chosen(0, 4), chosen(0, 5), chosen(0), chosen(0, 1, 2)):
        assert float(swap_margins(scores, chosen(0, 1), theirs)) == torch.inf
    assert float(cut_margins(scores[:, :4], chosen(0, 1)[:, :4])) == pytest.approx(0.25)
    assert float(cut_margins(scores[:, :2], chosen(0, 1)[:, :2])) == torch.inf

    # Under scale 1, 1.25 is the edge between 1 and 1.5: the tie goes to 1, and the least move reaches 1.5.
    row = torch.zeros(32)
    row[:4] = torch.tensor([5.9, 1.25, 1.25 + 6e-7, 2.0])
    margins = rounding_margins("keys", row, torch.tensor([6.0, 1.5, 1.0, 3.0] + [0.0] * 28))
    assert float(margins[0]) == float(margins[1]) == pytest.approx(1e-8)
    assert 1e-7 <= float(margins[2]) <= 2e-7
    assert float(margins[3]) == torch.inf
    # The scale has an edge too: above 6 it doubles, the grid coarsens, and 1.3 rounds to 1 instead of 1.5.
    row = torch.tensor([6 - 6e-6, 1.3] + [0.0] * 30)
    assert 1e-6 <= float(rounding_margins("keys", row, torch.tensor([6.0, 1.0] + [0.0] * 30))[1]) <= 2e-6


# --- single pieces


@pytest.mark.parametrize("kind", ["window", "main", "keys"])
def test_number_formats_agree(kind: str) -> None:
    """The quantisers at magnitudes that no run reaches, and on exact edges: grid points, midpoints, full blocks."""
    ours, theirs = {
        "window": (quant.fp8_round_trip, lambda x: other._fake_quant_fp8(x, 32)),
        "main": (quant.fp4_round_trip, lambda x: other._fake_quant_fp4(x, block_size=16, e4m3_scale=True)),
        "keys": (quant.mxfp4_round_trip, lambda x: other._fake_quant_fp4(x, block_size=32)),
    }[kind]
    generator = torch.Generator().manual_seed(0)
    magnitudes = 2.0 ** torch.randint(-24, 9, (4096, 1), generator=generator)
    anywhere = torch.randn(4096, 32, generator=generator) * magnitudes
    quarters = torch.arange(-24, 25) / 4  # E2M1's grid and midpoints under scale 1
    edges = torch.cat((quarters, quarters)).unfold(0, 32, 1).clone()
    edges[:, [0, 16]] = 6.0
    eighths = torch.arange(-448, 449).float().unfold(0, 32, 7).clone()  # E4M3's, from 1 to 448
    eighths[:, 0] = 448.0
    for x in (edges, edges * 64, edges / 1024, eighths, eighths / 4096, torch.zeros(1, 32)):
        assert to_torch(theirs(to_mlx(x))).equal(ours(x))
    # Here a scale may differ: mlx-lm takes exponents from a floating logarithm, which misses what is just above a power
    # of two.
    expected, got = ours(anywhere), to_torch(theirs(to_mlx(anywhere)))
    margins = torch.maximum(rounding_margins(kind, anywhere, expected), rounding_margins(kind, anywhere, got))
    assert float(margins.where(expected != got, 0.0).max()) <= 2e-7
    assert float((expected != got).float().mean()) <= ROUNDED_SHARE


def test_known_difference_one_expert_a_token() -> None:
    """mlx-lm does not normalise the weight of a single expert; the specification divides by the sum, whatever k is."""
    config = preset("tiny")
    config = config.replace(text=config.text.replace(num_experts_per_tok=1).to_dict())
    model = random_model(config, seed=0)
    mirror = mlx_bridge.mlx_model(model)
    x = torch.randn(50, config.text.hidden_size, generator=torch.Generator().manual_seed(0))
    route = model.layers[0].ffn.gate(x)
    chosen, weights = (to_torch(side) for side in mirror.layers[0].mlp.gate(to_mlx(x)))
    assert torch.equal(route.experts, chosen.long())
    factor = config.text.routed_scaling_factor
    assert torch.allclose(route.weights, torch.full_like(route.weights, factor))
    scores = torch.nn.functional.softplus(x @ model.layers[0].ffn.gate.weight.T).sqrt().gather(-1, route.experts)
    assert torch.allclose(weights, scores * factor, atol=1e-5)


def test_every_weight_arrives() -> None:
    """The mirror is built from the files alone: a tensor that is missing there is an error, not a default."""
    model, mirror = models("tiny")
    theirs, ours = mirror.model.layers[4].self_attn.indexer, model.layers[4].attn.indexer
    assert to_torch(theirs.k_proj.weight).equal(ours.wk.weight)
    with pytest.raises(ValueError, match="lm_head"):
        other.Model(mirror.args).load_weights([("lm_head.wieght", mx.zeros((1,)))], strict=True)
