"""One look for every figure: opaque, colour-blind safe, legible on light and dark pages."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's colours, which stay apart for the common kinds of colour blindness.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#222222",
)  # fmt: skip
GREY = "#8C8C8C"
MODE_COLOURS = {"local": GREY, "full": RED, "reindex": ORANGE, "reuse": SKY}
WIDTH = 7.2  # inches; the text column of a page


def use_style() -> None:
    """Set the book's look for all figures made afterwards."""
    mpl.rcParams.update(
        {
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "savefig.facecolor": "white",
            "figure.dpi": 150,
            "figure.constrained_layout.use": True,
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#E5E5E5",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK]),
            "lines.linewidth": 1.6,
            "legend.frameon": False,
        }
    )


def figure(height: float, width: float = WIDTH, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of the book, ``height`` and ``width`` in inches, with ``columns`` axes side by side."""
    use_style()
    fig, axes = plt.subplots(1, columns, figsize=(width, height), squeeze=False)
    return fig, list(axes[0])


def layer_map(layers: pd.DataFrame) -> Figure:
    """Which layer reads what? One column a layer; a bar spans the layers that read one source's KV or selection."""
    fig, (ax,) = figure(2.9)
    rows = {"mode": 3.0, "global KV of": 2.0, "selection of": 1.0, "candidates": 0.0}
    for layer, (_, row) in enumerate(layers.iterrows()):
        ax.add_patch(plt.Rectangle((layer - 0.44, rows["mode"] - 0.38), 0.88, 0.76, color=MODE_COLOURS[row["mode"]]))
        label = "L" if row["mode"] == "local" else str(row["ratio"])
        ax.text(layer, rows["mode"], label, ha="center", va="center", fontsize=7, color=BLACK)
        if row["Engram"]:
            ax.plot(layer, rows["mode"] + 0.62, marker="v", color=GREEN, markersize=6, clip_on=False)
        if row["candidates"]:
            source = row["candidates"] == "source"
            ax.plot(layer, rows["candidates"], marker="s" if source else "o", color=PURPLE, markersize=7)
    for column, name, colour in (("KV from", "global KV of", BLUE), ("selection from", "selection of", ORANGE)):
        for source, members in layers.groupby(column):
            first, last = members.index.min(), members.index.max()
            ax.add_patch(
                plt.Rectangle((first - 0.42, rows[name] - 0.22), last - first + 0.84, 0.44, color=colour, alpha=0.55)
            )
            ax.text(first, rows[name], str(source), ha="center", va="center", fontsize=7, weight="bold", color=BLACK)
    pool = layers.index[layers["candidates"] != ""]
    if len(pool):
        ax.plot([pool.min(), pool.max()], [rows["candidates"]] * 2, color=PURPLE, linewidth=1, zorder=0)
    cut = layers.index[layers["stack"] == "decoder"].min()
    ax.axvline(cut - 0.5, color=BLACK, linewidth=1.2)
    ax.text(cut - 0.8, 3.95, "encoder", ha="right", va="center", fontsize=8)
    ax.text(cut - 0.2, 3.95, "decoder", ha="left", va="center", fontsize=8)
    ax.set(xlim=(-0.7, len(layers) - 0.3), ylim=(-0.45, 4.2), xlabel="layer", yticks=list(rows.values()))
    ax.set_yticklabels(list(rows))
    ax.set_xticks(range(0, len(layers), 4))
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    ax.tick_params(left=False)
    handles: list[Artist] = [Patch(color=colour, label=mode) for mode, colour in MODE_COLOURS.items()]
    handles += [
        ax.plot([], [], marker="v", color=GREEN, linestyle="", label="Engram")[0],
        ax.plot([], [], marker="s", color=PURPLE, linestyle="", label="candidate source")[0],
        ax.plot([], [], marker="o", color=PURPLE, linestyle="", label="searches the pool")[0],
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=7.5, handlelength=1.1, columnspacing=1.1)
    ax.set_title("Which layer reads what?", pad=12)
    return fig


def readers(moved: pd.DataFrame) -> Figure:
    """Whose KV and whose selection moves each layer? A filled cell moved when that source was disturbed."""
    kinds = list(moved.columns.get_level_values(0).unique())
    use_style()
    heights = [moved[kind].shape[1] for kind in kinds]
    fig, axes = plt.subplots(
        len(kinds), 1, figsize=(WIDTH, 0.9 + 0.19 * sum(heights)), height_ratios=heights, sharex=True
    )
    for ax, kind, colour in zip(axes, kinds, (BLUE, ORANGE), strict=True):
        cells = np.asarray(moved[kind]).T
        cmap = mpl.colors.ListedColormap(["white", colour])
        ax.imshow(cells, cmap=cmap, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        ax.set_yticks(range(cells.shape[0]), [str(source) for source in moved[kind].columns])
        ax.set_xticks([x - 0.5 for x in range(cells.shape[1])], minor=True)
        ax.set_yticks([y - 0.5 for y in range(cells.shape[0])], minor=True)
        ax.grid(False)
        ax.grid(True, which="minor")
        ax.tick_params(which="both", left=False, bottom=False)
        ax.set_ylabel(f"{kind} of")
    axes[-1].set_xticks(range(0, len(moved), 4))
    axes[-1].set_xlabel("layer that moved")
    axes[0].set_title("Whose KV and whose selection moves each layer?")
    return fig


def kv_by_owner(owners: pd.DataFrame, tokens: int, short: pd.DataFrame) -> Figure:
    """Who owns the bytes, and what do short contexts pay? Bytes a token, by owner and by length."""
    fig, (left, right) = figure(2.7, columns=2)
    base = 0.0
    for place, (_, row) in enumerate(owners.iterrows()):
        for part, colour in (("main KV", BLUE), ("index keys", ORANGE)):
            height = row[part] / tokens
            left.bar(place, height, bottom=base, color=colour, width=0.75)
            base += height
        left.text(place, base + 15, f"{base:,.0f}", ha="center", fontsize=8)
    left.set(xlabel="owner (layer)", ylabel="bytes a token, adding up", ylim=(0, base * 1.12))
    left.set_xticks(range(len(owners)), [str(owner) for owner in owners.index])
    left.legend(handles=[Patch(color=BLUE, label="main KV"), Patch(color=ORANGE, label="index keys")], loc="upper left")
    left.set_title("Who owns the bytes?")
    right.axhline(base, color=GREY, linewidth=1)
    right.plot(short.index, short["a token"], marker="o", markersize=4, color=BLUE)
    right.set(xlabel="tokens in the context", ylabel="bytes a token", ylim=(0, base * 1.12), xticks=range(0, 17, 4))
    right.set_title("What do short contexts pay?")
    return fig


def lineage(table: pd.DataFrame) -> Figure:
    """How many bytes a token did earlier models keep? Log scale."""
    fig, (ax,) = figure(1.9)
    names = list(table.index)[::-1]
    values = [float(table.loc[name, "bytes a token"]) for name in names]
    ax.scatter(values, names, color=[ORANGE if "V4.1" in name else BLUE for name in names], s=60)
    for place, value in enumerate(values):
        ax.text(value * 1.25, place, f"{value:,.0f} B", va="center", fontsize=8)
    ax.set_xscale("log")
    ax.set(xlim=(100, max(values) * 6), ylim=(-0.6, len(names) - 0.4), xlabel="bytes of KV cache a token")
    ax.set_title("How many bytes a token did earlier models keep?")
    return fig


def format_limits(magnitudes: pd.DataFrame, tails: pd.DataFrame) -> Figure:
    """Where does a format end, and which latents suit it? Left: error against magnitude. Right: error against tails."""
    fig, (left, right) = figure(3.3, columns=2)
    names = list(magnitudes.columns)
    colours = dict(zip(names, (GREY, BLUE, GREEN, ORANGE, RED), strict=True))
    marks = dict(zip(names, (":", "-", "--", "-", ":"), strict=True))
    for ax, table in ((left, magnitudes), (right, tails)):
        for name in table.columns:
            ax.plot(table.index, table[name], color=colours[name], linestyle=marks[name], label=name)
        ax.set_xscale("log")
    left.set_yscale("log")
    left.set(xlabel="weight of the norm", ylabel="relative error of a latent")
    left.set_title("Where does a format end?")
    right.set(xlabel="degrees of freedom (heavy tails to the left)", ylabel="relative error")
    right.set_title("Which latents suit it?")
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8)
    return fig


def stored_and_touched(parts: pd.DataFrame) -> Figure:
    """Where are the parameters, and which does one token touch? Columns ``stored`` and ``touched``, one row a part."""
    fig, (ax,) = figure(3.6)
    places = range(len(parts))
    ax.hlines(places, parts["touched"], parts["stored"], color="#C8C8C8", linewidth=3, zorder=1)
    ax.scatter(parts["stored"], places, color=BLUE, s=42, zorder=2, label="stored")
    ax.scatter(parts["touched"], places, color=ORANGE, s=42, zorder=3, marker="D", label="touched by one token")
    ax.set_xscale("log")
    ax.set_yticks(list(places), list(parts.index))
    ax.set_xlabel("parameters")
    ax.set_title("Where are the parameters, and which does one token touch?")
    ax.legend(loc="lower right")
    return fig


NARROW = 4.8  # inches; panels one above the other, which a phone can show without shrinking their text


def keys_and_time(keys: pd.DataFrame, times: pd.DataFrame) -> Figure:
    """How many keys does a layer score, how long does a query take? ``keys``: a column a kind of layer, capped last."""
    use_style()
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(NARROW, 5.4), sharex=True)
    styles = zip(keys.columns, (ORANGE, BLUE, RED), ("s", "o", "D"), strict=True)
    for name, colour, mark in styles:
        top.plot(
            keys.index,
            keys[name],
            color=colour,
            marker=mark,
            markersize=4,
            label=f"layers {name}" if "," in name else f"layer {name}",
        )
    top.set(ylabel="keys scored by one layer")
    top.set_title("How many keys does a layer score?")
    for name, colour, mark in (("full scan", BLUE, "o"), ("capped", RED, "D")):
        bottom.plot(times.index, times[name], color=colour, marker=mark, markersize=4, label=name)
    bottom.set(ylabel="milliseconds a query", xlabel="tokens of context")
    bottom.set_title("How long does a query take?")
    pool = int(keys.iloc[:, -1].max())
    for ax in (top, bottom):
        ax.axvline(pool, color=GREY, linewidth=1, linestyle=":", zorder=0)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.legend(loc="upper left", fontsize=8)
    top.set_ylim(1e3, 6e6)
    shown = [n for n in keys.index if np.log2(n) % 2 == 0]
    bottom.set_xticks(shown, [f"{n // 1024}K" if n < 2**20 else f"{n // 2**20}M" for n in shown])
    bottom.text(pool * 1.08, bottom.get_ylim()[0] * 1.15, "the pool is full", fontsize=8, color=BLACK)
    return fig


