"""Released tensor names and files to modules and back: safetensors, one file or shards with an index.

Loading looks at every header first and reports all that is missing, extra or misshapen in one error. Saving writes
everything beside the old files and only then swaps, so an interruption leaves a checkpoint that loads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from v41lib.config import Config
from v41lib.model import Model

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# Parts of the released checkpoint that are not the text backbone; skipped when the config declares them.
VISION_PARTS = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
DRAFT_PARTS = ("mtp.",)
READABLE = {"F32": torch.float32, "BF16": torch.bfloat16}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as the model its config describes; the message lists every reason."""


def released_tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters under their released names (shared/TENSOR_NAMES layout), stacked experts one by one.

    What is yielded are views: writing to them writes to the model.
    """
    for name, parameter in model.named_parameters():
        name = name.replace("hc_attn.", "hc_attn_").replace("hc_ffn.", "hc_ffn_")
        if ".ffn.experts." in name:
            stem, matrix = name.rsplit(".", 1)
            for expert, weight in enumerate(parameter.data):
                yield f"{stem}.{expert}.{matrix}.weight", weight
        else:
            yield name, parameter.data


def load(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """Build the model that ``folder/config.json`` describes and read its weights (FP32 or BF16 files).

    ``dtype`` is that of the matrices; norms' arithmetic, routers, mHC, sinks, compressors and the head stay FP32.
    Raises ``CheckpointError`` (a ``ValueError``) for a missing, truncated or corrupt file, by name, and for tensors
    that are missing, extra or misshapen, all in one message; ``FileNotFoundError`` when there is no checkpoint.
    """
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: no {CONFIG} there, so no checkpoint")
    config = Config.from_file(folder / CONFIG)
    if config.text.engram_layer_ids:
        raise CheckpointError(
            f"{folder}: engram_layer_ids = {list(config.text.engram_layer_ids)}: this version does not compute Engram"
        )
    model = Model(config, device="meta", dtype=dtype)
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in checkpoint_files(folder)}
        found = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        _check(folder, model, found)
        model.to_empty(device=device)
        for name, target in released_tensors(model):
            target.copy_(found[name].get_tensor(name))
    return model


def checkpoint_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint, in order. Raises ``CheckpointError`` naming those an index lists in vain."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX} there")
        return [folder / SINGLE]
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: not a safetensors index ({error!r})") from error
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder / INDEX} lists files that are not there: {', '.join(missing)}")
    return [folder / name for name in shards]


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: truncated or corrupt, {path.stat().st_size:,} bytes; fetch it again ({error})"
        ) from error


def _check(folder: Path, model: Model, found: dict[str, Any]) -> None:
    wanted = {name: list(tensor.shape) for name, tensor in released_tensors(model)}
    skipped: tuple[str, ...] = VISION_PARTS if model.config.vision else ()
    skipped += DRAFT_PARTS if model.config.text.num_nextn_predict_layers else ()
    problems = []
    for name, shape in wanted.items():
        if name not in found:
            problems.append(f"missing    {name} {shape}")
            continue
        header = found[name].get_slice(name)
        if header.get_shape() != shape:
            problems.append(f"misshapen  {name} {header.get_shape()}, must be {shape}")
        elif header.get_dtype() not in READABLE:
            problems.append(f"unreadable {name} is {header.get_dtype()}, must be one of {', '.join(READABLE)}")
    problems += [f"extra      {name}" for name in found if name not in wanted and not name.startswith(skipped)]
    if problems:
        raise CheckpointError(f"{folder}: {len(problems)} tensors do not fit its {CONFIG}:\n  " + "\n  ".join(problems))


def save(model: Model, folder: str | Path, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write ``config.json`` and the weights under released names, in shards of at most ``max_shard_bytes``.

    Every file is complete under a temporary name before the first is renamed; shards never take an old shard's name,
    and the rename of the index (or of the single file, then the old index's removal) is what makes the new weights
    current. Files that are not a checkpoint's are left alone. Raises ``ValueError`` for a model on the meta device.
    """
    if model.device.type == "meta":
        raise ValueError("the model is on the meta device: it has shapes but no weights to save")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be positive")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = [path.name for path in checkpoint_files(folder)] if (folder / INDEX).is_file() else []
    shards = _shards(model, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else _unused_names(folder, len(shards))

    renames: list[tuple[Path, Path]] = []
    try:
        for name, tensors in zip(names, shards, strict=True):
            renames.append((_temporary(folder, name), folder / name))
            save_file({key: value.contiguous() for key, value in tensors.items()}, renames[-1][0], {"format": "pt"})
        texts = {CONFIG: model.config.to_json()}
        if len(shards) > 1:
            weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
            total = sum(value.nbytes for tensors in shards for value in tensors.values())
            texts[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n"
        for name, content in texts.items():
            renames.append((_temporary(folder, name), folder / name))
            renames[-1][0].write_text(content, encoding="utf-8")
        for temporary, _ in renames:
            _flush(temporary)
    except BaseException:
        for temporary, _ in renames:
            temporary.unlink(missing_ok=True)
        raise

    for temporary, final in renames:
        os.replace(temporary, final)
    if len(shards) == 1:
        (folder / INDEX).unlink(missing_ok=True)
    for name in {SINGLE, *old} - set(names):
        (folder / name).unlink(missing_ok=True)


def _shards(model: Model, limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, tensor in released_tensors(model):
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _unused_names(folder: Path, count: int) -> list[str]:
    """The customary shard names, with a revision where an old checkpoint already has one of them."""
    revision = 0
    while True:
        suffix = f"-r{revision}" if revision else ""
        names = [f"model-{i:05d}-of-{count:05d}{suffix}.safetensors" for i in range(1, count + 1)]
        if not any((folder / name).exists() for name in names):
            return names
        revision += 1


def _temporary(folder: Path, name: str) -> Path:
    return folder / f".{name}.partial"


def _flush(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
