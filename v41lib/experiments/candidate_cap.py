"""Chapter 08: what the candidate cap does to keys scored, to time, and to the cost of a decode step, at true scale."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from v41lib.accounting import flops
from v41lib.accounting.flops import COMPONENTS, CONVENTIONS, decode_flops, keys_scored, pool_size
from v41lib.config import released
from v41lib.experiments.base import BaseParams
from v41lib.nn.indexer import Indexer, best, candidate_blocks, score_in_pieces, select_among
from v41lib.nn.quant import MXFP4, Packed
from v41lib.nn.rope import layer_frequencies, rotation
from v41lib.plan import plan_layers

CAPPED_TURNS = 5  # timings of the short side for one of the long, which would drown it in noise
SHORT, LONG = 4096, 1_048_576  # the report's 4K and 1M

# What the figure of a decode step stacks, and the components that each part sums.
PARTS = {
    "experts": ("routed_experts", "shared_expert"),
    "dense projections": ("q_and_kv", "wo_a", "wo_b", "engram", "index_queries", "index_keys"),
    "attention": ("window", "selected"),
    "head": ("head",),
    "mHC, router, compressors": (
        "mhc_projection",
        "mhc_mix",
        "sinkhorn",
        "router",
        "compressor",
        "index_weights",
    ),
    "index scores": ("index_scores", "index_sum"),
}


class Params(BaseParams):
    """One query scores ``contexts`` keys, ``piece`` unpacked at a time; each is timed ``repeats`` times."""

    contexts: tuple[int, ...] = Field(
        default=(4096, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576), min_length=1
    )
    repeats: int = Field(default=3, ge=1)
    piece: int = Field(default=8192, ge=1)
    seed: int = Field(default=0, ge=0)

    PROFILES: ClassVar[dict[str, dict[str, Any]]] = {"full": {"repeats": 25}, "gpu": {"repeats": 25, "piece": 131_072}}

    @model_validator(mode="after")
    def _lines_can_be_fitted(self) -> Self:
        rising = list(self.contexts) == sorted(set(self.contexts))
        pool = pool_size(released().text)
        if not rising or self.contexts[0] < 1 or sum(n > pool for n in self.contexts) < 3:
            raise ValueError(f"contexts: must rise, and three of them must exceed the pool of {pool:,} entries")
        return self


# --- keys, from the plan ----------------------------------------------------------------------------------------------


def keys_by_layer(contexts: tuple[int, ...]) -> pd.DataFrame:
    """Index keys that the released layers multiply for one decode step, a row a context; and with no cap at all."""
    text = released().text
    plans = [plan for plan in plan_layers(text) if plan.selects]
    rows = {n: {plan.layer: keys_scored(text, plan, range(n - 1, n)) for plan in plans} for n in contexts}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("context")
    return table.assign(total=table.sum(axis=1), uncapped=[sum(n // p.ratio for p in plans) for n in contexts])


def keys_in_short(table: pd.DataFrame) -> pd.DataFrame:
    """:func:`keys_by_layer` with layers of one kind in one column: what each of them scores."""
    plans = [plan for plan in plan_layers(released().text) if plan.selects]
    groups: dict[str, int] = {}
    for plan in plans:
        capped = plan.candidate_role == "consumer"
        alike = [p.layer for p in plans if p.ratio == plan.ratio and (p.candidate_role == "consumer") == capped]
        each = " each" if len(alike) > 1 else ""
        groups[f"{', '.join(map(str, alike))}{each}"] = alike[0]
    short = pd.DataFrame({name: table[layer] for name, layer in groups.items()})
    return short.assign(**{"all eight": table["total"], "without the cap": table["uncapped"]})


# --- one indexer, run -------------------------------------------------------------------------------------------------


class Query(NamedTuple):
    """An indexer's view of one query: rounded index queries ``[1,1,H,D]`` and head weights ``[1,1,H]``."""

    queries: Tensor
    weights: Tensor


