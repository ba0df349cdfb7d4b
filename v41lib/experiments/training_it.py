"""Chapter 13: how the small models were trained, which choices mattered, and what the models have learned."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any, ClassVar

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from v41lib import checkpoint
from v41lib.experiments.base import BaseParams
from v41lib.ledger import Measured
from v41lib.model import Model
from v41lib.nn.hyper import collapse, expand
from v41lib.nn.shared import Shared
from v41lib.resources import data_path
from v41lib.training import recipe as recipes
from v41lib.training.evaluation import selections
from v41lib.training.forward import PLAIN, Rows, attend
from v41lib.training.loop import CURVE, RECORD, Run, Stepper, begin, train_step
from v41lib.training.optim import Optimisers, optimisers
from v41lib.training.recipe import draw
from v41lib.training.tasks import corpus, heldout_windows
from v41lib.training.weights import EVALUATION, SELECTIONS

RECORDED = ("results/training/*/*.csv", "recipes/*.yml")  # what the verdicts rest on beside code
BASE = "small"
# What each arm changes, and how a page calls it.
ARMS = {
    "small-adamw": "AdamW for hidden matrices",
    "small-whole": "queries orthogonalised whole",
    "small-balanced": "balanced momentum for embedding and head",
    "small-sparse": "no dense warm-up",
    "small-untaught": "indexers not taught",
    "small-even": "pairs at even offsets only",
}
MODELS = ("main", "capped", "aware")
BITS, OFF = "bits per byte", "bits per byte, global branch off"
NGRAM, NGRAM_ALL = "bits per byte, 5-gram of the same bytes", "bits per byte, 5-gram of all training text"
ODD, EVEN = "recall, odd offsets", "recall, even offsets"
HOPS = "two hops, encoder's global branch off"


class Params(BaseParams):
    """Live: ``steps`` of the baseline are trained again, and ``windows`` of text are read by the shipped model."""

    steps: int = Field(default=20, ge=2)
    windows: int = Field(default=4, ge=1)
    repeats: int = Field(default=5, ge=1)

    PROFILES: ClassVar[dict[str, dict[str, Any]]] = {
        "full": {"steps": 60, "windows": 16, "repeats": 15},
        "gpu": {"steps": 60, "windows": 64, "repeats": 15},
    }


# --- recorded runs ----------------------------------------------------------------------------------------------------


def runs(name: str) -> list[Path]:
    """The recorded runs of a recipe, by seed."""
    return sorted(data_path("results", "training").glob(f"{name}-[0-9]"))


@cache
def evaluations(name: str) -> pd.DataFrame:
    """Held-out measurements of a recipe's runs, a column a seed."""
    found = {int(path.name[-1]): pd.read_csv(path / EVALUATION).set_index("measurement")["mean"] for path in runs(name)}
    return pd.DataFrame(found, dtype=float).rename_axis(columns="seed")


