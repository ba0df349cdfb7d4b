"""The golden fixtures: what two independent implementations computed, at every position, and what happened inside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import v41lib
from tests.conftest import Golden
from tests.unit.reference import Reference, check_trace
from tests.unit.support import released_weights, tokens
from v41lib.trace import diff_traces

BAR = 1e-4  # the project's bar; the two recorded implementations differ from each other by up to 9e-6


@pytest.mark.parametrize("source", ["nemo", "mlx_prefill", "mlx_decode"])
def test_every_position_equals_the_recorded_logits(golden: Golden, source: str) -> None:
    with torch.no_grad():
        ours = golden.model(golden.ids)
    theirs = golden.logits[source]
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape == (*golden.ids.shape, golden.model.config.text.vocab_size)
    assert (ours - theirs).abs().amax(-1).max() <= BAR
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_the_bar_is_below_the_distance_of_any_wrong_token(golden: Golden) -> None:
    """The bar means something: moving to the next position or another vocabulary entry is thousands of bars away."""
    theirs = golden.logits["nemo"]
    assert (theirs[:, 1:] - theirs[:, :-1]).abs().amax(-1).min() > 1000 * BAR
    assert theirs.std() > 0.5


def test_intermediates_equal_the_trace(golden: Golden) -> None:
    """Streams leaving each block to 1e-4, selections and routes as sets, candidates where visible."""
    ours = golden.model.trace(golden.ids)
    comparison = diff_traces(ours, golden.trace, atol=BAR)
    assert not comparison.differences, str(comparison.first)
    assert set(comparison.compared) == set(golden.trace), "a recorded intermediate was not compared"


def test_intermediates_without_the_comparison_that_is_itself_under_test(golden: Golden) -> None:
    ours = golden.model.trace(golden.ids)
    for name, theirs in golden.trace.items():
        kind, mine = name.split(".")[0], ours[name].numpy()
        if kind == "streams":
            assert np.abs(mine - theirs).max() <= BAR, name
        elif kind in ("topk", "route"):
            rows = zip(mine.reshape(-1, mine.shape[-1]), theirs.reshape(-1, theirs.shape[-1]), strict=True)
            assert all(set(a.tolist()) == set(b.tolist()) for a, b in rows), name
        else:
            assert kind == "cand"
            visible = np.tril(np.ones(theirs.shape[-2:], dtype=bool))  # the fixtures' cap sources have ratio 1
            assert np.array_equal(mine & visible, theirs & visible), name
            assert not (mine & ~visible).any(), name


def test_the_wide_fixture_really_binds(wide: Golden) -> None:
    """What the fixture claims to exercise is exercised: the cap, the clamp, image-free routing, an open group."""
    text, trace = wide.model.config.text, wide.model.trace(wide.ids)
    cap = f"cand.{text.candidate_source_layer_id}"
    assert trace[cap].sum(-1).max() == text.candidate_topk_blocks * text.candidate_block_size == 20
    assert wide.ids.shape[1] % 2 == 1
    assert (trace["topk.1"][:, -1] >= 0).all()


def test_the_dense_reference_agrees_end_to_end(golden: Golden) -> None:
    """This suite's own dense reference stands on the same recorded numbers; so it can judge other configurations."""
    model = golden.model
    reference = Reference(released_weights(model), model.config.text, model.config.image_token_id)
    logits = reference.forward(golden.ids)["logits"]
    for theirs in golden.logits.values():
        assert (logits - theirs).abs().max() <= BAR
    with torch.no_grad():
        assert (logits - model(golden.ids)).abs().max() <= 1e-5
    rows = golden.ids.numel() * len(model.config.text.index_source_layer_ids)
    assert check_trace(reference, model.trace(golden.ids), golden.ids) >= 0.9 * rows


@torch.no_grad()
def test_the_halves_make_the_whole(golden: Golden) -> None:
    model, ids = golden.model, golden.ids
    encoded = model.encode(ids)
    whole = model(ids)
    assert torch.equal(model.decode(encoded), whole)
    assert torch.equal(model.decode(encoded), whole), "decoding changed what the encoder handed over"


@torch.no_grad()
def test_encoding_ends_where_the_last_kv_source_begins(golden: Golden) -> None:
    """The encoder's result holds layers before the cut and the decoder's global KV, nothing computed later."""
    model, ids = golden.model, golden.ids
    recorded: dict[str, torch.Tensor] = {}
    encoded = model.encode(ids, recorded.__setitem__)
    cut, trace = model.cut, model.trace(ids)
    assert cut == model.config.text.kv_source_layer_ids[-1]
    assert {int(name.split(".")[1]) for name in recorded} == set(range(cut))
    assert torch.equal(encoded.residual.streams, trace[f"streams.{cut - 1}"])
    assert torch.equal(encoded.shared.kv_of(cut).main, trace[f"main.{cut}"])
    assert torch.equal(encoded.shared.kv_of(cut).index_keys, trace[f"keys.{cut}"])


