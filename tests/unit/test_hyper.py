"""mHC: coefficients, Sinkhorn, and who reads the streams through whose pre."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.reference import Reference
from tests.unit.support import random_model, released_weights, small_config, tokens
from v41lib.nn.hyper import HyperConnection, collapse, expand, project, sinkhorn
from v41lib.nn.norm import RMSNorm


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- Sinkhorn --------------------------------------------------------------------------------------------------------


@given(streams=st.integers(1, 6), spread=st.floats(0, 3), seed=st.integers(0, 999))
def test_columns_sum_to_one(streams: int, spread: float, seed: int) -> None:
    """CASES 10: 1e-5, because each division adds hc_eps = 1e-6 to the sum. Input axis first, so columns are axis -2."""
    comb = sinkhorn(spread * random(7, streams, streams, seed=seed), 20, 1e-6)
    assert (comb > 0).all()
    assert torch.allclose(comb.sum(-2), torch.ones(7, streams), rtol=0, atol=1e-5)


@given(streams=st.integers(1, 6), spread=st.floats(0, 60), seed=st.integers(0, 999), rounds=st.integers(1, 25))
def test_no_logits_break_it(streams: int, spread: float, seed: int, rounds: int) -> None:
    """However harsh: positive, finite, no column above one (a column that nearly vanished may stay below)."""
    comb = sinkhorn(spread * random(7, streams, streams, seed=seed), rounds, 1e-6)
    assert comb.isfinite().all()
    assert (comb > 0).all()
    assert (comb.sum(-2) < 1 + 1e-6).all()


def test_rows_only_nearly_and_less_so_for_large_logits() -> None:
    """CASES 10. Twenty rounds bring gentle logits to doubly stochastic; harsh ones have not converged by then."""
    logits = random(200, 4, 4)
    errors = [float((sinkhorn(spread * logits, 20, 1e-6).sum(-1) - 1).abs().max()) for spread in (0.1, 1.0, 10.0)]
    assert errors[0] < 1e-5
    assert errors[0] < errors[1] < errors[2]
    assert errors[2] > 1e-2


def test_each_round_brings_rows_closer() -> None:
    logits = 2 * random(50, 4, 4)
    errors = [float((sinkhorn(logits, rounds, 1e-6).sum(-1) - 1).abs().mean()) for rounds in (1, 2, 5, 20)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[-1]


def test_one_iteration_is_one_column_normalisation() -> None:
    """Softmax over the *output* axis plus eps, then columns: the order and the axes are pinned by a matrix that is
    symmetric in neither."""
    logits = torch.tensor([[[0.0, 2.0], [1.0, -1.0]]])
    comb = logits.double().softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    assert torch.allclose(sinkhorn(logits, 1, 1e-6).double(), comb, atol=1e-7)
    comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    assert torch.allclose(sinkhorn(logits, 2, 1e-6).double(), comb, atol=1e-7)


def test_eps_is_where_the_specification_puts_it() -> None:
    """A large eps shows it: added once to the softmax and once to every sum."""
    logits = random(3, 4, 4)
    comb = logits.softmax(-1) + 0.5
    comb = comb / (comb.sum(-2, keepdim=True) + 0.5)
    comb = comb / (comb.sum(-1, keepdim=True) + 0.5)
    comb = comb / (comb.sum(-2, keepdim=True) + 0.5)
    assert torch.allclose(sinkhorn(logits, 2, 0.5), comb, atol=1e-6)


# --- a site ----------------------------------------------------------------------------------------------------------


def site(streams: int = 4, width: int = 6, seed: int = 0) -> HyperConnection:
    module = HyperConnection(streams, width, 20, 1e-6, 1e-20)
    with torch.no_grad():
        module.fn.copy_(random(*module.fn.shape, seed=seed) / 3)
        module.base.copy_(random(*module.base.shape, seed=seed + 1))
        module.scale.copy_(torch.tensor([0.5, 1.5, 2.0]))
    return module


@torch.no_grad()
def test_coefficients_by_hand() -> None:
    """Norm over all streams together, then three scales and bases, then sigmoid + eps, twice a sigmoid, Sinkhorn."""
    module, x = site(), random(1, 1, 4, 6, seed=5)
    mix = module(x)
    flat = x.double().flatten()
    raw = module.fn.double() @ (flat / flat.square().mean().sqrt())
    base = module.base.double()
    assert torch.allclose(mix.pre[0, 0].double(), torch.sigmoid(0.5 * raw[:4] + base[:4]) + 1e-6, atol=1e-6)
    assert torch.allclose(mix.post[0, 0].double(), 2 * torch.sigmoid(1.5 * raw[4:8] + base[4:8]), atol=1e-6)
    logits = (2.0 * raw[8:] + base[8:]).reshape(1, 4, 4)  # row-major: input stream, output stream
    assert torch.allclose(mix.comb[0, 0], sinkhorn(logits.float(), 20, 1e-6)[0], atol=1e-5)


@torch.no_grad()
def test_coefficients_do_not_depend_on_the_size_of_the_streams() -> None:
    module, x = site(), random(2, 3, 4, 6)
    for small, large in zip(module(x), module(1000 * x), strict=True):
        assert torch.allclose(small, large, atol=1e-6)


@torch.no_grad()
def test_zero_streams_give_the_base() -> None:
    module = site()
    mix = module(torch.zeros(1, 1, 4, 6))
    assert torch.allclose(mix.pre[0, 0], torch.sigmoid(module.base[:4]) + 1e-6)
    assert all(value.isfinite().all() for value in mix)


@torch.no_grad()
def test_pre_never_vanishes_and_post_may() -> None:
    """hc_eps is added to pre, not to post: far below zero they are 1e-6 and 0."""
    module = site()
    module.base.fill_(-1e4)
    mix = module(random(1, 1, 4, 6))
    assert torch.equal(mix.pre, torch.full((1, 1, 4), 1e-6))
    assert torch.equal(mix.post, torch.zeros(1, 1, 4))


@torch.no_grad()
def test_coefficients_are_fp32_for_bf16_streams() -> None:
    module, x = site(), random(1, 2, 4, 6).bfloat16()
    assert all(value.dtype == torch.float32 for value in module(x))
    assert all(torch.equal(a, b) for a, b in zip(module(x), module(x.float()), strict=True))


@given(streams=st.integers(1, 5), width=st.integers(1, 6), seed=st.integers(0, 999))
def test_collapse_and_expand_are_the_written_sums(streams: int, width: int, seed: int) -> None:
    x, out = random(2, 3, streams, width, seed=seed), random(2, 3, width, seed=seed + 1)
    pre, post, comb = (
        random(2, 3, *shape, seed=seed + 2 + len(shape)) for shape in ((streams,), (streams,), (streams,) * 2)
    )
    collapsed = sum(pre[..., s : s + 1] * x[..., s, :] for s in range(streams))
    assert torch.allclose(collapse(x, pre), collapsed, atol=1e-5)
    expanded = expand(x, out, post, comb)
    for target in range(streams):
        stream = sum(comb[..., s, target, None] * x[..., s, :] for s in range(streams)) + post[..., target, None] * out
        assert torch.allclose(expanded[..., target, :], stream, atol=1e-5)


def test_mixing_by_a_permutation_moves_streams_from_input_to_output() -> None:
    """comb is indexed [input, output]: a one at [0, 2] carries stream 0 to stream 2, and not back."""
    x = random(1, 1, 3, 5)
    comb = torch.zeros(1, 1, 3, 3)
    comb[..., 0, 2] = comb[..., 1, 0] = comb[..., 2, 1] = 1
    moved = expand(x, torch.zeros(1, 1, 5), torch.zeros(1, 1, 3), comb)
    assert torch.equal(moved[0, 0], x[0, 0, [1, 2, 0]])


# --- the hand-over ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_next_layer_reads_the_stream_that_this_layers_ffn_pre_names() -> None:
    """CASES 10: layer l's FFN pre is one-hot(2), so layer l+1's attention input is stream 2, whatever its own pre says.
    1e-5: pre is 1 + 1e-6 on stream 2 and 1e-6 elsewhere, and the norm cancels a common factor."""
    model = random_model(small_config())
    for layer in (0, 3):
        ffn = model.layers[layer].hc_ffn
        ffn.scale[0] = 0
        ffn.base[:4] = torch.tensor([-1e4, -1e4, 1e4, -1e4])
    trace = model.trace(tokens(9))
    for layer in (0, 3):
        stream = trace[f"streams.{layer}"][:, :, 2]
        expected = model.layers[layer + 1].attn_norm(stream)
        assert torch.allclose(trace[f"attn_in.{layer + 1}"], expected, atol=1e-4)
        assert not torch.allclose(
            trace[f"attn_in.{layer + 1}"], model.layers[layer + 1].attn_norm(stream * 0 + 1), atol=0.1
        )


@torch.no_grad()
def test_the_experts_read_through_attentions_pre_and_the_first_layer_reads_stream_0() -> None:
    model = random_model(small_config())
    attention = model.layers[1].hc_attn
    attention.scale[0] = 0
    attention.base[:4] = torch.tensor([-1e4, 1e4, -1e4, -1e4])
    ids = tokens(7)
    trace, weights = model.trace(ids), released_weights(model)
    assert torch.allclose(trace["attn_in.0"], model.layers[0].attn_norm(model.embed(ids)), atol=1e-5)
    reference = Reference(weights, model.config.text, model.config.image_token_id)
    before = trace["streams.0"].double()
    _, post, comb = reference.mix(before, 1, "attn")
    after = reference.expand(before, trace["attn_out.1"].double(), post, comb)
    expected = reference.rms(after[:, :, 1], weights["layers.1.ffn_norm.weight"].double())
    assert torch.allclose(trace["ffn_in.1"].double(), expected, atol=1e-4)


@torch.no_grad()
def test_the_last_ffn_pre_collapses_the_streams_for_the_head() -> None:
    model = random_model(small_config())
    last = model.layers[-1].hc_ffn
    last.scale[0] = 0
    last.base[:4] = torch.tensor([-1e4, -1e4, -1e4, 1e4])
    trace = model.trace(tokens(5))
    expected = model.head(model.norm(trace["streams.6"][:, :, 3]))
    assert torch.allclose(trace["logits"], expected, atol=1e-4)


# --- the norm --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_zeros_is_zeros(dtype: torch.dtype) -> None:
    """CASES 11: the released eps 1e-20 is no FP16 number, so the arithmetic must be FP32."""
    norm = RMSNorm(8, 1e-20, dtype)
    assert torch.equal(norm(torch.zeros(3, 8, dtype=dtype)), torch.zeros(3, 8, dtype=dtype))
    assert norm(torch.full((8,), 1e-8, dtype=dtype)).float().tolist() == pytest.approx([1.0] * 8, rel=1e-2)
    assert norm(torch.full((8,), 1e18, dtype=dtype)).float().tolist() == pytest.approx([1.0] * 8, rel=1e-2)


@torch.no_grad()
def test_norm_multiplies_the_weight_before_the_cast_back() -> None:
    """In BF16 the two orders differ: casting before the weight rounds twice."""
    norm = RMSNorm(64, 1e-20, torch.bfloat16)
    norm.weight.copy_(1 + random(64, seed=1) / 3)
    x = random(64).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().square().mean() + 1e-20)
    assert torch.equal(norm(x), (wide * norm.weight.float()).bfloat16())
    assert not torch.equal(norm(x), wide.bfloat16() * norm.weight)


@torch.no_grad()
def test_eps_is_inside_the_root() -> None:
    norm = RMSNorm(4, 3.0)
    assert norm(torch.ones(4)).tolist() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize("length", [3, 50])
def test_gradients_by_hand_are_those_of_the_plain_formulas(length: int) -> None:
    torch.manual_seed(length)
    streams, width = 4, 6
    x, out = torch.randn(2, length, streams, width), torch.randn(2, length, width)
    pre, post, comb = (torch.rand(2, length, streams, *more) for more in ((), (), (streams,)))
    logits = 3 * torch.randn(2 * length, streams, streams)
    fn = torch.randn(24, streams * width)

    def plain_sinkhorn(logits: torch.Tensor) -> torch.Tensor:
        comb = logits.softmax(-1) + 1e-6
        for step in range(39):
            comb = comb / (comb.sum(-2 + step % 2, keepdim=True) + 1e-6)
        return comb

    def plain_projection(flat: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
        return flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)

    cases = [
        (collapse, lambda x, pre: torch.einsum("bsrm,bsr->bsm", x, pre), (x, pre)),
        (
            expand,
            lambda x, out, post, comb: (
                post.unsqueeze(-1) * out.unsqueeze(-2) + torch.einsum("bsij,bsim->bsjm", comb, x)
            ),
            (x, out, post, comb),
        ),
        (lambda logits: sinkhorn(logits, 20, 1e-6), plain_sinkhorn, (logits,)),
        (lambda flat, fn: project(flat, fn, 1e-20), plain_projection, (x.flatten(2), fn)),
    ]
    for ours, theirs, inputs in cases:
        results = []
        for function in (ours, theirs):
            leaves = [value.clone().requires_grad_() for value in inputs]
            value = function(*leaves)
            towards = torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
            results.append((value, *torch.autograd.grad(value, leaves, towards)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(ours(*inputs), results[1][0], atol=2e-5, rtol=1e-4)
