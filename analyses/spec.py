"""One analysis = one function whose signature is the single declaration.

`@analysis(views, group=…)` turns a function `(model, **knobs) -> xr.Dataset` into an `Analysis`: a callable that checks
its knobs and stamps its result. Python, the command line and the dashboard all go through that one door.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
import xarray as xr

from analyses.views import View
from models.errors import WorkbenchError
from models.hooked import content_hash, encode, vocabulary_of
from models.protocol import Model

Cursor = Literal["text", "layer", "head", "position", "char", "neuron"]
GROUPS = ("Residual stream", "Attention", "Circuits", "Paths", "Neurons", "Inputs", "Interventions")


class KnobError(WorkbenchError):
    """A knob has a value that it cannot take; the message gives what was expected, what was got and what to do."""


class Allowed(NamedTuple):
    """Values that a knob may take, and the thing that they lie inside, for the message."""

    values: Sequence[Any]
    inside: str


@dataclass(frozen=True)
class Knob:
    """What an annotation says about a parameter.

    Args:
        help: one phrase.
        cursor: knobs with the same cursor share one value across pages.
        allowed: limits read from the model and the knobs before this one.
        check: raises ValueError, with a sentence, for a value that does not suit the model and the knobs before it.
    """

    help: str
    cursor: Cursor | None = None
    allowed: Callable[[Model, Mapping[str, Any]], Allowed] | None = None
    check: Callable[[Model, Mapping[str, Any], Any], object] | None = None


# --- limits, declared once -------------------------------------------------------------------------------------------


def _layers(model: Model, _: Mapping[str, Any]) -> Allowed:
    return Allowed(range(model.cfg.n_layers), f"the model's {model.cfg.n_layers} blocks")


def _heads(model: Model, _: Mapping[str, Any]) -> Allowed:
    return Allowed(range(model.cfg.n_heads), f"the {model.cfg.n_heads} heads of a block")


def _positions(model: Model, knobs: Mapping[str, Any]) -> Allowed:
    text = knobs["text"]
    return Allowed(range(len(text)), f"the prompt {text!r} ({len(text)} characters)")


def _characters(model: Model, _: Mapping[str, Any]) -> Allowed:
    characters = vocabulary_of(model).characters
    return Allowed(characters, f"the model's {len(characters)} characters")


def _is_readable(model: Model, _: Mapping[str, Any], text: str) -> None:
    encode(model, text)


def _is_predictable(model: Model, _: Mapping[str, Any], text: str) -> None:
    encode(model, text)
    if len(text) < 2:
        raise ValueError("the text has 1 character, so nothing in it is predicted; give at least 2")


Text = Annotated[str, Knob("Text to read", cursor="text", check=_is_readable)]
ScoredText = Annotated[str, Knob("Text whose characters are predicted", cursor="text", check=_is_predictable)]
Layer = Annotated[int, Knob("Block, from 0", cursor="layer", allowed=_layers)]
Head = Annotated[int, Knob("Head of that block, from 0", cursor="head", allowed=_heads)]
Position = Annotated[int | None, Knob("Place in the text, from 0; none for the last", cursor="position", allowed=_positions)]


def _neurons(model: Model, _: Mapping[str, Any]) -> Allowed:
    count = 0 if model.cfg.attn_only else model.cfg.d_mlp
    return Allowed(range(count), f"the {count} neurons of an MLP")


Neuron = Annotated[int, Knob("Neuron of that block's MLP, from 0", cursor="neuron", allowed=_neurons)]


def Character(help: str, cursor: Cursor | None = None) -> Knob:
    """A knob whose value is one character of the model."""
    return Knob(help, cursor=cursor, allowed=_characters)


# --- parameters ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One knob of one analysis, read from its signature."""

    name: str
    type: type  # str, int, float or bool
    choices: tuple[Any, ...] | None  # of a Literal
    optional: bool  # None is allowed
    default: Any
    knob: Knob

    @property
    def option(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    def default_for(self, model: Model) -> Any:
        """The default; a text that is longer than the model reads, cropped to its end as in generation."""
        is_text = isinstance(self.default, str) and self.choices is None
        return self.default[-model.cfg.n_ctx :] if is_text else self.default

    def allowed(self, model: Model, knobs: Mapping[str, Any]) -> Allowed | None:
        """The values it may take, given the model and the knobs before it; None if any of its type will do."""
        if self.choices is not None:
            return Allowed(self.choices, "what is offered")
        return self.knob.allowed(model, knobs) if self.knob.allowed else None

    def checked(self, model: Model, knobs: Mapping[str, Any], value: Any) -> Any:
        """The value in its own type, or a KnobError."""
        if value is None and self.optional:
            return None
        value = self._typed(value)
        allowed = self.allowed(model, knobs)
        if allowed is not None and not len(allowed.values):
            raise KnobError(f"{self.name}: there is nothing to choose among {allowed.inside}; give a model that has some")
        if allowed is not None and value not in allowed.values:
            raise KnobError(f"{self.name} {value!r} is outside {allowed.inside}; give {_span(allowed.values)}")
        if self.knob.check is not None:
            try:
                self.knob.check(model, knobs, value)
            except ValueError as error:
                raise KnobError(f"{self.name}: {error}") from None
        return value

    def _typed(self, value: Any) -> Any:
        if self.type in (str, bool) or isinstance(value, bool):
            if isinstance(value, self.type) and isinstance(value, bool) == (self.type is bool):
                return value
        elif self.type is int:
            try:
                return operator.index(value)
            except TypeError:
                pass
        elif isinstance(value, (int, float)):
            return float(value)
        word = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[self.type]
        raise KnobError(f"{self.name}: got {value!r}; expected {word}")


def _span(values: Sequence[Any]) -> str:
    if isinstance(values, range):
        return str(values[0]) if len(values) == 1 else f"{values[0]}–{values[-1]}"
    if all(isinstance(value, str) and len(value) == 1 for value in values):
        return f"one of {''.join(values)!r}"
    return " or ".join(repr(value) for value in values)


def _parameter(parameter: inspect.Parameter, hint: Any) -> Parameter:
    if get_origin(hint) is not Annotated:
        raise TypeError(f"{parameter.name}: annotate it with a Knob")
    inner, *extras = get_args(hint)
    knob = next(extra for extra in extras if isinstance(extra, Knob))
    optional = False
    if get_origin(inner) in (Union, UnionType):
        (inner,) = (part for part in get_args(inner) if part is not NoneType)
        optional = True
    choices = get_args(inner) if get_origin(inner) is Literal else None
    kind = type(choices[0]) if choices else inner
    if kind not in (str, int, float, bool):
        raise TypeError(f"{parameter.name}: a knob is a str, int, float, bool or Literal, not {inner}")
    if parameter.default is inspect.Parameter.empty:
        raise TypeError(f"{parameter.name}: a knob needs a default, so that every page opens with a picture")
    return Parameter(parameter.name, kind, choices, optional, parameter.default, knob)


# --- the analysis ----------------------------------------------------------------------------------------------------


class Analysis:
    """A function with its declaration read off: callable like the function, checked and stamped.

    `analysis(model, text="KING")` checks every knob, computes without gradients, and returns a dataset whose attrs hold
    the analysis, the checkpoint's name and content hash, the knobs as JSON and the versions.

    Raises:
        KnobError: a knob is out of range; nothing was computed.
    """

    def __init__(self, function: Callable[..., xr.Dataset], views: tuple[View, ...], group: str) -> None:
        if group not in GROUPS:
            raise ValueError(f"group {group!r} is not among {GROUPS}")
        self.function, self.views, self.group = function, views, group
        update_wrapper(self, function)
        first, _, rest = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
        self.title, colon, self.summary = " ".join(first.split()).partition(": ")
        if not colon:
            raise ValueError(f"{function.__name__}: the docstring starts 'Title: one sentence.'")
        self.explanation = rest.partition("Returns:")[0].strip()
        self.slug = function.__name__.replace("_", "-")

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        hints = get_type_hints(self.function, include_extras=True)
        declared = list(inspect.signature(self.function).parameters.values())[1:]  # the first is the model
        return {parameter.name: _parameter(parameter, hints[parameter.name]) for parameter in declared}

    def check(self, model: Model, knobs: Mapping[str, Any]) -> dict[str, Any]:
        """All knobs, defaults filled in (to fit the model, see `Parameter.default_for`) and validated in order.

        Raises:
            KnobError: one is unknown or out of range.
        """
        for name in knobs:
            if name not in self.parameters:
                raise KnobError(f"{self.slug} has no knob {name!r}; it has: {', '.join(self.parameters) or 'none'}")
        checked: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            value = knobs[name] if name in knobs else parameter.default_for(model)
            checked[name] = parameter.checked(model, checked, value)
        return checked

    def __call__(self, model: Model, *positional: Any, **knobs: Any) -> xr.Dataset:
        if len(positional) > len(self.parameters):
            raise KnobError(f"{self.slug} takes {len(self.parameters)} knobs, got {len(positional)}")
        for name, value in zip(self.parameters, positional, strict=False):
            if name in knobs:
                raise KnobError(f"{self.slug}: {name} is given twice")
            knobs[name] = value
        checked = self.check(model, knobs)
        with torch.no_grad():
            dataset = self.function(model, **checked)
        origin = getattr(model, "checkpoint", None)
        dataset.attrs |= {
            "analysis": self.slug,
            "title": self.title,
            "checkpoint": origin.name if origin is not None else "",
            "checkpoint_id": content_hash(model),
            "knobs": json.dumps(checked, ensure_ascii=False),
            "versions": json.dumps(versions()),
        }
        return dataset

    def fitting_views(self, dataset: xr.Dataset) -> list[View]:
        """The views that this result can be shown in, best first; never none."""
        views = [view for view in self.views if view.fits(dataset)]
        if not views:
            raise ValueError(f"{self.slug}: none of its views fits its result")
        return views

    def python(self, checkpoint: str, knobs: Mapping[str, Any]) -> str:
        """The Python lines that reproduce a result."""
        name = self.function.__name__
        arguments = "".join(f", {key}={value!r}" for key, value in knobs.items())
        return (
            f"import workbench as wb\nfrom {self.function.__module__} import {name}\n\n"
            f"model = wb.load({checkpoint!r})\nresult = {name}(model{arguments})"
        )


def analysis(*views: View, group: str) -> Callable[[Callable[..., xr.Dataset]], Analysis]:
    """Declare a function as an analysis, shown by these views under this heading."""
    return lambda function: Analysis(function, views, group)


def versions() -> dict[str, str]:
    """Versions of what computes the numbers."""
    packages = ("torch", "transformer-lens", "xarray", "tiny-gpt-workbench")
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
