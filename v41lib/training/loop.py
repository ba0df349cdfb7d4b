"""The loop: one step after another, a curve and checkpoints as it goes, and the same curve after being cut off.

Under ``torchrun`` every process takes its share of each step's rows, and FSDP2 shards parameters, gradients and what
the optimisers keep (:mod:`v41lib.training.sharding`).
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from v41lib.model import Model
from v41lib.training import sharding, tasks
from v41lib.training.evaluation import QUICK, evaluate
from v41lib.training.forward import Output, Switches, forward
from v41lib.training.losses import balance_experts, next_token_loss
from v41lib.training.optim import Optimisers, optimisers
from v41lib.training.recipe import IN_TEXT, Draw, Recipe, draw

Say = Callable[[str], None]
CHECKPOINT, CURVE, EVALS, RECORD = "checkpoint.pt", "curve.csv", "evals.csv", "record.json"


class TrainingError(RuntimeError):
    """A run that cannot start or go on; the message says what to change."""


class Stepper(nn.Module):
    """The model as one module whose ``forward`` is training's, so that a wrapper's hooks see every call."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, switches: Switches) -> Output:
        return forward(self.model, ids, switches)


@torch.no_grad()
def begin(model: Model, recipe: Recipe) -> None:
    """What a run changes in freshly drawn weights before its first step."""
    embedding = model.embed.weight
    embedding.mul_(recipe.embedding_std / embedding.std())
    signs = torch.where(torch.arange(embedding.shape[1], device=embedding.device) % 2 == 0, 1.0, -1.0)
    embedding.add_(signs, alpha=recipe.common * recipe.embedding_std)
    for block in model.blocks:
        for output in (block.attn.wo_b.weight, block.ffn.experts.w2, block.ffn.shared_experts.w2.weight):
            output.mul_(recipe.output_scale)


@dataclass
class Losses:
    """One step's numbers: the losses, and of this process's rows how text and answers in them went."""

    loss: float
    text_bits: float
    index: float
    recall: float
    hop: float
    two_hop: float
    largest_load: float


def train_step(stepper: Stepper, optimiser: Optimisers, recipe: Recipe, drawn: Draw, step: int) -> Losses:
    """Forward, backward, one update, and the experts' biases. Raises ``TrainingError`` when the loss is not finite."""
    model, batch = stepper.model, drawn.batch
    device = model.device
    ids, weight = batch.ids.to(device), batch.weight.to(device)
    out = stepper(ids[:, :-1], drawn.switches.to(device))
    loss = next_token_loss(out.logits, ids[:, 1:], weight, sharding.mean(weight.sum()))
    index = torch.stack(list(out.index_losses.values())).sum() if out.index_losses else torch.zeros((), device=device)
    total = loss + recipe.index_weight * index
    if not torch.isfinite(total):
        raise TrainingError(
            f"step {step}: the loss is {float(total.detach())}; lower the learning rates, or begin again"
        )
    optimiser.zero_grad()
    total.backward()
    optimiser.set_rate(recipe.rate(step))
    optimiser.step()
    balance_experts(model, sharding.total_loads(out.loads), recipe.balance_step)
    parts = sharding.mean(torch.stack((loss, index)).detach()).tolist()
    return _describe(drawn, out, ids[:, 1:], *parts)


@torch.no_grad()
def _describe(drawn: Draw, out: Output, targets: Tensor, loss: float, index: float) -> Losses:
    logits, batch = out.logits.detach(), drawn.batch
    text = torch.tensor([task in IN_TEXT for task in drawn.tasks], device=targets.device)
    plain = (targets < 256) & text.unsqueeze(-1)
    nats = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    hits = (logits.argmax(-1) == targets).cpu()

    def accuracy(of: tuple[str, ...], marked: Tensor) -> float:
        asked = marked & torch.tensor([task in of for task in drawn.tasks]).unsqueeze(-1)
        return int((hits & asked).sum()) / int(asked.sum()) if asked.any() else float("nan")

    loads = torch.stack(list(out.loads.values())).float()
    return Losses(
        loss=loss,
        text_bits=float(nats[plain].mean()) / math.log(2) if plain.any() else float("nan"),
        index=index,
        recall=accuracy(("pure_recall", "recall"), batch.answer),
        hop=accuracy(("pure_two_hop", "two_hop"), batch.hop),
        two_hop=accuracy(("pure_two_hop", "two_hop"), batch.answer),
        largest_load=float((loads.amax(-1) / loads.mean(-1)).max()),
    )


