"""An n-gram model of bytes with interpolated Witten-Bell smoothing: what a model must beat to have learned anything.

``p(c | h) = (count(hc) + T(h) p(c | h')) / (count(h) + T(h))``, where ``h'`` is ``h`` without its oldest byte and
``T(h)`` the number of different bytes seen after ``h``: the more of them, the likelier is another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class _Counts:
    """What was seen of contexts of one length; a gram or context is one integer, its newest byte the lowest."""

    grams: Integers  # context and next byte, ascending
    gram_counts: Integers
    contexts: Integers  # ascending
    context_counts: Integers
    followers: Integers  # different bytes after each context


@dataclass(frozen=True)
class NGram:
    """Counts of every context of 0 to ``order - 1`` bytes."""

    levels: tuple[_Counts, ...]

    @classmethod
    def fit(cls, data: Bytes, order: int = 5) -> Self:
        """Count the bytes ``data [N]``. Raises ``ValueError`` for an order outside 1 to 7 and for too short data."""
        _check_bytes(data)
        if not 1 <= order <= 7:
            raise ValueError(f"order = {order}: must be 1 to 7 bytes, which fit into one integer")
        if len(data) < order:
            raise ValueError(f"{len(data)} bytes: an n-gram of order {order} needs at least {order}")
        return cls(tuple(_count(_grams(data, context)) for context in range(order)))

    def bits(self, data: Bytes, start: int = 0) -> NDArray[np.float64]:
        """Bits of each byte of ``data[start:]`` given those before it in ``data``, at most ``order - 1`` of them.

        Raises ``ValueError`` for data that are not bytes and for a ``start`` outside of them.
        """
        _check_bytes(data)
        if not 0 <= start <= len(data):
            raise ValueError(f"start = {start}: must be 0 to {len(data)}, the number of bytes")
        p = np.full(len(data) - start, 1 / 256)
        for context, level in enumerate(self.levels):
            first = max(start, context)  # the first byte that so many bytes precede
            grams = _grams(data[first - context :], context)
            at, known = _find(level.contexts, grams >> 8)
            total, followers = level.context_counts[at], level.followers[at]
            place, seen = _find(level.grams, grams)
            longer = p[first - start :]
            better = (level.gram_counts[place] * seen + followers * longer) / (total + followers)
            p[first - start :] = np.where(known, better, longer)
        return -np.log2(p)


def _check_bytes(data: Bytes) -> None:
    if data.ndim != 1 or data.dtype != np.uint8:
        raise ValueError(f"data of shape {data.shape} and type {data.dtype}: must be one row of uint8")


def _grams(data: Bytes, context: int) -> Integers:
    """Each byte with the ``context`` bytes before it, from the first byte that has so many."""
    length = max(len(data) - context, 0)
    grams = np.zeros(length, np.int64)
    for offset in range(context + 1):
        grams = (grams << 8) | data[offset : offset + length]
    return grams


def _count(grams: Integers) -> _Counts:
    found, counts = np.unique(grams, return_counts=True)
    contexts, starts, followers = np.unique(found >> 8, return_index=True, return_counts=True)
    return _Counts(found, counts, contexts, np.add.reduceat(counts, starts), followers)


def _find(keys: Integers, wanted: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Where each of ``wanted`` is in the ascending ``keys``, and whether it is there at all."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return places, keys[places] == wanted
