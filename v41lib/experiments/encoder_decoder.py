"""Chapter 05: the cut between encoder and decoder, what stopping there saves, and what a stored prefix weighs."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from functools import cache, partial
from statistics import median
from typing import Any, ClassVar, Self

import pandas as pd
import torch
from pydantic import Field, model_validator
from torch import Tensor

from v41lib.accounting import params as parameters
from v41lib.accounting.flops import COMPONENTS, Flops, decode_flops, prefill_flops
from v41lib.cache import Lane
from v41lib.config import Config, preset, released
from v41lib.engine import Engine
from v41lib.experiments.base import BaseParams
from v41lib.model import Encoded, Model
from v41lib.nn.shared import Shared

PROMPTS = tuple(4096 * 4**n for n in range(5))  # 4K to 1M
SHORT = 4096
CURVE = tuple(128 * 2**n for n in range(14))  # a window to 1M, for a figure
SHARES = (0.5, 2 / 3)  # lines in it
# What grows with the tokens that are seen; all other components are weights times rows.
SEEN = ("window", "selected", "index_scores", "index_sum")


class Params(BaseParams):
    """``tokens`` go through the split model; prompts of ``lengths`` (rising) are timed, ``repeats`` times each."""

    tokens: int = Field(default=96, ge=2)
    lengths: tuple[int, ...] = Field(default=(256, 1024, 2048), min_length=1)
    repeats: int = Field(default=3, ge=1)
    seed: int = Field(default=0, ge=0)

    PROFILES: ClassVar[dict[str, dict[str, Any]]] = {
        "full": {"lengths": (1024, 4096, 8192)},
        "gpu": {"lengths": (1024, 8192, 65_536), "repeats": 5},
    }

    @model_validator(mode="after")
    def _lengths_rise(self) -> Self:
        if list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise ValueError("lengths: must rise, from 1 on")
        return self


# --- the cut ----------------------------------------------------------------------------------------------------------


def without(model: Model, gone: Callable[[str], bool]) -> Model:
    """A copy of ``model`` in which the weights whose names are ``gone`` are NaN: whatever reads one is NaN too."""
    half = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in half.named_parameters():
            if gone(name):
                weight.fill_(torch.nan)
    return half


def halves(model: Model) -> tuple[Model, Model]:
    """Two copies: one without what only the decoder needs, one without what only the encoder needs.

    The first layer of the decoder is divided: its compressor and its index keys belong to the encoder's side. Both
    sides need the norm before them.
    """
    source = f"layers.{model.cut}."
    keys = tuple(f"{source}attn.{part}." for part in ("compressor", "indexer.wk", "indexer.k_norm"))

    def of_encoder(name: str) -> bool:
        early = name.startswith("layers.") and int(name.split(".")[1]) < model.cut
        return early or name.startswith(("embed.", *keys))

    def of_both(name: str) -> bool:
        return name.startswith(f"{source}attn_norm.")

    encoder = without(model, lambda name: not of_encoder(name) and not of_both(name))
    return encoder, without(model, of_encoder)


def carry(encoded: Encoded) -> tuple[Encoded, int]:
    """What crosses the cut, written to bytes and read back, and its tensors' bytes.

    The residual, one global KV, and which tokens are of an image, if any are.
    """
    residual, kv = encoded.residual, encoded.shared.kv
    assert kv is not None  # the cut is where one is published
    parts = (residual.streams, residual.pre, kv.main, kv.index_keys, encoded.is_image)
    wire = io.BytesIO()
    torch.save((residual, kv, encoded.is_image), wire)
    wire.seek(0)
    residual, kv, is_image = torch.load(wire, weights_only=False)
    size = sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))
    return Encoded(residual, Shared(kv=kv), is_image), size


@cache
@torch.no_grad()
def split(params: Params) -> pd.DataFrame:
    """The whole model beside its two halves on the released schedule, 40 layers, at small widths."""
    config = preset("miniature")
    model = Model(config, seed=params.seed, device=params.device)
    ids = _ids(config, params.tokens, params.seed).to(model.device)
    whole = model(ids)
    encoder, decoder = halves(model)
    encoded, size = carry(encoder.encode(ids))
    apart = decoder.decode(encoded)
    rows = {
        "encoder, then decoder": apart,
        "the encoder's half alone": encoder(ids),
        "the decoder's half alone": decoder(ids),
    }
    table = pd.DataFrame(
        {
            name: {
                "logits that are numbers": f"{float(out.isfinite().double().mean()):.0%}",
                "equal to the whole model's": torch.equal(out, whole),
            }
            for name, out in rows.items()
        }
    ).T.rename_axis("run")
    return table.assign(**{"bytes that crossed": [size, 0, 0]})


def _ids(config: Config, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.text.vocab_size, (1, count), generator=generator)


# --- what a window does to an early exit ------------------------------------------------------------------------------


@cache
@torch.no_grad()
def last_row_alone(params: Params) -> pd.DataFrame:
    """Replaying the decoder on the last token alone: whether its logits are exact, by window.

    A window of one token leaves a decoder of cross-attention only, as in YOCO; every larger one needs earlier rows.
    """
    config = preset("miniature")
    rows = {}
    for window in (1, 2, config.text.sliding_window):
        text = config.text.replace(sliding_window=window)
        model = Model(Config.from_dict(config.to_dict() | {"text_config": text.to_dict()}), seed=params.seed)
        ids, engine = _ids(config, params.tokens, params.seed), Engine(model)
        exact = engine.prefill(ids).logits
        alone = engine.prefill(ids, mode="replay", replay_len=1).logits
        rows[window] = {
            "exact": bool((exact - alone).abs().max() < 1e-4),
            "rows that guarantee it": window + (len(model.layers) - model.cut - 1) * (window - 1),
        }
    return pd.DataFrame(rows).T.rename_axis("window")


# --- work -------------------------------------------------------------------------------------------------------------


def by_length(prompts: tuple[int, ...] = PROMPTS) -> pd.DataFrame:
    """Prefill of the released model: GFLOP a prompt token in both modes, and replay's share of exact."""
    text = released().text
    rows = {}
    for prompt in prompts:
        exact, replay = (prefill_flops(text, prompt, mode).total / prompt / 1e9 for mode in ("exact", "replay"))
        rows[prompt] = {"exact": exact, "replay": replay, "share": replay / exact}
    return pd.DataFrame(rows).T.rename_axis("prompt")


