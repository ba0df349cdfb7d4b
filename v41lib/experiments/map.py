"""Chapter 01: which layer does what, by the schedule, and who reads whose KV, by disturbing it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from v41lib.config import preset, released
from v41lib.experiments.base import BaseParams
from v41lib.model import Model
from v41lib.nn.compressor import visible_entries
from v41lib.nn.quant import values
from v41lib.nn.shared import GlobalKV, Selection, Shared
from v41lib.plan import plan_layers

MODES = ("local", "full", "reindex", "reuse")


class Params(BaseParams):
    """``length`` tokens through the miniature: the released schedule of 40 layers at small widths, random weights."""

    length: int = Field(default=96, ge=1)
    seed: int = Field(default=0, ge=0)

    PROFILES: ClassVar[dict[str, dict[str, Any]]] = {"full": {"length": 512}, "gpu": {"length": 2048}}


def layers() -> pd.DataFrame:
    """The released model's plan, one row a layer: stack, ratio, mode, owners, candidate role, Engram (SPEC 2)."""
    plans = plan_layers(released().text)
    table = pd.DataFrame(
        {
            "layer": [p.layer for p in plans],
            "stack": [p.stack for p in plans],
            "mode": [p.mode for p in plans],
            "ratio": [p.ratio for p in plans],
            "KV from": [p.kv_owner for p in plans],
            "selection from": [p.index_owner for p in plans],
            "candidates": [p.candidate_role or "" for p in plans],
            "Engram": [p.engram for p in plans],
        }
    )
    return table.astype({"KV from": "Int64", "selection from": "Int64"}).set_index("layer")


def modes(table: pd.DataFrame) -> pd.DataFrame:
    """How many layers of each mode the encoder and the decoder have, from :func:`layers`."""
    counts = pd.crosstab(table["mode"], table["stack"]).reindex(MODES, fill_value=0)[["encoder", "decoder"]]
    return counts.assign(all=counts.sum(axis=1)).rename_axis(columns=None)


def reads_alike(table: pd.DataFrame) -> pd.DataFrame:
    """The layers in runs that read the same KV through the same selection, from :func:`layers`."""
    key = ["stack", "ratio", "KV from", "selection from"]
    filled = table.fillna({"KV from": -1, "selection from": -1}).reset_index()
    runs = filled.groupby(key, sort=False)["layer"].agg(["min", "max"]).sort_values("min").reset_index()
    names = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(runs["min"], runs["max"], strict=True)]
    shown = runs[key].astype(object).replace(-1, "none")
    return shown.assign(layers=names).set_index("layers")


@torch.no_grad()
def readers(params: Params) -> pd.DataFrame:
    """Whose KV and whose selection moves each layer, measured on the miniature by disturbing them one at a time.

    Every layer is given the same input as in an undisturbed run, so that only what it reads from elsewhere can move
    its output. One row a layer; columns ``("KV", s)`` and ``("selection", s)`` say whether source s's moved it.
    A layer's own selection is not disturbed: it would be made anew.
    """
    config = preset("miniature")
    model = Model(config, seed=params.seed, device=params.device)
    generator = torch.Generator().manual_seed(params.seed)
    ids = torch.randint(config.text.vocab_size, (1, params.length), generator=generator).to(params.device)
    inputs = {n: v for n, v in model.trace(ids).items() if n.startswith("attn_in.")}
    calm = _outputs(model, inputs, "", -1)
    moved = {}
    for plan in model.plans:
        for what, source in (("KV", plan.owns_kv), ("selection", plan.selects)):
            if source:
                stirred = _outputs(model, inputs, what, plan.layer)
                moved[what, plan.layer] = [not torch.equal(a, b) for a, b in zip(calm, stirred, strict=True)]
    return pd.DataFrame(moved).rename_axis(index="layer")


def _outputs(model: Model, inputs: dict[str, Tensor], what: str, source: int) -> list[Tensor]:
    """Each layer's attention output on its given input, with one source's KV or selection disturbed on publication."""
    shared, outputs = Shared(), []
    for plan, block in zip(model.plans, model.blocks, strict=True):
        x = inputs[f"attn_in.{plan.layer}"]
        if plan.owns_kv:
            kv = block.attn.publish(x)
            shared = shared.publish(_other_kv(kv) if (what, source) == ("KV", plan.layer) else kv)
        out, shared = block.attn(x, shared)
        if (what, source) == ("selection", plan.layer):
            shared = shared.publish(_other_selection(shared.selection_of(source), plan.ratio))
        outputs.append(out)
    return outputs


def _other_kv(kv: GlobalKV) -> GlobalKV:
    """The same entries in reverse order of channels: other values in the same formats."""
    return replace(kv, main=values(kv.main).flip(-1), index_keys=values(kv.index_keys).flip(-1))


def _other_selection(selection: Selection, ratio: int) -> Selection:
    """The oldest visible entry alone, for every query that sees one."""
    positions = torch.arange(selection.entries.shape[1], device=selection.entries.device)
    other = torch.full_like(selection.entries, -1)
    other[..., 0] = torch.where(visible_entries(positions, ratio) > 0, 0, -1)
    return replace(selection, entries=other)


def follows_schedule(moved: pd.DataFrame) -> bool:
    """Whether :func:`readers` found exactly the reads that the schedule names, no more and no fewer."""
    plans = plan_layers(released().text)
    for name, column in moved.items():
        what, source = cast(tuple[str, int], name)
        owners = [p.kv_owner if what == "KV" else p.index_owner for p in plans]
        own_selection = source if what == "selection" else None
        if [owner == source and p.layer != own_selection for p, owner in zip(plans, owners, strict=True)] != list(
            column
        ):
            return False
    return True


def settled(params: Params) -> dict[str, int | bool]:
    """The values of this chapter's claims: counts from the schedule, reads from the measurement."""
    table = layers()
    counts = modes(table)["all"]
    return {
        **{f"layers-{mode}": int(counts[mode]) for mode in MODES},
        "decoder-first-layer": int(table.index[table["stack"] == "decoder"].min()),
        "readers-follow-schedule": follows_schedule(readers(params)),
    }
