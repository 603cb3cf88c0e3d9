"""QK circuit: which characters, or places, a head matches.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated, Literal

import xarray as xr

from analyses.axes import labelled
from analyses.circuits import Fold, qk_products, qk_scores, read
from analyses.spec import Head, Knob, Layer, analysis
from analyses.stream import norm_of, require_standard
from analyses.views import Heatmap
from models.hooked import vocabulary_of
from models.protocol import Model


@analysis(
    Heatmap(title="Score of every query character for every key character", x="key_char", y="query_char", colour="score",
            scale="diverging"),
    Heatmap(title="Score of every query position for every key position", x="key_position", y="query_position",
            colour="score", scale="diverging"),
    group="Circuits",
)  # fmt: skip
def qk_circuit(
    model: Model,
    layer: Layer = 0,
    head: Head = 0,
    space: Annotated[Literal["char", "position"], Knob("Between which embeddings")] = "char",
    fold: Annotated[Fold, Knob("What of the LayerNorm and the biases is multiplied in")] = "norm weights",
) -> xr.Dataset:
    """QK circuit: the score of every character for every other, complete.

    For all V² pairs of characters (or T² pairs of positions),

        score = e_q W_Q W_Kᵀ e_kᵀ/√d_head,

    with e the rows of W_E (or W_pos). `fold` says what stands between embedding and head: nothing; the weights of the
    block's LayerNorm, e → (e − mean e)·w; or those and all biases, LayerNorm's, b_Q and b_K. The LayerNorm's scale
    depends on the whole stream and is left at one, so scores are right up to a positive factor per query and per key.
    In layers after the first this is the direct path from the embedding only.

    Returns:
        `score` (query_char, key_char) or (query_position, key_position), 1, signed. Without biases the score is also
        e W_QK eᵀ by the d_model × d_model product; `identity_error` is the largest difference of the two.

    Raises:
        KnobError: there is no such head.
        UnsupportedModel: positions or norms of another kind.
        VocabularyError: tokens that are not characters; there is no printable V × V circuit then.
    """
    require_standard(model)
    if space == "char":
        vocabulary_of(model)  # a vocabulary that is not of characters is refused before V² numbers are made
    embeddings = model.embed.W_E if space == "char" else model.pos_embed.W_pos  # type: ignore[attr-defined]
    scores = qk_scores(model, layer, head, embeddings, fold)
    identity = None
    if fold != "norm weights and biases":
        x = read(norm_of(model, model.blocks[layer].ln1), embeddings, fold)
        product = x @ qk_products(model)[layer, head] @ x.mT / model.blocks[layer].attn.attn_scale
        identity = ("(e W_Q)(e W_K)ᵀ = e (W_Q W_Kᵀ) eᵀ", (product - scores).abs().max().item())
    return labelled(
        model,
        identity=identity,
        score=(scores, f"query_{space} key_{space}", "attention score before the softmax", "1"),
    )
