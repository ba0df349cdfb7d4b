"""What a model has learned: bits per byte on held-out files, beside an n-gram, and look-ups by distance and parity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from v41lib.model import Model
from v41lib.nn.attention import Attention
from v41lib.nn.compressor import visible_entries
from v41lib.training.forward import PLAIN, Switches, Window, forward, joint_attention
from v41lib.training.ngram import NGram
from v41lib.training.tasks import Batch, heldout_windows, recall, stream, two_hop

ROWS_AT_ONCE = 4  # sequences a forward pass: what fits a CPU's caches


@dataclass(frozen=True)
class Size:
    """How much is evaluated: text windows of ``length``, and so many sequences of each look-up."""

    windows: int = 100
    rows: int = 32
    length: int = 512
    pairs: int = 8
    hops: int = 4


FULL, QUICK = Size(), Size(windows=8, rows=8)


@torch.no_grad()
def surprise(model: Model, batch: Batch, switches: Switches = PLAIN) -> tuple[Float[Tensor, "B S"], Tensor]:
    """Bits of every target, and whether the model's first guess was it, both ``[B,S]``."""
    bits, hits = [], []
    for rows in range(0, len(batch.ids), ROWS_AT_ONCE):
        ids = batch.ids[rows : rows + ROWS_AT_ONCE].to(model.device)
        logits = forward(model, ids[:, :-1], switches.rows(slice(rows, rows + ROWS_AT_ONCE))).logits
        guess = logits.log_softmax(-1)
        bits.append(-guess.gather(-1, ids[:, 1:, None]).squeeze(-1).cpu() / math.log(2))
        hits.append((logits.argmax(-1) == ids[:, 1:]).cpu())
    return torch.cat(bits), torch.cat(hits)


def without_global(model: Model, stack: str | None = None) -> Switches:
    """The model with its global branch off, everywhere or in one stack ("encoder", "decoder")."""
    plans = model.plans
    return Switches(without_global=frozenset(p.layer for p in plans if stack in (None, p.stack)))


def reach(model: Model) -> int:
    """How many tokens back windows alone can carry anything: W - 1 a layer."""
    return len(model.plans) * (model.config.text.sliding_window - 1)


def evaluate(model: Model, heldout: UInt8[Tensor, " N"], size: Size = FULL, seed: int = 0) -> pd.DataFrame:
    """A row a measurement: its mean, its standard error over sequences, and how many sequences it is of.

    Look-ups lie farther back than windows reach. Controls switch the global branch off: in all layers, or in the
    encoder, which leaves the second hop, and then the first too, to the decoder.
    """
    was_training = model.training
    model.eval()
    text, off = heldout_windows(heldout, size.length, size.windows), without_global(model)
    decoder_only = without_global(model, "encoder")
    distance, rows = min(reach(model) + 1, size.length // 2), []
    for name, switches in (("bits per byte", PLAIN), ("bits per byte, global branch off", off)):
        rows.append(_mean(name, surprise(model, text, switches)[0].mean(1)))
    for parity in ("odd", "even"):
        generator = stream(seed, "heldout", 1 if parity == "odd" else 2)
        batch = recall(heldout, size.rows, size.length, generator, size.pairs, parity, distance)
        rows.append(_accuracy(f"recall, {parity} offsets", model, batch, PLAIN))
        rows.append(_accuracy(f"recall, {parity} offsets, global branch off", model, batch, off))
    hops = two_hop(heldout, size.rows, size.length, stream(seed, "heldout", 3), size.hops, distance)
    for name, switches in (("", PLAIN), (", encoder's global branch off", decoder_only), (", global branch off", off)):
        rows.append(_accuracy(f"two hops{name}", model, hops, switches))
    model.train(was_training)
    return pd.DataFrame(rows).set_index("measurement")


@torch.no_grad()
def selections(model: Model, batch: Batch) -> pd.DataFrame:
    """How well each indexer finds what its own attention would weigh most, a row a layer that selects.

    ``recall``: the share of the top-k by head-averaged attention over *all* visible entries that was selected;
    ``mass``: the share of that attention which the selection covers; ``recent``, ``recent mass``, ``random``: the same
    of the k newest entries, and the recall of k entries drawn at random. Means over the queries that see at least 2k
    entries, so that there is something to choose; layers without such a query are left out.
    """
    found: dict[int, list[list[float]]] = {}

    def probe(attn: Attention, q: Tensor, near: Window, main: Tensor, entries: Tensor) -> None:
        k, count = attn.text.index_topk, main.shape[1]
        visible = visible_entries(torch.arange(q.shape[1], device=q.device), attn.plan.ratio)
        queries = visible >= 2 * k
        if not bool(queries.any()):
            return
        places = torch.arange(count, device=q.device)
        absent = (places >= visible.unsqueeze(-1)).unsqueeze(0)
        weights = joint_attention(q, near, attn.attn_sink, main, absent)[1].float().mean(2)[:, queries]
        visible = visible[queries].unsqueeze(-1)
        wanted = torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, weights.topk(k, dim=-1).indices, True)
        chosen = torch.zeros(*weights.shape[:2], count + 1, dtype=torch.bool, device=q.device)
        kept = entries[:, queries]
        chosen = chosen.scatter_(-1, torch.where(kept < 0, count, kept), True)[..., :count]
        recent = ((places >= visible - k) & (places < visible)).expand_as(wanted)
        total = weights.sum(-1).clamp_min(1e-20)
        row = [float((wanted & of).sum(-1).float().mean() / k) for of in (chosen, recent)]
        row += [float(((weights * of).sum(-1) / total).mean()) for of in (chosen, recent)]
        found.setdefault(attn.plan.layer, []).append([*row, float((k / visible).mean())])

    for rows in range(0, len(batch.ids), ROWS_AT_ONCE):
        forward(model, batch.ids[rows : rows + ROWS_AT_ONCE, :-1].to(model.device), probe=probe)
    table = {layer: torch.tensor(parts).mean(0).tolist() for layer, parts in found.items()}
    columns = ["recall", "recent", "mass", "recent mass", "random"]
    return pd.DataFrame.from_dict(table, orient="index", columns=columns).rename_axis("layer")


def _mean(name: str, by_row: Tensor) -> dict[str, Any]:
    error = float(by_row.std() / len(by_row) ** 0.5) if len(by_row) > 1 else float("nan")
    return {"measurement": name, "mean": float(by_row.mean()), "error": error, "rows": len(by_row)}


def _accuracy(name: str, model: Model, batch: Batch, switches: Switches) -> dict[str, Any]:
    _, hits = surprise(model, batch, switches)
    return _mean(name, (hits & batch.answer).sum(1) / batch.answer.sum(1))


def ngram_bits(fitted: NGram, heldout: UInt8[Tensor, " N"], size: Size = FULL) -> dict[str, Any]:
    """The n-gram on the targets of :func:`evaluate`'s windows, its context beginning with the window as well."""
    windows = heldout_windows(heldout, size.length, size.windows).ids.to(torch.uint8).numpy()
    return _mean(
        "bits per byte, 5-gram", torch.tensor(np.stack([fitted.bits(window)[1:].mean() for window in windows]))
    )
