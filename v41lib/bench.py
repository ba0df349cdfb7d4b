"""The bench: prefill, replay and decode of one model, beside plain products on the same machine and beside mlx-lm.

Everything is measured in one process, sides in turns, and reported as the median of repeats with its extremes: on a
machine whose speed drifts, ratios hold where times do not. ``v41 bench`` runs it; the accepted result is
``data/results/bench.json``, and the README's table is made from that file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from v41lib import checkpoint
from v41lib.accounting.flops import prefill_flops
from v41lib.config import Config, preset
from v41lib.engine import Engine
from v41lib.model import Model
from v41lib.nn.compiled import CompilerError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What to run: a preset, prompt ``lengths`` (rising), decode ``steps`` a repeat, and whether to run mlx-lm beside.

    Decode is compared with mlx-lm after ``lengths[1]`` tokens.
    """

    config: str = "bench"
    lengths: tuple[int, int, int] = (1024, 4096, 8192)
    repeats: int = 3
    steps: int = 16
    device: str = "cpu"
    other: bool = True

    def __post_init__(self) -> None:
        if len(self.lengths) != 3 or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise ValueError(f"lengths = {self.lengths}: must be three rising numbers of tokens")
        if self.repeats < 1 or self.steps < 1:
            raise ValueError(f"repeats = {self.repeats}, steps = {self.steps}: must be at least 1")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device = cuda: torch sees no CUDA device; use cpu")


@dataclass
class Samples:
    """Raw values by what was measured and at which length; a rate is in units a second."""

    units: dict[str, str] = field(default_factory=dict)
    values: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, at: int, value: float, unit: str) -> None:
        self.units[what] = unit
        self.values[what, at].append(value)

    def median(self, what: str, at: int) -> float:
        return statistics.median(self.values[what, at])

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self.values

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"what": what, "at": at, "median": statistics.median(v), "low": min(v), "high": max(v)}
            | {"unit": self.units[what], "repeats": len(v)}
            for (what, at), v in self.values.items()
        ]


@dataclass(frozen=True)
class Bar:
    """A promise of the bench: what it is about, what was measured, and the bound it is held to."""

    about: str
    measured: float
    bound: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


@dataclass(frozen=True)
class Result:
    """One run of the bench: its settings, where it ran, the measurements and the bars."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    rows: list[dict[str, Any]]
    bars: list[dict[str, Any]]

    def save(self, path: Path) -> None:
        """Write as JSON, floats with five figures: a spread has no more."""
        plain = json.loads(json.dumps(asdict(self)), parse_float=lambda text: float(f"{float(text):.5g}"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Result:
        """Read what :meth:`save` wrote."""
        return Result(**json.loads(path.read_text()))

    def table(self) -> pd.DataFrame:
        """The measurements, a row each."""
        return pd.DataFrame(self.rows)

    def bar_table(self) -> pd.DataFrame:
        """The bars, a row each."""
        rows = [
            {"bar": bar["about"], "measured": bar["measured"]}
            | {"bound": f"{'at most' if bar['at_most'] else 'at least'} {bar['bound']:g}"}
            | {"met": Bar(**bar).met}
            for bar in self.bars
        ]
        return pd.DataFrame(rows)


def run(settings: Settings, say: Say = lambda text: None) -> Result:
    """Run everything, a few minutes. ``say`` hears what is being measured."""
    samples, config = Samples(), preset(settings.config)
    say(f"peak memory of a prefill of {settings.lengths[-1]:,} tokens, in a process of its own")
    samples.add("peak memory", settings.lengths[-1], peak_memory(settings), "GiB")
    model = Model(config, device=settings.device)
    prompt = token_ids(config, settings.lengths[-1] + (settings.repeats + 1) * settings.steps).to(model.device)
    with torch.no_grad():
        mirror = other_model(model, say) if settings.other else None
        _prefill(settings, model, mirror, prompt, samples, say)
        _decode(settings, model, mirror, prompt, samples, say)
        _indexers(settings, samples, say)
    return Result(
        settings=asdict(settings),
        machine=machine(settings.device, mirror is not None),
        rows=samples.rows(),
        bars=[asdict(bar) for bar in bars(settings, samples)],
    )


def token_ids(config: Config, count: int) -> Tensor:
    """``[1, count]`` random tokens."""
    return torch.randint(0, config.text.vocab_size, (1, count), generator=torch.Generator().manual_seed(0))


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the machine's own limits -----------------------------------------------------------------------------------------


def matmul_rate(device: torch.device, size: int = 2048) -> float:
    """GFLOP/s of one plain FP32 product of square matrices."""
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    a @ b
    return 4 * 2 * size**3 / _seconds(lambda: [a @ b for _ in range(4)], device) / 1e9


def read_rate(device: torch.device, mebibytes: int = 256) -> float:
    """GB/s at which a tensor far larger than a cache is read (and summed)."""
    x = torch.ones(mebibytes << 18, device=device)
    return x.numel() * 4 / _seconds(x.sum, device) / 1e9


def peak_memory(settings: Settings) -> float:
    """GiB that a process needs at most for the longest prefill; on a GPU, GiB of its memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (settings,))


