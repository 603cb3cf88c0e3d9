"""Neuron attribution: one MLP's part of a logit as the sum over its neurons.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated

import xarray as xr

from analyses.axes import labelled
from analyses.readout import largest, readout
from analyses.spec import Character, Layer, Position, Text, analysis
from analyses.stream import UnsupportedModel, require_standard, run
from analyses.views import Bars, Scatter
from models.hooked import encode
from models.protocol import Model

SHOWN = 30  # bars; all neurons are in the result


@analysis(
    Bars(title="Neurons that add or take most", x="top_contribution", y="index"),
    Scatter(title="Every neuron: size and effect", x="length", y="contribution", over="neuron"),
    group="Residual stream",
)  # fmt: skip
def neuron_attribution(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    layer: Layer = 0,
    target: Annotated[str, Character("Character whose logit is explained", cursor="char")] = " ",
    versus: Annotated[str | None, Character("Character whose logit is subtracted; none for the plain logit")] = None,
    position: Position = None,
) -> xr.Dataset:
    """Neuron attribution: how much every neuron of one MLP adds to the logit of one next character.

    An MLP writes a sum over neurons, each its activation a_n times its row of W_out, and a bias,

        MLP = Σ a_n W_out[n] + b_out,

    and with the final LayerNorm's scale s taken as it is, each term adds to the logit

        contribution(n) = a_n ((W_out[n] − mean W_out[n])/s · w) · W_U[t].

    With a second character it is the difference of the two logits. The activation is after the nonlinearity, at
    `position`, the last one by default. A neuron may write much and do little to this logit: `length` is |a_n| ‖W_out[n]‖.

    Returns:
        `contribution` (neuron), logits; `activation`, `length` (neuron), 1; `bias_contribution` of b_out, and
        `mlp_contribution`, what all of them add up to, logits; `top_contribution` (index), the 30 that are largest in
        size, largest first. `identity_error` is the larger of |sum − mlp_contribution|, as in logit attribution, and
        max |Σ a_n W_out[n] + b_out − MLP output|.

    Raises:
        KnobError: a character is unknown, the position is outside the text, or there is no such block.
        UnsupportedModel: the model has no MLPs, or its stream is not a sum of such components.
    """
    require_standard(model)
    if model.cfg.attn_only:
        raise UnsupportedModel("this model has attention only, so there are no neurons; give a model whose blocks have an MLP")
    tokens = encode(model, text)
    logits, cache = run(model, tokens)
    place = len(tokens) - 1 if position is None else position
    read, mlp = readout(model, (logits, cache), place, target, versus), model.blocks[layer].mlp
    activation = cache[f"blocks.{layer}.mlp.hook_post"][place]  # neuron
    written = activation[:, None] * mlp.W_out  # neuron d_model
    contribution, bias = read(written), read(mlp.b_out)
    output = cache[f"blocks.{layer}.hook_mlp_out"][place]
    errors = (contribution.sum() + bias - read(output)).abs(), (written.sum(0) + mlp.b_out - output).abs().max()
    top = largest(contribution, SHOWN)
    what = f"contribution to the {read.what}"
    return labelled(
        model,
        names={"index": [f"L{layer}N{neuron}" for neuron in top.tolist()]},
        identity=("neurons + bias = the MLP: its part of the logit, and its output", max(error.item() for error in errors)),
        top_contribution=(contribution[top], "index", what, "logits"),
        contribution=(contribution, "neuron", what, "logits"),
        activation=(activation, "neuron", "activation after the nonlinearity", "1"),
        length=(written.norm(dim=-1), "neuron", "length of what the neuron writes", "1"),
        bias_contribution=(bias, "", f"contribution of the MLP's output bias to the {read.what}", "logits"),
        mlp_contribution=(read(output), "", f"contribution of the whole MLP to the {read.what}", "logits"),
    )
