"""Models and results, shared by all visitors: loaded once, computed one at a time, remembered."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import streamlit as st
import torch
import xarray as xr

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


def result(analysis: Analysis, loaded: Loaded, knobs: Mapping[str, Any]) -> xr.Dataset:
    """The result of an analysis, computed unless it has been before."""
    return _result(analysis.slug, loaded.name, loaded.id, json.dumps(dict(knobs)), analysis, loaded.model)


@st.cache_data(max_entries=64, show_spinner="Computing …")
def _result(slug: str, name: str, id: str, knobs: str, _analysis: Analysis, _model: Model) -> xr.Dataset:
    with LOCK:
        return _analysis(_model, **json.loads(knobs))


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
