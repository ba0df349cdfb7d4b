"""Floating-point operations in closed form: of one decode step, and of a prefill in either mode; no weights needed.

A multiply-add is two FLOPs. Counted is what the mechanism needs: a query attends to the keys it sees, and an indexer
scores every entry that it may choose from, masked or padded work left out. Norms, rotations, roundings, softmax,
activations and Engram's gates are elementwise and small beside the products; they are omitted.

``tests/unit/test_flops.py`` compares every component with what the model executes. An engine may do less: v41lib does
not score where at most ``index_topk`` entries are visible, since there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import pandas as pd

from v41lib.config import TextConfig
from v41lib.plan import LayerPlan, first_decoder_layer, plan_layers

Format = Literal["bf16", "fp8", "fp4"]
# What one FLOP counts for, by the format that its product runs in (report, decode cost; SPEC 11).
RATES: dict[Format, float] = {"bf16": 1.0, "fp8": 0.5, "fp4": 0.25}


@dataclass(frozen=True)
class LayerFlops:
    """One layer's FLOPs by component, over some rows.

    ``index_scores`` are the products of index queries and keys, ``index_sum`` their weighted sum over heads;
    ``mhc_mix`` is collapse and expand; ``sinkhorn`` is elementwise: a normalisation is an addition and a division an
    element.
    """

    q_and_kv: int = 0  # wq_a, wq_b, wkv
    wo_a: int = 0
    wo_b: int = 0
    window: int = 0
    selected: int = 0
    compressor: int = 0
    index_keys: int = 0
    index_queries: int = 0
    index_weights: int = 0
    index_scores: int = 0
    index_sum: int = 0
    mhc_projection: int = 0
    mhc_mix: int = 0
    sinkhorn: int = 0
    router: int = 0
    routed_experts: int = 0
    shared_expert: int = 0
    engram: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


# By name, with those outside the layers.
COMPONENTS: tuple[str, ...] = (*(component.name for component in fields(LayerFlops)), "head")


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a pass: its layers in order, the collapse before the head, and the head."""

    layers: tuple[LayerFlops, ...]
    last_collapse: int
    head: int

    @property
    def total(self) -> int:
        return sum(layer.total for layer in self.layers) + self.last_collapse + self.head

    def by_component(self) -> dict[str, int]:
        """FLOPs of each of ``COMPONENTS``, over all layers."""
        sums = {name: sum(getattr(layer, name) for layer in self.layers) for name in COMPONENTS[:-1]}
        sums["mhc_mix"] += self.last_collapse
        return sums | {"head": self.head}

    def table(self) -> pd.DataFrame:
        """One row a layer and one for the head, a column for each of ``COMPONENTS``, and ``total``."""
        rows: list[dict[str, int]] = [asdict(layer) | {"head": 0} for layer in self.layers]
        rows.append(dict.fromkeys(COMPONENTS, 0) | {"mhc_mix": self.last_collapse, "head": self.head})
        index = pd.Index([*map(str, range(len(self.layers))), "head"], name="layer")
        table = pd.DataFrame(rows, index=index, columns=list(COMPONENTS))
        return table.assign(total=table.sum(axis=1))

    def weighted(self, convention: Convention) -> float:
        """The FLOPs, each counted at the rate of the format that the convention runs it in."""
        return sum(count * convention.rate(name) for name, count in self.by_component().items())


# --- conventions: which product runs in which format ------------------------------------------------------------------

# A product runs in the wider of its operands' formats, as the release stores them (SPEC 1 and 4). Dense weights are
# FP8; MXFP4 experts meet FP8 activations; index queries and keys are both MXFP4. Queries, and what is stored in BF16 or
# FP32 (head, router, mHC, compressors, the indexer's head weights), count as BF16.
WIDER_OPERAND: dict[str, Format] = {
    "q_and_kv": "fp8",
    "wo_a": "fp8",
    "wo_b": "fp8",
    "window": "bf16",
    "selected": "bf16",
    "compressor": "bf16",
    "index_keys": "fp8",
    "index_queries": "fp8",
    "index_weights": "bf16",
    "index_scores": "fp4",
    "index_sum": "bf16",
    "mhc_projection": "bf16",
    "mhc_mix": "bf16",
    "sinkhorn": "bf16",
    "router": "bf16",
    "routed_experts": "fp8",
    "shared_expert": "fp8",
    "engram": "fp8",
    "head": "bf16",
}


