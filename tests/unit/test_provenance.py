"""A hash moves with what a result depends on, and with nothing else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from v41lib import provenance
from v41lib.experiments import counting, four_bits, kv_bytes
from v41lib.experiments import map as experiment
from v41lib.experiments.base import BaseParams

SOURCE = '''
from v41lib.nn.quant import round_e2m1

FACTOR = 2

def inner(x):
    """Says one thing."""
    return x * FACTOR  # a comment

def outer(x):
    return inner(x)

def unrelated(x):
    return x
'''


def module_of(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = folder / "sample.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("v41lib.sample", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "v41lib.sample", module)
    import linecache

    linecache.clearcache()
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new", "moves"),
    [
        ("Says one thing.", "Says another.", False),
        ("# a comment", "# another", False),
        ("return x\n", "return x + 1\n", False),  # unrelated() is not reached
        ("x * FACTOR", "x + FACTOR", True),
        ("FACTOR = 2", "FACTOR = 3", True),
        ("return inner(x)", "return inner(round_e2m1(x))", True),
    ],
)
def test_the_hash_moves_with_reached_code_only(
    old: str, new: str, moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = BaseParams()
    assert old in SOURCE
    before = provenance.experiment_hash(module_of(SOURCE, tmp_path, monkeypatch).outer, params)
    after = provenance.experiment_hash(module_of(SOURCE.replace(old, new), tmp_path, monkeypatch).outer, params)
    assert (before != after) is moves


def test_the_hash_moves_with_parameters() -> None:
    hashes = {provenance.experiment_hash(experiment.settled, experiment.Params(length=n)) for n in (8, 9)}
    assert len(hashes) == 2


def test_code_is_followed_through_methods_tables_and_modules() -> None:
    reached = provenance.reached_code(experiment.readers)
    for name in ("v41lib.nn.attention.Attention", "v41lib.nn.quant.round_e2m1", "v41lib.plan.plan_layers"):
        assert name in reached
    assert "v41lib.accounting.params.count" not in reached


def test_constants_are_read_to_their_last_part() -> None:
    """Tables of functions and format records count by what they hold."""
    reached = provenance.reached_code(four_bits.compare)
    assert "v41lib.experiments.four_bits.int4_round_trip" in reached
    constants = {name: text for name, text in reached.items() if ":" in name}
    assert any(name.endswith(":FP4") and "16" in text for name, text in constants.items())


@pytest.mark.parametrize("start", [experiment.settled, four_bits.settled, kv_bytes.settled, counting.settled])
def test_no_path_or_address_enters_a_hash(start: Callable[..., object]) -> None:
    for name, source in provenance.reached_code(start).items():
        assert " at 0x" not in source, name
        assert "site-packages" not in source, name
