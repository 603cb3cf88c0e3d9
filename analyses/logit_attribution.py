"""Direct logit attribution: a logit as the sum of what each component adds.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated

import torch
import xarray as xr

from analyses.axes import labelled
from analyses.spec import Character, Position, Text, analysis
from analyses.stream import decomposition, final_norm, require_standard, run
from analyses.views import Bars
from models.hooked import encode, vocabulary_of
from models.protocol import Model


@analysis(Bars(title="What each component adds to the logit", x="contribution", y="component"), group="Residual stream")
def logit_attribution(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    target: Annotated[str, Character("Character whose logit is explained", cursor="char")] = " ",
    versus: Annotated[str | None, Character("Character whose logit is subtracted; none for the plain logit")] = None,
    position: Position = None,
) -> xr.Dataset:
    """Logit attribution: how much every component adds to the logit of one next character.

    With the final LayerNorm's scale s at that position taken as it is, the logit is linear in the stream, so it is a
    sum over components c:

        logit(t) = Σ ((c − mean c)/s · w) · W_U[t]  +  b · W_U[t]  +  b_U[t],

    where w and b are the final LayerNorm's weight and bias. With a second character it is the difference of the two
    logits. The position is the one that predicts: the last one by default.

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
    ids = vocabulary_of(model).ids
    direction = model.unembed.W_U[:, ids[target]]
    constant, logit = model.unembed.b_U[ids[target]], logits[place, ids[target]]
    if versus is not None:
        direction = direction - model.unembed.W_U[:, ids[versus]]
        constant, logit = constant - model.unembed.b_U[ids[versus]], logit - logits[place, ids[versus]]
    split, norm = decomposition(model, cache), final_norm(model)
    scale = norm.scale(split.stream[place])
    through_stream = norm.linear(split.parts[:, place]) / scale @ direction
    contribution = torch.cat([through_stream, torch.stack([norm.bias @ direction, constant])])
    names = (*split.names, "final_norm_bias", "unembed_bias")
    what = f"logit of {target!r}" if versus is None else f"logit of {target!r} minus logit of {versus!r}"
    return labelled(
        model,
        components=names,
        identity=("sum of contributions = " + what, (contribution.sum() - logit).abs().item()),
        contribution=(contribution, "component", f"contribution to the {what}", "logits"),
        logit=(logit, "", what, "logits"),
    )
