"""What a finished run leaves: BF16 weights with a model card, and what they can do, measured on those weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from v41lib import checkpoint
from v41lib.config import Config
from v41lib.model import Model
from v41lib.resources import data_path
from v41lib.training.evaluation import FULL, Size, evaluate, ngram_bits, selections
from v41lib.training.loop import CURVE, EVALS, RECORD
from v41lib.training.ngram import NGram
from v41lib.training.recipe import Recipe, text_seen
from v41lib.training.tasks import Corpus, heldout_windows

WEIGHTS, EVALUATION, SELECTIONS = "weights", "evaluation.csv", "selections.csv"
LARGEST = 12_000_000  # bytes of weights that a repository should hold for one model


@torch.no_grad()
def write(config: Config, parameters: dict[str, Tensor], folder: Path) -> None:
    """Matrices in BF16, what every port keeps in FP32 in FP32, in the released layout."""
    model = Model(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        weight.copy_(parameters[name])
    checkpoint.save(model, folder)


def measure(folder: Path, recipe: Recipe, corpus: Corpus, seed: int, size: Size = FULL) -> pd.DataFrame:
    """:func:`evaluate` of the weights in ``folder``, beside 5-grams of the same bytes and of all training text."""
    table = evaluate(checkpoint.load(folder), corpus.heldout, size, seed)
    seen = text_seen(recipe, corpus.train, seed)
    rows = []
    for name, data in (("the same bytes", seen), ("all training text", corpus.train)):
        row = ngram_bits(NGram.fit(data.numpy()), corpus.heldout, size)
        rows.append(row | {"measurement": f"{row['measurement']} of {name}"})
    table = pd.concat([table, pd.DataFrame(rows).set_index("measurement")])
    table["error"] = table["error"].astype(float)
    return table


def measure_selections(folder: Path, corpus: Corpus, windows: int = 16, length: int = 512) -> pd.DataFrame:
    """:func:`selections` of the weights in ``folder`` on held-out text."""
    return selections(checkpoint.load(folder), heldout_windows(corpus.heldout, length, windows))


def card(name: str, recipe: Recipe, record: dict[str, Any], table: pd.DataFrame, curve: pd.DataFrame) -> str:
    """The model card, from the run's own record."""
    text = recipe.build_config().text
    packages = ", ".join(recipe.packages)
    shown = curve.assign(block=(curve["step"] // 100 + 1) * 100).groupby("block")
    means = shown[["loss", "text_bits", "index", "recall", "hop", "two_hop"]].mean()
    lines = [f"| {step} | " + " | ".join(f"{v:.3f}" for v in row) + " |" for step, row in means.iterrows()]
    measured = [
        f"| {what} | {row['mean']:.3f} | {row['error']:.3f} | {row['rows']:.0f} |" for what, row in table.iterrows()
    ]
    return f"""# {name}

A small model of the whole architecture: {text.num_hidden_layers} layers, width {text.hidden_size}, window
{text.sliding_window}, top-{text.index_topk}, a pool of {text.candidate_topk_blocks * text.candidate_block_size:,}
candidates. The configuration is `config.json`, the recipe `data/recipes/{name}.yml`.

- **Data**: bytes of source and documentation of {packages}, versions and hashes in `data/corpus.json`; whole files
  held out. Ids from 256 on are symbols of planted look-ups, which text never contains.
- **Command**: `v41 train {name} --seed {record["seed"]}`
- **Time**: {record["steps"]:,} steps, {record["tokens"]:,} tokens, {record["minutes"]:.0f} minutes on
  {record["threads"]} thread ({record["device"]}), torch {record["versions"]["torch"]}.
- **Precision**: trained in FP32 with the cache's rounding, matrices stored in BF16. What follows is measured on these
  weights.

| held out | mean | standard error | sequences |
|---|---|---|---|
{chr(10).join(measured)}

The curve, means over 100 steps (`{CURVE}` of the run, kept in `data/results/training/`):

| up to step | loss, nats | text, bits a byte | indexers' KL | recall | one hop | two hops |
|---|---|---|---|---|---|---|
{chr(10).join(lines)}

**Limits**: it has read {record["tokens"] / 1e6:.1f} million tokens of code and documentation, and is good for measuring
mechanisms and for nothing else. It never saw more than {max(stage.length for stage in recipe.stages):,} tokens at once.
"""


def accept(name: str, recipe: Recipe, run: Path, shipped: bool) -> list[Path]:
    """Take a finished run into ``data/``: its tables always, its weights and card if it is the seed that ships.

    Raises ``ValueError`` for a run that is not finished, and for weights that are too large to ship.
    """
    missing = [part for part in (RECORD, CURVE, EVALUATION) if not (run / part).exists()]
    if missing:
        raise ValueError(f"{run} lacks {', '.join(missing)}: finish the run first")
    record = json.loads((run / RECORD).read_text(encoding="utf-8"))
    results = data_path() / "results" / "training" / f"{name}-{record['seed']}"
    results.mkdir(parents=True, exist_ok=True)
    for part in (RECORD, CURVE, EVALS, EVALUATION, SELECTIONS):
        if (run / part).exists():
            shutil.copyfile(run / part, results / part)
    if not shipped:
        return [results]
    size = sum(path.stat().st_size for path in (run / WEIGHTS).iterdir())
    if size > LARGEST:
        raise ValueError(f"{run / WEIGHTS} has {size:,} bytes: at most {LARGEST:,} are shipped")
    home = data_path() / "weights" / name
    home.mkdir(parents=True, exist_ok=True)
    for path in (run / WEIGHTS).iterdir():
        shutil.copyfile(path, home / path.name)
    table = pd.read_csv(run / EVALUATION).set_index("measurement")
    text = card(name, recipe, record, table, pd.read_csv(run / CURVE))
    (home / "README.md").write_text(text, encoding="utf-8")
    return [results, home]
