"""The three losses: the next byte, the indexers' imitation of attention, and experts balanced by their biases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from v41lib.model import Model

BALANCE_STEP = 1e-3  # how far a bias moves after a step (SPEC 7)


def next_token_loss(
    logits: Float[Tensor, "B S V"],
    targets: Int[Tensor, "B S"],
    weight: Float[Tensor, "B S"],
    total: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """The weighted mean of each target's surprise, in nats. Raises ``ValueError`` when every weight is zero.

    ``total`` is what the weights are divided by, their sum unless given.
    """
    total = weight.sum() if total is None else total
    if float(total) == 0:
        raise ValueError("weight is zero everywhere: there is no target to learn from")
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (nats * weight.flatten()).sum() / total


def index_loss(
    scores: Float[Tensor, "B S T"], attention: Float[Tensor, "B S H T"], absent: Bool[Tensor, "#B S T"]
) -> Float[Tensor, ""]:
    """KL from what attention reads of the compressed entries to what the indexer scores, in nats (SPEC 5).

    ``attention`` is the compressed part of the joint softmax over window, entries and sink: averaged over heads and
    made to sum to one, it is the target, and it gets no gradient. ``absent`` marks entries that a query does not have;
    a query without any has loss 0. The mean is over all queries.
    """
    target = attention.detach().float().sum(2).masked_fill(absent, 0.0)
    total = target.sum(-1, keepdim=True)
    target = target / total.clamp_min(torch.finfo(torch.float32).tiny)
    # Not -inf: 0 * -inf is NaN, and a row without a key would have no softmax at all.
    logits = scores.masked_fill(absent, torch.finfo(torch.float32).min)
    guess = logits.log_softmax(-1).masked_fill(absent, 0.0)
    # A query without a key, or whose attention read none, has a target of zeros: nothing to imitate.
    return (torch.xlogy(target, target) - target * guess).sum(-1).mean()


@torch.no_grad()
def balance_experts(model: Model, loads: dict[int, Int[Tensor, " E"]], step: float = BALANCE_STEP) -> None:
    """Move each text bias by ``step`` towards the experts that got fewer tokens than the mean (SPEC 7)."""
    for layer, load in loads.items():
        bias = model.blocks[layer].ffn.gate.bias
        bias.add_(torch.sign(load.float().mean() - load.float()).to(bias.device), alpha=step)
