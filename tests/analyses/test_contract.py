"""What every analysis owes, whatever it computes."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import analyses
from analyses.axes import AXES, UNITS
from analyses.catalogue import ANALYSES, find
from analyses.spec import Analysis, KnobError
from models.hooked import content_hash, load
from workbench import figures
from workbench.render.matplotlib import figure
from workbench.render.plain import Rows, marks

every = pytest.mark.parametrize("analysis", ANALYSES, ids=lambda analysis: analysis.slug)
RESULTS: dict[str, xr.Dataset] = {}


@pytest.fixture
def dataset(analysis: Analysis, stored: Any) -> xr.Dataset:
    """The analysis at its defaults on the stored checkpoint, computed once for all the tests that only look at it."""
    if analysis.slug not in RESULTS:
        RESULTS[analysis.slug] = analysis(load(stored))
    return RESULTS[analysis.slug].copy(deep=True)


def test_every_analysis_in_the_folder_is_in_the_catalogue() -> None:
    found = set()
    for module in pkgutil.iter_modules(analyses.__path__):
        if module.name != "catalogue":
            contents = vars(importlib.import_module(f"analyses.{module.name}")).values()
            found |= {value for value in contents if isinstance(value, Analysis)}
    assert found == set(ANALYSES)
    assert len({analysis.slug for analysis in ANALYSES}) == len(ANALYSES)


@every
def test_a_file_bears_its_analysis_name(analysis: Analysis) -> None:
    assert analysis.function.__module__ == f"analyses.{analysis.function.__name__}"
    assert find(analysis.slug) is analysis


@every
def test_result_is_labelled_in_the_glossary(analysis: Analysis, dataset: xr.Dataset) -> None:
    assert {str(dim) for dim in dataset.dims} <= AXES.keys()
    for name, variable in dataset.data_vars.items():
        assert variable.attrs["long_name"], name
        assert variable.attrs["units"] in UNITS, name
        if variable.dtype.kind == "f":
            assert np.isfinite(variable.values).all(), name
    for dim in dataset.dims:
        assert dim in dataset.coords


@every
def test_result_says_where_it_came_from(analysis: Analysis, dataset: xr.Dataset, small_model: Any) -> None:
    attrs = dataset.attrs
    assert attrs["analysis"] == analysis.slug
    assert attrs["checkpoint"] == "small"
    assert attrs["checkpoint_id"] == content_hash(small_model)
    assert json.loads(attrs["knobs"]).keys() == analysis.parameters.keys()
    assert "torch" in json.loads(attrs["versions"])


@every
def test_same_model_same_numbers(analysis: Analysis, dataset: xr.Dataset, small_model: Any) -> None:
    xr.testing.assert_identical(analysis(small_model), dataset)


@every
def test_identity_holds_in_float64(analysis: Analysis, small_model: Any) -> None:
    dataset = analysis(small_model.to(torch.float64))
    if "identity" in dataset.attrs:
        assert dataset.attrs["identity_error"] <= 1e-9


@every
def test_model_is_left_as_found(analysis: Analysis, small_model: Any) -> None:
    seen = []
    small_model.add_hook("blocks.0.hook_resid_pre", lambda activation, hook: seen.append(hook.name))
    before = {name: tensor.clone() for name, tensor in small_model.state_dict().items()}
    hooks = {name: list(point.fwd_hooks) for name, point in small_model.hook_dict.items()}
    torch.set_grad_enabled(True)
    analysis(small_model)
    assert torch.is_grad_enabled()
    assert all(parameter.requires_grad for parameter in small_model.parameters())
    assert {name: list(point.fwd_hooks) for name, point in small_model.hook_dict.items()} == hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in small_model.state_dict().items())
    assert not small_model.training


@every
def test_every_renderer_draws_every_view(analysis: Analysis, dataset: xr.Dataset) -> None:
    from workbench.render.altair import chart

    for view in analysis.fitting_views(dataset):
        drawn = marks(view, dataset)
        assert drawn.title
        assert figure(drawn, figures.caption(dataset)).axes
        if not isinstance(drawn, Rows):  # the page shows a table as one
            assert chart(drawn).to_dict()


@every
def test_every_view_is_reachable(analysis: Analysis, small_model: Any) -> None:
    """Each declared view fits the result of some combination of choices; one that never does is dead."""
    reached = set()
    combinations: list[dict[str, Any]] = [{}]
    for name, parameter in analysis.parameters.items():
        if parameter.choices:
            combinations = [{**combination, name: choice} for combination in combinations for choice in parameter.choices]
    for knobs in [*combinations, {"corrupted": "My lord, I wi"}] if "corrupted" in analysis.parameters else combinations:
        reached |= set(analysis.fitting_views(analysis(small_model, **knobs)))
    missing = set(analysis.views) - reached
    if analysis.slug == "activation-patching":  # its last one needs two texts with the same metric and heads
        same = dict(corrupted="My lord, I wi", site="head_z")
        missing -= set(analysis.fitting_views(analysis(small_model, **same)))
    assert not missing


@every
def test_exports_are_written_and_repeatable(analysis: Analysis, dataset: xr.Dataset) -> None:
    magic = {".svg": b"<?xml", ".pdf": b"%PDF", ".png": b"\x89PNG", ".csv": b"", ".nc": b"\x89HDF"}
    for suffix, start in magic.items():
        content = figures.export(dataset, suffix)
        assert content.startswith(start)
        if suffix != ".nc":
            assert content == figures.export(dataset, suffix), suffix


@every
def test_netcdf_round_trip(analysis: Analysis, dataset: xr.Dataset, tmp_path: Any) -> None:
    path = figures.save(dataset, tmp_path / "result.nc")
    with xr.open_dataset(path, engine="h5netcdf") as read:
        xr.testing.assert_equal(read.load(), dataset)
        assert read.attrs["knobs"] == dataset.attrs["knobs"]


@every
def test_unknown_knob_is_one_sentence(analysis: Analysis, small_model: Any) -> None:
    with pytest.raises(KnobError, match=f"{analysis.slug} has no knob 'nonsense'"):
        analysis(small_model, nonsense=1)


@every
def test_python_lines_give_the_same_numbers(analysis: Analysis, dataset: xr.Dataset, stored: Any) -> None:
    lines = analysis.python(str(stored), json.loads(dataset.attrs["knobs"]))
    scope: dict[str, Any] = {}
    exec(lines, scope)
    xr.testing.assert_identical(scope["result"], dataset)
