"""Activation patching: which activation carries the difference between two texts.

Reference: Meng et al. (2022), who call it causal tracing; Heimersheim & Nanda (2024) for denoising and noising.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
import xarray as xr

from analyses.axes import labelled
from analyses.interventions import Edit, intervene
from analyses.spec import Character, Knob, analysis
from analyses.stream import UnsupportedModel, require_blocks, require_standard, run
from analyses.views import Heatmap
from models.hooked import encode, vocabulary_of
from models.protocol import Model

Site = Literal["resid_pre", "attn_out", "mlp_out", "head_z"]


def _is_pair(model: Model, knobs: Mapping[str, Any], corrupted: str) -> None:
    encode(model, corrupted)
    clean = knobs["clean"]
    if len(clean) != len(corrupted):
        raise ValueError(
            f"the corrupted text has {len(corrupted)} characters, the clean one {len(clean)}; patching goes place by place: "
            "make them equally long"
        )


def _is_readable(model: Model, _: Mapping[str, Any], text: str) -> None:
    encode(model, text)


@analysis(
    Heatmap(title="Share of the clean behaviour", x="position", y="layer", colour="recovered", scale="diverging"),
    Heatmap(title="Share of the clean behaviour", x="head", y="layer", colour="recovered", text="recovered", scale="diverging"),
    Heatmap(title="Change of the logit difference", x="position", y="layer", colour="effect", scale="diverging"),
    Heatmap(title="Change of the logit difference", x="head", y="layer", colour="effect", text="effect", scale="diverging"),
    group="Interventions",
)
def activation_patching(
    model: Model,
    clean: Annotated[str, Knob("Text that shows the behaviour", check=_is_readable)] = "My lord, I wi",
    corrupted: Annotated[str, Knob("Text of the same length that does not", check=_is_pair)] = "My lord, I mi",
    correct: Annotated[str, Character("Next character in the clean text")] = "l",
    wrong: Annotated[str, Character("Next character in the corrupted text")] = "g",
    site: Annotated[Site, Knob("Which activation is patched")] = "resid_pre",
    direction: Annotated[Literal["denoising", "noising"], Knob("Clean into corrupted, or the other way")] = "denoising",
) -> xr.Dataset:
    """Activation patching: which activation carries the difference between two texts.

    One text is run; at one place the activation of the other text's run is put in; everything after it is computed
    anew. The metric is the logit difference at the last position,

        metric = logit(correct) − logit(wrong).

    Denoising puts clean activations into the corrupted run, noising the other way round. `resid_pre`, `attn_out` and
    `mlp_out` are patched at each layer and position; `head_z`, a head's mixed values, at each layer and head, all
    positions at once. Every cell is an exact forward pass.

    Returns:
        `metric`, its value after patching; `effect`, its change against the unpatched run; both logits. `recovered`,
        1: 0 is the corrupted run, 1 the clean one (left out, with a note, where the two runs' metrics are equal).
        `changed`, how many activation values the patch changed. `clean_metric`, `corrupted_metric`. Patching a run into
        itself changes nothing, which is checked: `identity_error`.

    Raises:
        KnobError: the texts differ in length or cannot be read.
        UnsupportedModel: the model has no such site.
    """
    require_standard(model)
    require_blocks(model)
    if site == "mlp_out" and model.cfg.attn_only:
        raise UnsupportedModel("this model has no MLP; give another site: resid_pre, attn_out or head_z")
    texts = {"clean": encode(model, clean), "corrupted": encode(model, corrupted)}
    runs = {name: run(model, tokens) for name, tokens in texts.items()}
    ids = vocabulary_of(model).ids

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[..., -1, ids[correct]] - logits[..., -1, ids[wrong]]

    base, source = ("corrupted", "clean") if direction == "denoising" else ("clean", "corrupted")
    tokens, cache = texts[base], runs[base][1]
    dims = "layer head" if site == "head_z" else "layer position"
    shape = (model.cfg.n_layers, model.cfg.n_heads if site == "head_z" else len(tokens))
    outcome = intervene(model, tokens, _cells(site, shape, runs[source][1]), cache)
    unpatched = intervene(model, tokens, _cells(site, shape, cache), cache)
    reference = {name: metric(logits) for name, (logits, _) in runs.items()}
    values = metric(outcome.logits).reshape(shape)
    variables: dict[str, Any] = {
        "metric": (values, dims, "logit difference after patching", "logits"),
        "effect": (values - reference[base], dims, "change of the logit difference", "logits"),
        "changed": (outcome.changed.reshape(shape), dims, "activation values changed", "1"),
        "clean_metric": (reference["clean"], "", "logit difference of the clean text", "logits"),
        "corrupted_metric": (reference["corrupted"], "", "logit difference of the corrupted text", "logits"),
    }
    gap = (reference["clean"] - reference["corrupted"]).item()
    note = None
    if gap == 0:
        note = "Both texts have the same logit difference, so there is no share to recover; the change is shown instead."
    else:
        share = (values - reference["corrupted"]) / gap
        variables = {"recovered": (share, dims, "share of the clean behaviour", "1")} | variables
    error = (metric(unpatched.logits) - reference[base]).abs().max().item()
    return labelled(
        model,
        tokens if site != "head_z" else None,
        identity=("a run patched with its own activations is unchanged", error),
        note=note,
        **variables,
    )


def _cells(site: Site, shape: tuple[int, int], source: dict[str, torch.Tensor]) -> list[list[Edit]]:
    """One cell per layer and column: a position, or for `head_z` a head at all positions."""
    hook = "attn.hook_z" if site == "head_z" else f"hook_{site}"
    cells = []
    for layer in range(shape[0]):
        name = f"blocks.{layer}.{hook}"
        for column in range(shape[1]):
            index = (slice(None), column) if site == "head_z" else (column,)
            cells.append([Edit(name, index, source[name][index])])
    return cells
