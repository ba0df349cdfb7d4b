"""The n-gram model against the same formula on dictionaries, and as a distribution."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from v41lib.training.ngram import NGram

TEXT = b"abracadabra, a cadabra bar; \x00\xff\xff abba barba \x00cab"
OTHER = b"a barb, cadab\x00\xff\x01 zebra abracab"


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def witten_bell(text: bytes, history: bytes, byte: int, order: int) -> float:
    """The definition, from the shortest context to the longest."""
    p = 1 / 256
    for context in range(min(order - 1, len(history)) + 1):
        h = history[len(history) - context :]
        after = Counter(text[i + context] for i in range(len(text) - context) if text[i : i + context] == h)
        if after:
            p = (after[byte] + len(after) * p) / (after.total() + len(after))
    return p


@pytest.mark.parametrize("order", range(1, 8))
def test_bits_are_those_of_the_definition(order: int) -> None:
    model = NGram.fit(as_bytes(TEXT), order)
    expected = [-math.log2(witten_bell(TEXT, OTHER[:i], byte, order)) for i, byte in enumerate(OTHER)]
    np.testing.assert_allclose(model.bits(as_bytes(OTHER)), expected, rtol=1e-12)
    for start in (1, 3, len(OTHER)):
        np.testing.assert_allclose(model.bits(as_bytes(OTHER), start), expected[start:], rtol=1e-12)


@pytest.mark.parametrize("order", range(1, 6))
@pytest.mark.parametrize("history", [b"", b"a", b"abra", b"\xff\xff", b"bra", b"qqqq", b"q", b"qbar", b" cab"])
def test_probabilities_sum_to_one(order: int, history: bytes) -> None:
    # b" cab" and b"\x00cab": the last context of the text has no follower there.
    model = NGram.fit(as_bytes(TEXT), order)
    every = [model.bits(as_bytes(history + bytes([byte])), len(history)).item() for byte in range(256)]
    assert sum(2.0**-bits for bits in every) == pytest.approx(1, abs=1e-12)


def test_the_shortest_text_and_no_text_to_score() -> None:
    model = NGram.fit(as_bytes(b"x"), order=1)
    assert model.bits(as_bytes(b"x")).item() == pytest.approx(-math.log2((1 + 1 / 256) / 2))
    assert NGram.fit(as_bytes(TEXT)).bits(as_bytes(b"")).shape == (0,)


def test_what_cannot_be_is_refused() -> None:
    for order in (0, 8):
        with pytest.raises(ValueError, match=rf"order = {order}: must be 1 to 7"):
            NGram.fit(as_bytes(TEXT), order)
    with pytest.raises(ValueError, match="4 bytes: an n-gram of order 5 needs at least 5"):
        NGram.fit(as_bytes(b"abcd"))
    with pytest.raises(ValueError, match="int64: must be one row of uint8"):
        NGram.fit(np.zeros(9, np.int64))
    with pytest.raises(ValueError, match="start = 3: must be 0 to 2"):
        NGram.fit(as_bytes(TEXT)).bits(as_bytes(b"ab"), 3)
