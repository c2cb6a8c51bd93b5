"""A calibration as one HTML page without network, and its pictures as PNG files.

The only module that needs matplotlib.
"""

from __future__ import annotations

import base64
import io
import statistics
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from ._calibration import Calibration, LayerCalibration, write_whole

# Okabe and Ito's palette: told apart by colour-blind readers too.
_BLUE, _RED, _SKIPPED = "#0072B2", "#D55E00", "#d9d9d9"
_MOST_LABELS = 16  # layers of a picture that are labelled with their names
_MOST_NUMBERS = 11  # heads of a picture that are labelled
_LEAST_SHADE = 1e-4  # probability of a tile in the tile map
_LEAST_ERROR = 0.01  # of the target: smaller errors are not drawn, they would squeeze the rest
_WIDTH = 4.8  # inches: the letters are the page's size at 36rem, still legible at a phone's 328 px
_STYLE: Any = {  # a dict; from 3.11 on matplotlib lists every key in its type
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.grid": True,
    "grid.color": "#ebebeb",
    "axes.axisbelow": True,
    "savefig.dpi": 200,
}


def write_report(calibration: Calibration, folder: Path) -> list[Path]:
    """Write ``report.html``, which holds everything, and a PNG file of each picture.

    Args:
        calibration: as read from its file.
        folder: made if it does not exist.

    Returns:
        The files written.

    Raises:
        OSError: a file could not be written.
        ValueError: no layer was measured.
    """
    measured = [layer for layer in calibration.layers if layer.curves is not None]
    if not measured:
        raise ValueError("the calibration measured no layer: accepted is one with curves")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot make: {error.strerror}", str(folder)) from error
    pictures: list[tuple[str, str, Figure]] = []
    with matplotlib.rc_context(_STYLE):
        pictures.append(("density", "Tiles skipped, by layer and head", _draw_density(measured)))
        pictures.append(("error", "Error against share skipped", _draw_error(calibration)))
        pictures.append(("time", "Expected time of the attention backward", _draw_time(measured)))
        if calibration.tile_map is not None:
            pictures.append(("tiles", "Tiles of one head", _draw_tiles(calibration)))
        files: dict[Path, str | bytes] = {}
        sections = []
        for name, title, figure in pictures:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
            files[folder / f"{name}.png"] = buffer.getvalue()
            sections.append(_section(name, title, buffer.getvalue(), calibration))
    # The page first: it holds all pictures, and where the disk is full nothing else is left behind.
    files = {folder / "report.html": _page(calibration, sections), **files}
    for path, content in files.items():
        write_whole(path, content)
    return list(files)


def expected_seconds(layer: LayerCalibration) -> float:
    """Time of the backward of one call with the chosen thresholds, from those measured.

    On the line between the two measured densities next to the chosen mean density.
    """
    assert layer.curves is not None
    curves = layer.curves
    points = sorted(
        [
            (statistics.fmean(density), seconds)
            for density, seconds in zip(curves.density, curves.seconds, strict=True)
        ]
    )
    density = statistics.fmean(layer.density)
    if all(value == 0.0 for value in layer.negl_prob):
        return curves.exact_seconds
    below = [point for point in points if point[0] <= density] or points[:1]
    above = [point for point in points if point[0] >= density] or points[-1:]
    (low, low_seconds), (high, high_seconds) = below[-1], above[0]
    share = (density - low) / (high - low) if high > low else 0.0
    return low_seconds + share * (high_seconds - low_seconds)


# ---------------------------------------------------------------------------------- pictures


