"""Two results beside each other, and one analysis over a run: the numbers are those of the single results, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analyses.ablation import ablation
from analyses.attention_patterns import attention_patterns
from analyses.circuit_rank import circuit_rank
from analyses.compare import CompareError, compare
from analyses.logit_lens import logit_lens
from analyses.over_training import OverTrainingError, over_training, views
from analyses.residual_stream import residual_stream
from analyses.views import Heatmap, Lines
from models import hooked
from models.checkpoint import CheckpointError
from workbench.render.plain import beside, marks

TEXT, OTHER = "KING:\nO $", "KINGS\nOf$"


def models_of(film: Path) -> list[Any]:
    return [hooked.load(path) for path in sorted(film.iterdir())]


# --- compare ---------------------------------------------------------------------------------------------------------


def test_two_checkpoints_their_numbers_and_their_difference(film):
    first, second = (logit_lens(model, TEXT) for model in models_of(film)[1:])
    both = compare(first, second, logit_lens.views[0])
    np.testing.assert_array_equal(both.probability.sel(side="first"), first.probability)
    np.testing.assert_array_equal(both.probability.sel(side="second"), second.probability)
    expected = second.probability.values.astype(float) - first.probability.values.astype(float)
    np.testing.assert_array_equal(both.probability.sel(side="difference"), expected)
    assert np.abs(expected).max() > 0.01
    assert both.attrs["identity_error"] == max(first.attrs["identity_error"], second.attrs["identity_error"])
    assert json.loads(both.attrs["sides"]) == ["random-film/step-00010", "random-film/step-00400"]
    told = both.top_char.sel(side="difference").values
    same = first.top_char.values == second.top_char.values
    assert (told[same] == "").all()
    assert (told[~same] == second.top_char.values[~same]).all()
    assert not same.all()


def test_two_texts_of_equal_length_are_compared_place_by_place(film):
    model = models_of(film)[2]
    first, second = logit_lens(model, TEXT), logit_lens(model, OTHER)
    both = compare(first, second, logit_lens.views[0])
    expected = [a if a == b else f"{a}/{b}" for a, b in zip(TEXT, OTHER, strict=True)]
    assert both.position_char.values.tolist() == expected
    assert json.loads(both.attrs["sides"]) == [f"text {TEXT!r}", f"text {OTHER!r}"]
    np.testing.assert_array_equal(both.probability.sel(side="difference").values[:, :4], 0.0)  # the same start, the same past


def test_the_chosen_head_of_each_is_compared(film):
    model = models_of(film)[2]
    first, second = (attention_patterns(model, TEXT, layer=1, head=head) for head in (0, 1))
    fitting = attention_patterns.fitting_views(first)
    (one_head,) = [view for view in fitting if isinstance(view, Heatmap) and set(view.at) == {"layer", "head"}]
    both = compare(first, second, one_head)
    np.testing.assert_array_equal(both.pattern.sel(side="first"), first.pattern.sel(layer=1, head=0))
    np.testing.assert_array_equal(both.pattern.sel(side="second"), first.pattern.sel(layer=1, head=1))
    drawn = beside(one_head, both)
    assert [panel.title for panel in drawn.panels] == ["head 0", "head 1", "The second minus the first"]


def test_pictures_that_are_compared_share_their_scale(film):
    first, second = (residual_stream(model, TEXT) for model in models_of(film)[:3:2])
    drawn = beside(residual_stream.views[0], compare(first, second, residual_stream.views[0]))
    one, two, difference = drawn.panels
    assert one.colour == two.colour
    assert one.colour.high == pytest.approx(max(first.norm.max(), second.norm.max()))
    assert difference.colour.kind == "diverging"
    np.testing.assert_allclose(difference.values, two.values - one.values)
    entropies = logit_lens.views[1]
    first, second = (logit_lens(model, TEXT) for model in models_of(film)[:3:2])
    curves = beside(entropies, compare(first, second, entropies))
    assert curves.panels[0].limits == curves.panels[1].limits


def test_what_cannot_be_compared_is_one_sentence(film, small_model):
    model = models_of(film)[0]
    lens = logit_lens.views[0]
    with pytest.raises(CompareError, match="'position' has 9 values in the first and 4 in the second"):
        compare(logit_lens(model, TEXT), logit_lens(model, "KING"), lens)
    with pytest.raises(CompareError, match="give two of one analysis"):
        compare(logit_lens(model, TEXT), residual_stream(model, TEXT), lens)
    view = residual_stream.views[0]
    with pytest.raises(CompareError, match="the axis 'component' has"):
        compare(residual_stream(model, TEXT), residual_stream(model, TEXT, decompose="sublayer"), view)
    with pytest.raises(CompareError, match="not among the pictures of both"):
        compare(ablation(model, TEXT), ablation(model, TEXT, unit="block"), ablation.views[0])


# --- over training ---------------------------------------------------------------------------------------------------


def test_over_training_is_the_analysis_at_every_moment(film):
    found = over_training(ablation, film, text=TEXT, method="zero")
    assert found.step.values.tolist() == [0, 10, 400]
    assert found.loss_increase.dims == ("step", "layer", "head")
    singles = [ablation(model, TEXT, method="zero") for model in models_of(film)]
    for step, single in zip(found.step, singles, strict=True):
        np.testing.assert_array_equal(found.loss_increase.sel(step=step), single.loss_increase)
    assert found.attrs["identity_error"] == max(single.attrs["identity_error"] for single in singles)
    assert found.loss_increase.attrs == singles[0].loss_increase.attrs
    assert not np.allclose(found.loss_increase[0], found.loss_increase[2])
    assert found.attrs["checkpoint"] == "random-film"
    assert found.attrs["checkpoint_id"].split() == [single.attrs["checkpoint_id"] for single in singles]


def test_a_slice_of_what_is_too_large_for_a_curve(film):
    found = over_training(attention_patterns, film, at={"query_position": 5}, text=TEXT)
    assert found.pattern.dims == ("step", "layer", "head", "key_position")
    single = attention_patterns(models_of(film)[1], TEXT)
    np.testing.assert_array_equal(found.pattern.sel(step=10), single.pattern.sel(query_position=5))
    with pytest.raises(OverTrainingError, match="has no dimension 'neuron'; it has: "):
        over_training(attention_patterns, film, at={"neuron": 1}, text=TEXT)
    with pytest.raises(OverTrainingError, match="layer has no 7; give one of: 0, 1"):
        over_training(attention_patterns, film, at={"layer": 7}, text=TEXT)
    with pytest.raises(CheckpointError, match="there is no film"):
        over_training(attention_patterns, film / "nothing", text=TEXT)


def test_every_small_number_gets_its_picture(film):
    found = over_training(circuit_rank, film)
    pictures = {name: view for view in views(found) for name in view.variables(found)}
    assert isinstance(pictures["qk_rank"], Lines)
    assert pictures["qk_rank"].x == "step"
    assert pictures["qk_rank"].x_scale == "symlog"
    assert isinstance(pictures["ov_bound"], Lines)
    for name, view in pictures.items():
        assert marks(view, found).title, name
    stream = over_training(residual_stream, film, at={"position": 3}, text=TEXT)
    assert all(marks(view, stream) for view in views(stream))
