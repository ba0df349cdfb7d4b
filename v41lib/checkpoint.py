"""Released tensor names and files to modules and back: safetensors, one file or shards with an index.

Matrices may be plain (FP32, BF16) or in the released formats: dense ones in FP8 E4M3 with one power-of-two scale for a
32 x 32 tile, routed experts in MXFP4 with one for 32 inputs, each scale tensor beside its weight. Loading looks at
every header first and reports all that is missing, extra or misshapen in one error. Saving writes everything beside
the old files and only then swaps, so an interruption leaves a checkpoint that loads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from v41lib.config import Config
from v41lib.model import Block, Model
from v41lib.nn import quant
from v41lib.plan import plan_layers

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
# Parts of the released checkpoint that are not the text backbone; skipped when the config declares them.
VISION_PARTS = ("vision.", "aligner.", "image_start", "image_end", "image_newline")
DRAFT_PARTS = ("mtp.",)
# The released format of a weight, by its module (shared/TENSOR_NAMES layout); all others are BF16 or FP32.
FP8_MODULES = (".attn.wq_a", ".attn.wq_b", ".attn.wkv", ".attn.wo_a", ".attn.wo_b", ".indexer.wq_b")
FP8_TILE = 32
Precision = Literal["plain", "released"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as the model its config describes; the message lists every reason."""


# --- names ----------------------------------------------------------------------------------------------------------


def released_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """A module's parameters under their released names, stacked experts one by one.

    What is yielded are views: writing to them writes to the module.
    """
    for name, parameter in module.named_parameters(prefix=prefix):
        name = name.replace("hc_attn.", "hc_attn_").replace("hc_ffn.", "hc_ffn_")
        if ".ffn.experts." in name:
            stem, matrix = name.rsplit(".", 1)
            for expert, weight in enumerate(parameter.data):
                yield f"{stem}.{expert}.{matrix}.weight", weight
        else:
            yield name, parameter.data


def scale_name(name: str) -> str:
    """The name of the scale tensor that belongs to a packed weight."""
    return name.removesuffix(".weight") + ".scale"


# --- the released weight formats ------------------------------------------------------------------------------------


def fp8_weight(weight: Float[Tensor, "out in"]) -> tuple[Tensor, Tensor]:
    """A matrix as E4M3 elements ``[out, in]`` and E8M0 scales, one a 32 x 32 tile (incomplete at the edges)."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % FP8_TILE, 0, -rows % FP8_TILE))
    tiles = padded.unflatten(1, (-1, FP8_TILE)).unflatten(0, (-1, FP8_TILE))
    scale = quant.block_scale(tiles.abs().amax((1, 3)), quant.FP8)
    elements = quant.round_e4m3(weight.float() / _spread(scale, rows, columns))
    return elements.to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def fp8_values(elements: Tensor, scale: Tensor) -> Float[Tensor, "out in"]:
    """The FP32 values of :func:`fp8_weight`'s result."""
    return elements.float() * _spread(scale.float(), *elements.shape)


def _spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    return scale.repeat_interleave(FP8_TILE, 0)[:rows].repeat_interleave(FP8_TILE, 1)[:, :columns]


def mxfp4_weight(weight: Float[Tensor, "out in"]) -> tuple[Tensor, Tensor]:
    """A matrix as packed E2M1 ``[out, in/2]`` int8, the even input low, and E8M0 scales ``[out, in/32]``."""
    packed = quant.pack(weight, quant.MXFP4)
    return packed.elements.view(torch.int8), packed.scales.view(torch.float8_e8m0fnu)


def mxfp4_values(elements: Tensor, scale: Tensor, columns: int) -> Float[Tensor, "out in"]:
    """The FP32 values of :func:`mxfp4_weight`'s result, for ``columns`` inputs."""
    packed = quant.Packed(quant.MXFP4, columns, elements.view(torch.uint8), scale.view(torch.uint8))
    return quant.unpack(packed)


# --- reading --------------------------------------------------------------------------------------------------------


