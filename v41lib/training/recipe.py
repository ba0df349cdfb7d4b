"""What a training run is: a recipe, a file in ``data/recipes``, and the batches that it draws step by step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
import yaml
from jaxtyping import UInt8
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from v41lib.config import Config, preset
from v41lib.resources import data_path
from v41lib.training.forward import Switches
from v41lib.training.optim import OptimSettings
from v41lib.training.tasks import (
    Batch,
    Parity,
    Split,
    echo,
    join,
    pure_recall,
    pure_two_hop,
    recall,
    stream,
    text_batch,
    two_hop,
)

Task = Literal["text", "echo", "pure_recall", "pure_two_hop", "recall", "two_hop"]
IN_TEXT: tuple[Task, ...] = ("text", "recall", "two_hop")  # those that consist of text


class Stage(BaseModel):
    """A part of a run: up to step ``until``, so many ``rows`` of each task and ``length`` tokens.

    Several ``rows`` take turns, a step each. ``dense``: attention to every visible entry instead of a selection, while
    the indexers learn from it. ``parity`` is that of planted pairs. ``depth``: only so many layers run, so that what is
    learned is learned there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    until: int = Field(ge=1)
    length: int = Field(ge=16)
    rows: tuple[dict[Task, int], ...] = Field(min_length=1)
    dense: bool = False
    parity: Parity = "both"
    depth: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _some_rows(self) -> Self:
        for rows in self.rows:
            if not rows or min(rows.values()) < 1:
                raise ValueError(f"rows = {rows}: there must be at least one task, each with at least one row")
        return self

    def rows_at(self, step: int) -> dict[Task, int]:
        """The rows of a step, of which only its turn counts."""
        return self.rows[step % len(self.rows)]


class Recipe(BaseModel):
    """All that determines a run but its seed. Raises ``pydantic.ValidationError`` (a ``ValueError``).

    ``config`` names a file of ``data/configs``. Learning rates rise over ``warmup`` steps and fall linearly over the
    last ``cooldown`` steps. ``index_weight`` weighs the sum of indexer losses beside the next byte; 0 leaves indexers
    as they were drawn. In ``blind`` of the two-hop rows the encoder's global branch is off, so that the decoder must
    look up twice. ``restarts``: the decoder's windows restart at a random place of each row. ``keys`` and ``chains``
    are the look-ups in a row of the pure tasks, ``pairs`` and ``hops`` those planted in text. ``balance_step`` is how
    far an expert's bias moves after a step: the release's 0.001 takes more steps than these runs have.
    ``embedding_std`` and ``output_scale`` (a factor of the matrices that write to the streams) set what a token weighs
    beside what layers add to it, at the beginning; ``common`` is the size, in units of the former, of a part that all
    tokens share, which matrices without biases can use as one. ``ships``: the weights of seed 0 go into the repository.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: str
    steps: int = Field(ge=1)
    stages: tuple[Stage, ...] = Field(min_length=1)
    optim: OptimSettings = OptimSettings()
    warmup: int = Field(default=20, ge=0)
    cooldown: int = Field(default=400, ge=0)
    index_weight: float = Field(default=1.0, ge=0)
    blind: float = Field(default=1.0, ge=0, le=1)
    restarts: bool = False
    balance_step: float = Field(default=0.01, ge=0)
    embedding_std: float = Field(default=1.0, gt=0)
    output_scale: float = Field(default=0.1, ge=0)
    common: float = Field(default=1.0, ge=0)
    keys: int = 8
    chains: int = 8
    pairs: int = 8
    hops: int = 4
    ships: bool = False
    packages: tuple[str, ...] = ("sympy", "networkx", "docutils")

    @model_validator(mode="after")
    def _stages_fill_the_run(self) -> Self:
        ends = [stage.until for stage in self.stages]
        if ends[-1] != self.steps or any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"stages end at {ends}: they must rise, and the last must end at steps = {self.steps}")
        return self

    @property
    def digest(self) -> str:
        """A hash of the recipe and of the configuration that it names."""
        text = self.model_dump_json() + self.model_config_file().read_text(encoding="utf-8")
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def model_config_file(self) -> Path:
        """The configuration's file."""
        return data_path("configs", f"{self.config}.json")

    def build_config(self) -> Config:
        """The configuration that is trained."""
        return preset(self.config)

    def stage(self, step: int) -> Stage:
        """The stage that ``step``, counted from 0, belongs to."""
        return next(stage for stage in self.stages if step < stage.until)

    def rate(self, step: int) -> float:
        """The factor of every learning rate at ``step``."""
        rise = (step + 1) / (self.warmup + 1)
        fall = (self.steps - step) / (self.cooldown + 1)
        return min(1.0, rise, fall)

    def larger(self, factor: int) -> Recipe:
        """The recipe for a GPU: ``factor`` times the rows in every step, and the same number of steps."""
        stages = tuple(
            stage.model_copy(
                update={"rows": tuple({task: factor * n for task, n in rows.items()} for rows in stage.rows)}
            )
            for stage in self.stages
        )
        return self.model_copy(update={"stages": stages})


