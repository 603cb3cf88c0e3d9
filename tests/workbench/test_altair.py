"""Charts: the same order, limits and colours as the marks say, and every key survives, whatever characters are in it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import xarray as xr

from analyses.views import Bars, HeadGrid, Heatmap, Lines
from workbench.render import style
from workbench.render.altair import CLICK, MOST_CELLS, chart
from workbench.render.plain import Axis, Curves, marks

CHARACTERS = ["b", "\n", " ", '"', "\\", "'", "$", "a"]


def _dataset(values: np.ndarray, dims: tuple[str, ...], coordinates: dict[str, Any] | None = None) -> xr.Dataset:
    data = {"value": (dims, values, {"long_name": "size", "units": "nats"})}
    return xr.Dataset(data, coords={dim: np.arange(values.shape[place]) for place, dim in enumerate(dims)} | (coordinates or {}))


def _spec(view: Any, dataset: xr.Dataset, chosen: tuple[int, int] | None = None) -> dict[str, Any]:
    return chart(marks(view, dataset), chosen).to_dict()


def _rows(spec: dict[str, Any], layer: int = 0) -> list[dict[str, Any]]:
    return spec["datasets"][spec["layer"][layer].get("data", spec.get("data"))["name"]]


@pytest.fixture
def circuit() -> dict[str, Any]:
    """Spec of a V × V heatmap over characters that are not in alphabetical order."""
    values = np.linspace(-3, 1, 64).reshape(8, 8)
    names = np.array(CHARACTERS, dtype=object)
    dataset = _dataset(values, ("query_char", "key_char"), {"query_char": names, "key_char": names})
    return _spec(Heatmap(title="T", x="key_char", y="query_char", colour="value", scale="diverging"), dataset)


def test_every_character_keeps_its_place(circuit: dict[str, Any]) -> None:
    shown = [style.glyph(character) for character in CHARACTERS]
    encoding = circuit["layer"][0]["encoding"]
    assert encoding["x"]["scale"]["domain"] == encoding["y"]["scale"]["domain"] == shown
    assert encoding["x"]["sort"] is None
    assert encoding["y"]["sort"] is None
    assert encoding["x"]["axis"]["values"] == shown
    rows = _rows(circuit)
    assert [row["x"] for row in rows[:8]] == shown
    assert [row["y"] for row in rows[::8]] == shown
    assert np.allclose([row["value"] for row in rows], np.linspace(-3, 1, 64))


def test_labels_are_looked_up_by_key(circuit: dict[str, Any]) -> None:
    expression = circuit["layer"][0]["encoding"]["x"]["axis"]["labelExpr"]
    table = json.loads(expression.removeprefix("(").removesuffix(")[datum.value]"))
    assert table == {style.glyph(character): style.glyph(character) for character in CHARACTERS}


def test_diverging_colours_are_centred_at_zero(circuit: dict[str, Any]) -> None:
    scale = circuit["layer"][0]["encoding"]["color"]["scale"]
    domain, colours = scale["domain"], scale["range"]
    assert domain[0] == -3
    assert domain[-1] == 3
    assert domain[len(domain) // 2] == 0
    assert len(domain) == len(colours)
    assert colours == list(style.COLOURS["diverging"])


def test_tooltips_tell_both_keys_and_the_value_with_its_units(circuit: dict[str, Any]) -> None:
    told = {entry["field"]: entry["title"] for entry in circuit["layer"][0]["encoding"]["tooltip"]}
    assert told == {"y": "query char", "x": "key char", "shown": "size (nats)"}
    assert _rows(circuit)[0]["shown"] == "-3"


def test_a_click_gives_both_keys(circuit: dict[str, Any]) -> None:
    (parameter,) = circuit["params"]
    assert parameter["name"] == CLICK
    assert parameter["select"]["fields"] == ["x", "y"]


def test_repeated_characters_of_a_text_are_different_cells() -> None:
    beside = {"position_char": ("position", np.array(["a", "b", "a"], dtype=object))}
    spec = _spec(
        Heatmap(title="T", x="position", y="layer", colour="value"), _dataset(np.ones((2, 3)), ("layer", "position"), beside)
    )
    axis = spec["layer"][0]["encoding"]["x"]
    assert axis["scale"]["domain"] == ["0 a", "1 b", "2 a"]
    assert '{"0 a": "a", "1 b": "b", "2 a": "a"}' in axis["axis"]["labelExpr"]


def test_texts_are_written_into_their_cells_in_readable_ink() -> None:
    dataset = _dataset(np.array([[0.0, 1.0]]), ("layer", "head"))
    dataset["text"] = (("layer", "head"), np.array([["\n", "x"]], dtype=object))
    spec = _spec(Heatmap(title="T", x="head", y="layer", colour="value", text="text", scale="probability"), dataset)
    assert spec["layer"][1]["encoding"]["text"]["field"] == "text"
    assert [(row["text"], row["ink"]) for row in _rows(spec)] == [("⏎", "#111111"), ("x", "#ffffff")]


def test_a_large_matrix_is_one_image() -> None:
    side = int(MOST_CELLS**0.5) + 1
    spec = _spec(
        Heatmap(title="T", x="key_position", y="query_position", colour="value"),
        _dataset(np.ones((side, side)), ("query_position", "key_position")),
    )
    assert spec["layer"][0]["mark"]["type"] == "image"
    assert [row["url"][:22] for row in _rows(spec)] == ["data:image/png;base64,"]
    assert "too many" in spec["title"]["subtitle"]


def test_a_grid_of_heads_has_one_picture_each_and_frames_the_chosen_one() -> None:
    dataset = _dataset(np.random.default_rng(0).random((2, 3, 4, 4)), ("layer", "head", "query_position", "key_position"))
    view = HeadGrid(title="T", x="key_position", y="query_position", colour="value", scale="probability")
    spec = _spec(view, dataset, chosen=(1, 2))
    rows = _rows(spec)
    assert [(row["layer"], row["head"]) for row in rows] == [(str(n), str(h)) for n in range(2) for h in range(3)]
    assert [row["name"] for row in rows if row["thickness"] > 1] == ["L1H2"]
    assert len({row["url"] for row in rows}) == 6
    (parameter,) = spec["params"]
    assert parameter["select"]["fields"] == ["layer", "head"]


def test_curves_stand_side_by_side_with_one_scale() -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    view = Lines(title="T", x="index", y="value", hue="head", facet="layer")
    spec = _spec(view, _dataset(values, ("layer", "head", "index")))
    assert [panel["title"]["text"] for panel in spec["hconcat"]] == ["layer 0", "layer 1"]
    domains = [panel["layer"][0]["encoding"]["y"]["scale"]["domain"] for panel in spec["hconcat"]]
    assert domains[0] == domains[1]
    assert domains[0][1] >= 23
    assert spec["hconcat"][0]["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["head 0", "head 1", "head 2"]


def test_curves_that_differ_by_name_alone_have_a_legend() -> None:
    axis, values = Axis("step", "step", ("0", "1"), ("0", "1")), np.ones(2)
    curves = (("training", values), ("validation", values))
    spec = chart(Curves("T", axis, np.arange(2.0), "nats", "", (("", curves),))).to_dict()
    assert spec["layer"][0]["encoding"]["color"]["legend"] is not None
    alone = chart(Curves("T", axis, np.arange(2.0), "nats", "", (("", curves[:1]),))).to_dict()
    assert alone["layer"][0]["encoding"]["color"]["legend"] is None


def test_a_value_that_is_missing_leaves_a_gap() -> None:
    spec = _spec(Lines(title="T", x="step", y="value"), _dataset(np.array([np.nan, 2.0, 1.0]), ("step",)))
    assert [row["y"] for row in _rows(spec)] == [2.0, 1.0]
    assert spec["layer"][0]["encoding"]["y"]["scale"]["domain"][0] == 0


def test_bars_keep_their_order_and_are_coloured_by_sign() -> None:
    names = np.array(["embed", "L0H1", "a b"], dtype=object)
    dataset = _dataset(np.array([1.0, -2.0, 0.0]), ("component",), {"component": names})
    spec = _spec(Bars(title="T", x="value", y="component"), dataset)
    assert spec["layer"][0]["encoding"]["y"]["scale"]["domain"] == list(names)
    assert [row["colour"] for row in _rows(spec)] == [style.POSITIVE, style.NEGATIVE, style.POSITIVE]


def test_nothing_is_fetched_and_the_menu_is_hidden(circuit: dict[str, Any]) -> None:
    assert circuit["usermeta"]["embedOptions"] == {"renderer": "svg", "actions": False}
    text = json.dumps({key: value for key, value in circuit.items() if key != "$schema"})
    assert "http" not in text
