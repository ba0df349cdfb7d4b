"""Released tensor names and files to modules and back: safetensors, one file or shards with an index.

Matrices may be plain (FP32, BF16) or in the released formats: dense ones in FP8 E4M3 with one power-of-two scale for a
32 x 32 tile, routed experts in MXFP4 with one for 32 inputs, each scale tensor beside its weight. Loading looks at
every header first and reports all that is missing, extra or misshapen in one error. Saving writes everything beside
the old files, then a journal of the renames to make: until the journal is there the old checkpoint is whole, and from
then on whoever opens the folder next finishes the renames.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from v41lib.config import Config
from v41lib.model import Block, Model, check_dtype
from v41lib.nn import quant
from v41lib.plan import plan_layers

SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
JOURNAL = ".save-journal.json"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")  # the weight files that a save may replace or remove
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


class Reader:
    """The tensors of a checkpoint by name, whatever file and format each lies in; reads only what is asked for."""

    def __init__(self, folder: Path, stack: ExitStack, prefix: str = "") -> None:
        home = _weight_map(folder)
        self.files = {}
        for path in checkpoint_files(folder, prefix):
            file = stack.enter_context(opened(path))
            # Where two shards hold the same tensor, the index says which one counts.
            names = [name for name in file.keys() if home.get(name, path.name) == path.name]  # noqa: SIM118
            self.files.update(dict.fromkeys(names, file))

    def is_packed(self, name: str) -> bool:
        """Whether ``name`` is stored in one of the released formats, and so has a scale."""
        return name in self.files and self.files[name].get_slice(name).get_dtype() in ("F8_E4M3", "I8")

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

    def weights(self) -> set[str]:
        """The names of all tensors but the scales that belong to packed ones."""
        return {
            n for n in self.files if not (n.endswith(".scale") and self.is_packed(n.removesuffix(".scale") + ".weight"))
        }

    def read(self, name: str, shape: torch.Size | None = None) -> Tensor:
        """The values of one tensor, dequantised if it is packed; ``shape`` tells an odd width from its padding."""
        stored: Tensor = self.files[name].get_tensor(name)
        if stored.dtype not in (torch.float8_e4m3fn, torch.int8):
            return stored
        scale = self.files[scale_name(name)].get_tensor(scale_name(name))
        if stored.dtype == torch.int8:
            return mxfp4_values(stored, scale, shape[-1] if shape else 2 * stored.shape[-1])
        return fp8_values(stored, scale)


def load(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """Build the model that ``folder/config.json`` describes and read its weights, plain or in the released formats.

    ``dtype`` is that of the matrices; norms' arithmetic, routers, mHC, sinks, compressors and the head stay FP32.
    Raises ``CheckpointError`` (a ``ValueError``) for a missing, truncated or corrupt file, by name, and for tensors
    that are missing, extra or misshapen, all in one message; ``FileNotFoundError`` when there is no checkpoint.
    A save that was interrupted while it renamed its files is finished first.
    """
    folder = Path(folder)
    config = _config(folder)
    model = Model(config, device="meta", dtype=dtype)
    with ExitStack() as stack:
        reader = Reader(folder, stack)
        wanted = {name: list(tensor.shape) for name, tensor in released_tensors(model)}
        problems = [found for name, shape in wanted.items() if (found := reader.problem(name, shape))]
        problems += [f"extra      {name}" for name in reader.files if not _belongs(name, wanted, config, reader)]
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
    check_dtype(dtype)
    if not 0 <= layer < text.num_hidden_layers:
        raise ValueError(f"layer = {layer}: layers are 0 to {text.num_hidden_layers - 1}")
    prefix = f"layers.{layer}"
    with torch.device("meta"):
        block = Block(text, plan_layers(text)[layer], dtype)
    with ExitStack() as stack:
        reader = Reader(folder, stack, f"{prefix}.")
        wanted = {name: list(tensor.shape) for name, tensor in released_tensors(block, prefix)}
        _refuse(folder, [found for name, shape in wanted.items() if (found := reader.problem(name, shape))])
        block.to_empty(device=device)
        _fill(block, prefix, reader)
    return block


def _config(folder: Path) -> Config:
    finish_interrupted_save(folder)
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder}: no {CONFIG} there, so no checkpoint")
    config = Config.from_file(folder / CONFIG)
    if config.text.engram_layer_ids:
        raise CheckpointError(
            f"{folder}: engram_layer_ids = {list(config.text.engram_layer_ids)}: this version does not compute Engram"
        )
    return config


def _fill(module: nn.Module, prefix: str, reader: Reader) -> None:
    for name, target in released_tensors(module, prefix):
        target.copy_(reader.read(name, target.shape))


def _belongs(name: str, wanted: dict[str, list[int]], config: Config, reader: Reader) -> bool:
    """Whether a tensor of the file is one of the model's, its scale, or of a part that the config declares."""
    parts: tuple[str, ...] = VISION_PARTS if config.vision else ()
    parts += DRAFT_PARTS if config.text.num_nextn_predict_layers else ()
    weight = name.removesuffix(".scale") + ".weight"
    is_scale = name.endswith(".scale") and weight in wanted and reader.is_packed(weight)
    return name in wanted or is_scale or name.startswith(parts)


