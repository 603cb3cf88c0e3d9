"""Pictures read as data: order, labels, limits, and that files hold what they should."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import QuadMesh

from analyses.ablation import ablation
from analyses.attention_patterns import attention_patterns
from analyses.axes import labelled
from analyses.circuit_rank import circuit_rank
from analyses.logit_attribution import logit_attribution
from analyses.logit_lens import logit_lens
from analyses.ov_circuit import ov_circuit
from analyses.views import Heatmap, Lines, Scatter, Table
from workbench import figures
from workbench.render import style
from workbench.render.altair import chart
from workbench.render.matplotlib import figure
from workbench.render.plain import Cells, Curves, Points, Rows, SignedBars, Thumbnails, marks

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
    drawn = marks(ov_circuit.views[1], dataset)
    assert isinstance(drawn, Cells)
    assert drawn.colour.low == -drawn.colour.high
    assert drawn.colour.high == pytest.approx(float(np.abs(dataset.logit[1, 0]).max()))
    assert drawn.title == "The chosen head: L1H0 · LayerNorm weights, scale 1"
    assert drawn.colour.title.endswith("source (logits)") or "logit" in drawn.colour.title


def test_the_chosen_head_is_the_one_drawn(small_model: Any) -> None:
    dataset = attention_patterns(small_model, TEXT, layer=1, head=0)
    grid, one, *_ = (marks(view, dataset) for view in attention_patterns.fitting_views(dataset))
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
    path = figures.save(ov_circuit(small_model), tmp_path / "ov.svg", ov_circuit.views[1])
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


# --- points and tables -----------------------------------------------------------------------------------------------


@pytest.fixture
def eigenvalues(small_model: Any) -> xr.Dataset:
    """A made-up result: points in a plane and rows of a table, per layer and head."""
    values = np.arange(12.0).reshape(2, 2, 3)
    dataset = labelled(
        small_model,
        real=(values, "layer head index", "real part", "1"),
        imaginary=(-values, "layer head index", "imaginary part", "1"),
        score=(values[..., 0] / 10, "layer head", "copying score", "1"),
        verdict=(np.array([["copies", "–"], ["a\nb", "–"]], dtype=object), "layer head", "verdict", "character"),
        tally=(np.array([3, 1]), "layer", "how many", "1"),
    )
    return dataset.assign_attrs(analysis="none", knobs="{}", title="Eigenvalues", checkpoint="", checkpoint_id="0", versions="{}")


def test_points_are_the_pairs_of_two_variables(eigenvalues: xr.Dataset) -> None:
    drawn = marks(Scatter(title="In the plane", x="real", y="imaginary", over="index", hue="head", facet="layer"), eigenvalues)
    assert isinstance(drawn, Points)
    assert [facet for facet, _ in drawn.panels] == ["layer 0", "layer 1"]
    label, x, y = drawn.panels[1][1][0]
    assert label == "0"
    np.testing.assert_array_equal(x, [6, 7, 8])
    np.testing.assert_array_equal(y, [-6, -7, -8])
    axes = [axes for axes in figure(drawn).axes if axes.get_visible()]
    offsets = np.ma.getdata(axes[1].collections[0].get_offsets())
    np.testing.assert_array_equal(offsets, np.stack([x, y], axis=1))
    specification = chart(drawn).to_dict()
    table = [row for rows in specification["datasets"].values() for row in rows if "hue" in row]
    assert {(row["x"], row["y"]) for row in table} == {(float(v), -float(v)) for v in range(12)}


def test_a_table_has_a_row_per_head_and_keeps_numbers(eigenvalues: xr.Dataset, tmp_path: Path) -> None:
    view = Table(title="Heads", rows=("layer", "head"), columns=("score", "verdict"))
    assert view.fits(eigenvalues)
    assert not Table(title="Heads", rows=("layer", "head"), columns=("score", "tally")).fits(eigenvalues)
    drawn = marks(view, eigenvalues)
    assert isinstance(drawn, Rows)
    assert drawn.columns == (
        ("head", ("L0H0", "L0H1", "L1H0", "L1H1")),
        ("copying score", (0.0, 0.3, 0.6, 0.9)),
        ("verdict", ("copies", "–", "a⏎b", "–")),
    )
    (axes,) = figure(drawn).axes
    written = {place: cell.get_text().get_text() for place, cell in axes.tables[0].get_celld().items()}
    assert written[0, 0] == "head"
    assert written[3, 1] == "0.6"
    assert written[3, 2] == "a⏎b"
    figures.save(eigenvalues, tmp_path / "heads.csv", view)
    assert (tmp_path / "heads.csv").read_text().splitlines()[1] == "0,0,0.0,copies"


def test_a_long_table_says_how_much_of_it_a_picture_shows(small_model: Any) -> None:
    rows = Rows("Numbers", (("index", tuple(map(str, range(100)))), ("value", tuple(range(100)))))
    (axes,) = figure(rows).axes
    assert "the first 40 of 100 rows" in axes.get_title("left")
    assert max(row for row, _ in axes.tables[0].get_celld()) == 40


def test_steps_are_on_a_scale_that_has_a_place_for_zero(small_model: Any) -> None:
    dataset = labelled(small_model, names={"step": [0, 10, 1000]}, loss=([4.0, 3.0, 2.0], "step", "loss", "nats"))
    drawn = marks(Lines(title="Loss", x="step", y="loss", x_scale="symlog"), dataset)
    assert isinstance(drawn, Curves)
    np.testing.assert_array_equal(drawn.x_values, [0, 10, 1000])
    (axes,) = figure(drawn).axes
    assert axes.get_xscale() == "symlog"
    assert chart(drawn).to_dict()["layer"][0]["encoding"]["x"]["scale"]["type"] == "symlog"


def test_what_was_folded_in_is_in_the_title(eigenvalues: xr.Dataset) -> None:
    told = eigenvalues.assign_attrs(folded="LayerNorm weights")
    view = Heatmap(title="Scores", x="head", y="layer", colour="score")
    assert marks(view, told).title == "Scores · LayerNorm weights"
    assert marks(view, eigenvalues).title == "Scores"
