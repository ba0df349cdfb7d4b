"""Operations: closed forms against hand-made numbers, against parameters, and against what the model executes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.support import configs, random_model, small_config, small_text, tokens
from v41lib import Config, Model, preset, released
from v41lib.accounting import flops, params
from v41lib.accounting.flops import Flops, decode_flops, layer_flops, prefill_flops
from v41lib.engine import Engine
from v41lib.nn import hyper
from v41lib.plan import plan_layers

MILLION = 2**20

# --- the released model, by hand -------------------------------------------------------------------------------------


def test_a_decode_step_by_hand() -> None:
    """Recomputed with the released sizes: 40 layers, at 4,096 tokens. A multiply-add is two."""
    ours = decode_flops(released().text, 4096).by_component()
    assert ours["q_and_kv"] == 40 * 2 * (1280 * 5120 + 64 * 512 * 1280 + 512 * 5120)
    assert ours["wo_a"] == 40 * 2 * 8 * 1024 * 4096
    assert ours["wo_b"] == 40 * 2 * 5120 * 8192
    assert ours["window"] == 40 * 128 * 64 * 512 * 2 * 2
    assert ours["selected"] == 38 * 512 * 64 * 512 * 2 * 2
    assert ours["compressor"] == (3 * 2 + 1) * 2 * 512 * 5120
    assert ours["index_keys"] == 4 * 2 * 128 * 512
    assert ours["index_queries"] == 8 * 2 * 32 * 128 * 1280
    assert ours["index_weights"] == 8 * 2 * 32 * 5120
    assert ours["index_scores"] == (3 * 2048 + 5 * 4096) * 2 * 32 * 128
    assert ours["index_sum"] == (3 * 2048 + 5 * 4096) * 2 * 32
    assert ours["mhc_projection"] == 80 * 2 * 24 * 4 * 5120
    assert ours["mhc_mix"] == 80 * 2 * (4 + 16 + 4) * 5120 + 2 * 4 * 5120
    assert ours["sinkhorn"] == 80 * 16 * (4 + 2 * (1 + 19 * 2))
    assert ours["router"] == 40 * 2 * 384 * 5120
    assert ours["routed_experts"] == 40 * 6 * 2 * 3 * 2304 * 5120
    assert ours["shared_expert"] == 40 * 2 * 3 * 2304 * 5120
    assert ours["engram"] == 2 * 2 * 5120 * 5 * 24 * 256
    assert ours["head"] == 2 * 129280 * 5120


def test_the_published_growth() -> None:
    """SPEC 11: 35.7 to 57.5 GFLOP, about +61 %, which leaves the sum over heads out."""
    text = released().text
    short, long = (decode_flops(text, context) for context in (4096, MILLION))
    scores = [work.total - work.by_component()["index_sum"] for work in (short, long)]
    assert [f"{count / 1e9:.1f}" for count in scores] == ["35.7", "57.5"]
    assert f"{scores[1] / scores[0] - 1:.2f}" == "0.61"
    keys = (3 * 2**19 + 2**20 + 4 * 16384) - (3 * 2048 + 5 * 4096)
    assert long.total - short.total == keys * 2 * 32 * 129


def test_only_the_index_grows_beyond_windows_and_selections() -> None:
    short, long = (decode_flops(released().text, context).by_component() for context in (4096, MILLION))
    assert {name for name in short if short[name] != long[name]} == {"index_scores", "index_sum"}


def test_the_slope_is_a_difference_quotient() -> None:
    text = released().text
    assert flops.slope(text) == (3 * 2 * 32 * 129) / 2 + 2 * 32 * 129 == 20_640
    for context in (16_384, 100_000, MILLION - 2):
        assert decode_flops(text, context + 2).total - decode_flops(text, context).total == 2 * 20_640
    # Below the pool's size later indexers still grow: five scan all, three scan half.
    assert decode_flops(text, 4098).total - decode_flops(text, 4096).total == (3 + 5 * 2) * 2 * 32 * 129


def test_keys_scored_by_the_released_layers() -> None:
    text = released().text
    plans = plan_layers(text)
    at = lambda context: {  # noqa: E731
        p.layer: flops.keys_scored(text, p, range(context - 1, context)) for p in plans if p.selects
    }
    assert at(4096) == {2: 2048, 8: 2048, 14: 2048, 20: 4096, 24: 4096, 28: 4096, 32: 4096, 36: 4096}
    assert at(16_385) == {2: 8192, 8: 8192, 14: 8192, 20: 16_385, 24: 16_384, 28: 16_384, 32: 16_384, 36: 16_384}
    assert at(MILLION)[20] == MILLION and at(MILLION)[36] == 16_384
    assert sum(flops.keys_scored(text, p, range(10)) for p in plans if not p.selects) == 0


def test_replay_halves_a_long_prefill() -> None:
    text = released().text
    for context in (32_768, 131_072, MILLION):
        ratio = prefill_flops(text, context, "replay").total / prefill_flops(text, context).total
        assert abs(ratio - 0.5) < 0.03
    assert prefill_flops(text, 100, "replay") == prefill_flops(text, 100)


# --- conventions -----------------------------------------------------------------------------------------------------


def test_conventions_name_every_component_and_no_other() -> None:
    for convention in flops.CONVENTIONS:
        assert set(convention.formats) == set(flops.COMPONENTS)
    assert len({convention.name for convention in flops.CONVENTIONS}) == len(flops.CONVENTIONS)


def test_growth_by_convention_by_hand() -> None:
    """In GFLOP, from the components of the two tests above, summed on paper."""
    text = released().text
    short, long = (decode_flops(text, context) for context in (4096, MILLION))
    growth = {c.name: long.weighted(c) / short.weighted(c) - 1 for c in flops.CONVENTIONS}
    more = (2_686_976 - 26_624) * 2 * 32 * 1e-9  # head sums of the added keys; 128 times that are products
    halved = 40 * 2 * (126_615_552 + 7 * 35_389_440) / 1e9 + 0.6291456 + 0.08388608 + 0.000524288
    full = 0.671088640 + 2.550136832 + 0.036700160 + 0.002621440 + 0.0786432 + 0.01970176 + 0.000104960
    full += 0.1572864 + 1.3238272 + 0.001703936
    base = halved / 2 + full + 0.218103808 / 4
    assert growth["wider operand"] == pytest.approx(33 * more / base)
    assert growth["wo_a in BF16"] == pytest.approx(33 * more / (base + 2.68435456 / 2))
    assert growth["experts in FP4"] == pytest.approx(33 * more / (base - 16.9869312 / 4))
    assert growth["unweighted"] == pytest.approx(129 * more / (halved + full + 0.218103808))
    assert 0.25 < growth["wo_a in BF16"] < growth["wider operand"] < 0.30


def test_unweighted_is_the_total() -> None:
    work = decode_flops(released().text, 5000)
    assert work.weighted(flops.CONVENTIONS[-1]) == work.total


# --- against parameters ----------------------------------------------------------------------------------------------

WEIGHTS = (
    "q_and_kv", "wo_a", "wo_b", "compressor", "index_keys", "index_queries", "index_weights", "mhc_projection",
    "router", "routed_experts", "shared_expert", "engram",
)  # fmt: skip


@pytest.mark.parametrize("name", ["released", "tiny", "wide", "miniature", "bench"])
def test_a_token_multiplies_each_active_matrix_once(name: str) -> None:
    """Twice the active parameters, vectors apart, for a token that closes the group of every source."""
    text = preset(name).text
    work, active = decode_flops(text, 2**12).by_component(), params.active(text)
    sites = 2 * text.num_hidden_layers
    vectors = sites * (text.hc_mult * (text.hc_mult + 2) + 3) + sites * text.hidden_size  # mHC; norms
    vectors += text.num_hidden_layers * (
        text.q_lora_rank + text.head_dim + text.num_attention_heads + text.n_routed_experts
    )
    vectors += len(text.kv_source_layer_ids) * (text.head_dim + text.index_head_dim)
    vectors += len(text.engram_layer_ids) * 2 * text.hc_mult * text.hidden_size
    assert sum(work[part] for part in WEIGHTS) == 2 * (active.stacks - vectors)
    assert work["head"] == 2 * (active.head - text.hidden_size)


# --- against what is executed ----------------------------------------------------------------------------------------


@contextmanager
def executed(model: Model) -> Iterator[Counter[str]]:
    """FLOPs that torch counts while the block runs, by the innermost module that was called (``""`` outside all)."""
    counts: Counter[str] = Counter()
    stack: list[tuple[str, int]] = [("", 0)]
    hooks: list[Any] = []
    with FlopCounterMode(display=False) as counter:

        def book() -> None:
            name, before = stack[-1]
            counts[name] += counter.get_total_flops() - before

        def enter(name: str) -> None:
            book()
            stack.append((name, counter.get_total_flops()))

        def leave() -> None:
            book()
            stack.pop()
            stack[-1] = (stack[-1][0], counter.get_total_flops())

        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
            hooks.append(module.register_forward_hook(lambda *_: leave()))

        def inside(name: str | None, work: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any) -> Any:
                enter(name or f"{stack[-1][0]}.{work.__name__}")
                try:
                    return work(*args)
                finally:
                    leave()

            return wrapped

        for block in model.blocks:  # an engine calls this and not the module
            block.attn.attend_rows = inside(f"layers.{block.plan.layer}.attn", block.attn.attend_rows)  # type: ignore
        own = hyper.sinkhorn
        hyper.sinkhorn = inside(None, own)  # no module, and inside one whose projection is counted by itself
        try:
            yield counts
        finally:
            hyper.sinkhorn = own
            for hook in hooks:
                hook.remove()
            for block in model.blocks:
                del block.attn.attend_rows
        book()
        assert sum(counts.values()) == counter.get_total_flops()


def in_layer(counts: Counter[str], layer: int) -> dict[str, int]:
    """What a layer executed, by the components that its modules separate; ``attention`` is what has no module."""
    found: dict[str, int] = Counter()
    prefix = f"layers.{layer}"
    parts = {
        "attn.wq_a": "q_and_kv",
        "attn.wq_b": "q_and_kv",
        "attn.wkv": "q_and_kv",
        "attn.wo_b": "wo_b",
        "attn.compressor": "compressor",
        "attn.indexer.wk": "index_keys",
        "attn.indexer.wq_b": "index_queries",
        "attn.indexer.weights_proj": "index_weights",
        "attn": "attention",
        "hc_": "mhc_projection",
        "ffn.gate": "router",
        "ffn.experts": "routed_experts",
        "ffn.shared_experts": "shared_expert",
        "": "mhc_mix",
    }
    for name, count in counts.items():
        if name == prefix or name.startswith(prefix + "."):
            inside = name[len(prefix) + 1 :]
            part = next(part for start, part in parts.items() if inside.startswith(start))
            part = "sinkhorn" if inside.endswith("sinkhorn") else part
            found[part] += count
    return found


EXACT = (
    "q_and_kv", "wo_b", "compressor", "index_keys", "index_queries", "index_weights", "mhc_projection", "router",
    "routed_experts", "shared_expert",
)  # fmt: skip


def assert_exact_parts(model: Model, counts: Counter[str], closed: Flops) -> None:
    """Products that nothing pads: equal in every layer. What is small may be executed as products or not.

    Collapse and expand have as many as they need. Sinkhorn's sums of R may be products with matrices of R*R, mostly
    zeros: R^4 multiply-adds a normalisation, where R*R additions are needed.
    """
    text = model.config.text
    for layer, expected in enumerate(closed.layers):
        found = in_layer(counts, layer)
        assert {part: found.get(part, 0) for part in EXACT} == {part: getattr(expected, part) for part in EXACT}, layer
        assert found.get("mhc_mix", 0) <= expected.mhc_mix
        sites = expected.mhc_projection // (2 * text.hc_mult**2 * (text.hc_mult + 2) * text.hidden_size)  # x rows
        products = sites * (2 * text.hc_sinkhorn_iters - 1) * 2 * text.hc_mult**4
        assert found.get("sinkhorn", 0) in (0, products)
    assert counts["head"] == closed.head


def decode_step(config: Config, context: int) -> None:
    """One decode step, executed: every component equals the closed form, scores apart where nothing is to choose."""
    text = config.text
    model = random_model(config)
    engine, ids = Engine(model), tokens(context, vocab=text.vocab_size)
    state = engine.prefill(ids[:, :-1])
    with executed(model) as counts:
        engine.decode(state, ids[:, -1:])
    closed = decode_flops(text, context)
    assert_exact_parts(model, counts, closed)
    everything = not any(p.candidate_role == "source" for p in plan_layers(text))
    for plan, expected in zip(plan_layers(text), closed.layers, strict=True):
        attention = expected.wo_a + expected.window + expected.selected
        if plan.selects:
            visible = context // plan.ratio
            chooses = visible > text.index_topk
            if plan.candidate_role is not None and not everything:
                chooses = chooses or visible > flops.pool_size(text)  # the pool must be chosen, or is searched
            attention += (expected.index_scores + expected.index_sum) * chooses
        assert in_layer(counts, plan.layer).get("attention", 0) == attention, plan


@pytest.mark.parametrize(("name", "context"), [("tiny", 30), ("wide", 41), ("miniature", 90), ("bench", 70)])
@torch.no_grad()
def test_a_decode_step_is_executed_as_counted(name: str, context: int) -> None:
    decode_step(preset(name), context)


@settings(max_examples=40)
@given(config=configs(max_layers=8), context=st.integers(2, 30))
@torch.no_grad()
def test_any_decode_step_is_executed_as_counted(config: Config, context: int) -> None:
    decode_step(config, context)


@settings(max_examples=40)
@given(config=configs(max_layers=8), length=st.integers(1, 24), data=st.data())
@torch.no_grad()
def test_any_prefill_is_executed_as_counted(config: Config, length: int, data: st.DataObject) -> None:
    """Exactly, where nothing is padded; attention within what padding and skipped scores allow."""
    text, model = config.text, random_model(config)
    arguments: dict[str, Any] = {"mode": "exact"}
    if data.draw(st.booleans()) and model.cut < len(model.layers):
        first = data.draw(st.integers(model.cut, len(model.layers) - 1))
        arguments = {"mode": "replay", "replay_from": first, "replay_len": data.draw(st.integers(1, 26))}
    with executed(model) as counts:
        Engine(model).prefill(tokens(length), **arguments)
    closed = prefill_flops(text, length, **arguments)
    assert_exact_parts(model, counts, closed)
    attended, a_key = 4 * text.num_attention_heads * text.head_dim, 2 * text.index_n_heads * (text.index_head_dim + 1)
    for plan, expected in zip(model.plans, closed.layers, strict=True):
        rows = expected.wo_b // (2 * text.hidden_size * text.o_groups * text.o_lora_rank)
        found = in_layer(counts, plan.layer).get("attention", 0) - expected.wo_a
        assert found >= expected.window + expected.selected
        seen = 0 if plan.mode == "local" else length // plan.ratio
        most = rows * attended * (length + min(text.index_topk, seen))
        if plan.selects:
            most += rows * a_key * max(seen, flops.pool_size(text) * (plan.candidate_role == "consumer"))
        assert found <= most


@torch.no_grad()
def test_a_skipped_score_is_the_only_work_left_out() -> None:
    """Two visible entries of which four may be kept: the mechanism needs no score, and none is executed."""
    config = small_config()
    model = random_model(config)
    engine = Engine(model)
    state = engine.prefill(tokens(1))
    with executed(model) as counts:
        engine.decode(state, tokens(2)[:, 1:])
    closed = decode_flops(config.text, 2).layers[4]
    assert closed.index_scores == 2 * (2 * 3 * 8)
    assert in_layer(counts, 4)["attention"] == closed.wo_a + closed.window + closed.selected


# --- sums over rows --------------------------------------------------------------------------------------------------


@given(config=configs(max_layers=8), length=st.integers(1, 40), start=st.integers(0, 40))
def test_rows_add_up(config: Config, length: int, start: int) -> None:
    """A range of rows costs what its rows cost one by one."""
    for plan in plan_layers(config.text):
        whole = layer_flops(config.text, plan, range(start, start + length), since=start)
        single = [layer_flops(config.text, plan, range(i, i + 1), since=start) for i in range(start, start + length)]
        assert whole.total == sum(one.total for one in single)


@given(config=configs(max_layers=8), context=st.integers(1, 40))
def test_keys_are_counted_as_in_loops(config: Config, context: int) -> None:
    text = config.text
    a_key = 4 * text.num_attention_heads * text.head_dim
    for plan, layer in zip(plan_layers(text), prefill_flops(text, context).layers, strict=True):
        near = sum(1 for i in range(context) for j in range(context) if i - text.sliding_window < j <= i)
        assert layer.window == near * a_key
        if plan.mode != "local":
            far = sum(min(sum(1 for g in range(i + 1) if (g + 1) * plan.ratio <= i + 1), text.index_topk)
                      for i in range(context))  # fmt: skip
            assert layer.selected == far * a_key


def test_tables_add_up() -> None:
    work = prefill_flops(small_text(), 20)
    table = work.table()
    assert list(table.index) == ["0", "1", "2", "3", "4", "5", "6", "head"]
    assert int(table["total"].sum()) == work.total == sum(work.by_component().values())
    assert table.drop(columns="total").sum().to_dict() == work.by_component()


# --- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tokens": 0}, "tokens = 0"),
        ({"tokens": 9, "mode": "half"}, "mode = 'half'"),
        ({"tokens": 9, "replay_len": 2}, "mean something in mode='replay' only"),
        ({"tokens": 9, "mode": "replay", "replay_len": 0}, "replay_len = 0"),
        ({"tokens": 9, "mode": "replay", "replay_from": 3}, "replay_from = 3: must be 4 to 6"),
        ({"tokens": 9, "mode": "replay", "replay_from": 7}, "replay_from = 7"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", "\\(")):
        prefill_flops(small_text(), **arguments)


def test_a_context_holds_its_token() -> None:
    with pytest.raises(ValueError, match="context = 0"):
        decode_flops(small_text(), 0)
