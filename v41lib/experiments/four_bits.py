"""Chapter 04: what four bits keep of a latent, beside other formats; where the format ends; why no global scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from v41lib.config import released
from v41lib.experiments import kv_bytes
from v41lib.experiments.base import BaseParams
from v41lib.nn import quant
from v41lib.nn.attention import softmax_with_sink
from v41lib.nn.rope import layer_frequencies, rotate, rotation
from v41lib.plan import plan_layers

RoundTrip = Callable[[Tensor], Tensor]


class Params(BaseParams):
    """``entries`` latents are rounded; ``queries`` of 64 heads attend to them; ``tries`` vectors seek the bound."""

    entries: int = Field(default=2048, ge=1)
    queries: int = Field(default=16, ge=1)
    tries: int = Field(default=2000, ge=1)
    seed: int = Field(default=0, ge=0)

    PROFILES: ClassVar[dict[str, dict[str, Any]]] = {
        "full": {"entries": 8192, "queries": 64},
        "gpu": {"entries": 32_768, "queries": 256},
    }


def int4_round_trip(x: Tensor) -> Tensor:
    """Symmetric INT4, -7 to 7, with an E4M3 scale for 16 channels: as many bytes as main KV, a uniform grid."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    scale = quant.round_e4m3(blocks.abs().amax(-1, keepdim=True).clamp_min(7 * 2.0**-9) / 7)
    return ((blocks / scale).round().clamp(-7, 7) * scale).flatten(-2)[..., : x.shape[-1]]


def mxfp4_floor_round_trip(x: Tensor) -> Tensor:
    """MXFP4 with the OCP document's rule for the scale, 2^(floor(log2 amax) - 2): the largest elements may not fit."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-120)
    scale = torch.ldexp(torch.ones_like(amax), torch.frexp(amax).exponent - 3)  # frexp's mantissa is below one
    return (quant.round_e2m1(blocks / scale) * scale).flatten(-2)[..., : x.shape[-1]]


# Name, round trip, and bits a channel with its share of the scale.
FORMATS: dict[str, tuple[RoundTrip, float]] = {
    "FP8 / 32 (window KV)": (quant.fp8_round_trip, 8 + 8 / 32),
    "E2M1 / 16 (main KV)": (quant.fp4_round_trip, 4 + 8 / 16),
    "INT4 / 16": (int4_round_trip, 4 + 8 / 16),
    "MXFP4 / 32 (index keys)": (quant.mxfp4_round_trip, 4 + 8 / 32),
    "MXFP4 / 32, floor (OCP)": (mxfp4_floor_round_trip, 4 + 8 / 32),
}
MAIN, MX = "E2M1 / 16 (main KV)", "MXFP4 / 32 (index keys)"


@cache
@torch.no_grad()
def latents(params: Params) -> Tensor:
    """Latents of layer 20 at released widths, normed and rotated, before any rounding: ``[C, D]``. Random weights."""
    text = released().text
    plan = plan_layers(text)[text.candidate_source_layer_id]
    source_params = kv_bytes.Params(profile=params.profile, tokens=params.entries, seed=params.seed)
    x = kv_bytes.inputs(params.entries, source_params)
    latent = kv_bytes.source(plan, source_params).compressor(x)[0]
    positions = torch.arange(len(latent), device=latent.device) * plan.ratio
    return rotate(latent, rotation(positions, layer_frequencies(text, plan.ratio, latent.device)))


@cache
@torch.no_grad()
def compare(params: Params) -> pd.DataFrame:
    """Each format on the same latents: relative error, cosine, and what attention over them makes of it.

    Queries are drawn so that scores have unit variance. ``attention error`` is the relative L2 error of a head's
    output, ``KL`` that of its weights, both medians over heads and queries.
    """
    exact = latents(params)
    text = released().text
    generator = torch.Generator().manual_seed(params.seed + 1)
    shape = (params.queries, text.num_attention_heads, text.head_dim)
    q = torch.randn(shape, generator=generator).to(exact.device)  # latents have unit scale, so q . k / sqrt(D) has too
    weights, out = _attend(q, exact)  # in FP64: a divergence this small is a difference of sums
    rows = {}
    for name, (rounded, bits) in FORMATS.items():
        kept = rounded(exact)
        kept_weights, kept_out = _attend(q, kept)
        kl = (weights * (weights.clamp_min(1e-30).log() - kept_weights.clamp_min(1e-30).log())).sum(-1)
        rows[name] = {
            "bits": bits,
            "error": _relative(kept, exact),
            "cosine": float(F.cosine_similarity(kept, exact, dim=-1).mean()),
            "attention error": float(((kept_out - out).norm(dim=-1) / out.norm(dim=-1)).median()),
            "KL, nats": float(kl.median()),
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("format")


def _attend(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Attention weights ``[S,H,C]`` and outputs ``[S,H,D]`` of queries over all entries, as key and as value."""
    q, kv = q.double(), kv.double()
    logits = q @ kv.T * q.shape[-1] ** -0.5
    weights = softmax_with_sink(logits, torch.zeros(q.shape[1], device=q.device))
    return weights, weights @ kv


