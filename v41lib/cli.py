"""The ``v41`` command. Imports are inside the commands, so that ``v41 --help`` answers at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from v41lib.experiments.base import Profile


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="v41lib")
def main() -> None:
    """The V4.1 book and its library."""


@main.command()
@click.argument("chapter", required=False)
@click.option("-p", "pairs", multiple=True, metavar="NAME=VALUE", help="Change one parameter; may be repeated.")
@click.option("--profile", type=click.Choice(["ci", "full", "gpu"]), default="ci", show_default=True)
@click.option("--all", "everything", is_flag=True, help="Every chapter that is stale, two at a time.")
@click.option("--force", is_flag=True, help="Run even if the last run still holds.")
@click.option("--book", type=click.Path(path_type=Path, file_okay=False), help="The book's folder, if it is not here.")
def run(
    chapter: str | None, pairs: tuple[str, ...], profile: Profile, everything: bool, force: bool, book: Path
) -> None:
    """Run one CHAPTER (a number or a name), or all of them, and say where the result lies."""
    import signal

    from v41lib import runner
    from v41lib.notebook import NotebookError

    if everything == (chapter is not None) or (everything and pairs):
        raise click.UsageError("name one chapter, with -p if you like; or say --all, without -p")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that kernels are shut down with us
    try:
        folder = runner.find_book(book)
        if chapter is None:
            runner.run_all(folder, profile, force)
            return
        found = runner.find_chapter(folder, chapter)
        wanted = runner.Run(found, runner.make_params(found, profile, runner.parse_values(pairs)), custom=bool(pairs))
        if not force and wanted.is_fresh():
            click.echo("the last run still holds (--force runs it again)")
        else:
            wanted.execute()
        click.echo(wanted.output)
    except (runner.RunError, NotebookError) as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("ids", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("-o", "output", type=click.Path(path_type=Path), required=True, help="Where to write the trace (.npz).")
def trace(folder: Path, ids: Path, output: Path) -> None:
    """Run the checkpoint in FOLDER on the token ids in IDS (.npy, [batch, length]) and keep every intermediate."""
    import numpy as np
    import torch

    import v41lib
    from v41lib.trace import save_trace

    try:
        if not output.resolve().parent.is_dir() or output.is_dir():
            raise ValueError(f"{output}: must be a file in a folder that exists")
        array = read_ids(ids)
        tensors = v41lib.load(folder).trace(torch.from_numpy(np.atleast_2d(array)))
        save_trace(tensors, output)
    except (OSError, ValueError, NotImplementedError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{len(tensors)} tensors in {output}")


def read_ids(path: Path) -> Any:
    """Token ids from a ``.npy`` file. Raises ``ValueError`` naming a file that holds something else."""
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a .npy file of token ids") from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        raise ValueError(f"{path}: must be a .npy array of integers, the token ids [batch, length]")
    return array.astype(np.int64)


@main.command()
@click.argument("a", type=click.Path(path_type=Path, exists=True))
@click.argument("b", type=click.Path(path_type=Path, exists=True))
@click.option("--atol", type=float, help="Largest difference allowed: 1e-4 for traces, 0 for checkpoints.")
@click.option("--all", "everything", is_flag=True, help="List every tensor that differs, not the first alone.")
@click.pass_context
def diff(context: click.Context, a: Path, b: Path, atol: float | None, everything: bool) -> None:
    """Name the first layer and tensor where two traces (.npz) or two checkpoints (folders) A and B part.

    The exit status is 0 when they agree, 1 when they differ, 2 when they cannot be compared. Traces are compared where
    both have a tensor; what only one has is named.
    """
    from v41lib.trace import diff_checkpoints, diff_traces, load_trace

    if a.is_dir() != b.is_dir():
        raise click.UsageError("compare two traces (.npz) or two checkpoints (folders), not one of each")
    try:
        if a.is_dir():
            found = diff_checkpoints(a, b, 0.0 if atol is None else atol)
        else:
            found = diff_traces(load_trace(a), load_trace(b), 1e-4 if atol is None else atol)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    for path, names in ((a, found.only_a), (b, found.only_b)):
        if names:
            click.echo(f"only in {path}, {len(names)}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")
    if not found.compared:
        raise click.UsageError("they have no tensor in common")
    if found.first is None:
        click.echo(f"equal: {len(found.compared)} tensors compared")
        context.exit(1 if a.is_dir() and (found.only_a or found.only_b) else 0)
    click.echo(f"first difference of {len(found.differences)} in {len(found.compared)} tensors compared")
    for difference in found.differences if everything else found.differences[:1]:
        click.echo(f"  {difference}")
    context.exit(1)


@main.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--config", "name", default="bench", show_default=True, help="A preset.")
@click.option("--lengths", type=(int, int, int), default=(1024, 4096, 8192), show_default=True, help="Prompts.")
@click.option("--repeats", type=int, default=3, show_default=True)
@click.option("--alone", is_flag=True, help="Without mlx-lm beside, which takes minutes.")
@click.option("-o", "output", type=click.Path(path_type=Path, dir_okay=False), help="Keep the result (.json).")
@click.option("--accept", is_flag=True, help="Keep it as data/results/bench.json and in README.md, in a checkout.")
def bench(
    device: str, name: str, lengths: tuple[int, int, int], repeats: int, alone: bool, output: Path, accept: bool
) -> None:
    """Measure prefill, replay, decode and the indexer beside plain products on this machine, and beside mlx-lm.

    The exit status is 1 when the preset bench misses a bar on a CPU; elsewhere the bars are for reading.
    """
    from v41lib import bench as benchmark
    from v41lib.resources import data_path

    readme = data_path().parent / "README.md"
    try:
        if accept and not readme.is_file():
            raise ValueError("--accept writes data/results/bench.json and README.md: there is no checkout here")
        settings = benchmark.Settings(name, lengths, repeats, device=device, other=not alone)
        result = benchmark.run(settings, lambda text: click.echo(f"... {text}", err=True))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    block = benchmark.markdown(result)
    click.echo(block)
    if output:
        result.save(output)
    if accept:
        result.save(data_path() / "results" / "bench.json")
        readme.write_text(benchmark.with_block(readme.read_text(), block))
    promised = name == "bench" and device == "cpu"  # of other models and devices the bars are for reading
    if promised and not all(benchmark.Bar(**bar).met for bar in result.bars):
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("name")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--profile", type=click.Choice(["ci", "gpu"]), default="ci", show_default=True, help="gpu: 16 x the rows."
)
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="[default: build/train/NAME-SEED]")
@click.option("--text", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Train on your own folder.")
@click.option("--until", type=click.IntRange(min=1), help="Stop after this many steps; the same command goes on.")
@click.option("--accept", is_flag=True, help="Take the finished run into data/, with its weights if the seed is 0.")
def train(
    name: str, seed: int, profile: str, folder: Path | None, text: Path | None, until: int | None, accept: bool
) -> None:
    """Train the model of recipe NAME, evaluate it, and leave its weights and tables in a folder.

    A run that was stopped, however it was, goes on where it last saved. Under torchrun all processes share one model.
    """
    import torch

    from v41lib.resources import build_path
    from v41lib.training import recipe as recipes
    from v41lib.training import sharding, tasks, weights
    from v41lib.training.loop import Run, TrainingError

    try:
        if profile == "gpu" and not torch.cuda.is_available():
            raise ValueError("profile gpu needs a CUDA device, and torch sees none; profile ci runs on any machine")
        if accept and (text is not None or profile != "ci"):
            raise ValueError(
                "--accept takes runs of the recorded text and of profile ci: leave out --text and --profile"
            )
        recipe = recipes.read(name)
        sharding.join_others()
        device = "cuda" if profile == "gpu" else "cpu"
        recipe = recipe.larger(16) if profile == "gpu" else recipe
        corpus = tasks.corpus(recipe.packages, text)
        if text is None:
            tasks.check(corpus)
        home = folder or build_path("train", f"{name}-{seed}")
        run = Run(recipe, home, seed, device, corpus, say=lambda line: click.echo(f"{name}-{seed}  {line}"))
        run.go(until)
        if run.step == recipe.steps:
            finish(run)
        if accept:
            for path in weights.accept(name, recipe, home, shipped=recipe.ships and seed == 0):
                click.echo(f"taken into {path}")
    except KeyboardInterrupt as stop:
        raise click.ClickException(str(stop) or "stopped") from stop
    except (ValueError, TrainingError) as error:
        raise click.ClickException(str(error)) from error


def finish(run: Any) -> None:
    """Write a finished run's weights and their evaluation, unless they are there."""
    from v41lib.training import sharding, weights

    parameters = sharding.whole(run.model)
    path = run.folder / weights.EVALUATION
    if run.rank or path.exists():
        return
    weights.write(run.model.config, parameters, run.folder / weights.WEIGHTS)
    table = weights.measure(run.folder / weights.WEIGHTS, run.recipe, run.corpus, run.seed)
    found = weights.measure_selections(run.folder / weights.WEIGHTS, run.corpus)
    found.to_csv(run.folder / weights.SELECTIONS, float_format="%.4g")
    table.to_csv(path, float_format="%.6g")
    click.echo(table.to_string(float_format="{:.3f}".format))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, with records, as JSON.")
