"""Checkpoints: released names, bit-exact round trips, refusals that list everything, saves that are interrupted."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import v41lib
import v41lib.checkpoint as checkpoint
from tests.conftest import Golden
from tests.unit import reference
from tests.unit.support import random_model, released_shapes, released_weights, small_config, tokens
from v41lib import CheckpointError, Model, load, save

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# One layer of each kind; two experts, so that a save has few tensors and the steps of one can all be tried.
SCHEDULE: dict[str, Any] = dict(
    num_hidden_layers=4,
    compress_ratios=[0, 2, 1, 1],
    kv_source_layer_ids=[1, 2],
    index_source_layer_ids=[1, 2, 3],
    candidate_source_layer_id=2,
    n_routed_experts=2,
    q_lora_rank=6,
)
CONFIG = small_config(**SCHEDULE)
BIG, SHARD = 5_000_000_000, 30_000  # bytes: one file, and SHARDS of them
SHARDS = 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def assert_same(a: Model, b: Model) -> None:
    """Bitwise, dtypes included."""
    ours, theirs = released_weights(a), released_weights(b)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype, name
        assert torch.equal(value.view(torch.uint8), theirs[name].view(torch.uint8)), name
    assert a.config == b.config


def same(a: Model, b: Model) -> bool:
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(CONFIG, seed=1)


@pytest.fixture(scope="module")
def other() -> Model:
    return random_model(CONFIG, seed=2)


@pytest.fixture
def single(tmp_path: Path, model: Model) -> Path:
    save(model, tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def shards(tmp_path: Path, model: Model) -> Path:
    save(model, tmp_path / "shards", max_shard_bytes=SHARD)
    return tmp_path / "shards"


# --- round trips -----------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("limit", [BIG, SHARD, 1])
def test_round_trip_is_bitwise(tmp_path: Path, dtype: torch.dtype, limit: int) -> None:
    model = random_model(CONFIG, seed=1, dtype=dtype)
    save(model, tmp_path, max_shard_bytes=limit)
    again = load(tmp_path, dtype=dtype)
    assert_same(model, again)
    with torch.no_grad():
        assert torch.equal(model(tokens(9)), again(tokens(9)))


def test_bf16_files_load_as_fp32_and_fp32_files_as_bf16(tmp_path: Path, single: Path, model: Model) -> None:
    coarse = load(single, dtype=torch.bfloat16)
    save(coarse, tmp_path / "bf16")
    widened = released_weights(load(tmp_path / "bf16", dtype=torch.float32))
    for name, value in released_weights(model).items():
        stored = released_weights(coarse)[name]
        assert torch.equal(stored, value.to(stored.dtype)), name
        assert widened[name].dtype == torch.float32
        assert torch.equal(widened[name], stored.float()), name


def test_other_dtypes_are_refused(single: Path) -> None:
    with pytest.raises(ValueError, match=r"float16.*float32.*bfloat16"):
        load(single, dtype=torch.float16)


@DTYPES
def test_the_file_holds_the_released_names_and_shapes_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    model = random_model(CONFIG, dtype=dtype)
    save(model, tmp_path)
    stored = load_file(tmp_path / SINGLE)
    assert {name: list(value.shape) for name, value in stored.items()} == released_shapes(model.config.text)
    assert files(tmp_path) == {SINGLE, "config.json"}


def test_released_names_by_example(single: Path) -> None:
    """A handful written out, so that the list above cannot drift together with the library."""
    names = set(load_file(single / SINGLE))
    assert {
        "embed.weight", "head.weight", "norm.weight", "layers.0.hc_attn_fn", "layers.3.hc_ffn_scale",
        "layers.0.attn.attn_sink", "layers.1.attn.compressor.wgate.weight", "layers.2.attn.compressor.norm.weight",
        "layers.2.attn.indexer.k_norm.weight", "layers.3.attn.indexer.weights_proj.weight", "layers.1.ffn.gate.bias_vl",
        "layers.3.ffn.experts.1.w2.weight", "layers.0.ffn.shared_experts.w1.weight",
    } <= names  # fmt: skip
    assert not {"layers.2.attn.compressor.wgate.weight", "layers.3.attn.indexer.wk.weight"} & names
    assert not any(name.startswith("model.") for name in names)


def test_experts_keep_their_numbers(single: Path, model: Model) -> None:
    stored = load_file(single / SINGLE)
    for expert in range(2):
        for matrix in ("w1", "w2", "w3"):
            stacked = getattr(model.layers[3].ffn.experts, matrix)
            assert torch.equal(stored[f"layers.3.ffn.experts.{expert}.{matrix}.weight"], stacked[expert])


def test_released_tensors_are_views_that_write_to_the_model() -> None:
    model = random_model(CONFIG)
    for _, tensor in checkpoint.released_tensors(model):
        tensor.zero_()
    assert not any(weight.any() for weight in model.parameters())


def test_files_of_another_writer_load(golden: Golden, tmp_path: Path) -> None:
    """The fixtures were written by another program; rewritten here as two unsorted shards without metadata."""
    stored = load_file(golden.folder / SINGLE)
    for name, value in released_weights(golden.model).items():
        assert torch.equal(value, stored[name])
    names = list(stored)[::-1]
    halves = {"b.safetensors": names[::2], "a.safetensors": names[1::2]}
    for file, members in halves.items():
        save_file({name: stored[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in halves.items() for name in members}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    shutil.copy(golden.folder / "config.json", tmp_path)
    assert_same(load(tmp_path), golden.model)


def test_shards_are_indexed_as_is_customary(shards: Path, model: Model) -> None:
    index = json.loads((shards / INDEX).read_text(encoding="utf-8"))
    weights = released_weights(model)
    assert set(index["weight_map"]) == set(weights)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert files(shards) == {*names, INDEX, "config.json"}
    assert len(names) == SHARDS
    for name in names:
        stored = load_file(shards / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(stored)
        size = sum(value.nbytes for value in stored.values())
        assert size <= SHARD or len(stored) == 1, "a shard above the limit that could have been split"


def test_the_configuration_travels_whole(tmp_path: Path) -> None:
    config = v41lib.Config.from_dict(CONFIG.to_dict() | {"novel": {"a": [1, None]}})
    save(Model(config), tmp_path)
    assert load(tmp_path).config == config
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["novel"] == {"a": [1, None]}


def test_paths_may_be_strings_and_folders_are_made(tmp_path: Path, model: Model) -> None:
    save(model, str(tmp_path / "a" / "b"))
    assert_same(load(str(tmp_path / "a" / "b")), model)


@torch.no_grad()
def test_a_loaded_model_does_not_hang_on_its_file(single: Path, model: Model) -> None:
    """Saving over the folder that a model came from, and deleting it, leaves the model as it was."""
    loaded = load(single)
    save(loaded, single)
    shutil.rmtree(single)
    assert_same(loaded, model)
    loaded.embed.weight.add_(1)


def test_a_model_on_meta_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="meta device"):
        save(Model(CONFIG, device="meta"), tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("limit", [0, -5])
def test_a_limit_that_is_not_positive_is_refused(tmp_path: Path, model: Model, limit: int) -> None:
    with pytest.raises(ValueError, match=f"max_shard_bytes = {limit}"):
        save(model, tmp_path, max_shard_bytes=limit)


# --- refusals --------------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    stored = load_file(folder / SINGLE)
    change(stored)
    save_file(stored, folder / SINGLE)


def test_missing_extra_and_misshapen_are_all_in_one_error(single: Path) -> None:
    def damage(stored: dict[str, torch.Tensor]) -> None:
        del stored["embed.weight"], stored["layers.2.ffn.experts.1.w3.weight"]
        stored["layers.9.attn.wkv.weight"] = torch.zeros(2)
        stored["model.norm.weight"] = torch.zeros(2)
        stored["norm.weight"] = torch.zeros(17)
        stored["layers.0.ffn.gate.weight"] = stored["layers.0.ffn.gate.weight"].T.contiguous()
        stored["head.weight"] = stored["head.weight"].double()
        stored["layers.1.attn.attn_sink"] = stored["layers.1.attn.attn_sink"].half()

    rewrite(single, damage)
    with pytest.raises(CheckpointError) as error:
        load(single)
    message = str(error.value)
    lines = [" ".join(line.split()) for line in message.splitlines()]
    assert str(single) in lines[0]
    assert "8 tensors" in lines[0]
    assert "missing embed.weight [40, 16]" in lines
    assert "missing layers.2.ffn.experts.1.w3.weight [8, 16]" in lines
    assert "extra layers.9.attn.wkv.weight" in lines
    assert "extra model.norm.weight" in lines
    assert any("misshapen norm.weight [17]" in line and "[16]" in line for line in lines)
    assert any("misshapen layers.0.ffn.gate.weight [16, 2]" in line and "[2, 16]" in line for line in lines)
    assert any("head.weight" in line and "F64" in line and "BF16" in line for line in lines)
    assert any("layers.1.attn.attn_sink" in line and "F16" in line for line in lines)
    assert len(lines) == 9, "nothing else is reported"


def test_a_scale_without_a_packed_weight_is_extra(single: Path) -> None:
    """A norm has no scale, and a plain matrix has none: such a file was put together from two."""
    names = ("layers.0.attn_norm.scale", "layers.0.attn.wkv.scale")
    rewrite(single, lambda stored: stored.update({name: torch.zeros(1, 1) for name in names}))
    with pytest.raises(CheckpointError) as error:
        load(single)
    assert all(name in str(error.value) for name in names)


def test_parts_that_the_config_does_not_declare_are_extra_and_declared_ones_are_skipped(tmp_path: Path) -> None:
    foreign = {"vision.norm.weight": torch.zeros(3), "image_start": torch.zeros(3), "mtp.0.norm.weight": torch.zeros(3)}
    config = small_config(**SCHEDULE, num_nextn_predict_layers=1, dspark_target_layer_ids=[3], dspark_noise_token_id=0)
    vision = v41lib.released().to_dict()["vision_config"]
    whole = v41lib.Config.from_dict(config.to_dict() | {"vision_config": vision})
    for folder, which in (("bare", CONFIG), ("whole", whole)):
        save(Model(which), tmp_path / folder)
        rewrite(tmp_path / folder, lambda stored: stored.update(foreign))
    load(tmp_path / "whole")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "bare")
    assert all(name in str(error.value) for name in foreign)


def test_no_folder_no_config_and_no_weights_are_told_apart(tmp_path: Path, single: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.*config\.json"):
        load(tmp_path / "nowhere")
    (single / SINGLE).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(single)


def test_a_broken_config_is_named(single: Path) -> None:
    (single / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json"):
        load(single)


def test_a_checkpoint_with_engram_is_refused_before_its_weights_are_read(single: Path) -> None:
    values = small_config(**SCHEDULE, engram_layer_ids=[1], engram_num_embeddings=[10]).to_dict()
    (single / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"engram_layer_ids = \[1\]"):
        load(single)


CORRUPTIONS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "four bytes": lambda data: data[:4],
    "the header's length alone": lambda data: data[:8],
    "half a header": lambda data: data[:200],
    "half the data": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte long": lambda data: data + b"\0",
    "a huge header length": lambda data: struct.pack("<Q", 1 << 62) + data[8:],
    "a header that is not JSON": lambda data: data[:8] + b"}" + data[9:],
    "a web page": lambda data: b"<html><body>404 not found</body></html>" * 50,
    "a pointer to large storage": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_truncated_or_corrupt_file_is_named(single: Path, corruption: str) -> None:
    path = single / SINGLE
    path.write_bytes(CORRUPTIONS[corruption](path.read_bytes()))
    with pytest.raises(CheckpointError, match="truncated or corrupt") as error:
        load(single)
    assert str(path) in str(error.value)
    assert f"{path.stat().st_size:,} bytes" in str(error.value)


@pytest.mark.parametrize("corruption", ["empty", "one byte short", "a header that is not JSON"])
def test_the_one_bad_shard_is_named_and_no_other(shards: Path, corruption: str) -> None:
    good, bad = weight_files(shards)[1:3]
    bad.write_bytes(CORRUPTIONS[corruption](bad.read_bytes()))
    with pytest.raises(CheckpointError) as error:
        load(shards)
    assert bad.name in str(error.value)
    assert good.name not in str(error.value)


def test_an_index_that_names_missing_shards_lists_them_all(shards: Path) -> None:
    gone = [weight_files(shards)[n] for n in (1, 3)]
    for path in gone:
        path.unlink()
    with pytest.raises(CheckpointError) as error:
        load(shards)
    assert INDEX in str(error.value)
    assert all(path.name in str(error.value) for path in gone)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["b"]}}',
    ],
)
def test_an_index_that_is_none_is_named(shards: Path, content: str) -> None:
    (shards / INDEX).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        load(shards)
    assert INDEX in str(error.value)


def test_the_index_decides_where_two_shards_hold_the_same_tensor(shards: Path, model: Model) -> None:
    """A stale copy in a later shard is not what the index names: it must lose, or be refused by name."""
    index = json.loads((shards / INDEX).read_text(encoding="utf-8"))
    assert index["weight_map"]["embed.weight"] == weight_files(shards)[0].name
    last = weight_files(shards)[-1]
    stored = load_file(last)
    stored["embed.weight"] = torch.zeros(40, 16)
    save_file(stored, last)
    try:
        loaded = load(shards)
    except CheckpointError as error:
        assert "embed.weight" in str(error)
    else:
        assert_same(loaded, model)


# --- the released formats, against tables --------------------------------------------------------------------------

# What TENSOR_NAMES stores in FP8 tiles, and what in packed FP4.
FP8_ENDINGS = (".attn.wq_a.weight", ".attn.wq_b.weight", ".attn.wkv.weight", ".attn.wo_a.weight", ".attn.wo_b.weight")


def released_kind(name: str) -> str:
    if ".ffn.experts." in name:
        return "fp4"
    if name.endswith((*FP8_ENDINGS, ".indexer.wq_b.weight")) or ".shared_experts." in name:
        return "fp8"
    return "plain"


def fp8_tiles(weight: torch.Tensor) -> torch.Tensor:
    """Tile by tile with the table of ``reference``: the smallest power of two under which a 32 x 32 tile fits 448."""
    out = torch.empty_like(weight)
    for row in range(0, weight.shape[0], 32):
        for column in range(0, weight.shape[1], 32):
            at = slice(row, row + 32), slice(column, column + 32)
            amax = weight[at].abs().amax().clamp_min(1e-4).reshape(1).numpy()
            scale = float(reference.smallest_power(amax / np.float32(448))[0])
            out[at] = torch.from_numpy(reference.nearest((weight[at] / scale).numpy(), reference.E4M3) * scale)
    return out


def test_released_precision_stores_the_released_formats(tmp_path: Path) -> None:
    """Names, dtypes and shapes of TENSOR_NAMES (two FP4 codes a byte); bitwise the values that the formats keep."""
    model = random_model(small_config(**SCHEDULE, hidden_size=40, num_attention_heads=4), seed=1)
    save(model, tmp_path, precision="released")
    stored, loaded = load_file(tmp_path / SINGLE), released_weights(load(tmp_path))
    scales = set()
    for name, weight in released_weights(model).items():
        kind, scale = released_kind(name), stored.get(name.removesuffix(".weight") + ".scale")
        if kind == "plain":
            assert scale is None
            assert torch.equal(stored[name], weight)
            assert torch.equal(loaded[name], weight)
            continue
        assert scale is not None
        assert scale.dtype == torch.float8_e8m0fnu
        scales.add(name)
        rows, columns = weight.shape
        if kind == "fp8":
            assert (stored[name].dtype, tuple(stored[name].shape)) == (torch.float8_e4m3fn, (rows, columns))
            assert tuple(scale.shape) == (-(-rows // 32), -(-columns // 32))
            assert torch.equal(loaded[name], fp8_tiles(weight)), name
        else:
            assert (stored[name].dtype, tuple(stored[name].shape)) == (torch.int8, (rows, columns // 2))
            assert tuple(scale.shape) == (rows, -(-columns // 32))
            assert torch.equal(loaded[name], reference.round_trip(weight, "mxfp4")), name
    assert len(stored) == len(released_weights(model)) + len(scales)


# --- one layout after another ----------------------------------------------------------------------------------------


def test_transitions_leave_no_stale_file(tmp_path: Path) -> None:
    """Single, shards, fewer, as many again, single: each time the new weights load and the old files are gone."""
    for seed, limit in enumerate((BIG, SHARD, 2 * SHARD, 2 * SHARD, 2 * SHARD, BIG, SHARD)):
        model = random_model(CONFIG, seed=seed)
        save(model, tmp_path, max_shard_bytes=limit)
        assert_same(load(tmp_path), model)
        if limit < BIG:
            index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
            assert files(tmp_path) == {*index["weight_map"].values(), INDEX, "config.json"}
        else:
            assert files(tmp_path) == {SINGLE, "config.json"}


def test_another_configuration_may_follow(tmp_path: Path, model: Model) -> None:
    bigger = random_model(small_config(**SCHEDULE, hidden_size=24), seed=5)
    for first, second in ((model, bigger), (bigger, model)):
        for limit in (BIG, SHARD):
            save(first, tmp_path, max_shard_bytes=limit)
            save(second, tmp_path, max_shard_bytes=limit)
            assert_same(load(tmp_path), second)


def bystanders(folder: Path) -> dict[str, bytes]:
    """Files that are not the checkpoint's, some with names that look alike."""
    contents = {
        "tokenizer.json": b"{}",
        "README.md": b"mine",
        "optimizer.safetensors": b"not a checkpoint of the model",
        "model.safetensors.bak": b"old",
        "model.txt": b"x",
        "config.json.orig": b"y",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "sub").mkdir()
    (folder / "sub" / SINGLE).write_bytes(b"another checkpoint's")
    return contents


