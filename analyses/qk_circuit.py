"""QK circuit: which characters, or places, every head matches.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated

import torch
import xarray as xr

from analyses.axes import labelled
from analyses.circuits import EmbeddingKnob, FoldKnob, ScaleKnob, ScaleText, Space, reading
from analyses.spec import Head, Knob, Layer, analysis
from analyses.views import HeadGrid, Heatmap
from models.hooked import vocabulary_of
from models.protocol import Model


@analysis(
    HeadGrid(title="All heads", x="key_char", y="query_char", colour="score", scale="diverging"),
    Heatmap(title="The chosen head", x="key_char", y="query_char", colour="score", scale="diverging", at=("layer", "head")),
    HeadGrid(title="All heads", x="key_position", y="query_position", colour="score", scale="diverging"),
    Heatmap(
        title="The chosen head", x="key_position", y="query_position", colour="score", scale="diverging", at=("layer", "head")
    ),
    group="Circuits",
)
def qk_circuit(
    model: Model,
    layer: Layer = 0,
    head: Head = 0,
    space: Annotated[Space, Knob("Between which embeddings")] = "char",
    fold: FoldKnob = "norm weights",
    embedding: EmbeddingKnob = "W_E",
    scale: ScaleKnob = "one",
    text: ScaleText = "KING RICHARD III:\nNow is the winter",
) -> xr.Dataset:
    """QK circuit: the score of every character for every other in every head, complete.

    For all V² pairs of characters (or T² pairs of positions),

        score = x_q W_Q W_Kᵀ x_kᵀ/√d_head,    x = (e − mean e)·w/s + b,

    with e the rows of W_E (or W_pos) and w, b, s the weight, bias and scale of the block's LayerNorm. `fold`: nothing,
    x = e/s; the mean and w; or these, b, b_Q and b_K. `embedding`: e alone; or, in blocks after the first, e and what the
    first MLP makes of it alone, e + MLP₀(LN₂(e)). `scale`: s is one, which is right up to a positive factor per query and
    per key; that of e itself; or the mean of what the block's LayerNorm really divides by on the text. In layers after the
    first this is the path from the embedding only, past everything between.

    Returns:
        `score` (layer, head, query_char, key_char) or (layer, head, query_position, key_position), 1, signed; `layer` and
        `head` choose which one is drawn large. The score is also x W_QK xᵀ by the d_model × d_model product, biases as one
        more row; `identity_error` is the largest difference of the two.

    Raises:
        KnobError: there is no such head, or the text cannot be read.
        UnsupportedModel: positions or norms of another kind; no MLP where one is asked for.
        VocabularyError: tokens that are not characters; there is no printable V × V circuit then.
    """
    if space == "char":
        vocabulary_of(model)  # a vocabulary that is not of characters is refused before V² numbers are made
    read = reading(model, fold, embedding, scale, text)
    scores = torch.stack([read.scores(number, space) for number in range(model.cfg.n_layers)])
    error = 0.0
    for number, block in enumerate(model.blocks):
        x = read.heads_read(number, space)
        product = x @ (read.weight(number, "Q") @ read.weight(number, "K").mT) @ x.mT / block.attn.attn_scale
        error = max(error, (product - scores[number]).abs().max().item())
    dataset = labelled(
        model,
        identity=("(x W_Q)(x W_K)ᵀ = x (W_Q W_Kᵀ) xᵀ", error),
        score=(scores, f"layer head query_{space} key_{space}", "attention score before the softmax", "1"),
    )
    dataset.attrs["folded"] = read.folded
    return dataset