@dataclass(frozen=True)
class Convention:
    """A way to weigh FLOPs, in words and as the format of each component."""

    name: str
    words: str
    formats: Mapping[str, Format] = field(default_factory=lambda: dict(WIDER_OPERAND))

    def rate(self, component: str) -> float:
        return RATES[self.formats[component]]


def _but(**changes: Format) -> dict[str, Format]:
    return {**WIDER_OPERAND, **changes}


def _only(**formats: Format) -> dict[str, Format]:
    return {**dict.fromkeys(COMPONENTS, "bf16"), **formats}


# The first is the book's own; the others change one thing in it, or weigh (nearly) nothing.
CONVENTIONS: tuple[Convention, ...] = (
    Convention("wider operand", "a product runs in the wider of its operands' released formats"),
    Convention("wo_a in BF16", "the same, with the grouped output projection in BF16", _but(wo_a="bf16")),
    Convention(
        "attention in FP8",
        "the same, with queries rounded to FP8 to meet the FP8 and FP4 KV",
        _but(window="fp8", selected="fp8"),
    ),
    Convention(
        "experts in FP4", "the same, with routed experts at the rate of their weights", _but(routed_experts="fp4")
    ),
    Convention(
        "scores in FP8", "the same, with index scores at half rate instead of a quarter", _but(index_scores="fp8")
    ),
    Convention("only scores in FP4", "index scores in FP4, everything else in BF16", _only(index_scores="fp4")),
    Convention("unweighted", "every FLOP counts one", _only()),
)


# --- counting ---------------------------------------------------------------------------------------------------------


def _sum_up_to(count: int, ratio: int, most: int | None = None) -> int:
    """The sum of ``min(m // ratio, most)`` over m = 1 to ``count``."""
    if most is not None and count >= most * ratio:
        return _sum_up_to(most * ratio - 1, ratio) + most * (count - most * ratio + 1)
    groups, left = divmod(count, ratio)
    return ratio * groups * (groups - 1) // 2 + groups * (left + 1)


def _entries_seen(rows: range, ratio: int, most: int | None = None) -> int:
    """Compressed entries that the queries of ``rows`` see, in all; at most ``most`` each."""
    return _sum_up_to(rows.stop, ratio, most) - _sum_up_to(rows.start, ratio, most)


def pool_size(text: TextConfig) -> int:
    """How many entries an indexer behind the candidate source scores at most (SPEC 5)."""
    return text.candidate_topk_blocks * text.candidate_block_size


def keys_scored(text: TextConfig, plan: LayerPlan, rows: range) -> int:
    """Index keys that a layer multiplies for the queries at positions ``rows``; 0 where it does not select.

    A candidate consumer scores the pool, of which the newest block may still hold invisible entries.
    """
    if not plan.selects:
        return 0
    return _entries_seen(rows, plan.ratio, pool_size(text) if plan.candidate_role == "consumer" else None)