def _relative(kept: Tensor, exact: Tensor) -> float:
    """Root mean square error over root mean square."""
    return float((kept - exact).norm() / exact.norm())


def ties() -> pd.DataFrame:
    """Each midpoint of the E2M1 grid, and where it goes: to the even code, up or down."""
    grid = torch.tensor(quant.E2M1_GRID)
    midpoints = (grid[1:] + grid[:-1]) / 2
    return pd.DataFrame({"midpoint": midpoints.tolist(), "rounds to": quant.round_e2m1(midpoints).tolist()})


def largest_representable() -> float:
    """The largest magnitude that E2M1 with an E4M3 scale holds, by trying every element and every scale byte."""
    every_byte = torch.arange(256, dtype=torch.uint8)
    scales = every_byte.view(torch.float8_e4m3fn).float()
    elements = quant.decode_elements(every_byte, quant.FP4, 512)
    products = elements.unsqueeze(0) * scales.nan_to_num(0.0).unsqueeze(1)
    return float(products.abs().max())


@cache
@torch.no_grad()
def largest_latent(params: Params) -> float:
    """The largest channel of a normed, rotated vector of D channels that a search finds, with unit norm weights.

    Half the tries are random vectors with one huge channel, which is the worst a norm can be given; half spread the
    mass over a random few channels.
    """
    text = released().text
    generator = torch.Generator().manual_seed(params.seed)
    width, found = text.head_dim, 0.0
    by = rotation(torch.arange(params.tries), layer_frequencies(text, ratio=1))
    x = torch.randn(params.tries, width, generator=generator) * 1e-3
    few = torch.randint(1, 4, (params.tries,), generator=generator)
    for row, count in enumerate(few.tolist()):
        places = torch.randperm(width, generator=generator)[: 1 if row % 2 else count]
        x[row, places] = 1e3 * torch.randn(len(places), generator=generator).sign()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + text.rms_norm_eps)
    for vectors in (normed, rotate(normed, by)):
        found = max(found, float(vectors.abs().max()))
    return found


@cache
def over_magnitudes(params: Params) -> pd.DataFrame:
    """Relative error of each format when the norm's weight, and so the latent, is multiplied by powers of two."""
    exact = latents(params)[:256]
    exponents = range(-14, 13)
    rows = {
        2.0**e: {name: _relative(f(exact * 2.0**e), exact * 2.0**e) for name, (f, _) in FORMATS.items()}
        for e in exponents
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("norm weight")


@cache
def over_tails(params: Params) -> pd.DataFrame:
    """Relative error of the four-bit formats on normed Student-t vectors, by degrees of freedom (3: heavy tails)."""
    text = released().text
    generator = torch.Generator().manual_seed(params.seed)
    rows = {}
    for freedom in (3, 4, 6, 10, 30, 100):
        x = torch.randn(256, text.head_dim, generator=generator)
        x = x / torch.randn(*x.shape, freedom, generator=generator).square().mean(-1).sqrt()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
        rows[freedom] = {name: _relative(f(x), x) for name, (f, bits) in FORMATS.items() if bits < 8}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("degrees of freedom")


def breaks_at(table: pd.DataFrame, name: str = MAIN, factor: float = 1.5) -> tuple[float, float]:
    """The smallest and the largest norm weight at which a format's error stays within ``factor`` of its best."""
    good = table.index[table[name] <= factor * table[name].min()]
    return float(good.min()), float(good.max())


def in_words(params: Params, errors: pd.DataFrame, magnitudes: pd.DataFrame, tails: pd.DataFrame) -> dict[str, str]:
    """The numbers that the chapter's prose quotes, as text."""
    error = errors["error"]
    fp8, int4 = error.index[0], error.index[2]
    low, high = breaks_at(magnitudes)
    gap = (tails[MAIN] - tails[int4]).to_numpy()
    crossing = float(np.exp(np.interp(0.0, gap, np.log(tails.index.to_numpy(dtype=float)))))
    return {
        "entries": f"{params.entries:,}",
        "queries": str(params.queries),
        "tries": f"{params.tries:,}",
        "vs_mx": f"{error[MAIN] / error[MX]:.2f}",
        "vs_fp8": f"{error[MAIN] / error[fp8]:.1f}",
        "int4_gain": f"{1 - error[int4] / error[MAIN]:.0%}",
        "crossover": f"{crossing:.0f}",
        "breaks_low": f"1/{1 / low:.0f}",
        "breaks_high": f"{high:,.0f}",
        "guaranteed": f"{largest_representable() / released().text.head_dim ** 0.5:.0f}",
    }


def settled(params: Params) -> dict[str, float]:
    """The values of this chapter's claims."""
    errors = compare(params)["error"]
    return {
        "fp4-range": largest_representable(),
        "fp4-latent-bound": largest_latent(params),
        "fp4-beats-mxfp4": float(errors[MAIN] / errors[MX]),
    }
