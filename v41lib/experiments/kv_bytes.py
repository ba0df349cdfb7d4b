"""Chapter 03: the engine's cache filled at released widths, and its bytes by owner."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, ClassVar

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from v41lib.accounting import lineage, memory
from v41lib.cache import Lane
from v41lib.config import released
from v41lib.experiments.base import BaseParams
from v41lib.nn.attention import Attention
from v41lib.plan import LayerPlan

WINDOW_SHARE = 0.5  # of V4-Flash's persisted cache, by the report ("nearly half")


class Params(BaseParams):
    """``tokens`` are packed by every KV source; ``odd`` is a short odd length, packed on its own."""

    tokens: int = Field(default=10_000, ge=1)
    odd: int = Field(default=5, ge=1)
    seed: int = Field(default=0, ge=0)

    PROFILES: ClassVar[dict[str, dict[str, Any]]] = {"full": {"tokens": 40_000}, "gpu": {"tokens": 200_000}}


@cache
def source(plan: LayerPlan, params: Params) -> Attention:
    """A KV source of the released model at its real widths: compressor and key projection drawn from the seed.

    Nothing else of the layer is needed to publish, so nothing else is given memory.
    """
    with torch.device("meta"):
        attention = Attention(released().text, plan)
    generator = torch.Generator().manual_seed(params.seed + plan.layer)
    for module in (attention.compressor, attention.indexer.wk, attention.indexer.k_norm):
        module.to_empty(device=params.device)
        for weight in module.parameters():
            drawn = torch.ones(weight.shape)
            if weight.dim() > 1:  # on the CPU, so that a seed means the same on every device
                drawn = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
            weight.data.copy_(drawn)
    return attention


@lru_cache(maxsize=1)
def inputs(tokens: int, params: Params) -> Tensor:
    """``tokens`` random inputs of unit scale, ``[1, tokens, M]``: what a norm hands to a compressor."""
    generator = torch.Generator().manual_seed(params.seed)
    return torch.randn(1, tokens, released().text.hidden_size, generator=generator).to(params.device)


@torch.no_grad()
def filled(tokens: int, params: Params) -> Lane:
    """The engine's own cache of the released model, its global KV filled by ``tokens`` inputs of every source."""
    lane = Lane(released().text, [0], torch.zeros(1, device=params.device), undo=0)
    for plan in lane.plans:
        if plan.owns_kv:
            attention, stored = source(plan, params), lane.sources[plan.layer]
            main, keys = attention.compressed(attention.compressor(inputs(tokens, params)))
            stored.main.write(0, main)
            stored.keys.write(0, keys)
    return lane


@cache
def by_owner(tokens: int, params: Params) -> pd.DataFrame:
    """Fill the cache and weigh its storage: rows, main and index bytes, one line an owner."""
    lane, rows = filled(tokens, params), []
    sizes = lane.nbytes()
    for layer, stored in lane.sources.items():
        ratio = lane.plans[layer].ratio
        rows.append((layer, ratio, stored.main.count, sizes[f"main.{layer}"], sizes[f"keys.{layer}"]))
    table = pd.DataFrame(rows, columns=["owner", "ratio", "rows", "main KV", "index keys"]).set_index("owner")
    return table.assign(bytes=table["main KV"] + table["index keys"])


def a_token(table: pd.DataFrame, tokens: int) -> float:
    """Bytes a token over all owners, from :func:`by_owner`."""
    return float(table["bytes"].sum() / tokens)


def short_lengths(params: Params, longest: int = 16) -> pd.DataFrame:
    """Measured bytes after 1, 2, 3 ... tokens, beside the closed form and 890 a token."""
    text = released().text
    measured = {n: int(by_owner(n, params)["bytes"].sum()) for n in range(1, longest + 1)}
    table = pd.Series(measured, name="packed").rename_axis("tokens").to_frame()
    table["closed form"] = [memory.global_kv_bytes(text, n) for n in table.index]
    table["a token"] = table["packed"] / table.index
    return table


