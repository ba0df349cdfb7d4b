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
from v41lib.nn.compressor import pad_entries
from v41lib.nn.norm import RMSNorm
from v41lib.nn.quant import Packed, straight_through, values
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
    return (weights.float().unsqueeze(-2) @ products.relu()).squeeze(-2)


def best(scores: Float[Tensor, "... T"], k: int) -> Int[Tensor, "... K"]:
    """The ``k`` highest scores' places, ties to the lower index, ascending, -1 for those scored -inf."""
    width = scores.shape[-1]
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 turns -0 into 0, which must tie with it
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # integers in the order of the floats
    ranks = torch.arange(width, 0, -1, device=scores.device)
    top = ((ordered << 32) | ranks).topk(min(k, width), dim=-1).indices
    kept = scores.gather(-1, top) > -torch.inf
    top = torch.where(kept, top, width).sort(-1).values
    return torch.where(top < width, top, -1)


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
    batch = torch.arange(rows.shape[0], device=entries.device).view(-1, 1, 1)
    return values(rows[batch, entries.clamp(0, rows.shape[1] - 1)])


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
) -> Int[Tensor, "B S K"]:
    """Score only the entries of the candidate ``blocks``: the selection, ``K = min(k, C)`` (SPEC 5)."""
    entries = block_entries(blocks, size)
    scores = hide_invisible(score(queries, weights, gather_rows(keys, entries)), entries, visible)
    picked = best(scores, k)  # slots of the pool; ascending slots are ascending entries
    chosen = torch.where(picked < 0, -1, entries.gather(-1, picked.clamp_min(0)))
    return pad_entries(chosen, min(k, keys.shape[1]))


class Indexer(nn.Module):
    """The projections of one index source; ``wk`` and ``k_norm`` only where it also owns the keys (SPEC 5)."""

    def __init__(self, text: TextConfig, owns_keys: bool, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.heads, self.width = text.index_n_heads, text.index_head_dim
        self.wq_b = nn.Linear(text.q_lora_rank, self.heads * self.width, bias=False, dtype=dtype)
        self.weights_proj = nn.Linear(text.hidden_size, self.heads, bias=False, dtype=dtype)
        if owns_keys:
            self.wk = nn.Linear(text.head_dim, self.width, bias=False, dtype=dtype)
            self.k_norm = RMSNorm(self.width, text.rms_norm_eps, dtype)

    def keys(self, latent: Float[Tensor, "B C D"], by: Rotation) -> Float[Tensor, "B C D_index"]:
        """Index keys from the latents *before* their rotation; not yet rounded to MXFP4."""
        return rotate(self.k_norm(self.wk(latent)), by)

    def queries(
        self, x: Float[Tensor, "B S M"], q_latent: Float[Tensor, "B S Q"], by: Rotation
    ) -> tuple[Float[Tensor, "B S H D_index"], Float[Tensor, "B S H"]]:
        """Index queries, rounded to MXFP4, and head weights, FP32."""
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.width))
        weights = self.weights_proj(x).float() * (self.width * self.heads) ** -0.5
        return straight_through(rotate(q, by), "mxfp4"), weights
