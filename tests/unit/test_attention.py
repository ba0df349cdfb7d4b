"""Attention: the sink, the window, the selection, blocks of queries, causality, memory, and whose tensors are read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import v41lib.nn.attention
from tests.conftest import Golden
from tests.unit.reference import Reference, check_trace
from tests.unit.support import configs, random_model, released_weights, small_config, tokens
from v41lib import Config, Model
from v41lib.nn.attention import attend, softmax_with_sink
from v41lib.nn.indexer import gather_rows
from v41lib.nn.shared import Candidates, GlobalKV, Selection, Shared
from v41lib.trace import diff_traces


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def use_blocks(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(v41lib.nn.attention, "BLOCK_ELEMENTS", elements)


# --- the sink --------------------------------------------------------------------------------------------------------


def test_every_key_masked_gives_exact_zeros() -> None:
    """CASES 20: all the weight is the sink's, also when the sink itself is -inf."""
    masked = torch.full((2, 3, 4), -math.inf)
    assert torch.equal(softmax_with_sink(masked, torch.tensor([0.0, 5.0, -5.0])), torch.zeros(2, 3, 4))
    assert torch.equal(softmax_with_sink(masked, torch.full((3,), -math.inf)), torch.zeros(2, 3, 4))


def test_a_sink_of_minus_infinity_and_one_key_returns_that_key() -> None:
    """CASES 20, bitwise, through the whole of ``attend``."""
    q, window = random(1, 1, 2, 4), random(1, 3, 4)
    one = torch.tensor([[False, True, False]])
    out = attend(q, window, one, torch.full((2,), -math.inf))
    assert torch.equal(out, window[:, 1].expand(1, 1, 2, 4))


def test_a_sink_joins_the_denominator_only() -> None:
    """One key with logit 0 and a sink of 0 share the weight; the sink's half goes nowhere."""
    assert softmax_with_sink(torch.zeros(1, 1), torch.zeros(1)).item() == 0.5
    assert softmax_with_sink(torch.zeros(1, 3), torch.tensor([math.log(5)])).sum().item() == pytest.approx(3 / 8)


def test_each_head_has_its_own_sink() -> None:
    weights = softmax_with_sink(torch.zeros(2, 2, 1), torch.tensor([0.0, math.log(3)]))
    assert weights.flatten().tolist() == pytest.approx([0.5, 0.25, 0.5, 0.25])


@given(heads=st.integers(1, 4), keys=st.integers(1, 6), spread=st.floats(0, 200), seed=st.integers(0, 999))
def test_softmax_with_sink_is_the_softmax_over_one_more_key(heads: int, keys: int, spread: float, seed: int) -> None:
    logits, sink = spread * random(3, heads, keys, seed=seed), spread * random(heads, seed=seed + 1)
    logits[0, 0, 0] = -math.inf
    joint = torch.cat((logits, sink.view(1, -1, 1).expand(3, -1, 1)), -1).double().softmax(-1)[..., :-1]
    assert torch.allclose(softmax_with_sink(logits, sink).double(), joint, atol=1e-6)


def test_the_sinks_gradient_is_finite_when_everything_is_masked() -> None:
    logits = torch.full((1, 2, 3), -math.inf, requires_grad=True)
    sink = torch.zeros(2, requires_grad=True)
    softmax_with_sink(logits, sink).sum().backward()
    assert sink.grad is not None
    assert sink.grad.isfinite().all()


# --- joint attention -------------------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 999))
def test_attend_equals_a_dense_softmax_over_everything(data: st.DataObject, seed: int) -> None:
    """Window, selected entries and sink in one softmax; absent entries (-1) count for nothing."""
    batch, length, heads, width, near, far = (data.draw(st.integers(1, n)) for n in (2, 4, 3, 5, 6, 6))
    picks = data.draw(st.integers(0, far))
    q, window, main = (
        random(batch, length, heads, width, seed=seed),
        random(batch, near, width, seed=1),
        random(batch, far, width),
    )
    sink = random(heads, seed=seed + 1)
    in_window = random(length, near, seed=seed + 2) > 0
    entries = torch.stack(
        [torch.randperm(far, generator=torch.Generator().manual_seed(seed + n))[:picks] for n in range(batch * length)]
    ).view(batch, length, picks)
    entries = torch.where(random(batch, length, picks, seed=seed + 3) > 0.5, -1, entries)
    out = attend(q, window, in_window, sink, gather_rows(main, entries), entries)
    for b in range(batch):
        for s in range(length):
            rows = [window[b, t] for t in range(near) if in_window[s, t]]
            rows += [main[b, entry] for entry in entries[b, s].tolist() if entry >= 0]
            for h in range(heads):
                if not rows:
                    assert torch.equal(out[b, s, h], torch.zeros(width))
                    continue
                keys = torch.stack(rows).double()
                logits = torch.cat((keys @ q[b, s, h].double() * width**-0.5, sink[h : h + 1].double()))
                assert torch.allclose(out[b, s, h].double(), logits.softmax(0)[:-1] @ keys, atol=1e-5)


