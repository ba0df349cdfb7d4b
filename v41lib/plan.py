"""Who does what: one LayerPlan a layer, computed once from the configuration.

This is the only place that decides which layer reads whose KV, whose selection and whose candidates (SPEC 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from v41lib.config import TextConfig

Stack = Literal["encoder", "decoder"]
Mode = Literal["local", "full", "reindex", "reuse"]
CandidateRole = Literal["source", "consumer"]


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does.

    ``mode``: *local* sees its window only; *full* compresses its own input into main KV and index keys and selects;
    *reindex* selects anew among another layer's keys; *reuse* reads the latest KV through the latest selection.
    ``kv_owner`` and ``index_owner`` are the layers whose KV and whose selection it reads (itself included), None when
    local. ``candidate_role`` is set where the layer publishes a candidate pool or searches only inside one.
    """

    layer: int
    stack: Stack
    ratio: int
    mode: Mode
    kv_owner: int | None
    index_owner: int | None
    candidate_role: CandidateRole | None
    engram: bool

    @property
    def owns_kv(self) -> bool:
        return self.kv_owner == self.layer

    @property
    def selects(self) -> bool:
        return self.index_owner == self.layer


def first_decoder_layer(text: TextConfig) -> int:
    """Where the decoder begins: the last KV source; the layer count when there is none (all layers local)."""
    return text.kv_source_layer_ids[-1] if text.kv_source_layer_ids else text.num_hidden_layers


def plan_layers(text: TextConfig) -> tuple[LayerPlan, ...]:
    """The plan of every backbone layer, in order (SPEC 2). A validated configuration cannot make it fail."""
    cut = first_decoder_layer(text)
    kv_sources, index_sources = set(text.kv_source_layer_ids), set(text.index_source_layer_ids)
    cap = text.candidate_source_layer_id
    plans = []
    kv_owner = index_owner = None
    for layer in range(text.num_hidden_layers):
        ratio = text.compress_ratios[layer]
        mode: Mode = "local" if ratio == 0 else "reuse"
        if layer in index_sources:
            mode, index_owner = "reindex", layer
        if layer in kv_sources:
            mode, kv_owner = "full", layer
        role: CandidateRole | None = None
        if layer == cap:
            role = "source"
        elif cap != -1 and layer > cap and mode == "reindex":
            role = "consumer"
        plans.append(
            LayerPlan(
                layer=layer,
                stack="encoder" if layer < cut else "decoder",
                ratio=ratio,
                mode=mode,
                kv_owner=None if mode == "local" else kv_owner,
                index_owner=None if mode == "local" else index_owner,
                candidate_role=role,
                engram=layer in text.engram_layer_ids,
            )
        )
    return tuple(plans)