def assert_untouched(folder: Path, contents: dict[str, bytes]) -> None:
    assert {name: (folder / name).read_bytes() for name in contents} == contents
    assert (folder / "sub" / SINGLE).read_bytes() == b"another checkpoint's"


def test_other_files_are_left_alone(tmp_path: Path, model: Model) -> None:
    contents = bystanders(tmp_path)
    for limit in (BIG, SHARD, BIG):
        save(model, tmp_path, max_shard_bytes=limit)
        assert_untouched(tmp_path, contents)
        assert_same(load(tmp_path), model)


@pytest.mark.parametrize("content", ["{", '{"weight_map": {"a": "gone.safetensors"}}'])
@pytest.mark.parametrize("limit", [BIG, SHARD])
def test_a_damaged_checkpoint_can_be_saved_over(shards: Path, other: Model, content: str, limit: int) -> None:
    """The way out of a broken folder: an index that cannot be read is no reason not to write a good one."""
    (shards / INDEX).write_text(content, encoding="utf-8")
    save(other, shards, max_shard_bytes=limit)
    assert_same(load(shards), other)


def test_saving_deletes_nothing_that_a_foreign_index_names(tmp_path: Path, model: Model) -> None:
    """A downloaded index is data: whatever it lists, a save removes weight files of its own folder at most."""
    folder = tmp_path / "checkpoint"
    save(model, folder, max_shard_bytes=SHARD)
    for victim in (tmp_path / "precious.txt", folder / "notes.txt", tmp_path / "victim.safetensors"):
        victim.write_text("mine", encoding="utf-8")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    for number, name in enumerate(("../precious.txt", "notes.txt", "../victim.safetensors")):
        index["weight_map"][f"extra.{number}"] = name
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    save(model, folder)
    assert (tmp_path / "precious.txt").exists()
    assert (folder / "notes.txt").exists()
    assert (tmp_path / "victim.safetensors").exists()


