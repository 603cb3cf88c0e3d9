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
from matplotlib.figure import Figure, SubFigure
from matplotlib.transforms import Bbox

from workbench.render import style
from workbench.render.plain import Axis, Beside, Cells, ColourScale, Curves, Marks, Points, Rows, SignedBars, Thumbnails

Part = Figure | SubFigure

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

MOST_ROWS = 40  # of a table in a picture; all are in the CSV file
RASTER = 10_000  # a picture of more cells than this is a bitmap inside a vector file, its text still text


def figure(marks: Marks, caption: str = "") -> Figure:
    """A finished figure of some marks, with a small caption below."""
    with rc_context(RC):
        drawn = Figure(figsize=size(marks), layout="constrained")
        paint(marks, drawn)
        if caption:
            drawn.supxlabel(_wrapped(caption, drawn, 7), fontsize=7, color="#555555", x=0.01, ha="left")
        return drawn


@singledispatch
def size(marks: Marks) -> tuple[float, float]:
    """Width and height, inches, of a picture that fits its marks."""
    raise TypeError(f"no size for {type(marks).__name__}")


@singledispatch
def paint(marks: Marks, drawn: Part) -> None:
    """Draw marks on a figure, or on a part of one."""
    raise TypeError(f"no drawing for {type(marks).__name__}")


@size.register
def _(marks: Beside) -> tuple[float, float]:
    sizes = [size(panel) for panel in marks.panels]
    if _is_wide(marks):
        return max(width for width, _ in sizes), sum(height for _, height in sizes) + 0.4
    return sum(width for width, _ in sizes), max(height for _, height in sizes) + 0.4


@paint.register
def _(marks: Beside, drawn: Part) -> None:
    sizes = [size(panel) for panel in marks.panels]
    if _is_wide(marks):
        parts: Any = drawn.subfigures(len(sizes), 1, height_ratios=[height for _, height in sizes])
    else:
        parts = drawn.subfigures(1, len(sizes), width_ratios=[width for width, _ in sizes])
    for panel, part in zip(marks.panels, parts, strict=True):
        paint(panel, part)
    drawn.suptitle(_wrapped(marks.title, drawn, 12), x=0.01, ha="left", fontsize=12)


def _is_wide(marks: Beside) -> bool:
    """Whether the pictures lie better below each other."""
    width, height = size(marks.panels[0])
    return width > 2 * height


def _side(marks: Cells) -> float:
    """Side of a cell, inches."""
    return min(0.32, 9.0 / max(marks.values.shape))


@size.register
def _(marks: Cells) -> tuple[float, float]:
    rows, columns = marks.values.shape
    return max(4.0, columns * _side(marks) + 2.2), max(2.4, rows * _side(marks) + 1.3)


@paint.register
def _(marks: Cells, drawn: Part) -> None:
    cell = _side(marks)
    low_detail = cell < 0.11
    axes = drawn.add_subplot()
    _image(axes, marks.values, marks.colour, rasterized=marks.values.size > RASTER)
    _ticks(axes, "x", marks.x, cell, low_detail)
    _ticks(axes, "y", marks.y, cell, low_detail)
    if marks.texts is not None and cell > 0.15:
        for row, line in enumerate(marks.texts):
            for column, text in enumerate(line):
                ink = style.ink_on(marks.values[row, column], marks.colour.kind, marks.colour.low, marks.colour.high)
                axes.text(column, row, _escaped(text), ha="center", va="center", color=ink, fontsize=7.5)
    axes.set_title(_wrapped(marks.title, drawn, 11, less=0.9))
    axes.set_aspect("equal")
    _colour_bar(drawn, axes, marks.colour)


@size.register
def _(marks: Thumbnails) -> tuple[float, float]:
    layers, heads = marks.values.shape[:2]
    return 1.75 * heads + 1.4, 1.85 * layers + 0.9


@paint.register
def _(marks: Thumbnails, drawn: Part) -> None:
    layers, heads = marks.values.shape[:2]
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
    drawn.suptitle(_wrapped(marks.title, drawn, 11), x=0.01, ha="left", fontsize=11)
    _colour_bar(drawn, list(grid.flat), marks.colour)


@size.register
def _(marks: Curves) -> tuple[float, float]:
    panels = len(marks.panels)
    return 3.0 * panels + 1.2 if panels > 1 else 7.0, 3.4


@paint.register
def _(marks: Curves, drawn: Part) -> None:
    panels = len(marks.panels)
    grid = drawn.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axes, (facet, curves) in zip(grid, marks.panels, strict=True):
        for label, values in curves:
            axes.plot(marks.x_values, values, label=_escaped(f"{marks.hue_title} {label}".strip()), linewidth=1.6)
        axes.set_title(facet or _wrapped(marks.title, drawn, 11, less=0.7))
        axes.set_xlabel(marks.x.title)
        if marks.x_scale == "symlog":
            axes.set_xscale("symlog")
        if marks.limits is not None:
            axes.set_ylim(*marks.limits)
        if not facet and marks.x.labels != marks.x.keys and len(marks.x.labels) <= 70:
            axes.set_xticks(marks.x_values, [_escaped(label) for label in marks.x.labels], fontsize=7)
    grid[0].set_ylabel(marks.y_title)
    if marks.hue_title:
        grid[-1].legend(frameon=False, fontsize=8)
    if panels > 1:
        drawn.suptitle(_wrapped(marks.title, drawn, 11), x=0.01, ha="left", fontsize=11)


