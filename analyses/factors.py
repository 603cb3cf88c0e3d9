"""Circuits of heads as products of two thin matrices: norms folded in, and what follows from d_head × d_head alone.

Row vectors, as in `analyses.circuits`. A head's QK and OV are products with an inner dimension of d_head, so their singular
values, eigenvalues and norms follow from matrices of d_head × d_head; the d × d and V × V products are needed for checks only.
Everything here is in float64, whatever the model is held in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.circuits import stack_heads
from analyses.stream import Norm, final_norm, norm_of
from models.protocol import Model

LinearFold = Literal["nothing", "norm weights"]

# --- folding ---------------------------------------------------------------------------------------------------------


def read_through(
    norm: Norm, weight: Float[Tensor, "*batch d_model out"], fold: LinearFold
) -> Float[Tensor, "*batch d_model out"]:
    """The W′ with x W′ = ((x − mean x)·w) W: a weight as it acts on the stream before its norm, whose scale is left at one."""
    if fold == "nothing":
        return weight
    weight = norm.weight[:, None] * weight
    return weight - weight.mean(-2, keepdim=True) if norm.centred else weight


def qk_factors(
    model: Model, fold: LinearFold = "nothing"
) -> tuple[Float[Tensor, "layer head d_model d_head"], Float[Tensor, "layer head d_model d_head"]]:
    """A and B of every head with QK = A Bᵀ: how queries and how keys read the stream."""
    return _reading(model, "W_Q", fold), _reading(model, "W_K", fold)


def ov_factors(
    model: Model, fold: LinearFold = "nothing"
) -> tuple[Float[Tensor, "layer head d_model d_head"], Float[Tensor, "layer head d_head d_model"]]:
    """A and B of every head with OV = A B: how values read the stream, and how they are written to it."""
    return _reading(model, "W_V", fold), stack_heads(model, "W_O").double()


def unembedding(model: Model, fold: LinearFold = "nothing") -> Float[Tensor, "d_model char"]:
    """W_U as it acts on the stream before the final norm."""
    return read_through(final_norm(model), model.unembed.W_U.double(), fold)


def weights_folded(model: Model, fold: LinearFold) -> dict[str, str]:
    """The attribute by which titles say what was multiplied in, for numbers that no scale changes; none without LayerNorm."""
    norms = [final_norm(model), *(norm_of(model, block.ln1) for block in model.blocks)]
    if not any(norm.centred for norm in norms):
        return {}
    return {"folded": "LayerNorm weights" if fold == "norm weights" else "nothing folded in"}


def _reading(model: Model, name: str, fold: LinearFold) -> Tensor:
    weights = stack_heads(model, name).double()
    norms = (norm_of(model, block.ln1) for block in model.blocks)
    return torch.stack([read_through(norm, weight, fold) for norm, weight in zip(norms, weights, strict=True)])


# --- spectra ---------------------------------------------------------------------------------------------------------


def factored_svd(
    a: Float[Tensor, "*batch rows inner"], b: Float[Tensor, "*batch inner columns"]
) -> tuple[Float[Tensor, "*batch rows index"], Float[Tensor, "*batch index"], Float[Tensor, "*batch columns index"]]:
    """Left singular vectors (as columns), singular values from the largest, right singular vectors (as columns) of a b.

    With a = Q R and bᵀ = P S the values are those of R Sᵀ, which has the inner dimension on both sides.
    """
    q, r = torch.linalg.qr(a)
    p, s = torch.linalg.qr(b.mT)
    left, values, right_transposed = torch.linalg.svd(r @ s.mT, full_matrices=False)
    return q @ left, values, p @ right_transposed.mT


def thin_root(
    a: Float[Tensor, "*batch rows inner"], b: Float[Tensor, "*batch inner columns"]
) -> Float[Tensor, "*batch inner columns"]:
    """R b, where a = Q R: the same singular values as a b, and ‖R b M‖ = ‖a b M‖ for every M, but only `inner` rows."""
    return torch.linalg.qr(a).R @ b


def copying_score(
    left: Float[Tensor, "*batch char d_head"],
    right: Float[Tensor, "*batch d_head char"],
    product: Callable[[Tensor, Tensor], Tensor] = lambda left, right: right @ left,
) -> tuple[Float[Tensor, "*batch"], Tensor]:
    """Σλ/Σ|λ| over the eigenvalues λ of left right, in [−1, 1], and the eigenvalues, complex, from the largest modulus.

    By default from the d_head × d_head matrix right left, which has the same eigenvalues but for zeros. Where all of them are
    zero to rounding they are given as 0, and so is the score, which would be 0/0.
    """
    values = torch.linalg.eigvals(product(left, right))
    values = values.gather(-1, values.abs().argsort(dim=-1, descending=True, stable=True))
    rounding = max(left.shape[-2:]) * torch.finfo(left.dtype).eps * left.norm(dim=(-2, -1)) * right.norm(dim=(-2, -1))
    values = values * (values.abs().sum(-1) > rounding)[..., None]
    total = values.abs().sum(-1)
    return (values.real.sum(-1) / total.where(total > 0, 1.0)).clamp(-1, 1), values
