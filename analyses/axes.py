"""The axis glossary, and `labelled`, the one door from tensors to xarray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor

from models.errors import WorkbenchError
from models.hooked import vocabulary_of
from models.protocol import Model

AXES: dict[str, str] = {
    "layer": "block, from 0",
    "head": "attention head within its block, from 0",
    "position": "place in the text, from 0",
    "query_position": "place that attends",
    "key_position": "place that is attended to",
    "offset": "query position minus key position",
    "char": "character of the vocabulary",
    "query_char": "character that attends",
    "key_char": "character that is attended to",
    "source_char": "character that is attended to and moved",
    "output_char": "character whose logit changes",
    "neuron": "hidden unit of an MLP, from 0",
    "d_model": "coordinate of the residual stream",
    "d_head": "coordinate inside a head",
    "component": "part that writes to the residual stream, or adds to the logits directly",
    "other_component": "part that a component is compared with",
    "reading": "a LayerNorm, named by what reads through it",
    "part": "term of an attention score",
    "score": "what a head is scored for",
    "composition": "input of the later head through which two heads compose",
    "order": "number of characters of context, or of attention heads on a path",
    "context": "the characters before the next one",
    "side": "first result, second result, second minus first",
    "bin": "interval of a histogram",
    "sender": "component whose output is followed",
    "receiver": "input that a sender reaches",
    "path": "way from an input to the logits",
    "index": "place in an ordered list, such as singular values from the largest",
    "step": "training step",
    "pair": "clean and corrupted text",
    "batch": "text within a batch",
}
UNITS = ("nats", "logits", "probability", "1", "character")


class NotFinite(WorkbenchError):
    """A result holds NaN or infinity; it is refused rather than shown."""


# A variable on its way into a dataset: values, dimensions in order ("layer position"), long name, units.
Variable = tuple[Any, str, str, str]


WIDENED = (
    "This model has no residual stream. It is analysed on the widened stream, where each sublayer reads the last d coordinates "
    "written and writes d fresh ones: the same function, but d_model, sums along the stream and what is read early are of that "
    "construction."
)


def labelled(
    model: Model,
    tokens: Tensor | None = None,
    *,
    names: Mapping[str, Sequence[Any]] | None = None,
    identity: tuple[str, float] | None = None,
    note: str | None = None,
    **variables: Variable,
) -> xr.Dataset:
    """Tensors as an `xarray.Dataset` whose dimensions, coordinates and units say what they are.

    Coordinates follow from the dimension's name: the given names, if there are any; else characters for `*char`; numbers
    from 0; and for `*position` over a text also the character there, as `<dimension>_char`.

    Args:
        tokens: ids (position,) of the text that `*position` dimensions run over, if they do.
        names: coordinates of dimensions that have names, or numbers of their own: {"component": ["embed", …]}.
        identity: for a decomposition, the equation it should satisfy and max |Σ parts − whole|.
        note: a sentence that a reader of the numbers must know.
        variables: name = (values, "dim dim", long name, units).

    Raises:
        ValueError: a word that is not in the glossary, sizes that disagree, or an axis without its names.
        NotFinite: a value is NaN or infinite.
    """
    coordinates: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for name, (values, dims, long_name, units) in variables.items():
        array = _array(values)
        axes = tuple(dims.split())
        if len(axes) != array.ndim:
            raise ValueError(f"{name}: {array.ndim} axes, but dimensions {dims!r}")
        if units not in UNITS:
            raise ValueError(f"{name}: units {units!r} are not among {UNITS}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise NotFinite(f"{name} holds values that are not finite, so nothing is shown; check the model's weights")
        for dim, size in zip(axes, array.shape, strict=True):
            if dim not in AXES:
                raise ValueError(f"{name}: {dim!r} is not in the axis glossary")
            coordinates |= _coordinates(model, dim, size, tokens, names or {})
        data[name] = (axes, array, {"long_name": long_name, "units": units})
    dataset = xr.Dataset(data, coords=coordinates)
    for axis in dataset.dims:
        dataset[axis].attrs["long_name"] = AXES[str(axis)]
    if identity is not None:
        dataset.attrs["identity"], dataset.attrs["identity_error"] = identity[0], float(identity[1])
    notes = [sentence for sentence in (note, WIDENED if _is_widened(model) else None) if sentence]
    if notes:
        dataset.attrs["note"] = " ".join(notes)
    return dataset


def _is_widened(model: Model) -> bool:
    """Whether a checkpoint without residual connections was converted (see `models.hooked`)."""
    origin = getattr(model, "checkpoint", None)
    return origin is not None and not origin.config.residual


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    array = np.asarray(values)
    return array.astype(object) if array.dtype.kind == "U" else array


NAMED = ("component", "other_component", "sender", "receiver", "path", "reading", "part", "score", "composition", "context")


def _coordinates(
    model: Model, dim: str, size: int, tokens: Tensor | None, names: Mapping[str, Sequence[Any]]
) -> Mapping[str, Any]:
    if dim in names:
        given = names[dim]
        return {dim: _strings(given) if isinstance(given[0], str) else np.asarray(given)}
    if dim in NAMED:
        raise ValueError(f"a {dim} dimension needs names")
    if dim.endswith("char"):
        return {dim: _strings(vocabulary_of(model).characters)}
    coordinates: dict[str, Any] = {dim: np.arange(size)}
    if dim.endswith("position") and tokens is not None:
        characters = vocabulary_of(model).characters
        coordinates[f"{dim}_char"] = (dim, _strings([characters[number] for number in tokens.tolist()]))
    return coordinates


def _strings(values: Sequence[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = list(values)
    return array