def furthest_from_half(table: pd.DataFrame) -> float:
    """The share of :func:`by_length` that lies furthest from one half."""
    return max((float(share) for share in table["share"]), key=lambda share: abs(share - 0.5))


def work(context: int = SHORT) -> pd.DataFrame:
    """Half the FLOPs a token, in billions: that of the weights is a count of parameters; what is seen comes on top."""
    text = released().text
    active = parameters.active(text)
    passes: dict[str, tuple[Flops, int]] = {
        "prefill, stopping at the encoder": (prefill_flops(text, context, "replay"), context),
        "prefill, all layers": (prefill_flops(text, context), context),
        "decode": (decode_flops(text, context), 1),
    }
    rows = {}
    for name, (flops, tokens) in passes.items():
        parts = flops.by_component()
        seen = sum(parts[component] for component in SEEN)
        weights = sum(parts[component] for component in COMPONENTS if component not in SEEN)
        rows[name] = {"weights": weights / 2e9 / tokens, "keys": seen / 2e9 / tokens}
    table = pd.DataFrame(rows).T.rename_axis("a token of")
    counted = [active.encoder, active.stacks, active.stacks + active.head]
    return table.assign(**{"active parameters": [count / 1e9 for count in counted]})


@cache
@torch.no_grad()
def timed(params: Params) -> pd.DataFrame:
    """Tokens a second of both modes on the preset ``bench``, medians; the modes take turns."""
    config = preset("bench")
    model = Model(config, device=params.device)
    engine, ids = Engine(model, packed=False), _ids(config, params.lengths[-1], params.seed).to(model.device)
    engine.prefill(ids[:, :64])
    spent: dict[tuple[int, str], list[float]] = {}
    for _ in range(params.repeats):
        for length in params.lengths:
            for mode in ("exact", "replay"):
                run = partial(engine.prefill, ids[:, :length], mode)
                spent.setdefault((length, mode), []).append(_seconds(run, params.device))
    rows = {}
    for length in params.lengths:
        exact, replay = (median(spent[length, mode]) for mode in ("exact", "replay"))
        flops = [prefill_flops(config.text, length, mode).total for mode in ("exact", "replay")]
        rows[length] = {
            "exact": length / exact,
            "replay": length / replay,
            "share of the time": replay / exact,
            "share of the FLOPs": flops[1] / flops[0],
        }
    return pd.DataFrame(rows).T.rename_axis("prompt")