@cache
def curves(name: str) -> pd.DataFrame:
    """Text bits of training by step, means over 25 steps, a column a seed."""
    found = {}
    for path in runs(name):
        curve = pd.read_csv(path / CURVE)
        found[int(path.name[-1])] = curve.groupby(curve["step"] // 25 * 25 + 25)["text_bits"].mean()
    return pd.DataFrame(found).rename_axis("step")


def paired(name: str, measurement: str, base: str = BASE) -> tuple[float, float, int]:
    """How much a recipe differs from its baseline: the mean over common seeds, their range, and their number."""
    ours, theirs = (evaluations(of).loc[measurement].to_dict() for of in (name, base))
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    return mean(differences), max(differences) - min(differences), len(differences)


def arms() -> pd.DataFrame:
    """Each arm at equal tokens: held-out bits per byte and recall, means over seeds; and the bits it adds."""
    rows = {}
    for name, words in {BASE: "baseline", **ARMS}.items():
        table = evaluations(name)
        row: dict[str, Any] = {"bits": table.loc[BITS].mean()}
        if name != BASE:
            more, spread, _ = paired(name, BITS)
            row |= {"more bits": more, "range": spread}
        row |= {"recall, odd": table.loc[ODD].mean(), "recall, even": table.loc[EVEN].mean(), "seeds": table.shape[1]}
        rows[words] = row
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("arm")


def indexers() -> pd.DataFrame:
    """What each indexer of the large models and of two arms finds, means over seeds, a row a model and layer."""
    rows = {}
    for name in (*MODELS, BASE, "small-sparse", "small-untaught"):
        tables = [pd.read_csv(path / SELECTIONS).set_index("layer") for path in runs(name)]
        for layer, row in (sum(tables[1:], tables[0]) / len(tables)).iterrows():
            rows[f"{name}, layer {layer}"] = row.to_dict()
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("indexer")


def learned() -> pd.DataFrame:
    """What the large models have learned: a row a measurement, a column a model, and the range over seeds."""
    rows: dict[str, dict[str, Any]] = {}
    for name in MODELS:
        table = evaluations(name)
        for measurement, row in table.iterrows():
            rows.setdefault(str(measurement), {})[name] = row.mean()
            if table.shape[1] > 1:
                rows[str(measurement)][f"{name}, range"] = row.max() - row.min()
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("held out")


def below_ngram(name: str, of: str = NGRAM) -> list[float]:
    """By what share a model's bits per byte lie below the 5-gram's, for each seed."""
    table = evaluations(name)
    return [1 - ours / theirs for ours, theirs in zip(table.loc[BITS], table.loc[of], strict=True)]


def cost(name: str) -> tuple[int, float]:
    """Tokens of a recipe's run, and the minutes that the median run took."""
    records = [json.loads((path / RECORD).read_text(encoding="utf-8")) for path in runs(name)]
    return records[0]["tokens"], median(record["minutes"] for record in records)


# --- live -------------------------------------------------------------------------------------------------------------


@cache
def first_steps(params: Params) -> pd.DataFrame:
    """The baseline's first steps, trained again now, beside the recorded curve of seed 0."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(recipes.read(BASE), Path(folder), evaluate_every=0, save_every=10**9, say=lambda line: None)
        again = run.go(params.steps).set_index("step")["loss"]
    recorded = pd.read_csv(runs(BASE)[0] / CURVE).set_index("step")["loss"].iloc[: params.steps]
    table = pd.DataFrame({"recorded": recorded, "again": again})
    return table.assign(difference=(table["again"] - table["recorded"]).abs())


@cache
def reads(params: Params) -> pd.DataFrame:
    """The indexers of the shipped main model on held-out text, measured now (see :func:`evaluation.selections`)."""
    model = checkpoint.load(data_path("weights", "main"), device=params.device)
    return selections(model, heldout_windows(corpus().heldout, 512, params.windows))


def step_times(params: Params) -> pd.DataFrame:
    """Milliseconds of a step of the baseline and of the arms that change an optimiser, taken in turns; medians."""
    names = (BASE, "small-adamw", "small-whole", "small-balanced")
    text = corpus().train
    sides = {}
    for name in names:
        recipe = recipes.read(name)
        model = Model(recipe.build_config(), device=params.device)
        begin(model, recipe)
        sides[name] = (Stepper(model), Optimisers(optimisers(model, recipe.optim)), recipe)
    spent: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(params.repeats + 1):
        for name, (stepper, optimiser, recipe) in sides.items():
            begun = time.perf_counter()
            train_step(stepper, optimiser, recipe, draw(recipe, text, 0, turn), turn)
            if turn:  # the first warms up
                spent[name].append(1e3 * (time.perf_counter() - begun))
    ms = {name: median(values) for name, values in spent.items()}
    rows = {name: [value, value / ms[BASE]] for name, value in ms.items()}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["ms a step", "beside the baseline"]).rename_axis("arm")


def equal_time(times: pd.DataFrame) -> pd.DataFrame:
    """Training bits of text when every side has had the time of the quickest side's whole run; means over seeds."""
    ratio = times["beside the baseline"]
    steps = recipes.read(BASE).steps
    rows = {}
    for name in times.index:
        reached = curves(name).mean(axis=1)
        step = min(steps * ratio.min() / ratio[name], steps)
        at = max(place for place in reached.index if place <= step)
        rows[name] = {"steps": int(at), "bits": reached[at], "at equal tokens": reached.iloc[-1]}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("recipe")


def step_parts(params: Params) -> pd.DataFrame:
    """Where a step of ``main`` spends its time: each part alone, forward and backward, beside the whole; medians."""
    recipe = recipes.read("main")
    model = Model(recipe.build_config(), device=params.device)
    optimiser = Optimisers(optimisers(model, recipe.optim))
    drawn = draw(recipe, corpus().train, 0, recipe.stages[-2].until - 1)
    ids = drawn.batch.ids[:, :-1].to(params.device)
    width, count = model.config.text.hidden_size, model.config.text.hc_mult
    x = torch.randn(*ids.shape, width, device=params.device, requires_grad=True)
    streams = torch.randn(*ids.shape, count, width, device=params.device, requires_grad=True)

    def mixers() -> Tensor:
        out = streams.new_zeros(())
        for block in model.blocks:
            for site in (block.hc_attn, block.hc_ffn):
                mix = site(streams)
                out = out + expand(streams, collapse(streams, mix.pre), mix.post, mix.comb).sum()
        return out

    def attention() -> Tensor:
        out, shared = x.new_zeros(()), Shared()
        losses: dict[int, Tensor] = {}
        rows: Rows = {}
        for block in model.blocks:
            one, shared = attend(block.attn, PLAIN, losses, rows, None, x, shared)
            out = out + one.sum()
        return out + torch.stack(list(losses.values())).sum()

    def experts() -> Tensor:
        return torch.stack([block.ffn(x)[0].sum() for block in model.blocks]).sum()

    def head() -> Tensor:
        return model.head(model.norm(x)).logsumexp(-1).sum()

    parts: dict[str, Callable[[], Tensor]] = {
        "mHC: coefficients, Sinkhorn, streams": mixers,
        "attention, indexers and their losses": attention,
        "experts": experts,
        "norm, head, softmax": head,
    }
    stepper = Stepper(model)
    spent: dict[str, list[float]] = {}
    for _ in range(params.repeats + 1):  # the first warms up
        for name, part in parts.items():
            spent.setdefault(name, []).append(_ms(partial(_forth_and_back, part)))
        spent.setdefault("optimiser", []).append(_ms(optimiser.step))
        step = partial(train_step, stepper, optimiser, recipe, drawn, recipe.stages[-2].until - 1)
        spent.setdefault("whole step", []).append(_ms(step))
    ms = {name: median(times[1:]) for name, times in spent.items()}
    rows = {name: [value, value / ms["whole step"]] for name, value in ms.items()}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["ms", "share"]).rename_axis("part")


