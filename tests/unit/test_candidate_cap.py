"""Chapter 08's experiment: keys counted by hand, a scan in pieces, the fit, and what the tables say of the release."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from v41lib import plots
from v41lib.experiments import candidate_cap as chapter
from v41lib.experiments.candidate_cap import Params
from v41lib.nn.indexer import score, score_in_pieces
from v41lib.nn.quant import MXFP4, Packed, pack, unpack

SMALL = {"contexts": (1000, 16_384, 17_000, 20_000, 30_000), "repeats": 1}


@pytest.fixture(scope="module")
def params() -> Params:
    return Params(**SMALL)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_keys_by_hand() -> None:
    table = chapter.keys_by_layer((16_384, 20_000, 1_048_576))
    assert list(table.columns) == [2, 8, 14, 20, 24, 28, 32, 36, "total", "uncapped"]
    assert list(table.loc[20_000]) == [10_000] * 3 + [20_000] + [16_384] * 4 + [115_536, 130_000]
    assert table.loc[1_048_576, "total"] == 3 * 524_288 + 1_048_576 + 4 * 16_384
    assert table.loc[16_384, "total"] == table.loc[16_384, "uncapped"]
    short = chapter.keys_in_short(table)
    assert list(short.columns) == [
        "2, 8, 14 each", "20", "24, 28, 32, 36 each", "all eight", "without the cap",
    ]  # fmt: skip
    assert list(short.loc[20_000]) == [10_000, 20_000, 16_384, 115_536, 130_000]


# --- a run -----------------------------------------------------------------------------------------------------------


def test_keys_are_counted_in_a_run(params: Params) -> None:
    table = chapter.multiplied(params)
    assert table["full scan"].to_dict() == {n: n for n in params.contexts}
    assert table["capped"].to_dict() == {1000: 1000, 16_384: 16_384, 17_000: 16_384, 20_000: 16_384, 30_000: 16_384}


def test_the_counter_sees_index_products_only() -> None:
    queries, keys = torch.randn(1, 3, 8), torch.randn(1, 8, 5)
    with chapter.KeysMultiplied(heads=3, width=8) as seen:
        products = queries @ keys
        torch.randn(1, 3, 4) @ torch.randn(1, 4, 5)  # another width
        products.relu().sum()
    assert seen.count == 5


def test_the_pool_holds_what_the_capped_indexer_keeps(params: Params) -> None:
    """2,048 blocks, the newest among them; the selection lies inside, and with equal queries it is the full scan's."""
    blocks = chapter.pool(30_000, params)
    assert blocks is not None and blocks.shape == (1, 1, 2048)
    assert 29_999 // 8 in blocks
    chosen = chapter.capped(30_000, params)
    assert chosen.shape == (1, 1, 512)
    assert torch.isin(chosen // 8, blocks).all()
    # The 512 best keys lie in at most 512 blocks, each of which scores at least as its key: all are in the pool.
    assert torch.equal(chosen, chapter.scan(30_000, params)[0])
    assert chapter.pool(16_384, params) is None


def test_random_keys_are_what_packing_makes(params: Params) -> None:
    """68 bytes a row, and every row survives being unpacked and packed again in value."""
    keys = chapter.all_keys(params)
    assert keys.shape == (1, 30_000, 128)
    assert keys.nbytes == 30_000 * 68
    rows = unpack(keys[:, :200])
    assert rows.isfinite().all() and rows.abs().max() == 12.0  # 6 at the largest scale, 2
    assert torch.equal(unpack(pack(rows, MXFP4)), rows)


@pytest.mark.parametrize("piece", [1, 3, 7, 8, 100])
def test_a_scan_in_pieces_is_a_scan(piece: int) -> None:
    """On small integers FP32 is exact, so equal means equal."""
    generator = torch.Generator().manual_seed(0)
    queries, weights = (torch.randint(-3, 4, (2, 4, 3, *more), generator=generator).float() for more in ((32,), ()))
    keys = torch.randint(-3, 4, (2, 7, 32), generator=generator).float()
    packed = pack(keys, MXFP4)
    assert isinstance(packed, Packed)
    expected = score(queries, weights, keys)
    assert torch.equal(score_in_pieces(queries, weights, packed, piece), expected)
    assert torch.equal(score_in_pieces(queries, weights, keys, piece), expected)


def test_pieces_of_nothing() -> None:
    queries, weights = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2)
    assert score_in_pieces(queries, weights, torch.ones(1, 0, 4), 5).shape == (1, 1, 0)
    with pytest.raises(ValueError, match="piece = 0"):
        score_in_pieces(queries, weights, torch.ones(1, 3, 4), 0)


# --- times -----------------------------------------------------------------------------------------------------------