# --- interrupted by an exception -------------------------------------------------------------------------------------

STEPS = ("save_file", "write_text", "fsync", "replace")


def fail_at(monkeypatch: pytest.MonkeyPatch, step: str, call: int, error: BaseException) -> list[int]:
    """Make the ``call``-th use of one of the steps of a save raise. Returns a list that grows with each use."""
    uses: list[int] = []
    owner, name = {
        "save_file": (checkpoint, "save_file"),
        "write_text": (Path, "write_text"),
        "fsync": (os, "fsync"),
        "replace": (os, "replace"),
    }[step]
    original = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        uses.append(1)
        if len(uses) == call:
            if step == "save_file":
                Path(args[1]).write_bytes(b"half a file")
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    return uses


@pytest.mark.parametrize("old_limit", [BIG, SHARD], ids=["from single", "from shards"])
@pytest.mark.parametrize("limit", [BIG, 2 * SHARD], ids=["to single", "to shards"])
@pytest.mark.parametrize("step", STEPS)
def test_an_exception_anywhere_leaves_a_whole_checkpoint_and_no_debris(
    tmp_path: Path, model: Model, other: Model, step: str, limit: int, old_limit: int
) -> None:
    """A full disk, a lost mount, Ctrl-C: before the swap the old checkpoint loads bitwise; never a mixture; no partial
    file stays; and the next save succeeds."""
    for call, error in (
        (1, KeyboardInterrupt()),
        (2, OSError(28, "No space left on device")),
        (4, KeyboardInterrupt()),
    ):
        folder = tmp_path / str(call)
        contents = bystanders(folder)
        save(model, folder, max_shard_bytes=old_limit)
        before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        with pytest.MonkeyPatch.context() as monkeypatch:
            uses = fail_at(monkeypatch, step, call, error)
            try:
                save(other, folder, max_shard_bytes=limit)
            except type(error):
                assert len(uses) == call
            else:
                assert len(uses) < call, "the exception was swallowed"
                continue
        if step == "replace":
            loaded = load(folder)
            assert same(loaded, model) or same(loaded, other)
        else:
            after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
            assert after == before, "the old checkpoint is exactly as it was"
        assert not [name for name in files(folder) if "partial" in name], "debris"
        save(other, folder, max_shard_bytes=limit)
        assert_same(load(folder), other)
        assert_untouched(folder, contents)


