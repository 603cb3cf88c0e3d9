"""Marks to Altair charts, for the page: the same labels, limits and colours as in files, and every cell can be pointed at.

A chart whose width is "container" is to be stretched; every other one has its natural size. Clicks arrive as the
selection `CLICK`: keys under `x` and `y` of a heatmap, under `layer` and `head` of a grid of heads.
"""

from __future__ import annotations

import base64
import io
import json
import math
from functools import singledispatch
from typing import Any, cast

import altair as alt
import numpy as np
import pandas as pd
from matplotlib.image import imsave

from workbench.render import style
from workbench.render.plain import Axis, Cells, ColourScale, Curves, Marks, Points, SignedBars, Thumbnails

CLICK = "click"
MOST_CELLS = 4900  # drawn one by one; a larger matrix becomes one image, so that the browser stays quick
WIDEST = 960  # pixels of a chart of natural size
FONT = "Source Sans, Source Sans Pro, DejaVu Sans, Arial, sans-serif"
CHOSEN = "#d55e00"


def chart(marks: Marks, chosen: tuple[int, int] | None = None) -> Any:
    """A finished chart of some marks.

    Args:
        chosen: layer and head to frame in a grid of heads.
    """
    drawn = draw(marks, chosen)
    return (
        drawn.properties(
            background="white", padding={"left": 2, "top": 2, "right": 8, "bottom": 4},
            usermeta={"embedOptions": {"renderer": "svg", "actions": False}},
        )
        .configure(font=FONT)
        .configure_view(stroke=None)
        .configure_title(anchor="start", fontSize=19, fontWeight=600, subtitleFontSize=14, subtitleColor="#555555", offset=10)
        .configure_axis(
            labelFontSize=13, titleFontSize=15, titleFontWeight="normal", labelColor="#222222", titleColor="#222222",
            grid=False, domain=False, tickSize=3, labelPadding=3,
        )
        .configure_legend(
            orient="top", labelFontSize=13, titleFontSize=14, titleFontWeight="normal", titleLimit=600, labelLimit=200,
            gradientThickness=12, symbolStrokeWidth=3, offset=10,
        )
    )  # fmt: skip


@singledispatch
def draw(marks: Marks, chosen: tuple[int, int] | None = None) -> Any:
    """A chart of fitting size, without the common look."""
    raise TypeError(f"no chart for {type(marks).__name__}")


@draw.register
def _(marks: Cells, chosen: tuple[int, int] | None = None) -> Any:
    if marks.values.size > MOST_CELLS:
        return _one_image(marks)
    rows, columns = marks.values.shape
    high = round(min(max(770 / rows, 12), 52 if rows <= 12 and columns <= 12 else 40 if rows <= 8 else 30))
    width = "container" if columns > 12 else columns * 60
    base = alt.Chart(_cell_table(marks)).encode(
        x=alt.X("x:O", sort=None, scale=_domain(marks.x), axis=_axis(marks.x, columns, "x")),
        y=alt.Y("y:O", sort=None, scale=_domain(marks.y), axis=_axis(marks.y, rows, "y")),
    )
    told = [alt.Tooltip("text:N", title="shown")] if marks.texts is not None else []
    rect = base.mark_rect().encode(
        color=_colour("value:Q", marks.colour, 280 if width == "container" else min(280, cast(int, width))),
        tooltip=[
            alt.Tooltip("y:N", title=marks.y.title),
            alt.Tooltip("x:N", title=marks.x.title),
            alt.Tooltip("shown:N", title=marks.colour.title),
            *told,
        ],
    )
    layers = [rect.add_params(alt.selection_point(name=CLICK, fields=["x", "y"], toggle=False))]
    if marks.texts is not None:
        size = 11 if columns > 40 else 14
        layers.append(base.mark_text(fontSize=size).encode(text="text:N", fill=alt.Fill("ink:N", scale=None)))
    return alt.layer(*layers).properties(
        title=_title(marks.title), width=width, height=rows * high, autosize=_autosize(width == "container")
    )


