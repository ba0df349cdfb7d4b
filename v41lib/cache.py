"""The decode state: who owns each tensor, how many bytes it takes, and how to take a step back.

Every tensor has one owner: main KV and index keys their KV source, a window ring its layer, an open group the source
that will close it. *Packed* storage holds the release's bytes; *plain* storage holds the same values, faster to read.
Sequences of a batch have one length; an engine keeps one cache for each length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from v41lib.config import TextConfig
from v41lib.nn.compressor import OpenGroup
from v41lib.nn.quant import FP4, FP8, MXFP4, Format, Packed, pack, round_trip, unpack
from v41lib.nn.shared import GlobalKV
from v41lib.plan import plan_layers


class CacheError(RuntimeError):
    """A state that is asked for and no longer there; the message says what has overwritten it."""


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


@dataclass(frozen=True)
class Snapshot:
    """A point to come back to: the length there, and the little that is overwritten in place."""

    length: int
    pending: dict[int, OpenGroup | None]
    since: tuple[int, ...]
    rewinds: int


class Cache:
    """The whole state of a batch of sequences of one length. ``undo`` positions can be taken back beyond the window."""

    def __init__(self, text: TextConfig, batch: int, like: Tensor, packed: bool = True, undo: int = 8) -> None:
        self.text, self.batch, self.packed, self.length = text, batch, packed, 0
        self.plans = plan_layers(text)
        self.rings = [Ring(batch, text.head_dim, text.sliding_window, undo, packed, like) for _ in self.plans]
        self.sources = {
            plan.layer: Source(
                Rows(batch, text.head_dim, FP4, packed, like), Rows(batch, text.index_head_dim, MXFP4, packed, like)
            )
            for plan in self.plans
            if plan.owns_kv
        }
        self.tokens = torch.zeros(batch, 0, dtype=torch.int64, device=like.device)
        self._written = 0  # the first position that no ring has ever held
        self._rewinds: list[int] = []  # lengths that restore() came back to, in order

    def advance(self, ids: Int[Tensor, "B n"]) -> None:
        """Count ``ids`` as fed, after every layer has stored their rows."""
        self.tokens = torch.cat((self.tokens[:, : self.length], ids), dim=1)
        self.length += ids.shape[1]
        self._written = max(self._written, self.length)

    def snapshot(self) -> Snapshot:
        """A point to :meth:`restore` later; it costs a few rows, not a copy."""
        pending = {layer: source.pending for layer, source in self.sources.items()}
        return Snapshot(self.length, pending, tuple(ring.since for ring in self.rings), len(self._rewinds))

    def restore(self, point: Snapshot) -> None:
        """Go back to a snapshot, exactly. Raises ``CacheError`` when something it needs has been overwritten since."""
        shorter = [length for length in self._rewinds[point.rewinds :] if length < point.length]
        if shorter:
            raise CacheError(
                f"the state of length {point.length} is gone: "
                f"the cache went back to {min(shorter)} and took another way"
            )
        for ring, since in zip(self.rings, point.since, strict=True):
            oldest = max(point.length - ring.window + 1, since, 0)
            if oldest < point.length and self._written > oldest + ring.capacity:
                raise CacheError(
                    f"the state of length {point.length} is gone: {self._written - point.length} tokens came after it, "
                    f"and a window ring of {ring.capacity} rows keeps a window of {ring.window} for at most "
                    f"{ring.capacity - ring.window + 1} more"
                )
        if point.length < self.length:
            self._rewinds.append(point.length)
        self.length = point.length
        for plan in self.plans:
            self.rings[plan.layer].since = point.since[plan.layer]
            if plan.owns_kv:
                source = self.sources[plan.layer]
                source.pending = point.pending[plan.layer]
                source.main.count = source.keys.count = point.length // plan.ratio

    def nbytes(self) -> dict[str, int]:
        """Bytes by owner, measured: ``main.L``, ``keys.L`` and ``open.L`` of sources, ``window.L`` of layers."""
        sizes = {}
        for layer, source in self.sources.items():
            sizes[f"main.{layer}"], sizes[f"keys.{layer}"] = source.main.nbytes(), source.keys.nbytes()
            if source.pending is not None:
                parts = (source.pending.values, source.pending.gates)
                sizes[f"open.{layer}"] = sum(part.numel() * part.element_size() for part in parts)
        return sizes | {f"window.{layer}": ring.nbytes() for layer, ring in enumerate(self.rings)}

    def global_nbytes(self) -> int:
        """The bytes that grow with the context: main KV and index keys of all sources (SPEC 11)."""
        return sum(size for name, size in self.nbytes().items() if name.startswith(("main.", "keys.")))
