"""One logit, or the difference of two, as a linear function of what is written to the stream at one place.

With the final LayerNorm's scale s taken as it is there, and d = W_U[t] (or W_U[t] − W_U[other]), whatever writes c adds

    ((c − mean c)/s · w) · d,

where w is the LayerNorm's weight. What nobody writes is `constant`: its bias b · d, and b_U.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.stream import Norm, final_norm, final_stream
from models.hooked import vocabulary_of
from models.protocol import Model


@dataclass(frozen=True)
class Readout:
    """How one place of a text is read for one logit or one difference of logits; `logit` is the model's own."""

    what: str
    norm: Norm
    scale: Float[Tensor, ""]
    direction: Float[Tensor, "d_model"]
    norm_bias: Float[Tensor, ""]
    unembed_bias: Float[Tensor, ""]
    logit: Float[Tensor, ""]

    def __call__(self, written: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """What each vector adds to the logit."""
        return self.norm.linear(written) / self.scale @ self.direction


def readout(
    model: Model,
    run: tuple[Float[Tensor, "position char"], dict[str, Tensor]],
    place: int,
    target: str,
    versus: str | None = None,
) -> Readout:
    """The way to the logit of `target`, minus that of `versus` if it is given, at one place of a text.

    Args:
        run: logits and cache of the text, from `analyses.stream.run`.
    """
    logits, cache = run
    ids = vocabulary_of(model).ids
    direction, bias, logit = (values[..., ids[target]] for values in (model.unembed.W_U, model.unembed.b_U, logits[place]))
    what = f"logit of {target!r}"
    if versus is not None:
        direction = direction - model.unembed.W_U[:, ids[versus]]
        bias, logit = bias - model.unembed.b_U[ids[versus]], logit - logits[place, ids[versus]]
        what += f" minus logit of {versus!r}"
    norm = final_norm(model)
    scale = norm.scale(final_stream(model, cache)[place])[0]
    return Readout(what, norm, scale, direction, norm.bias @ direction, bias, logit)


def largest(values: Float[Tensor, "index"], count: int) -> Tensor:
    """Places of the values that are largest in size, largest first, at most `count` of them."""
    return torch.argsort(values.abs(), descending=True, stable=True)[:count]