def decode_step(parts: pd.DataFrame) -> Figure:
    """What does a decode step spend, and on what? One bar a (weighting, context), stacked by part."""
    use_style()
    fig, ax = plt.subplots(figsize=(NARROW, 3.5))
    colours = (BLUE, SKY, GREEN, PURPLE, GREY, RED)
    places = [0.0, 0.9, 2.1, 3.0]
    columns: list[Any] = list(parts.columns)
    totals: dict[str, float] = {}  # of each weighting's first bar
    for place, (kind, context) in zip(places, columns, strict=True):
        left = 0.0
        for colour, value in zip(colours, parts[kind][context], strict=True):
            ax.barh(place, value, left=left, color=colour, height=0.7)
            left += value
        first = totals.setdefault(kind, left)
        more = f" ({left / first - 1:+.0%})" if left > first else ""
        ax.text(left + 0.6, place, f"{left:.1f}{more}", va="center", fontsize=8)
    ax.set_yticks(places, [f"{context}, {kind}" for kind, context in columns])
    ax.invert_yaxis()
    ax.set(xlabel="GFLOP a decode step", xlim=(0, 1.24 * parts.sum().max()))
    ax.grid(False, axis="y")
    ax.set_title("What does a decode step spend?")
    handles = [Patch(color=colour, label=part) for colour, part in zip(colours, parts.index, strict=True)]
    fig.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, handlelength=1.1)
    return fig


