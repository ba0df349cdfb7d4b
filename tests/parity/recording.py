"""What v41lib's layers read, decided and computed, one by one, and how close each decision was.

Nothing here knows of another implementation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from v41lib import Model
from v41lib.model import Residual
from v41lib.nn import attention
from v41lib.nn import indexer as indexing
from v41lib.nn.compressor import visible_entries
from v41lib.nn.hyper import collapse
from v41lib.nn.rope import Rotation
from v41lib.nn.shared import Shared

Disturb = Callable[[Residual], Residual]


@dataclass
class LayerRecord:
    """What one v41lib layer read, decided and computed."""

    layer: int
    residual: Residual
    shared: Shared
    residual_after: Residual
    shared_after: Shared
    notes: dict[str, Tensor]  # as in Model.trace, without the layer number
    rounded: dict[str, tuple[Tensor, Tensor]]  # window, main, keys, queries: before and after
    scores: Tensor | None = None  # [B,S,C], -inf where the layer may not select; None when it does not select


@contextmanager
def _roundings() -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Collect every cache rounding of v41lib, before and after, by what is rounded."""
    seen: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    users = (attention, indexing)
    originals = [user.straight_through for user in users]

    def collecting(original: Callable[[Tensor, str], Tensor]) -> Callable[[Tensor, str], Tensor]:
        def watched(x: Tensor, fmt: str) -> Tensor:
            y = original(x, fmt)
            kind = {"fp8": "window", "fp4": "main"}.get(fmt) or ("queries" if x.dim() == 4 else "keys")
            seen[kind].append((x, y))
            return y

        return watched

    for user, original in zip(users, originals, strict=True):
        user.straight_through = collecting(original)
    try:
        yield seen
    finally:
        for user, original in zip(users, originals, strict=True):
            user.straight_through = original


@torch.no_grad()
def record_layers(
    model: Model, ids: Tensor, disturb: Disturb = lambda residual: residual
) -> tuple[list[LayerRecord], Tensor]:
    """Run v41lib's layers one by one, and the head: what each did, and the logits.

    ``disturb`` may change what every layer reads.
    """
    text = model.config.text
    streams = model.embed(ids).unsqueeze(2).expand(-1, -1, text.hc_mult, -1)
    pre = torch.zeros(*ids.shape, text.hc_mult)
    pre[..., 0] = 1.0
    residual, shared, records = Residual(streams, pre), Shared(), []
    for layer, block in enumerate(model.layers):
        residual = disturb(residual)
        notes: dict[str, Tensor] = {}
        with _roundings() as seen:
            after, shared_after = block(residual, shared, None, notes.__setitem__)
        rounded = {}
        for kind, pairs in seen.items():  # queries are rounded a few rows at a time
            rounded[kind] = torch.cat([x for x, _ in pairs], dim=1), torch.cat([y for _, y in pairs], dim=1)
        record = LayerRecord(layer, residual, shared, after, shared_after, notes, rounded)
        if model.plans[layer].selects:
            record.scores = _selection_scores(model, record)
        records.append(record)
        residual, shared = after, shared_after
    return records, model.head(model.norm(collapse(residual.streams, residual.pre)))


def _selection_scores(model: Model, record: LayerRecord) -> Tensor:
    plan, x = model.plans[record.layer], record.notes["attn_in"]
    attn, kv = model.layers[record.layer].attn, record.shared_after.kv_of(plan.kv_owner)
    positions = torch.arange(x.shape[1])
    by = attn.rotation_at(positions)
    by = Rotation(by.cos.unsqueeze(1), by.sin.unsqueeze(1))
    queries, weights = attn.indexer.queries(x, attn.q_norm(attn.wq_a(x)), by)
    scores = indexing.score(queries, weights, kv.index_keys)
    scores = indexing.hide_invisible(scores, torch.arange(kv.main.shape[1]), visible_entries(positions, plan.ratio))
    if plan.candidate_role == "consumer":
        scores = scores.masked_fill(~record.notes["cand"], -torch.inf)
    return scores


# --- choices: entries, blocks and experts, as masks over everything there is to choose from --------------------


def as_mask(chosen: Tensor, count: int) -> Tensor:
    """Numbers ``[..., K]`` (-1 absent) as a mask ``[..., count]``: sets compare, orders do not."""
    mask = torch.zeros(*chosen.shape[:-1], count + 1, dtype=torch.bool)
    chosen = chosen.long()  # first: torch does not compare mlx's uint32
    mask.scatter_(-1, torch.where(chosen < 0, count, chosen), True)
    return mask[..., :count]


def by_block(x: Tensor, size: int) -> Tensor:
    """The largest of every ``size`` neighbours; a mask says which blocks hold anything."""
    fill = False if x.dtype == torch.bool else -torch.inf
    return F.pad(x, (0, -x.shape[-1] % size), value=fill).unflatten(-1, (-1, size)).amax(-1)


