"""Whole forward passes and cached decoding against mlx-lm, with no excuse at all, on screened models."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.parity import mlx_bridge
from tests.parity.layerwise import TOLERANCE
from tests.parity.mlx_bridge import other
from tests.parity.mutations import MUTATIONS, Mutation
from tests.parity.screening import case, rejection
from v41lib import Model

pytestmark = pytest.mark.parity

# Found by `python -m tests.parity.screening NAME LENGTH SEEDS MARGIN`, at margins of 5e-7 and more. Length, then seeds.
SCREENED: dict[str, tuple[int, tuple[int, ...]]] = {
    "tiny": (33, (0, 173, 199)),
    "wide": (97, (323, 397, 515)),
    "deep": (33, (495, 659, 927)),
    "ratio4-ratio3": (64, (39, 63, 172)),
}
CASES = [pytest.param(name, seed, id=f"{name}-{seed}") for name, (_, seeds) in SCREENED.items() for seed in seeds]
# Cached decoding after these prefixes: one token, even and odd lengths, inside an open group of every ratio.
PREFIXES = {"tiny": (1, 16), "wide": (77,), "deep": (24,), "ratio4-ratio3": (46,)}
DECODED = [pytest.param(name, many, id=f"{name}-after-{many}") for name, each in PREFIXES.items() for many in each]


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with mlx_bridge.one_cpu_thread():
        yield


@cache
def screened(name: str, seed: int) -> tuple[Model, Tensor, other.Model, Tensor, Tensor]:
    """The model, its token ids, its mirror in mlx-lm; v41lib's logits and mlx-lm's."""
    model, ids = case(name, SCREENED[name][0], seed)
    mirror = mlx_bridge.mlx_model(model)
    return model, ids, mirror, model(ids), mlx_bridge.logits(mirror, ids)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    worst = (ours - theirs).abs().amax((0, 2))
    assert bool((worst <= TOLERANCE).all()), f"differs by {float(worst.max()):.3g} at position {int(worst.argmax())}"
    assert ours.argmax(-1).equal(theirs.argmax(-1))


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_seed_is_screened(name: str, seed: int) -> None:
    model, ids = screened(name, seed)[:2]
    reason = rejection(model, ids)
    assert reason is None, reason


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_full_forward(name: str, seed: int) -> None:
    ours, theirs = screened(name, seed)[-2:]
    assert_same(ours, theirs)


@pytest.mark.parametrize(("name", "prefix"), DECODED)
def test_cached_decode(name: str, prefix: int) -> None:
    """mlx-lm decodes token by token; v41lib's one forward pass must say the same at every position."""
    _, ids, mirror, ours, _ = screened(name, SCREENED[name][1][0])
    assert_same(ours, mlx_bridge.decoded_logits(mirror, ids, prefix))


def test_a_batch_is_its_sequences() -> None:
    model, ids, mirror, _, _ = screened("tiny", SCREENED["tiny"][1][0])
    both = torch.cat((ids, ids.roll(5, 1)))
    theirs = mlx_bridge.logits(mirror, both)
    assert_same(model(both)[:1], theirs[:1])
    assert_same(mlx_bridge.logits(mirror, both[1:]), theirs[1:])


def test_screening_rejects_most() -> None:
    """A screen that everything passes would vouch for nothing."""
    reasons = [rejection(*case("wide", 97, seed)) for seed in range(5)]
    assert sum(reason is None for reason in reasons) <= 1, reasons


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutation_reaches_the_logits(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, _, _, theirs = screened("wide", SCREENED["wide"][1][0])
    with monkeypatch.context() as patch:
        mutation(patch, model)
        mutated = model(ids)
    with pytest.raises(AssertionError):
        assert_same(mutated, theirs)
