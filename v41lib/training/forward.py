"""The forward pass as training needs it: whole sequences at once, the indexers' losses, and what may be switched off.

It computes what :class:`v41lib.model.Model` computes, and tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from v41lib.model import Model
from v41lib.nn.attention import Attention, softmax_with_sink
from v41lib.nn.compressor import visible_entries
from v41lib.nn.indexer import best, candidate_blocks, gather_rows, hide_invisible, score, select_among
from v41lib.nn.quant import values
from v41lib.nn.rope import Rotation, rotate
from v41lib.nn.shared import Candidates, GlobalKV, Selection, Shared
from v41lib.training.losses import index_loss


@dataclass(frozen=True)
class Switches:
    """What a forward pass does differently from the model as it is served.

    ``dense``: layers attend to every visible entry instead of a selection. ``without_global``: layers that see their
    window alone. ``blind`` ``[B]``: sequences in which the encoder sees its windows alone. ``restarts`` ``[B]``: the
    position at which the decoder's windows restart in each sequence, as in a bounded replay that begins there (SPEC
    6); the global branch stays exact. ``depth``: how many layers run before the head reads; all of them when None.
    """

    dense: bool = False
    without_global: frozenset[int] = frozenset()
    blind: Bool[Tensor, " B"] | None = None
    restarts: Int[Tensor, " B"] | None = None
    depth: int | None = None

    def rows(self, part: slice) -> Switches:
        """The switches of some of the sequences."""
        blind = None if self.blind is None else self.blind[part]
        restarts = None if self.restarts is None else self.restarts[part]
        return replace(self, blind=blind, restarts=restarts)

    def to(self, device: torch.device) -> Switches:
        """The same on another device."""
        blind = None if self.blind is None else self.blind.to(device)
        restarts = None if self.restarts is None else self.restarts.to(device)
        return replace(self, blind=blind, restarts=restarts)


PLAIN = Switches()


@dataclass
class Output:
    """FP32 logits ``[B,S,V]``, the indexer loss of each layer that selects, and each layer's tokens by expert."""

    logits: Float[Tensor, "B S V"]
    index_losses: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, Int[Tensor, " E"]] = field(default_factory=dict)


Probe = Callable[[Attention, Float[Tensor, "B S H D"], "Window", Float[Tensor, "B C D"], Int[Tensor, "B S K"]], None]


def forward(model: Model, ids: Int[Tensor, "B S"], switches: Switches = PLAIN, probe: Probe | None = None) -> Output:
    """One pass over whole sequences with everything that a training step needs.

    ``probe`` is shown, for each layer that selects, its attention, queries, window, compressed rows and selection.
    Raises ``ValueError`` as :meth:`Model.forward` does.
    """
    state = model.begin(model.checked(ids))
    residual, shared = state.residual, state.shared
    out = Output(torch.empty(0))
    experts = model.config.text.n_routed_experts
    rows: Rows = {}
    for block in model.blocks[: switches.depth]:
        layer = block.plan.layer

        def record(name: str, value: Tensor, layer: int = layer) -> None:
            if name == "route":
                out.loads[layer] = value.flatten().bincount(minlength=experts)

        read = partial(attend, block.attn, switches, out.index_losses, rows, probe)
        residual, shared = block(residual, shared, state.is_image, record, read)
    out.logits = model.logits(residual)
    return out


Rows = dict[tuple[int | None, int | None], Tensor]