@draw.register
def _(marks: Thumbnails, chosen: tuple[int, int] | None = None) -> Any:
    layers, heads = marks.values.shape[:2]
    side = int(min(200, max(90, WIDEST / heads - 14)))
    across, down = side + 14, side + 32
    table = pd.DataFrame(
        {
            "layer": marks.layers.keys[layer],
            "head": marks.heads.keys[head],
            "name": f"L{marks.layers.labels[layer]}H{marks.heads.labels[head]}",
            "url": _data_uri(marks.values[layer, head], marks.colour),
            "left": head * across + 3,
            "right": head * across + 3 + side,
            "middle": head * across + 3 + side / 2,
            "top": layer * down + 24,
            "bottom": layer * down + 24 + side,
            "centre": layer * down + 24 + side / 2,
            "label": layer * down + 11,
            "frame": CHOSEN if chosen == (layer, head) else "#999999",
            "thickness": 4 if chosen == (layer, head) else 0.7,
        }
        for layer in range(layers)
        for head in range(heads)
    )
    width, height = heads * across, layers * down
    x = alt.Scale(domain=[0, width], nice=False, zero=False)
    y = alt.Scale(domain=[height, 0], nice=False, zero=False)
    base = alt.Chart(table)
    images = base.mark_image(width=side, height=side, aspect=False).encode(
        x=alt.X("middle:Q", scale=x, axis=None), y=alt.Y("centre:Q", scale=y, axis=None), url="url:N"
    )
    names = base.mark_text(align="left", fontSize=16).encode(
        x=alt.X("left:Q", scale=x, axis=None), y=alt.Y("label:Q", scale=y, axis=None), text="name:N"
    )
    frames = base.mark_rect(fill="transparent", cursor="pointer").encode(
        x=alt.X("left:Q", scale=x, axis=None), x2="right:Q",
        y=alt.Y("top:Q", scale=y, axis=None), y2="bottom:Q",
        stroke=alt.Stroke("frame:N", scale=None),
        strokeWidth=alt.StrokeWidth("thickness:Q", scale=None),
        tooltip=alt.Tooltip("name:N", title="head"),
    )  # fmt: skip
    frames = frames.add_params(alt.selection_point(name=CLICK, fields=["layer", "head"], toggle=False))
    told = f"down: {marks.y.title}, across: {marks.x.title}"
    return alt.layer(images, names, frames, _legend_only(marks.colour)).properties(
        title=_title(marks.title, told), width=width, height=height, autosize=_autosize(False)
    )


@draw.register
def _(marks: Curves, chosen: tuple[int, int] | None = None) -> Any:
    everything = np.concatenate([values for _, curves in marks.panels for _, values in curves])
    lowest, highest = float(np.nanmin(everything)), float(np.nanmax(everything))
    low = 0.0 if 0 <= lowest else lowest
    domain = list(marks.limits) if marks.limits else [low, highest + 0.03 * (highest - low) if highest > low else low + 1]
    if len(marks.panels) == 1:
        single = _curves(marks, *marks.panels[0], domain, first=True)
        return single.properties(title=_title(marks.title), width="container", height=330, autosize=_autosize(True))
    width = int(max(150, min(420, 700 / len(marks.panels) - 20)))
    panels = [
        _curves(marks, facet, curves, domain, first=not number).properties(
            width=width, height=300, title=alt.TitleParams(facet, fontSize=15, fontWeight="normal", offset=4)
        )
        for number, (facet, curves) in enumerate(marks.panels)
    ]
    return alt.hconcat(*panels, spacing=16).properties(title=_title(marks.title), autosize=_autosize(False))


@draw.register
def _(marks: Points, chosen: tuple[int, int] | None = None) -> Any:
    columns = min(len(marks.panels), 4)
    side = 380 if columns == 1 else int(WIDEST / columns - 60)
    limits = [style.limits(np.concatenate([curve[axis] for _, curves in marks.panels for curve in curves])) for axis in (1, 2)]
    panels = [
        _points(marks, curves, limits).properties(
            width=side, height=side, title=alt.TitleParams(facet, fontSize=15, fontWeight="normal", offset=4)
        )
        for facet, curves in marks.panels
    ]
    return alt.concat(*panels, columns=columns, spacing=16).properties(title=_title(marks.title), autosize=_autosize(False))


@draw.register
def _(marks: SignedBars, chosen: tuple[int, int] | None = None) -> Any:
    values = marks.values.tolist()
    table = pd.DataFrame(
        {
            "y": list(marks.categories.keys),
            "value": values,
            "shown": [style.number(value) for value in values],
            "colour": [style.POSITIVE if value >= 0 else style.NEGATIVE for value in values],
        }
    )
    rows = len(values)
    span = alt.Scale(domain=list(marks.limits), nice=False) if marks.limits else alt.Scale()
    bars = (
        alt.Chart(table)
        .mark_bar()
        .encode(
            x=alt.X("value:Q", title=marks.value_title, scale=span, axis=alt.Axis(tickCount=6, grid=True, gridColor="#e4e4e4")),
            y=alt.Y("y:O", sort=None, scale=_domain(marks.categories), axis=_axis(marks.categories, rows, "y")),
            color=alt.Color("colour:N", scale=None),
            tooltip=[
                alt.Tooltip("y:N", title=marks.categories.title),
                alt.Tooltip("shown:N", title=marks.value_title),
            ],
        )
    )
    zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(color="#333333").encode(x="zero:Q")
    return alt.layer(bars, zero).properties(
        title=_title(marks.title), width="container", height=rows * (34 if rows <= 8 else 23), autosize=_autosize(True)
    )


