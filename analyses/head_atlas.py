"""Head atlas: every head at a glance, what it looks at, what it moves, what the model loses without it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import torch
import xarray as xr

from analyses.ablation import ablation
from analyses.attention_patterns import attention_patterns
from analyses.axes import labelled
from analyses.copying import copying
from analyses.ov_circuit import ov_circuit
from analyses.passage import PassageError
from analyses.qk_circuit import qk_circuit
from analyses.scores import head_verdicts
from analyses.spec import Head, Knob, Layer, ScoredText, analysis
from analyses.stream import require_blocks, require_standard
from analyses.views import HeadGrid, Table
from models.hooked import encode
from models.protocol import Model


@analysis(
    Table(title="Every head", rows=("layer", "head"),
          columns=("verdict", "loss_increase", "copying_score", "entropy", "to_previous", "to_first")),
    HeadGrid(title="Where it looks in this text", x="key_position", y="query_position", colour="pattern", scale="probability"),
    HeadGrid(title="QK: which character it matches with which", x="key_char", y="query_char", colour="score", scale="diverging"),
    HeadGrid(title="OV: which logits a character raises when it is attended to", x="output_char", y="source_char",
             colour="logit", scale="diverging"),
    group="Attention",
)  # fmt: skip
def head_atlas(
    model: Model,
    text: ScoredText = "KING RICHARD III:\nNow is the winter",
    layer: Layer = 0,
    head: Head = 0,
    without: Annotated[Literal["zero", "mean"], Knob("What a head's output is replaced by when the loss is compared")] = "zero",
) -> xr.Dataset:
    """Head atlas: what every head looks at, what it moves, and what the model loses without it, on one page.

    Each column and each row of pictures is a page of its own, at its defaults: Attention patterns, QK circuit and OV circuit
    with the weights of the LayerNorms,

        A = softmax(QK scores),   score = e W_QK eᵀ/√d_head,   logit = e W_OV W_U,   copying = Σλ/Σ|λ|;

    the loss without the head is from Ablation, on this text; the verdict is that of Head scores, measured on the built-in
    passage, not on this text. Attention to the previous character and to the first one, and the entropy of the attention,
    are means over this text's queries, the first left out, which can only look at itself.

    Returns:
        `verdict` (layer, head); `loss_increase` (layer, head), nats; `copying_score` (layer, head), −1 to 1; `entropy`
        (layer, head), nats; `to_previous`, `to_first` (layer, head), probability; `pattern` (layer, head, query_position,
        key_position); `score` (layer, head, query_char, key_char); `logit` (layer, head, source_char, output_char).
        `identity_error` is the largest of the parts'.

    Raises:
        KnobError: the text cannot be read, or there is no such head.
        StatisticsError: `mean` is asked for, and there are no means of these weights.
        UnsupportedModel: the model has no blocks, or norms or positions of another kind.
        VocabularyError: tokens that are not characters.
    """
    require_standard(model)
    require_blocks(model)
    patterns = attention_patterns(model, text=text)
    parts = {
        "pattern": patterns,
        "score": qk_circuit(model, text=text),
        "logit": ov_circuit(model, text=text),
        "copying_score": copying(model),
        "loss_increase": ablation(model, text=text, method=without),
    }
    variables: dict[str, Any] = {name: _again(result[name]) for name, result in parts.items()}
    verdicts, note = _verdicts(model)
    variables["verdict"] = (verdicts, "layer head", "what it looks for (on the built-in passage)", "character")
    pattern = torch.as_tensor(patterns.pattern.values)[:, :, 1:]  # without the query that has no choice
    one, share = "layer head", "probability"
    variables |= {
        "entropy": (-torch.xlogy(pattern, pattern).sum(-1).mean(-1), one, "mean entropy of its attention", "nats"),
        "to_previous": (pattern.diagonal(dim1=-2, dim2=-1).mean(-1), one, "attention to the previous character", share),
        "to_first": (pattern[..., 0].mean(-1), one, "attention to the first character", share),
    }
    errors = [result.attrs["identity_error"] for result in parts.values() if "identity_error" in result.attrs]
    identity = ("the identities of the pages that this one sums up", max(errors))
    return labelled(model, encode(model, text), identity=identity, note=note, **variables)


def _again(variable: xr.DataArray) -> tuple[Any, str, str, str]:
    """A result's variable, to be labelled in another result."""
    return variable.values, " ".join(map(str, variable.dims)), variable.attrs["long_name"], variable.attrs["units"]


def _verdicts(model: Model) -> tuple[np.ndarray, str | None]:
    """What Head scores says; "not measured" and the reason for a model that cannot read the passage."""
    try:
        return head_verdicts(model), None
    except PassageError as error:
        return np.full((model.cfg.n_layers, model.cfg.n_heads), "not measured", dtype=object), f"There are no verdicts: {error}."