def _refuse(folder: Path, problems: list[str]) -> None:
    if problems:
        raise CheckpointError(f"{folder}: {len(problems)} tensors do not fit its {CONFIG}:\n  " + "\n  ".join(problems))


def checkpoint_files(folder: Path, prefix: str = "") -> list[Path]:
    """The weight files that hold tensors whose names begin with ``prefix``, in order.

    Raises ``CheckpointError`` naming those that an index lists and that are not there.
    """
    finish_interrupted_save(folder)
    weight_map = _weight_map(folder)
    if not weight_map:
        if not (folder / SINGLE).is_file():
            raise FileNotFoundError(f"{folder}: neither {SINGLE} nor {INDEX} there")
        return [folder / SINGLE]
    shards = sorted({file for name, file in weight_map.items() if name.startswith(prefix)})
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder / INDEX} lists files that are not there: {', '.join(missing)}")
    return [folder / name for name in shards]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name to file name, from the index; empty for a checkpoint without one."""
    if not (folder / INDEX).is_file():
        return {}
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        outside = [file for file in weight_map.values() if file != os.path.basename(file)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: not a safetensors index ({error!r})") from error
    if outside or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: must name files of its own folder, not {outside or 'none'}")
    return dict(weight_map)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """One weight file. Raises ``CheckpointError`` naming one that is truncated or corrupt."""
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

    ``precision`` "plain" keeps every dtype; "released" rounds dense matrices to FP8 and experts to MXFP4. However it is
    interrupted, the folder holds the old checkpoint or the new one, whole. Files that are not a checkpoint's are left
    alone. Raises ``ValueError`` for a model on the meta device or an argument out of range.
    """
    if precision not in get_args(Precision):
        raise ValueError(f"precision = {precision!r}: must be one of {', '.join(get_args(Precision))}")
    if model.device.type == "meta":
        raise ValueError("the model is on the meta device: it has shapes but no weights to save")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes = {max_shard_bytes}: must be positive")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    finish_interrupted_save(folder)
    for leftover in folder.glob(".*.partial"):  # of a save that ended before its journal
        if _final_name(leftover) == JOURNAL or _is_ours(_final_name(leftover)):
            leftover.unlink()

    shards = _shards(stored_tensors(model, precision), max_shard_bytes)
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    texts = {CONFIG: model.config.to_json()}
    if count > 1:
        weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
        total = sum(value.nbytes for tensors in shards for value in tensors.values())
        texts[INDEX] = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n"
    old = {path.name for path in folder.iterdir() if OURS.fullmatch(path.name) or path.name == INDEX}
    new = [*names, *texts]
    texts[JOURNAL] = json.dumps({"rename": new, "remove": sorted(old - set(new))})
    try:
        for name, tensors in zip(names, shards, strict=True):
            contiguous = {key: value.contiguous() for key, value in tensors.items()}
            save_file(contiguous, _partial(folder, name), {"format": "pt"})
        for name, content in texts.items():
            _partial(folder, name).write_text(content, encoding="utf-8")
        for name in (*names, *texts):
            _flush(_partial(folder, name))
        _flush(folder)
        os.replace(_partial(folder, JOURNAL), folder / JOURNAL)  # from here on the new checkpoint counts
    except BaseException:
        if not (folder / JOURNAL).exists():
            for name in (*names, *texts):
                _partial(folder, name).unlink(missing_ok=True)
        raise
    _flush(folder)
    finish_interrupted_save(folder)


def finish_interrupted_save(folder: Path) -> None:
    """Make the renames that a journal lists, if there is one; each may have been made already.

    Raises ``CheckpointError`` for a journal that is damaged, names other files than a checkpoint's, or one that is
    nowhere, and when the folder cannot be written to: it is then neither the old checkpoint nor the new.
    """
    path = folder / JOURNAL
    if not path.is_file():
        return
    try:
        journal = json.loads(path.read_text(encoding="utf-8"))
        renames, removals = list(journal["rename"]), list(journal["remove"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a journal of a save ({error!r}); restore the checkpoint") from error
    # A folder may come from anywhere: a journal must not reach files that no save would have written.
    foreign = [name for name in (*renames, *removals) if not _is_ours(name)]
    if foreign:
        raise CheckpointError(f"{path}: names files that are no part of a checkpoint: {foreign}")
    lost = [name for name in renames if not _partial(folder, name).exists() and not (folder / name).exists()]
    if lost:
        raise CheckpointError(f"{path}: a save was interrupted and its files are gone: {', '.join(lost)}")
    try:
        for name in renames:
            with suppress(FileNotFoundError):  # made already, here or by another process
                os.replace(_partial(folder, name), folder / name)
        for name in removals:
            (folder / name).unlink(missing_ok=True)
        _flush(folder)
        path.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise CheckpointError(
            f"{folder}: a save was interrupted while it renamed files; open the folder once where it can be written to"
        ) from error


def _is_ours(name: object) -> bool:
    """Whether a save may write or remove a file of this name."""
    return isinstance(name, str) and (name in (CONFIG, INDEX) or OURS.fullmatch(name) is not None)


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


def _partial(folder: Path, name: str) -> Path:
    return folder / f".{name}.partial"


def _final_name(partial: Path) -> str:
    return partial.name.removeprefix(".").removesuffix(".partial")


def _flush(path: Path) -> None:
    """Make a file, or a folder's renames, last through a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
