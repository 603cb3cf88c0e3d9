"""What a picture consists of, as data: the part of drawing that every renderer shares, and that tests can read.

`marks(view, dataset)` resolves a view against a result: values in order, labels, titles with units, colour limits.
The matplotlib and Altair renderers turn marks into ink.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import numpy as np
import xarray as xr

from analyses.compare import SIDES
from analyses.views import Bars, HeadGrid, Heatmap, Lines, Scatter, Table, View
from workbench.render.style import glyph, limits, number, visible, with_units


@dataclass(frozen=True)
class Axis:
    """One side of a picture: `labels` are what is written at the ticks, `keys` say the same without repeating."""

    dim: str
    title: str
    labels: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class ColourScale:
    kind: str  # sequential, diverging or probability
    low: float
    high: float
    title: str


@dataclass(frozen=True)
class Cells:
    """A heatmap: values (row, column) with row 0 at the top, and texts to write into the cells."""

    title: str
    x: Axis
    y: Axis
    values: np.ndarray
    texts: tuple[tuple[str, ...], ...] | None
    colour: ColourScale


@dataclass(frozen=True)
class Thumbnails:
    """A small heatmap per layer and head: values (layer, head, row, column)."""

    title: str
    layers: Axis
    heads: Axis
    x: Axis
    y: Axis
    values: np.ndarray
    colour: ColourScale


@dataclass(frozen=True)
class Curves:
    """Curves over numbers; `panels` are (facet label, ((hue label, values), …))."""

    title: str
    x: Axis
    x_values: np.ndarray
    y_title: str
    hue_title: str
    panels: tuple[tuple[str, tuple[tuple[str, np.ndarray], ...]], ...]
    x_scale: str = "linear"
    limits: tuple[float, float] | None = None  # of y, where several pictures share them


@dataclass(frozen=True)
class Points:
    """Points in a plane; `panels` are (facet label, ((hue label, x values, y values), …)), `names` says what each point is."""

    title: str
    x_title: str
    y_title: str
    hue_title: str
    over: Axis
    panels: tuple[tuple[str, tuple[tuple[str, np.ndarray, np.ndarray], ...]], ...]


@dataclass(frozen=True)
class Rows:
    """A table: (heading, values) per column, all of one length; numbers stay numbers, characters are visible."""

    title: str
    columns: tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class SignedBars:
    """One horizontal bar per category, top to bottom, growing from zero."""

    title: str
    categories: Axis
    values: np.ndarray
    value_title: str
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Beside:
    """Pictures of the same kind side by side, each with its own title."""

    title: str
    panels: tuple[Any, ...]


Marks = Cells | Thumbnails | Curves | Points | Rows | SignedBars | Beside


@singledispatch
def marks(view: View, dataset: xr.Dataset) -> Marks:
    """Resolve a view against a result that it fits."""
    raise TypeError(f"no marks for {type(view).__name__}")


@marks.register
def _(view: Heatmap, dataset: xr.Dataset) -> Cells:
    chosen = _slice(view, dataset)
    values = chosen[view.colour].transpose(view.y, view.x)
    texts = None
    if view.text is not None:
        written = chosen[view.text].transpose(view.y, view.x).values
        texts = tuple(tuple(_written(value) for value in row) for row in written)
    return Cells(
        _title(view, dataset), _axis(chosen, view.x), _axis(chosen, view.y), values.values.astype(float), texts,
        _colour(view.scale, values),
    )  # fmt: skip


@marks.register
def _(view: HeadGrid, dataset: xr.Dataset) -> Thumbnails:
    chosen = _slice(view, dataset)
    values = chosen[view.colour].transpose(view.layer, view.head, view.y, view.x)
    return Thumbnails(
        _title(view, dataset), _axis(chosen, view.layer), _axis(chosen, view.head), _axis(chosen, view.x),
        _axis(chosen, view.y), values.values.astype(float), _colour(view.scale, values),
    )  # fmt: skip


@marks.register
def _(view: Lines, dataset: xr.Dataset) -> Curves:
    chosen = _slice(view, dataset)
    variable = chosen[view.y]
    facets = _axis(chosen, view.facet).labels if view.facet else ("",)
    hues = _axis(chosen, view.hue).labels if view.hue else ("",)
    order = [dim for dim in (view.facet, view.hue) if dim] + [view.x]
    values = variable.transpose(*order).values.astype(float).reshape(len(facets), len(hues), -1)
    panels = tuple(
        (f"{view.facet} {facet}" if view.facet else "", tuple(zip(hues, values[row], strict=True)))
        for row, facet in enumerate(facets)
    )
    x_values = np.asarray(chosen[view.x].values, dtype=float)
    return Curves(
        _title(view, dataset), _axis(chosen, view.x), x_values, _named(variable), view.hue or "", panels,
        view.x_scale,
    )  # fmt: skip


@marks.register
def _(view: Scatter, dataset: xr.Dataset) -> Points:
    chosen = _slice(view, dataset)
    facets = _axis(chosen, view.facet).labels if view.facet else ("",)
    hues = _axis(chosen, view.hue).labels if view.hue else ("",)
    order = [dim for dim in (view.facet, view.hue) if dim] + [view.over]
    x, y = (chosen[name].transpose(*order).values.astype(float).reshape(len(facets), len(hues), -1) for name in (view.x, view.y))
    panels = tuple(
        (f"{view.facet} {facet}" if view.facet else "", tuple(zip(hues, x[row], y[row], strict=True)))
        for row, facet in enumerate(facets)
    )
    return Points(
        _title(view, dataset), _named(chosen[view.x]), _named(chosen[view.y]), view.hue or "", _axis(chosen, view.over), panels
    )


@marks.register
def _(view: Table, dataset: xr.Dataset) -> Rows:
    chosen = _slice(view, dataset)
    grid = np.meshgrid(*(np.arange(chosen.sizes[dim]) for dim in view.rows), indexing="ij")
    labels = [_axis(chosen, dim).keys for dim in view.rows]
    columns = [
        (dim.replace("_", " "), tuple(names[place] for place in places.ravel()))
        for dim, names, places in zip(view.rows, labels, grid, strict=True)
    ]
    if view.rows == ("layer", "head"):
        names = (f"L{layer}H{head}" for layer, head in zip(columns[0][1], columns[1][1], strict=True))
        columns = [("head", tuple(names))]
    for name in view.columns:
        values = chosen[name].transpose(*view.rows).values.ravel()
        shown = (visible(value) if isinstance(value, str) else value.item() for value in values)
        columns.append((_named(chosen[name]), tuple(shown)))
    return Rows(_title(view, dataset), tuple(columns))


@marks.register
def _(view: Bars, dataset: xr.Dataset) -> SignedBars:
    chosen = _slice(view, dataset)
    variable = chosen[view.x]
    return SignedBars(_title(view, dataset), _axis(chosen, view.y), variable.values.astype(float), _named(variable))


# --- two results side by side ----------------------------------------------------------------------------------------


def pictured(view: View, dataset: xr.Dataset) -> Marks:
    """The marks of a result, or of two that were compared."""
    return beside(view, dataset) if "side" in dataset.dims else marks(view, dataset)


def beside(view: View, compared: xr.Dataset) -> Beside:
    """What `analyses.compare` gives, as three pictures: both on one scale, and the difference on its own, white at zero."""
    names = [textwrap.shorten(visible(name), 60, placeholder=" …") for name in json.loads(compared.attrs["sides"])]
    free = replace(view, at=())
    first, second = (marks(free, compared.sel(side=side)) for side in SIDES[:2])
    first, second = _alike(first, second)
    title = first.title
    panels = [replace(first, title=names[0]), replace(second, title=names[1])]
    if not isinstance(view, Table):  # of which a row is no number
        signed = replace(free, scale="diverging") if isinstance(free, (Heatmap, HeadGrid)) else free
        panels.append(replace(marks(signed, compared.sel(side=SIDES[2])), title="The second minus the first"))
    return Beside(title, tuple(panels))


def _alike(first: Any, second: Any) -> tuple[Any, Any]:
    """Both with the same colours, or the same limits."""
    if isinstance(first, (Cells, Thumbnails)):
        low, high = min(first.colour.low, second.colour.low), max(first.colour.high, second.colour.high)
        return tuple(replace(one, colour=replace(one.colour, low=low, high=high)) for one in (first, second))  # type: ignore[return-value]
    if isinstance(first, Curves):
        both = np.concatenate([values for one in (first, second) for _, curves in one.panels for _, values in curves])
    elif isinstance(first, SignedBars):
        both = np.concatenate([first.values, second.values, [0.0]])
    else:
        return first, second
    common = limits(both)
    return replace(first, limits=common), replace(second, limits=common)


# --- parts -----------------------------------------------------------------------------------------------------------


def _knobs(dataset: xr.Dataset) -> dict[str, Any]:
    return json.loads(dataset.attrs.get("knobs", "{}"))


def _slice(view: View, dataset: xr.Dataset) -> xr.Dataset:
    """The dataset at the values of the knobs that the view is `at`."""
    knobs = _knobs(dataset)
    return dataset.sel({name: knobs[name] for name in view.at}) if view.at else dataset


def _title(view: View, dataset: xr.Dataset) -> str:
    """The view's title; which head it is of; and what was multiplied into the numbers, where the result says so."""
    knobs = _knobs(dataset)
    title = view.title
    if set(view.at) == {"layer", "head"}:
        title = f"{title}: L{knobs['layer']}H{knobs['head']}"
    elif {"layer", "head"} <= knobs.keys() and not {"layer", "head", "component"} & view.names():
        title = f"{title} · L{knobs['layer']}H{knobs['head']}"
    return f"{title} · {dataset.attrs['folded']}" if "folded" in dataset.attrs else title


def _named(variable: xr.DataArray) -> str:
    return with_units(variable.attrs["long_name"], variable.attrs["units"])


def _axis(dataset: xr.Dataset, dim: str) -> Axis:
    values = dataset[dim].values
    title = dim.replace("_", " ")
    beside = f"{dim}_char"
    if beside in dataset.coords:
        characters = [glyph(character) for character in dataset[beside].values]
        return Axis(dim, title, tuple(characters), tuple(f"{n} {c}" for n, c in zip(values, characters, strict=True)))
    each = dim == "context"  # a short text, whose blanks matter too
    labels = tuple("".join(map(glyph, value)) if each else glyph(str(value)) for value in values)
    return Axis(dim, title, labels, labels)


def _colour(kind: str, values: xr.DataArray) -> ColourScale:
    low, high = float(values.min()), float(values.max())
    if kind == "probability":
        low, high = 0.0, 1.0
    elif kind == "diverging":
        high = max(abs(low), abs(high)) or 1.0
        low = -high
    elif low >= 0:
        low, high = 0.0, high or 1.0
    elif low == high:
        high = low + 1.0
    return ColourScale(kind, low, high, _named(values))


def _written(value: Any) -> str:
    if isinstance(value, str):
        return glyph(value)
    return number(float(value))
