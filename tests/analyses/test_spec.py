"""One declaration: knobs read from signatures, checked the same way everywhere."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
import xarray as xr

from analyses.axes import NotFinite, labelled
from analyses.logit_attribution import logit_attribution
from analyses.logit_lens import logit_lens
from analyses.qk_circuit import qk_circuit
from analyses.residual_stream import residual_stream
from analyses.spec import Analysis, Knob, KnobError, Text, analysis
from analyses.views import Bars, Heatmap, Lines
from models.protocol import Model


def test_parameters_come_from_the_signature() -> None:
    parameters = qk_circuit.parameters
    assert list(parameters) == ["layer", "head", "space", "fold", "embedding", "scale", "text"]
    assert parameters["layer"].knob.cursor == "layer"
    assert parameters["space"].choices == ("char", "position")
    assert parameters["space"].option == "--space"
    assert logit_attribution.parameters["position"].optional


def test_title_summary_and_explanation_come_from_the_docstring() -> None:
    assert logit_lens.title == "Logit lens"
    assert logit_lens.summary == "the next character that each layer's residual stream already implies."
    assert "softmax(((x − mean x)/s · w + b) W_U + b_U)" in logit_lens.explanation
    assert "Returns" not in logit_lens.explanation


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"layer": 2}, "layer 2 is outside the model's 2 blocks; give 0–1"),
        ({"layer": -1}, "layer -1 is outside"),
        ({"head": 5}, "head 5 is outside the 2 heads of a block; give 0–1"),
        ({"layer": "one"}, "layer: got 'one'; expected a whole number"),
        ({"layer": True}, "layer: got True; expected a whole number"),
        ({"layer": 0.5}, "layer: got 0.5; expected a whole number"),
        ({"space": "chars"}, "space 'chars' is outside what is offered; give 'char' or 'position'"),
    ],
)
def test_a_wrong_knob_is_one_sentence(random_model: Any, knobs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KnobError) as error:
        qk_circuit(random_model, **knobs)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"text": "abc", "position": 12}, "position 12 is outside the prompt 'abc' (3 characters); give 0–2"),
        ({"text": "abc", "target": "Z"}, "target 'Z' is outside the model's 12 characters"),
        ({"text": "", "target": "a"}, "text: the text is empty; give 1–10 characters"),
        (
            {"text": "abcdefghijab", "target": "a"},
            "text: the text has 12 characters; the model reads at most 10: shorten",
        ),
        ({"text": "abZ", "target": "a"}, "character 'Z' at place 2"),
    ],
)
def test_limits_come_from_model_and_text(random_model: Any, knobs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KnobError) as error:
        logit_attribution(random_model, **knobs)
    assert sentence in str(error.value)


def test_positional_and_named_knobs_are_the_same(random_model: Any) -> None:
    xr.testing.assert_identical(residual_stream(random_model, "abc", "head"), residual_stream(random_model, text="abc"))
    with pytest.raises(KnobError, match="text is given twice"):
        residual_stream(random_model, "abc", text="abc")
    with pytest.raises(KnobError, match="takes 2 knobs, got 3"):
        residual_stream(random_model, "abc", "head", 1)


def test_a_declaration_that_cannot_work_is_refused() -> None:
    def untitled(model: Model) -> xr.Dataset:
        """No title here."""
        raise AssertionError

    def without_default(model: Model, text: Text) -> xr.Dataset:
        """Title: sentence."""
        raise AssertionError

    with pytest.raises(ValueError, match="docstring starts"):
        analysis(group="Circuits")(untitled)
    with pytest.raises(ValueError, match="group 'Nothing' is not among"):
        analysis(group="Nothing")(without_default)
    with pytest.raises(TypeError, match="needs a default"):
        _ = analysis(group="Circuits")(without_default).parameters


def _declared(value: Any) -> Analysis:
    def example(
        model: Model,
        number: Annotated[float, Knob("a number")] = 0.5,
        flag: Annotated[bool, Knob("a flag")] = False,
        choice: Annotated[Literal["x", "y"] | None, Knob("a choice")] = None,
    ) -> xr.Dataset:
        """Example: for the test."""
        return labelled(model, value=(value, "", "value", "1"))

    return analysis(Heatmap(title="none", x="layer", y="head", colour="value"), group="Circuits")(example)


def test_knob_types(random_model: Any) -> None:
    example = _declared(1.0)
    assert example.check(random_model, {"number": 1, "choice": "x"}) == {"number": 1.0, "flag": False, "choice": "x"}
    with pytest.raises(KnobError, match="flag: got 1; expected true or false"):
        example.check(random_model, {"flag": 1})
    with pytest.raises(KnobError, match="number: got True; expected a number"):
        example.check(random_model, {"number": True})


def test_numbers_that_are_not_finite_are_refused(random_model: Any) -> None:
    with pytest.raises(NotFinite, match="value holds values that are not finite"):
        _declared(float("nan"))(random_model)


def test_a_result_without_a_fitting_view_is_an_error(random_model: Any) -> None:
    example = _declared(1.0)
    with pytest.raises(ValueError, match="none of its views fits"):
        example.fitting_views(example(random_model))


def test_labelled_refuses_words_outside_the_glossary(random_model: Any) -> None:
    with pytest.raises(ValueError, match="'row' is not in the axis glossary"):
        labelled(random_model, value=([1.0], "row", "value", "1"))
    with pytest.raises(ValueError, match="units 'furlongs'"):
        labelled(random_model, value=([1.0], "layer", "value", "furlongs"))
    with pytest.raises(ValueError, match="2 axes, but dimensions 'layer'"):
        labelled(random_model, value=([[1.0]], "layer", "value", "1"))


def test_a_view_fits_only_the_dimensions_it_names(random_model: Any) -> None:
    by_head = labelled(random_model, value=([[1.0, 2.0], [3.0, 4.0]], "layer head", "value", "1"))
    assert Heatmap(title="t", x="head", y="layer", colour="value").fits(by_head)
    assert not Bars(title="t", x="value", y="layer").fits(by_head)
    assert Bars(title="t", x="value", y="layer", at=("head",)).fits(by_head)
    assert not Heatmap(title="t", x="head", y="layer", colour="other").fits(by_head)
    assert Lines(title="t", x="head", y="value", hue="layer").fits(by_head)