@torch.no_grad()
@pytest.mark.parametrize("row", [0, 1, 2])
def test_batch_equals_single(golden: Golden, row: int) -> None:
    """The fixture's prompt at any place in a batch of other prompts. 1e-5: other matrix shapes add in another order;
    the fixture's weights were screened so that such noise rounds nothing differently."""
    vocab = golden.model.config.text.vocab_size
    batch = tokens(golden.ids.shape[1], batch=3, seed=row, vocab=vocab)
    batch[row] = golden.ids[0]
    logits = golden.model(batch)
    assert (logits[row] - golden.logits["nemo"][0]).abs().max() <= 1e-5
    single = golden.model.trace(golden.ids)
    for name, value in golden.model.trace(batch).items():
        value = value.unflatten(0, (3, -1)) if name.startswith("route") else value
        comparison = diff_traces({name: value[row]}, {name: single[name].squeeze(0)}, atol=1e-4)
        assert not comparison.differences, str(comparison.first)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8, 9, 20, 32, 33])
def test_any_prefix_gives_the_same_rows(golden: Golden, length: int) -> None:
    """Prompts of length 1, 2, 3, 4 and more (CASES 2, 3): rows of a prefix are rows of the whole, at odd cuts too."""
    logits = golden.model(golden.ids[:, :length])
    assert logits.isfinite().all()
    assert (logits - golden.logits["mlx_decode"][:, :length]).abs().max() <= 1e-5


@torch.no_grad()
def test_int32_tokens_are_the_same_tokens(tiny: Golden) -> None:
    assert torch.equal(tiny.model(tiny.ids.int()), tiny.model(tiny.ids.long()))


@torch.no_grad()
def test_bf16_stays_near_fp32(golden: Golden) -> None:
    """BF16 matrices and streams. Bounds are measured (tiny, wide): 0.018 and 0.011 relative after the first block; mean
    logit distance 0.145 and 0.204, of which 0.121 and 0.194 come from rounding the weights alone (a random model flips
    selections and experts at the slightest change). Arithmetic more coarse than it must be breaks the ratio."""
    fp32, bf16 = golden.model, v41lib.load(golden.folder, dtype=torch.bfloat16)
    rounded = v41lib.load(golden.folder)
    for ours, theirs in zip(rounded.parameters(), bf16.parameters(), strict=True):
        ours.copy_(theirs)
    exact, coarse, only_weights = (model.trace(golden.ids) for model in (fp32, bf16, rounded))

    assert coarse["logits"].dtype == torch.float32
    assert coarse["streams.0"].dtype == torch.bfloat16
    assert coarse["logits"].isfinite().all()
    first = (coarse["streams.0"].float() - exact["streams.0"]).norm() / exact["streams.0"].norm()
    assert 0.001 < first < 0.03
    distance = (coarse["logits"] - exact["logits"]).abs().mean()
    from_weights = (only_weights["logits"] - exact["logits"]).abs().mean()
    assert 0.01 < distance < 0.3
    assert distance < 1.5 * from_weights


def test_bf16_keeps_in_fp32_what_every_port_keeps(tiny: Golden) -> None:
    model = v41lib.load(tiny.folder, dtype=torch.bfloat16)
    wide_parts = ("hc_attn_", "hc_ffn_", "gate.bias", "attn_sink", "compressor.wkv", "compressor.wgate", "head.weight")
    for name, weight in released_weights(model).items():
        expected = torch.float32 if any(part in name for part in wide_parts) else torch.bfloat16
        assert weight.dtype == expected, name


def test_every_weight_matters(tiny: Golden) -> None:
    """No tensor is loaded and then ignored: each has a gradient, or, where choices pass none, moves the logits when
    perturbed. Except the image bias, as there is no image, and experts that no token chose."""
    model = v41lib.load(tiny.folder)
    with torch.no_grad():
        before, trace = model(tiny.ids), model.trace(tiny.ids)
    model(tiny.ids).square().mean().backward()
    silent = []
    for name, weight in model.named_parameters():
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if ".ffn.experts." in name:
            used = trace[f"route.{name.split('.')[1]}"].unique()
            assert (grad[used].flatten(1).abs().sum(1) > 0).all(), name
        elif not grad.any():
            silent.append((name, weight))
    assert {name.split(".", 2)[-1] for name, _ in silent} == {
        "ffn.gate.bias", "ffn.gate.bias_vl", "attn.indexer.wq_b.weight", "attn.indexer.weights_proj.weight",
        "attn.indexer.wk.weight", "attn.indexer.k_norm.weight",
    }  # fmt: skip
    with torch.no_grad():
        for name, weight in silent:
            saved = weight.clone()
            # an order that no symmetry absorbs: a common factor or shift would change no choice
            weight.add_(torch.linspace(-2, 3, weight.numel()).reshape(weight.shape))
            assert torch.equal(model(tiny.ids), before) == name.endswith("bias_vl"), name
            weight.copy_(saved)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.zeros(3, dtype=torch.long), ["[3]", "batch, length"]),
        (torch.zeros(1, 3), ["float32", "int64"]),
        (torch.zeros(1, 0, dtype=torch.long), ["[1, 0]", "at least one"]),
        (torch.zeros(0, 4, dtype=torch.long), ["[0, 4]", "at least one"]),
        (torch.tensor([[1, 64]]), ["64", "0 to 63", "vocab_size"]),
        (torch.tensor([[-1, 3]]), ["-1", "0 to 63", "vocab_size"]),
    ],
)
def test_bad_input_is_refused_by_value(tiny: Golden, ids: torch.Tensor, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        tiny.model(ids)
    for word in words:
        assert word in str(error.value)
