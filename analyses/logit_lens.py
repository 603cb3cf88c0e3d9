"""Logit lens: read every layer's residual stream as if it were the last.  Reference: nostalgebraist (2020)."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from analyses.axes import labelled
from analyses.spec import Knob, Text, analysis
from analyses.stream import (
    UnsupportedModel,
    decomposition,
    final_norm,
    final_stream,
    require_blocks,
    require_standard,
    run,
    sublayers,
)
from analyses.views import Heatmap, Lines
from models.hooked import encode, vocabulary_of
from models.protocol import Model

Site = Literal["resid_pre", "resid_mid", "resid_post"]
Scale = Literal["own", "final"]


@analysis(
    Heatmap(
        title="Likeliest next character at each layer", x="position", y="layer", colour="probability", text="top_char",
        scale="probability",
    ),
    Lines(title="Entropy of the prediction", x="position", y="entropy", hue="layer"),
    Lines(title="Divergence from the model's own prediction", x="position", y="kl_to_output", hue="layer"),
    group="Residual stream",
)  # fmt: skip
def logit_lens(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    site: Annotated[Site, Knob("Where in the block to read")] = "resid_post",
    scale: Annotated[Scale, Knob("LayerNorm scale: of the stream that is read, or of the last one")] = "own",
) -> xr.Dataset:
    """Logit lens: the next character that each layer's residual stream already implies.

    At every layer and position the stream x is read as the model reads its last one, x_final,

        softmax(((x − mean x)/s · w + b) W_U + b_U),

    with the final LayerNorm's weight w and bias b. The scale s = √(variance + ε) is that of x, so that every layer is
    read as if the model ended there; or it is that of x_final at the same position, frozen. Frozen, the logits before
    the softmax are linear in x: the difference between two layers' lenses is the sum of what is written between them,
    the contributions of logit attribution. At the last layer's `resid_post` both are the model itself.

    Returns:
        `top_char` (layer, position), the likeliest next character, and its `probability`; `entropy` of the whole
        prediction, nats; `kl_to_output`, KL(model's prediction ‖ lens), nats. `identity_error` is
        max |lens after the last block − model's logits|, and with the frozen scale also
        max |lens − sum of what is written before it|.

    Raises:
        KnobError: the text is empty, too long or has unknown characters.
        UnsupportedModel: the model has no MLP, so no `resid_mid`; or its norm cannot be read.
    """
    require_standard(model)
    require_blocks(model)
    if site == "resid_mid" and model.cfg.attn_only:
        raise UnsupportedModel("this model has no MLP, so its blocks have no resid_mid; give resid_pre or resid_post")
    tokens = encode(model, text)
    logits, cache = run(model, tokens)
    stream = torch.stack([cache[f"blocks.{layer}.hook_{site}"] for layer in range(model.cfg.n_layers)])
    lens = _lens(model, cache, stream, scale)
    errors = {"lens after the last block = the model's logits": _lens(model, cache, final_stream(model, cache), scale) - logits}
    if scale == "final":
        errors["frozen lens = sum of what is written before it"] = _summed(model, cache, site) - lens
    logprobs, output = lens.log_softmax(-1), logits.log_softmax(-1)
    best = logprobs.max(-1)
    characters = np.array(vocabulary_of(model).characters, dtype=object)
    divergence = (output.exp() * (output - logprobs)).sum(-1).clamp(min=0)
    normed = final_norm(model).centred
    dataset = labelled(
        model,
        tokens,
        identity=("; ".join(errors), max(error.abs().max().item() for error in errors.values())),
        note=None if normed else "This model has no final LayerNorm, so there is no scale to choose: both lenses are the same.",
        probability=(best.values.exp(), "layer position", "probability of the likeliest character", "probability"),
        top_char=(characters[best.indices.cpu().numpy()], "layer position", "likeliest next character", "character"),
        entropy=(-(logprobs.exp() * logprobs).sum(-1), "layer position", "entropy of the prediction", "nats"),
        kl_to_output=(divergence, "layer position", "KL from the model's prediction to the lens", "nats"),
    )
    if normed:
        dataset.attrs["folded"] = "each layer's own scale" if scale == "own" else "the final scale, frozen"
    return dataset


def _lens(model: Model, cache: dict[str, Tensor], stream: Tensor, scale: Scale) -> Tensor:
    """Logits of a stream (…, position, d_model), with its own scale or that of the stream after the last block."""
    norm = final_norm(model)
    divisor = norm.scale(stream if scale == "own" else final_stream(model, cache))
    return (norm.linear(stream) / divisor + norm.bias) @ model.unembed.W_U + model.unembed.b_U


def _summed(model: Model, cache: dict[str, Tensor], site: Site) -> Tensor:
    """The frozen lens (layer, position, char) of each site, from what each component adds on its own."""
    norm, parts = final_norm(model), decomposition(model, cache, by="sublayer").parts
    added = norm.linear(parts) / norm.scale(final_stream(model, cache)) @ model.unembed.W_U  # component position char
    first, each = {"resid_pre": 1, "resid_mid": 2, "resid_post": 1 + len(sublayers(model))}[site], len(sublayers(model))
    ends = [first + each * layer for layer in range(model.cfg.n_layers)]  # the last component that the site holds
    return added.cumsum(0)[ends] + norm.bias @ model.unembed.W_U + model.unembed.b_U