def test_every_side_is_timed(params: Params) -> None:
    threads = torch.get_num_threads()
    times = chapter.timed(params)
    assert list(times.index) == list(params.contexts) and list(times.columns) == ["full scan", "capped"]
    assert (times > 0).all(axis=None)
    assert torch.get_num_threads() == threads


def test_fits_of_lines_that_are_known() -> None:
    """500 ns a token and nothing else is a power of one; a constant is a power of zero. Short contexts are left out."""
    contexts = [1000, 20_000, 40_000, 80_000]
    times = pd.DataFrame({"full scan": [99.0, 10.0, 20.0, 40.0], "capped": [99.0, 7.0, 7.0, 7.000001]}, index=contexts)
    fitted = chapter.fits(times)
    assert fitted.loc["full scan"].tolist() == pytest.approx([1.0, 500.0, 1.0, 4.0])
    assert fitted.loc["capped", ["exponent", "ns a token", "last / first"]].tolist() == pytest.approx(
        [0.0, 0.0, 1.0], abs=1e-3
    )


# --- a whole step ----------------------------------------------------------------------------------------------------


def test_growth_by_convention() -> None:
    table = chapter.growth()
    assert table["more"].to_dict() == {
        "wider operand": "+27.8%",
        "wo_a in BF16": "+26.0%",
        "attention in FP8": "+30.2%",
        "experts in FP4": "+35.2%",
        "scores in FP8": "+54.6%",
        "only scores in FP4": "+15.8%",
        "unweighted": "+61.5%",
    }
    # 35.719 + 0.0017 and 57.513 + 0.172 GFLOP: SPEC 11's numbers and the sums over heads
    assert [f"{table.loc['unweighted', end]:.2f}" for end in ("4K", "1M")] == ["35.72", "57.68"]


def test_every_component_is_in_one_part() -> None:
    named = [component for part in chapter.PARTS.values() for component in part]
    assert sorted(named) == sorted(chapter.COMPONENTS)
    parts = chapter.step_parts()
    table = chapter.growth()
    assert parts["weighted"].sum().tolist() == pytest.approx(table.loc["wider operand", ["4K", "1M"]].tolist())
    assert parts["unweighted"].sum().tolist() == pytest.approx(table.loc["unweighted", ["4K", "1M"]].tolist())


def test_slopes_by_hand() -> None:
    """2 x 32 x 129 = 8,256 FLOPs a key; half a key in layers 2, 8 and 14, one in 20."""
    table = chapter.slopes()
    assert table["FLOPs"].to_dict() == {
        "2": 4128.0, "8": 4128.0, "14": 4128.0, "20": 8256.0, "24": 0.0, "28": 0.0, "32": 0.0, "36": 0.0,
        "the other 32": 0.0, "the whole model": 20_640.0,
    }  # fmt: skip
    assert table.loc["the whole model", "keys"] == 2.5


def test_what_is_settled(params: Params) -> None:
    values = chapter.settled(params)
    assert values["cap-keys"] == 16_384
    assert values["not-constant-cost"] == 20_640
    assert round(values["decode-flops-growth"], 3) == 0.278


def test_words(params: Params) -> None:
    words = chapter.in_words(params, chapter.keys_by_layer((16_384, 1_048_576)), chapter.multiplied(params))
    assert words["flops_short"] == "35.7" and words["flops_long"] == "57.5" and words["growth_products"] == "61%"
    assert (words["pool"], words["pool_context"], words["slope"], words["a_key"]) == (
        "16,384", "16K", "20,640", "8,256",
    )  # fmt: skip
    # Eight full scans would add (3 / 2 + 5) keys a token of 2,112 weighted FLOPs each: 14.34 on 20.23 GFLOP.
    assert words["uncapped_growth"] == "71%"


def test_figures_are_drawn(params: Params) -> None:
    short = chapter.keys_in_short(chapter.keys_by_layer(params.contexts)).iloc[:, :3]
    assert len(plots.keys_and_time(short, chapter.timed(params)).axes) == 2
    assert len(plots.decode_step(chapter.step_parts()).axes) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"contexts": (4096, 8192, 16_384)},
        {"contexts": (32_768, 65_536)},
        {"contexts": (65_536, 32_768, 131_072)},
        {"contexts": (0, 32_768, 65_536, 131_072)},
        {"repeats": 0},
        {"piece": 0},
    ],
)
def test_refused_parameters(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Params(**bad)


def test_times_in_words() -> None:
    contexts = [1000, 20_000, 40_000, 80_000]
    times = pd.DataFrame({"full scan": [99.0, 10.0, 20.0, 40.0], "capped": [99.0, 8.0, 8.0, 8.4]}, index=contexts)
    words = chapter.times_in_words(times, chapter.fits(times))
    assert words["ns_full"] == "500" and words["exponent_full"] == "1.00" and words["r2_full"] == "1.0000"
    assert (words["capped_ratio"], words["context_ratio"], words["speedup"]) == ("1.05", "4", "5")