# --- heatmaps --------------------------------------------------------------------------------------------------------


def _cell_table(marks: Cells) -> pd.DataFrame:
    """One row per cell: keys, value, and what the tooltip and the text in the cell say."""
    rows, columns = marks.values.shape
    values = marks.values.ravel()
    table = {
        "x": list(marks.x.keys) * rows,
        "y": [key for key in marks.y.keys for _ in range(columns)],
        "value": values,
        "shown": [style.number(value) for value in values.tolist()],
    }
    if marks.texts is not None:
        colour = marks.colour
        table["text"] = [text for line in marks.texts for text in line]
        table["ink"] = [style.ink_on(value, colour.kind, colour.low, colour.high) for value in values.tolist()]
    return pd.DataFrame(table)


def _one_image(marks: Cells) -> Any:
    """A matrix too large for single cells: one picture between numbered axes."""
    rows, columns = marks.values.shape
    scale = 760 / max(rows, columns)
    width, height = round(columns * scale), round(rows * scale)
    table = pd.DataFrame({"url": [_data_uri(marks.values, marks.colour, 760)], "x": [columns / 2], "y": [rows / 2]})
    image = (
        alt.Chart(table)
        .mark_image(width=width, height=height, aspect=False)
        .encode(
            x=alt.X("x:Q", scale=alt.Scale(domain=[0, columns], nice=False), axis=_numbered(marks.x)),
            y=alt.Y("y:Q", scale=alt.Scale(domain=[rows, 0], nice=False), axis=_numbered(marks.y)),
            url="url:N",
        )
    )
    told = f"{rows} × {columns} cells, too many to point at one by one: their numbers are in the CSV file"
    return alt.layer(image, _legend_only(marks.colour)).properties(
        title=_title(marks.title, told), width=width, height=height, autosize=_autosize(False)
    )