def ancestors() -> pd.DataFrame:
    """The same quantity for earlier models, each with its arithmetic, and how many times ours it is."""
    text = released().text
    ours = lineage.Ancestor(
        "DeepSeek-V4.1-Flash",
        "(3 sources / 2 + 1 source / 1) x (256 + 32 + 64 + 4) B",
        memory.global_kv_bytes_a_token(text),
    )
    models = [lineage.v1_67b(), lineage.v3(), lineage.v4_flash(), ours]
    table = pd.DataFrame(
        {
            "bytes a token": [m.bytes_a_token for m in models],
            "times ours": [m.bytes_a_token / ours.bytes_a_token for m in models],
            "derivation": [m.derivation for m in models],
        },
        index=pd.Index([m.model for m in models], name="model"),
    )
    return table


def at_context() -> pd.DataFrame:
    """One sequence's cache at several contexts, in MiB: what grows (global KV) and what does not (windows)."""
    text = released().text
    contexts = [128, 1024, 4096, 32_768, 131_072, 1_048_576]
    table = pd.DataFrame(index=pd.Index(contexts, name="tokens"))
    table["global KV"] = [memory.global_kv_bytes(text, n) / 2**20 for n in contexts]
    table["windows"] = [memory.window_bytes(text, n) / 2**20 for n in contexts]
    table["global KV's share"] = table["global KV"] / (table["global KV"] + table["windows"])
    return table


def in_words(params: Params, owners: pd.DataFrame, models: pd.DataFrame) -> dict[str, str]:
    """The numbers that the chapter's prose quotes, as text."""
    text = released().text
    ours, flash = memory.global_kv_bytes_a_token(text), lineage.v4_flash().bytes_a_token
    odd = int(by_owner(params.odd, params)["bytes"].sum())
    total = int(owners["bytes"].sum())
    times = models["times ours"]
    v1_row = lineage.v1_67b().bytes_a_token / lineage.V1_LAYERS
    return {
        "tokens": f"{params.tokens:,}",
        "total_bytes": f"{total:,}",
        "a_token": f"{a_token(owners, params.tokens):g}",
        "decoder_share": f"{owners['bytes'].iloc[-1] / total:.0%}",
        "odd": str(params.odd),
        "odd_bytes": f"{odd:,}",
        "odd_naive": f"{params.odd * ours:,.0f}",
        "unpacked": f"{memory.unpacked_kv_bytes_a_token(text):,.0f}",
        "packing": f"{memory.unpacked_kv_bytes_a_token(text) / ours:.1f}",
        "vs_v1": f"{times['DeepSeek-V1 67B']:.1f}",
        "vs_flash": f"{times['DeepSeek-V4-Flash']:.2f}",
        "fewer_rows": f"{lineage.V1_LAYERS * params.tokens / owners['rows'].sum():.0f}",
        "smaller_rows": f"{v1_row / (total / owners['rows'].sum()):.1f}",
        "persistent": f"{lineage.persistent_ratio(ours, flash, WINDOW_SHARE):.3f}",
        "share_for_eighth": f"{1 - flash / ours / 8:.2f}",
        "window": f"{memory.window_bytes(text, text.sliding_window) / 2**20:.2f}",
    }


def settled(params: Params) -> dict[str, float]:
    """The values of this chapter's claims; the bytes are weighed, the ratios derived."""
    text = released().text
    ours, flash = memory.global_kv_bytes_a_token(text), lineage.v4_flash().bytes_a_token
    return {
        "kv-bytes-a-token": a_token(by_owner(params.tokens, params), params.tokens),
        "kv-bytes-odd": int(by_owner(params.odd, params)["bytes"].sum()),
        "kv-bytes-unpacked": memory.unpacked_kv_bytes_a_token(text),
        "kv-vs-v1": lineage.v1_67b().bytes_a_token / ours,
        "kv-vs-v4-flash": ours / flash,
        "kv-persistent": lineage.persistent_ratio(ours, flash, WINDOW_SHARE),
    }