@dataclass
class Run:
    """One run of a recipe with one seed, in a folder of its own.

    ``save_every`` steps it keeps all that it needs to go on; ``evaluate_every`` steps it looks at held-out data
    (0: never). Raises ``TrainingError`` when the folder holds a run of another recipe or seed.
    """

    recipe: Recipe
    folder: Path
    seed: int = 0
    device: str = "cpu"
    text: tasks.Corpus | None = None
    save_every: int = 50
    evaluate_every: int = 150
    say: Say = print
    model: Model = field(init=False)
    step: int = field(init=False, default=0)
    seconds: float = field(init=False, default=0.0)
    rows: list[dict[Any, Any]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.corpus = self.text or tasks.corpus(self.recipe.packages)
        self.model = Model(self.recipe.build_config(), seed=self.seed, device=self.device)
        begin(self.model, self.recipe)
        self.stepper = Stepper(self.model)
        self.rank, self.world = sharding.place()
        if self.world > 1:
            sharding.shard(self.stepper)
        self.optimiser = Optimisers(optimisers(self.model, self.recipe.optim))
        self.identity = {"recipe": self.recipe.digest, "seed": self.seed, "corpus": self.corpus.digest}
        self.identity["processes"] = self.world
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._checkpoint().exists():
            self._resume()

    def _checkpoint(self) -> Path:
        """What this process keeps; each has its own shards."""
        return self.folder / (CHECKPOINT if self.world == 1 else f"{self.rank}-{CHECKPOINT}")

    def _resume(self) -> None:
        state = torch.load(self._checkpoint(), map_location=self.device, weights_only=True)
        if state["identity"] != self.identity:
            changed = [name for name, value in self.identity.items() if state["identity"].get(name) != value]
            raise TrainingError(
                f"{self.folder} holds a run with another {' and '.join(changed)}: choose another folder, or remove it"
            )
        sharding.restore(self.model, self.optimiser, state["model"], state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        curve = pd.read_csv(self.folder / CURVE)
        self.rows = curve[curve["step"] < self.step].to_dict("records")
        if self.rank == 0:
            pd.DataFrame(self.rows).to_csv(self.folder / CURVE, index=False, float_format="%.6g")
            if (self.folder / EVALS).exists():
                evals = pd.read_csv(self.folder / EVALS)
                evals[evals["step"] <= self.step].to_csv(self.folder / EVALS, index=False)
        self.say(f"goes on from step {self.step}")

    def save(self) -> None:
        """Keep everything that the next step depends on; interrupted, the older checkpoint stays."""
        state = {
            "identity": self.identity,
            "model": sharding.local(self.model.state_dict()),
            "optimiser": sharding.local(self.optimiser.state_dict()),
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = self._checkpoint().with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint())

    def go(self, until: int | None = None) -> pd.DataFrame:
        """Steps up to ``until`` (default: all), and the curve, a row a step. An interrupt saves and ends it early."""
        last = min(until or self.recipe.steps, self.recipe.steps)
        first, stopped = self.step, False
        with _interrupts() as asked:
            while self.step < last and not stopped:
                self._one_step(first)
                stopped = bool(asked)
                if stopped or self.step % self.save_every == 0 or self.step == last:
                    self.save()
                if self.evaluate_every and self.step % self.evaluate_every == 0 and self.world == 1:
                    self._evaluate()
        if stopped:
            raise KeyboardInterrupt(f"stopped after step {self.step}; the same command goes on from there")
        if self.step == self.recipe.steps and self.rank == 0:
            self._write_record()
        return pd.DataFrame(self.rows)

    def _one_step(self, first: int) -> None:
        begun = time.perf_counter()
        drawn = draw(self.recipe, self.corpus.train, self.seed, self.step)
        drawn = drawn.share(self.rank, self.world)
        losses = train_step(self.stepper, self.optimiser, self.recipe, drawn, self.step)
        spent = time.perf_counter() - begun
        self.seconds += spent
        tokens = drawn.batch.weight.numel() * self.world
        row = {"step": self.step, **vars(losses), "tokens": tokens, "seconds": spent}
        self.rows.append(row)
        self.step += 1
        if self.rank:
            return
        with (self.folder / CURVE).open("a", encoding="utf-8") as file:
            pd.DataFrame([row]).to_csv(file, index=False, header=file.tell() == 0, float_format="%.6g")
        if self.step % 10 == 0 or self.step == self.recipe.steps:
            self.say(self._progress(first))

    def _progress(self, first: int) -> str:
        recent = pd.DataFrame(self.rows[-min(20, self.step - first) :])
        rate = recent["tokens"].sum() / recent["seconds"].sum()
        left = (self.recipe.steps - self.step) * recent["seconds"].mean() / 60
        mean = recent.mean()
        return (
            f"step {self.step}/{self.recipe.steps}  loss {mean['loss']:.3f}  text {mean['text_bits']:.3f} bits  "
            f"index {mean['index']:.3f}  recall {mean['recall']:.2f}  "
            f"one hop {mean['hop']:.2f}  two hops {mean['two_hop']:.2f}  "
            f"load {mean['largest_load']:.1f}  {rate:,.0f} tokens/s  {left:.0f} min left"
        )

    def _evaluate(self) -> None:
        table = evaluate(self.model, self.corpus.heldout, QUICK, self.seed)
        row = {"step": self.step, **{str(name): float(value) for name, value in table["mean"].items()}}
        path = self.folder / EVALS
        with path.open("a", encoding="utf-8") as file:
            pd.DataFrame([row]).to_csv(file, index=False, header=file.tell() == 0, float_format="%.4g")
        self.say("held out: " + "  ".join(f"{name} {value:.3f}" for name, value in row.items() if name != "step"))

    def _write_record(self) -> None:
        record = {
            **self.identity,
            "config": self.recipe.config,
            "steps": self.recipe.steps,
            "tokens": int(sum(row["tokens"] for row in self.rows)),
            "minutes": round(self.seconds / 60, 1),
            "device": self.device,
            "threads": torch.get_num_threads(),
            "versions": {"python": platform.python_version(), "torch": version("torch")},
            "finished": datetime.now(UTC).date().isoformat(),
        }
        (self.folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of obeying them, so that a step is never cut in half."""
    seen: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in (int(signal.SIGINT), int(signal.SIGTERM)):
            before[number] = signal.signal(number, lambda caught, _: seen.append(caught))
    except ValueError:  # not the main thread: nobody sends it signals
        pass
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
