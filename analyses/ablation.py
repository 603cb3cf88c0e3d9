"""Ablation: what the model loses without a head, a sublayer or a block.  Reference: Olsson et al. (2022)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import xarray as xr
from torch import Tensor

from analyses.axes import labelled
from analyses.interventions import Edit, intervene
from analyses.spec import Knob, ScoredText, analysis
from analyses.stream import UnsupportedModel, character_loss, require_blocks, require_standard, run
from analyses.views import Bars, Heatmap
from models.hooked import encode
from models.protocol import Model
from models.statistics import mean_activation

Unit = Literal["head", "attention", "mlp", "block"]
Method = Literal["zero", "mean"]


@analysis(
    Heatmap(title="Loss without each head", x="head", y="layer", colour="loss_increase", text="loss_increase", scale="diverging"),
    Bars(title="Loss without each layer's unit", x="loss_increase", y="layer"),
    group="Interventions",
)
def ablation(
    model: Model,
    text: ScoredText = "KING RICHARD III:\nNow is the winter",
    unit: Annotated[Unit, Knob("What is taken away")] = "head",
    method: Annotated[Method, Knob("What is put in its place")] = "mean",
) -> xr.Dataset:
    """Ablation: how much worse a text is predicted without each head, attention layer, MLP or block.

    What the unit writes is replaced at every position, everything after it is computed anew, and the loss compared:

        increase = loss without the unit − loss,    nats per character, over the text.

    `zero` puts zeros in its place; `mean` its mean over the training split, which ships with the checkpoint, so that only
    what varies is taken away. A head is its mixed values z (W_O and b_O stay); `attention` and `mlp` are the whole
    output, biases included; `block` is both. A negative increase means that the unit hurts on this text.

    Returns:
        `loss_increase` (layer, head) or (layer), nats; `changed`, how many activation values were replaced by others;
        `loss`, the loss of the text as it is. Putting the unit's own activations back changes nothing, which is checked:
        `identity_error`.

    Raises:
        KnobError: the text cannot be read, or has nothing to predict.
        StatisticsError: `mean` is asked for, and the model has no statistics or has changed since they were taken.
        UnsupportedModel: the model has no such unit.
    """
    require_standard(model)
    require_blocks(model)
    if unit == "mlp" and model.cfg.attn_only:
        raise UnsupportedModel("this model has no MLP; give another unit: head, attention or block")
    tokens = encode(model, text)
    logits, cache = run(model, tokens)
    places = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads if unit == "head" else 1)]

    def sweep(replacement) -> tuple[Tensor, Tensor]:
        outcome = intervene(model, tokens, [_cell(model, unit, *place, replacement) for place in places], cache)
        shape = (model.cfg.n_layers, model.cfg.n_heads) if unit == "head" else (model.cfg.n_layers,)
        return character_loss(outcome.logits, tokens).mean(-1).reshape(shape), outcome.changed.reshape(shape)

    def replaced(site: str) -> Tensor:
        return torch.zeros_like(cache[site]) if method == "zero" else mean_activation(model, site).expand_as(cache[site])

    loss = character_loss(logits, tokens).mean()
    without, changed = sweep(replaced)
    unchanged, _ = sweep(lambda site: cache[site])
    dims = "layer head" if unit == "head" else "layer"
    return labelled(
        model,
        identity=("a unit replaced by itself changes nothing", (unchanged - loss).abs().max().item()),
        loss_increase=(without - loss, dims, f"increase of the loss without the {unit}", "nats"),
        changed=(changed, dims, "activation values changed", "1"),
        loss=(loss, "", "loss of the text", "nats"),
    )


def _cell(model: Model, unit: Unit, layer: int, head: int, replacement) -> list[Edit]:
    if unit == "head":
        site = f"blocks.{layer}.attn.hook_z"
        return [Edit(site, (slice(None), head), replacement(site)[:, head])]
    names = {"attention": ["attn_out"], "mlp": ["mlp_out"], "block": ["attn_out", "mlp_out"]}[unit]
    if model.cfg.attn_only:
        names = ["attn_out"]
    return [Edit(f"blocks.{layer}.hook_{name}", (slice(None),), replacement(f"blocks.{layer}.hook_{name}")) for name in names]
