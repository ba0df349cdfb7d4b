"""The commands for porters: they answer, and what is wrong with their input is said without a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import v41lib
from v41lib.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"


def v41(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def said(result: Result, status: int) -> str:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    out = tmp_path / "ours.npz"
    said(v41("trace", GOLDEN / "tiny", GOLDEN / "tiny" / "input_ids.npy", "-o", out), 0)
    return out


def test_our_trace_equals_the_recorded_one(traced: Path) -> None:
    assert "equal: 17 tensors compared" in said(v41("diff", traced, GOLDEN / "tiny" / "trace_nemo.npz"), 0)


def test_diff_names_the_first_layer_that_parts(traced: Path, tmp_path: Path) -> None:
    tensors = dict(np.load(traced))
    tensors["attn_out.3"] = tensors["attn_out.3"] + 1
    tensors["streams.4"] = tensors["streams.4"] + 1
    np.savez(tmp_path / "theirs.npz", **tensors)
    output = said(v41("diff", traced, tmp_path / "theirs.npz"), 1)
    assert "first difference of 2" in output
    assert "attn_out.3" in output
    assert "streams.4" not in output
    assert "streams.4" in said(v41("diff", "--all", traced, tmp_path / "theirs.npz"), 1)


def test_diff_compares_released_formats_by_value(tmp_path: Path) -> None:
    """A packed checkpoint equals the plain one of the same values, and differs from the unrounded one."""
    model = v41lib.Model(v41lib.preset("wide"), seed=1)
    v41lib.save(model, tmp_path / "exact")
    v41lib.save(model, tmp_path / "packed", precision="released")
    v41lib.save(v41lib.load(tmp_path / "packed"), tmp_path / "rounded")
    assert "equal" in said(v41("diff", tmp_path / "packed", tmp_path / "rounded"), 0)
    assert "first difference" in said(v41("diff", tmp_path / "packed", tmp_path / "exact"), 1)


def test_selections_are_compared_without_their_absent_slots(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"topk.1": np.array([[[2, 1, -1, -1]]])})
    np.savez(tmp_path / "b.npz", **{"topk.1": np.array([[[1, 2]]])})
    np.savez(tmp_path / "c.npz", **{"topk.1": np.array([[[1, 3]]])})
    said(v41("diff", tmp_path / "a.npz", tmp_path / "b.npz"), 0)
    said(v41("diff", tmp_path / "a.npz", tmp_path / "c.npz"), 1)


@pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY"])
def test_ids_that_are_none_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "ids.npy").write_bytes(content)
    output = said(v41("trace", GOLDEN / "tiny", tmp_path / "ids.npy", "-o", tmp_path / "o.npz"), 1)
    assert "ids.npy: not a .npy file of token ids" in output


def test_ids_of_another_kind_are_named(tmp_path: Path, traced: Path) -> None:
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    for wrong in (tmp_path / "words.npy", traced):
        output = said(v41("trace", GOLDEN / "tiny", wrong, "-o", tmp_path / "o.npz"), 1)
        assert "must be a .npy array of integers" in output


def test_a_place_that_cannot_be_written_is_named_before_the_work(tmp_path: Path) -> None:
    ids = GOLDEN / "tiny" / "input_ids.npy"
    for place in (tmp_path / "nowhere" / "o.npz", tmp_path):
        assert "must be a file in a folder that exists" in said(v41("trace", GOLDEN / "tiny", ids, "-o", place), 1)


def test_diff_of_things_that_cannot_be_compared(tmp_path: Path, traced: Path) -> None:
    (tmp_path / "bad.npz").write_bytes(b"no")
    np.savez(tmp_path / "other.npz", **{"stream.3": np.zeros(1)})
    assert "not one of each" in said(v41("diff", traced, GOLDEN / "tiny"), 2)
    assert "bad.npz: not a readable .npz trace" in said(v41("diff", traced, tmp_path / "bad.npz"), 2)
    assert "no tensor in common" in said(v41("diff", traced, tmp_path / "other.npz"), 2)


def test_inspect_says_who_reads_whom() -> None:
    output = said(v41("inspect", "released"), 0)
    assert "763,205,315,794 parameters" in output
    assert output.count(" reuse ") == 30
    assert "130" not in said(v41("inspect", GOLDEN / "tiny"), 0).splitlines()[0]
    assert "no preset 'nothing'" in said(v41("inspect", "nothing"), 1)


def test_claims_as_text_and_as_json() -> None:
    assert "backbone-params" in said(v41("claims"), 0)
    entries = json.loads(said(v41("claims", "--json", "--verdict", "open"), 0))
    assert {entry["verdict"] for entry in entries} == {"open"}
    assert "no verdict 'maybe'" in said(v41("claims", "--verdict", "maybe"), 2)


def test_every_mistake_of_a_config_is_told_at_once(tmp_path: Path) -> None:
    values = json.loads((GOLDEN / "tiny" / "config.json").read_text())
    values["text_config"].update(hidden_size=-5, num_experts_per_tok=99, o_groups=3)
    (tmp_path / "config.json").write_text(json.dumps(values))
    output = said(v41("inspect", tmp_path), 1)
    for part in ("hidden_size = -5", "num_experts_per_tok = 99", "o_groups = 3"):
        assert part in output, part
