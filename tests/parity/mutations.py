"""Mistakes that still compute something plausible. Each is put into v41lib; the comparisons must notice every one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from v41lib import Model
from v41lib.model import Block, Residual
from v41lib.nn import attention, compressor, hyper, indexer, moe, quant, rope
from v41lib.nn.attention import Attention
from v41lib.nn.hyper import collapse
from v41lib.nn.indexer import Indexer
from v41lib.nn.moe import Route, Router
from v41lib.nn.shared import GlobalKV

Mutation = Callable[[pytest.MonkeyPatch, Model], None]


def wrong_theta(patch: pytest.MonkeyPatch, model: Model) -> None:
    text = model.config.text
    plain = rope.frequencies(text.qk_rope_head_dim, text.rope_theta)
    patch.setattr(attention, "layer_frequencies", lambda *_: plain)


def no_yarn(patch: pytest.MonkeyPatch, model: Model) -> None:
    text = model.config.text.replace(rope_scaling=None)
    original = rope.layer_frequencies
    patch.setattr(attention, "layer_frequencies", lambda _, ratio, device: original(text, ratio, device))


def output_not_rotated_back(patch: pytest.MonkeyPatch, model: Model) -> None:
    patch.setattr(attention, "rotate", lambda x, by, inverse=False: x if inverse else rope.rotate(x, by))


def own_coefficients(patch: pytest.MonkeyPatch, model: Model) -> None:
    def attention_input(self: Block, residual: Residual) -> Tensor:
        return self.attn_norm(collapse(residual.streams, self.hc_attn(residual.streams).pre))

    patch.setattr(Block, "attention_input", attention_input)


def comb_transposed(patch: pytest.MonkeyPatch, model: Model) -> None:
    original = hyper.expand
    patch.setattr("v41lib.model.expand", lambda x, out, post, comb: original(x, out, post, comb.transpose(-1, -2)))


def sinkhorn_rows_first(patch: pytest.MonkeyPatch, model: Model) -> None:
    def rows_first(logits: Tensor, iterations: int, eps: float) -> Tensor:
        comb = logits.softmax(-1) + eps
        for _ in range(iterations):
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
        return comb

    patch.setattr(hyper, "sinkhorn", rows_first)


def floor_scale(patch: pytest.MonkeyPatch, model: Model) -> None:
    patch.setattr(quant, "power_of_two_above", lambda x: torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1))


def _rounding(patch: pytest.MonkeyPatch, fmt: str, mutated: Callable[[Tensor], Tensor]) -> None:
    original = attention.straight_through
    patch.setattr(attention, "straight_through", lambda x, name: mutated(x) if name == fmt else original(x, name))


def main_scale_power_of_two(patch: pytest.MonkeyPatch, model: Model) -> None:
    # Sixteen channels padded to MXFP4's thirty-two are a block of their own.
    _rounding(patch, "fp4", lambda x: quant.mxfp4_round_trip(x.unflatten(-1, (-1, 16))).flatten(-2))


def window_rotary_in_bf16(patch: pytest.MonkeyPatch, model: Model) -> None:
    """V4's layout: the rotary part of the window KV escapes FP8."""
    width = model.config.text.qk_rope_head_dim

    def mutated(x: Tensor) -> Tensor:
        return torch.cat((quant.fp8_round_trip(x)[..., :-width], x[..., -width:].bfloat16().float()), dim=-1)

    _rounding(patch, "fp8", mutated)


def one_element_one_step(patch: pytest.MonkeyPatch, model: Model) -> None:
    """The smallest mistake there is: one element of every layer's window KV takes the neighbouring FP8 value."""

    def mutated(x: Tensor) -> Tensor:
        y = quant.fp8_round_trip(x).clone()
        y[0, -1, y[0, -1].abs().argmax()] *= 1 - 2.0**-4
        return quant.fp8_round_trip(y)

    _rounding(patch, "fp8", mutated)


def no_sink(patch: pytest.MonkeyPatch, model: Model) -> None:
    patch.setattr(attention, "softmax_with_sink", lambda logits, sink: logits.softmax(-1))


def window_one_longer(patch: pytest.MonkeyPatch, model: Model) -> None:
    text = model.config.text
    for block in model.layers:
        patch.setattr(block.attn, "text", text.replace(sliding_window=text.sliding_window + 1))


