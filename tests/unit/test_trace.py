"""Comparing traces and checkpoints: the first layer and tensor that part are named, and nothing else is claimed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import Golden
from tests.unit.support import random_model, small_config, tokens
from v41lib import load, save
from v41lib.trace import STAGES, diff_checkpoints, diff_traces, load_trace, order_of, save_trace


def test_a_trace_survives_its_file(tiny: Golden, tmp_path: Path) -> None:
    trace = tiny.model.trace(tiny.ids)
    save_trace(trace, tmp_path / "trace.npz")
    again = load_trace(tmp_path / "trace.npz")
    assert list(again) == list(trace)
    for name, value in trace.items():
        assert again[name].dtype == value.numpy().dtype
        assert np.array_equal(again[name], value.numpy()), name
    comparison = diff_traces(trace, again, atol=0)
    assert not comparison.differences
    assert comparison.first is None
    assert (comparison.only_a, comparison.only_b) == ((), ())
    assert set(comparison.compared) == set(trace)


def test_a_bf16_trace_survives_its_file(tmp_path: Path) -> None:
    """NumPy has no BF16; every BF16 number is an FP32 number."""
    trace = random_model(small_config(), dtype=torch.bfloat16).trace(tokens(5))
    save_trace(trace, tmp_path / "trace.npz")
    assert not diff_traces(trace, load_trace(tmp_path / "trace.npz"), atol=0).differences


@pytest.mark.parametrize("name", ["trace.npz", "trace", "trace.v1"])
def test_a_trace_is_read_from_the_path_it_was_written_to(name: str, tmp_path: Path) -> None:
    save_trace({"logits": torch.ones(1, 2, 3)}, tmp_path / name)
    assert load_trace(tmp_path / name)["logits"].shape == (1, 2, 3)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY", b"text"])
def test_a_file_that_is_no_trace_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        load_trace(path)
    assert str(path) in str(error.value)


def test_a_truncated_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_trace({"logits": torch.ones(100, 100)}, path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError) as error:
        load_trace(path)
    assert str(path) in str(error.value)


def test_a_missing_trace_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "none.npz")


# --- which comes first -----------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer", "weight", "first"),
    [
        (3, "attn.wq_b.weight", "attn_out.3"),
        (3, "attn.wkv.weight", "window.3"),
        (3, "attn_norm.weight", "attn_in.3"),
        (3, "ffn_norm.weight", "ffn_in.3"),
        (3, "ffn.shared_experts.w2.weight", "ffn_out.3"),
        (3, "ffn.gate.weight", "route.3"),
        (3, "hc_attn.fn", "ffn_in.3"),
        (3, "hc_ffn.fn", "streams.3"),
        (2, "attn.compressor.wkv.weight", "main.2"),
        (2, "attn.indexer.wk.weight", "keys.2"),
        (4, "attn.indexer.wq_b.weight", "topk.4"),
        (5, "attn.indexer.wq_b.weight", "topk.5"),
        (0, "attn_norm.weight", "attn_in.0"),
    ],
)
def test_a_broken_layer_is_named_with_the_first_tensor_that_shows_it(layer: int, weight: str, first: str) -> None:
    """One weight of one layer reversed, in a model of seven layers."""
    model, ids = random_model(small_config()), tokens(25)
    before = model.trace(ids)
    tensor = model.get_parameter(f"layers.{layer}.{weight}")
    tensor.copy_(tensor.flip(0))
    comparison = diff_traces(before, model.trace(ids))
    assert comparison.first is not None
    assert comparison.first.name == first
    assert comparison.differences[-1].name == "logits", "the damage is followed to the end"
    assert first in str(comparison.first)
    assert {difference.name for difference in comparison.differences} <= set(comparison.compared)
    earlier = comparison.compared[: comparison.compared.index(first)]
    assert all(order_of(name) < order_of(first) for name in earlier)


def test_names_sort_in_the_order_of_computation() -> None:
    model = random_model(small_config())
    trace = model.trace(tokens(20))
    assert sorted(trace, key=order_of) == ordered_as_written(list(trace))
    names = ["logits", "streams.10", "attn_in.10", "streams.9", "streams.2"]
    assert sorted(names, key=order_of) == ["streams.2", "streams.9", "attn_in.10", "streams.10", "logits"]
    weights = ["norm.weight", "layers.10.attn.wkv.weight", "layers.9.ffn.gate.weight", "embed.weight", "head.weight"]
    ordered = sorted(weights, key=order_of)
    assert ordered[:3] == ["embed.weight", "layers.9.ffn.gate.weight", "layers.10.attn.wkv.weight"]


def ordered_as_written(names: list[str]) -> list[str]:
    """The trace's own order, but for the attention's tensors, which it notes together when the layer is done."""
    attention = [stage for stage in STAGES if stage in ("main", "keys", "window", "scored", "topk", "cand")]
    out = []
    for layer in range(7):
        own = [name for name in names if name.endswith(f".{layer}")]
        inner = sorted(
            (name for name in own if name.split(".")[0] in attention), key=lambda n: attention.index(n.split(".")[0])
        )
        rest = [name for name in own if name not in inner]
        out += [rest[0], *inner, *rest[1:]]
    return [*out, "logits"]


# --- what counts as different ----------------------------------------------------------------------------------------


def test_floats_are_compared_to_the_tolerance_and_the_place_is_named() -> None:
    a = torch.zeros(2, 3)
    b = a.clone()
    b[1, 2] = 0.5
    assert not diff_traces({"x.0": a}, {"x.0": b}, atol=0.5).differences
    found = diff_traces({"x.0": a}, {"x.0": b}, atol=0.4).first
    assert found is not None
    assert found.largest == 0.5
    assert "[1, 2]" in str(found)
    assert "0.5" in str(found)
    assert "0.4" in str(found)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_a_difference_unless_both_have_it(bad: float) -> None:
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    b[0, 1] = bad
    assert not diff_traces({"x.0": b}, {"x.0": b.clone()}).differences
    for left, right in ((a, b), (b, a)):
        found = diff_traces({"x.0": left}, {"x.0": right}, atol=1e9).first
        assert found is not None
        assert "[0, 1]" in str(found)
    c = b.clone()
    c[0, 1] = -bad if bad == bad else 1.0
    assert diff_traces({"x.0": b}, {"x.0": c}, atol=1e9).differences


def test_selections_and_routes_are_sets() -> None:
    a = {"topk.2": torch.tensor([[[0, 3, -1]]]), "route.2": torch.tensor([[1, 2]])}
    b = {"topk.2": torch.tensor([[[-1, 3, 0]]]), "route.2": torch.tensor([[2, 1]])}
    assert not diff_traces(a, b).differences
    c = {"topk.2": torch.tensor([[[0, 4, -1]]]), "route.2": torch.tensor([[2, 3]])}
    comparison = diff_traces(a, c)
    assert [difference.name for difference in comparison.differences] == ["topk.2", "route.2"]
    assert "1 of 1 rows" in str(comparison.first)
    assert "sets" in str(comparison.first)


def test_other_integers_are_compared_in_order() -> None:
    assert diff_traces({"ids": torch.tensor([1, 2])}, {"ids": torch.tensor([2, 1])}).differences


def test_rows_that_differ_are_counted() -> None:
    a = torch.arange(12).reshape(1, 4, 3)
    b = a.clone()
    b[0, 1] += 100
    b[0, 3, 0] = 99
    assert "2 of 4 rows" in str(diff_traces({"topk.0": a}, {"topk.0": b}).first)


def test_candidates_count_only_where_visible() -> None:
    """Ratio 1: entry c is visible to query s from s = c on. Implementations mark the rest as they like."""
    a, b = torch.zeros(1, 3, 3, dtype=torch.bool), torch.ones(1, 3, 3, dtype=torch.bool).triu(1)
    assert not diff_traces({"cand.4": a}, {"cand.4": b}).differences
    b[0, 2, 0] = True
    assert diff_traces({"cand.4": a}, {"cand.4": b}).differences


def test_shapes_and_missing_names_are_said() -> None:
    comparison = diff_traces(
        {"x.0": torch.zeros(2, 3), "y.1": torch.zeros(1), "a.0": torch.zeros(1)},
        {"x.0": torch.zeros(3, 2), "z.1": torch.zeros(1), "z.0": torch.zeros(1)},
    )
    assert "[2, 3]" in str(comparison.first)
    assert "[3, 2]" in str(comparison.first)
    assert comparison.compared == ("x.0",)
    assert comparison.only_a == ("a.0", "y.1")
    assert comparison.only_b == ("z.0", "z.1")


def test_numbers_and_empty_tensors_can_be_compared() -> None:
    assert diff_traces({"n": torch.tensor(3)}, {"n": torch.tensor(4)}).first is not None
    assert diff_traces({"n": torch.tensor(3)}, {"n": torch.tensor(3)}).first is None
    empty = torch.zeros(1, 3, 0, dtype=torch.long)
    assert diff_traces({"topk.2": empty}, {"topk.2": empty.clone()}).first is None


def test_a_trace_of_arrays_and_one_of_tensors_compare(tiny: Golden) -> None:
    """The recorded trace against the live one: what other implementations record, no more."""
    comparison = diff_traces(tiny.model.trace(tiny.ids), tiny.trace)
    assert not comparison.differences
    assert set(comparison.compared) == set(tiny.trace)
    assert "logits" in comparison.only_a


# --- checkpoints -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_two_checkpoints(tmp_path: Path) -> None:
    model = random_model(small_config())
    save(model, tmp_path / "a")
    save(model, tmp_path / "b", max_shard_bytes=5000)
    same = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert not same.differences
    assert len(same.compared) == len(load(tmp_path / "a").state_dict()) + 7 * 3 * (
        4 - 1
    )  # experts are stored one by one
    for layer in (5, 3):
        model.layers[layer].attn.wkv.weight[1, 2] += 0.25
    model.norm.weight[0] += 1
    save(model, tmp_path / "b")
    comparison = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert [difference.name for difference in comparison.differences] == [
        "layers.3.attn.wkv.weight",
        "layers.5.attn.wkv.weight",
        "norm.weight",
    ]
    assert comparison.first is not None
    assert comparison.first.largest == pytest.approx(0.25)
    assert not diff_checkpoints(tmp_path / "a", tmp_path / "b", atol=1.001).differences


def test_checkpoints_of_other_shapes_and_layers(tmp_path: Path) -> None:
    save(random_model(small_config()), tmp_path / "a")
    save(random_model(small_config(n_routed_experts=5, index_source_layer_ids=[2, 4])), tmp_path / "b")
    comparison = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    assert comparison.only_a == ("layers.5.attn.indexer.weights_proj.weight", "layers.5.attn.indexer.wq_b.weight")
    assert "layers.0.ffn.experts.4.w1.weight" in comparison.only_b
    shapes = [str(difference) for difference in comparison.differences if "gate.bias" in difference.name]
    assert all("[4]" in text and "[5]" in text for text in shapes)
    assert shapes


def test_bf16_and_fp32_of_one_model_compare_by_value(tmp_path: Path) -> None:
    model = random_model(small_config(), dtype=torch.bfloat16)
    save(model, tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b")
    assert not diff_checkpoints(tmp_path / "a", tmp_path / "b").differences


@pytest.mark.parametrize("side", [0, 1])
def test_a_corrupt_checkpoint_is_named(tmp_path: Path, side: int) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        save(random_model(small_config()), folder)
    bad = folders[side] / "model.safetensors"
    bad.write_bytes(bad.read_bytes()[:1000])
    with pytest.raises(ValueError) as error:
        diff_checkpoints(*folders)
    assert str(bad) in str(error.value)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    save(random_model(small_config()), tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        diff_checkpoints(tmp_path / "a", tmp_path / "nowhere")
