"""Knobs to widgets, from their declarations alone: shared ones in the sidebar, a page's own above its pictures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from analyses.spec import Analysis, Parameter
from models import checkpoint, film
from workbench.dashboard import computing, state
from workbench.dashboard.computing import Loaded
from workbench.render.style import GLYPHS, glyph

FEW = 8  # up to so many choices lie side by side
DEFAULT = "baby"
TRAINED = "trained"  # the last place of the slider over a film
BLANKS = {" ": "space", "\n": "line break", "\t": "tab"}


# --- the checkpoint --------------------------------------------------------------------------------------------------


def given() -> str:
    """The checkpoint that the program was started with: `streamlit run … -- --checkpoint NAME`."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--checkpoint", default=DEFAULT)
    return parser.parse_known_args(sys.argv[1:])[0].checkpoint


def choose_checkpoint(started_with: str, told: list[str]) -> str | None:
    """The chooser in the sidebar; None if there is no checkpoint at all."""
    options = list(checkpoint.available())
    if started_with not in options and _exists(started_with):
        options.insert(0, started_with)
    if not options:
        return None
    first = started_with if started_with in options else options[0]
    wanted = state.link().pop("checkpoint", None)
    chosen = wanted or state.values().get("checkpoint", first)
    run, step = film.run_and_step(chosen)
    moments = _moments(run)
    if run not in options or (step is not None and step not in moments):
        told.append(f"There is no checkpoint {chosen!r} here; {first!r} is shown instead.")
        chosen, run, step, moments = first, first, None, _moments(first)
    state.values()["checkpoint"] = chosen
    _put("widget checkpoint", run)
    st.sidebar.selectbox(
        "Checkpoint", options, key="widget checkpoint", on_change=_checkpoint_changed, format_func=lambda name: name.rstrip("/"),
        help="The trained model that is looked into. Its page is Home.",
    )  # fmt: skip
    if moments:
        _put("widget moment", TRAINED if step is None else step)
        st.sidebar.select_slider(
            "Step of its training", [*moments, TRAINED], key="widget moment", on_change=_moment_changed,
            help="A film of the training was kept: move back to see the same page at an earlier moment.",
        )  # fmt: skip
    return chosen


def _moments(run: str) -> dict[int, Path]:
    """The moments of the film that belongs to a checkpoint; none without one."""
    try:
        return film.moments(f"{run}-film")
    except checkpoint.CheckpointError:
        return {}


def _moment_changed() -> None:
    run, step = st.session_state["widget checkpoint"], st.session_state["widget moment"]
    state.values()["checkpoint"] = run if step == TRAINED else film.name_of(run, step)


def _exists(name: str) -> bool:
    try:
        checkpoint.find(name)
    except checkpoint.CheckpointError:
        return False
    return True


def _checkpoint_changed() -> None:
    state.values()["checkpoint"] = st.session_state["widget checkpoint"]


# --- a second one beside it --------------------------------------------------------------------------------------------

NOTHING = "nothing"


def compare_with(analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any]) -> tuple[Loaded, dict[str, Any]] | None:
    """What the visitor wants beside this page: another checkpoint, another text, or both. None for nothing."""
    checkpoint_name, text = state.beside("with"), state.beside("with_text")
    with st.sidebar.expander("Compare with", expanded=checkpoint_name is not None or text is not None):
        run, _ = film.run_and_step(loaded.name)
        moments = [film.name_of(run, step) for step in _moments(run)]
        options = [NOTHING, *(name for name in [*checkpoint.available(), *moments] if name != loaded.name)]
        if checkpoint_name is not None and checkpoint_name not in options:
            st.caption(f"There is no checkpoint {checkpoint_name!r} here.")
            checkpoint_name = None
        _put("widget with", checkpoint_name or NOTHING)
        st.selectbox("Another checkpoint", options, key="widget with", on_change=_beside_changed)
        reads_text = "text" in analysis.parameters
        if reads_text:
            _put("widget with text", text or "")
            st.text_area("Another text, as long as the first", key="widget with text", height=90, on_change=_beside_changed)
    if checkpoint_name is None and not (reads_text and text):
        return None
    other = computing.load(checkpoint_name) if checkpoint_name else loaded
    return other, dict(knobs) | ({"text": text} if reads_text and text else {})