def _draw_density(layers: list[LayerCalibration]) -> Figure:
    num_heads = max(layer.num_heads for layer in layers)
    shares = [
        [1.0 - d for d in layer.density] + [float("nan")] * (num_heads - layer.num_heads)
        for layer in layers
    ]
    height = 1.4 + min(8.0, max(1.6, 0.32 * len(layers)))
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto")
    axes.grid(visible=False)
    axes.set_xlabel("head")
    axes.set_xticks(range(0, num_heads, -(-num_heads // _MOST_NUMBERS)))
    if len(layers) <= _MOST_LABELS:
        axes.set_yticks(range(len(layers)), map(_short, layers), parse_math=False)
    else:
        axes.set_ylabel("layer")
    if num_heads <= 8 and len(layers) <= _MOST_LABELS:
        for row, layer in enumerate(layers):
            for head, density in enumerate(layer.density):
                colour = "black" if 1.0 - density > 0.45 else "white"
                text = f"{1.0 - density:.0%}"
                axes.text(head, row, text, ha="center", va="center", color=colour, size=8)
    percent = PercentFormatter(1.0, decimals=0)
    bar = figure.colorbar(image, ax=axes, format=percent, pad=0.02, aspect=7.0 * height)
    bar.set_label("tiles skipped")
    return figure


def _draw_error(calibration: Calibration) -> Figure:
    figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    lines: list[list[tuple[float, float]]] = []
    chosen: list[tuple[float, float]] = []
    for layer in calibration.layers:
        if layer.curves is None:
            continue
        errors, density = layer.curves.error(), layer.curves.density
        for head in range(layer.num_heads):
            line = [(1.0 - d[head], e[head]) for d, e in zip(density, errors, strict=True)]
            lines.append([point for point in line if point[1] > 0.0])
            if layer.negl_prob[head]:
                chosen.append((1.0 - layer.density[head], layer.relative_l2[head]))
    # At once: one by one, those of 126 layers of 128 heads took 20 seconds.
    axes.add_collection(LineCollection(lines, colors=_BLUE, linewidths=0.8, alpha=0.45))
    axes.plot(*_columns(chosen), "o", color="black", markersize=4, zorder=3)
    axes.axhline(calibration.target.error, color=_RED, linestyle="--", linewidth=1.8)
    axes.annotate(
        f"target {calibration.target.error:.3g}",
        (0.01, calibration.target.error),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=_RED,
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
    )
    axes.set_title("A line is a head, a point the value chosen for it")
    axes.set_yscale("log")
    axes.set_ylim(_LEAST_ERROR * calibration.target.error, 1.5)
    axes.set_xlim(0.0, 1.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("share of the tiles skipped")
    axes.set_ylabel("relative L2 of the worst gradient")
    return figure


def _draw_time(layers: list[LayerCalibration]) -> Figure:
    exact = [1e3 * layer.curves.exact_seconds for layer in layers if layer.curves]
    expected = [1e3 * expected_seconds(layer) for layer in layers]
    height = 1.2 + min(8.0, max(1.6, 0.34 * len(layers)))
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    rows = range(len(layers))
    axes.barh(rows, exact, height=0.8, color=_SKIPPED, label="exact, measured")
    axes.barh(rows, expected, height=0.45, color=_BLUE, label="with the thresholds, expected")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    if len(layers) <= _MOST_LABELS:
        axes.set_yticks(rows, map(_short, layers), parse_math=False)
    else:
        axes.set_ylabel("layer")
    axes.set_xlabel("milliseconds a call")
    figure.legend(loc="outside upper left", ncols=2, frameon=False)
    return figure


def _draw_tiles(calibration: Calibration) -> Figure:
    tiles = calibration.tile_map
    assert tiles is not None
    nan = float("nan")
    rows = list(zip(tiles.probability, tiles.live, tiles.allowed, strict=True))
    shade = [
        [max(p, _LEAST_SHADE) if a else nan for p, a in zip(probability, allowed, strict=True)]
        for probability, _, allowed in rows
    ]
    kinds = [
        [live_one if a else nan for live_one, a in zip(live, allowed, strict=True)]
        for _, live, allowed in rows
    ]
    figure = Figure(figsize=(_WIDTH, 6.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, sharey=True)
    options: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    image = top.imshow(shade, cmap="Blues", norm=LogNorm(_LEAST_SHADE, 1.0), **options)
    top.set_title("Probability of each tile (64 queries x 128 keys)")
    figure.colorbar(image, ax=top, pad=0.02)
    bottom.imshow(kinds, cmap=ListedColormap([_SKIPPED, _RED]), vmin=0, vmax=1, **options)
    num_live = sum(map(sum, tiles.live))
    num_skipped = sum(map(sum, tiles.allowed)) - num_live
    bottom.set_title("What the backward visits")
    figure.legend(
        handles=[
            Patch(color=_RED, label=f"live: {num_live}"),
            Patch(color=_SKIPPED, label=f"skipped: {num_skipped}"),
        ],
        loc="outside lower left",
        ncols=2,
        frameon=False,
    )
    for axes in (top, bottom):
        axes.grid(visible=False)
        axes.set_ylabel("query tile")
    bottom.set_xlabel("key tile")
    return figure


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _short(layer: LayerCalibration) -> str:
    """The end of a long module name, which tells the layers apart."""
    name = layer.name
    return name if len(name) <= 24 else "…" + name[-23:]


# -------------------------------------------------------------------------------------- page

_CSS = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: #1a1a1a; background: #fff;
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
img { display: block; width: 100%; max-width: 36rem; height: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem; }
dl div { border: 1px solid #ccc; border-radius: .4rem; padding: .5rem .75rem; }
dt { color: #555; font-size: .875rem; } dd { margin: 0; font-size: 1.1rem; font-weight: 600; }
nav a { margin-right: 1rem; } a { color: #0055a0; }
:focus-visible { outline: 3px solid #0072B2; outline-offset: 2px; }
p code { overflow-wrap: anywhere; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd;
  white-space: nowrap; }
th:first-child { text-align: left; }
"""


def _section(name: str, title: str, png: bytes, calibration: Calibration) -> str:
    data = base64.b64encode(png).decode()
    words = {
        "density": "The table below has the means by layer.",
        "error": "Each head's error grows with what it skips. It takes the largest measured "
        f"<code>negl_prob</code> whose error, with {calibration.margin:g} standard errors on top, "
        "is within the target.",
        "time": "Interpolated between the times measured during the calibration, on its machine.",
        "tiles": "",
    }[name]
    if name == "tiles" and calibration.tile_map is not None:
        tiles = calibration.tile_map
        words = (
            f"Head {tiles.head} of <code>{escape(tiles.layer)}</code>, one sequence, "
            f"<code>negl_prob</code> {tiles.negl_prob:g}. White: masked."
        )
    return (
        f'<section id="{name}"><h2>{title}</h2><p>{words}</p>'
        f'<img src="data:image/png;base64,{data}" alt="{title}"></section>'
    )


def _page(calibration: Calibration, sections: list[str]) -> str:
    measured = [layer for layer in calibration.layers if layer.curves is not None]
    exact = sum(layer.curves.exact_seconds for layer in measured if layer.curves)
    expected = sum(map(expected_seconds, measured))
    num_heads = sum(layer.num_heads for layer in measured)
    target = f"relative L2 ≤ {calibration.target.error:.3g}"
    if calibration.target.cosine is not None:
        target = f"cosine ≥ {calibration.target.cosine:g}"
    facts = {
        "target": target,
        "threshold per": calibration.per,
        "tiles skipped": f"{calibration.skipped:.1%}",
        "attention backward": f"{exact / expected:.2f}x faster" if expected else "not measured",
        "heads that stay exact": f"{len(calibration.exact_heads)} of {num_heads}",
        "batches": f"{calibration.batches}" + ("" if calibration.complete else " (interrupted)"),
    }
    boxes = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items()
    )
    names = {"density": "Skipped", "error": "Error", "time": "Time", "tiles": "Tiles"}
    if calibration.tile_map is None:
        del names["tiles"]
    links = "".join(f'<a href="#{key}">{text}</a>' for key, text in names.items())
    rows = "".join(_row(layer) for layer in calibration.layers)
    table = (
        '<section id="table"><h2>Layers</h2><div class="scroll" tabindex="0" role="region" '
        'aria-label="Layers"><table><thead><tr><th scope="col">layer</th>'
        '<th scope="col">skipped</th><th scope="col">worst error</th>'
        '<th scope="col">exact, ms</th><th scope="col">expected, ms</th>'
        '<th scope="col">negl_prob by head</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>BackLite calibration</title><style>{_CSS}</style></head><body>"
        f"<h1>BackLite calibration</h1><dl>{boxes}</dl>"
        f'<nav aria-label="Sections">{links}<a href="#table">Layers</a></nav>'
        f"<main>{''.join(sections)}{table}</main></body></html>\n"
    )


def _row(layer: LayerCalibration) -> str:
    name = f'<th scope="row"><code>{escape(layer.name)}</code></th>'
    if layer.curves is None:
        return f'<tr>{name}<td colspan="5">no gradient seen: exact</td></tr>'
    values = " ".join(f"{value:g}" if value else "exact" for value in layer.negl_prob)
    cells = (
        f"{1.0 - statistics.fmean(layer.density):.1%}",
        f"{max(layer.relative_l2):.4f}",
        f"{1e3 * layer.curves.exact_seconds:.2f}",
        f"{1e3 * expected_seconds(layer):.2f}",
        values,
    )
    return f"<tr>{name}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