def _numbered(axis: Axis) -> alt.Axis:
    """Ticks in the middle of some sixteen cells, with their keys."""
    places = range(0, len(axis.keys), max(1, len(axis.keys) // 16))
    names = {f"{place + 0.5:g}": axis.keys[place] for place in places}
    return alt.Axis(
        title=axis.title, values=[place + 0.5 for place in places], labelExpr=f"({json.dumps(names)})[toString(datum.value)]",
        labelOverlap=False,
    )  # fmt: skip


def _data_uri(values: np.ndarray, colour: ColourScale, pixels: int = 400) -> str:
    """Values as a PNG, each cell a square of whole pixels."""
    factor = max(1, math.ceil(pixels / max(values.shape)))
    image = style.rgba(values, colour.kind, colour.low, colour.high).repeat(factor, axis=0).repeat(factor, axis=1)
    buffer = io.BytesIO()
    imsave(buffer, np.ascontiguousarray(image), format="png")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


# --- curves ----------------------------------------------------------------------------------------------------------


def _curves(marks: Curves, facet: str, curves: tuple, domain: list[float], first: bool) -> Any:
    names = [f"{marks.hue_title} {label}".strip() for label, _ in curves]
    table = pd.DataFrame(
        {"x": x, "y": y, "hue": name, "at": key, "shown": style.number(y)}
        for name, (_, values) in zip(names, curves, strict=True)
        for x, y, key in zip(marks.x_values.tolist(), values.tolist(), marks.x.keys, strict=True)
        if math.isfinite(y)
    )
    axis = alt.Axis(title=marks.x.title, tickCount=6)
    if not facet and marks.x.labels != marks.x.keys and len(marks.x.labels) <= 70:
        labels = {f"{value:g}": label for value, label in zip(marks.x_values, marks.x.labels, strict=True)}
        expression = f"({json.dumps(labels)})[toString(datum.value)]"
        axis = alt.Axis(
            title=marks.x.title, values=marks.x_values.tolist(), labelExpr=expression, labelOverlap=False, labelFontSize=12
        )
    palette = [style.CATEGORIES[number % len(style.CATEGORIES)] for number in range(len(names))]
    legend = alt.Legend(title=None, orient="top") if marks.hue_title or len(names) > 1 else None
    base = alt.Chart(table).encode(
        x=alt.X("x:Q", axis=axis, scale=_numbers(marks.x_scale)),
        y=alt.Y(
            "y:Q",
            scale=alt.Scale(domain=domain, nice=False, zero=False),
            axis=alt.Axis(title=marks.y_title if first else None, labels=first, ticks=first, grid=True, gridColor="#e4e4e4"),
        ),
        color=alt.Color("hue:N", sort=None, scale=alt.Scale(domain=names, range=palette), legend=legend),
    )
    points = base.mark_point(size=90, filled=True, opacity=0).encode(
        tooltip=[
            alt.Tooltip("hue:N", title=marks.hue_title or "curve"),
            alt.Tooltip("at:N", title=marks.x.title),
            alt.Tooltip("shown:N", title=marks.y_title),
        ]
    )
    return alt.layer(base.mark_line(strokeWidth=2.2), points)


def _numbers(kind: str) -> alt.Scale:
    return alt.Scale(type="symlog" if kind == "symlog" else "linear", nice=False, zero=False, padding=4)


def _points(marks: Points, curves: tuple, limits: list[tuple[float, float]]) -> Any:
    names = [f"{marks.hue_title} {label}".strip() for label, _, _ in curves]
    table = pd.DataFrame(
        {"x": x, "y": y, "hue": name, "at": key, "shown": f"{style.number(x)}, {style.number(y)}"}
        for name, (_, xs, ys) in zip(names, curves, strict=True)
        for x, y, key in zip(xs.tolist(), ys.tolist(), marks.over.keys, strict=True)
    )
    palette = [style.CATEGORIES[number % len(style.CATEGORIES)] for number in range(len(names))]
    legend = alt.Legend(title=None, orient="top") if len(names) > 1 else None
    axes = [alt.Axis(title=title, tickCount=5, grid=True, gridColor="#e4e4e4") for title in (marks.x_title, marks.y_title)]
    scales = [alt.Scale(domain=list(limit), nice=False, zero=False) for limit in limits]
    points = (
        alt.Chart(table)
        .mark_point(size=45, filled=True, opacity=0.8)
        .encode(
            x=alt.X("x:Q", axis=axes[0], scale=scales[0]),
            y=alt.Y("y:Q", axis=axes[1], scale=scales[1]),
            color=alt.Color("hue:N", sort=None, scale=alt.Scale(domain=names, range=palette), legend=legend),
            tooltip=[
                alt.Tooltip("hue:N", title=marks.hue_title or "points"),
                alt.Tooltip("at:N", title=marks.over.title),
                alt.Tooltip("shown:N", title=f"{marks.x_title}, {marks.y_title}"),
            ],
        )
    )
    origin = pd.DataFrame({"zero": [0.0]})
    rules = [
        alt.Chart(origin).mark_rule(color="#999999").encode(**{side: alt.X("zero:Q") if side == "x" else alt.Y("zero:Q")})
        for side, (low, high) in zip("xy", limits, strict=True)
        if low <= 0 <= high
    ]
    return alt.layer(*rules, points)


# --- parts -----------------------------------------------------------------------------------------------------------


def _title(text: str, told: str = "") -> alt.TitleParams:
    return alt.TitleParams(text, subtitle=told) if told else alt.TitleParams(text)


def _autosize(stretched: bool) -> alt.AutoSizeParams:
    return alt.AutoSizeParams(type="fit-x" if stretched else "pad", contains="padding" if stretched else "content")


def _domain(axis: Axis) -> alt.Scale:
    return alt.Scale(domain=list(axis.keys))


def _axis(axis: Axis, count: int, side: str) -> alt.Axis:
    """Ticks that say the short labels of the keys; long labels on a crowded axis are thinned out."""
    long = max((len(label) for label in axis.labels), default=1) > 1
    step = max(1, math.ceil(count / 24)) if side == "x" and long else 1
    return alt.Axis(
        title=axis.title, values=list(axis.keys[::step]), labelAngle=0, labelOverlap=False, labelLimit=160,
        labelFontSize=14 if count <= 24 else 12 if count <= 45 else 11,
        labelExpr=f"({json.dumps(dict(zip(axis.keys, axis.labels, strict=True)))})[datum.value]",
    )  # fmt: skip


def _scale(colour: ColourScale) -> alt.Scale:
    stops = style.COLOURS[colour.kind]
    return alt.Scale(
        type="linear", domain=np.linspace(colour.low, colour.high, len(stops)).tolist(), range=list(stops), clamp=True
    )


def _colour(field: str, colour: ColourScale, length: int = 280) -> alt.Color:
    legend = alt.Legend(title=colour.title, direction="horizontal", gradientLength=length, tickCount=5)
    return alt.Color(field, scale=_scale(colour), legend=legend)


def _legend_only(colour: ColourScale) -> alt.Chart:
    """Nothing but the colour bar, for pictures whose colours are in an image."""
    limits = alt.Chart(pd.DataFrame({"limit": [colour.low, colour.high]}))
    return limits.mark_point(size=0, opacity=0).encode(color=_colour("limit:Q", colour))
