"""OV circuit: what a head does to the prediction when it attends to a character.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated

import xarray as xr

from analyses.axes import labelled
from analyses.circuits import Fold, ov_logits, ov_products, read
from analyses.spec import Head, Knob, Layer, analysis
from analyses.stream import final_norm, norm_of, require_standard
from analyses.views import Heatmap
from models.hooked import vocabulary_of
from models.protocol import Model


@analysis(
    Heatmap(title="What attending to a character does to every logit", x="output_char", y="source_char", colour="logit",
            scale="diverging"),
    group="Circuits",
)  # fmt: skip
def ov_circuit(
    model: Model,
    layer: Layer = 0,
    head: Head = 0,
    fold: Annotated[Fold, Knob("What of the LayerNorms and the biases is multiplied in")] = "norm weights",
) -> xr.Dataset:
    """OV circuit: what attending to each character does to the logit of every next character, complete.

    For all V² pairs,

        logit = e_source W_V W_O W_U,

    with e the rows of W_E. `fold` says what stands between: nothing; the weights of the block's LayerNorm on the way in
    and of the final one on the way out, x → (x − mean x)·w; or those and the biases of the first, and b_V. Both scales
    are left at one, so a row is right up to a positive factor. A positive diagonal copies.

    Returns:
        `logit` (source_char, output_char), logits, signed. Without biases it is also e W_OV W_U by the
        d_model × d_model product; `identity_error` is the largest difference of the two.

    Raises:
        KnobError: there is no such head.
        UnsupportedModel: norms of another kind.
        VocabularyError: tokens that are not characters; there is no printable V × V circuit then.
    """
    require_standard(model)
    vocabulary_of(model)  # a vocabulary that is not of characters is refused before V² numbers are made
    embeddings = model.embed.W_E  # type: ignore[attr-defined]
    logits = ov_logits(model, layer, head, embeddings, fold)
    identity = None
    if fold != "norm weights and biases":
        x = read(norm_of(model, model.blocks[layer].ln1), embeddings, fold)
        product = read(final_norm(model), x @ ov_products(model)[layer, head], fold) @ model.unembed.W_U
        identity = ("((e W_V) W_O) W_U = e (W_V W_O) W_U", (product - logits).abs().max().item())
    return labelled(
        model,
        identity=identity,
        logit=(logits, "source_char output_char", "logit added by attending to the source", "logits"),
    )
