"""The loop: the same curve however it is cut, several processes as one, and what a finished run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from tests.unit.support import SMALL as SMALL_TEXT
from v41lib import checkpoint
from v41lib.cli import main
from v41lib.config import Config
from v41lib.resources import data_path
from v41lib.training import recipe as recipes
from v41lib.training import weights
from v41lib.training.evaluation import Size, evaluate
from v41lib.training.loop import CURVE, Run, TrainingError
from v41lib.training.recipe import Recipe, draw, text_seen
from v41lib.training.tasks import corpus

SMALL = Recipe.model_validate(
    {
        "config": "miniature",
        "steps": 6,
        "stages": [
            {"until": 3, "length": 32, "rows": [{"text": 2, "pure_recall": 1, "pure_two_hop": 1}], "dense": True},
            {"until": 6, "length": 64, "rows": [{"text": 1, "recall": 1, "two_hop": 2}]},
        ],
        "warmup": 1,
        "cooldown": 2,
        "restarts": True,
        "chains": 3,
        "pairs": 2,
        "hops": 1,
    }
)
TINY = Config.from_dict({"image_token_id": 1000, "text_config": SMALL_TEXT | {"vocab_size": 384}})
COLUMNS = ["loss", "text_bits", "index", "recall", "hop", "two_hop", "largest_load"]


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest model that has all modes, with the vocabulary that the tasks need."""
    monkeypatch.setattr(Recipe, "build_config", lambda self: TINY)


def quiet(folder: Path, **options: object) -> Run:
    return Run(**({"recipe": SMALL, "folder": folder, "say": lambda line: None, "evaluate_every": 0} | options))  # type: ignore[arg-type]


def test_a_run_that_was_cut_off_gives_the_same_curve(tmp_path: Path) -> None:
    whole = quiet(tmp_path / "whole").go()
    for until in (2, 5, None):  # within the first stage, within the second, to the end
        resumed = quiet(tmp_path / "cut").go(until)
    pd.testing.assert_frame_equal(whole[COLUMNS], resumed[COLUMNS])
    for name in ("whole", "cut"):
        assert pd.read_csv(tmp_path / name / CURVE)["step"].tolist() == list(range(6))


def test_a_run_that_is_killed_loses_what_it_had_not_saved_and_no_more(tmp_path: Path) -> None:
    """Rows behind the last checkpoint are written again, and once."""
    run = quiet(tmp_path, save_every=2)
    run.go(4)
    run._one_step(0)  # the step that a kill would lose: its row is on disk, its state is not saved
    assert pd.read_csv(tmp_path / CURVE)["step"].tolist() == [0, 1, 2, 3, 4]
    resumed = quiet(tmp_path)
    assert resumed.step == 4 and pd.read_csv(tmp_path / CURVE)["step"].tolist() == [0, 1, 2, 3]
    pd.testing.assert_frame_equal(resumed.go()[COLUMNS], quiet(tmp_path / "whole").go()[COLUMNS])


def test_another_recipe_or_seed_is_not_mixed_in(tmp_path: Path) -> None:
    quiet(tmp_path).go(1)
    with pytest.raises(TrainingError, match=r"another seed"):
        quiet(tmp_path, seed=1)
    with pytest.raises(TrainingError, match=r"another recipe"):
        quiet(tmp_path, recipe=SMALL.model_copy(update={"keys": 4}))


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    run = quiet(tmp_path)
    with torch.no_grad():
        run.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"step 0: the loss is nan"):
        run.go(1)


def test_what_a_step_draws_depends_on_seed_and_step_alone() -> None:
    text = corpus().train
    one, same, other = (draw(SMALL, text, seed, 4) for seed in (0, 0, 1))
    assert torch.equal(one.batch.ids, same.batch.ids) and not torch.equal(one.batch.ids, other.batch.ids)
    assert not torch.equal(one.batch.ids, draw(SMALL, text, 0, 5).batch.ids)
    assert one.tasks == ("text", "recall", "two_hop", "two_hop")
    assert one.switches.blind is not None and one.switches.blind.tolist() == [False, False, True, True]
    halves = [one.share(rank, 2) for rank in (0, 1)]
    assert torch.equal(torch.stack([half.batch.ids for half in halves], 1).flatten(0, 1), one.batch.ids)
    with pytest.raises(ValueError, match=r"4 rows a step: 5 processes"):
        one.share(0, 5)