def test_an_entry_that_is_absent_is_not_entry_zero() -> None:
    q, window, main = random(1, 1, 1, 4), random(1, 1, 4), 100 * random(1, 3, 4)
    alone = attend(q, window, torch.ones(1, 1, dtype=torch.bool), torch.zeros(1))
    nothing = torch.full((1, 1, 2), -1)
    absent = attend(q, window, torch.ones(1, 1, dtype=torch.bool), torch.zeros(1), gather_rows(main, nothing), nothing)
    assert torch.equal(alone, absent)


@torch.no_grad()
def test_queries_are_not_normed_per_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 9: doubling wq_b doubles every query, so q.k doubles; exactly, two being a power of two."""
    model, seen = random_model(small_config()), []

    def spy(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(q)
        return attend(q, *rest)

    monkeypatch.setattr(v41lib.nn.attention, "attend", spy)
    attention, x = model.layers[0].attn, random(1, 6, 16)
    attention(x, Shared())
    attention.wq_b.weight.mul_(2)
    attention(x, Shared())
    assert torch.equal(2 * seen[0], seen[1])


@torch.no_grad()
def test_a_query_sees_itself_and_the_window_before_it_and_no_more() -> None:
    """Window 3 in a local layer: token t reaches the outputs of t, t+1 and t+2."""
    attention, x = random_model(small_config()).layers[0].attn, random(1, 10, 16)
    before, _ = attention(x, Shared())
    for token in range(10):
        changed = x.clone()
        changed[:, token] += 1
        moved = (attention(changed, Shared())[0] != before).any(-1)[0]
        assert moved.nonzero().flatten().tolist() == list(range(token, min(token + 3, 10)))


@torch.no_grad()
def test_the_output_is_rotated_back() -> None:
    """A lone value comes out as it went in before rotation: window 1, no sink, so the output is un-rotated kv_norm."""
    model = random_model(small_config(sliding_window=1))
    attention, x = model.layers[0].attn, random(1, 9, 16)
    attention.attn_sink.fill_(-math.inf)
    out, _ = attention(x, Shared())
    kv = attention.kv_norm(attention.wkv(x))
    direct = attention.project(kv.unsqueeze(2).expand(-1, -1, 2, -1))
    # FP8 keeps three mantissa bits: relative error 2^-4 at most an element; without rotating back it is of order one
    assert (out - direct).norm() < 0.05 * direct.norm()


@torch.no_grad()
def test_window_and_compressed_entries_of_a_layer_share_one_table() -> None:
    """CASES 6: in a layer that compresses, the window part turns by compress_rope_theta with YaRN too."""
    model = random_model(small_config())
    x, positions = random(1, 8, 16), torch.arange(8)
    from v41lib.nn.quant import fp8_round_trip
    from v41lib.nn.rope import frequencies, rotate, rotation

    text = model.config.text
    local = frequencies(4, text.rope_theta)
    compressed = frequencies(4, text.compress_rope_theta, text.rope_scaling)
    for layer in range(7):
        attention = model.layers[layer].attn
        plain = attention.kv_norm(attention.wkv(x))
        expected, other = (local, compressed) if model.plans[layer].ratio == 0 else (compressed, local)
        kv = attention.window_kv(x, positions)
        assert torch.equal(kv, fp8_round_trip(rotate(plain, rotation(positions, expected))))
        assert not torch.equal(kv, fp8_round_trip(rotate(plain, rotation(positions, other))))


@torch.no_grad()
def test_groups_of_heads_do_not_mix_before_the_last_projection() -> None:
    model = random_model(small_config())
    attention, out = model.layers[0].attn, random(1, 3, 2, 16)
    attention.wo_b.weight.zero_()
    attention.wo_b.weight[:4, :4] = torch.eye(4)  # read off the first group's four rows
    changed = out.clone()
    changed[:, :, 1] += 1
    assert torch.equal(attention.project(out), attention.project(changed))
    first = out[:, :, 0] @ attention.wo_a.weight[:4].T
    assert torch.allclose(attention.project(out)[..., :4], first, atol=1e-6)


# --- against the dense reference, on any schedule --------------------------------------------------------------------


@settings(max_examples=60)
@given(config=configs(), length=st.integers(1, 24), batch=st.integers(1, 2), seed=st.integers(0, 9999))
def test_every_stage_equals_the_dense_reference(config: Config, length: int, batch: int, seed: int) -> None:
    """Each stage from the library's own input to it, so that a rounded element cannot cascade. Covers every mode, any
    ratio, caps, open groups, images (token 39) and batches."""
    model, ids = random_model(config, seed), tokens(length, batch, seed)
    reference = Reference(released_weights(model), config.text, config.image_token_id)
    checked = check_trace(reference, model.trace(ids), ids)
    selecting = len(config.text.index_source_layer_ids)
    assert checked >= 0.8 * selecting * ids.numel() - 8, "nearly every selection is checked to the last entry"


@settings(max_examples=20)
@given(config=configs(), length=st.integers(2, 20), seed=st.integers(0, 9999), elements=st.integers(1, 5000))
def test_every_stage_equals_the_dense_reference_in_small_blocks(
    config: Config, length: int, seed: int, elements: int
) -> None:
    model, ids = random_model(config, seed), tokens(length, 2, seed)
    reference = Reference(released_weights(model), config.text, config.image_token_id)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_blocks(monkeypatch, elements)
        check_trace(reference, model.trace(ids), ids)


def test_the_stage_check_notices_a_broken_stage() -> None:
    """The check above can fail: each of these mistakes, made in the library's place, is caught."""
    config = small_config()
    model, ids = random_model(config), tokens(20)
    reference, trace = Reference(released_weights(model), config.text, config.image_token_id), model.trace(ids)
    check_trace(reference, trace, ids)
    broken: dict[str, torch.Tensor] = {
        "attn_in.3": trace["attn_in.3"] + 1e-3,
        "window.1": trace["window.1"] * 1.0625,
        "main.2": trace["main.2"].roll(1, 1),
        "keys.4": trace["keys.4"].roll(1, 1),
        "topk.2": trace["topk.2"].roll(1, 1),
        "topk.5": torch.where(trace["topk.5"] == 19, 0, trace["topk.5"]),
        "cand.4": trace["cand.4"].roll(1, 1),
        "attn_out.6": trace["attn_out.6"] * 1.001,
        "route.3": trace["route.3"].roll(1, 0),
        "ffn_out.0": trace["ffn_out.0"].roll(1, 1),
        "streams.5": trace["streams.5"].roll(1, 2),
        "logits": trace["logits"] + 1e-3,
    }
    for name, value in broken.items():
        with pytest.raises(AssertionError):
            check_trace(reference, trace | {name: value}, ids)


