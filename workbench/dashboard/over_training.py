"""The page that follows one analysis over a film of the training: curves over the steps, and a slider."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import streamlit as st
import xarray as xr

from analyses import over_training as following
from analyses.catalogue import ANALYSES, find
from analyses.spec import Analysis
from analyses.views import Bars, Heatmap, View
from models import film
from models.checkpoint import CheckpointError
from workbench.dashboard import computing, controls, page, state
from workbench.dashboard.computing import Loaded
from workbench.render.altair import chart
from workbench.render.plain import marks

FIRST = "head-scores"


def show(started_with: str) -> None:
    """Draw the page."""
    page.guarded(partial(_show, started_with))


def _show(started_with: str) -> None:
    loaded = page.opened("over-training", started_with)
    st.title("Over training", anchor=False)
    st.markdown("#### One number of an analysis, for every head or layer, at every moment of the training that was kept.")
    if loaded is None:
        return
    run, _ = film.run_and_step(loaded.name)
    try:
        film.moments(f"{run}-film")
    except CheckpointError:
        state.write_address(state.values()["checkpoint"])
        st.info(
            page.plain(
                f"There is no film of {run!r}; choose a checkpoint that has one, as baby and attn-only-2 do, or make one: "
                "workbench train PRESET --film."
            )
        )
        return
    analysis = _chosen()
    knobs, told = state.settle(analysis, loaded)
    controls.show(analysis, loaded, knobs)
    state.write_address(state.values()["checkpoint"], analysis)
    page.sentences(told)
    page.guarded(partial(_follow, analysis, loaded, f"{run}-film", knobs))


def _chosen() -> Analysis:
    slugs = [analysis.slug for analysis in ANALYSES]
    first = FIRST if FIRST in slugs else slugs[0]
    titles = {analysis.slug: analysis.title for analysis in ANALYSES}
    return find(st.selectbox("Analysis", slugs, index=slugs.index(first), format_func=titles.__getitem__, key="followed"))


def _follow(analysis: Analysis, loaded: Loaded, name: str, knobs: Mapping[str, Any]) -> None:
    now = computing.result(analysis, loaded, knobs)
    numbers = {str(key): variable for key, variable in now.data_vars.items() if variable.dtype.kind in "fiub"}
    columns = st.columns(3)
    variable = columns[0].selectbox(
        "Number", list(numbers), format_func=lambda key: numbers[key].attrs["long_name"], key=f"number {analysis.slug}"
    )
    at = {}
    for place, dim in enumerate(_to_slice(numbers[variable]), start=1):
        at[dim] = columns[place % 3].selectbox(
            dim.replace("_", " ").capitalize(), now[dim].values.tolist(), key=f"at {analysis.slug} {dim}"
        )
    dataset = computing.over_training(analysis, loaded, name, at, knobs)
    if variable not in dataset:
        st.error("This is more numbers than a curve can show; choose another.")
        return
    shown = dataset[[variable]].assign_attrs(dataset.attrs)
    view = following.views(shown)[0]
    with st.container(border=True):
        drawn = chart(marks(view, shown))
        st.altair_chart(drawn, width="stretch" if getattr(drawn, "width", None) == "container" else "content", theme=None)
        with st.container(horizontal=True, vertical_alignment="center", horizontal_alignment="distribute"):
            st.caption(page.beneath(dataset))
            page.download(analysis, shown, view, knobs, 0)
    _moment(analysis, shown, variable)
    with st.popover("Python"):
        arguments = "".join(f", {key}={value!r}" for key, value in knobs.items())
        kept = f", at={at!r}" if at else ""
        st.code(
            f"from {analysis.function.__module__} import {analysis.function.__name__}\n"
            "from analyses.over_training import over_training\n\n"
            f"result = over_training({analysis.function.__name__}, {name!r}{kept}{arguments})",
            language="python",
        )


def _to_slice(variable: xr.DataArray) -> list[str]:
    """The dimensions of which one slice is kept, so that two at most are left: layer and head if they are there."""
    dims = sorted(map(str, variable.dims), key=lambda dim: (dim not in ("layer", "head"), variable.dims.index(dim)))
    return dims[2:]


def _moment(analysis: Analysis, shown: xr.Dataset, variable: str) -> None:
    """The picture at the slider's step, on the colours or limits of the whole film."""
    others = [str(dim) for dim in shown[variable].dims if dim != "step"]
    if not others:
        return
    steps = shown["step"].values.tolist()
    step = st.select_slider("Step", steps, value=steps[-1], key=f"moment {analysis.slug}")
    signed = bool((shown[variable] < 0).any())
    title = f"Step {step:,}"
    view: View = Bars(title=title, x=variable, y=others[0])
    if len(others) == 2:
        view = Heatmap(
            title=title, y=others[0], x=others[1], colour=variable, text=variable, scale="diverging" if signed else "sequential"
        )
    with st.container(border=True):
        st.altair_chart(chart(page.fixed(marks(view, shown.sel(step=step)), shown[variable], signed)), theme=None)
        told = json.loads(shown.attrs["film"])
        st.caption(f"{len(told)} moments; colours and limits are those of the whole film.")
