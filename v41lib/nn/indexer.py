"""The indexer: scores compressed entries for each query, keeps the best, and narrows the pool for later indexers.

Selections are entry numbers and candidate pools are block numbers; neither is ever a mask over the context. Ties go
to the earlier entry, so the result does not depend on how queries are grouped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from v41lib.config import TextConfig
from v41lib.nn.compiled import token_wise
from v41lib.nn.compressor import pad_entries
from v41lib.nn.linear import Linear
from v41lib.nn.norm import RMSNorm
from v41lib.nn.quant import Packed, straight_through, unpack, values
from v41lib.nn.rope import Rotation, rotate


def score(
    queries: Float[Tensor, "B S H D"],
    weights: Float[Tensor, "B S H"],
    keys: Float[Tensor, "B T D"] | Float[Tensor, "B S T D"],
) -> Float[Tensor, "B S T"]:
    """``sum_h weight_h * relu(q_h . k)``, FP32 (SPEC 5); ``keys`` are the same for all queries, or each query's own."""
    keys = keys.float()
    if keys.dim() == 3:
        batch, length, heads, width = queries.shape
        flat = queries.float().reshape(batch, length * heads, width)
        products = (flat @ keys.transpose(1, 2)).unflatten(1, (length, heads))
    else:
        products = queries.float() @ keys.transpose(2, 3)
    return (weights.float().unsqueeze(-2) @ products.relu_()).squeeze(-2)


def best(scores: Float[Tensor, "... T"], k: int) -> Int[Tensor, "... K"]:
    """The ``k`` highest scores' places, ties to the lower index, ascending, -1 for those scored -inf."""
    width = scores.shape[-1]
    if k >= width:
        kept = scores > -torch.inf
        top = torch.where(kept, torch.arange(width, device=scores.device), width)
    else:
        found = scores.topk(k + 1, dim=-1)  # one more, to see whether the last one in ties with the first one out
        last_in, first_out = found.values[..., -2], found.values[..., -1]
        tied = (last_in == first_out) & (first_out > -torch.inf)
        top = torch.where(found.values > -torch.inf, found.indices, width)[..., :-1]
        if bool(tied.any()):
            top[tied] = _best_of_ties(scores[tied], k)
    top = top.sort(-1).values
    return torch.where(top < width, top, -1)


def _best_of_ties(scores: Float[Tensor, "N T"], k: int) -> Int[Tensor, "N K"]:
    """As :func:`best`, unordered, for rows in which ``k`` entries are at least as good as any other."""
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0, which must tie with it
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
    ranks = torch.arange(scores.shape[-1], 0, -1, device=scores.device)
    return ((ordered << 32) | ranks).topk(k, dim=-1).indices


def hide_invisible(
    scores: Float[Tensor, "B S T"], entries: Int[Tensor, " T"] | Int[Tensor, "B S T"], visible: Int[Tensor, " S"]
) -> Float[Tensor, "B S T"]:
    """Set to -inf the scores of absent (-1) and not yet visible ``entries``; query s sees ``visible[s]`` of them."""
    return scores.masked_fill((entries < 0) | (entries >= visible.unsqueeze(-1)), -torch.inf)


def candidate_blocks(
    scores: Float[Tensor, "B S C"], visible: Int[Tensor, " S"], size: int, count: int
) -> Int[Tensor, "B S N"]:
    """The blocks that a later indexer may search, from the candidate source's scores (SPEC 5).

    A block of ``size`` neighbours scores as its best visible entry; the block of the newest visible entry is always
    kept; the ``count`` best stay, ascending, then -1. ``scores`` must be -inf where invisible.
    """
    blocks = F.pad(scores, (0, -scores.shape[-1] % size), value=-torch.inf).unflatten(-1, (-1, size)).amax(-1)
    numbers = torch.arange(blocks.shape[-1], device=scores.device)
    newest = torch.div(visible - 1, size, rounding_mode="floor").unsqueeze(-1)  # -1 (no block) when none is visible
    return best(blocks.masked_fill(numbers == newest, torch.inf), count)


def block_entries(blocks: Int[Tensor, "... N"], size: int) -> Int[Tensor, "... entries"]:
    """The ``N * size`` entries of ``blocks``, ascending; -1 for those of absent blocks."""
    entries = blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)
    return torch.where(blocks.unsqueeze(-1) < 0, -1, entries).flatten(-2)


def gather_rows(rows: Float[Tensor, "B C D"] | Packed, entries: Int[Tensor, "B S K"]) -> Float[Tensor, "B S K D"]:
    """Each query's own rows, unpacked if need be. An absent entry (-1) reads some row, for the caller to mask."""
    places = entries.clamp(0, rows.shape[1] - 1)
    if isinstance(rows, Packed):
        return unpack(Packed(rows.fmt, rows.width, _take(rows.elements, places), _take(rows.scales, places)))
    return _take(rows, places)