# --- blocks, batches, causality --------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("elements", [1, 3000, 12_000])
def test_block_wise_equals_plain(golden: Golden, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """From one query a block to a few, on the screened fixtures: the recorded logits to 1e-5 (other matrix shapes add
    in another order), the same selections, candidates and routes."""
    model, blocks = golden.model, []
    plain = model.trace(golden.ids)
    original = type(model.layers[0].attn)._blocks

    def spy(self: Any, *args: Any) -> list[tuple[int, int]]:
        ranges = list(original(self, *args))
        blocks.append(len(ranges))
        return ranges

    use_blocks(monkeypatch, elements)
    monkeypatch.setattr(type(model.layers[0].attn), "_blocks", spy)
    trace = model.trace(golden.ids)
    assert (trace["logits"] - golden.logits["nemo"]).abs().max() <= 1e-5
    comparison = diff_traces(trace, plain, atol=1e-4)
    counts = [found for found in comparison.differences if found.name.startswith("scored.")]  # of work, not of results
    assert len(comparison.differences) == len(counts), str(comparison.first)
    assert not comparison.only_a
    assert not comparison.only_b
    if elements == 1:
        assert set(blocks) == {golden.ids.shape[1]}
    assert max(blocks) > 1


@given(length=st.integers(1, 300), batch=st.integers(1, 3), elements=st.integers(1, 1 << 20), layer=st.integers(0, 6))
def test_blocks_cover_every_query_once_in_order(length: int, batch: int, elements: int, layer: int) -> None:
    model = Model(small_config(), device="meta")
    attention, x = model.layers[layer].attn, torch.empty(batch, length, 16, device="meta")
    entries = length // (model.plans[layer].ratio or 1)
    rows = torch.empty(batch, entries, 16, device="meta")
    kv = GlobalKV(layer, 1, rows, rows) if model.plans[layer].ratio else None
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_blocks(monkeypatch, elements)
        ranges = list(attention._blocks(x, kv))
    assert [position for start, stop in ranges for position in range(start, stop)] == list(range(length))


def fixed_routes(config: Config) -> Config:
    """The same, with every expert chosen by every token: group sizes, and so the order of FP32 sums, are constant."""
    return config.replace(text=config.text.replace(num_experts_per_tok=config.text.n_routed_experts))


@settings(max_examples=40)
@given(config=configs(), length=st.integers(2, 18), data=st.data(), seed=st.integers(0, 999))
@torch.no_grad()
def test_no_token_changes_anything_before_it(config: Config, length: int, data: st.DataObject, seed: int) -> None:
    """Bitwise: logits, streams, selections, candidates, routes and stored rows before token t are as they were."""
    model, ids = random_model(fixed_routes(config), seed), tokens(length, 2, seed)
    at = data.draw(st.integers(0, length - 1))
    changed = ids.clone()
    changed[:, at] = (ids[:, at] + data.draw(st.integers(1, 39))) % 40
    before, after = model.trace(ids), model.trace(changed)
    for name, value in before.items():
        kind, _, layer = name.partition(".")
        other = after[name]
        if kind == "route":
            value, other = value.unflatten(0, ids.shape), other.unflatten(0, ids.shape)
        rows = at // config.text.compress_ratios[int(layer)] if kind in ("main", "keys") else at
        assert torch.equal(value[:, :rows], other[:, :rows]), name
    assert not torch.equal(before["logits"][:, at], after["logits"][:, at]), "the token itself must matter"


@torch.no_grad()
def test_the_causality_check_notices_an_entry_seen_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry too many in ``visible_entries`` would show as a changed row before the changed token."""
    monkeypatch.setattr(
        v41lib.nn.attention,
        "visible_entries",
        lambda positions, ratio: torch.div(positions, ratio, rounding_mode="floor") + 1,
    )
    model, ids = random_model(fixed_routes(small_config())), tokens(12)
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 40
    assert not torch.equal(model(ids)[:, :7], model(changed)[:, :7])


@torch.no_grad()
def test_a_far_token_reaches_a_late_query_through_the_compressed_entries() -> None:
    """Token 0 is far outside all windows (7 layers x window 3) of the last query, and still matters."""
    model, ids = random_model(fixed_routes(small_config(index_topk=64, candidate_topk_blocks=64))), tokens(40)
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % 40
    assert not torch.equal(model(ids)[:, -1], model(changed)[:, -1])
    local = small_config(
        compress_ratios=[0] * 7, kv_source_layer_ids=[], index_source_layer_ids=[], candidate_source_layer_id=-1
    )
    model = random_model(fixed_routes(local))
    assert torch.equal(model(ids)[:, -1], model(changed)[:, -1])


# --- memory ----------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest storage that any operation returned. Views, expanded or not, cost what they view."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return out


def largest(model: Model, length: int, batch: int = 1) -> int:
    with torch.no_grad(), LargestTensor() as mode:
        model(tokens(length, batch))
    return mode.bytes


# One layer of each kind, so that a long prompt is quick; selections, pool and window far smaller than the prompt.
LONG = small_config(
    num_hidden_layers=4,
    compress_ratios=[0, 2, 1, 1],
    kv_source_layer_ids=[1, 2],
    index_source_layer_ids=[1, 2, 3],
    candidate_source_layer_id=2,
    candidate_topk_blocks=16,
    num_attention_heads=8,
    index_n_heads=8,
    index_topk=16,
    sliding_window=16,
    hc_mult=1,
)


def test_no_tensor_of_queries_times_keys_times_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2^18 elements a block, 2048 tokens never need a tensor of 4 MiB: S x T x heads would take 128 MiB, and even
    S x T without heads 16 MiB. What grows with the prompt does so in proportion."""
    use_blocks(monkeypatch, 1 << 18)
    model = random_model(LONG)
    sizes = {length: largest(model, length) for length in (512, 1024, 2048)}
    assert sizes[2048] < 4 << 20
    assert sizes[2048] <= 2.2 * sizes[1024] <= 2.2**2 * sizes[512]


def test_block_elements_bound_the_temporaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller budget makes the largest temporary smaller: FP32 products and int64 rankings of scores take at most 8
    bytes an element of the budget, until only what grows with the prompt is left (here half a MiB)."""
    model = random_model(LONG)
    for elements in (1 << 19, 1 << 17, 1 << 16):
        use_blocks(monkeypatch, elements)
        assert largest(model, 1024) <= max(8 * elements, 1 << 19), elements


def test_a_batch_shares_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts together keep to the same 8 bytes an element."""
    use_blocks(monkeypatch, 1 << 16)
    assert largest(random_model(LONG), 256, batch=8) <= 1 << 19


def test_the_measure_notices_plain_attention() -> None:
    """The meter itself: dense attention over the same prompt is seen at its full size."""
    with LargestTensor() as mode:
        q, k = torch.zeros(2048, 8, 4), torch.zeros(2048, 4)
        torch.einsum("shd,td->sht", q, k)
    assert mode.bytes >= 2048 * 2048 * 8 * 4


# --- whose tensors ---------------------------------------------------------------------------------------------------


def kv(owner: int) -> GlobalKV:
    return GlobalKV(owner, 1, torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))