def _beside_changed() -> None:
    name = st.session_state["widget with"]
    state.choose("with", None if name == NOTHING else name)
    if "widget with text" in st.session_state:
        state.choose("with_text", st.session_state["widget with text"] or None)


# --- the knobs -------------------------------------------------------------------------------------------------------


def show(analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any]) -> None:
    """A widget for every knob of an analysis, showing its settled value."""
    shared = [parameter for parameter in analysis.parameters.values() if parameter.knob.cursor]
    own = [parameter for parameter in analysis.parameters.values() if not parameter.knob.cursor]
    with st.sidebar:
        for parameter in shared:
            widget(analysis, parameter, loaded, knobs)
    per_row = 2 if len(own) in (1, 2, 4) else 3
    for start in range(0, len(own), per_row):
        row = own[start : start + per_row]
        for column, parameter in zip(st.columns(per_row), row, strict=False):
            with column:
                widget(analysis, parameter, loaded, knobs)


def widget(analysis: Analysis, parameter: Parameter, loaded: Loaded, knobs: Mapping[str, Any]) -> None:
    """The widget that suits a knob's type and limits."""
    key = state.key_of(analysis, parameter)
    # Streamlit mixes up values where one name serves two pages, or choices that have changed.
    of = knobs.get("text") if parameter.knob.cursor == "position" else ""
    name = f"widget {analysis.slug} {key} {loaded.id} {of}"
    value = knobs[parameter.name]
    _put(name, state.NONE if value is None else value)
    label = f"**{parameter.name.replace('_', ' ').capitalize()}** · {parameter.knob.help}"
    common: dict[str, Any] = {"key": name, "on_change": _changed, "args": (key, name, parameter.optional)}
    allowed = parameter.allowed(loaded.model, knobs)
    if allowed is not None and not len(allowed.values):
        st.caption(f"{label}: nothing to choose")
    elif allowed is not None:
        _choice(label, parameter, list(allowed.values), knobs, common)
    elif parameter.type is bool:
        st.toggle(label, **common)
    elif parameter.type is str:
        height = 120 if parameter.knob.cursor else 90
        st.text_area(label, height=height, help="Ctrl+Enter, or a click elsewhere, applies it.", **common)
    else:
        st.number_input(label, step=1 if parameter.type is int else None, **common)


def _choice(label: str, parameter: Parameter, options: list[Any], knobs: Mapping[str, Any], common: dict[str, Any]) -> None:
    characters = parameter.type is str and parameter.choices is None
    text = str(knobs.get("text", ""))

    def named(option: Any) -> str:
        if option == state.NONE:
            return f"last ({len(text) - 1})" if parameter.knob.cursor == "position" else state.NONE
        if characters:
            return f"{glyph(option)}  ({BLANKS[option]})" if option in GLYPHS else option
        if parameter.knob.cursor == "position" and option < len(text):
            return f"{option} · {glyph(text[option])}"
        return str(option)

    if parameter.optional:
        options = [state.NONE, *options]  # None itself would be a widget without a choice
    short = not characters and len(options) <= FEW and sum(len(named(option)) for option in options) <= 28
    if short and not parameter.optional:
        st.segmented_control(label, options, format_func=named, required=True, **common)
    elif parameter.type is int and not parameter.optional:
        st.number_input(label, min_value=options[0], max_value=options[-1], step=1, **common)
    else:
        st.selectbox(label, options, format_func=named, **common)


def _put(name: str, value: Any) -> None:
    """Make a widget show a value, without disturbing one that already does."""
    if name not in st.session_state or st.session_state[name] != value:
        st.session_state[name] = value


def _changed(key: str, name: str, optional: bool) -> None:
    value = st.session_state[name]
    state.choose(key, None if optional and value == state.NONE else value)
