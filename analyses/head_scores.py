"""Head scores: what kind of place each head looks at.  Reference: Olsson et al. (2022); Voita et al. (2019)."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr

from analyses.axes import labelled
from analyses.over_corpus import kept
from analyses.scores import ERRORS, MARGIN, SHARE, HeadScores, finished, measured
from analyses.spec import analysis
from analyses.stream import require_blocks, require_standard
from analyses.texts import Texts, passage_batches, text_batches
from analyses.views import Heatmap, Table
from models import corpus, repeated
from models.hooked import vocabulary_of
from models.protocol import Model


@analysis(
    Heatmap(title="Attention above the baseline; written: attention", x="score", y="component", colour="excess", text="written",
            scale="diverging"),
    Table(title="What each head is", rows=("layer", "head"),
          columns=("verdict", "clearest", "clearest_value", "clearest_baseline", "clearest_error")),
    group="Attention",
)  # fmt: skip
def head_scores(model: Model, texts: Texts = "passage") -> xr.Dataset:
    """Head scores: what kind of place each head looks at, and whether position alone explains it.

    A score is the mean attention to all keys of a kind, over all queries that have one,

        score = Σ over queries q with a key of the kind, Σ over keys k ≤ q of the kind, A[q, k]  /  number of such queries.

    *Itself*, *previous character*, *two back* and *first position* are keys at a fixed place (query 0 is left out). *Start
    of word* is the first letter of the query's own word, *start of line* the first character of its line, each before the
    query. *Same character* is every earlier key with the query's character, *induction* every key that follows one.
    *Capital to capital* and its like are earlier keys of the query's class; vowels are the small a, e, i, o, u. *Repeats*
    are 64 random strings written again and again, with random periods of at least 10: *induction* there is attention to
    what followed the same place of earlier copies, which looking a fixed way back cannot give, *same place* to that place.

    The baseline is what the head would score without seeing what it is scored for. For a fixed place it is attention
    spread evenly over the past. For the starts of words and lines it is the same attention, scored by where these are in
    the next four windows. For what matches the query it is that, or the same attention scored with the characters that
    the next four windows have at the query, whichever is higher; on repeated strings, the next four strings' periods. The
    verdict names every score that exceeds its baseline by 5 standard errors over windows and by 0.2, and is at least 0.3;
    "–" where none does.

    `texts` is the built-in passage, or the validation split of the text that the model was trained on, all of it.

    Returns:
        `value`, `baseline` (score, layer, head), probability; `standard_error` (score, layer, head), over windows;
        `verdict` (layer, head); `queries` (score), how many were counted. `excess` (component, score): value − baseline,
        by the head's name; `written` (component, score): the value as a text, blank below 0.1. `clearest` (layer, head):
        the score that exceeds its baseline most, whether or not it clears it, and its `clearest_value`,
        `clearest_baseline` and `clearest_error`.

    Raises:
        PassageError: the model does not know the passage's characters; give its own text.
        CorpusError: there is no such text at hand.
        UnsupportedModel: the model has no blocks.
    """
    require_standard(model)
    require_blocks(model)
    scores = _scores(model, texts)
    layers, heads = scores.value.shape[1:]
    excess = scores.value - scores.baseline
    row = excess.argmax(0)  # layer head

    def clearest(values: torch.Tensor) -> torch.Tensor:
        return values.gather(0, row[None])[0]

    def by_name(values: torch.Tensor) -> torch.Tensor:
        return values.flatten(1).T

    each, one, named = "score layer head", "layer head", "component score"
    return labelled(
        model,
        names={"score": scores.names, "component": [f"L{layer}H{head}" for layer in range(layers) for head in range(heads)]},
        note=_note(model, scores),
        value=(scores.value, each, "attention to keys of the kind", "probability"),
        baseline=(scores.baseline, each, "attention to them by position alone", "probability"),
        standard_error=(scores.standard_error, each, "standard error over windows", "probability"),
        queries=(scores.queries, "score", "queries that have such a key", "1"),
        excess=(by_name(excess), named, "attention above the baseline", "probability"),
        written=(_written(by_name(scores.value)), named, "attention to keys of the kind, if at least 0.1", "character"),
        verdict=(scores.verdicts(), one, "verdict", "character"),
        clearest=(np.array(scores.names, dtype=object)[row.numpy()], one, "clearest score", "character"),
        clearest_value=(clearest(scores.value), one, "its value", "probability"),
        clearest_baseline=(clearest(scores.baseline), one, "its baseline", "probability"),
        clearest_error=(clearest(scores.standard_error), one, "its standard error", "probability"),
    )


def _scores(model: Model, texts: str) -> HeadScores:
    if texts == "passage":
        return finished(measured(model, passage_batches(model)))
    text = corpus.at_hand()
    ids = text.encoded("validation", vocabulary_of(model))
    batches = text_batches(model, ids, "Reading the validation split")
    return finished(kept(model, text, "head-scores-1", lambda: measured(model, batches)))


def _written(values: torch.Tensor) -> np.ndarray:
    """Hundredths without the nought, short enough for a cell."""
    texts = [f"{value:.2f}".removeprefix("0") if value >= 0.1 else "" for value in values.flatten().tolist()]
    return np.array(texts, dtype=object).reshape(tuple(values.shape))


def _note(model: Model, scores: HeadScores) -> str:
    sentences = [
        f"A verdict needs {ERRORS} standard errors and {MARGIN} above the baseline, and {SHARE} of the attention in all.",
    ]
    if scores.left_out:
        sentences.append(f"Found in fewer than two windows of this text and left out: {', '.join(scores.left_out)}.")
    if model.cfg.n_ctx < repeated.SHORTEST:
        sentences.append(
            f"This model reads {model.cfg.n_ctx} characters; repeated strings need {repeated.SHORTEST} and are left out."
        )
    return " ".join(sentences)
