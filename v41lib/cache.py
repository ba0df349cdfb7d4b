"""The decode state: who owns each tensor, how many bytes it takes, and how to take a step back.

Every tensor has one owner: main KV and index keys their KV source, a window ring its layer, an open group the source
that will close it. *Packed* storage holds the release's bytes; *plain* storage holds the same values, faster to read.
Sequences of one length share storage, a *lane*; a batch has one lane for each length in it, and no padding.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from v41lib.config import TextConfig
from v41lib.nn.compressor import OpenGroup
from v41lib.nn.quant import FP4, FP8, MXFP4, Format, Packed, pack, round_trip, unpack
from v41lib.nn.shared import GlobalKV
from v41lib.plan import plan_layers

_T = TypeVar("_T")


class CacheError(RuntimeError):
    """A state that is asked for and not there; the message says what has overwritten or dropped it."""


class Rows:
    """Rows of one kind for a batch, numbered from 0, packed or plain; storage grows by doubling."""

    def __init__(self, batch: int, width: int, fmt: Format, packed: bool, like: Tensor) -> None:
        self.width, self.fmt, self.packed, self.count = width, fmt, packed, 0
        self._like, self._batch = like, batch
        self._elements, self._scales = self._storage(0)

    def _storage(self, capacity: int) -> tuple[Tensor, Tensor]:
        if not self.packed:
            return self._like.new_zeros(self._batch, capacity, self.width), self._like.new_zeros(0)
        blocks = -(-self.width // self.fmt.block)
        bytes_a_row = self.fmt.row_bytes(self.width) - blocks
        zeros = lambda width: torch.zeros(  # noqa: E731 (two tensors of one kind)
            self._batch, capacity, width, dtype=torch.uint8, device=self._like.device
        )
        return zeros(bytes_a_row), zeros(blocks)

    def write(self, first: int, rows: Float[Tensor, "B n D"]) -> None:
        """Store unrounded ``rows`` as numbers ``first`` on; later numbers are forgotten."""
        needed = first + rows.shape[1]
        if needed > self._elements.shape[1]:
            elements, scales = self._storage(max(2 * self._elements.shape[1], needed, 16))
            elements[:, : self.count] = self._elements[:, : self.count]
            if self.packed:
                scales[:, : self.count] = self._scales[:, : self.count]
            self._elements, self._scales = elements, scales
        self.count = needed
        if self.packed:
            stored = pack(rows, self.fmt)
            self._elements[:, first:needed], self._scales[:, first:needed] = stored.elements, stored.scales
        else:
            self._elements[:, first:needed] = round_trip(rows, self.fmt)

    def read(self) -> Float[Tensor, "B C D"] | Packed:
        """All rows, as a view of the storage."""
        if not self.packed:
            return self._elements[:, : self.count]
        return Packed(self.fmt, self.width, self._elements[:, : self.count], self._scales[:, : self.count])

    def taken(self, batch: list[int], count: int) -> Rows:
        """A copy of the first ``count`` rows of some sequences."""
        other = copy.copy(self)
        other._batch, other.count = len(batch), count
        other._elements = self._elements[batch, :count]
        other._scales = self._scales[batch, :count] if self.packed else self._scales
        return other

    def nbytes(self) -> int:
        """The bytes of the rows that are there, measured on the storage's own tensors."""
        used = [self._elements[:, : self.count], self._scales[:, : self.count]] if self.packed else [self.read()]
        return sum(t.numel() * t.element_size() for t in used if isinstance(t, Tensor))


class Ring:
    """One layer's window KV: the rows of the last positions, each in the place of one that no query can see any more.

    ``since`` is the first position it has ever held; a replay begins there and sees nothing older.
    """

    def __init__(self, batch: int, width: int, window: int, undo: int, packed: bool, like: Tensor) -> None:
        self.window, self.capacity, self.since, self.packed, self.width = window, window + undo, 0, packed, width
        self._rows = Rows(batch, width, FP8, packed, like)
        self._rows.write(0, like.new_zeros(batch, self.capacity, width))

    def write(self, start: int, rows: Float[Tensor, "B n D"]) -> None:
        """Store the rows of positions ``start`` on; only the last of them that fit are kept."""
        kept = rows[:, -self.capacity :]
        first = start + rows.shape[1] - kept.shape[1]
        places = torch.arange(first, first + kept.shape[1], device=rows.device) % self.capacity
        if self.packed:
            stored = pack(kept, FP8)
            self._rows._elements[:, places], self._rows._scales[:, places] = stored.elements, stored.scales
        else:
            self._rows._elements[:, places] = kept

    def before(self, start: int) -> Float[Tensor, "B T D"]:
        """The rows that a query at ``start`` sees beside its own, oldest first."""
        oldest = max(start - self.window + 1, self.since, 0)
        places = torch.arange(oldest, max(start, oldest), device=self._rows._elements.device) % self.capacity
        rows = self._rows.read()[:, places]
        return unpack(rows, self._rows._like.dtype) if isinstance(rows, Packed) else rows

    def taken(self, batch: list[int]) -> Ring:
        """A copy for some of the sequences."""
        other = copy.copy(self)
        other._rows = self._rows.taken(batch, self.capacity)
        return other

    def nbytes(self) -> int:
        """The bytes of the ring, full or not: it is allocated once."""
        return self._rows.nbytes()