def block_scores(scores: Tensor, size: int) -> Tensor:
    """What a candidate source ranks: each block by its best entry, the newest visible one by +inf."""
    blocks = by_block(scores, size)
    newest = (scores > -torch.inf).sum(-1, keepdim=True).sub(1).div(size, rounding_mode="floor")
    return blocks.masked_fill(torch.arange(blocks.shape[-1]) == newest, torch.inf)


def router_scores(model: Model, record: LayerRecord) -> Tensor:
    """What the router ranks, ``[B*S,E]``."""
    gate = model.layers[record.layer].ffn.gate
    return F.softplus(F.linear(record.notes["ffn_in"].flatten(0, 1), gate.weight)).sqrt() + gate.bias


def _size(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.isinf(scores), 0).abs().amax(-1).clamp_min(1e-30)


def swap_margins(scores: Tensor, ours: Tensor, theirs: Tensor) -> Tensor:
    """For each row of two choices: how far the scores of what was swapped lie apart, relative to the row's largest.

    Infinite when something was swapped that has no score (-inf) or must be kept (+inf), or the sizes differ.
    """
    swapped = ours ^ theirs
    high = scores.masked_fill(~swapped, -torch.inf).amax(-1)
    low = scores.masked_fill(~swapped, torch.inf).amin(-1)
    margins = (high - low) / _size(scores)
    bad = torch.isinf(high) | torch.isinf(low) | (ours.sum(-1) != theirs.sum(-1))
    return torch.where(swapped.any(-1), margins.masked_fill(bad, torch.inf), 0.0)


def cut_margins(scores: Tensor, chosen: Tensor) -> Tensor:
    """For each row: how far the worst chosen score is above the best one left, relative to the row's largest.

    Infinite where nothing is left; zero for a tie at the cut.
    """
    left = scores.masked_fill(chosen, -torch.inf).amax(-1)
    worst = scores.masked_fill(~chosen, torch.inf).amin(-1)
    return torch.where(left == -torch.inf, torch.inf, (worst - left) / _size(scores))


# --- rounding, written from the number formats alone: v41lib's own quantisers are what is being examined

_BLOCK = {"window": 32, "main": 16, "keys": 32, "queries": 32}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_LADDER = tuple(1e-8 * 2**step for step in range(17))  # 1e-8 to 7e-4


def _unit(kind: str, amax: Tensor) -> Tensor:
    if kind == "main":
        return (amax.clamp_min(6 * 2.0**-9).float() / 6).to(torch.float8_e4m3fn).double()
    least, largest = (1e-4, 448.0) if kind == "window" else (6 * 2.0**-126, 6.0)
    return 2.0 ** (amax.clamp_min(least) / largest).log2().ceil()


def _nearest(kind: str, x: Tensor) -> Tensor:
    if kind == "window":
        return x.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
    return x.sign() * _E2M1[torch.bucketize(x.abs(), (_E2M1[1:] + _E2M1[:-1]) / 2)]


def _reach(kind: str, blocks: Tensor, amax: Tensor, move: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The least and greatest value that each element can round to when it, and the block's scale, may move a little.

    Rounding is monotone at a given scale, so the ends of the move suffice; one pair for each scale in reach.
    """
    for side in (-1, 1):
        unit = _unit(kind, amax * (1 + side * move))
        yield _nearest(kind, (blocks - move * amax) / unit) * unit, _nearest(kind, (blocks + move * amax) / unit) * unit


def _blocks(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.double().unflatten(-1, (-1, _BLOCK[kind]))
    return blocks, blocks.abs().amax(-1, keepdim=True)


def rounding_margins(kind: str, before: Tensor, result: Tensor) -> Tensor:
    """How far each element of ``before`` must move to round to ``result``, relative to its block's largest magnitude.

    To a factor of two; infinite where a move of 7e-4 is not enough.
    """
    blocks, amax = _blocks(kind, before)
    wanted = result.double().unflatten(-1, (-1, _BLOCK[kind]))
    margins = torch.full_like(blocks, torch.inf)
    for move in _LADDER:
        for low, high in _reach(kind, blocks, amax, move):
            margins[(low <= wanted) & (wanted <= high) & torch.isinf(margins)] = move
    return margins.flatten(-2)


def rounds_alike(kind: str, before: Tensor, after: Tensor, move: float, worth: float = 0.0) -> bool:
    """Whether no element can round elsewhere than to ``after`` within ``move`` of its block's largest magnitude.

    A change of at most ``worth`` of that magnitude does not count.
    """
    blocks, amax = _blocks(kind, before)
    wanted = after.double().unflatten(-1, (-1, _BLOCK[kind]))
    ends = (end for pair in _reach(kind, blocks, amax, move) for end in pair)
    return all(bool(((end - wanted).abs() <= worth * amax).all()) for end in ends)
