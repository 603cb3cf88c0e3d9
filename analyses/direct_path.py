"""The direct path: the bigram model inside every transformer, beside the corpus' own.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from analyses.axes import labelled
from analyses.circuits import EmbeddingKnob, FoldKnob, Reading, ScaleKnob, ScaleText, read, reading
from analyses.spec import Knob, analysis
from analyses.stream import final_norm
from analyses.views import Heatmap, Table
from models.hooked import vocabulary_of
from models.protocol import Model

Beside = Literal["corpus", "training mix"]

NO_COUNTS = (
    "This model has no corpus counts beside it, so there is nothing to compare with; measure them with "
    "`workbench card CHECKPOINT --data TEXT`."
)


@analysis(
    Heatmap(title="Logits of the direct path", x="output_char", y="source_char", colour="logit", scale="diverging"),
    Heatmap(title="Its prediction", x="output_char", y="source_char", colour="chance", scale="probability"),
    Heatmap(title="What really follows", x="output_char", y="source_char", colour="bigram", scale="probability"),
    Table(
        title="Divergence from what really follows", rows=("source_char",),
        columns=("unigram", "kl", "kl_unigram", "kl_uniform"),
    ),
    group="Circuits",
)  # fmt: skip
def direct_path(
    model: Model,
    fold: FoldKnob = "norm weights and biases",
    embedding: EmbeddingKnob = "W_E",
    place: Annotated[Literal["none", "mean of W_pos"], Knob("What is added for the position")] = "mean of W_pos",
    beside: Annotated[
        Beside, Knob("Counts to compare with: the corpus alone, or with the random strings of its recipe")
    ] = "corpus",
    scale: ScaleKnob = "of each embedding",
    text: ScaleText = "KING RICHARD III:\nNow is the winter",
) -> xr.Dataset:
    """Direct path: what the model predicts from a character alone, past all heads, and what really follows it.

    For all V² pairs,

        logit = ((e − mean e)·w/s + b) W_U + b_U,

    with e the rows of W_E and w, b, s of the final LayerNorm: all that a model without blocks does, but for which place it
    is at. `fold`: nothing, e/s W_U; the mean and w; or these, b and b_U. `embedding`: e alone; or e and what the first MLP
    makes of it alone, e + MLP₀(LN₂(e)). `place`: to each of these the mean row of W_pos is added, which is one more bias;
    or nothing. `scale`: s is one; that of the vector read; or the mean of what the final norm really divides by on the
    text, where blocks have made the stream longer.

    Beside it the counts n of the training split. A recipe may mix random strings in, a share r of all; their pairs are
    evenly spread, and with the training mix n is (1 − r)·n + r·N/V², N the sum. With one more imagined character, spread
    evenly, no probability is zero, and a character that never occurred is followed by anything:

        bigram(output | source) = (n(source, output) + 1/V)/(n(source) + 1).

    KL(bigram ‖ prediction) is given for three predictions: the direct path, the unigram (how often each character comes,
    smoothed likewise) and the uniform one.

    Returns:
        `logit` (source_char, output_char), logits; `logprob`, its log-softmax, nats, and `chance`, the same as probability.
        With corpus counts also `bigram_logprob`, nats, and `bigram`, probability (source_char, output_char); `unigram`
        (source_char), probability of the character itself; `kl`, `kl_unigram`, `kl_uniform` (source_char), nats; `mean_kl`
        and so on, their means over what is counted; `bigram_entropy`, nats, which with `mean_kl` is the direct path's loss;
        and `correlation` of the two log-probabilities over all pairs, where both vary. The logit is also e times the
        product C·diag(w)·W_U/s, C the centring; `identity_error` is the largest difference of the two, where anything is
        folded in.

    Raises:
        KnobError: the scale is to be frozen on a text that cannot be read.
        UnsupportedModel: norms of another kind; no MLP where one is asked for.
        VocabularyError: tokens that are not characters; there is no printable V × V circuit then.
    """
    vocabulary_of(model)  # a vocabulary that is not of characters is refused before V² numbers are made
    how = reading(model, fold, embedding, scale, text)
    e = how.embeddings(None)
    if place != "none":
        e = e + model.pos_embed.W_pos.mean(0)  # type: ignore[attr-defined]
    logits = how.direct(e)
    logprob = logits.log_softmax(-1)
    pair = "source_char output_char"
    folded = how.folded + (", mean position" if place != "none" else "")  # not of the corpus, so not in every title
    variables: dict[str, Any] = {
        "logit": (logits, pair, f"logit of the direct path ({folded})", "logits"),
        "logprob": (logprob, pair, f"log-probability by the direct path ({folded})", "nats"),
        "chance": (logprob.exp(), pair, f"probability by the direct path ({folded})", "probability"),
    }
    counts, note = bigram_counts(model, beside), NO_COUNTS
    if counts is not None:
        compared = _compared(logprob, counts)
        variables |= compared
        means = [float(compared[f"mean_{name}"][0]) for name in ("kl", "kl_unigram", "kl_uniform")]
        note = (
            "Mean divergence from what really follows: {:.3f} nats for the direct path, {:.3f} for the unigram, {:.3f} for "
            "equal chances.".format(*means)
        )
    error = (_multiplied_first(how, e) - logits).abs().max().item()
    identity = ("((e − mean e)·w/s + b) W_U = e (C·diag(w)·W_U)/s + b W_U", error) if fold != "nothing" else None
    return labelled(model, identity=identity, note=note, **variables)


def bigram_counts(model: Model, beside: Beside) -> Float[Tensor, "source output"] | None:
    """How often each character follows each in training, if that lies beside the model. No weight is in it."""
    origin: Any = getattr(model, "checkpoint", None)
    counts = origin.statistics.get("bigram") if origin is not None else None
    if counts is None or origin.vocabulary != vocabulary_of(model):
        return None
    counts = counts.double()
    share = origin.recipe.repeated if beside == "training mix" and origin.recipe is not None else 0.0
    return (1 - share) * counts + share * counts.mean()


def smoothed(counts: Float[Tensor, "*batch char"]) -> Float[Tensor, "*batch char"]:
    """Counts as log-probabilities, with one more observation spread evenly over all characters."""
    return ((counts + 1 / counts.shape[-1]) / (counts.sum(-1, keepdim=True) + 1)).log()


def _compared(logprob: Float[Tensor, "source output"], counts: Float[Tensor, "source output"]) -> dict[str, Any]:
    """Everything that the counts say about a prediction, as variables."""
    logprob, pair = logprob.double().cpu(), "source_char output_char"
    bigram, occurs = smoothed(counts), counts.sum(1)
    weights = occurs / occurs.sum()
    entropy = (weights * -(bigram.exp() * bigram).sum(-1)).sum()
    predictions = {"kl": logprob, "kl_unigram": smoothed(counts.sum(0)), "kl_uniform": smoothed(torch.zeros_like(occurs))}
    variables: dict[str, Any] = {
        "bigram_logprob": (bigram, pair, "log-probability by the counts", "nats"),
        "bigram": (bigram.exp(), pair, "probability by the counts", "probability"),
        "unigram": (weights, "source_char", "how often", "probability"),
        "bigram_entropy": (entropy, "", "entropy of what follows", "nats"),
    }
    for name, of in (("kl", "direct path"), ("kl_unigram", "unigram"), ("kl_uniform", "equal chances")):
        divergence = (bigram.exp() * (bigram - predictions[name])).sum(-1).clamp(min=0)  # below 0 by rounding only
        variables[name] = (divergence, "source_char", f"KL to {of}", "nats")
        variables[f"mean_{name}"] = ((weights * divergence).sum(), "", f"mean KL to {of}", "nats")
    both = torch.stack([logprob.flatten(), bigram.flatten()])
    if (both.std(-1) > 1e-6).all():
        variables["correlation"] = (torch.corrcoef(both)[0, 1], "", "correlation of the two log-probabilities", "1")
    return variables


def _multiplied_first(how: Reading, e: Float[Tensor, "source d_model"]) -> Float[Tensor, "source output"]:
    """The direct path with norm and unembedding multiplied out before they meet an embedding."""
    norm, W_U = final_norm(how.model), how.model.unembed.W_U
    unit = torch.eye(e.shape[1], dtype=e.dtype, device=e.device)
    matrix = read(norm, unit, "nothing" if how.fold == "nothing" else "norm weights") @ W_U
    constant = norm.bias @ W_U + how.model.unembed.b_U if how.biases else 0.0
    return e @ matrix / how.scale_of(norm, e, None) + constant