@pytest.mark.parametrize("limit", [BIG, 2 * SHARD], ids=["to single", "to shards"])
@pytest.mark.parametrize("old_limit", [BIG, SHARD], ids=["from single", "from shards"])
def test_an_interrupt_just_after_a_rename_loses_nothing(
    tmp_path: Path, model: Model, other: Model, limit: int, old_limit: int
) -> None:
    """A signal is delivered between two instructions: also right after a rename has been made. Tried at every rename,
    the one that commits above all: cleaning up must not take the new files when the old ones are about to go."""
    for call in range(1, 20):
        folder = tmp_path / str(call)
        save(model, folder, max_shard_bytes=old_limit)
        original, uses = os.replace, []

        def interrupted(*args: Any, call: int = call, uses: list[int] = uses, original: Any = original) -> None:
            original(*args)
            uses.append(1)
            if len(uses) == call:
                raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(os, "replace", interrupted)
            try:
                save(other, folder, max_shard_bytes=limit)
            except KeyboardInterrupt:
                pass
            else:
                assert len(uses) < call
                break
        loaded = load(folder)
        assert same(loaded, model) or same(loaded, other), call
    else:
        raise AssertionError("more renames than expected")


def left_in_the_middle(folder: Path, model: Model, other: Model) -> None:
    """A save of ``other`` over ``model`` that has committed and renamed nothing else."""
    save(model, folder, max_shard_bytes=SHARD)
    original, uses = os.replace, []

    def stopping(*args: Any) -> None:
        if uses:
            raise KeyboardInterrupt
        uses.append(1)
        original(*args)

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(KeyboardInterrupt):
        monkeypatch.setattr(os, "replace", stopping)
        save(other, folder)