@cache
@torch.no_grad()
def query(context: int, params: Params) -> Query:
    """The index query of the newest of ``context`` tokens, from an indexer of released widths with drawn weights."""
    text = released().text
    generator = torch.Generator().manual_seed(params.seed)
    indexer = Indexer(text, owns_keys=False)
    for weight in indexer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    x, latent = (torch.randn(1, 1, width, generator=generator) for width in (text.hidden_size, text.q_lora_rank))
    by = rotation(torch.tensor([[[context - 1]]]), layer_frequencies(text, ratio=1))
    queries, weights = indexer.queries(x, latent, by)
    return Query(queries.to(params.device), weights.to(params.device))


@cache
def all_keys(params: Params) -> Packed:
    """As many packed keys as the longest context has: random nibbles and scales, each of which is a valid key."""
    width, count = released().text.index_head_dim, params.contexts[-1]
    generator = torch.Generator().manual_seed(params.seed + 1)
    elements = torch.randint(0, 256, (1, count, width // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(126, 129, (1, count, -(-width // MXFP4.block)), generator=generator, dtype=torch.uint8)
    return Packed(MXFP4, width, elements.to(params.device), scales.to(params.device))


@torch.no_grad()
def scan(context: int, params: Params) -> tuple[Tensor, Tensor]:
    """The candidate source's work for one query: score all keys, keep the best 512; the scores ``[1,1,C]`` too."""
    scores = score_in_pieces(*query(context, params), all_keys(params)[:, :context], params.piece)
    return best(scores, released().text.index_topk), scores


@cache
@torch.no_grad()
def pool(context: int, params: Params) -> Tensor | None:
    """The candidate blocks that the source publishes; None while the pool takes the whole context."""
    text = released().text
    if context <= pool_size(text):
        return None
    _, scores = scan(context, params)
    visible = torch.tensor([context], device=scores.device)
    return candidate_blocks(scores, visible, text.candidate_block_size, text.candidate_topk_blocks)


@torch.no_grad()
def capped(context: int, params: Params) -> Tensor:
    """A later indexer's work for one query: gather and score the pool, keep the best 512."""
    text, blocks = released().text, pool(context, params)
    if blocks is None:
        return scan(context, params)[0]
    visible = torch.tensor([context], device=blocks.device)
    keys = all_keys(params)[:, :context]
    size = text.candidate_block_size
    return select_among(*query(context, params), keys, visible, text.index_topk, blocks, size)[0]


class KeysMultiplied(TorchDispatchMode):
    """Counts the index keys that enter a matrix product with ``heads`` index queries of ``width`` channels."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width, self.count = heads, width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm) and args[0].shape[-1] == self.width:
            self.count += out.numel() // self.heads
        return out


def keys_of(work: Callable[[int, Params], Any], context: int, params: Params) -> int:
    """The index keys that ``work`` really multiplies."""
    text = released().text
    query(context, params), all_keys(params), pool(context, params)  # prepared outside of what is counted
    with KeysMultiplied(text.index_n_heads, text.index_head_dim) as seen:
        work(context, params)
    return seen.count


@cache
def multiplied(params: Params) -> pd.DataFrame:
    """Index keys multiplied in a run of both indexers, a row a context."""
    rows = {n: [keys_of(scan, n, params), keys_of(capped, n, params)] for n in params.contexts}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["full scan", "capped"]).rename_axis("context")


@cache
def timed(params: Params) -> pd.DataFrame:
    """Milliseconds of both indexers for one query, medians; the sides take turns, so that both see the same machine.

    On a CPU it is the processor time of one thread, which other work on the machine hardly moves.
    """
    multiplied(params)  # has run everything once
    spent: dict[tuple[int, str], list[float]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(params.repeats):
            for n in params.contexts:
                for name, work, turns in (("full scan", scan, 1), ("capped", capped, CAPPED_TURNS)):
                    for _ in range(turns):
                        begun = _now(params)
                        work(n, params)
                        spent.setdefault((n, name), []).append(1e3 * (_now(params) - begun))
    finally:
        torch.set_num_threads(threads)
    rows = {n: [median(spent[n, "full scan"]), median(spent[n, "capped"])] for n in params.contexts}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["full scan", "capped"]).rename_axis("context")


def _now(params: Params) -> float:
    if params.device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def beyond_the_pool(table: pd.DataFrame) -> pd.DataFrame:
    """The rows whose context exceeds the pool."""
    return table[table.index > pool_size(released().text)]


def fits(times: pd.DataFrame) -> pd.DataFrame:
    """How each indexer's time grows beyond the pool: its exponent, and nanoseconds a token of context by a line."""
    rows = {}
    for name, column in beyond_the_pool(times).items():
        n, ms = np.asarray(column.index, dtype=float), np.asarray(column, dtype=float)
        exponent, _ = np.polyfit(np.log(n), np.log(ms), 1)
        a_token, rest = np.polyfit(n, ms, 1)
        left = ms - (a_token * n + rest)
        rows[name] = {
            "exponent": exponent,
            "ns a token": 1e6 * a_token,
            "R²": 1 - float((left**2).sum() / ((ms - ms.mean()) ** 2).sum()),
            "last / first": ms[-1] / ms[0],
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("indexer")


# --- a whole decode step ----------------------------------------------------------------------------------------------


def growth() -> pd.DataFrame:
    """Weighted GFLOP of a decode step at both ends, by convention, and how much more the longer costs."""
    text = released().text
    short, long = decode_flops(text, SHORT), decode_flops(text, LONG)
    rows = {c.name: [work.weighted(c) / 1e9 for work in (short, long)] for c in CONVENTIONS}
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["4K", "1M"])
    table["more"] = [f"{row['1M'] / row['4K'] - 1:+.1%}" for _, row in table.iterrows()]
    return table.rename_axis("convention")


def step_parts() -> pd.DataFrame:
    """GFLOP of a decode step by part: at both ends, unweighted and by the book's convention."""
    text, convention = released().text, CONVENTIONS[0]
    table = {}
    for label, context in (("4K", SHORT), ("1M", LONG)):
        counts = decode_flops(text, context).by_component()
        for kind, rates in (("unweighted", dict.fromkeys(COMPONENTS, 1.0)), ("weighted", None)):
            rate = rates or {name: convention.rate(name) for name in COMPONENTS}
            table[kind, label] = {
                part: sum(counts[name] * rate[name] for name in names) / 1e9 for part, names in PARTS.items()
            }
    return pd.DataFrame(table).rename_axis("part")[
        [("unweighted", "4K"), ("unweighted", "1M"), ("weighted", "4K"), ("weighted", "1M")]
    ]


def slopes() -> pd.DataFrame:
    """What one more token of context costs a decode step, by layer: keys and FLOPs, from the last half of 1M."""
    text = released().text
    half = LONG // 2
    ends = [decode_flops(text, n).layers for n in (half, LONG)]
    rows = {}
    for plan in plan_layers(text):
        if plan.selects:
            keys = [keys_scored(text, plan, range(n - 1, n)) for n in (half, LONG)]
            more = ends[1][plan.layer].total - ends[0][plan.layer].total
            rows[str(plan.layer)] = {"keys": (keys[1] - keys[0]) / half, "FLOPs": more / half}
    others = [p.layer for p in plan_layers(text) if not p.selects]
    rest = sum(ends[1][layer].total - ends[0][layer].total for layer in others)
    rows[f"the other {len(others)}"] = {"keys": 0.0, "FLOPs": rest / half}
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("layer")
    table.loc["the whole model"] = table.sum()
    return table


def in_words(params: Params, keys: pd.DataFrame, counted: pd.DataFrame) -> dict[str, str]:
    """The numbers that the prose quotes and that do not depend on the machine, as text."""
    text, longest = released().text, params.contexts[-1]
    ends = [decode_flops(text, n) for n in (SHORT, LONG)]
    products = [work.total - work.by_component()["index_sum"] for work in ends]
    more = growth()["more"].str.removeprefix("+")
    tight = [work.weighted(CONVENTIONS[0]) - work.by_component()["index_sum"] for work in ends]
    slope = flops.slope(text)
    return {
        "pool": f"{pool_size(text):,}",
        "pool_context": f"{pool_size(text) // 1024}K",
        "longest": f"{longest:,}",
        "counted_full": f"{counted['full scan'].iloc[-1]:,}",
        "counted_capped": f"{counted['capped'].max():,}",
        "keys_all": f"{keys['total'].iloc[-1] / 1e6:.2f} million",
        "keys_uncapped": f"{keys['uncapped'].iloc[-1] / 1e6:.2f} million",
        "keys_saved": f"{1 - keys['total'].iloc[-1] / keys['uncapped'].iloc[-1]:.0%}",
        "key_mib": f"{longest * MXFP4.row_bytes(text.index_head_dim) / 2**20:.0f}",
        "key_fp32": f"{longest * text.index_head_dim * 4 / 2**20:.0f}",
        "flops_short": f"{products[0] / 1e9:.1f}",
        "flops_long": f"{products[1] / 1e9:.1f}",
        "growth_products": f"{products[1] / products[0] - 1:.0%}",
        "growth_tight": f"{tight[1] / tight[0] - 1:.1%}",
        "sum_share": f"{1 / (text.index_head_dim + 1):.1%}",
        "growth_lowest": more["only scores in FP4"],
        "growth_unweighted": more["unweighted"],
        "growth_ours": more["wider operand"],
        "growth_wo_a": more["wo_a in BF16"],
        "growth_fp8_scores": more["scores in FP8"],
        "uncapped_growth": f"{_uncapped_growth():.0%}",
        "slope": f"{slope:,.0f}",
        "a_key": f"{2 * text.index_n_heads * (text.index_head_dim + 1):,}",
        "doubling": f"{ends[0].total / slope / 1e6:.1f} million",
    }


def _uncapped_growth() -> float:
    """Growth by the book's convention if the later indexers scanned everything too."""
    text, convention = released().text, CONVENTIONS[0]
    open_text = text.replace(candidate_source_layer_id=-1)
    ends = [decode_flops(open_text, n).weighted(convention) for n in (SHORT, LONG)]
    return ends[1] / ends[0] - 1


def times_in_words(times: pd.DataFrame, fitted: pd.DataFrame) -> dict[str, str]:
    """The timings that the prose quotes, as text."""
    full, small = fitted.loc["full scan"], fitted.loc["capped"]
    return {
        "ms_full": f"{times['full scan'].iloc[-1]:,.0f}",
        "ms_capped": f"{times['capped'].iloc[-1]:,.1f}",
        "exponent_full": f"{full['exponent']:.2f}",
        "exponent_capped": f"{small['exponent']:.2f}",
        "ns_full": f"{full['ns a token']:,.0f}",
        "r2_full": f"{full['R²']:.4f}",
        "capped_ratio": f"{small['last / first']:.2f}",
        "context_ratio": f"{beyond_the_pool(times).index[-1] / beyond_the_pool(times).index[0]:.0f}",
        "speedup": f"{times['full scan'].iloc[-1] / times['capped'].iloc[-1]:.0f}",
    }


def settled(params: Params) -> dict[str, float]:
    """The values of this chapter's claims: keys counted in a run, FLOPs derived."""
    text, half = released().text, LONG // 2
    ends = [decode_flops(text, n) for n in (SHORT, half, LONG)]
    return {
        "cap-keys": int(multiplied(params)["capped"].max()),
        "not-constant-cost": (ends[2].total - ends[1].total) / half,
        "decode-flops-growth": ends[2].weighted(CONVENTIONS[0]) / ends[0].weighted(CONVENTIONS[0]) - 1,
    }
