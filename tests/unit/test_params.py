"""Counting: the published numbers to the last parameter, and the closed forms against built models."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.support import configs, random_model, released_shapes, small_config
from v41lib import Config, Model, preset, released
from v41lib.accounting import params
from v41lib.checkpoint import released_tensors


@pytest.fixture(scope="module")
def on_meta() -> Model:
    return Model(released(), device="meta")


# --- the published numbers (SPEC 11) ---------------------------------------------------------------------------------


def test_stored_parameters_to_the_last_one() -> None:
    count = params.count(released())
    assert count.backbone == 551_880_835_184
    assert count.engram_tables == 196_613_849_600
    assert count.vision == 485_268_480
    assert count.dspark == 14_225_362_530
    assert count.total == 763_205_315_794


def test_active_parameters_by_every_convention() -> None:
    active = params.active(released().text)
    assert active.encoder == 7_892_867_768
    assert active.stacks == 15_468_654_704
    assert active.global_kv == 512 * 5120 + 512 + 128 * 512 + 128
    assert f"{(active.encoder + active.global_kv) / 1e9:.3f}" == "7.896"
    assert f"{(active.encoder + active.global_kv + active.embedding) / 1e9:.2f}" == "8.56"
    assert f"{(active.encoder + active.embedding) / 1e9:.2f}" == "8.55"
    assert f"{(active.stacks + active.head) / 1e9:.2f}" == "16.13"
    assert f"{(active.stacks + active.head + active.embedding) / 1e9:.2f}" == "16.79"


def test_parts_by_hand() -> None:
    """Recomputed here with the released sizes, not with the library's formulas."""
    text = released().text
    layers = params.all_layer_params(text)
    assert params.embedding_params(text) == 129280 * 5120
    assert layers[0].expert == 3 * 2304 * 5120
    assert layers[0].experts == 384 * 3 * 2304 * 5120
    assert layers[0].router == 384 * 5120 + 2 * 384
    assert layers[0].norms == 2 * 5120
    assert layers[0].hyper == 2 * (24 * 4 * 5120 + 24 + 3)
    q = 1280 * 5120 + 1280 + 64 * 512 * 1280
    kv, out = 512 * 5120 + 512, 8 * 1024 * (64 * 512 // 8) + 5120 * 8 * 1024
    assert layers[0].attention == q + kv + out + 64
    assert [layer for layer in range(40) if layers[layer].compressor] == [2, 8, 14, 20]
    assert layers[2].compressor == 2 * 512 * 5120 + 512
    assert layers[20].compressor == 512 * 5120 + 512
    assert [layer for layer in range(40) if layers[layer].indexer] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers[24].indexer == 32 * 128 * 1280 + 32 * 5120
    assert layers[20].indexer == layers[24].indexer + 128 * 512 + 128
    assert [layer for layer in range(40) if layers[layer].engram_projection] == [1, 14]
    assert layers[1].engram_projection == 5120 * 5 * 6144 + 2 * 4 * 5120
    assert params.engram_projection_params(text) == 2 * layers[1].engram_projection


def test_engram_tables_by_hand() -> None:
    assert params.engram_table_params(released().text) == (384_006_168 + 384_016_682) * 256


def test_every_layer_differs_from_the_plainest_only_by_what_its_plan_adds() -> None:
    """Layer 0 is the plainest; a layer that reuses has exactly as much."""
    layers = params.all_layer_params(released().text)
    for layer in layers:
        extra = layer.compressor + layer.indexer + layer.engram_projection
        assert layer.total - extra == layers[0].total
        assert layer.total == layer.always + layer.experts


# --- the built model -------------------------------------------------------------------------------------------------


def test_the_released_model_is_built_small_and_quickly() -> None:
    """Under 30 s and 2 GiB, on the meta device, in a process of its own (imports included)."""
    script = """
import json, resource, time
start = time.perf_counter()
from v41lib import Model, released
model = Model(released(), device="meta")
total = sum(weight.numel() for weight in model.parameters())
seconds = time.perf_counter() - start
print(json.dumps([total, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    total, seconds, kibibytes = json.loads(done.stdout)
    text = released().text
    assert total == params.backbone_params(text) - params.engram_projection_params(text)
    assert seconds < 30
    assert kibibytes < 2 * 1024**2


def part_of(name: str) -> str:
    """The part of ``LayerParams`` that counts a tensor, by its released name inside a layer."""
    if name.startswith("hc_"):
        return "hyper"
    if name in ("attn_norm.weight", "ffn_norm.weight"):
        return "norms"
    for prefix, part in (
        ("attn.compressor.", "compressor"),
        ("attn.indexer.", "indexer"),
        ("attn.", "attention"),
        ("ffn.gate.", "router"),
        ("ffn.shared_experts.", "shared_expert"),
        ("ffn.experts.", "experts"),
    ):
        if name.startswith(prefix):
            return part
    raise AssertionError(name)


def counted(model: Model) -> tuple[dict[int, dict[str, int]], dict[str, int]]:
    layers: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    rest: dict[str, int] = {}
    for name, tensor in released_tensors(model):
        if name.startswith("layers."):
            _, layer, inside = name.split(".", 2)
            layers[int(layer)][part_of(inside)] += tensor.numel()
        else:
            rest[name] = tensor.numel()
    return layers, rest


def assert_counts(model: Model) -> None:
    """Built equals closed form: per layer, per part, and in all; Engram's projections apart until they are built."""
    text = model.config.text
    layers, rest = counted(model)
    parts = ("attention", "compressor", "indexer", "hyper", "norms", "router", "shared_expert", "experts")
    for layer, closed in enumerate(params.all_layer_params(text)):
        assert {part: layers[layer][part] for part in parts} == {part: getattr(closed, part) for part in parts}, layer
    assert set(rest) == {"embed.weight", "norm.weight", "head.weight"}
    assert rest["embed.weight"] == rest["head.weight"] == params.embedding_params(text)
    built = sum(rest.values()) + sum(sum(layer.values()) for layer in layers.values())
    assert built == params.backbone_params(text) - params.engram_projection_params(text)
    assert built == sum(weight.numel() for weight in model.parameters())


def test_the_released_model_equals_its_closed_form(on_meta: Model) -> None:
    assert_counts(on_meta)


def test_the_released_model_has_the_released_tensors(on_meta: Model) -> None:
    """Tensor by tensor: 46,000 names and shapes as the released layout says."""
    built = {name: list(tensor.shape) for name, tensor in released_tensors(on_meta)}
    expected = released_shapes(released().text)
    assert built == expected
    assert len(built) == 3 + 40 * (13 + 3 * 385 + 6) + 4 * 4 + 3 + 8 * 2
    assert sum(math.prod(shape) for shape in expected.values()) == 551_880_835_184 - 2 * (
        5120 * 5 * 6144 + 2 * 4 * 5120
    )


@pytest.mark.parametrize("name", ["tiny", "wide", "bench"])
def test_presets_equal_their_closed_form(name: str) -> None:
    assert_counts(Model(preset(name), device="meta"))


@settings(max_examples=40)
@given(config=configs(max_layers=8))
def test_any_model_equals_its_closed_form(config: Config) -> None:
    model = Model(config, device="meta")
    assert_counts(model)
    assert {name: list(tensor.shape) for name, tensor in released_tensors(model)} == released_shapes(config.text)


def test_engram_is_counted_where_the_configuration_declares_it() -> None:
    plain = small_config()
    engram = small_config(
        engram_layer_ids=[1, 3],
        engram_num_embeddings=[10, 20],
        engram_max_ngram_size=3,
        engram_n_heads=2,
        engram_head_dim=5,
    )
    projection = 16 * (4 + 1) * (2 * 2 * 5) + 2 * 4 * 16
    assert params.count(engram).backbone == params.count(plain).backbone + 2 * projection
    assert params.count(engram).engram_tables == 30 * 5
    assert params.count(plain).engram_tables == 0
    assert params.active(engram.text).encoder == params.active(plain.text).encoder + 2 * projection
    assert_counts(Model(engram, device="meta"))


def test_what_is_not_declared_is_not_counted() -> None:
    count = params.count(small_config())
    assert (count.engram_tables, count.vision, count.dspark) == (0, 0, 0)
    assert count.total == count.backbone


# --- active: what one token touches, measured ------------------------------------------------------------------------


class Touched(TorchDispatchMode):
    """The parameters (or slices of them) that some operation read; a view of a parameter is the parameter."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.names = {weight.untyped_storage().data_ptr(): name for name, weight in model.named_parameters()}
        self.slices: set[tuple[str, int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            flat = [
                leaf
                for arg in (*args, *(kwargs or {}).values())
                for leaf in (arg if isinstance(arg, (list, tuple)) else [arg])
            ]
            for value in flat:
                if isinstance(value, torch.Tensor) and (name := self.names.get(value.untyped_storage().data_ptr())):
                    once = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride]
                    self.slices.add((name, value.storage_offset(), math.prod(once)))
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(count for _, _, count in self.slices)


@settings(max_examples=40)
@given(config=configs(max_layers=8))
@torch.no_grad()
def test_what_one_token_touches_is_what_is_called_active(config: Config) -> None:
    """One forward of one token, each parameter that is read counted once: chosen experts alone, one bias, all else."""
    model, active = random_model(config), params.active(config.text)
    with Touched(model) as whole:
        model(torch.tensor([[3]]))
    assert whole.total == active.stacks + active.embedding + active.head


@settings(max_examples=40)
@given(config=configs(max_layers=8))
@torch.no_grad()
def test_what_the_encoder_alone_touches(config: Config) -> None:
    """``encode`` reads the encoder, the embedding and the decoder source's compressor and index keys; besides, that
    source's input norm, which is counted with the decoder."""
    model, active, text = random_model(config), params.active(config.text), config.text
    with Touched(model) as half:
        model.encode(torch.tensor([[3]]))
    besides = text.hidden_size if text.kv_source_layer_ids else 0
    assert half.total == active.encoder + active.embedding + active.global_kv + besides


@torch.no_grad()
def test_an_image_token_touches_the_other_bias_instead() -> None:
    config = small_config()
    model, active = random_model(config), params.active(config.text)
    with Touched(model) as whole:
        model(torch.tensor([[39]]))
    biases = 7 * config.text.n_routed_experts  # torch.where reads both
    assert whole.total == active.stacks + active.embedding + active.head + biases