def test_the_text_seen_is_that_of_the_rows() -> None:
    text = corpus().train
    seen = text_seen(SMALL, text, 0)
    assert len(seen) == 3 * 2 * 33 + 3 * 4 * 65
    ids = draw(SMALL, text, 0, 0).batch.ids[:2]
    assert torch.equal(seen[: 2 * 33], ids.flatten().to(torch.uint8))
    planted = draw(SMALL, text, 0, 3).batch.ids[1]  # a recall row: equal but where pairs were planted
    window = seen[3 * 2 * 33 + 65 : 3 * 2 * 33 + 2 * 65]
    assert torch.equal(window[planted < 256], planted[planted < 256].to(torch.uint8)) and (planted >= 256).sum() == 8


def test_recipes_are_refused_with_reasons() -> None:
    values = SMALL.model_dump()
    for changes, reason in (
        ({"steps": 7}, r"the last must end at steps = 7"),
        ({"stages": [{"until": 6, "length": 32, "rows": [{}]}]}, r"at least one task"),
        ({"blind": 1.5}, r"less than or equal to 1"),
        ({"unknown": 1}, r"unknown"),
    ):
        with pytest.raises(ValueError, match=reason):
            Recipe.model_validate(values | changes)
    with pytest.raises(ValueError, match=r"no recipe 'nix': there are .*main"):
        recipes.read("nix")
    assert {"main", "capped", "aware"} <= set(recipes.names())
    for name in recipes.names():
        assert recipes.read(name).steps > 0


def test_rates_rise_hold_and_fall() -> None:
    recipe = SMALL.model_copy(update={"steps": 100, "warmup": 10, "cooldown": 20})
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 11) and rates[10] == rates[79] == 1
    assert rates[99] == pytest.approx(1 / 21) and rates[90] < rates[85]


def test_a_finished_run_leaves_weights_that_do_what_was_measured(tmp_path: Path) -> None:
    run = quiet(tmp_path)
    run.go()
    weights.write(run.model.config, run.model.state_dict(), tmp_path / "weights")
    table = weights.measure(tmp_path / "weights", SMALL, run.corpus, 0, Size(4, 2, 96, 2, 1))
    model = checkpoint.load(tmp_path / "weights")
    again = evaluate(model, run.corpus.heldout, Size(4, 2, 96, 2, 1))
    pd.testing.assert_frame_equal(table.loc[again.index, ["mean"]], again[["mean"]])
    largest = max((a - b).abs().max() for a, b in zip(model.parameters(), run.model.parameters(), strict=True))
    assert 0 < largest < 0.05  # BF16
    table.to_csv(tmp_path / "evaluation.csv")
    record = json.loads((tmp_path / "record.json").read_text())
    text = weights.card("main", SMALL, record, table, pd.read_csv(tmp_path / CURVE))
    assert "v41 train main --seed 0" in text and f"{record['tokens']:,} tokens" in text
    assert record["tokens"] == 3 * 4 * 32 + 3 * 4 * 64
    with pytest.raises(ValueError, match=r"lacks record.json"):
        weights.accept("main", SMALL, tmp_path / "weights", True)


def test_the_command_refuses_what_it_cannot_do() -> None:
    runner = CliRunner()
    own_text = runner.invoke(main, ["train", "main", "--accept", "--text", "."])
    assert own_text.exit_code == 1 and "--accept takes runs of the recorded text" in own_text.output
    unknown = runner.invoke(main, ["train", "nix"])
    assert unknown.exit_code == 1 and "no recipe 'nix'" in unknown.output
    if not torch.cuda.is_available():
        gpu = runner.invoke(main, ["train", "main", "--profile", "gpu"])
        assert gpu.exit_code == 1 and "needs a CUDA device" in gpu.output


def test_recorded_runs_are_of_the_recipes_and_the_text_that_there_are() -> None:
    records = {
        path.parent.name: json.loads(path.read_text()) for path in data_path("results").glob("training/*/record.json")
    }
    assert len(records) >= 14
    for folder, record in records.items():
        name, _, seed = folder.rpartition("-")
        assert (record["recipe"], record["seed"]) == (recipes.read(name).digest, int(seed)), folder
        assert record["corpus"] == corpus().digest and record["processes"] == 1, folder
