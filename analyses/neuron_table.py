"""Neuron table: all neurons of an MLP side by side, to choose one from.  Reference: Gurnee et al. (2023)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from analyses.axes import labelled
from analyses.neuron_statistics import NeuronStatistics, direct_effects, neuron_statistics
from analyses.ngrams import ngram_text
from analyses.spec import Knob, Layer, analysis
from analyses.stream import require_blocks, require_mlps
from analyses.views import Scatter, Table
from models.corpus import at_hand
from models.hooked import vocabulary_of
from models.protocol import Model
from models.vocabulary import Vocabulary

Sort = Literal["explained by two", "explained by one", "maximum", "fraction active"]


@analysis(
    Table(title="All neurons of the layer", rows=("neuron",),
          columns=("best_one", "best_two", "explained_by_one", "explained_by_two", "fraction_active", "mean", "maximum",
                   "promoted", "suppressed")),
    Scatter(title="Active, and explained by two characters",
            x="fraction_active", y="explained_by_two", over="neuron"),
    group="Neurons",
)  # fmt: skip
def neuron_table(
    model: Model,
    layer: Layer = 0,
    sort: Annotated[Sort, Knob("What the rows are in order of, the highest first")] = "explained by two",
) -> xr.Dataset:
    """Neuron table: what every neuron of an MLP responds to and promotes, over the whole corpus.

    How far a neuron is one of the last character, or of the last two, is the share of its variance that they explain:

        explained = 1 − [within/(N − G)] / [total/(N − 1)],

    with `within` the squared distances from the mean of each of the G n-grams that occur, over the N places that have
    so many characters in their window, and `total` those from the mean of all: 1 if the n-gram determines the
    activation, about 0 if it says nothing. It is R², adjusted for the number of n-grams.

    Returns:
        Per neuron, in the order of `sort`: `best_one` and `best_two`, the character and the pair, ending at the
        character that is read, with the highest mean activation (of those that occur 20 times or more);
        `explained_by_one` and `explained_by_two`, at most 1; `fraction_active`, the share of places where it is above 0;
        `mean` and `maximum`; `promoted` and `suppressed`, the characters whose logit it raises and lowers most, as
        in `neurons`. A neuron that never varies is left out and named in a note.

    Raises:
        KnobError: there is no such layer.
        UnsupportedModel: the model has no MLP.
        CorpusError: there is no text at hand.
    """
    require_blocks(model)
    require_mlps(model)
    corpus = at_hand()
    found, vocabulary = neuron_statistics(model, corpus), vocabulary_of(model)
    columns = _numbers(found, layer)
    varies = columns["explained by one"].isfinite() & columns["explained by two"].isfinite()
    kept = varies.nonzero()[:, 0]
    kept = kept[columns[sort][kept].argsort(descending=True, stable=True)]
    note = f"Over {corpus.name}: {int(found.positions):,} characters in windows of {model.cfg.n_ctx}."
    if not varies.all():
        note += f" Left out, since they never vary: {', '.join(map(str, (~varies).nonzero()[:, 0].tolist()))}."
    return labelled(
        model,
        names={"neuron": kept.tolist()},
        note=note,
        **_characters(model, found, vocabulary, layer, kept),
        explained_by_one=(columns["explained by one"][kept], "neuron", "explained by one character", "1"),
        explained_by_two=(columns["explained by two"][kept], "neuron", "explained by two", "1"),
        fraction_active=(columns["fraction active"][kept], "neuron", "fraction active", "1"),
        mean=(found.mean(layer)[kept], "neuron", "mean", "1"),
        maximum=(columns["maximum"][kept], "neuron", "maximum", "1"),
    )


def _numbers(found: NeuronStatistics, layer: int) -> dict[str, Tensor]:
    """What the rows can be in order of."""
    return {
        "explained by one": found.explained(layer, 1),
        "explained by two": found.explained(layer, 2),
        "maximum": found.top_activation[layer, :, 0],
        "fraction active": found.active[layer].double() / found.positions,
    }


def _characters(
    model: Model, found: NeuronStatistics, vocabulary: Vocabulary, layer: int, kept: Int[Tensor, "neuron"]
) -> dict[str, Any]:
    columns = {}
    for order, name in ((1, "one"), (2, "two")):
        rows = found.often(order)
        best = rows[found.ngram_means(layer, rows)[:, kept].argmax(0)]
        texts = [ngram_text(code, vocabulary) for code in found.ngram[best].tolist()]
        columns[f"best_{name}"] = (texts, f"highest mean after {name}")
    effect = direct_effects(model, layer)[kept]
    for name, end in (("promoted", effect.argmax(-1)), ("suppressed", effect.argmin(-1))):
        columns[name] = ([vocabulary.characters[number] for number in end.tolist()], f"most {name}")
    return {name: (np.array(texts, dtype=object), "neuron", title, "character") for name, (texts, title) in columns.items()}