def journal_of(folder: Path) -> Path:
    (journal,) = [path for path in folder.iterdir() if "journal" in path.name]
    return journal


def test_a_save_that_committed_is_finished_by_the_next_load(tmp_path: Path, model: Model, other: Model) -> None:
    left_in_the_middle(tmp_path, model, other)
    assert_same(load(tmp_path), other)
    assert files(tmp_path) == {SINGLE, "config.json"}


@pytest.mark.parametrize("key", ["rename", "remove"])
@pytest.mark.parametrize("kind", ["relative", "absolute", "a file of the folder that is no checkpoint's"])
def test_a_foreign_journal_touches_nothing_outside_the_checkpoint(
    tmp_path: Path, model: Model, other: Model, key: str, kind: str
) -> None:
    """A folder that came from elsewhere is data: loading it must not delete or replace what its journal names."""
    folder = tmp_path / "downloaded"
    left_in_the_middle(folder, model, other)
    victim = folder / "notes.txt" if kind.startswith("a file") else tmp_path / "precious.txt"
    victim.write_text("mine", encoding="utf-8")
    name = {"relative": "../precious.txt", "absolute": str(victim)}.get(kind, "notes.txt")
    (folder / ".notes.txt.partial").write_text("theirs", encoding="utf-8")
    journal = json.loads(journal_of(folder).read_text(encoding="utf-8"))
    journal_of(folder).write_text(json.dumps(journal | {key: [*journal[key], name]}), encoding="utf-8")
    try:
        load(folder)
    except CheckpointError as error:
        assert "journal" in str(error)
    assert victim.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"rename": 3, "remove": []}', '{"rename": [3], "remove": []}']
)
def test_a_journal_that_is_none_is_named(tmp_path: Path, model: Model, other: Model, content: str) -> None:
    left_in_the_middle(tmp_path, model, other)
    path = journal_of(tmp_path)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert path.name in str(error.value)