def _peak(settings: Settings) -> float:
    config = preset(settings.config)
    model = Model(config, device=settings.device)
    Engine(model, packed=False).prefill(token_ids(config, settings.lengths[-1]).to(model.device))
    if settings.device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status")  # where it exists: ru_maxrss would include the parent before the child began
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if platform.system() == "Darwin" else 2**20)


# --- the measurements -------------------------------------------------------------------------------------------------


def _prefill(settings: Settings, model: Model, mirror: Other | None, ids: Tensor, samples: Samples, say: Say) -> None:
    engine, longest = Engine(model, packed=False), settings.lengths[-1]
    short = min(settings.lengths[0], 512)  # mlx-lm's rate hardly depends on the length, and it is slow
    engine.prefill(ids[:, :256])
    for repeat in range(settings.repeats):
        say(f"prefill, repeat {repeat + 1} of {settings.repeats}")
        samples.add("plain matmul", 2048, matmul_rate(model.device), "GFLOP/s")
        samples.add("memory read", 256, read_rate(model.device), "GB/s")
        for length in settings.lengths:
            spent = _seconds(partial(engine.prefill, ids[:, :length]), model.device)
            samples.add("prefill, exact", length, length / spent, "tokens/s")
        spent = _seconds(partial(engine.prefill, ids[:, :longest], mode="replay"), model.device)
        samples.add("prefill, replay", longest, longest / spent, "tokens/s")
        if mirror is not None:
            spent = _seconds(partial(mirror.feed, ids[:, :short], fresh=True), model.device)
            samples.add("prefill, mlx-lm", short, short / spent, "tokens/s")


class _Decoder:
    """One engine after a prompt, to be fed a token at a time."""

    def __init__(self, engine: Engine, prompt: Tensor) -> None:
        self.engine, self.state = engine, engine.prefill(prompt)

    def __call__(self, token: Tensor) -> None:
        self.state = self.engine.decode(self.state, token)


def _decode(settings: Settings, model: Model, mirror: Other | None, ids: Tensor, samples: Samples, say: Say) -> None:
    engines = {"decode, plain cache": Engine(model, packed=False), "decode, packed cache": Engine(model)}
    try:
        engines["decode, compiled"] = Engine(model, packed=False, compiled=True)
    except CompilerError as error:
        say(f"without compiled decode: {error}")
    for length in settings.lengths:
        say(f"decode after {length:,} tokens")
        sides: dict[str, Callable[[Tensor], None]] = {
            name: _Decoder(engine, ids[:, :length]) for name, engine in engines.items()
        }
        if mirror is not None and length == settings.lengths[1]:
            say(f"mlx-lm reads {length:,} tokens first, which takes it minutes")
            mirror.feed(ids[:, :length], fresh=True)
            sides["decode, mlx-lm"] = mirror.feed
        for repeat in range(settings.repeats + 1):  # the first one warms up
            first = length + repeat * settings.steps
            for name, side in sides.items():
                tokens = ids[:, first : first + settings.steps].split(1, dim=1)
                times = [_seconds(partial(side, token), model.device) for token in tokens]
                if repeat:
                    samples.add(name, length, 1 / statistics.median(times), "tokens/s")


def _indexers(settings: Settings, samples: Samples, say: Say) -> None:
    from v41lib.experiments import candidate_cap

    say("one released-width indexer, from 4K to 1M packed keys")
    cap = candidate_cap.Params.for_profile("gpu" if settings.device == "cuda" else "ci")
    for context, row in candidate_cap.timed(cap).iterrows():
        samples.add("indexer, full scan", int(str(context)), row["full scan"], "ms")
        samples.add("indexer, capped", int(str(context)), row["capped"], "ms")


def bars(settings: Settings, samples: Samples) -> list[Bar]:
    """What is promised of the preset ``bench`` on a CPU; on other models and devices the same numbers, for reading."""
    text = preset(settings.config).text
    short, middle, long = settings.lengths
    matmul = samples.median("plain matmul", 2048) * 1e9
    found = []
    for length in settings.lengths:
        work = prefill_flops(text, length).total / length  # FLOPs a token
        share = samples.median("prefill, exact", length) * work / matmul
        found.append(Bar(f"exact prefill of {length:,} tokens, share of plain matmul's rate", share, 0.30))
    exact = {length: samples.median("prefill, exact", length) for length in settings.lengths}
    sides = [side for side in DECODERS if (side, middle) in samples]
    fastest = max(sides, key=lambda side: samples.median(side, middle))
    decoded = {length: samples.median(fastest, length) for length in settings.lengths}
    replay = samples.median("prefill, replay", long) / exact[long]
    found += [
        Bar(f"prefill of {long:,} beside {short:,} tokens, in tokens/s", exact[long] / exact[short], 0.8),
        Bar(
            f"peak memory of a prefill of {long:,} tokens, GiB", samples.median("peak memory", long), 2.5, at_most=True
        ),
        Bar(f"replay beside exact prefill of {long:,} tokens", replay, 1.7),
        Bar(f"{fastest}, after {long:,} beside {short:,} tokens", decoded[long] / decoded[short], 0.75),
    ]
    if ("decode, mlx-lm", middle) in samples:
        ratio = decoded[middle] / samples.median("decode, mlx-lm", middle)
        found.append(Bar(f"{fastest}, beside mlx-lm's after {middle:,} tokens", ratio, 2.5))
    ends = [min(at for what, at in samples.values if what == "indexer, capped" and at > 16_384), 1_048_576]
    flat = samples.median("indexer, capped", ends[1]) / samples.median("indexer, capped", ends[0])
    grown = samples.median("indexer, full scan", ends[1]) / samples.median("indexer, full scan", ends[0])
    found += [
        Bar(f"a capped indexer's time, {ends[1]:,} beside {ends[0]:,} keys", flat, 1.25, at_most=True),
        Bar(f"a full scan's time, {ends[1]:,} beside {ends[0]:,} keys", grown, 0.8 * ends[1] / ends[0]),
    ]
    return found


