"""Layer by layer: every mlx-lm layer gets the input that v41lib's layer had, and must compute the same.

Inside a layer the two sides are also compared where they decide: at each rounding, selection, candidate pool and route.
FP32 sums in another order differ by about 1e-7 of their size, and a decision can turn on that. So these may differ, but
only as far as a margin, measured each time on v41lib's own numbers, explains it:

* an element, or a block's scale, within ``ROUNDING_MARGIN`` of an FP8 or FP4 rounding edge;
* an entry, block or expert within ``CUT_MARGIN`` of the cut. Equal scores, exactly 0 where all heads' ReLUs are closed,
  are a margin of zero: nothing says which must win. (MLX's CPU backend happens to prefer the earlier one, as v41lib.)

And one known error of mlx-lm: when a candidate pool holds fewer entries than a selection has slots, it fills the rest
with visible entries from outside the pool, where the specification leaves them absent.

An explained difference is counted and undone: the mlx-lm layer goes on with v41lib's decision. So nothing that follows
is excused: all values of all rows must agree to ``TOLERANCE``. An unexplained difference is reported and left in place.
A layer without differences runs untouched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.parity.mlx_bridge import mx, other, to_mlx, to_torch
from tests.parity.recording import (
    LayerRecord,
    as_mask,
    block_scores,
    by_block,
    cut_margins,
    record_layers,
    rounding_margins,
    router_scores,
    swap_margins,
)
from v41lib import Model
from v41lib.nn.compressor import visible_entries

TOLERANCE = 1e-4
# Of a block's largest magnitude; the most ever needed was 1.3e-6, in 60 million elements.
ROUNDING_MARGIN = 3e-6
# Of the row's largest score. Nothing was ever needed: queries and keys are equal by then, only weighted sums are not.
CUT_MARGIN = 1e-6
# How many of the decisions may be excused at all: ten times what was measured for elements; no row was, in 500,000.
ROUNDED_SHARE = 1e-4
CUT_SHARE = 1e-3
ROUNDED, CUTS, SURPLUS = ("window", "main", "keys", "queries"), ("topk", "cand", "route"), "surplus slots"


@dataclass
class Outcome:
    """What a comparison found. ``failures`` must be empty; the rest is what was measured."""

    failures: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)  # stage: largest absolute difference
    compared: Counter[str] = field(default_factory=Counter)  # elements rounded and rows decided, by kind
    excused: Counter[str] = field(default_factory=Counter)
    margin: dict[str, float] = field(default_factory=dict)  # kind: the largest margin that was needed
    ties: int = 0  # rows with equal scores at the cut

    def merge(self, more: Outcome) -> None:
        self.failures += more.failures
        self.compared += more.compared
        self.excused += more.excused
        self.ties += more.ties
        for mine, theirs in ((self.worst, more.worst), (self.margin, more.margin)):
            for key, value in theirs.items():
                mine[key] = max(mine.get(key, 0.0), value)

    def share(self, kinds: tuple[str, ...]) -> float:
        return sum(self.excused[kind] for kind in kinds) / max(sum(self.compared[kind] for kind in kinds), 1)


class Guide:
    """Watches one mlx-lm layer at a time, compares it with a v41lib record, and undoes explained differences."""

    def __init__(self, model: Model) -> None:
        self.model, self.text, self.outcome = model, model.config.text, Outcome()
        self.record: LayerRecord
        self.called: Counter[str] = Counter()

    # --- what a difference leads to

    def fail(self, stage: str, what: str) -> None:
        self.outcome.failures.append(f"layer {self.record.layer}, {stage}: {what}")

    def close(self, stage: str, ours: Tensor, theirs: mx.array | Tensor) -> None:
        got = theirs if isinstance(theirs, Tensor) else to_torch(theirs)
        if got.shape != ours.shape:
            self.fail(stage, f"shapes {list(ours.shape)} and {list(got.shape)}")
            return
        largest = float((got - ours).abs().max()) if ours.numel() else 0.0
        self.outcome.worst[stage] = max(self.outcome.worst.get(stage, 0.0), largest)
        if not largest <= TOLERANCE:  # a NaN fails too
            self.fail(stage, f"differs by {largest:.3g}, allowed {TOLERANCE:g}")

    def explain(self, kind: str, margins: Tensor, allowed: float) -> bool:
        """Count these differences if their margins explain every one of them, else report them."""
        needed = float(margins.max())
        if not needed <= allowed:
            self.fail(kind, f"{len(margins)} differ and need a margin of {needed:.3g}, allowed {allowed:g}")
            return False
        self.outcome.excused[kind] += len(margins)
        self.outcome.margin[kind] = max(self.outcome.margin.get(kind, 0.0), needed)
        return True

    # --- the watched pieces of mlx-lm; each runs the original first

    def quantiser(self, four_bit: bool, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def watched(x: mx.array, *args: Any, **options: Any) -> mx.array:
            result = original(x, *args, **options)
            kind = "window"
            if four_bit:
                kind = "main" if options.get("e4m3_scale") else "queries" if x.ndim == 4 else "keys"
            self.called[kind] += 1
            if kind not in self.record.rounded:
                self.fail(kind, "rounded by mlx-lm alone")
                return result
            before, after = self.record.rounded[kind]
            self.close(f"{kind}, unrounded", before, x)
            theirs = to_torch(result)
            self.outcome.compared[kind] += after.numel()
            if theirs.shape != after.shape or torch.equal(theirs, after):  # shapes are reported above
                return result
            # Both results must lie within reach: v41lib's own too, or a wrong rounding of its would count as explained.
            margins = torch.maximum(rounding_margins(kind, before, after), rounding_margins(kind, before, theirs))
            margins = margins[theirs != after]
            return to_mlx(after) if self.explain(kind, margins, ROUNDING_MARGIN) else result

        return watched

    def indexer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: Any, *args: Any, **options: Any) -> tuple[mx.array, mx.array | None]:
            self.called["topk"] += 1
            topk, candidates = original(module, *args, **options)
            scores = self.record.scores
            if scores is None:
                self.fail("topk", "selected by mlx-lm alone")
            elif scores.shape[-1]:
                topk = self.selection(scores, topk)
                if module.is_candidate_source:
                    candidates = self.candidates(scores, candidates)
            elif topk.shape[-1]:
                self.fail("topk", "mlx-lm selects where nothing is compressed yet")
            return topk, candidates

        return watched

    def selection(self, scores: Tensor, topk: mx.array) -> mx.array:
        entries, count = self.record.notes["topk"][..., : topk.shape[-1]], scores.shape[-1]
        ours, theirs = as_mask(entries, count), as_mask(to_torch(topk), count)
        self.outcome.compared["topk"] += ours[..., 0].numel()
        self.outcome.ties += int((cut_margins(scores, ours) == 0).sum())
        rows = (ours != theirs).any(-1)
        if not rows.any():
            return topk
        surplus = rows & self.surplus(scores, ours, theirs, topk.shape[-1])
        self.outcome.excused[SURPLUS] += int(surplus.sum())
        rows &= ~surplus
        margins = swap_margins(scores[rows], ours[rows], theirs[rows])
        return to_mlx(entries.int()) if not len(margins) or self.explain("topk", margins, CUT_MARGIN) else topk

    def surplus(self, scores: Tensor, ours: Tensor, theirs: Tensor, width: int) -> Tensor:
        """The rows ``[B,S]`` of mlx-lm's known error, and of nothing else.

        v41lib selects the whole pool and mlx-lm that and more, all of it visible, to fill the selection's width.
        """
        plan = self.model.plans[self.record.layer]
        if plan.candidate_role != "consumer":
            return torch.zeros(ours.shape[:2], dtype=torch.bool)
        count = visible_entries(torch.arange(ours.shape[1]), plan.ratio)
        visible = torch.arange(ours.shape[-1]) < count.unsqueeze(-1)
        whole_pool = (ours == (scores > -torch.inf)).all(-1)
        more = (ours <= theirs).all(-1) & (theirs <= visible).all(-1)
        return whole_pool & more & (theirs.sum(-1) == count.clamp_max(width))

    def candidates(self, scores: Tensor, candidates: mx.array) -> mx.array:
        size, pool = self.text.candidate_block_size, self.record.notes["cand"]
        ours = by_block(pool, size)
        entries = to_torch(candidates) & (scores > -torch.inf)  # each side marks what is invisible as it likes
        theirs = by_block(entries, size)
        self.outcome.compared["cand"] += ours[..., 0].numel()
        rows = (ours != theirs).any(-1)
        if not entries[~rows].equal(pool[~rows]):
            self.fail("cand", "the same blocks hold different entries")
        if not rows.any():
            return candidates
        margins = swap_margins(block_scores(scores, size)[rows], ours[rows], theirs[rows])
        return to_mlx(pool) if self.explain("cand", margins, CUT_MARGIN) else candidates

    def router(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(module: Any, x: mx.array) -> tuple[mx.array, mx.array]:
            self.called["route"] += 1
            chosen, weights = original(module, x)
            route = self.model.layers[self.record.layer].ffn.gate(self.record.notes["ffn_in"].flatten(0, 1))
            count = self.text.n_routed_experts
            ours, theirs = as_mask(route.experts, count), as_mask(to_torch(chosen), count)
            self.outcome.compared["route"] += len(ours)
            rows = (ours != theirs).any(-1)
            if rows.any():
                margins = swap_margins(router_scores(self.model, self.record)[rows], ours[rows], theirs[rows])
                if self.explain("route", margins, CUT_MARGIN):
                    chosen, weights = to_mlx(route.experts.int()), to_mlx(route.weights)
            dense = torch.zeros(ours.shape)
            spread = dense.scatter(-1, to_torch(chosen).long(), to_torch(weights))
            self.close("route weights", dense.scatter(-1, route.experts, route.weights), spread)
            return chosen, weights

        return watched

    def sublayer(self, name: str, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def watched(module: Any, x: mx.array, **options: Any) -> mx.array:
            self.called[name] += 1
            self.close(f"{name}_in", self.record.notes[f"{name}_in"], x)
            out = original(module, x, **options)
            self.close(f"{name}_out", self.record.notes[f"{name}_out"], out)
            return out

        return watched

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Put the watched pieces in mlx-lm's place for a while."""
        pieces: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (other, "_fake_quant_fp8", lambda original: self.quantiser(False, original)),
            (other, "_fake_quant_fp4", lambda original: self.quantiser(True, original)),
            (other.Indexer, "__call__", self.indexer),
            (other.Router, "__call__", self.router),
            (other.Attention, "__call__", lambda original: self.sublayer("attn", original)),
            (other.MoE, "__call__", lambda original: self.sublayer("ffn", original)),
        ]
        saved = [(owner, name, getattr(owner, name)) for owner, name, _ in pieces]
        try:
            for owner, name, watch in pieces:
                setattr(owner, name, watch(getattr(owner, name)))
            yield
        finally:
            for owner, name, original in saved:
                setattr(owner, name, original)

    # --- one layer

    def layer(self, mirror: other.Model, record: LayerRecord) -> None:
        """Run one mlx-lm layer on the v41lib layer's input and compare everything it computes."""
        self.record, plan = record, self.model.plans[record.layer]
        self.called.clear()
        batch, length = record.residual.pre.shape[:2]
        rows = other._window_indices(previous=0, length=length, window=self.text.sliding_window)
        streams, pre = mirror.layers[record.layer](
            to_mlx(record.residual.streams),
            to_mlx(record.residual.pre),
            start_pos=0,
            window_idx=mx.broadcast_to(rows, (batch, *rows.shape)),
            cache=other.LayerCache(self.text.sliding_window),
            shared=self.shared(record),
        )
        self.close("streams", record.residual_after.streams, streams)
        self.close("pre", record.residual_after.pre, pre)

        # A piece that is not reached compares nothing.
        expected = {"attn", "ffn", "route", "window"} | ({"topk"} if plan.selects else set())
        if length >= max(plan.ratio, 1):
            expected |= ({"main", "keys"} if plan.owns_kv else set()) | ({"queries"} if plan.selects else set())
        if self.called != Counter(expected):
            self.fail("structure", f"computed {dict(self.called)}, expected each once: {sorted(expected)}")

    def shared(self, record: LayerRecord) -> dict[str, mx.array | None]:
        """What the v41lib layer read of earlier layers, under mlx-lm's names. A source makes its own."""
        plan, shared = self.model.plans[record.layer], record.shared
        if plan.mode == "local" or plan.owns_kv:
            return {}
        kv = shared.kv_of(plan.kv_owner)
        if not kv.main.shape[1]:
            return {"compress_kv": None, "index_k": None}
        state: dict[str, mx.array | None] = {"compress_kv": to_mlx(kv.main), "index_k": to_mlx(kv.index_keys)}
        if plan.mode == "reuse":
            state["topk_idx"] = to_mlx(shared.selection_of(plan.index_owner).entries.int())
        elif plan.candidate_role == "consumer":
            state["candidates"] = to_mlx(record.notes["cand"])
        return state


def compare(model: Model, mirror: other.Model, ids: Tensor) -> Outcome:
    """Compare every layer, and the head, on ``ids [B,S]``."""
    records, logits = record_layers(model, ids)
    guide = Guide(model)
    with guide.watching():
        for record in records:
            guide.layer(mirror, record)
    last = records[-1].residual_after
    collapsed = other._collapse(to_mlx(last.streams), to_mlx(last.pre))
    guide.close("logits", logits, mirror.lm_head(mirror.model.norm(collapsed)))
    return guide.outcome
