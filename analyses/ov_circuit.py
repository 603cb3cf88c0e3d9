"""OV circuit: what a head does to the prediction when it attends to a character.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

import torch
import xarray as xr

from analyses.axes import labelled
from analyses.circuits import EmbeddingKnob, FoldKnob, ScaleKnob, ScaleText, reading
from analyses.spec import Head, Layer, analysis
from analyses.views import HeadGrid, Heatmap
from models.hooked import vocabulary_of
from models.protocol import Model


@analysis(
    HeadGrid(title="All heads", x="output_char", y="source_char", colour="logit", scale="diverging"),
    Heatmap(title="The chosen head", x="output_char", y="source_char", colour="logit", scale="diverging", at=("layer", "head")),
    group="Circuits",
)
def ov_circuit(
    model: Model,
    layer: Layer = 0,
    head: Head = 0,
    fold: FoldKnob = "norm weights",
    embedding: EmbeddingKnob = "W_E",
    scale: ScaleKnob = "one",
    text: ScaleText = "KING RICHARD III:\nNow is the winter",
) -> xr.Dataset:
    """OV circuit: what attending to each character does to the logit of every next character in every head, complete.

    For all V² pairs,

        logit = N(x_source W_V W_O) W_U,    x = (e − mean e)·w/s + b,    N(y) = (y − mean y)·w_f/s_f,

    with e the rows of W_E; w, b, s of the block's LayerNorm and w_f, s_f of the final one. `fold`: nothing, x = e/s and
    N(y) = y/s_f; the means, w and w_f; or these, b and b_V (the final norm's bias, b_O and b_U are no head's own).
    `embedding`: e alone; or, in blocks after the first, e and what the first MLP makes of it alone, e + MLP₀(LN₂(e)).
    `scale`: s and s_f are one, which is right up to a positive factor per row; s is that of e itself and s_f is one; or
    both are the mean of what the two norms really divide by on the text. A positive diagonal copies.

    Returns:
        `logit` (layer, head, source_char, output_char), logits, signed; `layer` and `head` choose which one is drawn
        large. It is also N(x W_OV) W_U by the d_model × d_model product, b_V as one more row; `identity_error` is the
        largest difference of the two.

    Raises:
        KnobError: there is no such head, or the text cannot be read.
        UnsupportedModel: norms of another kind; no MLP where one is asked for.
        VocabularyError: tokens that are not characters; there is no printable V × V circuit then.
    """
    vocabulary_of(model)  # a vocabulary that is not of characters is refused before V² numbers are made
    read = reading(model, fold, embedding, scale, text)
    logits = torch.stack([read.logits(number) for number in range(model.cfg.n_layers)])
    error = 0.0
    for number, block in enumerate(model.blocks):
        product = read.head_logits(read.heads_read(number) @ (read.weight(number, "V") @ block.attn.W_O))
        error = max(error, (product - logits[number]).abs().max().item())
    dataset = labelled(
        model,
        identity=("N((x W_V) W_O) W_U = N(x (W_V W_O)) W_U", error),
        logit=(logits, "layer head source_char output_char", "logit added by attending to the source", "logits"),
    )
    dataset.attrs["folded"] = read.folded
    return dataset
