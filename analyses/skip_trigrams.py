"""Skip-trigrams: what a head has learned as 'source … destination → output'.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from analyses.axes import labelled
from analyses.circuits import EmbeddingKnob, FoldKnob, Reading, ScaleKnob, ScaleText, reading
from analyses.over_corpus import corpus_ids, kept
from analyses.progress import track
from analyses.spec import Allowed, Head, Knob, KnobError, Layer, analysis
from analyses.stream import UnsupportedModel, require_blocks
from analyses.views import Table
from models import corpus
from models.corpus import CorpusError
from models.hooked import vocabulary_of
from models.protocol import Model
from models.vocabulary import VocabularyError

MOST_CHARACTERS = 256  # whose cube is still held in memory several times over


def _from_zero(model: Model, _: Mapping[str, Any], value: int) -> None:
    if value < 0:
        raise ValueError(f"got {value}; give 0 for all triples, or a number of occurrences")


def _ranks(model: Model, _: Mapping[str, Any]) -> Allowed:
    number = len(vocabulary_of(model)) ** 3
    return Allowed(range(1, number + 1), f"the {number:,} triples of characters")


@analysis(
    Table(
        title="Strongest skip-trigrams", rows=("index",),
        columns=("source", "destination", "output", "strength", "attention", "logit"),
    ),
    Table(
        title="The same in the corpus", rows=("index",),
        columns=("source", "destination", "output", "strength", "count", "expected", "lift"),
    ),
    group="Circuits",
)  # fmt: skip
def skip_trigrams(
    model: Model,
    layer: Layer = 0,
    head: Head = 0,
    order: Annotated[Literal["promoted", "suppressed"], Knob("Outputs that become likelier, or less likely")] = "promoted",
    top: Annotated[int, Knob("How many to list", allowed=_ranks)] = 40,
    least: Annotated[int, Knob("List only those that the corpus has at least so often", check=_from_zero)] = 0,
    fold: FoldKnob = "norm weights and biases",
    embedding: EmbeddingKnob = "W_E",
    scale: ScaleKnob = "frozen on a text",
    text: ScaleText = "KING RICHARD III:\nNow is the winter",
) -> xr.Dataset:
    """Skip-trigrams: all that one head does with characters alone, as 'source … destination → output', the strongest first.

    At a destination d the head attends to a source s before it, and that moves the logit of every output o. For all V³,

        strength = A(s | d) · (OV[s, o] − mean over outputs of OV[s, ·]),    A(s | d) = softmax over sources of QK[d, s],

    with QK and OV those of the pages of that name and A the attention if every character stood in the past once. The mean
    is taken off because a shift of all logits predicts nothing. `fold`, `embedding` and `scale` are as there. In layers
    after the first, and where heads look at places, this is a part of what the head does.

    Where a corpus is at hand, every triple is counted in all of it: the places p with destination at p, output at p + 1,
    and source anywhere among the T − 1 characters before p. Were the source of no concern, count would be

        expected = count(source … destination) · count(destination, output)/count(destination),

    and the lift, (count + 1)/(expected + 1), would be one: with one added to both, rare triples stay near one.
    The strongest of all are often of characters that never meet; `least` leaves them out.

    Returns:
        Over `index`, from the strongest: `source`, `destination`, `output`, characters; `strength` and `logit`, the second
        factor, logits; `attention`, probability. With a corpus also `count`, `expected` and `lift`, 1. Over all sources the
        strengths at a destination add up to what the head adds to the logits when it mixes values by A; `identity_error`
        is the largest difference of the two.

    Raises:
        KnobError: there is no such head, the text cannot be read, more are asked for than there are, or none of the triples
            stands in the corpus so often.
        CorpusError: only triples of the corpus are asked for, and there is none at hand.
        UnsupportedModel: positions or norms of another kind; no MLP where one is asked for; more than 256 characters.
        VocabularyError: tokens that are not characters.
    """
    require_blocks(model)
    characters = np.array(vocabulary_of(model).characters, dtype=object)
    if len(characters) > MOST_CHARACTERS:
        raise UnsupportedModel(
            f"this model has {len(characters)} characters, too many for all triples; give one with at most 256"
        )
    read = reading(model, fold, embedding, scale, text)
    attention, logits = factors(read, layer, head)
    strength = torch.einsum("ds,so->sdo", attention, logits)
    mixed = attention @ read.values(layer)[head] @ model.blocks[layer].attn.W_O[head]
    whole = read.head_logits(mixed)
    error = (strength.sum(0) - (whole - whole.mean(-1, keepdim=True))).abs().max().item()
    # Equal ones are in the order of the characters.
    ranked = strength.flatten().sort(descending=order == "promoted", stable=True).indices.cpu().numpy()
    found, note = None, None
    try:
        found = _counts(model)
    except (CorpusError, VocabularyError) as error_of_text:
        if least:
            raise
        note = f"The triples are not counted in a corpus: {error_of_text}."
    if found is not None and least:
        ranked = ranked[found["triples"].ravel()[ranked] >= least]
        if not len(ranked):
            raise KnobError(f"least {least}: no triple is so frequent; give at most {found['triples'].max():,}")
    places = np.unravel_index(ranked[:top], tuple(strength.shape))
    s, d, o = places
    variables: dict[str, Any] = {
        "source": (characters[s], "index", "source", "character"),
        "destination": (characters[d], "index", "destination", "character"),
        "output": (characters[o], "index", "output", "character"),
        "strength": (strength[s, d, o], "index", "strength", "logits"),
        "attention": (attention[d, s], "index", "attention to the source", "probability"),
        "logit": (logits[s, o], "index", "logit by full attention", "logits"),
    }
    if found is not None:
        variables |= _in_corpus(found, places)
    identity = ("Σ over sources = what the head adds when it mixes values by A", error)
    dataset = labelled(model, identity=identity, note=note, **variables)
    dataset.attrs["folded"] = read.folded
    return dataset


def factors(read: Reading, layer: int, head: int) -> tuple[Float[Tensor, "destination source"], Float[Tensor, "source output"]]:
    """A head's attention if every character stood in the past once, and its OV logits less their mean over outputs."""
    logits = read.logits(layer)[head]
    return read.scores(layer)[head].softmax(-1), logits - logits.mean(-1, keepdim=True)


