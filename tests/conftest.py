"""What all tests share: reproducible property tests, and the golden fixtures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import v41lib

settings.register_profile(
    "v41", derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("v41")

# Everything here is small: threads gain nothing, and on a machine busy with other work they wait for each other.
torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Golden:
    """One fixture: the checkpoint folder, the tokens ``[1,S]``, and what two other implementations made of them."""

    name: str
    folder: Path
    ids: torch.Tensor
    logits: dict[str, torch.Tensor]
    trace: dict[str, np.ndarray]
    meta: dict[str, object]
    model: v41lib.Model


def read_golden(name: str) -> Golden:
    folder = GOLDEN / name
    with np.load(folder / "trace_nemo.npz") as file:
        trace = {key: file[key] for key in file.files}
    return Golden(
        name=name,
        folder=folder,
        ids=torch.from_numpy(np.load(folder / "input_ids.npy")),
        logits={
            source: torch.from_numpy(np.load(folder / f"logits_{source}.npy"))
            for source in ("nemo", "mlx_prefill", "mlx_decode")
        },
        trace=trace,
        meta=json.loads((folder / "meta.json").read_text(encoding="utf-8")),
        model=v41lib.load(folder),
    )


@pytest.fixture(scope="session", params=["tiny", "wide"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return read_golden(request.param)


@pytest.fixture(scope="session")
def tiny() -> Golden:
    return read_golden("tiny")


@pytest.fixture(scope="session")
def wide() -> Golden:
    return read_golden("wide")