def test_another_layers_tensors_are_refused_by_name() -> None:
    shared = Shared().publish(kv(2)).publish(Selection(4, torch.zeros(1, 2, 1))).publish(Candidates(20, 8, None))
    assert shared.kv_of(2).owner == 2
    with pytest.raises(RuntimeError, match=r"layer 8's global KV .*layer 2's"):
        shared.kv_of(8)
    with pytest.raises(RuntimeError, match=r"layer 2's selection .*layer 4's"):
        shared.selection_of(2)
    with pytest.raises(RuntimeError, match=r"layer 14's candidate pool .*layer 20's"):
        shared.candidates_of(14)


def test_what_nobody_published_is_refused_by_name() -> None:
    for read, what in (
        (Shared().kv_of, "global KV"),
        (Shared().selection_of, "selection"),
        (Shared().candidates_of, "pool"),
    ):
        with pytest.raises(RuntimeError, match=rf"layer 3's .*{what}.*nothing"):
            read(3)


def test_publishing_replaces_its_kind_alone_and_leaves_the_original() -> None:
    first = Shared().publish(kv(2)).publish(Selection(2, torch.zeros(1, 2, 1)))
    second = first.publish(kv(8))
    assert (first.kv_of(2).owner, second.kv_of(8).owner) == (2, 8)
    assert second.selection_of(2) is first.selection_of(2)
    with pytest.raises(RuntimeError):
        second.kv_of(2)
    with pytest.raises(AttributeError):
        first.kv = None  # type: ignore[misc]