def prefill_work(table: pd.DataFrame, lines: tuple[float, ...]) -> Figure:
    """What does a prompt token cost, and how much of it is saved? Two axes, over the length of the prompt."""
    fig, (left, right) = figure(2.8, columns=2)
    for name, colour, label in (("exact", BLUE, "all layers"), ("replay", ORANGE, "to the encoder")):
        left.plot(table.index, table[name], color=colour, marker="o", markersize=3)
        left.annotate(
            label, (table.index[4], table[name].iloc[4]), xytext=(0, 7), textcoords="offset points", color=colour
        )
    left.set(title="GFLOP a token", ylim=(0, None))
    right.plot(table.index, table["share"], color=BLACK, marker="o", markersize=3)
    for line in lines:
        right.axhline(line, color=GREY, linewidth=1, linestyle=":")
    right.set(title="share of all layers", ylim=(0.4, 1.05))
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks([128, 1024, 8192, 65_536, 1_048_576], ["128", "1K", "8K", "64K", "1M"])
        ax.minorticks_off()
        ax.set_xlabel("prompt, tokens")
    return fig


def training_curves(models: dict[str, pd.DataFrame]) -> Figure:
    """How did the models learn text? Bits per byte by step, a colour a model, a line a seed."""
    use_style()
    fig, ax = plt.subplots(figsize=(NARROW, 3.2))
    for (name, curves), colour in zip(models.items(), (BLUE, ORANGE, GREEN), strict=False):
        for number, (_, curve) in enumerate(curves.items()):
            seen = curve.dropna()
            ax.plot(seen.index, seen, color=colour, linewidth=1.2, label=name if number == 0 else None)
    ax.set(xlabel="step", ylabel="bits per byte")
    ax.set_title("How did the models learn text?")
    ax.legend()
    return fig
