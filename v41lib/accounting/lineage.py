"""The KV cache of this model's ancestors, each from its published shapes."""

from __future__ import annotations

from dataclasses import dataclass

V1_LAYERS = 95


@dataclass(frozen=True)
class Ancestor:
    """A model's bytes of KV cache a token, with the arithmetic in words."""

    model: str
    derivation: str
    bytes_a_token: float


def v1_67b() -> Ancestor:
    """DeepSeek-V1 67B: grouped-query attention, keys and values of 8 heads in BF16 (arXiv 2401.02954)."""
    heads, width, both, bf16 = 8, 128, 2, 2
    return Ancestor(
        "DeepSeek-V1 67B",
        "95 layers x 8 KV heads x 128 channels x 2 (K and V) x 2 B",
        V1_LAYERS * heads * width * both * bf16,
    )


def v3() -> Ancestor:
    """DeepSeek-V3: one latent of 512 channels and 64 rotary channels a layer, in BF16 (arXiv 2412.19437)."""
    layers, latent, rotary, bf16 = 61, 512, 64, 2
    return Ancestor("DeepSeek-V3", "61 layers x (512 + 64) channels x 2 B", layers * (latent + rotary) * bf16)


def v4_flash() -> Ancestor:
    """DeepSeek-V4-Flash: 21 layers at ratio 4 with an index key each, 20 at ratio 128 (SPEC 11)."""
    row = 448 + 64 * 2 + 8  # FP8 channels, BF16 rotary channels, scale bytes
    index_key = 64 + 4  # MXFP4 elements and scales
    return Ancestor(
        "DeepSeek-V4-Flash",
        "21 layers x (584 + 68) B / 4 + 20 layers x 584 B / 128",
        21 * (row + index_key) / 4 + 20 * row / 128,
    )


def persistent_ratio(ours: float, theirs: float, window_share: float) -> float:
    """Our persisted bytes over theirs, of which windows are ``window_share``; ours hold none."""
    return ours / (theirs / (1 - window_share))
