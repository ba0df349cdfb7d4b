"""The shapes in signatures are true: every call of a few forward passes is checked against its annotation.

In a process of its own, because the check is installed when a module is first imported, and because it is slow.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook(("v41lib.nn", "v41lib.model"), "beartype.beartype"):
    import v41lib.checkpoint
    import v41lib.model

from tests.unit.support import random_model, small_config, tokens
from v41lib.nn.hyper import collapse
from v41lib.nn.moe import Route

torch.set_num_threads(1)
for wrong in (
    lambda: collapse(torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 5)),
    lambda: collapse(torch.zeros(1, 3, 4, 8), torch.zeros(1, 2, 4)),
    lambda: random_model(small_config())(torch.zeros(1, 3)),
):
    try:
        wrong()
    except TypeCheckError:
        continue
    raise SystemExit("a wrong shape or dtype went through: the check is not active")

for dtype in (torch.float32, torch.bfloat16):
    model = random_model(small_config(), dtype=dtype)
    for length in (1, 2, 17):
        model.trace(tokens(length, batch=2))
    ids = tokens(17)
    ids[0, 4] = 39  # an image token
    model(ids).square().mean().backward()
model = v41lib.checkpoint.load("tests/golden/wide")
model.trace(tokens(97, vocab=128))
print("checked")
"""


def test_annotated_shapes_hold_in_every_call() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert done.stdout.strip() == "checked"