@click.option("--verdict", help="Only claims with this verdict.")
def claims(as_json: bool, verdict: str | None) -> None:
    """The ledger: every claim with its verdict, from the accepted records."""
    from v41lib import ledger

    if verdict is not None and verdict not in ledger.VERDICTS:
        raise click.UsageError(f"no verdict {verdict!r}: there are {', '.join(ledger.VERDICTS)}")
    try:
        if as_json:
            entries = [entry for entry in json.loads(ledger.to_json()) if verdict in (None, entry["verdict"])]
            click.echo(json.dumps(entries, indent=1))
            return
        for row in ledger.table().to_dict("records"):
            if verdict in (None, row["verdict"]):
                ours = f"  ours {row['ours']}" if row["ours"] else ""
                click.echo(f"{row['chapter']}  {row['verdict']:12}  {row['id']}: {row['claim']}")
                click.echo(f"    published {row['published'] or '-'}{ours}")
    except ledger.LedgerError as error:
        raise click.ClickException(str(error)) from error


@main.command()
@click.argument("what")
def inspect(what: str) -> None:
    """Say what a configuration describes. WHAT is a checkpoint folder, a config.json, or a preset.

    Presets: released, tiny, wide, miniature, bench. The weights themselves are not opened.
    """
    from v41lib.accounting import params
    from v41lib.config import Config, preset
    from v41lib.plan import plan_layers

    path = Path(what)
    try:
        config = Config.from_file(path / "config.json" if path.is_dir() else path) if path.exists() else preset(what)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    counts = params.count(config)
    for name in ("backbone", "engram_tables", "vision", "dspark", "total"):
        click.echo(f"{name.replace('_', ' '):14}{getattr(counts, name):>20,} parameters")
    click.echo("layer  stack    ratio  mode     KV from  selection from")
    for plan in plan_layers(config.text):
        owners = ["-" if owner is None else str(owner) for owner in (plan.kv_owner, plan.index_owner)]
        extra = ("  Engram" if plan.engram else "") + (
            f"  candidate {plan.candidate_role}" if plan.candidate_role else ""
        )
        click.echo(
            f"{plan.layer:>5}  {plan.stack:8} {plan.ratio:>5}  {plan.mode:8} {owners[0]:>7}  {owners[1]:>14}{extra}"
        )


if __name__ == "__main__":
    main()
