"""Copying: do heads raise the character that they attend to?  Reference: Elhage et al. (2021), "copying heads"."""

from __future__ import annotations

from typing import Annotated

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from analyses.axes import labelled
from analyses.factors import LinearFold, copying_score, ov_factors, read_through, unembedding, weights_folded
from analyses.spec import Knob, analysis
from analyses.stream import norm_of, require_blocks, require_standard
from analyses.views import Heatmap, Scatter
from models.hooked import vocabulary_of
from models.protocol import Model

DRAWS = 100  # random heads per block


@analysis(
    Heatmap(title="Copying", x="head", y="layer", colour="copying_score", text="copying_score", scale="diverging"),
    Scatter(title="Eigenvalues of the OV circuit", x="real_part", y="imaginary_part", over="index", hue="head", facet="layer"),
    group="Circuits",
)
def copying(
    model: Model,
    fold: Annotated[LinearFold, Knob("What of the LayerNorms is multiplied in")] = "norm weights",
) -> xr.Dataset:
    """Copying: how far every head raises the character that it attends to, by the eigenvalues of its OV circuit.

    The circuit M = W_E W_V W_O W_U (V × V) maps characters to characters, so it has eigenvalues λ: a head that raises
    whatever set of characters it sees has positive ones, one that lowers them negative ones. Of at most d_head that are
    not zero, the score is

        Σλ/Σ|λ| = trace M/Σ|λ|    in [−1, 1].

    `fold` multiplies in the weights of the block's LayerNorm before W_V and of the final one before W_U, each x →
    (x − mean x)·w; scales are left at one. The eigenvalues are those of the d_head × d_head matrix W_O W_U W_E W_V too;
    both are computed. In blocks after the first this is the direct path from the embedding only. All in float64.

    To judge a score: heads with random W_V and W_O (normal, 100 seeded draws per block) between this model's own
    embedding and unembedding have scores of `baseline_mean` ± `baseline_sd`.

    Returns:
        `copying_score` (layer, head), 1; `real_part`, `imaginary_part` (layer, head, index) of the d_head eigenvalues, the
        largest modulus first, 1; `baseline_mean`, `baseline_sd`, 1. `identity_error` is the largest difference of a head's
        scores by the two matrices. A head whose eigenvalues are all zero is given the score 0.

    Raises:
        UnsupportedModel: no blocks, or positions or norms of another kind.
        VocabularyError: tokens that are not characters.
    """
    require_standard(model)
    require_blocks(model)
    vocabulary_of(model)
    values_in, values_out = ov_factors(model, fold)
    embeddings, W_U = model.embed.W_E.double(), unembedding(model, fold)  # type: ignore[attr-defined]
    left, right = embeddings @ values_in, values_out @ W_U  # layer head char d_head, layer head d_head char
    score, eigenvalues = copying_score(left, right)
    check, _ = copying_score(left, right, product=torch.matmul)
    random = random_scores(model, fold)
    silent = [f"L{layer}H{head}" for layer, head in (eigenvalues.abs().sum(-1) == 0).nonzero().tolist()]
    note = (
        f"Heads with random W_V and W_O score {random.mean():.2f} ± {random.std():.2f} (mean, standard deviation) in this model. "
        "The norms' scales are left at one, and in blocks after the first only the embedding is read."
    )
    if silent:
        note += f" The circuit of {', '.join(silent)} is zero: it neither copies nor suppresses, and has the score 0."
    dataset = labelled(
        model,
        identity=("scores from V × V = scores from d_head × d_head", (score - check).abs().max().item()),
        note=note,
        copying_score=(score, "layer head", "copying score Σλ/Σ|λ|", "1"),
        real_part=(eigenvalues.real, "layer head index", "real part of the eigenvalue", "1"),
        imaginary_part=(eigenvalues.imag, "layer head index", "imaginary part of the eigenvalue", "1"),
        baseline_mean=(random.mean(), "", "mean copying score of random heads", "1"),
        baseline_sd=(random.std(), "", "standard deviation of the copying score of random heads", "1"),
    )
    dataset.attrs |= weights_folded(model, fold)
    return dataset


def random_scores(model: Model, fold: LinearFold, seed: int = 0) -> Float[Tensor, "layer draw"]:
    """Copying scores of heads whose W_V and W_O are normal random numbers, between the model's own W_E and W_U."""
    generator = torch.Generator().manual_seed(seed)
    embeddings, W_U = model.embed.W_E.double(), unembedding(model, fold)  # type: ignore[attr-defined]
    d_model, d_head = model.cfg.d_model, model.cfg.d_head
    scores = []
    for block in model.blocks:
        W_V, W_O = (
            torch.randn(DRAWS, *shape, generator=generator, dtype=torch.float64).to(W_U.device)
            for shape in ((d_model, d_head), (d_head, d_model))
        )
        W_V = read_through(norm_of(model, block.ln1), W_V, fold)
        scores.append(copying_score(embeddings @ W_V, W_O @ W_U)[0])
    return torch.stack(scores)
