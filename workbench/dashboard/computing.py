"""Models and results, shared by all visitors: loaded once, computed one at a time, remembered."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
import torch
import xarray as xr

from analyses import over_training as following
from analyses.progress import reporting
from analyses.spec import Analysis
from analyses.views import View
from models import checkpoint, checks, hooked
from models.checkpoint import Checkpoint
from models.protocol import Model
from workbench import figures

LOG = logging.getLogger("workbench.dashboard")
torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))  # more would wait for each other in models so small
LOCK = threading.RLock()  # the model and matplotlib's settings are shared by all threads


class Loaded(NamedTuple):
    """A checkpoint in memory: what it is called, where it lies, the model, and the hash of its weights."""

    name: str
    path: Path
    stamp: int
    model: Model
    id: str

    @property
    def checkpoint(self) -> Checkpoint:
        return self.model.checkpoint  # type: ignore[attr-defined]


def load(name: str) -> Loaded:
    """The checkpoint of this name or path, from memory unless its files have changed.

    Raises:
        CheckpointError: it is missing or broken.
    """
    path = checkpoint.find(name)
    stamp = max((path / part).stat().st_mtime_ns for part in (checkpoint.WEIGHTS, checkpoint.CONFIG))
    with LOCK:
        return _loaded(name, str(path.resolve()), stamp)


@st.cache_resource(max_entries=4, show_spinner="Loading the model …")
def _loaded(name: str, path: str, stamp: int) -> Loaded:
    model = hooked.load(path)
    return Loaded(name, Path(path), stamp, model, hooked.content_hash(model))


RESULTS: OrderedDict[tuple[str, ...], xr.Dataset] = OrderedDict()
MOST_RESULTS = 64


def result(analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any]) -> xr.Dataset:
    """The result of an analysis, computed unless it has been before.

    What takes long shows a bar; whatever the visitor does meanwhile ends it, as Streamlit does with every script.
    """
    key = (analysis.slug, loaded.name, loaded.id, json.dumps(dict(knobs)))
    return _remembered(key, lambda: analysis(loaded.model, **knobs))


def over_training(analysis: Analysis, loaded: Loaded, film: str, at: Mapping[str, Any], knobs: Mapping[str, Any]) -> xr.Dataset:
    """The same for every moment of a film (see `analyses.over_training`); `loaded` is one of the run."""
    key = (analysis.slug, film, loaded.id, json.dumps([dict(at), dict(knobs)]))
    return _remembered(key, lambda: following.over_training(analysis, film, at=at, **knobs))


def _remembered(key: tuple[str, ...], compute: Callable[[], xr.Dataset]) -> xr.Dataset:
    if key not in RESULTS:
        with st.spinner("Computing …"), LOCK, _progress():
            if key not in RESULTS:  # another visitor may have computed it while this one waited
                RESULTS[key] = compute()
            while len(RESULTS) > MOST_RESULTS:
                RESULTS.popitem(last=False)
    return RESULTS[key]


@contextmanager
def _progress() -> Iterator[None]:
    """A bar on the page for whatever inside tells how far it is."""
    place = st.empty()

    def listen(done: int, total: int, what: str) -> None:
        place.progress(done / max(1, total), text=f"{what}: {done} of {total}")

    try:
        with reporting(listen):
            yield
    finally:
        place.empty()


def file(dataset: xr.Dataset, suffix: str, view: View) -> bytes:
    """A result as a file, made when it is asked for."""
    with LOCK:
        return figures.export(dataset, suffix, view)


def checked(loaded: Loaded) -> list[checks.Check]:
    """The self-check of a checkpoint, without the one that needs its corpus."""
    return _checked(str(loaded.path), loaded.stamp, loaded.checkpoint)


@st.cache_data(max_entries=8, show_spinner="Checking the model …")
def _checked(path: str, stamp: int, _found: Checkpoint) -> list[checks.Check]:
    with LOCK:
        return checks.verify(_found)


def shapes(loaded: Loaded) -> list[checks.Stage]:
    """The shape after every stage of a forward pass of one full-length text."""
    return _shapes(str(loaded.path), loaded.stamp, loaded.checkpoint)


@st.cache_data(max_entries=8, show_spinner="Running the model once …")
def _shapes(path: str, stamp: int, _found: Checkpoint) -> list[checks.Stage]:
    with LOCK:
        return checks.shapes(_found)
