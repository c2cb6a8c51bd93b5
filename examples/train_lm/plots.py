"""Pictures of the demo, for readers who have never seen the project."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator, PercentFormatter
from numpy.typing import NDArray

from benchmarks.pictures import GREY, STYLE, name_ends, new_figure

from .report import History, Result, Tiles

Array: TypeAlias = NDArray[Any]

QUERY_TILE, KEY_TILE = 64, 128
# Okabe and Ito's palette: told apart by colour-blind readers too.
BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
PINK, SKY, RED = "#CC79A7", "#56B4E9", "#D55E00"
LAYER_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
SKIPPED = "#d9d9d9"
LEAST_SHADE = 1e-3  # probability of a tile, in the tile map
TILE_SHADES = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.1, 1.0, 256)))


def draw_all(result: Result, tiles: Sequence[Tiles], folder: Path) -> None:
    with matplotlib.rc_context(STYLE | {"savefig.dpi": 160}):
        draw_loss(result).savefig(folder / "loss.png")
        draw_skipped(result).savefig(folder / "skipped.png")
        draw_tiles(result, tiles).savefig(folder / "tiles.png")


def draw_loss(result: Result) -> Figure:
    exact, sparse = result.runs["exact"], result.runs["sparse"]
    figure = new_figure(
        (9, 5.8),
        "Loss of the same model, trained with exact and with sparse gradients",
        f"Loss on unseen text. The sparse training skipped {_skipped(sparse)[1].mean():.0%} of the "
        "attention tiles in its backward passes.",
    )
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps, exact_loss = np.array(exact.validation).T
    sparse_loss = np.array(sparse.validation)[:, 1]
    thin: dict[str, Any] = {"color": "black", "linewidth": 1.5, "marker": "o", "markersize": 4}
    thin["clip_on"] = False
    top.plot(steps, exact_loss, color=SKY, linewidth=7, solid_capstyle="round")
    top.plot(steps, sparse_loss, **thin)
    ends = [("exact", exact_loss[-1], BLUE), ("sparse", sparse_loss[-1], "black")]
    name_ends(top, [(f"{name}: {loss:.3f}", loss, colour) for name, loss, colour in ends])
    top.set_ylabel("validation loss (nats per byte)")
    difference = sparse_loss - exact_loss
    bottom.axhline(0, color=SKY, linewidth=4)
    bottom.plot(steps, difference, **thin)
    reach = 1.3 * max(0.01, np.abs(difference).max())
    bottom.set_ylim(-reach, reach)
    name_ends(bottom, [(f"sparse - exact:\n{difference[-1]:+.3f}", 0.0, "black")])
    bottom.set_ylabel("difference")
    bottom.set_xlabel("training step")
    bottom.set_xlim(0, steps[-1])
    return figure


def draw_skipped(result: Result) -> Figure:
    steps, skipped = _skipped(result.runs["sparse"])
    figure = new_figure(
        (9, 5),
        "How much of the attention backward is skipped, layer by layer",
        "As attention becomes selective, more tiles are negligible: together they hold less than "
        f"{result.settings['negl_prob']:.0%} of it.",
    )
    axes = figure.subplots()
    ends = []
    for layer, share in enumerate(skipped.T):
        colour = LAYER_COLOURS[layer % len(LAYER_COLOURS)]
        smooth = _smooth(share)
        axes.plot(steps, share, color=colour, linewidth=0.7, alpha=0.4)
        axes.plot(steps, smooth, color=colour, linewidth=2.4)
        ends.append((f"layer {layer + 1}: {smooth[-1]:.0%}", smooth[-1], colour))
    axes.set_ylim(0, 1)
    axes.set_xlim(0, steps[-1])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("share of tiles skipped")
    axes.set_xlabel("training step")
    name_ends(axes, ends)
    return figure


def draw_tiles(result: Result, layers: Sequence[Tiles]) -> Figure:
    layer, head = _typical_head(layers)
    tiles = layers[layer]
    allowed, live = tiles.allowed, tiles.live[head]
    num_skipped = int(allowed.sum() - live.sum())
    figure = new_figure(
        (11, 5.6),
        f"Exact forward, sparse backward: {num_skipped / allowed.sum():.0%} of this head's "
        "attention tiles are skipped",
        f"Head {head + 1} of layer {layer + 1} reads {result.settings['context']} bytes of "
        f"Python source. A tile holds {QUERY_TILE} queries and {KEY_TILE} keys.",
    )
    left, right = figure.subplots(1, 2, sharey=True)
    shade = np.where(allowed, tiles.prob[head].clip(LEAST_SHADE), np.nan)
    image = _show(left, shade, cmap=TILE_SHADES, norm=LogNorm(LEAST_SHADE, 1.0))
    left.set_title("Forward: all tiles are computed")
    left.set_ylabel("query position (bytes)")
    left.text(0.97, 0.95, "keys after the query:\nmasked", transform=left.transAxes, color=GREY,
              ha="right", va="top")  # fmt: skip
    bar = figure.colorbar(image, ax=left, shrink=0.9, pad=0.02)
    bar.set_label("share of the queries' attention held by the tile")
    bar.minorticks_off()
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
    kinds = np.where(live, 1.0, np.where(allowed, 0.0, np.nan))
    _show(right, kinds, cmap=ListedColormap([SKIPPED, RED]), vmin=0, vmax=1)
    right.set_title("Backward: live tiles alone")
    budget = f"{100 * float(str(result.settings['negl_prob'])):g}%"
    right.legend(
        handles=[
            Patch(color=RED, label=f"live: {live.sum()}"),
            Patch(
                color=SKIPPED,
                label=f"skipped: {num_skipped}; each\nrow of tiles loses under {budget}",
            ),
        ],
        loc="upper right",
        frameon=False,
    )
    return figure


def _show(axes: Axes, values: Array, **style: Any) -> AxesImage:
    """Tiles in their place: keys from left to right, queries from top to bottom."""
    rows, columns = values.shape
    width, height = columns * KEY_TILE, rows * QUERY_TILE
    image = axes.imshow(values, extent=(0, width, height, 0), interpolation="nearest", **style)
    axes.vlines(range(0, width + 1, KEY_TILE), 0, height, color="white", linewidth=0.8)
    axes.hlines(range(0, height + 1, QUERY_TILE), 0, width, color="white", linewidth=0.8)
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MultipleLocator(max(KEY_TILE, height // 4)))
    axes.set_xlabel("key position (bytes)")
    return image


def _skipped(history: History) -> tuple[Array, Array]:
    """(steps, share of the tiles [step, layer])."""
    steps, density = zip(*history.density, strict=True)
    return np.array(steps), 1.0 - np.array(density)


def _typical_head(layers: Sequence[Tiles]) -> tuple[int, int]:
    """(layer, head) of the median number of live tiles."""
    order = sorted(
        (live.sum(), layer, head)
        for layer, tiles in enumerate(layers)
        for head, live in enumerate(tiles.live)
    )
    _, layer, head = order[len(order) // 2]
    return layer, head


def _smooth(values: Array) -> Array:
    """Mean over the neighbours: a tenth of all values, less at the ends."""
    reach = len(values) // 20
    return np.array([values[max(0, i - reach) : i + reach + 1].mean() for i in range(len(values))])