class _Reader:
    """The tensors of a checkpoint by name, whatever file and format each lies in; reads only what is asked for."""

    def __init__(self, folder: Path, stack: ExitStack, prefix: str = "") -> None:
        self.files = {}
        for path in checkpoint_files(folder, prefix):
            file = stack.enter_context(_opened(path))
            self.files.update({name: file for name in file.keys()})  # noqa: SIM118 (not a mapping)

    def problem(self, name: str, shape: list[int]) -> str | None:
        """What keeps ``name`` from being read as a tensor of ``shape``, or None."""
        if name not in self.files:
            return f"missing    {name} {shape}"
        header = self.files[name].get_slice(name)
        kind, found = header.get_dtype(), header.get_shape()
        stored, scales = shape, None
        if kind in ("F8_E4M3", "I8") and len(shape) != 2:
            return f"unreadable {name} is {kind}, which only matrices can be"
        if kind == "F8_E4M3":
            scales = [-(-size // FP8_TILE) for size in shape]
        elif kind == "I8":
            stored, scales = [*shape[:-1], -(-shape[-1] // 2)], [*shape[:-1], -(-shape[-1] // quant.MXFP4.block)]
        elif kind not in ("F32", "BF16"):
            return f"unreadable {name} is {kind}, must be one of F32, BF16, F8_E4M3, I8 (packed MXFP4)"
        if found != stored:
            return f"misshapen  {name} {found}, must be {stored}"
        return self._scale_problem(scale_name(name), scales) if scales else None

    def _scale_problem(self, name: str, shape: list[int]) -> str | None:
        if name not in self.files:
            return f"missing    {name} {shape}"
        header = self.files[name].get_slice(name)
        if header.get_shape() != shape:
            return f"misshapen  {name} {header.get_shape()}, must be {shape}"
        return (
            None if header.get_dtype() == "F8_E8M0" else f"unreadable {name} is {header.get_dtype()}, must be F8_E8M0"
        )

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """The values of one tensor, dequantised if it is packed."""
        stored: Tensor = self.files[name].get_tensor(name)
        if stored.dtype not in (torch.float8_e4m3fn, torch.int8):
            return stored
        scale = self.files[scale_name(name)].get_tensor(scale_name(name))
        if stored.dtype == torch.int8:
            return mxfp4_values(stored, scale, shape[-1])
        return fp8_values(stored, scale)


def load(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """Build the model that ``folder/config.json`` describes and read its weights, plain or in the released formats.

    ``dtype`` is that of the matrices; norms' arithmetic, routers, mHC, sinks, compressors and the head stay FP32.
    Raises ``CheckpointError`` (a ``ValueError``) for a missing, truncated or corrupt file, by name, and for tensors
    that are missing, extra or misshapen, all in one message; ``FileNotFoundError`` when there is no checkpoint.
    """
    folder = Path(folder)
    config = _config(folder)
    model = Model(config, device="meta", dtype=dtype)
    with ExitStack() as stack:
        reader = _Reader(folder, stack)
        wanted = {name: list(tensor.shape) for name, tensor in released_tensors(model)}
        problems = [found for name, shape in wanted.items() if (found := reader.problem(name, shape))]
        problems += [f"extra      {name}" for name in reader.files if not _belongs(name, wanted, config)]
        _refuse(folder, problems)
        model.to_empty(device=device)
        _fill(model, "", reader)
    return model


def load_layer(
    folder: str | Path, layer: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Block:
    """One layer of a checkpoint, reading its tensors and nothing else, however large the rest is.

    Raises as :func:`load` does, and ``ValueError`` for a layer that the config does not have.
    """
    folder = Path(folder)
    text = _config(folder).text
    if not 0 <= layer < text.num_hidden_layers:
        raise ValueError(f"layer = {layer}: layers are 0 to {text.num_hidden_layers - 1}")
    prefix = f"layers.{layer}"
    with torch.device("meta"):
        block = Block(text, plan_layers(text)[layer], dtype)
    with ExitStack() as stack:
        reader = _Reader(folder, stack, f"{prefix}.")
        wanted = {name: list(tensor.shape) for name, tensor in released_tensors(block, prefix)}
        _refuse(folder, [found for name, shape in wanted.items() if (found := reader.problem(name, shape))])
        block.to_empty(device=device)
        _fill(block, prefix, reader)
    return block


def _config(folder: Path) -> Config:
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: no {CONFIG} there, so no checkpoint")
    config = Config.from_file(folder / CONFIG)
    if config.text.engram_layer_ids:
        raise CheckpointError(
            f"{folder}: engram_layer_ids = {list(config.text.engram_layer_ids)}: this version does not compute Engram"
        )
    return config


def _fill(module: nn.Module, prefix: str, reader: _Reader) -> None:
    for name, target in released_tensors(module, prefix):
        target.copy_(reader.read(name, target.shape))


def _belongs(name: str, wanted: dict[str, list[int]], config: Config) -> bool:
    """Whether a tensor of the file is one of the model's, its scale, or of a part that the config declares."""
    parts: tuple[str, ...] = VISION_PARTS if config.vision else ()
    parts += DRAFT_PARTS if config.text.num_nextn_predict_layers else ()
    weight = name.removesuffix(".scale") + ".weight" if name.endswith(".scale") else name
    return weight in wanted or name in wanted or name.startswith(parts)


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{folder}: {len(problems)} tensors do not fit its {CONFIG}:\n  " + "\n  ".join(problems))


def checkpoint_files(folder: Path, prefix: str = "") -> list[Path]:
    """The weight files that hold tensors whose names begin with ``prefix``, in order.

    Raises ``CheckpointError`` naming those that an index lists and that are not there.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX} there")
        return [folder / SINGLE]
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({file for name, file in weight_map.items() if name.startswith(prefix)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: not a safetensors index ({error!r})") from error
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder / INDEX} lists files that are not there: {', '.join(missing)}")
    return [folder / name for name in shards]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: truncated or corrupt, {path.stat().st_size:,} bytes; fetch it again ({error})"
        ) from error
    with file:
        yield file


# --- writing --------------------------------------------------------------------------------------------------------


def stored_tensors(model: Model, precision: Precision) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds: the parameters as they are, or matrices in the released formats with their scales."""
    for name, tensor in released_tensors(model):
        module = name.removesuffix(".weight")
        if precision == "released" and ".ffn.experts." in name:
            elements, scale = mxfp4_weight(tensor)
        elif precision == "released" and (module.endswith(FP8_MODULES) or ".shared_experts." in name):
            elements, scale = fp8_weight(tensor)
        else:
            yield name, tensor
            continue
        yield name, elements
        yield scale_name(name), scale


def save(
    model: Model, folder: str | Path, max_shard_bytes: int = 5_000_000_000, precision: Precision = "plain"
) -> None:
    """Write ``config.json`` and the weights under released names, in shards of at most ``max_shard_bytes``.

    ``precision`` "plain" keeps every dtype; "released" rounds dense matrices to FP8 and experts to MXFP4.
    Every file is complete under a temporary name before the first is renamed; shards never take an old shard's name,
    and the rename of the index (or of the single file, then the old index's removal) is what makes the new weights
    current. Files that are not a checkpoint's are left alone. Raises ``ValueError`` for a model on the meta device.
    """
    if model.device.type == "meta":
        raise ValueError("the model is on the meta device: it has shapes but no weights to save")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be positive")
    if precision not in get_args(Precision):
        raise ValueError(f"precision = {precision!r}: must be one of {', '.join(get_args(Precision))}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = [path.name for path in checkpoint_files(folder)] if (folder / INDEX).is_file() else []
    shards = _shards(stored_tensors(model, precision), max_shard_bytes)
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


def _shards(tensors: Iterator[tuple[str, Tensor]], limit: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, tensor in tensors:
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