def names() -> list[str]:
    """The recipes that there are."""
    return sorted(path.stem for path in data_path("recipes").glob("*.yml"))


def read(name: str) -> Recipe:
    """The recipe of that name; one that says ``like: another`` changes what it states of another.

    Raises ``ValueError`` for a name that is none, and for a file that breaks a rule.
    """
    try:
        return Recipe.model_validate(_values(name))
    except (ValidationError, yaml.YAMLError) as error:
        raise ValueError(f"data/recipes/{name}.yml: {error}") from error


def _values(name: str) -> dict[str, Any]:
    if name not in names():
        raise ValueError(f"no recipe {name!r}: there are {', '.join(names())}")
    values: dict[str, Any] = yaml.safe_load(data_path("recipes", f"{name}.yml").read_text(encoding="utf-8"))
    base = values.pop("like", None)
    return (_values(base) if base else {}) | values


@dataclass(frozen=True)
class Draw:
    """One step's rows, the task of each, and what the forward pass does differently in it."""

    batch: Batch
    tasks: tuple[Task, ...]
    switches: Switches

    def share(self, rank: int, world: int) -> Draw:
        """Every ``world``-th row from ``rank`` on: one process's part. Raises ``ValueError`` when it has none."""
        if len(self.tasks) < world:
            raise ValueError(f"{len(self.tasks)} rows a step: {world} processes need at least one each")
        part = slice(rank, None, world)
        batch = Batch(self.batch.ids[part], self.batch.weight[part], self.batch.answer[part], self.batch.hop[part])
        return Draw(batch, self.tasks[part], self.switches.rows(part))


def draw(recipe: Recipe, text: UInt8[Tensor, " N"], seed: int, step: int, purpose: Split = "train") -> Draw:
    """The rows of one step, the same whenever they are drawn."""
    stage = recipe.stage(step)
    batches, tasks = [], []
    for task, rows in stage.rows_at(step).items():
        batches.append(_rows(recipe, stage, task, text, rows, _generator(seed, purpose, step, task)))
        tasks += [task] * rows
    generator = _generator(seed, purpose, step, "switches")
    hops = torch.tensor([task in ("pure_two_hop", "two_hop") for task in tasks])
    blind = hops & (torch.rand(len(tasks), generator=generator) < recipe.blind)
    restarts = torch.randint(stage.length, (len(tasks),), generator=generator) if recipe.restarts else None
    switches = Switches(stage.dense, blind=blind if blind.any() else None, restarts=restarts, depth=stage.depth)
    return Draw(join(batches), tuple(tasks), switches)


def _generator(seed: int, purpose: Split, step: int, of: Task | Literal["switches"]) -> torch.Generator:
    """Each task has a generator of its own, so that what one draws does not depend on another's settings."""
    places = (*get_args(Task), "switches")
    return stream(seed, purpose, step * len(places) + places.index(of))


def _rows(recipe: Recipe, stage: Stage, task: Task, text: Tensor, rows: int, generator: torch.Generator) -> Batch:
    length = stage.length
    match task:
        case "text":
            return text_batch(text, rows, length, generator)
        case "echo":
            return echo(rows, length, generator)
        case "pure_recall":
            return pure_recall(rows, length, generator, recipe.keys, stage.parity)
        case "pure_two_hop":
            return pure_two_hop(rows, length, generator, recipe.chains)
        case "recall":
            return recall(text, rows, length, generator, recipe.pairs, stage.parity)
        case "two_hop":
            return two_hop(text, rows, length, generator, recipe.hops)


def text_seen(recipe: Recipe, text: UInt8[Tensor, " N"], seed: int) -> UInt8[Tensor, " seen"]:
    """The bytes of text behind every row of a run, those that look-ups overwrote included.

    It is what an n-gram is given that is to have learned from the same bytes. A window is the first thing that a task
    draws, so it is drawn again without the look-ups.
    """
    seen = []
    for step in range(recipe.steps):
        stage = recipe.stage(step)
        for task in IN_TEXT:
            if rows := stage.rows_at(step).get(task):
                seen.append(text_batch(text, rows, stage.length, _generator(seed, "train", step, task)).ids.flatten())
    return torch.cat(seen).to(torch.uint8)