def _seconds(run: Any, device: str) -> float:
    begun = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


# --- a stored prefix --------------------------------------------------------------------------------------------------


@cache
def window_bytes() -> int:
    """Bytes of all window rings of the released model, off the storage of a real cache."""
    lane = Lane(released().text, [0], torch.zeros(1), undo=0)
    return sum(size for name, size in lane.nbytes().items() if name.startswith("window."))


@cache
def token_bytes(tokens: int = 64) -> float:
    """Bytes of global KV a token, off the storage of a real cache of the released model."""
    text = released().text
    lane = Lane(text, [0], torch.zeros(1), undo=0)
    for plan in lane.plans:
        if plan.owns_kv:
            source = lane.sources[plan.layer]
            source.main.write(0, torch.ones(1, tokens // plan.ratio, text.head_dim))
            source.keys.write(0, torch.ones(1, tokens // plan.ratio, text.index_head_dim))
    return sum(size for name, size in lane.nbytes().items() if name.startswith(("main.", "keys."))) / tokens


def stored(prefixes: tuple[int, ...] = (512, 2048, 8192, 131_072, 1_048_576)) -> pd.DataFrame:
    """MB that a stored prefix takes with its windows and without them, and the windows' share."""
    a_token, windows = token_bytes(), window_bytes()
    rows = {
        n: {
            "global KV": n * a_token / 1e6,
            "windows": windows / 1e6,
            "with windows": (n * a_token + windows) / 1e6,
            "share of windows": windows / (n * a_token + windows),
        }
        for n in prefixes
    }
    return pd.DataFrame(rows).T.rename_axis("prefix")


# --- words and claims -------------------------------------------------------------------------------------------------


def in_words(params: Params) -> dict[str, str]:
    """The numbers that the prose quotes and that do not depend on the machine, as text."""
    text, lengths = released().text, by_length()
    window, streams = text.sliding_window, text.hc_mult
    crossing = window * (streams * text.hidden_size * 2 + streams * 4)
    shares = lengths["share"]
    table = work()
    return {
        "layers": str(text.num_hidden_layers),
        "cut": str(text.kv_source_layer_ids[-1]),
        "tokens": f"{params.tokens:,}",
        "crossing_mb": f"{crossing / 1e6:.1f}",
        "window": str(window),
        "share_first": f"{shares.iloc[0]:.3f}",
        "share_least": f"{shares.min():.3f}",
        "share_last": f"{shares.iloc[-1]:.3f}",
        "least_at": f"{PROMPTS[int(shares.argmin())] // 1024}K",
        "encoder_weights": f"{table['weights'].iloc[0]:.2f}",
        "exact_weights": f"{table['weights'].iloc[1]:.2f}",
        "decode_weights": f"{table['weights'].iloc[2]:.2f}",
        "decode_keys": f"{table['keys'].iloc[2]:.2f}",
        "window_mb": f"{window_bytes() / 1e6:.2f}",
        "token_bytes": f"{token_bytes():,.0f}",
        "even": f"{window_bytes() / token_bytes():,.0f}",
    }


def times_in_words(times: pd.DataFrame) -> dict[str, str]:
    """The timings that the prose quotes, as text."""
    last = times.iloc[-1]
    return {
        "timed_prompt": f"{times.index[-1]:,}",
        "speedup": f"{1 / last['share of the time']:.2f}",
        "expected": f"{1 / last['share of the FLOPs']:.2f}",
    }


def settled(params: Params) -> dict[str, Any]:
    """The values of this chapter's claims."""
    return {
        "prefill-halved": furthest_from_half(by_length()),
        "split-exact": bool(split(params)["equal to the whole model's"].iloc[0]),
    }
