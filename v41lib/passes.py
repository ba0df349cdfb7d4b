"""One pass of new rows through some layers, reading and writing the lanes of a cache; and what a replay starts from.

Everything but attention works row by row, so the rows of all lanes run as one; attention takes each lane on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from v41lib.cache import Lane
from v41lib.model import Block, Encoded, Model, Residual
from v41lib.nn.attention import Record
from v41lib.nn.compressor import pad_entries
from v41lib.nn.shared import Candidates, Selection, Shared


def run_layers(
    model: Model,
    state: Encoded,
    lanes: Sequence[Lane],
    first: int,
    last: int,
    stale_keys: bool = False,
    record: Record | None = None,
) -> Encoded:
    """Layers ``first`` to ``last - 1`` on rows that begin at each lane's length; their KV is left in the lanes.

    ``state`` holds one lane's rows as ``[b, n]``, those of several as ``[1, T]``, lane behind lane. ``stale_keys`` is
    explained by ``Engine``; ``record`` gets what ``Model.trace`` names.
    """
    residual, shares = state.residual, [state.shared] * len(lanes)
    for block in model.blocks[first:last]:
        note = record and partial(_note, record, block.plan.layer)
        attend = partial(_attend, block, lanes, shares, stale_keys, note)
        residual, _ = block(residual, shares[0], state.is_image, note, attend)
    return Encoded(residual, shares[0], state.is_image)


def _note(record: Record, layer: int, name: str, value: Tensor) -> None:
    record(f"{name}.{layer}", value)


def _attend(
    block: Block,
    lanes: Sequence[Lane],
    shares: list[Shared],
    stale_keys: bool,
    record: Record | None,
    x: Float[Tensor, "B S M"],
    _: Shared,
) -> tuple[Float[Tensor, "B S M"], Shared]:
    """One layer's attention for all lanes, each reading and replacing its own share."""
    rows, outputs = x.flatten(0, 1), []
    each = len(rows) // sum(len(lane.rows) for lane in lanes)
    parts = rows.split([len(lane.rows) * each for lane in lanes])
    for number, (lane, part) in enumerate(zip(lanes, parts, strict=True)):
        own = part.unflatten(0, (len(lane.rows), each))
        out, shares[number] = _attend_lane(block, lane, own, shares[number], stale_keys, record)
        outputs.append(out.flatten(0, 1))
    return torch.cat(outputs).unflatten(0, x.shape[:2]), shares[0]


def _attend_lane(
    block: Block, lane: Lane, x: Tensor, shared: Shared, stale_keys: bool, record: Record | None
) -> tuple[Tensor, Shared]:
    """Attention that reads the lane before its rows, and leaves them in it."""
    attn, start, ring = block.attn, lane.length, lane.rings[block.plan.layer]
    if block.plan.owns_kv and (shared.kv is None or shared.kv.owner != block.plan.layer):
        shared = publish(block, x, shared, lane, stale_keys)
    window = attn.window_kv(x, range(start, start + x.shape[1]))
    out, shared = attn.attend_rows(x, start, torch.cat((ring.before(start), window), dim=1), shared, record)
    ring.write(start, window)
    return out, shared


def publish(block: Block, x: Float[Tensor, "B n M"], shared: Shared, lane: Lane, stale_keys: bool = False) -> Shared:
    """Close the groups that ``x`` completes, store their rows, and share all rows of this source.

    Positions that are in a row already, as in a re-run after a prefix hit, are not compressed again.
    """
    attn, layer, ratio = block.attn, block.plan.layer, block.plan.ratio
    source = lane.sources[layer]
    new = x[:, max(source.compressed_to(ratio) - lane.length, 0) :]
    latent, source.pending = attn.compressor.close(new, source.pending)
    number = source.main.count
    main, keys = attn.compressed(latent, number)
    source.main.write(number, main)
    source.keys.write(number, keys)
    kv = source.global_kv(layer, ratio)
    if stale_keys and not latent.shape[1]:
        kv = replace(kv, index_keys=lane.sources[max(lane.sources)].keys.read())
    return shared.publish(kv)


class Tail:
    """The last rows of the encoder's output, gathered over chunks: what a replay runs on."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.parts: list[tuple[Encoded, Tensor | None, Tensor | None]] = []

    def add(self, done: Encoded, lane: Lane, model: Model) -> None:
        """Keep what is still needed of a chunk, with the selections and pools that layers before the replay made."""
        text = model.config.text
        entries = done.shared.selection.entries if done.shared.selection else None
        blocks = None
        if done.shared.candidates is not None:
            blocks = done.shared.candidates.blocks
            if blocks is None:  # everything fits the pool: the same, said in blocks
                total = -(-lane.sources[model.cut].main.count // text.candidate_block_size)
                blocks = torch.arange(total, device=model.device).expand(*done.residual.pre.shape[:2], -1)
            blocks = pad_entries(blocks, text.candidate_topk_blocks)
        if entries is not None:
            entries = pad_entries(entries, text.index_topk)
        self.parts.append((done, entries, blocks))
        spare = sum(part[0].residual.pre.shape[1] for part in self.parts) - self.length
        while spare > 0:
            oldest, old_entries, old_blocks = self.parts[0]
            rows = oldest.residual.pre.shape[1]
            if spare < rows:
                keep = slice(spare, None)
                self.parts[0] = (
                    replace(oldest, residual=rows_of(oldest.residual, keep), is_image=_at(oldest.is_image, keep)),
                    _at(old_entries, keep),
                    _at(old_blocks, keep),
                )
                return
            self.parts.pop(0)
            spare -= rows

    def state(self, lane: Lane, model: Model) -> Encoded:
        """The gathered rows as the state that enters the first replayed layer."""
        text, plan = model.config.text, model.plans[model.cut]
        shared = Shared().publish(lane.sources[model.cut].global_kv(model.cut, plan.ratio))
        last = self.parts[-1][0].shared
        if last.selection is not None and last.selection.owner >= model.cut:
            entries = torch.cat([e for _, e, _ in self.parts if e is not None], dim=1)
            shared = shared.publish(Selection(last.selection.owner, entries))
        if last.candidates is not None:
            blocks = torch.cat([b for _, _, b in self.parts if b is not None], dim=1)
            shared = shared.publish(Candidates(last.candidates.owner, text.candidate_block_size, blocks))
        states = [part[0] for part in self.parts]
        streams = torch.cat([s.residual.streams for s in states], dim=1)
        pre = torch.cat([s.residual.pre for s in states], dim=1)
        images = None
        if any(s.is_image is not None for s in states):
            none = [torch.zeros_like(s.residual.pre[..., 0], dtype=torch.bool) for s in states]
            images = torch.cat([n if s.is_image is None else s.is_image for s, n in zip(states, none, strict=True)], 1)
        return Encoded(Residual(streams, pre), shared, images)


def rows_of(residual: Residual, rows: slice) -> Residual:
    """Some of the rows."""
    return Residual(residual.streams[:, rows], residual.pre[:, rows])


def _at(value: Tensor | None, rows: slice) -> Tensor | None:
    return None if value is None else value[:, rows]
