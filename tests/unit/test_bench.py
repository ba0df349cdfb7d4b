"""The bench: what it measures on a model that takes seconds, its bars, and the README's table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from v41lib import bench, cli
from v41lib.accounting.flops import prefill_flops
from v41lib.config import preset
from v41lib.resources import data_path

SMALL = bench.Settings(config="tiny", lengths=(24, 48, 96), repeats=1, steps=2, other=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what takes long and is measured elsewhere: a process of its own, compiling, a million keys."""

    def few(settings: bench.Settings, samples: bench.Samples, say: bench.Say) -> None:
        for context, full in ((32_768, 10.0), (1_048_576, 320.0)):
            samples.add("indexer, full scan", context, full, "ms")
            samples.add("indexer, capped", context, 5.0, "ms")

    def no_compiler(device: torch.device) -> None:
        raise bench.CompilerError("not here")

    monkeypatch.setattr(bench, "_indexers", few)
    monkeypatch.setattr(bench, "peak_memory", lambda settings: 1.0)
    monkeypatch.setattr("v41lib.engine.check_compiler", no_compiler)


def test_every_side_is_measured_at_every_length(quick: None) -> None:
    heard: list[str] = []
    result = bench.run(SMALL, heard.append)
    table = result.table().set_index(["what", "at"])
    for length in SMALL.lengths:
        for what in ("prefill, exact", "decode, plain cache", "decode, packed cache"):
            row = table.loc[what, length]
            assert 0 < row["low"] <= row["median"] <= row["high"]
    assert ("prefill, replay", 96) in table.index
    assert not any("mlx" in what for what, _ in table.index)
    assert any("without compiled decode: not here" in text for text in heard)
    assert result.machine["versions"]["torch"] == torch.__version__.partition("+")[0] or "torch" in str(result.machine)


def samples(**changes: float) -> bench.Samples:
    """Round numbers: every rate 1,000 a second, every time 1."""
    found = bench.Samples()
    for length in (1024, 4096, 8192):
        found.add("prefill, exact", length, changes.get(f"exact_{length}", 1000.0), "tokens/s")
        found.add("decode, plain cache", length, changes.get(f"decode_{length}", 30.0), "tokens/s")
    found.add("decode, mlx-lm", 4096, 10.0, "tokens/s")
    found.add("plain matmul", 2048, changes.get("matmul", 100.0), "GFLOP/s")
    found.add("prefill, replay", 8192, changes.get("replay", 1900.0), "tokens/s")
    found.add("peak memory", 8192, changes.get("memory", 1.0), "GiB")
    for context in (16_384, 32_768, 1_048_576):
        found.add("indexer, full scan", context, context / 1000, "ms")
        found.add("indexer, capped", context, changes.get(f"capped_{context}", 2.0), "ms")
    return found


def test_a_share_is_the_models_flops_at_its_rate_over_the_matmuls() -> None:
    (share,) = [bar for bar in bench.bars(bench.Settings(), samples()) if "1,024 tokens, share" in bar.about]
    flops = prefill_flops(preset("bench").text, 1024).total / 1024
    assert share.measured == pytest.approx(1000 * flops / 100e9)


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"matmul": 1000.0}, "share of plain"),
        ({"exact_8192": 700.0}, "beside 1,024 tokens, in tokens/s"),
        ({"memory": 2.6}, "peak memory"),
        ({"replay": 1600.0}, "replay beside"),
        ({"decode_8192": 20.0}, "after 8,192 beside"),
        ({"decode_4096": 24.0}, "mlx-lm"),
        ({"capped_1048576": 3.0}, "capped indexer"),
    ],
)
def test_each_bar_can_be_missed(change: dict[str, float], about: str) -> None:
    assert all(bar.met for bar in bench.bars(bench.Settings(), samples()))
    missed = [bar for bar in bench.bars(bench.Settings(), samples(**change)) if not bar.met]
    assert any(about in bar.about for bar in missed)


def test_the_readme_shows_the_accepted_result() -> None:
    root = Path(__file__).resolve().parents[2]
    readme = (root / "README.md").read_text()
    accepted = bench.Result.load(data_path("results", "bench.json"))
    assert bench.with_block(readme, bench.markdown(accepted)) == readme, "run make bench, which writes both"
    with pytest.raises(ValueError, match=r"README\.md lacks the lines"):
        bench.with_block("nothing", "block")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lengths": (1, 1, 2)}, "three rising numbers"),
        ({"repeats": 0}, "repeats = 0"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "torch sees no CUDA device")]),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        bench.Settings(**settings)


def test_the_command_says_what_is_wrong(quick: None) -> None:
    result = CliRunner().invoke(cli.main, ["bench", "--lengths", "5", "4", "3"])
    assert result.exit_code == 1 and "three rising numbers" in result.output
    result = CliRunner().invoke(cli.main, ["bench", "--config", "nonesuch", "--alone"])
    assert result.exit_code == 1 and "nonesuch" in result.output
