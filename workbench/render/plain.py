"""What a picture consists of, as data: the part of drawing that every renderer shares, and that tests can read.

`marks(view, dataset)` resolves a view against a result: values in order, labels, titles with units, colour limits.
The matplotlib and Altair renderers turn marks into ink.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import xarray as xr

from analyses.views import Bars, HeadGrid, Heatmap, Lines, View
from workbench.render.style import glyph, number, with_units


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


@dataclass(frozen=True)
class SignedBars:
    """One horizontal bar per category, top to bottom, growing from zero."""

    title: str
    categories: Axis
    values: np.ndarray
    value_title: str


Marks = Cells | Thumbnails | Curves | SignedBars


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
    return Curves(_title(view, dataset), _axis(chosen, view.x), x_values, _named(variable), view.hue or "", panels)


@marks.register
def _(view: Bars, dataset: xr.Dataset) -> SignedBars:
    chosen = _slice(view, dataset)
    variable = chosen[view.x]
    return SignedBars(_title(view, dataset), _axis(chosen, view.y), variable.values.astype(float), _named(variable))


# --- parts -----------------------------------------------------------------------------------------------------------


def _knobs(dataset: xr.Dataset) -> dict[str, Any]:
    return json.loads(dataset.attrs.get("knobs", "{}"))


def _slice(view: View, dataset: xr.Dataset) -> xr.Dataset:
    """The dataset at the values of the knobs that the view is `at`."""
    knobs = _knobs(dataset)
    return dataset.sel({name: knobs[name] for name in view.at}) if view.at else dataset


def _title(view: View, dataset: xr.Dataset) -> str:
    knobs = _knobs(dataset)
    if set(view.at) == {"layer", "head"}:
        return f"{view.title}: L{knobs['layer']}H{knobs['head']}"
    if "layer" in knobs and "head" in knobs and not isinstance(view, HeadGrid):
        return f"{view.title} · L{knobs['layer']}H{knobs['head']}"
    return view.title


def _named(variable: xr.DataArray) -> str:
    return with_units(variable.attrs["long_name"], variable.attrs["units"])


def _axis(dataset: xr.Dataset, dim: str) -> Axis:
    values = dataset[dim].values
    title = dim.replace("_", " ")
    beside = f"{dim}_char"
    if beside in dataset.coords:
        characters = [glyph(character) for character in dataset[beside].values]
        return Axis(dim, title, tuple(characters), tuple(f"{n} {c}" for n, c in zip(values, characters, strict=True)))
    labels = tuple(glyph(str(value)) for value in values)
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
