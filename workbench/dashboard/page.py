"""The page of an analysis, made from its declaration: what it shows, its knobs, a panel per view."""

from __future__ import annotations

import inspect
import json
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st
import xarray as xr

from analyses.catalogue import ANALYSES
from analyses.compare import compare
from analyses.spec import Analysis
from analyses.views import View
from models.errors import WorkbenchError
from workbench.cli import command_line
from workbench.dashboard import computing, controls, state
from workbench.dashboard.computing import Loaded
from workbench.render.altair import CLICK, chart
from workbench.render.plain import Axis, Cells, Marks, Rows, SignedBars, Thumbnails, beside, marks
from workbench.render.style import limits, number

STYLE = """<style>
.stMainBlockContainer {max-width: 1360px; padding: 4.2rem 2.2rem 3rem}
.stVegaLiteChart, .stVegaLiteChart > div {max-width: 100%; overflow: visible}
.stVegaLiteChart svg {max-width: 100%; height: auto}
.stVegaLiteChart svg .mark-rect path {shape-rendering: crispEdges}
h1 {font-size: 2.2rem !important; padding: 0 0 .2rem !important}
</style>"""

FILES = {
    ".png": "this picture, for slides", ".svg": "this picture, to be scaled and edited", ".pdf": "this picture, for print",
    ".csv": "the numbers of this picture", ".nc": "the whole result with all its labels, for xarray",
}  # fmt: skip


def guarded(draw: Callable[[], None]) -> None:
    """Draw a part of a page; whatever goes wrong in it becomes one sentence."""
    try:
        draw()
    except (WorkbenchError, ValueError) as error:
        st.error(plain(str(error)))
    except Exception as error:
        computing.LOG.exception("a page could not be drawn")
        st.error(
            plain(f"This went wrong, and it is not your fault: {type(error).__name__}: {error}. The server's console has more.")
        )


def opened(page: str, started_with: str) -> Loaded | None:
    """What every page begins with: style, address, checkpoint. None if there is no checkpoint to show."""
    st.html(STYLE)
    state.read_address(page)
    told: list[str] = []
    name = controls.choose_checkpoint(started_with, told)
    sentences(told)
    if name is None:
        st.error("There is no checkpoint here. Train one with `workbench train baby`, or start with `--checkpoint FOLDER`.")
        return None
    return computing.load(name)


def show(analysis: Analysis, started_with: str) -> None:
    """Draw the page of an analysis."""
    guarded(partial(_show, analysis, started_with))


def _show(analysis: Analysis, started_with: str) -> None:
    loaded = opened(analysis.slug, started_with)
    if loaded is None:
        return
    _heading(analysis)
    knobs, told = state.settle(analysis, loaded)
    controls.show(analysis, loaded, knobs)
    guarded(partial(_answer, analysis, loaded, knobs, [*told, *st.session_state.pop("moved", [])]))


def _answer(analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any], told: list[str]) -> None:
    other = controls.compare_with(analysis, loaded, knobs)
    address = state.write_address(state.values()["checkpoint"], analysis)
    sentences(told)
    if other is None:
        _results(analysis, loaded, knobs, address)
    else:
        _compared(analysis, loaded, knobs, *other)


def _heading(analysis: Analysis) -> None:
    st.title(analysis.title, anchor=False)
    st.markdown(f"#### {markdown(analysis.summary[:1].upper() + analysis.summary[1:])}")
    formula = re.search(r"(?:^|\n)((?: {4}.*\n?)+)", analysis.explanation)
    if formula:
        st.code(inspect.cleandoc(formula[1]).rstrip(",."), language=None, wrap_lines=True)
    with st.expander("What is computed, exactly"):
        st.markdown(markdown(analysis.explanation))


def _results(analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any], address: Mapping[str, str]) -> None:
    dataset = computing.result(analysis, loaded, knobs)
    if "note" in dataset.attrs:
        st.info(plain(dataset.attrs["note"]))
    row: Any = None
    for place, view in enumerate(analysis.fitting_views(dataset)):
        found = marks(view, dataset)
        small = isinstance(found, Cells) and found.values.shape[1] <= 6
        if small and row is None:
            row = iter(st.columns(2))
        box = next(row, None) if small else None
        row = row if box is not None else None
        with box or st.container(), st.container(border=True):
            guarded(partial(_panel, analysis, loaded, knobs, dataset, view, found, place, address))