@torch.no_grad()
def test_a_layer_refuses_to_read_what_its_plan_does_not_name() -> None:
    model, x = random_model(small_config()), random(1, 6, 16)
    _, shared = model.layers[2].attn(x, Shared())
    with pytest.raises(RuntimeError, match="layer 4's global KV"):
        model.layers[6].attn(x, shared)
    with pytest.raises(RuntimeError, match="layer 2's selection"):
        model.layers[3].attn(x, Shared(kv=shared.kv))
    with pytest.raises(RuntimeError, match="layer 2's global KV"):
        model.layers[3].attn(x, Shared(selection=shared.selection))
    _, shared = model.layers[4].attn(x, shared)
    with pytest.raises(RuntimeError, match="layer 4's candidate pool"):
        model.layers[5].attn(x, Shared(kv=shared.kv, selection=shared.selection))


@torch.no_grad()
def test_each_reader_reads_its_own_source(wide: Golden) -> None:
    """Two ratio-2 sources follow each other: a layer reads the latest one, and one that reuses publishes nothing."""
    model = wide.model
    seen: list[tuple[int, int, int]] = []
    for layer in model.layers:
        attention = layer.attn
        if attention.plan.mode != "local":
            seen.append((attention.plan.layer, attention.plan.kv_owner, attention.plan.index_owner))
    assert seen == [(1, 1, 1), (2, 1, 1), (3, 3, 3), (4, 4, 4), (5, 4, 4), (6, 4, 6)]
    trace = model.trace(wide.ids)
    x = trace["attn_in.2"]
    own = Shared(kv=model.layers[1].attn.publish(trace["attn_in.1"]), selection=Selection(1, trace["topk.1"]))
    out, after = model.layers[2].attn(x, own)
    assert torch.allclose(out, trace["attn_out.2"], atol=1e-5)
    assert after == own, "a layer that reuses publishes nothing"


@torch.no_grad()
def test_two_prompts_leave_nothing_with_each_other(tiny: Golden) -> None:
    """No state outlives a forward pass."""
    first = tiny.model(tiny.ids)
    tiny.model(tokens(50, vocab=64))
    assert torch.equal(tiny.model(tiny.ids), first)
