"""Virtual heads: two heads in a row, as one circuit.  Reference: Elhage et al. (2021), "virtual attention heads"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import xarray as xr

from analyses.axes import labelled
from analyses.circuits import reading
from analyses.factors import LinearFold, copying_score, ov_factors, unembedding
from analyses.spec import Allowed, Knob, analysis
from analyses.stream import require_standard
from analyses.views import Heatmap
from models.hooked import vocabulary_of
from models.protocol import Model


def _before_the_last(model: Model, _: Mapping[str, Any]) -> Allowed:
    count = max(0, model.cfg.n_layers - 1)
    return Allowed(range(count), f"the model's {count} blocks that have another after them")


def _after_the_sender(model: Model, knobs: Mapping[str, Any]) -> Allowed:
    sender = knobs["sender_layer"]
    return Allowed(range(sender + 1, model.cfg.n_layers), f"the blocks after the sender's, {sender}")


def _heads(model: Model, _: Mapping[str, Any]) -> Allowed:
    return Allowed(range(model.cfg.n_heads), f"the {model.cfg.n_heads} heads of a block")


@analysis(
    Heatmap(title="What two heads in a row do to every logit", x="output_char", y="source_char", colour="logit",
            scale="diverging"),
    group="Circuits",
)  # fmt: skip
def virtual_head(
    model: Model,
    sender_layer: Annotated[int, Knob("Block of the earlier head, from 0", allowed=_before_the_last)] = 0,
    sender_head: Annotated[int, Knob("The earlier head, from 0", allowed=_heads)] = 0,
    receiver_layer: Annotated[int, Knob("Block of the later head, from 0", allowed=_after_the_sender)] = 1,
    receiver_head: Annotated[int, Knob("The later head, from 0", allowed=_heads)] = 0,
    fold: Annotated[LinearFold, Knob("What of the LayerNorms is multiplied in")] = "norm weights",
) -> xr.Dataset:
    """Virtual head: what a character does to every logit when one head moves it and a later head moves it on.

    The later head attends to a place to which the earlier one has copied something; together they act as one head with
    the attention A₂A₁ and the circuit, for all V² pairs,

        logit = e_source OV₁ OV₂ W_U,    OV = W_V W_O,

    with e the rows of W_E. `fold` multiplies in the weights of the norm in front of each head and of the final one,
    x → (x − mean x)·w; scales are left at one, and an MLP between the two is passed by. In float64.

    Returns:
        `logit` (source_char, output_char), logits, signed; `copying_score`, Σλ/Σ|λ| of that matrix, in [−1, 1]; and
        `composition`, ‖OV₁ OV₂‖/(‖OV₁‖ ‖OV₂‖), 0 to 1, the V-composition score. `identity_error` is
        max |((e OV₁) OV₂) W_U − e (OV₁ OV₂) W_U|.

    Raises:
        KnobError: there is no such head, or no block after the sender's.
        UnsupportedModel: positions or norms of another kind.
        VocabularyError: tokens that are not characters.
    """
    require_standard(model)
    vocabulary_of(model)
    reads, writes = ov_factors(model, fold)
    embeddings, W_U = model.embed.W_E.double(), unembedding(model, fold)  # type: ignore[attr-defined]
    a, b = reads[sender_layer, sender_head], writes[sender_layer, sender_head]
    c, d = reads[receiver_layer, receiver_head], writes[receiver_layer, receiver_head]
    left, right = embeddings @ a @ (b @ c), d @ W_U  # char d_head, d_head char
    logits = left @ right
    product = embeddings @ ((a @ b) @ (c @ d)) @ W_U
    score, _ = copying_score(left, right)
    norms = (a @ b).norm() * (c @ d).norm()
    composition = (a @ b @ c @ d).norm() / norms if norms > 0 else norms  # a head that writes nothing composes with none
    pair = f"L{sender_layer}H{sender_head} → L{receiver_layer}H{receiver_head}"
    dataset = labelled(
        model,
        identity=("((e OV₁) OV₂) W_U = e (OV₁ OV₂) W_U", (product - logits).abs().max().item()),
        note=(
            f"{pair}: copying score {score:.2f}; the norm of the product is {composition:.3f} of the product of the norms "
            f"(about 1/√d = {model.cfg.d_model**-0.5:.3f} for unrelated heads)."
        ),
        logit=(logits, "source_char output_char", f"logit added through {pair}", "logits"),
        copying_score=(score, "", f"copying score of {pair}", "1"),
        composition=(composition, "", f"V-composition score of {pair}", "1"),
    )
    dataset.attrs["folded"] = reading(model, fold).folded
    return dataset
