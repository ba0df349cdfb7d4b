"""Parameters in closed form, by part: what is stored, and what one token touches.

Every function takes a configuration and returns exact integers. ``tests/unit/test_params.py`` compares them with the
built model, tensor by tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from v41lib.config import Config, TextConfig, VisionConfig
from v41lib.plan import LayerPlan, plan_layers


@dataclass(frozen=True)
class LayerParams:
    """One layer's parameters by part. ``experts`` holds all routed experts, ``expert`` one of them."""

    attention: int
    compressor: int
    indexer: int
    hyper: int
    norms: int
    router: int
    shared_expert: int
    experts: int
    engram_projection: int
    expert: int

    @property
    def total(self) -> int:
        return self.always + self.experts

    @property
    def always(self) -> int:
        """All but the routed experts: what every token touches."""
        return (
            self.attention
            + self.compressor
            + self.indexer
            + self.hyper
            + self.norms
            + self.router
            + self.shared_expert
            + self.engram_projection
        )


def _attention(text: TextConfig) -> int:
    heads, width, model = text.num_attention_heads, text.head_dim, text.hidden_size
    low_rank_out = text.o_groups * text.o_lora_rank
    return (
        text.q_lora_rank * model  # wq_a
        + text.q_lora_rank  # q_norm
        + heads * width * text.q_lora_rank  # wq_b
        + width * model  # wkv
        + width  # kv_norm
        + low_rank_out * (heads * width // text.o_groups)  # wo_a, block-diagonal
        + model * low_rank_out  # wo_b
        + heads  # attn_sink
    )


def _compressor(text: TextConfig, plan: LayerPlan) -> int:
    if not plan.owns_kv:
        return 0
    projections = 1 if plan.ratio == 1 else 2  # ratio 1 has no gate
    return projections * text.head_dim * text.hidden_size + text.head_dim


def _indexer(text: TextConfig, plan: LayerPlan) -> int:
    if not plan.selects:
        return 0
    count = text.index_n_heads * text.index_head_dim * text.q_lora_rank + text.index_n_heads * text.hidden_size
    return count + (_index_keys(text) if plan.owns_kv else 0)


def _index_keys(text: TextConfig) -> int:
    """wk and k_norm: an index key from a latent."""
    return text.index_head_dim * text.head_dim + text.index_head_dim


def _hyper(text: TextConfig) -> int:
    """Both sites of a layer: fn, base, scale."""
    rows = text.hc_mult * (text.hc_mult + 2)
    return 2 * (rows * text.hc_mult * text.hidden_size + rows + 3)


def _expert(text: TextConfig) -> int:
    return 3 * text.moe_intermediate_size * text.hidden_size


def _engram_projection(text: TextConfig) -> int:
    looked_up = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    streams, model = text.hc_mult, text.hidden_size
    return model * (streams + 1) * looked_up + 2 * streams * model  # wkv, q_weight, k_weight


def layer_params(text: TextConfig, plan: LayerPlan) -> LayerParams:
    """The parameters of one backbone layer (SPEC 3-8)."""
    return LayerParams(
        attention=_attention(text),
        compressor=_compressor(text, plan),
        indexer=_indexer(text, plan),
        hyper=_hyper(text),
        norms=2 * text.hidden_size,
        router=text.n_routed_experts * (text.hidden_size + 2),  # weight, text bias, image bias
        shared_expert=_expert(text),
        experts=text.n_routed_experts * _expert(text),
        engram_projection=_engram_projection(text) if plan.engram else 0,
        expert=_expert(text),
    )


def all_layer_params(text: TextConfig) -> tuple[LayerParams, ...]:
    """:func:`layer_params` of every layer, in order."""
    return tuple(layer_params(text, plan) for plan in plan_layers(text))


def embedding_params(text: TextConfig) -> int:
    """The token embedding; the head, which is untied, has as many."""
    return text.vocab_size * text.hidden_size


def engram_projection_params(text: TextConfig) -> int:
    """Engram's projections and gate weights, which count as backbone."""
    return sum(layer.engram_projection for layer in all_layer_params(text))


def backbone_params(text: TextConfig) -> int:
    """Embedding, all layers with Engram's projections, final norm and head."""
    return 2 * embedding_params(text) + text.hidden_size + sum(layer.total for layer in all_layer_params(text))


def engram_table_params(text: TextConfig) -> int:
    """The Engram tables: rows times width, over the Engram layers."""
    return sum(text.engram_num_embeddings) * text.engram_head_dim


def vision_params(vision: VisionConfig | None, model_width: int) -> int:
    """The vision tower, the aligner and the three learned delimiters (SPEC 9). 0 without a tower."""
    if vision is None:
        return 0
    width, inner = vision.hidden_size, vision.intermediate_size
    block = 2 * width + (3 * width * width + 3 * width) + (width * width + width) + 3 * inner * width
    tower = width * 3 * vision.patch_size**2 + width + vision.num_hidden_layers * block + width
    merged = width * vision.downsample_ratio**2
    aligner = model_width * merged + model_width + model_width * model_width + model_width
    return tower + aligner + 3 * model_width


def dspark_params(text: TextConfig) -> int:
    """The DSpark drafting stages with their projection, final norm, Markov head and confidence head (SPEC 10)."""
    if not text.num_nextn_predict_layers:
        return 0
    model, rank = text.hidden_size, text.dspark_markov_rank
    stage = (
        _attention(text)
        + _hyper(text)
        + 2 * model
        + text.dspark_n_routed_experts * (model + 2 + _expert(text))
        + _expert(text)
    )
    main = model * model * len(text.dspark_target_layer_ids) + model
    heads = model + 2 * text.vocab_size * rank + (model + rank)
    return text.num_nextn_predict_layers * stage + main + heads


@dataclass(frozen=True)
class Params:
    """The four published parts of a model; ``total`` is the release's own total."""

    backbone: int
    engram_tables: int
    vision: int
    dspark: int

    @property
    def total(self) -> int:
        return self.backbone + self.engram_tables + self.vision + self.dspark


def count(config: Config) -> Params:
    """Every stored parameter of a configuration, by part (SPEC 11)."""
    text = config.text
    return Params(
        backbone=backbone_params(text),
        engram_tables=engram_table_params(text),
        vision=vision_params(config.vision, text.hidden_size),
        dspark=dspark_params(text),
    )


@dataclass(frozen=True)
class Active:
    """Parameters that one token touches, by part, so that every counting convention is a sum of these.

    ``encoder`` and ``decoder`` count attention, compressors, indexers, mHC, norms, Engram projections, the router, the
    shared expert and the chosen routed experts of their layers; ``global_kv`` is the last source's compressor and its
    index keys, run for every prompt token even when prefill stops at the encoder; ``embedding`` is the whole table.
    """

    encoder: int
    decoder: int
    global_kv: int
    embedding: int
    head: int

    @property
    def stacks(self) -> int:
        return self.encoder + self.decoder


def active(text: TextConfig) -> Active:
    """What one text token touches when every layer runs (SPEC 11)."""
    plans, layers = plan_layers(text), all_layer_params(text)
    touched = {"encoder": 0, "decoder": 0}
    for plan, layer in zip(plans, layers, strict=True):
        unread_bias = text.n_routed_experts  # a text token reads the router's text bias, not its image bias
        touched[plan.stack] += layer.always - unread_bias + text.num_experts_per_tok * layer.expert
    decoder_source = next((p for p in plans if p.stack == "decoder"), None)
    return Active(
        encoder=touched["encoder"],
        decoder=touched["decoder"],
        global_kv=_compressor(text, decoder_source) + _index_keys(text) if decoder_source else 0,
        embedding=embedding_params(text),
        head=embedding_params(text) + text.hidden_size,
    )
