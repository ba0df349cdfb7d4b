"""Attention over a sliding window and a selection of compressed entries (CSA), in one joint softmax.

The window KV and the compressed latent are each one vector that serves as key and value for all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from v41lib.config import TextConfig
from v41lib.nn.compiled import token_wise
from v41lib.nn.compressor import Compressor, pad_entries, visible_entries
from v41lib.nn.indexer import Indexer, block_entries, candidate_blocks, gather_rows, select_among, select_everywhere
from v41lib.nn.linear import Linear
from v41lib.nn.norm import RMSNorm
from v41lib.nn.quant import straight_through, values
from v41lib.nn.rope import Rotation, layer_frequencies, rotate, rotation, rotation_over
from v41lib.nn.shared import Candidates, GlobalKV, Selection, Shared
from v41lib.plan import LayerPlan

Record = Callable[[str, Tensor], None]

# The largest temporary of one query block, in elements (256 MiB of FP32).
BLOCK_ELEMENTS = 1 << 26


def softmax_with_sink(logits: Float[Tensor, "... H T"], sink: Float[Tensor, " H"]) -> Float[Tensor, "... H T"]:
    """Softmax over the last axis whose denominator also counts ``exp(sink)`` of each head (SPEC 4).

    A row of -inf gives zeros: all the weight is the sink's.
    """
    lowest = torch.finfo(torch.float32).min  # for -inf: nothing beside any key, yet all the weight when there is none
    column = sink.float().clamp_min(lowest).unsqueeze(-1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, column), dim=-1).softmax(-1)[..., :-1]


def attend(
    q: Float[Tensor, "B S H D"],
    window: Float[Tensor, "B T D"],
    in_window: Bool[Tensor, "S T"] | None,
    sink: Float[Tensor, " H"],
    far: Float[Tensor, "B S K D"] | None = None,
    entries: Int[Tensor, "B S K"] | None = None,
) -> Float[Tensor, "B S H D"]:
    """Joint attention of a block of queries (SPEC 4).

    ``window`` are raw keys, ``in_window`` true where a query sees one (None: everywhere); ``far`` are each query's own
    compressed rows, those of its ``entries`` (-1 absent); ``sink`` joins the denominator only.
    """
    batch, length, heads, width = q.shape
    scale = width**-0.5
    flat = q.reshape(batch, length * heads, width)
    near = (flat @ window.transpose(1, 2)).float().unflatten(1, (length, heads)) * scale
    logits = near if in_window is None else near.masked_fill(~in_window.unsqueeze(1), -torch.inf)
    if far is not None and entries is not None:
        products = (q @ far.transpose(2, 3)).float() * scale
        logits = torch.cat((logits, products.masked_fill(entries.unsqueeze(2) < 0, -torch.inf)), dim=-1)
    weights = softmax_with_sink(logits, sink).to(q.dtype)
    near_weights = weights[..., : window.shape[1]].flatten(1, 2)
    out = (near_weights @ window).unflatten(1, (length, heads))
    if far is not None:
        out = out + weights[..., window.shape[1] :] @ far
    return out


class Attention(nn.Module):
    """One layer's attention in any of the four modes, as its plan says (SPEC 4 and 5)."""

    def __init__(self, text: TextConfig, plan: LayerPlan, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.plan, self.text = plan, text
        heads, width, eps = text.num_attention_heads, text.head_dim, text.rms_norm_eps
        self.wq_a = Linear(text.hidden_size, text.q_lora_rank, dtype=dtype)
        self.q_norm = RMSNorm(text.q_lora_rank, eps, dtype)
        self.wq_b = Linear(text.q_lora_rank, heads * width, dtype=dtype)
        self.wkv = Linear(text.hidden_size, width, dtype=dtype)
        self.kv_norm = RMSNorm(width, eps, dtype)
        self.wo_a = Linear(heads * width // text.o_groups, text.o_groups * text.o_lora_rank, dtype=dtype)
        self.wo_b = Linear(text.o_groups * text.o_lora_rank, text.hidden_size, dtype=dtype)
        self.attn_sink = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        if plan.owns_kv:
            self.compressor = Compressor(text, plan.ratio, dtype)
        if plan.selects:
            self.indexer = Indexer(text, plan.owns_kv, dtype)

    def rotation_at(self, positions: Tensor | range) -> Rotation:
        """This layer's rotation at ``positions``; windows and compressed entries share one table."""
        device = self.attn_sink.device if isinstance(positions, range) else positions.device
        freqs = layer_frequencies(self.text, self.plan.ratio, device)
        return rotation_over(positions, freqs) if isinstance(positions, range) else rotation(positions, freqs)

    @token_wise
    def _window_kv(self, x: Tensor, by: Rotation) -> Tensor:
        return straight_through(rotate(self.kv_norm(self.wkv(x)), by), "fp8")

    @token_wise
    def queries(
        self, x: Float[Tensor, "B S M"], by: Rotation
    ) -> tuple[Float[Tensor, "B S Q"], Float[Tensor, "B S H D"]]:
        """The query latent, which the indexer reads as well, and the rotated queries."""
        latent = self.q_norm(self.wq_a(x))
        heads = self.wq_b(latent).unflatten(-1, (-1, self.text.head_dim))
        return latent, rotate(heads, by)

    def window_kv(self, x: Float[Tensor, "B S M"], positions: Int[Tensor, " S"] | range) -> Float[Tensor, "B S D"]:
        """The layer's own window KV: projected, normed, rotated, rounded to FP8 (rotary part included)."""
        return self._window_kv(x, self.rotation_at(positions))

    def compressed(
        self, latent: Float[Tensor, "B C D"], first: int = 0
    ) -> tuple[Float[Tensor, "B C D"], Float[Tensor, "B C D_index"]]:
        """A source's latents as main KV and index keys, rotated and not yet rounded; ``first`` numbers the first entry.

        A latent is rotated at the position of its group's first token.
        """
        starts = (first + torch.arange(latent.shape[1], device=latent.device)) * self.plan.ratio
        by = self.rotation_at(starts)
        return rotate(latent, by), self.indexer.keys(latent, by)

    def publish(self, x: Float[Tensor, "B S M"]) -> GlobalKV:
        """Compress the layer's whole input into the global KV it owns."""
        main, keys = self.compressed(self.compressor(x))
        return GlobalKV(
            self.plan.layer, self.plan.ratio, straight_through(main, "fp4"), straight_through(keys, "mxfp4")
        )

    def forward(
        self, x: Float[Tensor, "B S M"], shared: Shared, record: Record | None = None
    ) -> tuple[Float[Tensor, "B S M"], Shared]:
        """Attend from each row of ``x``, the normed input of positions 0 to S-1. Also returns what it shares.

        Raises ``RuntimeError`` when the KV or the selection it reads is not the one its plan names.
        """
        if self.plan.owns_kv and (shared.kv is None or shared.kv.owner != self.plan.layer):
            shared = shared.publish(self.publish(x))
        window = self.window_kv(x, range(x.shape[1]))
        return self.attend_rows(x, 0, window, shared, record)

    def attend_rows(
        self,
        x: Float[Tensor, "B S M"],
        start: int,
        window: Float[Tensor, "B T D"],
        shared: Shared,
        record: Record | None = None,
    ) -> tuple[Float[Tensor, "B S M"], Shared]:
        """Attend from rows of positions ``start`` on; ``window`` are raw keys up to the last of them, older ones first.

        The last S of the T keys are the rows' own. A key that is not given is not seen, as in a replay that begins
        there. Queries are processed in blocks: no tensor of S x T x heads exists.
        """
        plan, width = self.plan, self.text.sliding_window
        kv = None if plan.mode == "local" else shared.kv_of(plan.kv_owner)
        before = window.shape[1] - x.shape[1]

        outputs, selections, pools, counts = [], [], [], []
        for first, last in self._blocks(x, kv):
            positions = torch.arange(start + first, start + last, device=x.device)
            by = self.rotation_at(range(start + first, start + last))
            by = Rotation(by.cos.unsqueeze(1), by.sin.unsqueeze(1))  # one more axis, for the heads
            q_latent, q = self.queries(x[:, first:last], by)
            entries = None
            if kv is not None:
                if plan.selects:
                    visible = visible_entries(positions, plan.ratio)
                    entries, pool, scores = self._select(
                        x[:, first:last], q_latent, by, kv, visible, shared, slice(first, last)
                    )
                    selections.append(entries)
                    pools.append(pool)
                    if record:
                        counts.append((scores > -torch.inf).sum(-1))
                else:
                    entries = shared.selection_of(plan.index_owner).entries[:, first:last]
                # Ascending, so what is cut is absent for all these queries.
                entries = entries[..., : (start + last) // plan.ratio]
            oldest = max(before + first - width + 1, 0)
            near, in_window, far = window[:, oldest : before + last], None, None
            if last - first > 1:  # a single query sees every key from the oldest on
                keys = torch.arange(oldest, before + last, device=x.device) + (start - before)
                age = positions.unsqueeze(1) - keys
                in_window = (age >= 0) & (age < width)
            if kv is not None and entries is not None and entries.shape[-1]:
                far = gather_rows(kv.main, entries)
            outputs.append(self.read(q, near, in_window, far, entries, by))

        if selections:
            shared = shared.publish(Selection(plan.layer, torch.cat(selections, dim=1)))
            if plan.candidate_role == "source":
                blocks = None if pools[0] is None else torch.cat([p for p in pools if p is not None], dim=1)
                shared = shared.publish(Candidates(plan.layer, self.text.candidate_block_size, blocks))
        if record:
            self._record(record, window[:, before:], start, shared, counts)
        return torch.cat(outputs, dim=1), shared

    @token_wise
    def read(
        self,
        q: Float[Tensor, "B S H D"],
        window: Float[Tensor, "B T D"],
        in_window: Bool[Tensor, "S T"] | None,
        far: Float[Tensor, "B S K D"] | None,
        entries: Int[Tensor, "B S K"] | None,
        by: Rotation,
    ) -> Float[Tensor, "B S M"]:
        """What the heads read, rotated back and projected."""
        out = attend(q, window, in_window, self.attn_sink, far, entries)
        return self.project(rotate(out, by, inverse=True))

    def project(self, out: Float[Tensor, "B S H D"]) -> Float[Tensor, "B S M"]:
        """``[B,S,H,D] -> [B,S,M]``: a block-diagonal projection, one block a group of heads, then one back to M."""
        groups = out.flatten(2).unflatten(-1, (self.text.o_groups, -1))
        weight = self.wo_a.weight.unflatten(0, (self.text.o_groups, -1))
        return self.wo_b(torch.einsum("bsgi,goi->bsgo", groups, weight).flatten(2))

    def _select(
        self, x: Tensor, q_latent: Tensor, by: Rotation, kv: GlobalKV, visible: Tensor, shared: Shared, rows: slice
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """One query block's selection ``[B,S,K]``, the pool ``[B,S,N]`` of a candidate source that must choose, and
        the scores ``[B,S,T]`` that were computed, -inf for a key that a query does not see.
        """
        text, count, most = self.text, kv.main.shape[1], int(visible[-1])
        width = min(text.index_topk, count)
        queries, weights = self.indexer.queries(x, q_latent, by)
        if self.plan.candidate_role == "consumer":
            pool = shared.candidates_of(text.candidate_source_layer_id)
            if pool.blocks is not None:
                blocks = pool.blocks[:, rows]
                chosen, scores = select_among(queries, weights, kv.index_keys, visible, width, blocks, pool.size)
                return chosen, None, scores
        keys = kv.index_keys[:, :most]  # no query of this block sees a later one
        if self.plan.candidate_role == "source" and count > text.candidate_topk_blocks * text.candidate_block_size:
            selected, scores = select_everywhere(queries, weights, keys, visible, width)
            chosen = candidate_blocks(scores, visible, text.candidate_block_size, text.candidate_topk_blocks)
            return pad_entries(selected, width), pad_entries(chosen, text.candidate_topk_blocks), scores
        if most <= text.index_topk:  # nothing to choose: everything visible is kept
            everything = torch.arange(width, device=x.device)
            entries = torch.where(everything < visible.unsqueeze(-1), everything, -1).expand(x.shape[0], -1, -1)
            return entries, None, weights[..., :0]
        selected, scores = select_everywhere(queries, weights, keys, visible, width)
        return pad_entries(selected, width), None, scores

    def _blocks(self, x: Tensor, kv: GlobalKV | None) -> Iterator[tuple[int, int]]:
        """Query ranges whose temporaries stay near ``BLOCK_ELEMENTS``; short enough that few window keys are wasted."""
        text, batch = self.text, x.shape[0]
        entries = 0 if kv is None else kv.main.shape[1]
        picked = min(text.index_topk, entries)
        a_query = text.num_attention_heads * (text.head_dim + 2 * text.sliding_window + picked) + picked * text.head_dim
        if self.plan.selects:
            pool = text.candidate_topk_blocks * text.candidate_block_size
            gathers = self.plan.candidate_role == "consumer" and entries > pool
            a_query += (
                (pool * text.index_head_dim + text.index_n_heads * pool) if gathers else text.index_n_heads * entries
            )
        block = max(1, min(BLOCK_ELEMENTS // (batch * a_query), max(text.sliding_window, 64)))
        length = x.shape[1]
        for start in range(0, length, block):
            yield start, min(start + block, length)

    def _record(self, record: Record, window: Tensor, start: int, shared: Shared, counts: list[Tensor]) -> None:
        record("window", window)
        if self.plan.owns_kv:
            kv = shared.kv_of(self.plan.layer)
            record("main", values(kv.main))
            record("keys", values(kv.index_keys))
        if self.plan.selects:
            record("scored", torch.cat(counts, dim=1))
            entries = shared.selection_of(self.plan.layer).entries
            record("topk", pad_entries(entries, self.text.index_topk))
        if self.plan.candidate_role:
            pool, count = (
                shared.candidates_of(self.text.candidate_source_layer_id),
                shared.kv_of(self.plan.kv_owner).main.shape[1],
            )
            record("cand", _as_mask(pool, window.shape[:2], start, count, self.plan.ratio))


def _as_mask(pool: Candidates, shape: torch.Size, start: int, count: int, ratio: int) -> Tensor:
    """The visible candidates as ``[B,S,C]`` bool, for a trace only: the model itself never builds one."""
    everywhere = torch.arange(count)
    visible = everywhere < visible_entries(torch.arange(start, start + shape[1]), ratio).unsqueeze(-1)
    if pool.blocks is None:
        return visible.expand(*shape, count)
    mask = torch.zeros(*shape, count + 1, dtype=torch.bool)  # one more column takes what is absent
    entries = block_entries(pool.blocks.cpu(), pool.size)
    mask.scatter_(-1, torch.where((entries < 0) | (entries > count), count, entries), True)
    return mask[..., :count] & visible
