"""Path expansion: a logit as the sum over every way from the inputs through the heads.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import xarray as xr

from analyses.axes import labelled
from analyses.paths import Expansion, expand
from analyses.spec import Character, Knob, Position, Text, analysis
from analyses.stream import final_norm, norm_of, require_standard, run
from analyses.views import Bars, Heatmap
from models.hooked import encode, vocabulary_of
from models.protocol import Model


def _at_least_one(model: Model, _: Mapping[str, Any], value: int) -> None:
    if value < 1:
        raise ValueError(f"got {value}; give 1 or more, or a number as large as that of all paths to list every one")


@analysis(
    Bars(title="Largest contributions, each from one input along one path", x="largest", y="index"),
    Bars(title="Contributions by the number of heads on the path", x="by_order", y="order"),
    Bars(title="Largest paths, all inputs together", x="path_total", y="path"),
    Heatmap(title="What each input adds along the largest paths", x="path", y="component", colour="contribution",
            scale="diverging"),
    group="Paths",
)  # fmt: skip
def path_expansion(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    target: Annotated[str, Character("Character whose logit is explained", cursor="char")] = " ",
    versus: Annotated[str | None, Character("Character whose logit is subtracted; none for the plain logit")] = None,
    position: Position = None,
    shown: Annotated[int, Knob("How many are listed one by one, from the largest", check=_at_least_one)] = 24,
) -> xr.Dataset:
    """Path expansion: a logit as the sum over every path from an input through the heads to the output.

    In every block a path goes through one head or skips it: (1 + H)^L paths. With attention patterns, and the scales of
    LayerNorms if there are any, frozen as they were in this forward pass, each is a linear map, and

        logit(t) = Σ over paths h₁ … h_n, inputs x   Ã_n … Ã_1 x OV_1 … OV_n · W_U[t],    Ã[q, k] = A[q, k]/s[k],

    with the norms' centring and weights in OV and W_U, and the final norm's scale. Inputs are the token and position
    embeddings; every bias, from where it enters on; and the output of every MLP, frozen too, as an input of its own: what
    reached it is not followed further back. With a second character it is the difference of the two logits. The position
    is the one that predicts: the last one by default.

    Returns:
        `largest` (index), logits: the single contributions of largest magnitude, one input along one path, and the sum of
        all others; `by_order` (order), the sum over paths with that many heads; `path_total` (path), all inputs together,
        of the paths where that is largest in magnitude, and the sum over all others; `contribution` (path, component), the
        same by input. Each adds up to `logit`; `identity_error` is the largest difference.

    Raises:
        KnobError: a character is unknown, the position is outside the text, or nothing would be listed.
        UnsupportedModel: the model's stream is not a sum of such components, or has more than a million paths.
    """
    require_standard(model)
    tokens = encode(model, text)
    logits, cache = run(model, tokens)
    place = len(tokens) - 1 if position is None else position
    ids = vocabulary_of(model).ids
    direction, constant, logit = model.unembed.W_U[:, ids[target]], model.unembed.b_U[ids[target]], logits[place, ids[target]]
    if versus is not None:
        direction = direction - model.unembed.W_U[:, ids[versus]]
        constant, logit = constant - model.unembed.b_U[ids[versus]], logit - logits[place, ids[versus]]
    found = expand(model, cache, place, direction, constant)
    order = found.order
    by_order = direction.new_zeros(model.cfg.n_layers + 1).index_add(0, order, found.contribution.sum(-1))
    names, largest = _largest_terms(found, shown)
    paths, contribution = _largest_paths(found, shown)
    errors = [(total - logit).abs().item() for total in (by_order.sum(), largest.sum(), contribution.sum())]
    what = f"logit of {target!r}" if versus is None else f"logit of {target!r} minus logit of {versus!r}"
    return labelled(
        model,
        names={"path": paths, "component": found.components, "index": names},
        identity=("sum over all paths = " + what, max(errors)),
        note=_note(model, len(order)),
        largest=(largest, "index", f"contribution to the {what}", "logits"),
        by_order=(by_order, "order", f"contribution to the {what}", "logits"),
        path_total=(contribution.sum(-1), "path", f"contribution to the {what}", "logits"),
        contribution=(contribution, "path component", f"contribution to the {what}", "logits"),
        logit=(logit, "", what, "logits"),
    )


def _largest_terms(found: Expansion, shown: int) -> tuple[list[str], torch.Tensor]:
    """Single contributions from the largest magnitude, named by input and path, and last the sum of all others."""
    terms = found.contribution.flatten()
    places = terms.abs().argsort(descending=True, stable=True)
    places = places[: max(1, int(terms.count_nonzero()))]  # an input does not enter along every path
    first, rest = places[:shown], places[shown:]
    names, values = [], terms[first]
    for number in first.tolist():
        path, component = divmod(number, len(found.components))
        start, way = found.components[component], found.name(path)
        names.append(start if way == "direct" else f"{start} → {way}")
    if len(rest):
        names, values = [*names, f"{len(rest):,} others"], torch.cat([values, terms[rest].sum()[None]])
    return names, values


def _largest_paths(found: Expansion, shown: int) -> tuple[list[str], torch.Tensor]:
    """Paths from the largest total magnitude, and last the sum over all others."""
    places = found.contribution.sum(-1).abs().argsort(descending=True, stable=True)
    first, rest = places[:shown], places[shown:]
    names, values = [found.name(number) for number in first.tolist()], found.contribution[first]
    if len(rest):
        names, values = [*names, f"{len(rest):,} other paths"], torch.cat([values, found.contribution[rest].sum(0)[None]])
    return names, values


def _note(model: Model, count: int) -> str:
    """What is frozen, in this model."""
    norms = [final_norm(model), *(norm_of(model, block.ln1) for block in model.blocks)]
    frozen = ["attention patterns"] if len(model.blocks) else []
    frozen += ["the scales of the LayerNorms"] if any(norm.centred for norm in norms) else []
    frozen += ["the outputs of the MLPs"] if len(model.blocks) and not model.cfg.attn_only else []
    paths = f"{count:,} paths" if count > 1 else "One path, the direct one"
    held = " and ".join(", ".join(frozen).rsplit(", ", 1)) if frozen else "nothing"
    return f"{paths}. Frozen as measured on this text: {held}."