def _forth_and_back(part: Callable[[], Tensor]) -> None:
    part().backward()


def _ms(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begun)


# --- the trap, and the words ------------------------------------------------------------------------------------------


def trap() -> pd.DataFrame:
    """A pair ``k v`` in a source of ratio 2, at an even and at an odd offset: which entry holds which token."""
    rows = {}
    for place in (4, 5):
        entries = [token // 2 for token in (place, place + 1)]
        same = entries[0] == entries[1]
        rows["even" if place % 2 == 0 else "odd"] = {
            "k at": place,
            "v at": place + 1,
            "k in entry": entries[0],
            "v in entry": entries[1],
            "the question k finds": "k and v together" if same else "k, without its v",
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("offset")


def parity() -> pd.DataFrame:
    """Recall at both parities of the baseline and of the arm that was shown even offsets only, by seed."""
    rows = {}
    for name in (BASE, "small-even"):
        for seed, column in evaluations(name).items():
            rows[f"{name}, seed {seed}"] = {"odd": column[ODD], "even": column[EVEN]}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("run")


def in_words(params: Params) -> dict[str, str]:
    """The numbers that the prose quotes and that do not depend on the machine, as text."""
    main, table = recipes.read("main"), evaluations("main")
    below, below_all = below_ngram("main"), below_ngram("main", NGRAM_ALL)
    tokens, minutes = cost("main")
    text = main.build_config().text
    found, live = indexers(), reads(params)
    ours = found[[str(name).startswith("main") for name in found.index]]
    bound = {name: paired(name, BITS) for name in ARMS}
    words = {f"more_{name.removeprefix('small-')}": f"{more[0]:+.3f}" for name, more in bound.items()}
    return words | {
        "layers": f"{text.num_hidden_layers}",
        "width": f"{text.hidden_size}",
        "window": f"{text.sliding_window}",
        "reach": f"{text.num_hidden_layers * (text.sliding_window - 1)}",
        "tokens": f"{tokens / 1e6:.1f} million",
        "minutes": f"{minutes:.0f}",
        "train_mb": f"{len(corpus().train) / 1e6:.1f}",
        "heldout_mb": f"{len(corpus().heldout) / 1e6:.1f}",
        "files": f"{len(corpus().files):,}",
        "bits": f"{table.loc[BITS].mean():.2f}",
        "off": f"{table.loc[OFF].mean():.2f}",
        "ngram": f"{table.loc[NGRAM].mean():.2f}",
        "ngram_all": f"{table.loc[NGRAM_ALL].mean():.2f}",
        "below": f"{mean(below):.1%}",
        "below_all": f"{mean(below_all):.1%}",
        "odd": f"{table.loc[ODD].mean():.1%}",
        "even": f"{table.loc[EVEN].mean():.1%}",
        "hops": f"{table.loc[HOPS].mean():.1%}",
        "seeds": f"{table.shape[1]}",
        "again_steps": f"{params.steps}",
        "again": f"{first_steps(params)['difference'].max():.0e}",
        "index_recall": f"{ours['recall'].mean():.0%}",
        "index_recent": f"{ours['recent'].mean():.0%}",
        "index_mass": f"{ours['mass'].mean():.0%}",
        "live_recall": f"{live['recall'].mean():.0%}",
    }


# --- the verdict ------------------------------------------------------------------------------------------------------


def settled(params: Params) -> dict[str, Any]:
    """The values of this chapter's claims: paired differences at equal tokens, and the indexers' recall."""
    adamw, whole, balanced = (paired(name, BITS) for name in ("small-adamw", "small-whole", "small-balanced"))
    found = reads(params)
    return {
        "muon-over-adamw": Measured(adamw[0] > 0, adamw[1], adamw[2]),
        "muon-head-wise": Measured(whole[0], whole[1], whole[2]),
        "balanced-embedding": Measured(balanced[0], balanced[1], balanced[2]),
        "indexer-imitates": Measured(float((found["recall"] - found["recent"]).min())),
    }
