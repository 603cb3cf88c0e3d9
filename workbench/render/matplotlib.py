"""Marks to matplotlib figures, for files: text stays text, output is the same to the byte from run to run."""

from __future__ import annotations

import textwrap
from functools import singledispatch
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from workbench.render import style
from workbench.render.plain import Axis, Cells, ColourScale, Curves, Marks, SignedBars, Thumbnails

RC: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,
    "svg.hashsalt": "workbench",
    "axes.prop_cycle": f"cycler('color', {list(style.CATEGORIES)})",
}

RASTER = 10_000  # a picture of more cells than this is a bitmap inside a vector file, its text still text


def figure(marks: Marks, caption: str = "") -> Figure:
    """A finished figure of some marks, with a small caption below."""
    with rc_context(RC):
        drawn = draw(marks)
        if caption:
            drawn.supxlabel(caption, fontsize=7, color="#555555", x=0.01, ha="left")
        return drawn


@singledispatch
def draw(marks: Marks) -> Figure:
    """Draw marks on a new figure of fitting size, inches."""
    raise TypeError(f"no drawing for {type(marks).__name__}")


@draw.register
def _(marks: Cells) -> Figure:
    rows, columns = marks.values.shape
    cell = min(0.32, 9.0 / max(rows, columns))
    low_detail = cell < 0.11
    width = max(4.0, columns * cell + 2.2)
    height = max(2.4, rows * cell + 1.3)
    drawn = Figure(figsize=(width, height), layout="constrained")
    axes = drawn.add_subplot()
    _image(axes, marks.values, marks.colour, rasterized=marks.values.size > RASTER)
    _ticks(axes, "x", marks.x, cell, low_detail)
    _ticks(axes, "y", marks.y, cell, low_detail)
    if marks.texts is not None and cell > 0.15:
        for row, line in enumerate(marks.texts):
            for column, text in enumerate(line):
                ink = style.ink_on(marks.values[row, column], marks.colour.kind, marks.colour.low, marks.colour.high)
                axes.text(column, row, _escaped(text), ha="center", va="center", color=ink, fontsize=7.5)
    axes.set_title(marks.title)
    axes.set_aspect("equal")
    _colour_bar(drawn, axes, marks.colour)
    return drawn


@draw.register
def _(marks: Thumbnails) -> Figure:
    layers, heads = marks.values.shape[:2]
    drawn = Figure(figsize=(1.75 * heads + 1.4, 1.85 * layers + 0.9), layout="constrained")
    grid = drawn.subplots(layers, heads, squeeze=False)
    for layer in range(layers):
        for head in range(heads):
            axes = grid[layer][head]
            _image(axes, marks.values[layer, head], marks.colour, rasterized=marks.values.size > RASTER)
            axes.set_title(f"L{marks.layers.labels[layer]}H{marks.heads.labels[head]}", fontsize=9)
            axes.set_xticks([])
            axes.set_yticks([])
    grid[-1][0].set_xlabel(marks.x.title)
    grid[-1][0].set_ylabel(marks.y.title)
    drawn.suptitle(marks.title, x=0.01, ha="left", fontsize=11)
    _colour_bar(drawn, list(grid.flat), marks.colour)
    return drawn


@draw.register
def _(marks: Curves) -> Figure:
    panels = len(marks.panels)
    drawn = Figure(figsize=(3.0 * panels + 1.2 if panels > 1 else 7.0, 3.4), layout="constrained")
    grid = drawn.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axes, (facet, curves) in zip(grid, marks.panels, strict=True):
        for label, values in curves:
            axes.plot(marks.x_values, values, label=_escaped(f"{marks.hue_title} {label}".strip()), linewidth=1.6)
        axes.set_title(facet or marks.title)
        axes.set_xlabel(marks.x.title)
        if not facet and marks.x.labels != marks.x.keys and len(marks.x.labels) <= 70:
            axes.set_xticks(marks.x_values, [_escaped(label) for label in marks.x.labels], fontsize=7)
    grid[0].set_ylabel(marks.y_title)
    if marks.hue_title:
        grid[-1].legend(frameon=False, fontsize=8)
    if panels > 1:
        drawn.suptitle(marks.title, x=0.01, ha="left", fontsize=11)
    return drawn


@draw.register
def _(marks: SignedBars) -> Figure:
    drawn = Figure(figsize=(7.0, 0.22 * len(marks.values) + 1.2), layout="constrained")
    axes = drawn.add_subplot()
    places = np.arange(len(marks.values))
    colours = [style.POSITIVE if value >= 0 else style.NEGATIVE for value in marks.values]
    axes.barh(places, marks.values, color=colours)
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set_yticks(places, [_escaped(label) for label in marks.categories.labels])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlabel(_escaped(marks.value_title))
    axes.set_ylabel(marks.categories.title)
    axes.set_title(_escaped(marks.title))
    return drawn


# --- parts -----------------------------------------------------------------------------------------------------------


def _image(axes: Axes, values: np.ndarray, colour: ColourScale, rasterized: bool) -> None:
    axes.pcolormesh(
        np.arange(values.shape[1] + 1) - 0.5, np.arange(values.shape[0] + 1) - 0.5, values,
        cmap=style.colormap(colour.kind), vmin=colour.low, vmax=colour.high, rasterized=rasterized,
    )  # fmt: skip
    axes.set_ylim(values.shape[0] - 0.5, -0.5)
    axes.set_aspect("equal")


def _ticks(axes: Axes, side: str, axis: Axis, cell: float, low_detail: bool) -> None:
    step = 1 if not low_detail else max(1, len(axis.labels) // 16)
    places = list(range(0, len(axis.labels), step))
    labels = [_escaped(axis.labels[place]) if step == 1 else axis.keys[place] for place in places]
    size = 8 if cell >= 0.2 else 5.5
    long = max((len(label) for label in labels), default=1) > 2
    if side == "x":
        axes.set_xticks(places, labels, fontsize=size, rotation=90 if long and len(places) > 8 else 0)
        axes.set_xlabel(axis.title)
    else:
        axes.set_yticks(places, labels, fontsize=size)
        axes.set_ylabel(axis.title)
    axes.tick_params(length=2)


def _colour_bar(drawn: Figure, axes: Axes | list[Axes], colour: ColourScale) -> None:
    mappable = ScalarMappable(Normalize(colour.low, colour.high), style.colormap(colour.kind))
    height = drawn.get_size_inches()[1]
    label = "\n".join(textwrap.wrap(_escaped(colour.title), max(14, int(9 * height))))
    drawn.colorbar(mappable, ax=axes, label=label, shrink=0.9 if height < 4 else 0.7, aspect=6 * height)


def _escaped(text: str) -> str:
    """Dollar signs as themselves, not as the start of a formula."""
    return text.replace("$", r"\$")
