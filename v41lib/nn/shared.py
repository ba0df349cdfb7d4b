"""What travels between layers: the global KV, the selection and the candidate pool, each tagged with its owner.

There is no module-level slot. A reader states whose tensor it means, and another layer's is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from jaxtyping import Float, Int
from torch import Tensor

from v41lib.nn.quant import Packed


@dataclass(frozen=True)
class GlobalKV:
    """A KV source's compressed entries and their index keys, rounded; packed where a cache keeps them so."""

    owner: int
    ratio: int
    main: Float[Tensor, "B C D"] | Packed
    index_keys: Float[Tensor, "B C D_index"] | Packed


@dataclass(frozen=True)
class Selection:
    """The entries that each query attends to, ascending, then -1 where fewer are visible."""

    owner: int
    entries: Int[Tensor, "B S K"]


@dataclass(frozen=True)
class Candidates:
    """The blocks that later indexers may search, ascending, then -1; ``size`` entries a block.

    ``blocks`` is None while the whole context fits the pool: then everything visible is a candidate.
    """

    owner: int
    size: int
    blocks: Int[Tensor, "B S N"] | None


_T = TypeVar("_T", GlobalKV, Selection, Candidates)


def _owned_by(value: _T | None, owner: int | None, what: str) -> _T:
    if value is None or value.owner != owner:
        found = "nothing was published" if value is None else f"layer {value.owner}'s was published last"
        raise RuntimeError(f"layer {owner}'s {what} was asked for, but {found}")
    return value


@dataclass(frozen=True)
class Shared:
    """The cross-layer state of one forward pass. Empty at the start; a layer that publishes returns a new one."""

    kv: GlobalKV | None = None
    selection: Selection | None = None
    candidates: Candidates | None = None

    def publish(self, value: GlobalKV | Selection | Candidates) -> Shared:
        """A copy in which ``value`` replaces its kind's predecessor."""
        match value:
            case GlobalKV():
                return replace(self, kv=value)
            case Selection():
                return replace(self, selection=value)
            case Candidates():
                return replace(self, candidates=value)

    def kv_of(self, owner: int | None) -> GlobalKV:
        """That layer's global KV. Raises ``RuntimeError`` when another layer's, or none, was published last."""
        return _owned_by(self.kv, owner, "global KV")

    def selection_of(self, owner: int | None) -> Selection:
        """That layer's selection. Raises ``RuntimeError`` when another layer's, or none, was published last."""
        return _owned_by(self.selection, owner, "selection")

    def candidates_of(self, owner: int | None) -> Candidates:
        """That layer's candidate pool. Raises ``RuntimeError`` when another layer's, or none, was published last."""
        return _owned_by(self.candidates, owner, "candidate pool")
