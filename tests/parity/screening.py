"""Which random models two correct implementations must agree on from end to end.

With arbitrary weights they need not: FP32 sums in another order differ by about 1e-7, and where an element lies that
close to a rounding edge, or two scores that close to each other at a cut, everything after it differs visibly. About
one seed in ten keeps clear of all of them. ``python -m tests.parity.screening`` looks for such seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.parity.cases import configs, random_ids, random_model
from tests.parity.recording import (
    LayerRecord,
    as_mask,
    block_scores,
    by_block,
    cut_margins,
    record_layers,
    rounds_alike,
    router_scores,
)
from v41lib import Model
from v41lib.model import Residual

NOISE = 3e-7  # relative, on every element that a layer reads
WORTH = 3e-5  # the smallest FP8 steps are less than this of their block's largest element: too little to matter
STEADY = 1e-5  # how far that may move the logits


def case(name: str, length: int, seed: int) -> tuple[Model, Tensor]:
    """The model and token ids ``[1, length]`` that a seed stands for."""
    config = configs()[name]
    return random_model(config, seed), random_ids(config, length, seed + 2)


def _cuts(model: Model, record: LayerRecord) -> Iterator[Tensor]:
    """The margins of every choice that a layer makes."""
    text, scores = model.config.text, record.scores
    routes = router_scores(model, record)
    yield cut_margins(routes, as_mask(record.notes["route"], routes.shape[-1]))
    if scores is not None and scores.shape[-1]:
        yield cut_margins(scores, as_mask(record.notes["topk"], scores.shape[-1]))
        if model.plans[record.layer].candidate_role == "source":
            blocks = block_scores(scores, text.candidate_block_size)
            yield cut_margins(blocks, by_block(record.notes["cand"], text.candidate_block_size))


def rejection(model: Model, ids: Tensor, margin: float = NOISE, draws: int = 3) -> str | None:
    """Why this case is not screened, or None: no decision within ``margin``, and steady under ``draws`` of noise."""
    records, logits = record_layers(model, ids)
    for record in records:
        if any(float(cuts.min()) <= margin for cuts in _cuts(model, record)):
            return f"layer {record.layer} chooses between scores less than {margin:g} apart"
        for kind, (before, after) in record.rounded.items():
            if not rounds_alike(kind, before, after, margin, WORTH):
                return f"layer {record.layer} rounds {kind} less than {margin:g} from an edge"
    generator = torch.Generator().manual_seed(0)

    def disturb(residual: Residual) -> Residual:
        noise = torch.randn(residual.streams.shape, generator=generator) * NOISE
        return Residual(residual.streams * (1 + noise), residual.pre)

    for _ in range(draws):
        moved = float((record_layers(model, ids, disturb)[1] - logits).abs().max())
        if not moved <= STEADY:
            return f"noise of {NOISE:g} moves the logits by {moved:.2g}"
    return None


def search(name: str, length: int, seeds: range, margin: float, draws: int = 8) -> Iterator[int]:
    """The seeds that pass with room to spare, so that other processors' sums leave them screened."""
    for seed in seeds:
        if rejection(*case(name, length, seed), margin, draws) is None:
            yield seed


if __name__ == "__main__":
    torch.set_num_threads(1)
    case_name, tokens, count, edge = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    for found in search(case_name, tokens, range(count), edge):
        print(found, flush=True)