@dataclass
class Source:
    """What a KV source owns: its rows of main KV and index keys, and the group it has not closed yet."""

    main: Rows
    keys: Rows
    pending: OpenGroup | None = None

    def global_kv(self, owner: int, ratio: int) -> GlobalKV:
        """All rows written so far, for layers to read."""
        return GlobalKV(owner, ratio, self.main.read(), self.keys.read())

    def compressed_to(self, ratio: int) -> int:
        """The first position that is neither in a row nor in the open group."""
        return self.main.count * ratio + (self.pending.values.shape[1] if self.pending else 0)


@dataclass(frozen=True)
class Mark:
    """A point of a lane to come back to: the length there, and the little that is overwritten in place."""

    length: int
    pending: dict[int, OpenGroup | None]
    since: tuple[int, ...]
    rewinds: int


Snapshot = tuple[Mark, ...]  # one a lane


class Lane:
    """The state of the sequences of a batch that have one length: numbers ``rows`` of it, in this order.

    ``undo`` positions can be taken back beyond the window. Without ``rings`` it is what a prefix cache keeps.
    """

    def __init__(self, text: TextConfig, rows: Sequence[int], like: Tensor, packed: bool = True, undo: int = 8) -> None:
        self.text, self.rows, self.packed, self.undo, self.length = text, list(rows), packed, undo, 0
        self.plans, self.like = plan_layers(text), like
        batch = len(self.rows)
        self.rings = self._new_rings(since=0)
        self.sources = {
            plan.layer: Source(
                Rows(batch, text.head_dim, FP4, packed, like), Rows(batch, text.index_head_dim, MXFP4, packed, like)
            )
            for plan in self.plans
            if plan.owns_kv
        }
        self._tokens = torch.zeros(batch, 0, dtype=torch.int64, device=like.device)
        self._written = 0  # the first position that no ring has ever held
        self._rewinds: list[int] = []  # lengths that restore() came back to, in order

    def __str__(self) -> str:
        return f"sequence {self.rows[0]}" if len(self.rows) == 1 else f"sequences {', '.join(map(str, self.rows))}"

    def _new_rings(self, since: int) -> list[Ring]:
        text = self.text
        rings = [
            Ring(len(self.rows), text.head_dim, text.sliding_window, self.undo, self.packed, self.like)
            for _ in self.plans
        ]
        for ring in rings:
            ring.since = since
        return rings

    def advance(self, ids: Int[Tensor, "B n"]) -> None:
        """Count ``ids`` as fed, after every layer has stored their rows."""
        needed = self.length + ids.shape[1]
        if needed > self._tokens.shape[1]:
            longer = self._tokens.new_zeros(len(self.rows), max(2 * self._tokens.shape[1], needed, 16))
            longer[:, : self.length] = self.tokens
            self._tokens = longer
        self._tokens[:, self.length : needed] = ids
        self.length = needed
        self._written = max(self._written, self.length)

    @property
    def tokens(self) -> Int[Tensor, "B S"]:
        """The tokens fed so far."""
        return self._tokens[:, : self.length]

    def mark(self) -> Mark:
        """A point to :meth:`restore` later; it costs a few rows, not a copy."""
        pending = {layer: source.pending for layer, source in self.sources.items()}
        return Mark(self.length, pending, tuple(ring.since for ring in self.rings), len(self._rewinds))

    def check(self, point: Mark) -> None:
        """Raise ``CacheError`` when something that :meth:`restore` needs has been overwritten since."""
        self.check_way(point)
        gone = f"the state of length {point.length} ({self}) is gone"
        for ring, since in zip(self.rings, point.since, strict=True):
            oldest = max(point.length - ring.window + 1, since, 0)
            if oldest < point.length and self._written > oldest + ring.capacity:
                raise CacheError(
                    f"{gone}: {self._written - point.length} tokens came after it, and a window ring of "
                    f"{ring.capacity} rows keeps a window of {ring.window} for at most "
                    f"{ring.capacity - ring.window + 1} more"
                )

    def check_way(self, point: Mark) -> None:
        """Raise ``CacheError`` when the cache went back beyond a point and took another way since."""
        shorter = [length for length in self._rewinds[point.rewinds :] if length < point.length]
        if shorter:
            raise CacheError(
                f"the state of length {point.length} ({self}) is gone: the cache went back to {min(shorter)} and took "
                "another way"
            )

    def restore(self, point: Mark) -> None:
        """Go back to a point, exactly; errors as :meth:`check` says."""
        self.check(point)
        if point.length < self.length:
            self._rewinds.append(point.length)
        self.length = point.length
        for ring, since in zip(self.rings, point.since, strict=True):
            ring.since = since
        for layer, source in self.sources.items():
            source.pending = point.pending[layer]
            source.main.count = source.keys.count = point.length // self.plans[layer].ratio

    def taken(self, places: list[int], rows: list[int], length: int | None = None) -> Lane:
        """A copy of the sequences at some of the lane's places, as numbers ``rows`` of a batch.

        With a ``length``, a copy of that many tokens' global KV and ids alone: no windows, no open groups.
        """
        other = copy.copy(self)
        whole, other.rows = length is None, list(rows)
        other.length = other._written = self.length if length is None else length
        other._tokens, other._rewinds, other.sources = self._tokens[places, : other.length], [], {}
        other.rings = [ring.taken(places) for ring in self.rings] if whole else []
        for layer, source in self.sources.items():
            opened, count = None, other.length // self.plans[layer].ratio
            if whole and source.pending is not None:
                opened = OpenGroup(source.pending.values[places], source.pending.gates[places])
            other.sources[layer] = Source(source.main.taken(places, count), source.keys.taken(places, count), opened)
        return other

    def rerun_from(self, position: int) -> None:
        """Go back to ``position`` with new windows that begin there; the global KV written so far stays."""
        self.rings, self.length, self._written = self._new_rings(since=position), position, position
        for source in self.sources.values():
            source.pending = None

    def nbytes(self) -> dict[str, int]:
        """Bytes by owner, measured: ``main.L``, ``keys.L`` and ``open.L`` of sources, ``window.L`` of layers."""
        sizes = {}
        for layer, source in self.sources.items():
            sizes[f"main.{layer}"], sizes[f"keys.{layer}"] = source.main.nbytes(), source.keys.nbytes()
            if source.pending is not None:
                parts = (source.pending.values, source.pending.gates)
                sizes[f"open.{layer}"] = sum(part.numel() * part.element_size() for part in parts)
        return sizes | {f"window.{layer}": ring.nbytes() for layer, ring in enumerate(self.rings)}