DECODERS = ("decode, plain cache", "decode, packed cache", "decode, compiled")


# --- mlx-lm, for the reader -------------------------------------------------------------------------------------------


def mlx_model(model: Model) -> Any:
    """mlx-lm's model with this model's weights, in FP32, by way of a checkpoint on disk.

    Raises ``ImportError`` without mlx-lm, ``ValueError`` when it misses a tensor or finds one too many.
    """
    import mlx.core as mx
    from mlx_lm.models import deepseek_v41

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(model, folder)
        config = Config.from_file(Path(folder) / "config.json").to_dict()
        mirror = deepseek_v41.Model(deepseek_v41.ModelArgs.from_dict(config))
        stored: Any = mx.load(str(Path(folder) / "model.safetensors"))
        mirror.load_weights(list(mirror.sanitize(stored).items()), strict=True)
        mx.eval(mirror.parameters())  # mlx reads lazily: everything must be read before the folder goes
    return mirror


class Other:
    """mlx-lm beside us: the same weights on its CPU backend, through its own cache."""

    def __init__(self, model: Model) -> None:
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        self._mx, self._model = mx, mlx_model(model)
        self._cache = self._model.make_cache()

    def feed(self, ids: Tensor, fresh: bool = False, chunk: int = 512) -> None:
        """Feed tokens, into a new cache if ``fresh``."""
        if fresh:
            self._cache = self._model.make_cache()
        for part in ids.cpu().split(chunk, dim=1):
            self._mx.eval(self._model(self._mx.array(part.numpy()), self._cache))


def other_model(model: Model, say: Say) -> Other | None:
    """mlx-lm beside us, or None with a word about why not."""
    try:
        return Other(model)
    except ImportError as error:
        say(f"without mlx-lm ({error}): pip install -r requirements-parity.txt")
        return None


# --- where it ran, and the README -------------------------------------------------------------------------------------


def machine(device: str, other: bool) -> dict[str, Any]:
    """What a reader needs to place the numbers: processor, threads, versions, date."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    found = {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": device}
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    packages = ["torch", *(["mlx", "mlx-lm"] if other else [])]
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "?"
    return found | {"python": platform.python_version(), "versions": versions, "date": date.today().isoformat()}


def markdown(result: Result) -> str:
    """The README's block: where it ran, the measurements with their spread, the bars."""
    where = result.machine
    used = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    lines = [
        f"{where.get('gpu') or where['cpu']}, {where['cores']} cores, {where['threads']} threads; {used}; "
        f"{where['date']}. Medians of {result.settings['repeats']} repeats, lowest to highest in brackets; the "
        "indexer's time is that of one thread. Prefill fills a plain cache.",
        "",
        "| | tokens (indexer: keys; matmul: side; read: MiB) | | |",
        "|---|---:|---:|---|",
    ]
    for row in result.rows:
        if not row["what"].startswith("indexer") or row["at"] in (4096, 16_384, 32_768, 1_048_576):
            spread = f" ({_short(row['low'])} to {_short(row['high'])})" if row["repeats"] > 1 else ""
            lines.append(f"| {row['what']} | {row['at']:,} | {_short(row['median'])}{spread} | {row['unit']} |")
    lines += ["", "| bar | measured | bound | met |", "|---|---:|---:|---|"]
    for bar in result.bars:
        bound = f"{'≤' if bar['at_most'] else '≥'} {bar['bound']:.3g}"
        met = "yes" if Bar(**bar).met else "**no**"
        lines.append(f"| {bar['about']} | {_short(bar['measured'])} | {bound} | {met} |")
    return "\n".join(lines) + "\n"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


BEGIN, END = "<!-- bench -->\n", "<!-- end of bench -->\n"


def with_block(readme: str, block: str) -> str:
    """``readme`` with the text between its two bench markers replaced. Raises ``ValueError`` when it has none."""
    head, found, rest = readme.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"README.md lacks the lines {BEGIN.strip()} and {END.strip()}")
    return f"{head}{BEGIN}{block}{END}{tail}"
