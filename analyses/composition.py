"""Composition of heads: which later head reads what which earlier head writes.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
import xarray as xr
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from analyses.axes import labelled
from analyses.factors import LinearFold, ov_factors, qk_factors, thin_root, weights_folded
from analyses.spec import Knob, analysis
from analyses.stream import UnsupportedModel, require_standard
from analyses.views import Heatmap, Table
from models.protocol import Model

COMPOSITIONS = ("Q", "K", "V")
DRAWS = 100  # random pairs of heads per composition


@analysis(
    Heatmap(title="Composition beyond chance", x="receiver", y="sender", colour="excess", scale="diverging",
            at=("composition",)),
    Heatmap(title="Share of the most possible", x="receiver", y="sender", colour="relative",
            scale="probability", at=("composition",)),
    Heatmap(title="Composition score", x="receiver", y="sender", colour="score", at=("composition",)),
    Table(title="Random heads, and the strongest pairs", rows=("composition",),
          columns=("baseline_mean", "baseline_sd", "strongest_score", "strongest")),
    group="Circuits",
)  # fmt: skip
def composition(
    model: Model,
    composition: Annotated[Literal["Q", "K", "V"], Knob("Through which input of the later head")] = "K",
    fold: Annotated[LinearFold, Knob("What of the LayerNorms is multiplied in")] = "norm weights",
) -> xr.Dataset:
    """Composition: how strongly every head's output enters the queries, keys or values of every later head.

    For a sender s in an earlier block and a receiver r in a later one, with QK = W_Q W_Kᵀ and OV = W_V W_O acting on row
    vectors, the share of the two norms (Frobenius) that survives in the product:

        Q: ‖OV_s QK_r‖/(‖OV_s‖ ‖QK_r‖),    K: ‖OV_s QK_rᵀ‖/(‖OV_s‖ ‖QK_r‖),    V: ‖OV_s OV_r‖/(‖OV_s‖ ‖OV_r‖).

    The largest that the singular values σ of the two allow is √(Σ_i σ_i(s)² σ_i(r)²), reached if the sender writes along
    the very directions that the receiver reads most; `relative` divides by it. Unrelated heads score about 1/√d: the
    baseline is 100 seeded pairs of heads with normal random weights of the same shapes. `fold` multiplies the weights of
    the norms in front of the heads into both; scales are left at one, and MLPs in between are passed by. In float64.

    Returns:
        `score` (composition, sender, receiver), 0 to 1; `relative`, 0 to 1; `excess`, score minus `baseline_mean`;
        `baseline_mean`, `baseline_sd` (composition); `strongest`, the pair with the largest score, and that score.
        A pair whose sender is not in an earlier block is 0 in all three. `identity_error` is the largest difference of
        the squared scores from those by the d × d products, ‖A B‖² = ⟨Aᵀ A, B Bᵀ⟩.

    Raises:
        UnsupportedModel: fewer than two blocks, or positions or norms of another kind.
    """
    require_standard(model)
    if model.cfg.n_layers < 2:
        raise UnsupportedModel(
            f"heads compose from one block to a later one, and this model has {model.cfg.n_layers} "
            f"block{'s' * (model.cfg.n_layers != 1)}; give one with at least 2"
        )
    heads = model.cfg.n_heads
    senders, *receivers = pairs_of(model, fold)
    earlier = torch.arange(len(senders.first))[:, None] // heads < torch.arange(len(senders.first)) // heads + 1
    scores = [scored(senders, receiver, earlier) for receiver in receivers]
    score, relative, wrong = (torch.stack(parts) for parts in zip(*scores, strict=True))
    random = random_scores(model)
    mean, sd = random.mean(-1), random.std(-1)
    names = {
        "composition": COMPOSITIONS,
        "sender": [f"L{n // heads}H{n % heads}" for n in range(len(senders.first))],
        "receiver": [f"L{n // heads + 1}H{n % heads}" for n in range(len(senders.first))],
    }
    best = score.flatten(1).max(-1)
    pairs = [f"{names['sender'][n // len(earlier)]} → {names['receiver'][n % len(earlier)]}" for n in best.indices.tolist()]
    excess = torch.where(earlier, score - mean[:, None, None], 0.0)
    dims = "composition sender receiver"
    kind = f"{composition}-composition"
    dataset = labelled(
        model,
        names=names,
        identity=("‖A B‖² = ⟨AᵀA, B Bᵀ⟩, of the scores", wrong.max().item()),
        note="Pairs whose sender is not in an earlier block than the receiver are left at 0." if model.cfg.n_layers > 2 else None,
        excess=(excess, dims, f"{kind} score minus that of random heads", "1"),
        relative=(relative, dims, f"{kind}, share of the most possible", "1"),
        score=(score, dims, f"{kind} score", "1"),
        baseline_mean=(mean, "composition", "mean score of random heads", "1"),
        baseline_sd=(sd, "composition", "standard deviation", "1"),
        strongest_score=(best.values, "composition", "largest score", "1"),
        strongest=(pairs, "composition", "strongest pair", "character"),
    )
    dataset.attrs |= weights_folded(model, fold)
    return dataset


class Products(NamedTuple):
    """One d × d matrix per head, first @ second: a sender's OV, or what a receiver applies to a vector that enters it."""

    first: Float[Tensor, "pair d_model d_head"]
    second: Float[Tensor, "pair d_head d_model"]


