"""Compiled steps: the plain path's logits, no compilation after the first tokens, and a message without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters

import v41lib
from v41lib.engine import Engine, State
from v41lib.nn.compiled import CompilerError, check_compiler
from v41lib.nn.quant import FORMATS, Packed, round_trip


def stored(state: State) -> list[bytes]:
    """The bytes of every row in a packed cache."""
    (lane,) = state.cache.lanes
    rows = [ring._rows for ring in lane.rings]
    rows += [kind for source in lane.sources.values() for kind in (source.main, source.keys)]
    packed = [kind.read() for kind in rows]
    return [part.numpy().tobytes() for p in packed if isinstance(p, Packed) for part in (p.elements, p.scales)]


@cache
def can_compile() -> bool:
    """Whether this machine can: found out without the code under test, which could otherwise skip its own tests."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    command = [*name.split(), "-fsyntax-only", "-x", "c++", "-I", sysconfig.get_path("include"), "-"]
    try:
        return subprocess.run(command, input=b"#include <Python.h>\n", capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def needs_compiler() -> None:
    if not can_compile():
        pytest.skip("no C++ compiler, or no Python.h")
    check_compiler(torch.device("cpu"))  # must agree: a refusal fails the test


@pytest.mark.slow
def test_decode_is_the_plain_one_and_compiles_once() -> None:
    """Sums in another order may move a stored element across a rounding boundary; where none has, logits agree."""
    needs_compiler()
    model = v41lib.Model(v41lib.preset("tiny"))
    ids = torch.randint(0, model.config.text.vocab_size, (1, 80), generator=torch.Generator().manual_seed(0))
    a, b = Engine(model).prefill(ids[:, :40]), Engine(model).prefill(ids[:, :40])
    plain, compiled = Engine(model), Engine(model, compiled=True)
    graphs, equal = [], 0
    for token in ids[:, 40:].split(1, dim=1):
        a, b = plain.decode(a, token), compiled.decode(b, token)
        graphs.append(counters["stats"]["unique_graphs"])
        if stored(a) == stored(b):
            equal += 1
            assert (a.logits - b.logits).abs().max() < 1e-5
    assert equal > len(graphs) // 2
    assert graphs[0] <= 8  # one for each step, and attention with and without compressed rows: not one a layer
    assert graphs[4] == graphs[-1] <= 12  # and where shapes turned out to vary


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_compiled_rounding_is_exact(name: str) -> None:
    """Bit for bit, also on ties and over many binades."""
    needs_compiler()
    rounded = torch.compile(lambda x: round_trip(x, FORMATS[name]), fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    ties = torch.randint(-4096, 4096, (8, 1024), generator=generator) / 256
    spread = ties * torch.exp2(torch.randint(-20, 20, ties.shape, generator=generator).float())
    for x in (ties, spread):
        assert torch.equal(rounded(x), round_trip(x, FORMATS[name]))


def test_several_tokens_run_plain() -> None:
    """Only one token of one sequence is compiled: nothing is built for a prompt."""
    needs_compiler()
    model = v41lib.Model(v41lib.preset("tiny"))
    before = counters["stats"]["unique_graphs"]
    engine = Engine(model, compiled=True)
    state = engine.prefill(torch.zeros(1, 5, dtype=torch.int64))
    engine.decode(state, torch.zeros(1, 3, dtype=torch.int64))
    assert counters["stats"]["unique_graphs"] == before


def test_no_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = v41lib.Model(v41lib.preset("tiny"))
    with pytest.raises(CompilerError, match=r"no 'no-such-compiler'.*or leave compiled out"):
        Engine(model, compiled=True)
    Engine(model)


def test_another_device_is_refused() -> None:
    with pytest.raises(CompilerError, match="compiled for a CPU only"):
        check_compiler(torch.device("cuda"))
