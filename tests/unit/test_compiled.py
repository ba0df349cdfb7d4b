"""Compiled steps: the plain path's logits, no compilation after the first tokens, and a message without a compiler."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import v41lib
from v41lib.engine import Engine
from v41lib.nn.compiled import CompilerError, check_compiler


def needs_compiler() -> None:
    try:
        check_compiler(torch.device("cpu"))
    except CompilerError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_decode_is_the_plain_one_and_compiles_once() -> None:
    needs_compiler()
    model = v41lib.Model(v41lib.preset("tiny"))
    ids = torch.randint(0, model.config.text.vocab_size, (1, 80), generator=torch.Generator().manual_seed(0))
    plain, compiled = Engine(model), Engine(model, compiled=True)
    a, b = plain.prefill(ids[:, :40]), compiled.prefill(ids[:, :40])
    graphs = []
    for token in ids[:, 40:].split(1, dim=1):
        a, b = plain.decode(a, token), compiled.decode(b, token)
        assert (a.logits - b.logits).abs().max() < 1e-5
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] <= 8  # one for each step, and attention with and without compressed rows: not one a layer
    assert graphs[4] == graphs[-1] <= 12  # and where shapes turned out to vary


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
    with pytest.raises(CompilerError, match="no 'no-such-compiler'.*or leave compiled out"):
        Engine(model, compiled=True)
    Engine(model)


def test_another_device_is_refused() -> None:
    with pytest.raises(CompilerError, match="compiled for a CPU only"):
        check_compiler(torch.device("cuda"))
