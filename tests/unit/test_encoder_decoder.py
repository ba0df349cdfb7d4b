"""Chapter 05's experiment: two halves that share nothing but what crosses, and its sums by hand."""

from __future__ import annotations

import pytest
import torch

from v41lib import Model, preset
from v41lib.experiments import encoder_decoder as chapter
from v41lib.model import Encoded
from v41lib.nn.shared import Shared

PARAMS = chapter.Params(tokens=24, lengths=(8, 16), repeats=1)


def test_the_halves_miss_all_of_the_other_side_and_nothing_of_their_own() -> None:
    model = Model(preset("miniature"))
    encoder, decoder = chapter.halves(model)
    for name, weight in model.named_parameters():
        gone = [bool(half.get_parameter(name).isnan().all()) for half in (encoder, decoder)]
        assert bool(gone[0]) != bool(gone[1]) or name == f"layers.{model.cut}.attn_norm.weight", name
        assert torch.isfinite(weight).all(), "the model itself is left alone"


def test_the_split_is_exact_and_either_half_alone_is_nothing() -> None:
    table = chapter.split(PARAMS)
    assert table["equal to the whole model's"].tolist() == [True, False, False]
    assert table["logits that are numbers"].tolist() == ["100%", "0%", "0%"]
    text = preset("miniature").text  # the residual and its pre, one row of main KV and one key a token, in FP32
    row = text.hc_mult * text.hidden_size + text.hc_mult + text.head_dim + text.index_head_dim
    assert table["bytes that crossed"].iloc[0] == 24 * row * 4


def test_image_tokens_are_still_image_tokens_behind_the_cut() -> None:
    config = preset("miniature")
    model = Model(type(config).from_dict(config.to_dict() | {"image_token_id": 7}))
    for block in model.blocks:
        block.ffn.gate.bias_vl.data.normal_()
    ids = torch.tensor([[1, 2, 7, 7, 7, 3, 4, 7, 5, 6]])
    with torch.no_grad():
        encoder, decoder = chapter.halves(model)
        assert torch.equal(decoder.decode(chapter.carry(encoder.encode(ids))[0]), model(ids))


def test_the_decoder_needs_the_global_kv() -> None:
    model = Model(preset("miniature"))
    encoded = model.encode(torch.arange(12).unsqueeze(0))
    kv = encoded.shared.kv
    assert kv is not None and isinstance(kv.main, torch.Tensor)
    changed = Shared(kv=type(kv)(kv.owner, kv.ratio, kv.main + 1, kv.index_keys))
    assert not torch.equal(model.decode(encoded), model.decode(Encoded(encoded.residual, changed)))


def test_only_a_window_of_one_leaves_early_for_nothing() -> None:
    table = chapter.last_row_alone(PARAMS)
    assert table["exact"].tolist() == [True, False, False]
    assert table["rows that guarantee it"].tolist() == [1, 2 + 19, 8 + 19 * 7]


def test_a_stored_prefix_by_hand() -> None:
    assert chapter.window_bytes() == 40 * 128 * (512 + 16)
    assert chapter.token_bytes() == 890
    table = chapter.stored((1000,))
    assert table["with windows"].iloc[0] == pytest.approx((890_000 + 2_703_360) / 1e6)


def test_the_share_furthest_from_half() -> None:
    table = chapter.by_length((4096, 65_536))
    assert chapter.furthest_from_half(table) == table["share"].iloc[0] > table["share"].iloc[1] > 0.5


def test_timings_take_both_modes_at_every_length() -> None:
    table = chapter.timed(PARAMS)
    assert table.index.tolist() == [8, 16] and bool((table[["exact", "replay"]] > 0).all(axis=None))


def test_lengths_must_rise() -> None:
    with pytest.raises(ValueError, match="lengths: must rise"):
        chapter.Params(lengths=(16, 8))
