"""Chapter 02: the released model counted tensor by tensor, and what one token touches."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from v41lib.accounting import params as closed
from v41lib.checkpoint import released_tensors
from v41lib.config import TextConfig, preset, released
from v41lib.experiments.base import BaseParams
from v41lib.model import Model
from v41lib.report import billions

# The first fragment found in a parameter's name says which part it belongs to.
PART_OF = {
    "embed.": "embedding",
    "head.": "head",
    ".ffn.experts.": "routed experts",
    ".ffn.shared_experts.": "shared experts",
    ".ffn.gate.": "routers",
    ".compressor.": "compressors",
    ".indexer.": "indexers",
    ".attn.": "attention",
    ".hc_": "mHC",
    "norm.": "norms",
}


class Params(BaseParams):
    """``presets`` are run with one token each, to see which parameters it touches."""

    presets: tuple[Literal["tiny", "wide", "miniature", "bench"], ...] = Field(
        default=("tiny", "wide", "miniature"), min_length=1
    )
    seed: int = Field(default=0, ge=0)

    PROFILES: ClassVar[dict[str, dict[str, Any]]] = {
        "full": {"presets": ("tiny", "wide", "miniature", "bench")},
        "gpu": {"presets": ("tiny", "wide", "miniature", "bench")},
    }


def _part(name: str) -> str:
    return next(part for fragment, part in PART_OF.items() if fragment in name)


def _closed_parts(text: TextConfig) -> dict[str, int]:
    layers = closed.all_layer_params(text)
    return {
        "embedding": closed.embedding_params(text),
        "head": closed.embedding_params(text),
        "routed experts": sum(layer.experts for layer in layers),
        "shared experts": sum(layer.shared_expert for layer in layers),
        "routers": sum(layer.router for layer in layers),
        "compressors": sum(layer.compressor for layer in layers),
        "indexers": sum(layer.indexer for layer in layers),
        "attention": sum(layer.attention for layer in layers),
        "mHC": sum(layer.hyper for layer in layers),
        "norms": sum(layer.norms for layer in layers) + text.hidden_size,
        "Engram projections": closed.engram_projection_params(text),
    }


def stored() -> pd.DataFrame:
    """The released model by part: the closed form beside the model built on the meta device, and where each belongs.

    ``built`` is missing where this version of the library counts a part without building it.
    """
    config = released()
    built: Counter[str] = Counter()
    for name, parameter in Model(config, device="meta").named_parameters():
        built[_part(name)] += parameter.numel()
    counts = closed.count(config)
    rows = [(part, "backbone", number, built.get(part)) for part, number in _closed_parts(config.text).items()]
    rows += [
        ("Engram tables", "memory", counts.engram_tables, None),
        ("vision", "vision", counts.vision, None),
        ("drafting (DSpark)", "drafting", counts.dspark, None),
    ]
    table = pd.DataFrame(rows, columns=["part", "belongs to", "closed form", "built"]).set_index("part")
    return table.astype({"built": "Int64"})


def groups(table: pd.DataFrame) -> pd.DataFrame:
    """Sums of :func:`stored` by what they belong to, with the total; of what is built where it is built."""
    counted = table.assign(parameters=table["built"].fillna(table["closed form"]))
    sums = counted.groupby("belongs to", sort=False)["parameters"].sum().rename_axis("part").to_frame()
    sums.loc["total"] = sums["parameters"].sum()
    return sums


def conventions() -> pd.DataFrame:
    """Every way to count what a text token activates in the released model; none is the right one (SPEC 11)."""
    text = released().text
    a = closed.active(text)
    rows = {
        "the layers alone": (a.encoder, a.stacks),
        "and the decoder's global KV": (a.encoder + a.global_kv, a.stacks),
        "and the head": (None, a.stacks + a.head),
        "and the embedding table": (a.encoder + a.global_kv + a.embedding, a.stacks + a.head + a.embedding),
    }
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["prefill (encoder)", "decode (both stacks)"])
    return table.astype("Int64").rename_axis("what is counted")


def touched_parts() -> pd.DataFrame:
    """By part of the released model, what is stored and what one token of decode touches (its own experts only)."""
    text = released().text
    parts = _closed_parts(text)
    touched = dict(parts)
    touched["routed experts"] = parts["routed experts"] * text.num_experts_per_tok // text.n_routed_experts
    touched["routers"] -= text.num_hidden_layers * text.n_routed_experts  # the bias of the other modality
    touched["embedding"] = text.hidden_size  # one row of the table
    looked_up = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    parts["Engram tables"] = closed.engram_table_params(text)
    touched["Engram tables"] = len(text.engram_layer_ids) * looked_up
    return pd.DataFrame({"stored": parts, "touched": touched}).rename_axis("part").sort_values("stored")


class _Reads(TorchDispatchMode):
    """Notes which elements of which parameters are read by any operation that computes (views read nothing)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.owner = {p.untyped_storage().data_ptr(): n for n, p in model.named_parameters()}
        self.read = {n: torch.zeros(p.numel(), dtype=torch.bool) for n, p in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and (name := self.owner.get(value.untyped_storage().data_ptr())):
                    start, size = value.storage_offset(), value.numel()
                    rows = args[1].flatten().cpu() if func is torch.ops.aten.embedding.default else None
                    region = self.read[name][start : start + size]
                    if rows is None:
                        region[:] = True
                    else:
                        region.view(value.shape)[rows] = True
        return out


@torch.no_grad()
def touched(params: Params) -> pd.DataFrame:
    """One token through small models: the parameters that its forward pass reads, beside the closed form.

    The closed form counts the whole embedding table; a token reads one row of it, so both columns leave it out.
    """
    rows = []
    for name in params.presets:
        config = preset(name)
        model = Model(config, seed=params.seed, device=params.device)
        with _Reads(model) as reads:
            model(torch.tensor([[1]], device=params.device))
        read = {n: int(mask.sum()) for n, mask in reads.read.items()}
        expected = closed.active(config.text)
        inside = sum(n for key, n in read.items() if not key.startswith("embed."))
        rows.append(
            {
                "preset": name,
                "stored": closed.backbone_params(config.text),
                "closed form": expected.stacks + expected.head,
                "read": inside,
                "routed experts read": _experts_read(config.text, read),
                "of": config.text.n_routed_experts,
            }
        )
    return pd.DataFrame(rows).set_index("preset")


def _experts_read(text: TextConfig, read: dict[str, int]) -> int:
    """How many routed experts' first matrices one token read, the same in every layer or an error."""
    per_expert = text.moe_intermediate_size * text.hidden_size
    counts = {n // per_expert for name, n in read.items() if name.endswith(".experts.w1")}
    (count,) = counts
    return count


def experts_read(params: Params) -> int:
    """Routed experts that one token reads in a layer of the release: as configured, if small models obey theirs.

    Raises ``ValueError`` when one of them reads another number than it is configured to.
    """
    for name, read in touched(params)["routed experts read"].items():
        if read != preset(str(name)).text.num_experts_per_tok:
            raise ValueError(f"one token of {name} reads {read} routed experts in a layer")
    return released().text.num_experts_per_tok


def expert_bytes(text: TextConfig) -> int:
    """The bytes of one routed expert in MXFP4: half a byte a weight, one scale byte for 32 along K (SPEC 11)."""
    weights = 3 * text.moe_intermediate_size * text.hidden_size
    return weights // 2 + weights // 32


def in_words(stored_parts: pd.DataFrame, sums: pd.DataFrame, ways: pd.DataFrame) -> dict[str, str]:
    """The numbers that the chapter's prose quotes, as text."""
    text, parameters = released().text, sums["parameters"]
    experts = stored_parts.loc["routed experts", "closed form"]
    per_expert = text.num_hidden_layers * (3 * text.moe_intermediate_size * text.hidden_size + text.hidden_size + 2)
    more = -(-(10**12 - int(parameters["backbone"])) // per_expert)
    extra = more * text.num_hidden_layers * (text.hidden_size + 1)
    return {
        "tensors": f"{sum(1 for _ in released_tensors(Model(released(), device='meta'))):,}",
        "total": f"{parameters['total']:,}",
        "backbone": billions(parameters["backbone"]),
        "memory": billions(parameters["memory"]),
        "expert_share": f"{experts / parameters['backbone']:.1%}",
        "prefill": billions(ways["prefill (encoder)"].iloc[1]),
        "decode": billions(ways["decode (both stacks)"].iloc[2]),
        "expert_bytes": f"{expert_bytes(text) / 1e6:.1f} MB",
        "picked": str(text.num_experts_per_tok),
        "experts": str(text.n_routed_experts),
        "picked_bytes": f"{text.num_experts_per_tok * expert_bytes(text) / 1e6:.0f} MB",
        "rows": str(len(text.engram_layer_ids) * (text.engram_max_ngram_size - 1) * text.engram_n_heads),
        "prefill_rounded": f"{ways['prefill (encoder)'].iloc[0] / 1e9:.0f}",
        "prefill_with_embedding": f"{ways['prefill (encoder)'].iloc[-1] / 1e9:.0f}",
        "decode_layers": f"{ways['decode (both stacks)'].iloc[0] / 1e9:.0f}",
        "trillion_experts": f"{text.n_routed_experts + more:,}",
        "trillion_extra": f"{extra:,}",
        "bench_read": f"{closed.active(preset('bench').text).stacks + closed.active(preset('bench').text).head:,}",
    }


def settled(params: Params) -> dict[str, int]:
    """The values of this chapter's claims, under the conventions that the chapter states."""
    text = released().text
    sums, a = groups(stored())["parameters"], closed.active(text)
    return {
        "backbone-params": int(sums["backbone"]),
        "engram-params": int(sums["memory"]),
        "total-params": int(sums["total"]),
        "active-prefill": a.encoder + a.global_kv,
        "active-decode": a.stacks + a.head,
        "experts-a-token": experts_read(params) + text.n_shared_experts,
        "expert-bytes": expert_bytes(text),
    }