def attend(
    attn: Attention,
    switches: Switches,
    losses: dict[int, Tensor],
    rows: Rows,
    probe: Probe | None,
    x: Tensor,
    shared: Shared,
) -> tuple[Tensor, Shared]:
    """:meth:`Attention.forward` over whole sequences, without blocks of queries.

    ``rows`` keeps what was gathered: layers that reuse a selection of the same KV read the same rows.
    """
    plan, text, length = attn.plan, attn.text, x.shape[1]
    by = attn.rotation_at(range(length))
    by = Rotation(by.cos.unsqueeze(1), by.sin.unsqueeze(1))
    q_latent, q = attn.queries(x, by)
    window = attn.window_kv(x, range(length))
    if plan.owns_kv:
        shared = shared.publish(attn.publish(x))
    restarts = switches.restarts if plan.stack == "decoder" else None
    near = Window(window, text.sliding_window, restarts)
    far = entries = absent = index = None
    if plan.mode != "local":
        kv = shared.kv_of(plan.kv_owner)
        main, visible = values(kv.main), visible_entries(torch.arange(length, device=x.device), plan.ratio)
        if plan.selects:
            index = attn.indexer.queries(x, q_latent, by)
            if not switches.dense:
                shared = _select(attn, index, kv, visible, shared)
        if plan.layer not in switches.without_global and main.shape[1]:
            if switches.dense:
                far = main
                absent = (torch.arange(main.shape[1], device=x.device) >= visible.unsqueeze(-1)).unsqueeze(0)
            else:
                entries = shared.selection_of(plan.index_owner).entries
                owners = (plan.kv_owner, plan.index_owner)
                if owners not in rows:
                    rows[owners] = gather_rows(main, entries)
                far, absent = rows[owners], entries < 0
                if probe is not None and plan.selects:
                    probe(attn, q, near, main, entries)
            if switches.blind is not None and plan.stack == "encoder":
                absent = absent | switches.blind.view(-1, 1, 1)
    out, far_weights = joint_attention(q, near, attn.attn_sink, far, absent)
    if index is not None and absent is not None and torch.is_grad_enabled():
        keys = values(shared.kv_of(plan.kv_owner).index_keys)
        scores = score(*index, keys if entries is None else gather_rows(keys, entries))
        losses[plan.layer] = index_loss(scores, far_weights, absent)
    return attn.project(rotate(out, by, inverse=True)), shared


@torch.no_grad()
def _select(attn: Attention, index: tuple[Tensor, Tensor], kv: GlobalKV, visible: Tensor, shared: Shared) -> Shared:
    """The layer's selection, and the candidate pool where it publishes one."""
    text, plan = attn.text, attn.plan
    keys, width = values(kv.index_keys), min(text.index_topk, kv.main.shape[1])
    if plan.candidate_role == "consumer":
        pool = shared.candidates_of(text.candidate_source_layer_id)
        if pool.blocks is not None:
            chosen, _ = select_among(*index, keys, visible, width, pool.blocks, pool.size)
            return shared.publish(Selection(plan.layer, chosen))
    scores = hide_invisible(score(*index, keys), torch.arange(keys.shape[1], device=keys.device), visible)
    shared = shared.publish(Selection(plan.layer, best(scores, width)))
    if plan.candidate_role == "source":
        size, count = text.candidate_block_size, text.candidate_topk_blocks
        blocks = None if keys.shape[1] <= size * count else candidate_blocks(scores, visible, size, count)
        shared = shared.publish(Candidates(plan.layer, size, blocks))
    return shared


