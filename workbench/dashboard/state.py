"""What a visitor has chosen: one set of values for all pages, kept in the session and written into the address.

The values are the truth; widgets show them and change them. A value that does not fit the checkpoint or the text is
moved to the nearest one that does, with a sentence. Only a text that was typed stays as it is, so that no input is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import streamlit as st

from analyses.spec import Analysis, Cursor, Parameter
from models.hooked import vocabulary_of
from workbench.dashboard.computing import Loaded
from workbench.render.style import visible

CURSORS: tuple[str, ...] = get_args(Cursor)
NONE = "none"
BESIDE = ("with", "with_text")  # what a page is compared with: another checkpoint, another text


def key_of(analysis: Analysis, parameter: Parameter) -> str:
    """Where a knob's value is kept: under its cursor if it has one, so that pages share it."""
    return parameter.knob.cursor or f"{analysis.slug} {parameter.name}"


def in_link(parameter: Parameter) -> str:
    """A knob's name in the address."""
    return parameter.knob.cursor or parameter.name


def values() -> dict[str, Any]:
    return st.session_state.setdefault("values", {})


def link() -> dict[str, str]:
    """What came with the address and has not been taken up yet."""
    return st.session_state.setdefault("link", {})


def choose(key: str, value: Any) -> None:
    """Keep a value as the visitor gave it."""
    values()[key] = value
    link().pop(key, None)


def _fitted() -> dict[str, str]:
    """For every text: the checkpoint that it was last fitted to; what is typed after that is left alone."""
    return st.session_state.setdefault("fitted", {})


# --- the address -----------------------------------------------------------------------------------------------------


def read_address(page: str) -> None:
    """Take up the address when a page is opened with one; moving between pages leaves it empty, and nothing changes."""
    opened = st.session_state.get("page") != page
    st.session_state["page"] = page
    if opened and st.query_params:
        link().update(st.query_params.to_dict())


def write_address(checkpoint: str | None, analysis: Analysis | None = None) -> dict[str, str]:
    """Write everything that is chosen into the address; returns what was written."""
    told = {"checkpoint": checkpoint} if checkpoint else {}
    told |= {name: link()[name] for name in CURSORS if name in link()}
    told |= {name: _as_text(values()[name]) for name in CURSORS if name in values()}
    told |= {name: values()[name] for name in BESIDE if values().get(name) is not None}
    if analysis is not None:
        for parameter in analysis.parameters.values():
            key = key_of(analysis, parameter)
            if key in values():
                told[in_link(parameter)] = _as_text(values()[key])
    if st.query_params.to_dict() != told:
        st.query_params.from_dict(told)
    return told


def _as_text(value: Any) -> str:
    if value is None:
        return NONE
    return str(value).lower() if isinstance(value, bool) else str(value)


def _from_text(parameter: Parameter, text: str) -> Any:
    """The value that a text in the address stands for, in the knob's type; ValueError if there is none."""
    if parameter.optional and text == NONE:
        return None
    if parameter.type is bool:
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _fail()
    return parameter.type(text)


def _fail() -> None:
    raise ValueError


def beside(name: str) -> str | None:
    """What a page is compared with, from the address or the session; None for nothing."""
    if name in link():
        values()[name] = link().pop(name)
    return values().get(name)


# --- fitting ---------------------------------------------------------------------------------------------------------


def settle(analysis: Analysis, loaded: Loaded) -> tuple[dict[str, Any], list[str]]:
    """The knobs of an analysis, each made to fit the checkpoint and the knobs before it; and a sentence per change."""
    knobs: dict[str, Any] = {}
    told: list[str] = []
    for parameter in analysis.parameters.values():
        key = key_of(analysis, parameter)
        value = _incoming(parameter, key, told)
        if parameter.type is str and parameter.allowed(loaded.model, knobs) is None:
            if _fitted().get(key) != loaded.id:
                value = _fitting_text(parameter, loaded, knobs, value, told)
                _fitted()[key] = loaded.id
        else:
            value = _nearest(parameter, loaded, knobs, value, told)
        knobs[parameter.name] = values()[key] = value
    known = {in_link(parameter) for parameter in analysis.parameters.values()} | {"checkpoint", *CURSORS, *BESIDE}
    for name in [name for name in link() if name not in known]:
        told.append(f"The link sets {name!r}, which this page does not have; it is ignored.")
        del link()[name]
    return knobs, told


def _incoming(parameter: Parameter, key: str, told: list[str]) -> Any:
    """A knob's value before fitting: from the address, from the session, or its default."""
    default = values().get(key, parameter.default)
    text = link().pop(in_link(parameter), None)
    if text is None:
        return default
    _fitted().pop(key, None)
    try:
        return _from_text(parameter, text)
    except ValueError:
        word = {int: "a whole number", float: "a number", bool: "true or false"}[parameter.type]
        told.append(f"{parameter.name} is {text!r} in the link, which is not {word}; {shown(default)} is used instead.")
        return default


def _nearest(parameter: Parameter, loaded: Loaded, knobs: Mapping[str, Any], value: Any, told: list[str]) -> Any:
    allowed = parameter.allowed(loaded.model, knobs)
    if allowed is None or (value is None and parameter.optional) or value in allowed.values or not len(allowed.values):
        return value if allowed is None or len(allowed.values) or not parameter.optional else None
    options = list(allowed.values)
    if isinstance(value, (int, float)):
        nearest = min(options, key=lambda option: abs(option - value))
    else:
        nearest = parameter.default if parameter.default in options else options[0]
    told.append(f"{parameter.name} {shown(value)} is outside {allowed.inside}; moved to {shown(nearest)}.")
    return nearest


def _fitting_text(parameter: Parameter, loaded: Loaded, knobs: Mapping[str, Any], text: str, told: list[str]) -> str:
    """The text itself if the model can read it, else the same with known characters and cut to length."""
    if parameter.knob.check is None:
        return text
    candidates = (text, readable(text, loaded), readable(parameter.default, loaded))
    problem = ""
    for candidate in candidates:
        try:
            parameter.knob.check(loaded.model, knobs, candidate)
        except ValueError as error:
            problem = problem or str(error)
            continue
        if candidate != text:
            told.append(f"{parameter.name}: {problem}. Changed to {visible(candidate)!r}.")
        return candidate
    return text


def readable(text: str, loaded: Loaded) -> str:
    """A text with every unknown character replaced, by its other case or a space, and cropped to the end the model reads."""
    known = vocabulary_of(loaded.model).characters
    blank = " " if " " in known else known[0]
    found = "".join(c if c in known else c.swapcase() if c.swapcase() in known else blank for c in text)
    return found[-loaded.model.cfg.n_ctx :]


def shown(value: Any) -> str:
    """A value as it stands in a sentence."""
    return NONE if value is None else repr(visible(value)) if isinstance(value, str) else str(value)