def pairs_of(model: Model, fold: LinearFold) -> tuple[Products, Products, Products, Products]:
    """OV of all heads but those of the last block; and QK, QKᵀ and OV of all but those of the first."""
    queries, keys = qk_factors(model, fold)
    reads, writes = ov_factors(model, fold)

    def flat(first: Tensor, second: Tensor, layers: slice) -> Products:
        return Products(*(rearrange(x[layers], "layer head row column -> (layer head) row column") for x in (first, second)))

    later = slice(1, None)
    return (
        flat(reads, writes, slice(0, -1)),
        flat(queries, keys.mT, later),  # x QK kᵀ: the sender's output is x
        flat(keys, queries.mT, later),  # q QK xᵀ = x QKᵀ qᵀ: it is the key
        flat(reads, writes, later),
    )


def scored(
    senders: Products, receivers: Products, allowed: Bool[Tensor, "sender receiver"]
) -> tuple[Float[Tensor, "sender receiver"], Float[Tensor, "sender receiver"], Float[Tensor, ""]]:
    """Scores, their share of what the singular values allow, and the error of the squared scores; 0 where not allowed.

    A head whose matrix is zero composes with nothing: 0.
    """
    left = thin_root(*senders)  # sender d_head d_model: as good as the product from the left
    right = thin_root(receivers.second.mT, receivers.first.mT).mT  # receiver d_model d_head: and this one from the right
    squares = torch.einsum("sam,rmb->srab", left, right).pow(2).sum((-2, -1))
    norms = left.pow(2).sum((-2, -1))[:, None] * right.pow(2).sum((-2, -1))
    bounds = torch.linalg.svdvals(left).pow(2) @ torch.linalg.svdvals(right).pow(2).mT
    first, second = (products.first @ products.second for products in (senders, receivers))
    check = torch.einsum("sij,rij->sr", first.mT @ first, second @ second.mT)
    errors = _share(check, norms, allowed) - _share(squares, norms, allowed)
    return _share(squares, norms, allowed).sqrt(), _share(squares, bounds, allowed).sqrt(), errors.abs().max()


def _share(squares: Tensor, of: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(allowed & (of > 0), squares / of.where(of > 0, 1.0), 0.0)


def random_scores(model: Model, seed: int = 0) -> Float[Tensor, "composition draw"]:
    """Scores of pairs of heads whose weights are normal random numbers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (DRAWS, model.cfg.d_model, model.cfg.d_head)
    scores = []
    for _ in COMPOSITIONS:
        a, b, c, d = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
        left, right = thin_root(a, b.mT), thin_root(d, c.mT).mT
        scores.append((left @ right).norm(dim=(-2, -1)) / left.norm(dim=(-2, -1)) / right.norm(dim=(-2, -1)))
    return torch.stack(scores)