def layer_flops(text: TextConfig, plan: LayerPlan, rows: range, since: int = 0) -> LayerFlops:
    """One layer on the tokens at positions ``rows`` (consecutive), whose windows see nothing before ``since``.

    A source also compresses these tokens; entries count when their group closes.
    """
    heads, width, model, low = text.num_attention_heads, text.head_dim, text.hidden_size, text.q_lora_rank
    streams, n = text.hc_mult, len(rows)
    low_rank_out = text.o_groups * text.o_lora_rank
    near = _entries_seen(range(rows.start - since, rows.stop - since), 1, text.sliding_window)
    far = 0 if plan.mode == "local" else _entries_seen(rows, plan.ratio, text.index_topk)
    attended = 2 * 2 * heads * width  # scores, then values, a key
    expert = 2 * 3 * text.moe_intermediate_size * model
    site_rows = streams * (streams + 2)
    normalisations = 2 * text.hc_sinkhorn_iters - 1
    scored = keys_scored(text, plan, rows)
    publishes = publish_flops(text, plan, rows) if plan.owns_kv else LayerFlops()
    looked_up = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    return LayerFlops(
        q_and_kv=2 * n * (low * model + heads * width * low + width * model),
        wo_a=2 * n * low_rank_out * (heads * width // text.o_groups),
        wo_b=2 * n * model * low_rank_out,
        window=near * attended,
        selected=far * attended,
        compressor=publishes.compressor,
        index_keys=publishes.index_keys,
        index_queries=2 * n * text.index_n_heads * text.index_head_dim * low if plan.selects else 0,
        index_weights=2 * n * text.index_n_heads * model if plan.selects else 0,
        index_scores=2 * scored * text.index_n_heads * text.index_head_dim,
        index_sum=2 * scored * text.index_n_heads,
        mhc_projection=2 * n * 2 * site_rows * streams * model,
        mhc_mix=2 * n * 2 * (streams + streams * streams + streams) * model,
        sinkhorn=2 * n * streams * streams * (4 + 2 * normalisations),
        router=2 * n * text.n_routed_experts * model,
        routed_experts=n * text.num_experts_per_tok * expert,
        shared_expert=n * expert,
        engram=2 * n * model * (streams + 1) * looked_up if plan.engram else 0,
    )


def publish_flops(text: TextConfig, plan: LayerPlan, rows: range) -> LayerFlops:
    """A KV source compressing the tokens at ``rows`` and deriving the index keys of the groups that they close."""
    projections = 1 if plan.ratio == 1 else 2
    closed = rows.stop // plan.ratio - rows.start // plan.ratio
    return LayerFlops(
        compressor=2 * len(rows) * projections * text.head_dim * text.hidden_size,
        index_keys=2 * closed * text.index_head_dim * text.head_dim,
    )


def _whole(text: TextConfig, layers: list[LayerFlops], logits: int = 1) -> Flops:
    collapse = 2 * logits * text.hc_mult * text.hidden_size
    return Flops(tuple(layers), collapse, 2 * logits * text.vocab_size * text.hidden_size)


def decode_flops(text: TextConfig, context: int) -> Flops:
    """One decode step, whose token is the last of ``context`` tokens (SPEC 11). Raises ``ValueError`` below 1."""
    if context < 1:
        raise ValueError(f"context = {context}: must be at least 1, the token itself")
    row = range(context - 1, context)
    return _whole(text, [layer_flops(text, plan, row) for plan in plan_layers(text)])


def prefill_flops(
    text: TextConfig,
    tokens: int,
    mode: Literal["exact", "replay"] = "exact",
    replay_from: int | None = None,
    replay_len: int | None = None,
) -> Flops:
    """A prefill of ``tokens`` tokens with logits for the last (SPEC 6).

    In ``replay`` mode layers from ``replay_from`` (the first decoder layer) run on the last ``replay_len`` (W) tokens
    only, and the last source still compresses all. Raises ``ValueError`` naming an argument that is out of range.
    """
    if mode not in ("exact", "replay"):
        raise ValueError(f"mode = {mode!r}: must be exact or replay")
    if mode == "exact" and (replay_from, replay_len) != (None, None):
        raise ValueError("replay_from and replay_len mean something in mode='replay' only")
    cut, plans = first_decoder_layer(text), plan_layers(text)
    first = cut if replay_from is None else replay_from
    kept = text.sliding_window if replay_len is None else replay_len
    if tokens < 1 or kept < 1:
        raise ValueError(f"tokens = {tokens}, replay_len = {kept}: must be at least 1")
    if mode == "replay" and not cut <= first < len(plans):
        raise ValueError(f"replay_from = {first}: must be {cut} to {len(plans) - 1}, at or after the last KV source")
    everything, start = range(tokens), max(tokens - kept, 0)
    layers = []
    for plan in plans:
        if mode == "exact" or plan.layer < first:
            layers.append(layer_flops(text, plan, everything))
            continue
        replayed = layer_flops(text, plan, range(start, tokens), since=start)
        if plan.owns_kv:  # the decoder's source; it compresses every token, replayed or not
            published = publish_flops(text, plan, everything)
            replayed = LayerFlops(
                **asdict(replayed) | {"compressor": published.compressor, "index_keys": published.index_keys}
            )
        layers.append(replayed)
    return _whole(text, layers)


def slope(text: TextConfig) -> float:
    """FLOPs by which a decode step grows for each token of context, once windows, selections and pool are full.

    Exact over whole groups: over a number of tokens that every ratio divides, ``decode_flops`` grows by this times it.
    """
    uncapped = [plan for plan in plan_layers(text) if plan.selects and plan.candidate_role != "consumer"]
    a_key = 2 * text.index_n_heads * (text.index_head_dim + 1)
    return sum(a_key / plan.ratio for plan in uncapped)