def mean_pooling(patch: pytest.MonkeyPatch, model: Model) -> None:
    original = compressor.pool
    patch.setattr(compressor, "pool", lambda values, gates, ratio: original(values, gates * 0, ratio))


def group_at_its_last_token(patch: pytest.MonkeyPatch, model: Model) -> None:
    def publish(self: Attention, x: Tensor) -> GlobalKV:
        latent, ratio = self.compressor(x), self.plan.ratio
        by = self.rotation_at(torch.arange(latent.shape[1]) * ratio + ratio - 1)
        main = attention.straight_through(rope.rotate(latent, by), "fp4")
        return GlobalKV(self.plan.layer, ratio, main, self.indexer.keys(latent, by))

    patch.setattr(Attention, "publish", publish)


def keys_from_rotated_latent(patch: pytest.MonkeyPatch, model: Model) -> None:
    original = Indexer.keys
    patch.setattr(Indexer, "keys", lambda self, latent, by: original(self, rope.rotate(latent, by), by))


def relu_after_head_sum(patch: pytest.MonkeyPatch, model: Model) -> None:
    def score(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
        keys = keys.unsqueeze(1) if keys.dim() == 3 else keys
        return torch.einsum("bsh,bshd,bstd->bst", weights, queries, keys.expand(-1, queries.shape[1], -1, -1)).relu()

    patch.setattr(indexer, "score", score)


def open_group_visible(patch: pytest.MonkeyPatch, model: Model) -> None:
    def early(positions: Tensor, ratio: int) -> Tensor:
        return torch.div(positions + ratio, ratio, rounding_mode="floor")

    patch.setattr(attention, "visible_entries", early)


def newest_block_dropped(patch: pytest.MonkeyPatch, model: Model) -> None:
    original = indexer.candidate_blocks
    patch.setattr(attention, "candidate_blocks", lambda scores, visible, *rest: original(scores, visible * 0, *rest))


def reindex_ignores_pool(patch: pytest.MonkeyPatch, model: Model) -> None:
    everywhere = indexer.select_everywhere
    patch.setattr(attention, "select_among", lambda *args: everywhere(*args[:5]))


def selection_one_short(patch: pytest.MonkeyPatch, model: Model) -> None:
    original = indexer.select_everywhere
    patch.setattr(attention, "select_everywhere", lambda *args: original(*args[:4], args[4] - 1))


def bias_in_weights(patch: pytest.MonkeyPatch, model: Model) -> None:
    def forward(self: Router, x: Tensor, is_image: Tensor | None = None) -> Route:
        scores = F.softplus(F.linear(x, self.weight)).sqrt() + self.bias
        weights, chosen = scores.topk(self.k)
        return Route(chosen, weights / weights.sum(-1, keepdim=True) * self.factor)

    patch.setattr(Router, "forward", forward)


def swiglu_unclamped(patch: pytest.MonkeyPatch, model: Model) -> None:
    original: Callable[..., Any] = moe.clamped_swiglu
    patch.setattr(moe, "clamped_swiglu", lambda gate, up, limit: original(gate, up, 1e9))


# Each mistake, and the stage at which a layer that makes it must first part from mlx-lm's.
MUTATIONS: dict[Mutation, str] = {
    wrong_theta: "window, unrounded",
    no_yarn: "window, unrounded",
    output_not_rotated_back: "attn_out",
    own_coefficients: "attn_in",
    comb_transposed: "streams",
    sinkhorn_rows_first: "streams",
    floor_scale: "window",
    main_scale_power_of_two: "main",
    window_rotary_in_bf16: "window",
    one_element_one_step: "window",
    no_sink: "attn_out",
    window_one_longer: "attn_out",
    mean_pooling: "main, unrounded",
    group_at_its_last_token: "main, unrounded",
    keys_from_rotated_latent: "keys, unrounded",
    relu_after_head_sum: "topk",
    open_group_visible: "topk",
    newest_block_dropped: "cand",
    reindex_ignores_pool: "topk",
    selection_one_short: "topk",
    bias_in_weights: "route weights",
    swiglu_unclamped: "ffn_out",
}