@size.register
def _(marks: SignedBars) -> tuple[float, float]:
    return 7.0, 0.22 * len(marks.values) + 1.2


@paint.register
def _(marks: SignedBars, drawn: Part) -> None:
    axes = drawn.add_subplot()
    places = np.arange(len(marks.values))
    colours = [style.POSITIVE if value >= 0 else style.NEGATIVE for value in marks.values]
    axes.barh(places, marks.values, color=colours)
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set_yticks(places, [_escaped(label) for label in marks.categories.labels])
    axes.set_ylim(len(places) - 0.4, -0.6)
    axes.set_xlabel(_escaped(marks.value_title))
    axes.set_ylabel(marks.categories.title)
    axes.set_title(_wrapped(marks.title, drawn, 11, less=0.9))
    if marks.limits is not None:
        axes.set_xlim(*marks.limits)


def _rows_and_columns(marks: Points) -> tuple[int, int]:
    columns = min(len(marks.panels), 4)
    return -(-len(marks.panels) // columns), columns


@size.register
def _(marks: Points) -> tuple[float, float]:
    rows, columns = _rows_and_columns(marks)
    return 3.0 * columns + 1.2, 3.0 * rows + 0.8


@paint.register
def _(marks: Points, drawn: Part) -> None:
    rows, columns = _rows_and_columns(marks)
    grid = drawn.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(marks.panels) :]:
        axes.set_visible(False)
    for axes, (facet, curves) in zip(grid.flat, marks.panels, strict=False):
        axes.axhline(0, color="#999999", linewidth=0.7)
        axes.axvline(0, color="#999999", linewidth=0.7)
        for label, x, y in curves:
            axes.scatter(x, y, s=12, alpha=0.8, label=_escaped(f"{marks.hue_title} {label}".strip()))
        axes.set_title(facet)
    for axes in grid[-1]:
        axes.set_xlabel(_escaped("\n".join(textwrap.wrap(marks.x_title, 34))))
    for axes in grid[:, 0]:
        axes.set_ylabel(_escaped("\n".join(textwrap.wrap(marks.y_title, 34))))
    if marks.hue_title:
        grid[0][-1].legend(frameon=False, fontsize=8)
    drawn.suptitle(_wrapped(marks.title, drawn, 11), x=0.01, ha="left", fontsize=11)


def _texts(marks: Rows) -> tuple[list[str], list[list[str]], list[int]]:
    """Headings, the cells of the rows that are shown, and the width of each column in characters."""
    headings = [_escaped("\n".join(textwrap.wrap(heading, 18))) for heading, _ in marks.columns]
    shown = min(len(marks.columns[0][1]), MOST_ROWS)
    cells = [[_escaped(_cell(values[row])) for _, values in marks.columns] for row in range(shown)]
    widths = [
        max([*map(len, heading.split("\n")), *(len(line[number]) for line in cells)]) + 2
        for number, heading in enumerate(headings)
    ]
    return headings, cells, widths


@size.register
def _(marks: Rows) -> tuple[float, float]:
    headings, cells, widths = _texts(marks)
    lines = max(heading.count("\n") for heading in headings) + 1
    return max(4.0, 0.085 * sum(widths)), 0.22 * len(cells) + 0.2 * lines + 0.8


@paint.register
def _(marks: Rows, drawn: Part) -> None:
    headings, cells, widths = _texts(marks)
    lines, count = max(heading.count("\n") for heading in headings) + 1, len(marks.columns[0][1])
    axes = drawn.add_subplot()
    axes.axis("off")
    shown = f" (the first {len(cells)} of {count:,} rows)" if len(cells) < count else ""
    axes.set_title(_wrapped(marks.title + shown, drawn, 11, less=0.2))
    table = axes.table(
        cells, colLabels=headings, colWidths=[width / sum(widths) for width in widths], cellLoc="left", edges="horizontal",
        bbox=Bbox.unit(),
    )  # fmt: skip
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    for (row, _), cell in table.get_celld().items():
        cell.set_linewidth(0.4)
        cell.set_edgecolor("#bbbbbb")
        if row == 0:
            cell.set_height(cell.get_height() * (1 + 0.9 * (lines - 1)))
            cell.set_text_props(weight="bold")


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else style.number(float(value))


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


def _colour_bar(drawn: Part, axes: Axes | list[Axes], colour: ColourScale) -> None:
    mappable = ScalarMappable(Normalize(colour.low, colour.high), style.colormap(colour.kind))
    height = drawn.bbox.height / drawn.dpi
    label = "\n".join(textwrap.wrap(_escaped(colour.title), max(14, int(9 * height))))
    drawn.colorbar(mappable, ax=axes, label=label, shrink=0.9 if height < 4 else 0.7, aspect=6 * height)


def _wrapped(text: str, drawn: Part, points: float, less: float = 0.0) -> str:
    """A text in lines that fit into a figure's width, less so many inches on its left."""
    width = drawn.bbox.width / drawn.dpi - less
    return _escaped("\n".join(textwrap.wrap(text, max(20, int(width * 118 / points)))))


def _escaped(text: str) -> str:
    """Dollar signs as themselves, not as the start of a formula."""
    return text.replace("$", r"\$")
