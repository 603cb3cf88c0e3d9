"""Direct logit attribution: a logit as the sum of what each component adds.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import xarray as xr

from analyses.axes import labelled
from analyses.readout import readout
from analyses.spec import Character, Knob, Position, Text, analysis
from analyses.stream import decomposition, require_standard, run
from analyses.views import Bars
from models.hooked import encode
from models.protocol import Model


@analysis(Bars(title="What each component adds to the logit", x="contribution", y="component"), group="Residual stream")
def logit_attribution(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    target: Annotated[str, Character("Character whose logit is explained", cursor="char")] = " ",
    versus: Annotated[str | None, Character("Character whose logit is subtracted; none for the plain logit")] = None,
    position: Position = None,
    by: Annotated[Literal["layer", "sublayer", "head"], Knob("How finely blocks are split")] = "head",
) -> xr.Dataset:
    """Logit attribution: how much every component adds to the logit of one next character.

    With the final LayerNorm's scale s at that position taken as it is, the logit is linear in the stream, so it is a
    sum over components c:

        logit(t) = Σ ((c − mean c)/s · w) · W_U[t]  +  b · W_U[t]  +  b_U[t],

    where w and b are the final LayerNorm's weight and bias. With a second character it is the difference of the two
    logits. The position is the one that predicts: the last one by default. Components are the embeddings and whole
    blocks, attention and MLP of each block, or the heads of each attention, its output bias, and the MLPs.

    Returns:
        `contribution` (component), logits, adding up to `logit` within `identity_error`.

    Raises:
        KnobError: a character is unknown, or the position is outside the text.
        UnsupportedModel: the model's stream is not a sum of such components.
    """
    require_standard(model)
    tokens = encode(model, text)
    logits, cache = run(model, tokens)
    place = len(tokens) - 1 if position is None else position
    read = readout(model, (logits, cache), place, target, versus)
    split = decomposition(model, cache, by)
    contribution = torch.cat([read(split.parts[:, place]), torch.stack([read.norm_bias, read.unembed_bias])])
    return labelled(
        model,
        names={"component": (*split.names, "final_norm_bias", "unembed_bias")},
        identity=("sum of contributions = " + read.what, (contribution.sum() - read.logit).abs().item()),
        contribution=(contribution, "component", f"contribution to the {read.what}", "logits"),
        logit=(read.logit, "", read.what, "logits"),
    )
