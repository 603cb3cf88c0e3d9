"""Views: what a picture shows, named by dimensions and variables. They draw nothing; renderers do.

A view fits a dataset that has everything the view names. An analysis lists its views in order of preference; those
that fit are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import xarray as xr

Scale = Literal["sequential", "diverging", "probability"]


@dataclass(frozen=True, kw_only=True)
class View:
    """Common to all: a title for the panel, and the knobs that pick one slice along the dimension of their name."""

    title: str
    at: tuple[str, ...] = ()

    def names(self) -> set[str]:
        """The dimensions and variables that the view needs."""
        values = (getattr(self, spec.name) for spec in fields(self) if spec.name not in ("title", "at", "scale", "x_scale"))
        return {name for value in values if value is not None for name in ((value,) if isinstance(value, str) else value)}

    def fits(self, dataset: xr.Dataset) -> bool:
        dims = {str(dim) for dim in dataset.dims}
        named = self.names() | set(self.at)
        shown = self.variables(dataset)
        if not shown or not named <= dims | set(shown):
            return False
        return all(set(dataset[name].dims) == named & dims for name in shown)

    def variables(self, dataset: xr.Dataset) -> list[str]:
        """The data variables that the view shows."""
        return [str(name) for name in dataset.data_vars if name in self.names()]


@dataclass(frozen=True, kw_only=True)
class Heatmap(View):
    """A matrix of cells; `diverging` scales are symmetric about zero, `probability` runs from 0 to 1."""

    x: str
    y: str
    colour: str
    text: str | None = None  # variable written into the cells
    scale: Scale = "sequential"


@dataclass(frozen=True, kw_only=True)
class HeadGrid(View):
    """A thumbnail matrix for every layer and head; clicking one moves the cursor there."""

    x: str
    y: str
    colour: str
    scale: Scale = "sequential"
    layer: str = "layer"
    head: str = "head"


@dataclass(frozen=True, kw_only=True)
class Lines(View):
    """Curves over a numbered dimension, one per value of `hue`, side by side per value of `facet`."""

    x: str
    y: str
    hue: str | None = None
    facet: str | None = None
    x_scale: Literal["linear", "symlog"] = "linear"  # symlog: logarithmic, but 0 has a place


@dataclass(frozen=True, kw_only=True)
class Scatter(View):
    """A point per value of the dimension `over`, at two variables; a colour per value of `hue`, side by side per `facet`."""

    x: str
    y: str
    over: str
    hue: str | None = None
    facet: str | None = None


@dataclass(frozen=True, kw_only=True)
class Table(View):
    """A row per value of the dimensions `rows`, in order; a column for each of these and for each variable of `columns`."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Bars(View):
    """One signed bar per value of `y`; `x` is the variable."""

    x: str
    y: str
