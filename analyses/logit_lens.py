"""Logit lens: read every layer's residual stream as if it were the last.  Reference: nostalgebraist (2020)."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import torch
import xarray as xr

from analyses.axes import labelled
from analyses.spec import Knob, Text, analysis
from analyses.stream import UnsupportedModel, require_blocks, require_standard, run, unembed
from analyses.views import Heatmap, Lines
from models.hooked import encode, vocabulary_of
from models.protocol import Model

Site = Literal["resid_pre", "resid_mid", "resid_post"]


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
) -> xr.Dataset:
    """Logit lens: the next character that each layer's residual stream already implies.

    At every layer and position the stream is read as the model reads its last one,

        softmax(LN_f(x) W_U + b_U),

    with the final LayerNorm's weight and bias, and with the scale of the stream being read, not of the last one. At the
    last layer's `resid_post` the lens is the model itself, which is checked.

    Returns:
        `top_char` (layer, position), the likeliest next character, and its `probability`; `entropy` of the whole
        prediction, nats; `kl_to_output`, KL(model's prediction ‖ lens), nats. `identity_error` is
        max |lens at the end of the last block − model's logits|.

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
    layers = range(model.cfg.n_layers)
    stream = torch.stack([cache[f"blocks.{layer}.hook_{site}"] for layer in layers])  # layer position d_model
    logprobs = unembed(model, stream).log_softmax(-1)
    output = logits.log_softmax(-1)
    best = logprobs.max(-1)
    characters = np.array(vocabulary_of(model).characters, dtype=object)
    last = unembed(model, cache[f"blocks.{layers[-1]}.hook_resid_post"])
    return labelled(
        model,
        tokens,
        identity=("lens after the last block = the model's logits", (last - logits).abs().max().item()),
        probability=(best.values.exp(), "layer position", "probability of the likeliest character", "probability"),
        top_char=(characters[best.indices.cpu().numpy()], "layer position", "likeliest next character", "character"),
        entropy=(-(logprobs.exp() * logprobs).sum(-1), "layer position", "entropy of the prediction", "nats"),
        kl_to_output=(
            (output.exp() * (output - logprobs)).sum(-1).clamp(min=0),
            "layer position",
            "KL from the model's prediction to the lens",
            "nats",
        ),
    )
