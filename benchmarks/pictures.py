"""What the pictures of the examples and of the results share: style, heading, names of lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

matplotlib.use("Agg")

GREY = "#5f5f5f"
HEAD_INCHES = 0.8  # title and subtitle
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#ebebeb",
    "axes.axisbelow": True,
}


def new_figure(size: tuple[float, float], title: str, subtitle: str) -> Figure:
    """size: width and height in inches."""
    width, height = size
    below = (0.0, 0.0, 1.0, 1.0 - HEAD_INCHES / height)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(rect=below))
    left = 0.12 / width
    figure.text(left, 1 - 0.12 / height, title, va="top", weight="bold", size=14)
    figure.text(left, 1 - 0.45 / height, subtitle, va="top", color=GREY)
    return figure


def name_ends(axes: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Names lines at their right ends, (text, height, colour) each; names do not overlap."""
    low, high = axes.get_ylim()
    lowest = -1.0
    for text, height, colour in sorted(ends, key=lambda end: end[1]):
        lowest = max((height - low) / (high - low), lowest + 0.065)
        axes.annotate(
            text,
            (1.0, lowest),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            weight="bold",
            annotation_clip=False,
        )
