"""The page of an analysis, made from its declaration: what it shows, its knobs, a panel per view."""

from __future__ import annotations

import inspect
import re
import urllib.parse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import streamlit as st
import xarray as xr

from analyses.catalogue import ANALYSES
from analyses.spec import Analysis
from analyses.views import View
from models.errors import WorkbenchError
from workbench.cli import command_line
from workbench.dashboard import computing, controls, state
from workbench.dashboard.computing import Loaded
from workbench.render.altair import CLICK, chart
from workbench.render.plain import Axis, Cells, Marks, Thumbnails, marks
from workbench.render.style import number

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
    address = state.write_address(state.values()["checkpoint"], analysis)
    sentences([*told, *st.session_state.pop("moved", [])])
    guarded(partial(_results, analysis, loaded, knobs, address))


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


def _panel(
    analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any], dataset: xr.Dataset, view: View, found: Marks, place: int,
    address: Mapping[str, str],
) -> None:  # fmt: skip
    chosen = (knobs["layer"], knobs["head"]) if {"layer", "head"} <= knobs.keys() else None
    drawn = chart(found, chosen)
    width: Any = "stretch" if getattr(drawn, "width", None) == "container" else "content"
    targets = _targets(analysis, found)
    at = ".".join(str(state.values().get(cursor)) for cursor in ("layer", "head", "position"))
    name = f"panel {analysis.slug} {place} {at}"
    clicks: dict[str, Any] = {"on_select": partial(_clicked, name, analysis, targets), "key": name} if targets else {}
    st.altair_chart(drawn, width=width, theme=None, **clicks)
    with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
        st.caption(_beneath(dataset, targets))
        with st.container(horizontal=True, width="content"):
            _download(analysis, dataset, view, knobs, place)
            _reproduce(analysis, loaded, knobs, place, address)


def _beneath(dataset: xr.Dataset, targets: Mapping[str, Axis]) -> str:
    """The line under a picture: what was checked, and what a click does."""
    parts = []
    if "identity" in dataset.attrs:
        parts.append(f"Checked: {dataset.attrs['identity']}; largest error {number(dataset.attrs['identity_error'])}.")
    if any(axis.dim == "head" for axis in targets.values()):
        parts.append("Click a head to choose it.")
    elif targets:
        parts.append("Click a cell to choose its position.")
    return plain(" ".join(parts))


def _download(analysis: Analysis, dataset: xr.Dataset, view: View, knobs: Mapping[str, Any], place: int) -> None:
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
