"""Runs in processes of their own: a real signal, and two gloo processes that share one model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from v41lib.training.loop import CURVE

# What a process runs: a small recipe, whatever the command line of the test says.
SCRIPT = """
import os
import signal
import sys
from pathlib import Path
import torch
from tests.unit.test_training_loop import SMALL, TINY
from v41lib.training import sharding
from v41lib.training.loop import Run
from v41lib.training.recipe import Recipe
torch.set_num_threads(1)
Recipe.build_config = lambda self: TINY
sharding.join_others()
recipe = SMALL.model_copy(update={"restarts": False})
options = {"save_every": int(sys.argv[3]), "evaluate_every": 0, "say": lambda line: print(line, flush=True)}
run = Run(recipe, Path(sys.argv[1]), **options)
one_step, ends = run._one_step, int(sys.argv[4])
def step_that_is_hit(first):
    if run.step == ends - 1:  # a real signal, in the middle of the step
        os.kill(os.getpid(), signal.SIGTERM)
    one_step(first)
run._one_step = step_that_is_hit
try:
    run.go(int(sys.argv[2]))
except KeyboardInterrupt as stop:
    print(stop, flush=True)
    sys.exit(3)
"""
ROOT = Path(__file__).resolve().parents[2]


def start(folder: Path, until: int, hit: int = 0, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process that trains up to a step, and in whose step number ``hit`` SIGTERM arrives (0: never)."""
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script), str(folder), str(until), "50", str(hit)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.timeout(180)
def test_terminated_it_saves_and_goes_on_with_the_same_curve(tmp_path: Path) -> None:
    cut = start(tmp_path / "cut", 6, hit=4)
    said = cut.communicate(timeout=90)[0]
    assert cut.returncode == 3 and "stopped after step 4;" in said
    assert pd.read_csv(tmp_path / "cut" / CURVE)["step"].tolist() == [0, 1, 2, 3]
    assert start(tmp_path / "cut", 6).wait(90) == 0
    whole = start(tmp_path / "whole", 6)
    assert whole.wait(90) == 0
    columns = ["step", "loss", "index"]
    pd.testing.assert_frame_equal(*(pd.read_csv(tmp_path / name / CURVE)[columns] for name in ("cut", "whole")))


@pytest.mark.timeout(240)
def test_two_processes_train_the_model_that_one_does(tmp_path: Path) -> None:
    alone = start(tmp_path / "alone", 3)
    assert alone.wait(120) == 0
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone")
    for until in (2, 3):  # resumed once, from each process's own shards
        together = start(tmp_path / "together", until, launcher=launcher)
        assert together.wait(120) == 0, together.communicate()[0]
    one, two = (pd.read_csv(tmp_path / name / CURVE) for name in ("alone", "together"))
    assert two["step"].tolist() == [0, 1, 2] and two["tokens"].tolist() == one["tokens"].tolist()
    for column in ("loss", "index"):
        assert (one[column] - two[column]).abs().max() < 1e-3, (one[column], two[column])
    assert one["loss"].diff().abs().min() > 1e-2  # so that a step that was left out would be seen
