"""Over training: any analysis at every moment of a run that was kept, so that one can watch a circuit form.

Reference: Olsson et al. (2022) for what there is to see; the film of a run is made by `workbench train PRESET --film`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from analyses.axes import AXES
from analyses.progress import track
from analyses.spec import Analysis
from analyses.views import Heatmap, Lines, View
from models import film, hooked
from models.errors import WorkbenchError

MOST_VALUES = 5_000  # of one variable at one moment: scalars, and small arrays per head
MOST_CURVES = 12  # in one picture; more become a heatmap


class OverTrainingError(WorkbenchError):
    """An analysis cannot be followed over these moments; the message says why and what to do."""


def over_training(analysis: Analysis, folder: str | Path, *, at: Mapping[str, Any] | None = None, **knobs: Any) -> xr.Dataset:
    """An analysis at every moment of a film, with a `step` axis added.

        scores = over_training(head_scores, "attn-only-2-film", at={"score": "induction"})
        scores.value.sel(layer=1, head=4)  # one number per step

    Args:
        folder: of the moments (`step-00000`, …), or the film's name.
        at: values of dimensions to keep one slice of, by coordinate.
        knobs: the analysis' own.

    Returns:
        Every variable of the result that is a number or a small array of numbers (at most 5,000) and is there at every moment,
        (step, …). `identity_error` is the largest of all moments.

    Raises:
        CheckpointError: there is no such film.
        KnobError: a knob is out of range.
        OverTrainingError: nothing in the result is small enough, or `at` names what the result does not have.
    """
    moments = film.moments(folder)
    results = []
    for path in track(moments.values(), len(moments), f"{analysis.title} over training"):
        result = analysis(hooked.load(path), **knobs)
        results.append(_slice(analysis, result, at or {}))
    common = set.intersection(*({str(name) for name in result.data_vars} for result in results))
    small = [
        str(name)
        for name, variable in results[0].data_vars.items()
        if name in common and variable.dtype.kind in "fiub" and variable.size <= MOST_VALUES
    ]
    if not small:
        raise OverTrainingError(
            f"{analysis.slug} gives no number and no array of at most {MOST_VALUES:,} numbers; choose a slice with `at`"
        )
    steps = pd.Index(list(moments), name="step")
    with xr.set_options(keep_attrs=True):
        joined = xr.concat([result[small] for result in results], steps, join="exact", coords="minimal", compat="override")
    joined["step"].attrs["long_name"] = AXES["step"]
    return _attributes(joined, results, folder)


def _slice(analysis: Analysis, result: xr.Dataset, at: Mapping[str, Any]) -> xr.Dataset:
    for name, value in at.items():
        if name not in result.dims:
            raise OverTrainingError(f"{analysis.slug} has no dimension {name!r}; it has: {', '.join(map(str, result.dims))}")
        known = result[name].values.tolist()
        if value not in known:
            shown = ", ".join(map(str, known[:12])) + (" …" if len(known) > 12 else "")
            raise OverTrainingError(f"{name} has no {value!r}; give one of: {shown}")
    return result.sel(dict(at))


def _attributes(joined: xr.Dataset, results: list[xr.Dataset], folder: str | Path) -> xr.Dataset:
    """The last moment's attributes, the film's name, and the largest error of all."""
    joined.attrs = dict(results[-1].attrs)
    joined.attrs["checkpoint"] = Path(folder).name
    joined.attrs["checkpoint_id"] = " ".join(result.attrs["checkpoint_id"] for result in results)
    joined.attrs["title"] = f"{joined.attrs['title']} over training"
    joined.attrs["film"] = json.dumps([int(step) for step in joined["step"].values])
    if "identity_error" in joined.attrs:
        joined.attrs["identity_error"] = max(result.attrs["identity_error"] for result in results)
    return joined


def views(dataset: xr.Dataset) -> tuple[View, ...]:
    """A view of every variable that fits on one page: curves over the steps, or a heatmap where they would be too many."""
    found = (_view(str(name), variable) for name, variable in dataset.data_vars.items())
    return tuple(view for view in found if view is not None)


def _view(name: str, variable: xr.DataArray) -> View | None:
    title = variable.attrs["long_name"][:1].upper() + variable.attrs["long_name"][1:]
    others = [str(dim) for dim in variable.dims if dim != "step"]
    sizes = [variable.sizes[dim] for dim in others]
    if len(others) == 0:
        return Lines(title=title, x="step", y=name, x_scale="symlog")
    if len(others) == 1 and sizes[0] <= MOST_CURVES:
        return Lines(title=title, x="step", y=name, hue=others[0], x_scale="symlog")
    if len(others) == 1:
        signed = bool((variable < 0).any())
        return Heatmap(title=title, x="step", y=others[0], colour=name, scale="diverging" if signed else "sequential")
    if len(others) == 2 and sizes[0] <= 6 and sizes[1] <= MOST_CURVES:
        return Lines(title=title, x="step", y=name, facet=others[0], hue=others[1], x_scale="symlog")
    return None