def _compared(
    analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any], other: Loaded, other_knobs: Mapping[str, Any]
) -> None:
    first, second = computing.result(analysis, loaded, knobs), computing.result(analysis, other, other_knobs)
    for place, view in enumerate(analysis.fitting_views(first)):
        with st.container(border=True):
            guarded(partial(_beside, analysis, knobs, first, second, view, place))


def _beside(
    analysis: Analysis, knobs: Mapping[str, Any], first: xr.Dataset, second: xr.Dataset, view: View, place: int
) -> None:  # fmt: skip
    dataset = compare(first, second, view)
    found = beside(view, dataset)
    st.markdown(f"##### {markdown(found.title)}")
    squarish = isinstance(found.panels[0], Cells) and found.panels[0].values.shape[1] <= 2 * found.panels[0].values.shape[0]
    boxes: Any = st.columns(len(found.panels)) if squarish else [st.container() for _ in found.panels]
    for part, (box, panel) in enumerate(zip(boxes, found.panels, strict=True)):
        with box:
            if isinstance(panel, Rows):
                _table(panel)
            else:
                drawn = chart(panel)
                stretched = getattr(drawn, "width", None) == "container"
                st.altair_chart(drawn, width="stretch" if stretched else "content", theme=None, key=f"beside {place} {part}")
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.caption(beneath(dataset))
        with st.container(horizontal=True, width="content"):
            download(analysis, dataset, view, knobs, place)
            with st.popover("Python"):
                st.code(_python_of_both(analysis, first, second, place), language="python")


def _python_of_both(analysis: Analysis, first: xr.Dataset, second: xr.Dataset, place: int) -> str:
    name = analysis.function.__name__
    calls = []
    for result in (first, second):
        arguments = "".join(f", {key}={value!r}" for key, value in json.loads(result.attrs["knobs"]).items())
        calls.append(f"{name}(wb.load({result.attrs['checkpoint']!r}){arguments})")
    return (
        f"import workbench as wb\nfrom analyses.compare import compare\nfrom {analysis.function.__module__} import {name}\n\n"
        f"first = {calls[0]}\nsecond = {calls[1]}\n"
        f"both = compare(first, second, {name}.fitting_views(first)[{place}])"
    )


def _panel(
    analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any], dataset: xr.Dataset, view: View, found: Marks, place: int,
    address: Mapping[str, str],
) -> None:  # fmt: skip
    targets = _targets(analysis, found)
    if isinstance(found, Rows):
        _table(found)
    else:
        _chart(analysis, knobs, found, place, targets)
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.caption(beneath(dataset, targets))
        with st.container(horizontal=True, width="content"):
            download(analysis, dataset, view, knobs, place)
            _reproduce(analysis, loaded, knobs, place, address)


def _chart(analysis: Analysis, knobs: Mapping[str, Any], found: Marks, place: int, targets: Mapping[str, Axis]) -> None:
    chosen = (knobs["layer"], knobs["head"]) if {"layer", "head"} <= knobs.keys() else None
    drawn = chart(found, chosen)
    width: Any = "stretch" if getattr(drawn, "width", None) == "container" else "content"
    at = ".".join(str(state.values().get(cursor)) for cursor in ("layer", "head", "position"))
    name = f"panel {analysis.slug} {place} {at}"
    clicks: dict[str, Any] = {"on_select": partial(_clicked, name, analysis, targets), "key": name} if targets else {}
    st.altair_chart(drawn, width=width, theme=None, **clicks)


def _table(found: Rows) -> None:
    st.markdown(f"##### {markdown(found.title)}")
    table = pd.DataFrame(dict(found.columns))
    numbers = table.select_dtypes("number").columns
    config = {name: st.column_config.NumberColumn(format="%.4g") for name in numbers}
    st.dataframe(table, column_config=config, hide_index=True, width="stretch", height=min(36 * (len(table) + 1) + 3, 640))


