"""Path expansion: a logit as a sum over all ways through the heads, with what is not linear held as it was measured.

A path chooses in every block one head, or to skip it: (1 + H)^L paths, numbered by the choices as digits, block 0 the most
significant and 0 for skip. With attention patterns A and the norms' scales s frozen, a head maps the stream x to

    Σ_k A[q, k] ((x[k] − mean x[k])·w/s[k]) W_V W_O  =  Ã x OV,    Ã[q, k] = A[q, k]/s[k],

one factor for places and one for coordinates. A path through heads 1 … n therefore needs one row over places and one column
over coordinates, both followed from the logit back to the inputs:

    contribution of x = (e_place Ã_n … Ã_1) x (OV_1 … OV_n direction).

Reference: Elhage et al. (2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.stream import UnsupportedModel, final_norm, final_stream, norm_of
from models.protocol import Model

MOST_PATHS = 1_000_000


@dataclass(frozen=True)
class Expansion:
    """What every component adds to a logit along every path; the sum of all is the logit.

    Components are the two embeddings, and per block: the norm's bias (`L0.norm_bias`) and b_V (`L0.value_bias`), which
    enter inside the first head of a path; b_O (`L0.attn_bias`) and the MLP's output (`L0.mlp`), which enter after the
    block's attention. Along a path that does not begin there they are zero. Biases that a model lacks are left out.
    """

    components: tuple[str, ...]
    contribution: Float[Tensor, "path component"]
    n_layers: int
    n_heads: int

    def name(self, path: int) -> str:
        """`direct`, or the heads in order: `L0H4 → L1H7`."""
        base = 1 + self.n_heads
        digits = [path // base**place % base for place in reversed(range(self.n_layers))]
        return " → ".join(f"L{layer}H{digit - 1}" for layer, digit in enumerate(digits) if digit) or "direct"

    @property
    def order(self) -> Int[Tensor, "path"]:
        """The number of heads on every path."""
        order = torch.zeros(1, dtype=torch.int64, device=self.contribution.device)
        for _ in range(self.n_layers):
            order = torch.cat([order] + [order + 1] * self.n_heads)
        return order


def expand(
    model: Model,
    cache: dict[str, Tensor],
    place: int,
    direction: Float[Tensor, "d_model"],
    constant: Float[Tensor, ""],
) -> Expansion:
    """Expand LN_f(x)[place] · direction + constant over all paths.

    Args:
        cache: the text's own activations without a batch axis, from `analyses.stream.run`.
        place: the position whose logit it is.
        direction: a column of W_U, or a difference of two.
        constant: the same of b_U.

    The model must be one that `require_standard` lets pass.

    Raises:
        UnsupportedModel: more than a million paths.
    """
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    norm, embed = final_norm(model), cache["hook_embed"]
    table = {name: direction.new_zeros(number_of_paths(model)) for name in components_of(model)}
    places = direction.new_zeros(1, len(embed))
    places[0, place] = 1
    coordinates = norm.centre(norm.weight * direction / norm.scale(final_stream(model, cache)[place]))[None]
    followed = iter([(places, coordinates)])
    for layer in reversed(range(n_layers)):
        places, coordinates = (torch.cat(parts) for parts in zip(*followed, strict=True))
        followed = _follow(model, cache, layer, places, coordinates, table)
    first = 0
    for places, coordinates in followed:  # in turn, so that what belongs to all paths is never held at once
        rows = slice(first, first + len(places))
        table["embed"][rows] = ((places @ embed) * coordinates).sum(-1)
        table["pos_embed"][rows] = ((places @ cache["hook_pos_embed"].expand_as(embed)) * coordinates).sum(-1)
        first = rows.stop
    _put(table, "final_norm_bias", slice(0, 1), norm.bias @ direction)
    _put(table, "unembed_bias", slice(0, 1), constant)
    return Expansion(tuple(table), torch.stack(list(table.values()), -1), n_layers, n_heads)


def number_of_paths(model: Model) -> int:
    """(1 + H)^L.

    Raises:
        UnsupportedModel: more than can be listed.
    """
    count = (1 + model.cfg.n_heads) ** model.cfg.n_layers
    if count > MOST_PATHS:
        raise UnsupportedModel(
            f"this model has {count:,} paths; at most {MOST_PATHS:,} are expanded, so give one with fewer blocks or heads"
        )
    return count


def components_of(model: Model) -> list[str]:
    """What paths start from, in the order in which it is written; biases only where one is not zero."""
    names = ["embed", "pos_embed"]
    for layer, block in enumerate(model.blocks):
        biases = {"norm_bias": norm_of(model, block.ln1).bias, "value_bias": block.attn.b_V, "attn_bias": block.attn.b_O}
        names += [f"L{layer}.{name}" for name, bias in biases.items() if bias.any()]
        names += [f"L{layer}.mlp"] * (not model.cfg.attn_only)
    last = {"final_norm_bias": final_norm(model).bias, "unembed_bias": model.unembed.b_U}
    return names + [name for name, bias in last.items() if bias.any()]


def _follow(
    model: Model,
    cache: dict[str, Tensor],
    layer: int,
    places: Float[Tensor, "path position"],
    coordinates: Float[Tensor, "path d_model"],
    table: dict[str, Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Paths that reach the end of a block, followed to its start: past its heads, then through each of them in turn.

    What enters on the way is put into the table.
    """
    block, norm = model.blocks[layer], norm_of(model, model.blocks[layer].ln1)
    count, attention = len(places), block.attn
    _put(table, f"L{layer}.attn_bias", slice(0, count), places.sum(-1) * (coordinates @ attention.b_O))
    if not model.cfg.attn_only:
        mlp = cache[f"blocks.{layer}.hook_mlp_out"]
        _put(table, f"L{layer}.mlp", slice(0, count), ((places @ mlp) * coordinates).sum(-1))
    yield places, coordinates
    scale = norm.scale(cache[f"blocks.{layer}.hook_resid_pre"])[:, 0]
    for head, pattern in enumerate(cache[f"blocks.{layer}.attn.hook_pattern"]):
        rows = slice((1 + head) * count, (2 + head) * count)
        looked = places @ pattern
        values = coordinates @ attention.W_O[head].mT  # path d_head
        read = values @ attention.W_V[head].mT  # path d_model
        _put(table, f"L{layer}.value_bias", rows, looked.sum(-1) * (values @ attention.b_V[head]))
        _put(table, f"L{layer}.norm_bias", rows, looked.sum(-1) * (read @ norm.bias))
        yield looked / scale, norm.centre(read * norm.weight)


def _put(table: dict[str, Tensor], name: str, rows: slice, values: Tensor) -> None:
    if name in table:
        table[name][rows] = values
