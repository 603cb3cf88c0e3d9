"""Compare: two results of one analysis side by side, and their difference, wherever their axes agree."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr

from analyses.axes import AXES
from analyses.views import View
from models.errors import WorkbenchError

SIDES = ("first", "second", "difference")


class CompareError(WorkbenchError):
    """Two results have no axes in common; the message names the one that differs."""


def compare(first: xr.Dataset, second: xr.Dataset, view: View) -> xr.Dataset:
    """What a view shows of two results, along a new axis `side`: first, second, and second − first.

        before, after = (logit_lens(wb.load(name)) for name in ("baby-film/step-00400", "baby"))
        both = compare(before, after, logit_lens.views[0])

    A view of one head shows each result's own chosen head. Characters have no difference: it is the second's where they
    differ, and blank where they are the same. Texts of equal length may differ: their places are compared, and each
    character of the axis becomes "first/second" where they do.

    Returns:
        The view's variables, (side, …), in their own units. `identity_error` is the larger of the two.

    Raises:
        CompareError: another analysis, or an axis of another length or with other names.
    """
    if first.attrs["analysis"] != second.attrs["analysis"]:
        raise CompareError(
            f"{first.attrs['analysis']} and {second.attrs['analysis']} cannot be compared; give two of one analysis"
        )
    if not (view.fits(first) and view.fits(second)):
        raise CompareError(f"{view.title!r} is not among the pictures of both results; give the same knobs for both")
    pair = [_shown(result, view) for result in (first, second)]
    for dim in pair[0].dims:
        _agree(str(dim), *pair)
    data = {}
    for name in view.variables(first):
        one, two = pair[0][name], pair[1][name]
        values = np.stack([one.values, two.values, _difference(one.values, two.values)])
        data[name] = (("side", *one.dims), values, one.attrs)
    coordinates = {
        str(name): both for name, value in pair[0].coords.items() if (both := _both(str(name), value, pair[1])) is not None
    }
    joined = xr.Dataset(data, coords=coordinates | {"side": np.array(SIDES, dtype=object)})
    joined["side"].attrs["long_name"] = AXES["side"]
    joined.attrs = _attributes(first, second)
    return joined


def _shown(result: xr.Dataset, view: View) -> xr.Dataset:
    knobs = json.loads(result.attrs["knobs"])
    return result[view.variables(result)].sel({name: knobs[name] for name in view.at})


def _agree(dim: str, first: xr.Dataset, second: xr.Dataset) -> None:
    one, two = first[dim].values, second[dim].values
    if len(one) != len(two):
        raise CompareError(
            f"the axis {dim!r} has {len(one)} values in the first and {len(two)} in the second, so there is no difference; "
            "give texts of equal length, or models of the same shape"
        )
    if not (one == two).all():
        place = int(np.argmax(one != two))
        raise CompareError(f"the axis {dim!r} differs: {one[place]!r} in the first, {two[place]!r} in the second")


def _difference(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    if one.dtype.kind in "fiub":
        return two.astype(float) - one.astype(float)
    return np.where(one == two, "", two)


def _both(name: str, one: xr.DataArray, second: xr.Dataset) -> xr.DataArray | None:
    """A coordinate of both; characters of two texts are written together where they differ."""
    if name not in second.coords or one.shape != second.coords[name].shape:
        return None
    two = second.coords[name]
    if name.endswith("_char") and one.dtype.kind == "O":
        joint = np.array([a if a == b else f"{a}/{b}" for a, b in zip(one.values, two.values, strict=True)], dtype=object)
        return one.copy(data=joint)
    return one if (one.values == two.values).all() else None


def _attributes(first: xr.Dataset, second: xr.Dataset) -> dict[str, object]:
    attrs = dict(first.attrs)
    for name in ("checkpoint", "checkpoint_id"):
        attrs[name] = " | ".join([first.attrs[name], second.attrs[name]])
    attrs["knobs_of_second"] = second.attrs["knobs"]
    attrs["sides"] = json.dumps(_names(first, second))
    if "identity_error" in attrs:
        attrs["identity_error"] = max(first.attrs["identity_error"], second.attrs["identity_error"])
    return attrs


def _names(first: xr.Dataset, second: xr.Dataset) -> list[str]:
    """What tells the two apart: the checkpoints, or the knobs that differ."""
    if first.attrs["checkpoint_id"] != second.attrs["checkpoint_id"]:
        return [result.attrs["checkpoint"] or result.attrs["checkpoint_id"] for result in (first, second)]
    one, two = (json.loads(result.attrs["knobs"]) for result in (first, second))
    differing = [name for name in one if one[name] != two[name]]
    return [", ".join(f"{name} {knobs[name]!r}" for name in differing) or "the same" for knobs in (one, two)]
