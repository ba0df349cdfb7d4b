"""The configurations and weights that the live comparison runs on.

Each configuration stresses one thing that the presets leave alone. Head widths stay multiples of 32: at other widths
mlx-lm skips its cache rounding altogether, where the specification pads the last block.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from v41lib import Config, Model, preset

# Both sides of everything that happens at a block, group, window or pool boundary.
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 97, 129, 130)


# One layer of each mode: local, full, full and candidate source, reindex. Fewer normalisations, for speed.
_COMPACT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 2, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
    "hc_sinkhorn_iters": 5,
}


def _variant(base: str, **changes: Any) -> Config:
    config = preset(base)
    return config.replace(text=config.text.replace(**_COMPACT | changes).to_dict())


@cache
def configs() -> dict[str, Config]:
    """Name to configuration; built once."""
    return {
        "tiny": preset("tiny"),
        "wide": preset("wide"),
        # The release in miniature: every mode in both stacks, two layers that reindex inside one pool, several rounding
        # blocks a head.
        "deep": _variant(
            "wide",
            num_hidden_layers=9,
            compress_ratios=[0, 0, 2, 2, 2, 1, 1, 1, 1],
            kv_source_layer_ids=[2, 4, 5],
            index_source_layer_ids=[2, 4, 5, 7, 8],
            candidate_source_layer_id=5,
            head_dim=64,
            qk_rope_head_dim=16,
            index_head_dim=64,
            hc_sinkhorn_iters=20,
        ),
        # No local layer, a layer of the encoder that reindexes, no cap, no YaRN.
        "ratio1-nocap": _variant(
            "tiny",
            compress_ratios=[1, 1, 1, 1],
            kv_source_layer_ids=[0, 3],
            index_source_layer_ids=[0, 2, 3],
            candidate_source_layer_id=-1,
            rope_scaling=None,
        ),
        # The cap at ratio 2. Its only source is the first layer, so the encoder is empty. One output group a head.
        "ratio2-capped": _variant(
            "tiny",
            compress_ratios=[2, 2, 2, 2],
            kv_source_layer_ids=[0],
            index_source_layer_ids=[0, 2, 3],
            candidate_source_layer_id=0,
            num_attention_heads=4,
            o_groups=4,
        ),
        # Ratios that the release does not use; most lengths leave a group open.
        "ratio4-ratio3": _variant(
            "tiny",
            num_hidden_layers=5,
            compress_ratios=[0, 4, 4, 3, 3],
            kv_source_layer_ids=[1, 3],
            index_source_layer_ids=[1, 3, 4],
            candidate_source_layer_id=3,
        ),
        # Local layers between a source and its reader, and last. A window of one token.
        "local-between": _variant(
            "tiny",
            num_hidden_layers=5,
            compress_ratios=[2, 0, 2, 2, 0],
            kv_source_layer_ids=[0],
            index_source_layer_ids=[0, 3],
            candidate_source_layer_id=-1,
            sliding_window=1,
        ),
        # Windows alone, longer than most sequences: nothing is compressed or selected.
        "local-only": _variant(
            "tiny",
            num_hidden_layers=2,
            compress_ratios=[0, 0],
            kv_source_layer_ids=[],
            index_source_layer_ids=[],
            candidate_source_layer_id=-1,
            sliding_window=64,
        ),
        "streams8": _variant("tiny", hc_mult=8, num_experts_per_tok=3),
        "streams2": _variant("wide", hc_mult=2, norm_topk_prob=False, hc_sinkhorn_iters=1),
        # Most rotary pairs interpolated or blended, and clamps that most activations reach.
        "yarn-clamp": _variant(
            "wide",
            rope_scaling={
                "rope_type": "yarn",
                "factor": 40,
                "beta_fast": 4,
                "beta_slow": 1,
                "original_max_position_embeddings": 64,
            },
            qk_rope_head_dim=32,
            swiglu_limit=0.1,
        ),
        # A pool that holds less than a selection: the one place where mlx-lm selects what the specification forbids.
        "starved-pool": _variant("tiny", index_topk=8, candidate_topk_blocks=2, candidate_block_size=3),
        # Two index heads: a quarter of all scores are exactly zero, so ties at the cut are common.
        "zero-ties": _variant("tiny", index_n_heads=2),
    }


def random_model(config: Config, seed: int) -> Model:
    """A model in which every parameter matters: norms, sinks, biases and mHC bases are drawn too."""
    model = Model(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator) * std

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", ".scale")):
                weight.copy_(1 + normal(weight, 0.2))
            elif name.endswith((".base", ".bias", ".bias_vl")):
                weight.copy_(normal(weight, 0.2))
            elif name.endswith("attn_sink"):
                weight.copy_(normal(weight, 1.0))
            elif name == "embed.weight":
                weight.copy_(normal(weight, 0.5))
    return model.requires_grad_(False)


def random_ids(config: Config, length: int, seed: int, batch: int = 1) -> Tensor:
    """Token ids ``[batch, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.text.vocab_size, (batch, length), generator=generator)
