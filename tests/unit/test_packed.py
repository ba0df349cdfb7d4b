"""Packed storage equals fake quantisation to the bit, takes the released bytes, and the weight formats round-trip."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import v41lib
from v41lib import checkpoint
from v41lib.checkpoint import CheckpointError, released_tensors
from v41lib.nn import quant
from v41lib.nn.quant import FORMATS, FP4, FP8, MXFP4, Format, pack, round_trip, unpack


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(
    name=st.sampled_from(sorted(FORMATS)),
    width=st.integers(1, 70),
    exponent=st.integers(-30, 20),
    seed=st.integers(0, 2**16),
)
def test_packing_equals_the_round_trip_bitwise(name: str, width: int, exponent: int, seed: int) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    packed = pack(x, FORMATS[name])
    assert same_bits(unpack(packed), round_trip(x, FORMATS[name]))
    assert packed.elements.shape[-1] + packed.scales.shape[-1] == FORMATS[name].row_bytes(width)


@pytest.mark.parametrize(
    ("fmt", "width", "size"),
    [(FP4, 512, 288), (MXFP4, 128, 68), (FP8, 512, 528), (FP4, 17, 11), (MXFP4, 33, 19)],
)
def test_row_bytes(fmt: Format, width: int, size: int) -> None:
    assert fmt.row_bytes(width) == size
    assert pack(torch.ones(7, width), fmt).nbytes == 7 * size


def test_nibbles_are_the_codes_with_the_even_channel_low() -> None:
    x = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]])
    packed = pack(x, FP4)
    assert packed.elements[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert packed.scales[0].tolist() == [0x38]  # E4M3 one


def test_scale_bytes_of_powers_of_two_are_biased_exponents() -> None:
    packed = pack(torch.tensor([[6.0], [6.01], [3.0], [0.0]]), MXFP4)
    assert packed.scales[:, 0].tolist() == [127, 128, 126, 1]  # 1, 2, 1/2, 2^-126


def test_a_row_that_does_not_fit_its_width_is_refused() -> None:
    packed = pack(torch.ones(2, 32), FP4)
    with pytest.raises(ValueError, match="16 element bytes and 2 scales: a row of 48 channels has 24 and 3"):
        unpack(quant.Packed(FP4, 48, packed.elements, packed.scales))


def test_an_fp8_weight_has_one_scale_a_tile() -> None:
    weight = torch.zeros(33, 65)
    weight[0, 0], weight[32, 64] = 448.0, 1.0
    elements, scale = checkpoint.fp8_weight(weight)
    assert elements.shape == (33, 65)
    assert scale.shape == (2, 3)
    assert scale.float()[0, 0] == 1.0
    assert scale.float()[1, 2] == 2.0**-8  # 2^ceil(log2(1/448))
    assert torch.equal(checkpoint.fp8_values(elements, scale), weight)


@pytest.mark.parametrize("shape", [(64, 64), (33, 65), (1, 1), (5, 40)])
def test_weight_formats_are_idempotent(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    once = checkpoint.fp8_values(*checkpoint.fp8_weight(weight))
    assert torch.equal(checkpoint.fp8_values(*checkpoint.fp8_weight(once)), once)
    four = checkpoint.mxfp4_values(*checkpoint.mxfp4_weight(weight), shape[1])
    assert same_bits(four, round_trip(weight, MXFP4))
    assert torch.equal(checkpoint.mxfp4_values(*checkpoint.mxfp4_weight(four), shape[1]), four)


@pytest.fixture(scope="module")
def released_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    v41lib.save(v41lib.Model(v41lib.preset("wide"), seed=2), folder, max_shard_bytes=60_000, precision="released")
    return folder


def test_released_precision_stores_the_released_formats(released_folder: Path) -> None:
    kinds = {}
    for path in checkpoint.checkpoint_files(released_folder):
        with safe_open(path, framework="pt") as file:
            headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            kinds.update({name: (header.get_dtype(), header.get_shape()) for name, header in headers.items()})
    assert kinds["layers.1.attn.wq_b.weight"] == ("F8_E4M3", [128, 32])
    assert kinds["layers.1.attn.wq_b.scale"] == ("F8_E8M0", [4, 1])
    assert kinds["layers.1.ffn.experts.0.w1.weight"] == ("I8", [24, 24])
    assert kinds["layers.1.ffn.experts.0.w1.scale"] == ("F8_E8M0", [24, 2])
    assert kinds["layers.1.ffn.shared_experts.w2.weight"][0] == "F8_E4M3"
    assert kinds["layers.1.attn.indexer.wq_b.weight"][0] == "F8_E4M3"
    for plain in ("attn.compressor.wkv", "attn.indexer.wk", "attn.indexer.weights_proj", "ffn.gate"):
        assert kinds[f"layers.1.{plain}.weight"][0] == "F32"
    assert kinds["embed.weight"][0] == "F32"


def test_released_precision_survives_loading_and_saving(released_folder: Path, tmp_path: Path) -> None:
    first = v41lib.load(released_folder)
    v41lib.save(first, tmp_path, precision="released")
    second = v41lib.load(tmp_path)
    for (name, a), (_, b) in zip(released_tensors(first), released_tensors(second), strict=True):
        assert torch.equal(a, b), name
    assert torch.isfinite(first(torch.arange(20).unsqueeze(0))).all()


def test_one_layer_is_read_without_the_other_shards(released_folder: Path, tmp_path: Path) -> None:
    whole = v41lib.load(released_folder)
    needed = set(checkpoint.checkpoint_files(released_folder, "layers.3."))
    others = set(checkpoint.checkpoint_files(released_folder)) - needed
    assert others
    for path in (*needed, released_folder / "config.json", released_folder / "model.safetensors.index.json"):
        (tmp_path / path.name).symlink_to(path)
    layer = v41lib.load_layer(tmp_path, 3)
    for (name, a), (_, b) in zip(released_tensors(layer), released_tensors(whole.blocks[3]), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(CheckpointError, match="files that are not there"):
        v41lib.load(tmp_path)


def test_one_layer_reads_its_own_bytes_only(released_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = checkpoint.Reader.read
    monkeypatch.setattr(
        checkpoint.Reader, "read", lambda self, name, shape: asked.append(name) or read(self, name, shape)
    )
    v41lib.load_layer(released_folder, 3)
    assert asked
    assert all(name.startswith("layers.3.") for name in asked)


def test_a_layer_that_does_not_exist_is_refused(released_folder: Path) -> None:
    with pytest.raises(ValueError, match="layer = 7: layers are 0 to 6"):
        v41lib.load_layer(released_folder, 7)


def test_a_lost_or_misshapen_scale_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    v41lib.save(v41lib.Model(v41lib.preset("tiny")), tmp_path, precision="released")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.0.attn.wq_b.scale"]
    tensors["layers.0.attn.wkv.scale"] = tensors["layers.0.attn.wkv.scale"][:, :0].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        v41lib.load(tmp_path)
    assert "missing    layers.0.attn.wq_b.scale [2, 1]" in str(error.value)
    assert "misshapen  layers.0.attn.wkv.scale [1, 0], must be [1, 1]" in str(error.value)


def test_an_unknown_precision_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="precision = 'fp8': must be one of plain, released"):
        v41lib.save(v41lib.Model(v41lib.preset("tiny")), tmp_path / "new", precision="fp8")  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