def _take(rows: Tensor, places: Int[Tensor, "B S K"]) -> Tensor:
    """``rows[b, places[b]]`` by whole rows of memory, which indexing along two axes would copy by element."""
    if rows.is_contiguous():
        places = places + torch.arange(rows.shape[0], device=rows.device).view(-1, 1, 1) * rows.shape[1]
        return rows.flatten(0, 1).index_select(0, places.flatten()).unflatten(0, places.shape)
    taken = [row.index_select(0, place.flatten()) for row, place in zip(rows, places, strict=True)]
    return torch.stack(taken).unflatten(1, places.shape[1:])


def score_in_pieces(
    queries: Float[Tensor, "B S H D"],
    weights: Float[Tensor, "B S H"],
    keys: Float[Tensor, "B T D"] | Packed,
    piece: int,
) -> Float[Tensor, "B S T"]:
    """:func:`score`, with ``piece`` keys unpacked at a time: at a million packed keys, megabytes instead of a gigabyte.

    Raises ``ValueError`` for a piece below 1.
    """
    if piece < 1:
        raise ValueError(f"piece = {piece}: must be at least 1 key")
    starts = range(0, max(keys.shape[1], 1), piece)
    return torch.cat([score(queries, weights, values(keys[:, start : start + piece])) for start in starts], dim=-1)


def select_everywhere(
    queries: Float[Tensor, "B S H D"],
    weights: Float[Tensor, "B S H"],
    keys: Float[Tensor, "B C D"] | Packed,
    visible: Int[Tensor, " S"],
    k: int,
) -> tuple[Int[Tensor, "B S K"], Float[Tensor, "B S C"]]:
    """Score every visible entry: the selection, ``K = min(k, C)``, and the scores, -inf where invisible."""
    entries = torch.arange(keys.shape[1], device=queries.device)
    scores = hide_invisible(score(queries, weights, values(keys)), entries, visible)
    return best(scores, k), scores


def select_among(
    queries: Float[Tensor, "B S H D"],
    weights: Float[Tensor, "B S H"],
    keys: Float[Tensor, "B C D"] | Packed,
    visible: Int[Tensor, " S"],
    k: int,
    blocks: Int[Tensor, "B S N"],
    size: int,
) -> tuple[Int[Tensor, "B S K"], Float[Tensor, "B S N_size"]]:
    """Score only the entries of the candidate ``blocks``: the selection, ``K = min(k, C)``, and the pool's scores,
    -inf where absent or invisible (SPEC 5).
    """
    entries = block_entries(blocks, size)
    scores = hide_invisible(score(queries, weights, gather_rows(keys, entries)), entries, visible)
    picked = best(scores, k)  # slots of the pool; ascending slots are ascending entries
    chosen = torch.where(picked < 0, -1, entries.gather(-1, picked.clamp_min(0)))
    return pad_entries(chosen, min(k, keys.shape[1])), scores


class Indexer(nn.Module):
    """The projections of one index source; ``wk`` and ``k_norm`` only where it also owns the keys (SPEC 5).

    What it reads is detached: its loss trains the indexer and leaves the rest of the model alone.
    """

    def __init__(self, text: TextConfig, owns_keys: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.heads, self.width = text.index_n_heads, text.index_head_dim
        self.wq_b = Linear(text.q_lora_rank, self.heads * self.width, dtype=dtype)
        self.weights_proj = Linear(text.hidden_size, self.heads, dtype=dtype)
        if owns_keys:
            self.wk = Linear(text.head_dim, self.width, dtype=dtype)
            self.k_norm = RMSNorm(self.width, text.rms_norm_eps, dtype)

    def keys(self, latent: Float[Tensor, "B C D"], by: Rotation) -> Float[Tensor, "B C D_index"]:
        """Index keys from the latents *before* their rotation; not yet rounded to MXFP4."""
        return rotate(self.k_norm(self.wk(latent.detach())), by)

    @token_wise
    def queries(
        self, x: Float[Tensor, "B S M"], q_latent: Float[Tensor, "B S Q"], by: Rotation
    ) -> tuple[Float[Tensor, "B S H D_index"], Float[Tensor, "B S H"]]:
        """Index queries, rounded to MXFP4, and head weights, FP32."""
        x, q_latent = x.detach(), q_latent.detach()
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.width))
        weights = self.weights_proj(x).float() * (self.width * self.heads) ** -0.5
        return straight_through(rotate(q, by), "mxfp4"), weights
