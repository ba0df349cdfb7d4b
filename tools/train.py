"""Trains every model that the book ships or quotes: `make train`. Two at a time, one thread each; it can be stopped.

What is finished is not repeated, and what was cut off goes on. `make train ACCEPT=1` takes what is finished into data/.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("small", "small-adamw", "small-whole", "small-balanced", "small-sparse", "small-untaught", "small-even")
# Seed 0 of the large ones first: these are shipped.
RUNS = [
    *[("main", 0), ("capped", 0), ("aware", 0), ("main", 1), ("capped", 1), ("aware", 1), ("main", 2)],
    *[(arm, seed) for arm in ARMS for seed in (0, 1)],
]


def train(name: str, seed: int, accept: bool, stop: threading.Event) -> int:
    """One run in a process of its own; its exit status."""
    if stop.is_set():
        return 1
    command = [sys.executable, "-m", "v41lib.cli", "train", name, "--seed", str(seed), *["--accept"] * accept]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def main() -> int:
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(train, name, seed, "--accept" in sys.argv, stop) for name, seed in RUNS]
        try:
            return max(run.result() for run in runs)
        except KeyboardInterrupt:  # the runs have heard it too, and save
            stop.set()
            return 130


if __name__ == "__main__":
    sys.exit(main())