# --- counts ----------------------------------------------------------------------------------------------------------


def _counts(model: Model) -> dict[str, np.ndarray]:
    """All triples and pairs of the text at hand, kept on disk once counted: `triples` and `bigram`."""
    text, T, V = corpus.at_hand(), model.cfg.n_ctx, model.cfg.d_vocab

    def compute() -> dict[str, Tensor]:
        ids = corpus_ids(model, text)
        bigram = np.bincount(ids[:-1] * V + ids[1:], minlength=V * V).reshape(V, V)
        return {"triples": torch.from_numpy(triple_counts(ids, V, T)), "bigram": torch.from_numpy(bigram)}

    return {name: tensor.numpy() for name, tensor in kept(model, text, f"skip-trigrams-{T}-1", compute).items()}


def _in_corpus(found: dict[str, np.ndarray], places: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """Counts of the listed triples, and what chance would give."""
    s, d, o = places
    count, bigram = found["triples"][s, d, o], found["bigram"]
    share = bigram[d, o] / np.maximum(bigram[d].sum(-1), 1)  # 0 where the destination never stands before anything
    expected = found["triples"].sum(-1)[s, d] * share
    return {
        "count": (count, "index", "count", "1"),
        "expected": (expected, "index", "expected count", "1"),
        "lift": ((count + 1) / (expected + 1), "index", "lift", "1"),
    }


def triple_counts(ids: np.ndarray, V: int, T: int) -> np.ndarray:
    """How often destination and output follow each other with a source in the T − 1 characters before them.

    Args:
        ids: the text, (position,).

    Returns:
        (source, destination, output), int64: of every triple, the number of positions p of the text with ids[p] =
        destination, ids[p + 1] = output, and source among ids[max(0, p − T + 1)], …, ids[p − 1].
    """
    pairs = ids[:-1] * V + ids[1:]
    here = np.arange(len(pairs))
    counts = np.empty((V, V * V), dtype=np.int64)
    for source in track(range(V), V, "Counting skip-trigrams in the corpus"):
        last = np.full(len(ids), -T)  # where the source stood last before each position
        at = np.flatnonzero(ids[:-1] == source)
        last[at + 1] = at
        last = np.maximum.accumulate(last)[:-1]
        counts[source] = np.bincount(pairs[here - last < T], minlength=V * V)
    return counts.reshape(V, V, V)
