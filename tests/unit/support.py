"""Small configurations, random models, and hypothesis strategies over everything that a schedule may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from v41lib import Config, Model, TextConfig
from v41lib.checkpoint import released_tensors

YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}

# Two local layers, a ratio-2 source with a reader, a capped ratio-1 source, a second index source, a reader.
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 4,
    "sliding_window": 3,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": YARN,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 5],
    "index_n_heads": 3,
    "index_head_dim": 8,
    "index_topk": 4,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 2.0,
    "rms_norm_eps": 1e-20,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
}
IMAGE_TOKEN = 39


def small_text(**changes: Any) -> TextConfig:
    return TextConfig.model_validate(SMALL | changes)


def small_config(**changes: Any) -> Config:
    return Config.from_dict({"image_token_id": IMAGE_TOKEN, "text_config": SMALL | changes})


@torch.no_grad()
def random_model(config: Config, seed: int = 0, **options: Any) -> Model:
    """A model in which no parameter has a value that hides a mistake: no bias of zero, no norm weight of one."""
    model = Model(config, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name == "embed.weight":
            weight.copy_(noise)
        elif name.endswith(("norm.weight", ".scale")):
            weight.copy_(1 + 0.2 * noise)
        elif weight.dim() == 1:  # biases, sinks, mHC bases
            weight.copy_(0.3 * noise)
    return model


def without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store what is cached unrounded, in plain caches: sums in another order can then not flip a stored element, so
    that inputs which nobody screened compare to 1e-5 on any machine."""
    for name in (
        "v41lib.nn.attention.straight_through",
        "v41lib.nn.indexer.straight_through",
        "v41lib.cache.round_trip",
    ):
        monkeypatch.setattr(name, lambda x, fmt: x)


def released_weights(model: Model) -> dict[str, torch.Tensor]:
    return dict(released_tensors(model))


def tokens(length: int, batch: int = 1, seed: int = 0, vocab: int = 40) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


@st.composite
def schedules(draw: st.DrawFn, max_layers: int = 6) -> dict[str, Any]:
    """Any schedule that SPEC 2 allows: local layers anywhere, any ratio, index sources with or without a cap."""
    ratios: list[int] = []
    kv: list[int] = []
    index: list[int] = []
    for layer in range(draw(st.integers(1, max_layers))):
        kind = draw(st.sampled_from(("local", "full", "reindex", "reuse", "reuse")))
        if kind == "full" or (kind != "local" and not kv):
            kv.append(layer)
            index.append(layer)
            ratios.append(draw(st.sampled_from((1, 1, 2, 2, 3, 5))))
        elif kind == "local":
            ratios.append(0)
        else:
            ratios.append(ratios[kv[-1]])
            if kind == "reindex":
                index.append(layer)
    capped = bool(kv) and draw(st.booleans())
    return {
        "num_hidden_layers": len(ratios),
        "compress_ratios": ratios,
        "kv_source_layer_ids": kv,
        "index_source_layer_ids": index,
        "candidate_source_layer_id": kv[-1] if capped else -1,
        "candidate_topk_blocks": draw(st.integers(1, 3)) if capped else draw(st.integers(0, 1)),
        "candidate_block_size": draw(st.integers(1, 3)) if capped else draw(st.integers(0, 1)),
    }


@st.composite
def configs(draw: st.DrawFn, max_layers: int = 6) -> Config:
    """A valid configuration with a schedule of :func:`schedules` and small, uneven sizes."""
    groups = draw(st.integers(1, 2))
    rope = draw(st.sampled_from((2, 4, 8)))
    experts = draw(st.integers(1, 5))
    return small_config(
        **draw(schedules(max_layers)),
        hidden_size=draw(st.sampled_from((6, 12, 20))),
        num_attention_heads=groups * draw(st.integers(1, 2)),
        o_groups=groups,
        o_lora_rank=draw(st.integers(1, 4)),
        qk_rope_head_dim=rope,
        head_dim=rope + draw(st.sampled_from((0, 3, 12, 40))),
        index_head_dim=rope + draw(st.sampled_from((0, 1, 28))),
        index_n_heads=draw(st.integers(1, 4)),
        index_topk=draw(st.integers(1, 8)),
        q_lora_rank=draw(st.integers(2, 7)),
        sliding_window=draw(st.integers(1, 6)),
        rope_scaling=draw(st.sampled_from((None, YARN))),
        moe_intermediate_size=draw(st.integers(1, 5)),
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        norm_topk_prob=draw(st.booleans()),
        hc_mult=draw(st.integers(1, 4)),
        hc_sinkhorn_iters=draw(st.sampled_from((1, 2, 20))),
    )


def released_shapes(text: TextConfig) -> dict[str, list[int]]:
    """Every backbone tensor's released name and shape, written from the released layout; Engram apart."""
    wide, heads, width, low = text.hidden_size, text.num_attention_heads, text.head_dim, text.q_lora_rank
    streams, inner, experts = text.hc_mult, text.moe_intermediate_size, text.n_routed_experts
    shapes = {
        "embed.weight": [text.vocab_size, wide],
        "norm.weight": [wide],
        "head.weight": [text.vocab_size, wide],
    }
    for layer in range(text.num_hidden_layers):
        own = {
            "attn_norm.weight": [wide],
            "ffn_norm.weight": [wide],
            "attn.wq_a.weight": [low, wide],
            "attn.q_norm.weight": [low],
            "attn.wq_b.weight": [heads * width, low],
            "attn.wkv.weight": [width, wide],
            "attn.kv_norm.weight": [width],
            "attn.wo_a.weight": [text.o_groups * text.o_lora_rank, heads * width // text.o_groups],
            "attn.wo_b.weight": [wide, text.o_groups * text.o_lora_rank],
            "attn.attn_sink": [heads],
            "ffn.gate.weight": [experts, wide],
            "ffn.gate.bias": [experts],
            "ffn.gate.bias_vl": [experts],
        }
        if layer in text.kv_source_layer_ids:
            own["attn.compressor.wkv.weight"] = [width, wide]
            own["attn.compressor.norm.weight"] = [width]
            if text.compress_ratios[layer] > 1:
                own["attn.compressor.wgate.weight"] = [width, wide]
            own["attn.indexer.wk.weight"] = [text.index_head_dim, width]
            own["attn.indexer.k_norm.weight"] = [text.index_head_dim]
        if layer in text.index_source_layer_ids:
            own["attn.indexer.wq_b.weight"] = [text.index_n_heads * text.index_head_dim, low]
            own["attn.indexer.weights_proj.weight"] = [text.index_n_heads, wide]
        for stem in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
            own[f"ffn.{stem}.w1.weight"] = own[f"ffn.{stem}.w3.weight"] = [inner, wide]
            own[f"ffn.{stem}.w2.weight"] = [wide, inner]
        for site in ("attn", "ffn"):
            own[f"hc_{site}_fn"] = [streams * (streams + 2), streams * wide]
            own[f"hc_{site}_base"] = [streams * (streams + 2)]
            own[f"hc_{site}_scale"] = [3]
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes
