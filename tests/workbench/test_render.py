"""Pictures read as data: order, labels, limits, and that files hold what they should."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from analyses.ablation import ablation
from analyses.attention_patterns import attention_patterns
from analyses.circuit_rank import circuit_rank
from analyses.logit_attribution import logit_attribution
from analyses.logit_lens import logit_lens
from analyses.ov_circuit import ov_circuit
from analyses.views import Heatmap
from workbench import figures
from workbench.render import style
from workbench.render.matplotlib import figure
from workbench.render.plain import Cells, Curves, SignedBars, Thumbnails, marks

TEXT = "KING:\nO $"


def test_heatmap_marks_are_the_numbers_in_order(small_model: Any) -> None:
    dataset = logit_lens(small_model, TEXT)
    drawn = marks(logit_lens.views[0], dataset)
    assert isinstance(drawn, Cells)
    np.testing.assert_array_equal(drawn.values, dataset.probability.transpose("layer", "position"))
    assert drawn.x.labels == tuple("KING:⏎O␣$")
    assert drawn.x.keys[:2] == ("0 K", "1 I")
    assert (drawn.colour.low, drawn.colour.high) == (0, 1)
    assert drawn.texts is not None
    assert drawn.texts[1][0] == style.glyph(dataset.top_char.values[1, 0])


def test_diverging_scales_are_centred_at_zero(small_model: Any) -> None:
    dataset = ov_circuit(small_model, 1, 0)
    drawn = marks(ov_circuit.views[0], dataset)
    assert isinstance(drawn, Cells)
    assert drawn.colour.low == -drawn.colour.high
    assert drawn.colour.high == pytest.approx(float(np.abs(dataset.logit).max()))
    assert drawn.title.endswith("L1H0")
    assert drawn.colour.title.endswith("source (logits)") or "logit" in drawn.colour.title


def test_the_chosen_head_is_the_one_drawn(small_model: Any) -> None:
    dataset = attention_patterns(small_model, TEXT, layer=1, head=0)
    grid, one = (marks(view, dataset) for view in attention_patterns.fitting_views(dataset))
    assert isinstance(grid, Thumbnails)
    assert isinstance(one, Cells)
    np.testing.assert_array_equal(one.values, dataset.pattern[1, 0])
    np.testing.assert_array_equal(grid.values[1, 0], dataset.pattern[1, 0])
    assert one.title == "The chosen head: L1H0"


def test_curves_and_bars(small_model: Any) -> None:
    curves = marks(circuit_rank.views[0], circuit_rank(small_model))
    assert isinstance(curves, Curves)
    assert [facet for facet, _ in curves.panels] == ["layer 0", "layer 1"]
    assert [label for label, _ in curves.panels[0][1]] == ["0", "1"]
    dataset = logit_attribution(small_model, TEXT)
    bars = marks(logit_attribution.views[0], dataset)
    assert isinstance(bars, SignedBars)
    assert bars.categories.labels == tuple(dataset.component.values)
    np.testing.assert_array_equal(bars.values, dataset.contribution)


def test_a_matplotlib_heatmap_shows_row_0_at_the_top(small_model: Any) -> None:
    drawn = marks(logit_lens.views[0], logit_lens(small_model, TEXT))
    axes = figure(drawn).axes[0]
    mesh = next(item for item in axes.collections if isinstance(item, QuadMesh))
    assert isinstance(drawn, Cells)
    np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(drawn.values.shape), drawn.values)
    low, high = axes.get_ylim()
    assert low > high
    assert mesh.get_clim() == (0, 1)


def test_text_stays_text_in_svg(small_model: Any, tmp_path: Path) -> None:
    path = figures.save(ov_circuit(small_model), tmp_path / "ov.svg")
    root = ElementTree.parse(path).getroot()
    texts = {"".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"⏎", "␣", "$", "Z", "source char", "output char"} <= texts
    assert "ov-circuit" in path.read_text()  # the recipe is in the metadata


def test_constant_values_still_have_a_scale(small_model: Any) -> None:
    dataset = ablation(small_model, TEXT, method="zero") * 0
    dataset["loss_increase"].attrs = {"long_name": "nothing", "units": "nats"}
    drawn = marks(Heatmap(title="t", x="head", y="layer", colour="loss_increase", scale="diverging"), dataset)
    assert isinstance(drawn, Cells)
    assert (drawn.colour.low, drawn.colour.high) == (-1, 1)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1.0, "1"), (32, "32"), (0.123456, "0.123"), (1.9073e-06, "1.9e-06"), (-250.4, "-250")]
)
def test_numbers_in_labels(value: float, text: str) -> None:
    assert style.number(value) == text


def test_ink_is_readable_on_its_colour() -> None:
    assert style.ink_on(0.0, "probability", 0, 1) == "#111111"
    assert style.ink_on(1.0, "probability", 0, 1) == "#ffffff"
    assert style.ink_on(-1.0, "diverging", -1, 1) == "#ffffff"
