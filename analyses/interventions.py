"""Interventions: change activations in many copies of one text at once, and see the logits.

A *cell* is one copy of the text with its edits. The cells of a sweep lie on the batch axis of one forward pass, which
starts at the first layer that any of them touches: earlier layers are identical. Nothing is estimated, and an edit whose
site is never reached raises instead of reporting "no effect".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from models.errors import WorkbenchError
from models.protocol import Model

CELL_BUDGET = 512 * 2**20  # bytes of activations held at once
ROUNDING = 64  # times the dtype's epsilon and the largest value of the activation: what two orders of summation may differ by


class InterventionError(WorkbenchError):
    """An edit did not take place; no number is given in its stead."""


@dataclass(frozen=True)
class Edit:
    """Put `value` at `index` of one cell's activation at the hook point `site`.

    `index` indexes the activation without its batch axis, (position, …); `value` broadcasts to what it selects.
    """

    site: str
    index: tuple[Any, ...]
    value: Tensor


@dataclass(frozen=True)
class Outcome:
    """Logits of every cell, and how many activation values its edits really changed.

    Equal values change none, and neither do those that differ by less than `ROUNDING`: the same activation computed in
    batches of different sizes is not the same to the last bit on every machine.
    """

    logits: Float[Tensor, "cell position char"]
    changed: Int[Tensor, "cell"]


def layer_of(site: str) -> int:
    """The block that a hook point belongs to; −1 for the embeddings before all blocks."""
    return int(site.split(".")[1]) if site.startswith("blocks.") else -1


def intervene(
    model: Model,
    tokens: Int[Tensor, "position"],
    cells: Sequence[Sequence[Edit]],
    cache: dict[str, Tensor],
) -> Outcome:
    """Run a text once per cell, each with its own edits, batched.

    Args:
        tokens: the text that every cell starts from.
        cells: the edits of each cell.
        cache: the text's own activations without a batch axis, from `analyses.stream.run`.

    Raises:
        InterventionError: a site does not exist in this model, or was not reached.
    """
    logits: dict[int, Tensor] = {}
    changed = torch.zeros(len(cells), dtype=torch.int64)
    by_layer: dict[int, list[int]] = defaultdict(list)
    for number, edits in enumerate(cells):
        if not edits:
            raise InterventionError(f"cell {number} has no edit; give at least one")
        by_layer[min(layer_of(edit.site) for edit in edits)].append(number)
    for layer, numbers in by_layer.items():
        size = cells_at_once(model, len(tokens))
        for start in range(0, len(numbers), size):
            chunk = numbers[start : start + size]
            outcome = _run_chunk(model, tokens, [cells[number] for number in chunk], cache, layer)
            for row, number in enumerate(chunk):
                logits[number] = outcome.logits[row]
                changed[number] = outcome.changed[row]
    return Outcome(torch.stack([logits[number] for number in range(len(cells))]), changed)


def cells_at_once(model: Model, length: int) -> int:
    """Cells per forward pass within the budget: the widest activations are the MLP's, the scores and the logits."""
    cfg = model.cfg
    per_position = 8 * cfg.d_model + 2 * (cfg.d_mlp or 0) + 2 * cfg.n_heads * length + cfg.d_vocab
    return max(1, CELL_BUDGET // (model.unembed.W_U.element_size() * length * per_position))


def _run_chunk(model: Model, tokens: Tensor, cells: Sequence[Sequence[Edit]], cache: dict[str, Tensor], layer: int) -> Outcome:
    by_site: dict[str, list[tuple[int, Edit]]] = defaultdict(list)
    for row, edits in enumerate(cells):
        for edit in edits:
            by_site[edit.site].append((row, edit))
    changed = torch.zeros(len(cells), dtype=torch.int64)
    fired: set[str] = set()

    def apply(activation: Tensor, hook: Any) -> Tensor:
        fired.add(hook.name)
        activation = activation.clone()
        for row, edit in by_site[hook.name]:
            cell = activation[row]
            before = cell[edit.index].clone()
            cell[edit.index] = edit.value.to(cell.dtype)
            after = cell[edit.index]
            largest = torch.maximum(before.abs().amax(), after.abs().amax())
            changed[row] += int(((after - before).abs() > ROUNDING * torch.finfo(cell.dtype).eps * largest).sum())
        return activation

    unknown = [site for site in by_site if site not in model.hook_dict]  # type: ignore[attr-defined]
    if unknown:
        raise InterventionError(f"this model has no hook point {unknown[0]!r}, so nothing was changed; choose another site")
    if layer < 0:
        start: dict[str, Any] = {"input": tokens.expand(len(cells), -1)}
    else:
        stream = cache[f"blocks.{layer}.hook_resid_pre"]
        start = {"input": stream.expand(len(cells), *stream.shape), "start_at_layer": layer}
    with model.hooks(fwd_hooks=[(site, apply) for site in by_site]):
        logits = model(**start)
    missed = by_site.keys() - fired
    if missed:
        raise InterventionError(f"the forward pass never reached {sorted(missed)[0]!r}, so nothing was changed there")
    return Outcome(logits, changed)
