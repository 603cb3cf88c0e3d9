"""Neuron ablation: what the prediction loses without each single neuron of an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from analyses.axes import labelled
from analyses.interventions import Edit, cells_at_once, intervene
from analyses.neuron_statistics import direct_effects
from analyses.spec import Knob, Layer, ScoredText, analysis
from analyses.stream import character_loss, final_norm, final_stream, require_blocks, require_mlps, require_standard, run, unembed
from analyses.views import Bars, Scatter
from models.hooked import encode
from models.protocol import Model
from models.statistics import mean_activation

Method = Literal["zero", "mean"]
LISTED = 30


@analysis(
    Bars(title="Loss without each neuron: the strongest effects", x="strongest_increase", y="index"),
    Scatter(title="Every neuron: its direct effect, and all of it", x="direct_increase", y="loss_increase",
            over="neuron"),
    group="Neurons",
)  # fmt: skip
def neuron_ablation(
    model: Model,
    text: ScoredText = "KING RICHARD III:\nNow is the winter",
    layer: Layer = 0,
    method: Annotated[Method, Knob("What is put in its place")] = "mean",
) -> xr.Dataset:
    """Neuron ablation: how much worse a text is predicted without each neuron of one MLP, exact for all of them.

    Taking neuron n away at every position changes the stream after the block by

        −(activation[n] − replacement[n]) · W_out[n]

    and by nothing else, so the rest of the model is computed anew from there:

        increase = loss without the neuron − loss,    nats per character, over the text.

    The replacement is zero, or the neuron's `mean` over the training split, which ships with the checkpoint. The direct
    part is what the change does to the logits if all later blocks go on writing what they wrote, and the final
    LayerNorm's scale stays: the rest is due to what later blocks make of it.

    Returns:
        `loss_increase` and `direct_increase` (neuron), nats; `strongest_increase` (index), the 30 largest in size, named
        by neuron; `loss` of the text as it is. The strongest one is computed a second time with the neuron's activation
        replaced inside the MLP: `identity_error`.

    Raises:
        KnobError: the text cannot be read, or there is no such layer.
        StatisticsError: `mean` is asked for, and the model has no statistics or has changed since they were taken.
        UnsupportedModel: the model has no MLP.
    """
    require_standard(model)
    require_blocks(model)
    require_mlps(model)
    tokens, site = encode(model, text), f"blocks.{layer}.mlp.hook_post"
    logits, cache = run(model, tokens)
    activation = cache[site]  # position neuron
    replacement = torch.zeros_like(activation) if method == "zero" else mean_activation(model, site).expand_as(activation)
    loss, removed = character_loss(logits, tokens).mean(), activation - replacement
    increase = _losses(model, tokens, cache, layer, removed) - loss
    direct = _direct_losses(model, tokens, cache, logits, layer, removed) - loss
    strongest = increase.abs().argsort(descending=True, stable=True)[:LISTED]
    first = int(strongest[0])
    outcome = intervene(model, tokens, [[Edit(site, (slice(None), first), replacement[:, first])]], cache)
    again = character_loss(outcome.logits, tokens).mean() - loss
    return labelled(
        model,
        names={"index": [f"L{layer}N{number}" for number in strongest.tolist()]},
        identity=("removed from the stream = replaced inside the MLP", (again - increase[first]).abs().item()),
        loss_increase=(increase, "neuron", "increase of the loss without the neuron", "nats"),
        direct_increase=(direct, "neuron", "increase by its direct effect on the logits", "nats"),
        strongest_increase=(increase[strongest], "index", "increase of the loss without the neuron", "nats"),
        loss=(loss, "", "loss of the text", "nats"),
    )


def _losses(
    model: Model, tokens: Int[Tensor, "position"], cache: dict[str, Tensor], layer: int, removed: Float[Tensor, "position neuron"]
) -> Float[Tensor, "neuron"]:
    """Loss of the text without each neuron, everything after it computed anew."""
    after, last = cache[f"blocks.{layer}.hook_resid_post"], layer == model.cfg.n_layers - 1
    W_out, losses = model.blocks[layer].mlp.W_out, []
    for some in _chunks(model, len(tokens), len(W_out)):
        stream = after - removed.T[some, :, None].contiguous() * W_out[some, None]  # neuron position d_model
        logits = unembed(model, stream) if last else model(stream, start_at_layer=layer + 1)
        losses.append(character_loss(logits, tokens).mean(-1))
    return torch.cat(losses)


def _direct_losses(
    model: Model, tokens: Int[Tensor, "position"], cache: dict[str, Tensor], logits: Float[Tensor, "position char"], layer: int,
    removed: Float[Tensor, "position neuron"],
) -> Float[Tensor, "neuron"]:  # fmt: skip
    """Loss of the text if the logits lose no more than what each neuron adds to them directly."""
    effect, removed = direct_effects(model, layer), removed / final_norm(model).scale(final_stream(model, cache))
    losses = []
    for some in _chunks(model, len(tokens), len(effect)):
        without = logits - torch.einsum("pn,nc->npc", removed[:, some], effect[some])
        losses.append(character_loss(without, tokens).mean(-1))
    return torch.cat(losses)


def _chunks(model: Model, length: int, count: int) -> Iterator[slice]:
    size = cells_at_once(model, length)
    for start in range(0, count, size):
        yield slice(start, start + size)
