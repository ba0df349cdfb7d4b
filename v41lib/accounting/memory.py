"""Bytes of the KV cache in closed form, at release precision: what grows with the context, and what does not."""

from __future__ import annotations

from v41lib.config import TextConfig
from v41lib.nn.quant import FP4, FP8, MXFP4
from v41lib.plan import plan_layers


def main_row_bytes(text: TextConfig) -> int:
    """One compressed entry: FP4 elements and E4M3 scales (SPEC 4)."""
    return FP4.row_bytes(text.head_dim)


def index_row_bytes(text: TextConfig) -> int:
    """One index key: MXFP4 elements and power-of-two scales (SPEC 5)."""
    return MXFP4.row_bytes(text.index_head_dim)


def global_kv_bytes(text: TextConfig, tokens: int) -> int:
    """The global KV after ``tokens`` tokens, over all owners; an open group stores nothing (SPEC 11)."""
    rows = sum(tokens // plan.ratio for plan in plan_layers(text) if plan.owns_kv)
    return rows * (main_row_bytes(text) + index_row_bytes(text))


def global_kv_bytes_a_token(text: TextConfig) -> float:
    """The global KV's growth for each token, over a whole number of groups (SPEC 11)."""
    rows = sum(1 / plan.ratio for plan in plan_layers(text) if plan.owns_kv)
    return rows * (main_row_bytes(text) + index_row_bytes(text))


def unpacked_kv_bytes_a_token(text: TextConfig, bytes_a_channel: int = 2) -> float:
    """The same latents and index keys at a plain number of bytes a channel; BF16 by default (SPEC 11)."""
    rows = sum(1 / plan.ratio for plan in plan_layers(text) if plan.owns_kv)
    return rows * (text.head_dim + text.index_head_dim) * bytes_a_channel


def window_bytes(text: TextConfig, tokens: int) -> int:
    """The sliding-window KV of one sequence: a ring of at most W rows in every layer (SPEC 4)."""
    return text.num_hidden_layers * min(tokens, text.sliding_window) * FP8.row_bytes(text.head_dim)
