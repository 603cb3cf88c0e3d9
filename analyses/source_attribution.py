"""Source attribution: through which earlier characters each head adds to a logit.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated

import torch
import xarray as xr

from analyses.axes import labelled
from analyses.circuits import stack_heads
from analyses.readout import readout
from analyses.spec import Character, Head, Layer, Position, Text, analysis
from analyses.stream import head_outputs, require_blocks, require_standard, run
from analyses.views import Heatmap, Lines
from models.hooked import encode
from models.protocol import Model


@analysis(
    Heatmap(title="What every head adds from each source", x="key_position", y="component", colour="contribution",
            scale="diverging"),
    Lines(title="The chosen head", x="key_position", y="head_contribution"),
    group="Residual stream",
)  # fmt: skip
def source_attribution(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    target: Annotated[str, Character("Character whose logit is explained", cursor="char")] = " ",
    versus: Annotated[str | None, Character("Character whose logit is subtracted; none for the plain logit")] = None,
    position: Position = None,
    layer: Layer = 0,
    head: Head = 0,
) -> xr.Dataset:
    """Source attribution: through which earlier characters each head adds to the logit of one next character.

    What a head writes at a position q is a sum over the places k that it attends to, so its part of the logit is too:
    with the final LayerNorm's scale s at q taken as it is,

        contribution(k) = A[q, k] · ((o_k − mean o_k)/s · w) · W_U[t],    o_k = v_k W_O.

    v_k holds the value bias; since a row of attention sums to 1, each source has its share A[q, k] of it. With a second
    character it is the difference of the two logits. The position q is the one that predicts: the last one by default.
    What is at k in deeper layers is a mixture of what was at k and before, not the character there alone.

    Returns:
        `contribution` (component, key_position), logits, for every head and every place up to q; `total` (component),
        their sum; `attention` (component, key_position), A[q, k], probability; `head_contribution` (key_position), of
        the head that `layer` and `head` choose. Sums over sources are the heads' contributions of logit attribution
        within `identity_error`.

    Raises:
        KnobError: a character is unknown, the position is outside the text, or there is no such head.
        UnsupportedModel: the model's stream is not a sum of such components.
    """
    require_standard(model)
    require_blocks(model)
    tokens = encode(model, text)
    logits, cache = run(model, tokens)
    place = len(tokens) - 1 if position is None else position
    read, layers = readout(model, (logits, cache), place, target, versus), range(model.cfg.n_layers)
    pattern = torch.stack([cache[f"blocks.{number}.attn.hook_pattern"][:, place, : place + 1] for number in layers])
    values = torch.stack([cache[f"blocks.{number}.attn.hook_v"][: place + 1] for number in layers])
    added = read(torch.einsum("lkhd,lhdm->lhkm", values, stack_heads(model, "W_O"))) * pattern  # layer head key_position
    heads = torch.stack([read(head_outputs(model, cache, number)[:, place]) for number in layers])
    names = [f"L{number}H{each}" for number in layers for each in range(model.cfg.n_heads)]
    what, pair = f"contribution to the {read.what}", "component key_position"
    return labelled(
        model,
        tokens[: place + 1],
        names={"component": names},
        identity=("sum over sources = the head's contribution", (added.sum(-1) - heads).abs().max().item()),
        contribution=(added.flatten(0, 1), pair, what, "logits"),
        total=(heads.flatten(), "component", what, "logits"),
        attention=(pattern.flatten(0, 1), pair, f"attention from position {place}", "probability"),
        head_contribution=(added[layer, head], "key_position", what, "logits"),
    )
