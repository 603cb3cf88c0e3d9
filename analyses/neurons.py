"""Neurons: one hidden unit of an MLP, over the whole corpus.  Reference: Geva et al. (2021); Bills et al. (2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from analyses.axes import labelled
from analyses.neuron_statistics import BELOW, TOP, NeuronStatistics, direct_effects, neuron_statistics
from analyses.ngrams import ngram_text
from analyses.spec import Allowed, Knob, Layer, Neuron, analysis
from analyses.stream import require_blocks, require_mlps
from analyses.views import Bars, Lines, Table
from models.corpus import Corpus, at_hand
from models.hooked import vocabulary_of
from models.protocol import Model
from models.vocabulary import Vocabulary

BEFORE = 30  # characters of text shown, the one being read among them
LISTED = 10  # n-grams per length, and characters at either end


def _shown(model: Model, _: Mapping[str, Any]) -> Allowed:
    return Allowed(range(1, TOP + 1), f"the {TOP} places that are kept")


@analysis(
    Table(title="Where it is most active in the corpus", rows=("index",),
          columns=("text", "following", "activation", "place")),
    Bars(title="Characters that it promotes and suppresses · final norm's weights", x="strongest_effect", y="output_char"),
    Table(title="What it responds to", rows=("context",), columns=("length", "mean_activation", "occurrences")),
    Lines(title="Histogram of its activation", x="bin", y="log_count"),
    group="Neurons",
)  # fmt: skip
def neurons(
    model: Model,
    layer: Layer = 0,
    neuron: Neuron = 0,
    top: Annotated[int, Knob("Places shown, most active first", allowed=_shown)] = 10,
) -> xr.Dataset:
    """Neurons: where one neuron of an MLP is active in the whole corpus, and what it then does to the prediction.

    Its activation, after the nonlinearity, is taken at every place of the corpus, in consecutive windows of n_ctx
    characters. Listed are the highest of them all; the characters and pairs and triples of characters after which it is
    highest on average; and a histogram. What it writes is its row of W_out times the activation: with the final
    LayerNorm's weight w, and its scale left at one, each unit of activation adds

        ((W_out[n] − mean W_out[n]) · w) W_U, less its mean over the characters,

    to the logits, on the direct way.

    Returns:
        `activation`, `text`, `following` and `place` (index): the highest activations, the text up to there with the
        character that is read in ⟨ ⟩, the character after it, and where in the corpus. `mean_activation`,
        `occurrences` and `length` (context): per length 1, 2, 3 the ten n-grams, ending at the character that is read,
        with the highest mean among those that occur 20 times or more. `effect` (char), logits per unit of activation, and
        `strongest_effect` (output_char), its two ends. `count` (bin), exact, and `log_count`, log₁₀(1 + count); a bin
        is named by its middle. `fraction_active`, the share of places where it is above 0, and `mean`. The places
        shown are computed anew from their windows: `identity_error`.

    Raises:
        KnobError: there is no such neuron.
        UnsupportedModel: the model has no MLP.
        CorpusError: there is no text at hand.
    """
    require_blocks(model)
    require_mlps(model)
    corpus = at_hand()
    found, vocabulary = neuron_statistics(model, corpus), vocabulary_of(model)
    activation, place = (values[layer, neuron, :top] for values in (found.top_activation, found.top_place))
    anew = _activations(model, corpus, f"blocks.{layer}.mlp.hook_post", neuron, place)
    histogram, names = _histogram(found, layer, neuron)
    ngrams, context = _ngrams(found, vocabulary, layer, neuron)
    effect, strongest = _effect(model, layer, neuron)
    return labelled(
        model,
        names={"context": context, "bin": names, "output_char": [vocabulary.characters[number] for number in strongest]},
        identity=("highest activations = the same in a fresh pass", (activation - anew).abs().max().item()),
        note=f"Over {corpus.name}: {int(found.positions):,} characters in windows of {model.cfg.n_ctx}.",
        **_places(corpus, model.cfg.n_ctx, activation, place),
        **ngrams,
        **histogram,
        effect=(effect, "char", "logit added per unit of activation", "logits"),
        strongest_effect=(effect[strongest], "output_char", "logit added per unit of activation", "logits"),
        fraction_active=(found.active[layer, neuron].double() / found.positions, "", "share of places where it is above 0", "1"),
        mean=(found.mean(layer)[neuron], "", "mean activation", "1"),
    )


def _activations(model: Model, corpus: Corpus, site: str, neuron: int, place: Int[Tensor, "index"]) -> Float[Tensor, "index"]:
    """The neuron at places of the corpus, from a fresh pass over their windows."""
    T, vocabulary = model.cfg.n_ctx, vocabulary_of(model)
    starts = [number // T * T for number in place.tolist()]
    batch = torch.from_numpy(np.stack([vocabulary.encode(corpus.text[start : start + T]) for start in starts]))
    _, cache = model.run_with_cache(batch.to(model.cfg.device), names_filter=site)
    return cache[site][torch.arange(len(place)), place % T, neuron].cpu()


def _places(corpus: Corpus, n_ctx: int, activation: Float[Tensor, "index"], place: Int[Tensor, "index"]) -> dict[str, Any]:
    texts, following = [], []
    for number in place.tolist():
        start = max(number // n_ctx * n_ctx, number - BEFORE + 1)
        texts.append(f"{corpus.text[start:number]}⟨{corpus.text[number]}⟩")
        following.append(corpus.text[number + 1])
    return {
        "activation": (activation, "index", "activation", "1"),
        "text": (np.array(texts, dtype=object), "index", "text up to the ⟨character read⟩", "character"),
        "following": (np.array(following, dtype=object), "index", "next character", "character"),
        "place": (place, "index", "place in the corpus", "1"),
    }


def _ngrams(found: NeuronStatistics, vocabulary: Vocabulary, layer: int, neuron: int) -> tuple[dict[str, Any], list[str]]:
    """The n-grams of each length with the highest mean activation."""
    listed = []
    for order in found.order.unique().tolist():
        rows = found.often(order)
        means = found.ngram_means(layer, rows)[:, neuron]
        listed.append(rows[means.topk(min(LISTED, len(rows))).indices])
    rows = torch.cat(listed)
    variables: dict[str, Any] = {
        "length": (found.order[rows], "context", "characters", "1"),
        "mean_activation": (found.ngram_means(layer, rows)[:, neuron], "context", "mean activation", "1"),
        "occurrences": (found.count[rows], "context", "occurrences", "1"),
    }
    return variables, [ngram_text(code, vocabulary) for code in found.ngram[rows].tolist()]


def _histogram(found: NeuronStatistics, layer: int, neuron: int) -> tuple[dict[str, Any], list[float]]:
    """Counts between the lowest and the highest bin that hold something, and the bins' middles."""
    count, width = found.histogram[layer, neuron], found.width[layer, neuron].item()
    held = count.nonzero()[:, 0]
    bins = range(int(held[0]), int(held[-1]) + 1)
    count = count[bins.start : bins.stop]
    variables: dict[str, Any] = {
        "count": (count, "bin", "places in this bin", "1"),
        "log_count": ((1 + count).log10(), "bin", "log₁₀(1 + places in this bin)", "1"),
    }
    return variables, [(number - BELOW + 0.5) * width for number in bins]


def _effect(model: Model, layer: int, neuron: int) -> tuple[Float[Tensor, "char"], list[int]]:
    """Logits per unit of activation, and the characters at both ends, the most promoted first."""
    effect = direct_effects(model, layer)[neuron]
    ranked, ends = effect.argsort(descending=True).tolist(), min(LISTED, len(effect) // 2)
    return effect, ranked[:ends] + ranked[-ends:]