class Cache:
    """The whole state of a batch: one lane for each length in it."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)

    @property
    def batch(self) -> int:
        return sum(len(lane.rows) for lane in self.lanes)

    @property
    def text(self) -> TextConfig:
        return self.lanes[0].text

    @property
    def lengths(self) -> list[int]:
        """How many tokens each sequence has been fed."""
        return self.spread([lane.length for lane in self.lanes])

    @property
    def tokens(self) -> list[Int[Tensor, " S"]]:
        """The tokens that each sequence has been fed."""
        by_row = {row: ids for lane in self.lanes for row, ids in zip(lane.rows, lane.tokens, strict=True)}
        return [by_row[row][:length] for row, length in enumerate(self.lengths)]

    def snapshot(self) -> Snapshot:
        """A point to :meth:`restore` later; it costs a few rows, not a copy."""
        return tuple(lane.mark() for lane in self.lanes)

    def restore(self, point: Snapshot) -> None:
        """Go back to a snapshot, exactly. Raises ``CacheError``, and changes nothing, when a lane cannot."""
        for lane, mark in zip(self.lanes, point, strict=True):
            lane.check(mark)
        for lane, mark in zip(self.lanes, point, strict=True):
            lane.restore(mark)

    def prefix(self, length: int | None = None, point: Snapshot | None = None) -> Cache:
        """What a prefix cache keeps of the first ``length`` tokens (all): a copy of the global KV and the ids alone.

        With a ``point``, of the tokens up to it. Windows and open groups are dropped; an engine's ``resume`` rebuilds
        them. Raises ``CacheError`` when a sequence is shorter, or the cache took another way since the point.
        """
        kept = []
        for lane, mark in zip(self.lanes, point or self.snapshot(), strict=True):
            lane.check_way(mark)
            if length is not None and not 1 <= length <= mark.length:
                raise CacheError(f"length = {length}: must be 1 to {mark.length}, the tokens of {lane}")
            kept.append(lane.taken(list(range(len(lane.rows))), lane.rows, length or mark.length))
        return Cache(kept)

    def nbytes(self) -> dict[str, int]:
        """Bytes by owner over all sequences, as :meth:`Lane.nbytes` names them."""
        total: Counter[str] = Counter()
        for lane in self.lanes:
            total.update(lane.nbytes())
        return dict(total)

    def global_nbytes(self) -> int:
        """The bytes that grow with the context: main KV and index keys of all sources (SPEC 11)."""
        return sum(size for name, size in self.nbytes().items() if name.startswith(("main.", "keys.")))

    # --- between the batch's order and the lanes' --------------------------------------------------------------------

    def spread(self, values: Sequence[_T]) -> list[_T]:
        """One value a lane as one value a sequence, in the batch's order."""
        by_row = {row: value for lane, value in zip(self.lanes, values, strict=True) for row in lane.rows}
        return [by_row[row] for row in range(self.batch)]

    def split(self, rows: Tensor) -> list[Tensor]:
        """``[B, ...]`` in the batch's order as one tensor a lane."""
        return [rows[lane.rows] for lane in self.lanes]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor a lane as ``[B, ...]`` in the batch's order."""
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([row for lane in self.lanes for row in lane.rows])
        return torch.cat(list(parts))[order.argsort().to(parts[0].device)]
