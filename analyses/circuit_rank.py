"""Rank of QK and OV circuits, measured.  Reference: Elhage et al. (2021); Roy & Vetterli (2007) for the effective rank."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from analyses.axes import labelled
from analyses.circuits import stack_heads
from analyses.spec import Knob, analysis
from analyses.stream import require_blocks, require_standard
from analyses.views import Heatmap, Lines
from models.protocol import Model


@analysis(
    Lines(title="Singular values of QK", x="index", y="qk_singular_value", hue="head", facet="layer"),
    Lines(title="Singular values of OV", x="index", y="ov_singular_value", hue="head", facet="layer"),
    Heatmap(title="Rank of QK", x="head", y="layer", colour="qk_rank", text="qk_rank"),
    Heatmap(title="Rank of OV", x="head", y="layer", colour="ov_rank", text="ov_rank"),
    Heatmap(title="Effective rank of QK", x="head", y="layer", colour="qk_effective_rank", text="qk_effective_rank"),
    Heatmap(title="Effective rank of OV", x="head", y="layer", colour="ov_effective_rank", text="ov_effective_rank"),
    group="Circuits",
)
def circuit_rank(
    model: Model,
    biases: Annotated[bool, Knob("Fold the biases in as an extra row")] = False,
) -> xr.Dataset:
    """Circuit rank: how many directions each head's QK and OV circuits really use.

    The d × d products W_Q W_Kᵀ and W_V W_O pass through d_head dimensions, so their rank is at most d_head. Here it is
    measured: the full product is formed in float64, and its singular values above

        tolerance = d · ε · σ_max,    ε = 2.2·10⁻¹⁶,

    are counted (the tolerance of `numpy.linalg.matrix_rank`). With biases folded in, x becomes (x, 1): QK is
    [W_Q; b_Q] [W_K; b_K]ᵀ and still at most d_head; OV gains the row b_V W_O + b_O and the bound d_head + 1, because
    b_O need not lie in the head's output space.

    The effective rank of Roy & Vetterli (2007) says how evenly the directions are used: with p_i = σ_i/Σσ it is

        exp(−Σ p_i ln p_i),

    n for n equal singular values, near 1 if one dominates; 0 here for a matrix of zeros.

    Returns:
        `qk_singular_value`, `ov_singular_value` (layer, head, index), largest first, d of them; `qk_rank`, `ov_rank`,
        `qk_effective_rank`, `ov_effective_rank`, `qk_tolerance`, `ov_tolerance` (layer, head); `qk_bound`, `ov_bound`, the
        bounds on paper.

    Raises:
        UnsupportedModel: rotary positions or grouped keys, which have no single QK matrix per head.
    """
    require_standard(model)
    require_blocks(model)
    double = {name: stack_heads(model, name).double() for name in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")}
    if biases:
        q, k, v = (torch.cat([double[f"W_{x}"], double[f"b_{x}"][:, :, None]], dim=2) for x in "QKV")
        qk, ov = q @ k.mT, v @ double["W_O"]
        ov[:, :, -1] += torch.stack([block.attn.b_O for block in model.blocks]).double()[:, None]
    else:
        qk, ov = double["W_Q"] @ double["W_K"].mT, double["W_V"] @ double["W_O"]
    d_head = model.cfg.d_head
    variables: dict[str, Any] = {}
    for name, product, bound in (("qk", qk, d_head), ("ov", ov, d_head + biases)):
        values, rank, tolerance = measured_rank(product)
        matrix = name.upper()
        variables |= {
            f"{name}_singular_value": (values[..., : model.cfg.d_model], "layer head index", f"singular value of {matrix}", "1"),
            f"{name}_rank": (rank, "layer head", f"rank of {matrix}", "1"),
            f"{name}_effective_rank": (effective_rank(values), "layer head", f"effective rank of {matrix}", "1"),
            f"{name}_tolerance": (tolerance, "layer head", f"tolerance of the rank of {matrix}", "1"),
            f"{name}_bound": (bound, "", f"bound on the rank of {matrix}", "1"),
        }
    note = (
        f"On paper the rank of QK is at most {d_head}, of OV at most {d_head + biases}. A singular value counts if it is above "
        f"{2.2e-16 * max(qk.shape[-2:]):.1e} of the head's largest."
    )
    return labelled(model, note=note, **variables)


def measured_rank(
    products: Float[Tensor, "layer head rows columns"],
) -> tuple[Float[Tensor, "layer head index"], Int[Tensor, "layer head"], Float[Tensor, "layer head"]]:
    """Singular values, how many are above the tolerance, and the tolerance: max(rows, columns) · ε · σ_max."""
    values = torch.linalg.svdvals(products)
    tolerance = max(products.shape[-2:]) * torch.finfo(products.dtype).eps * values[..., 0]
    return values, (values > tolerance[..., None]).sum(-1), tolerance


def effective_rank(values: Float[Tensor, "*batch index"]) -> Float[Tensor, "*batch"]:
    """exp of the entropy of the singular values divided by their sum, from 1 to their number; 0 if all are zero."""
    total = values.sum(-1)
    shares = values / total.where(total > 0, 1.0)[..., None]
    return torch.where(total > 0, torch.special.entr(shares).sum(-1).exp(), 0.0)