@pytest.mark.parametrize("number", [1, 13, 30], ids=["not permitted", "no permission", "read-only file system"])
def test_a_folder_that_cannot_be_written_to_says_what_is_unfinished(
    tmp_path: Path, model: Model, other: Model, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    left_in_the_middle(tmp_path, model, other)

    def refusing(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(CheckpointError, match="interrupted") as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_two_readers_may_finish_the_same_save(
    tmp_path: Path, model: Model, other: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes each rename first: between this one's look and its own rename."""
    left_in_the_middle(tmp_path, model, other)
    original = os.replace

    def beaten(source: Path, target: Path) -> None:
        original(source, target)
        original(source, target)

    monkeypatch.setattr(os, "replace", beaten)
    assert_same(load(tmp_path), other)


# --- interrupted by SIGKILL ------------------------------------------------------------------------------------------

KILLER = '''
"""Save a model over copies of a checkpoint; the n-th copy's process kills itself at the n-th step of the save."""
import os, shutil, signal, sys
from pathlib import Path
import torch
import v41lib
import v41lib.checkpoint as checkpoint

torch.set_num_threads(1)
work = Path(sys.argv[1])
for case in sorted(path for path in work.iterdir() if path.is_dir()):
    model = v41lib.load(case / "new")
    limit = int((case / "limit").read_text())
    for kill_at in range(1, 200):
        folder = case / f"killed-{kill_at}"
        shutil.copytree(case / "old", folder)
        child = os.fork()
        if child == 0:
            steps = 0
            def step(damage=None):
                global steps
                steps += 1
                if steps == kill_at:
                    if damage is not None:
                        damage()
                    os.kill(os.getpid(), signal.SIGKILL)
            def wrap(owner, name):
                original = getattr(owner, name)
                def wrapped(*args, **kwargs):
                    if name == "save_file":  # in the middle of writing a weight file
                        step(lambda: Path(args[1]).write_bytes(b"half a file"))
                    if name == "write_text":
                        step(lambda: original(args[0], args[1][: len(args[1]) // 2], encoding="utf-8"))
                    result = original(*args, **kwargs)
                    step()
                    return result
                setattr(owner, name, wrapped)
            wrap(checkpoint, "save_file")
            wrap(Path, "write_text")
            wrap(Path, "unlink")
            wrap(os, "replace")
            checkpoint.save(model, folder, max_shard_bytes=limit)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, case
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
'''  # fmt: skip
# Bytes a file before and after.
TRANSITIONS = {
    "single-single": (BIG, BIG),
    "single-shards": (BIG, 2 * SHARD),
    "shards-single": (2 * SHARD, BIG),
    "shards-shards": (2 * SHARD, 2 * SHARD),
    "shards-fewer": (SHARD, 2 * SHARD),
}


GROWN = ("single-single", "shards-single", "shards-shards")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, model: Model, other: Model) -> tuple[Path, dict[str, Model]]:
    """All the folders that killed saves left, made once: one process, which forks one child a step."""
    work = tmp_path_factory.mktemp("killed")
    news = {}
    grown = random_model(small_config(**SCHEDULE, hidden_size=24, vocab_size=50), seed=3)
    for name, (old_limit, limit) in TRANSITIONS.items():
        for kind, new in (("same", other), ("grown", grown)) if name in GROWN else (("same", other),):
            case = work / f"{kind}-{name}"
            bystanders(case / "old")
            save(model, case / "old", max_shard_bytes=old_limit)
            save(new, case / "new")
            (case / "limit").write_text(str(limit), encoding="utf-8")
            news[case.name] = new
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(work)], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return work, news


def outcomes(case: Path, old: Model, new: Model) -> list[str]:
    """What loads from each folder, in the order of the steps at which its save was killed."""
    found = []
    for number in range(1, len(list(case.glob("killed-*"))) + 1):
        try:
            loaded = load(case / f"killed-{number}")
        except (ValueError, OSError) as error:
            found.append(f"step {number}: {str(error)[:200]}")
            continue
        found.append("old" if same(loaded, old) else "new" if same(loaded, new) else f"step {number}: a mixture")
    return found


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(
    killed: tuple[Path, dict[str, Model]], model: Model, transition: str
) -> None:
    """SIGKILL at every step. The old weights load bitwise up to the one step that makes the new ones current."""
    work, news = killed
    case = work / f"same-{transition}"
    found = outcomes(case, model, news[case.name])
    assert len(found) > 5
    assert set(found) == {"old", "new"}, found
    assert found == sorted(found, key="old new".index), "once new, always new"
    assert found[0] == "old"
    assert found[-1] == "new"
    for folder in case.glob("killed-*"):
        assert_untouched(folder, {"tokenizer.json": b"{}", "optimizer.safetensors": b"not a checkpoint of the model"})


@pytest.mark.parametrize("transition", GROWN)
def test_a_killed_save_of_another_configuration_leaves_the_old_checkpoint_or_the_new_one(
    killed: tuple[Path, dict[str, Model]], model: Model, transition: str
) -> None:
    """The same when the new model has other sizes: weights never stand beside a configuration that is not theirs."""
    work, news = killed
    case = work / f"grown-{transition}"
    found = outcomes(case, model, news[case.name])
    assert set(found) == {"old", "new"}, found


@pytest.mark.parametrize("limit", [BIG, SHARD], ids=["to single", "to shards"])
@pytest.mark.parametrize("transition", ["single-shards", "shards-fewer"])
def test_the_next_save_clears_what_a_killed_one_left(
    killed: tuple[Path, dict[str, Model]], tmp_path: Path, model: Model, transition: str, limit: int
) -> None:
    """Half-written files and shards that no index names would otherwise stay for ever, at gigabytes each."""
    work, _ = killed
    others = set(bystanders(tmp_path / "others")) | {"sub"}
    for folder in (work / f"same-{transition}").glob("killed-*"):
        again = tmp_path / folder.name
        shutil.copytree(folder, again)
        save(model, again, max_shard_bytes=limit)
        assert_same(load(again), model)
        listed = {path.name for path in checkpoint.checkpoint_files(again)}
        assert files(again) - others - listed - {"config.json", INDEX} == set(), folder.name


def test_the_file_header_names_the_framework(single: Path) -> None:
    """Other readers of safetensors files refuse one without ``format``."""
    with safe_open(single / SINGLE, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