def beneath(dataset: xr.Dataset, targets: Mapping[str, Axis] = MappingProxyType({})) -> str:
    """The line under a picture: what was checked, and what a click does."""
    parts = []
    if "identity" in dataset.attrs:
        parts.append(f"Checked: {dataset.attrs['identity']}; largest error {number(dataset.attrs['identity_error'])}.")
    if any(axis.dim == "head" for axis in targets.values()):
        parts.append("Click a head to choose it.")
    elif targets:
        parts.append("Click a cell to choose its position.")
    return plain(" ".join(parts))


def download(analysis: Analysis, dataset: xr.Dataset, view: View, knobs: Mapping[str, Any], place: int) -> None:
    head = f"-L{knobs['layer']}H{knobs['head']}" if {"layer", "head"} <= knobs.keys() else ""
    with st.popover("Download"), st.container(horizontal=True, gap="small"):
        for suffix in FILES:
            told = {".nc": "NetCDF"}.get(suffix, suffix[1:].upper())
            st.download_button(
                told, partial(computing.file, dataset, suffix, view), f"{analysis.slug}{head}{suffix}",
                key=f"download {analysis.slug} {place} {suffix}", on_click="ignore", help=FILES[suffix],
            )  # fmt: skip


def _reproduce(analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any], place: int, address: Mapping[str, str]) -> None:
    with st.popover("Python"):
        st.code(analysis.python(loaded.name, knobs), language="python")
        st.caption("The same on the command line:")
        line = command_line(analysis, loaded.name, knobs, f"{analysis.slug}.svg", place + 1)
        st.code(line, language="bash", wrap_lines=True)
        st.caption("Link to this page as it is:")
        base = (st.context.url or "").split("?")[0]
        st.code(f"{base}?{urllib.parse.urlencode(address)}", language=None, wrap_lines=True)


def fixed(found: Marks, variable: xr.DataArray, signed: bool) -> Marks:
    """The same picture on the colours, or the limits, of all values of a variable."""
    low, high = float(variable.min()), float(variable.max())
    if isinstance(found, Cells):
        if signed:
            low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
        return replace(found, colour=replace(found.colour, low=min(low, 0.0), high=high if high > low else low + 1))
    if isinstance(found, SignedBars):
        return replace(found, limits=limits(np.array([low, high, 0.0])))
    return found


# --- clicks ----------------------------------------------------------------------------------------------------------


def _targets(analysis: Analysis, found: Marks) -> dict[str, Axis]:
    """What a click can choose: field of the selection -> the axis whose value becomes the cursor's."""
    if isinstance(found, Thumbnails):
        return {"layer": found.layers, "head": found.heads}
    if not isinstance(found, Cells):
        return {}
    axes = {"x": found.x, "y": found.y}
    if {axis.dim for axis in axes.values()} == {"layer", "head"}:
        return axes
    has_position = any(parameter.knob.cursor == "position" for parameter in analysis.parameters.values())
    return {field: axis for field, axis in axes.items() if axis.dim == "position" and has_position}


def _clicked(name: str, analysis: Analysis, targets: Mapping[str, Axis]) -> None:
    """Move the cursor to the cell that was clicked."""
    points = st.session_state[name].selection.get(CLICK, [])
    if not points:
        return
    moved = {axis.dim: axis.keys.index(str(points[0][field])) for field, axis in targets.items()}
    for cursor, value in moved.items():
        state.choose(cursor, value)
    here = {parameter.knob.cursor for parameter in analysis.parameters.values()}
    if not moved.keys() <= here:
        others = [other.title for other in ANALYSES if moved.keys() <= {p.knob.cursor for p in other.parameters.values()}]
        st.session_state["moved"] = [
            f"Head L{moved['layer']}H{moved['head']} is chosen now; these pages show it: {', '.join(others)}."
        ]


# --- text ------------------------------------------------------------------------------------------------------------


def sentences(told: list[str]) -> None:
    if told:
        st.info(plain("  \n".join(told)))


def markdown(text: str) -> str:
    """A docstring's text for st.markdown: dollar signs are no formulas."""
    return text.replace("$", r"\$")


def plain(text: str) -> str:
    """A text that markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>$~#|:^])", r"\\\1", text)