class Window:
    """The sliding window by blocks of W queries, each beside the 2W keys that end with its own.

    ``hidden`` ``[B or 1, blocks, W, 2W]`` marks what a query does not see: ``restarts`` ``[B]`` hides from a query at
    or after its sequence's restart the keys before it.
    """

    def __init__(self, keys: Float[Tensor, "B S D"], width: int, restarts: Int[Tensor, " B"] | None = None) -> None:
        self.length, self.block = keys.shape[1], width
        self.blocks = -(-self.length // width)
        padded = F.pad(keys, (0, 0, width, self.blocks * width - self.length)).unflatten(1, (self.blocks + 1, width))
        self.keys = torch.cat((padded[:, :-1], padded[:, 1:]), dim=2)  # [B, blocks, 2W, D]
        first = width * torch.arange(self.blocks, device=keys.device).view(1, -1, 1, 1)
        queries = first + torch.arange(width, device=keys.device).unsqueeze(-1)
        places = first - width + torch.arange(2 * width, device=keys.device)
        self.hidden = (places > queries) | (places <= queries - width) | (places < 0)
        if restarts is not None:
            start = restarts.view(-1, 1, 1, 1)
            self.hidden = self.hidden | ((queries >= start) & (places < start))

    def blocked(self, x: Float[Tensor, "B S H T"]) -> Float[Tensor, "B blocks WH T"]:
        """The rows of a block of queries, all heads, as one matrix."""
        short = self.blocks * self.block - self.length
        padded = F.pad(x, (0, 0, 0, 0, 0, short)) if short else x
        return padded.unflatten(1, (self.blocks, self.block)).flatten(2, 3)

    def rows(self, x: Float[Tensor, "B blocks WH T"], heads: int) -> Float[Tensor, "B S H T"]:
        """The inverse of :meth:`blocked`."""
        return x.unflatten(2, (self.block, heads)).flatten(1, 2)[:, : self.length]


def joint_attention(
    q: Float[Tensor, "B S H D"],
    near: Window,
    sink: Float[Tensor, " H"],
    far: Float[Tensor, "B S K D"] | Float[Tensor, "B K D"] | None,
    absent: Bool[Tensor, "#B S K"] | None,
) -> tuple[Float[Tensor, "B S H D"], Float[Tensor, "B S H K"]]:
    """:func:`v41lib.nn.attention.attend` on whole sequences, and the weights on ``far``, without a gradient.

    ``far`` are each query's own compressed rows or, with three axes, rows that all queries share; ``absent`` marks
    those that a query does not see.
    """
    if far is None or absent is None:
        far, absent = q.new_empty(q.shape[0], 0, q.shape[-1]), near.hidden.new_empty(1, q.shape[1], 0)
    out, weights = _Joint.apply(q, near.keys, far, sink, near, absent)
    return out, weights


class _Joint(torch.autograd.Function):
    """One softmax over window, compressed entries and sink, with its gradient in as few passes over memory."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys: Tensor, far: Tensor, sink: Tensor, near: Window, absent: Tensor
    ) -> tuple[Tensor, Tensor]:
        heads, scale, width = q.shape[2], q.shape[-1] ** -0.5, keys.shape[2]
        products = (near.blocked(q) @ keys.transpose(2, 3)).float().unflatten(2, (near.block, heads))
        products.masked_fill_(near.hidden.unsqueeze(3), -torch.inf)
        distant = _read(_merged(q, far) @ far.transpose(-1, -2), far, heads).float()
        distant = distant.masked_fill_(absent.unsqueeze(2), -torch.inf)
        logits = torch.cat((products.flatten(1, 2)[:, : near.length], distant), dim=-1).mul_(scale)
        weights = softmax_with_sink(logits, sink).to(q.dtype)
        near_weights, far_weights = weights.split((width, weights.shape[-1] - width), dim=-1)
        out = near.rows(near.blocked(near_weights) @ keys, heads)
        out = out + _read(_merged(far_weights, far) @ far, far, heads)
        ctx.save_for_backward(q, keys, far, weights)
        ctx.near = near
        ctx.mark_non_differentiable(far_weights)
        return out, far_weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None, None]:
        q, keys, far, weights = ctx.saved_tensors
        near, grad, heads, width = ctx.near, grads[0], q.shape[2], keys.shape[2]
        grad_rows, far_grad = near.blocked(grad), _merged(grad, far)
        of_near = near.rows(grad_rows @ keys.transpose(2, 3), heads)
        of_far = _read(far_grad @ far.transpose(-1, -2), far, heads)
        slopes = torch.cat((of_near, of_far), dim=-1).mul_(weights)
        along = slopes.sum(-1, keepdim=True)
        slopes.addcmul_(weights, along, value=-1)
        sink = ((weights.sum(-1) - 1) * along.squeeze(-1)).sum((0, 1))  # the sink's weight is what the keys leave
        slopes.mul_(q.shape[-1] ** -0.5)
        near_slopes, far_slopes = (near.blocked(slopes[..., :width]), _merged(slopes[..., width:], far))
        # What a key receives as a key and as a value, in one product.
        both = torch.cat((near_slopes, near.blocked(weights[..., :width])), dim=2)
        d_keys = both.transpose(2, 3) @ torch.cat((near.blocked(q), grad_rows), dim=2)
        far_both = torch.cat((far_slopes, _merged(weights[..., width:], far)), dim=-2)
        d_far = far_both.transpose(-1, -2) @ torch.cat((_merged(q, far), far_grad), dim=-2)
        d_q = near.rows(near_slopes @ keys, heads) + _read(far_slopes @ far, far, heads)
        return d_q, d_keys, d_far, sink, None, None


def _merged(x: Tensor, far: Tensor) -> Tensor:
    """Queries as they multiply ``far``: one matrix a sequence where all share its rows, else one a query."""
    return x.flatten(1, 2) if far.dim() == 3 else x


def _read(x: Tensor, far: Tensor, heads: int) -> Tensor:
    """The inverse of :func:`_merged`."""
    return x.unflatten(1, (-1, heads)) if far.dim() == 3 else x
