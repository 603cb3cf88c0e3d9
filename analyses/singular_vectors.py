"""Singular vectors of a head's QK or OV, read in characters.  Reference: Millidge & Black (2022); Elhage et al. (2021)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from analyses.axes import labelled
from analyses.circuits import reading
from analyses.factors import LinearFold, factored_svd, ov_factors, qk_factors, unembedding
from analyses.spec import Head, Knob, Layer, analysis
from analyses.stream import require_standard
from analyses.views import Heatmap, Lines, Table
from models.hooked import vocabulary_of
from models.protocol import Model

EXTREMES = 5  # characters named at each end of a direction


@analysis(
    Table(title="Characters at the ends of each direction", rows=("index",),
          columns=("singular_value", "input_largest", "input_smallest", "output_largest", "output_smallest")),
    Heatmap(title="Query side of each direction", x="query_char", y="index", colour="input_reading", scale="diverging"),
    Heatmap(title="Key side of each direction", x="key_char", y="index", colour="output_reading", scale="diverging"),
    Heatmap(title="Input side of each direction", x="source_char", y="index", colour="input_reading", scale="diverging"),
    Heatmap(title="Output side of each direction", x="output_char", y="index", colour="output_reading", scale="diverging"),
    Lines(title="Singular values", x="index", y="singular_value"),
    group="Circuits",
)  # fmt: skip
def singular_vectors(
    model: Model,
    layer: Layer = 0,
    head: Head = 0,
    circuit: Annotated[Literal["QK", "OV"], Knob("Which of the head's two circuits")] = "OV",
    fold: Annotated[LinearFold, Knob("What of the LayerNorms is multiplied in")] = "norm weights",
) -> xr.Dataset:
    """Singular vectors: the directions that a head reads and writes, each as a list of characters.

    The head's d × d circuit is a sum of d_head directions, the strongest first,

        OV = Σ_i σ_i u_i v_iᵀ,    QK = Σ_i σ_i u_i v_iᵀ,

    with u and v of length one. OV looks for u_i and writes σ_i v_i; QK matches u_i in the query with v_i in the key. They
    are read in characters: u through W_E, e·u_i; v through W_U, v_i·W_U, for OV and through W_E for QK. Σ_i σ_i (input
    reading)(output reading) is the circuit between characters. `fold` multiplies in the weights of the norms on either
    side, x → (x − mean x)·w, with their scales left at one. Computed in float64 through the head's factors.

    Of u and −u neither is preferred; the sign is chosen so that the input reading of largest magnitude is positive.

    Returns:
        `singular_value` (index), 1; `input_reading` (index, source_char or query_char) and `output_reading` (index,
        output_char or key_char), 1, of all d_head directions; for each side the five characters with the largest and with
        the smallest reading, from the extreme inwards. `identity_error` is max |Σ_i σ_i u_i v_iᵀ − the product|.

    Raises:
        KnobError: there is no such head.
        UnsupportedModel: positions or norms of another kind.
        VocabularyError: tokens that are not characters.
    """
    require_standard(model)
    characters = vocabulary_of(model).characters
    embeddings = model.embed.W_E.double()  # type: ignore[attr-defined]
    if circuit == "QK":
        queries, keys = qk_factors(model, fold)
        a, b, reader = queries[layer, head], keys[layer, head].mT, embeddings.mT
        sides = ("query_char", "key_char")
    else:
        values, outputs = ov_factors(model, fold)
        a, b, reader = values[layer, head], outputs[layer, head], unembedding(model, fold)
        sides = ("source_char", "output_char")
    left, values, right = factored_svd(a, b)
    rebuilt = torch.einsum("ri,i,ci->rc", left, values, right)
    read_in, read_out = left.mT @ embeddings.mT, right.mT @ reader  # index char
    sign = torch.where(read_in.gather(-1, read_in.abs().argmax(-1, keepdim=True)) < 0, -1.0, 1.0)
    read_in, read_out = sign * read_in, sign * read_out
    ends: dict[str, Any] = {
        f"{side}_{end}": (extremes(signed * reading, characters), "index", f"{side}, {end}", "character")
        for side, reading in (("input", read_in), ("output", read_out))
        for end, signed in (("largest", 1), ("smallest", -1))
    }
    dataset = labelled(
        model,
        identity=(f"Σ σ u vᵀ = {circuit}", (rebuilt - a @ b).abs().max().item()),
        note=_note(values, circuit),
        singular_value=(values, "index", f"singular value of {circuit}", "1"),
        input_reading=(read_in, f"index {sides[0]}", "reading of the input side", "1"),
        output_reading=(read_out, f"index {sides[1]}", "reading of the output side", "1"),
        **ends,
    )
    dataset.attrs["folded"] = reading(model, fold).folded
    return dataset


def extremes(readings: Float[Tensor, "index char"], characters: Sequence[str]) -> np.ndarray:
    """For every direction its characters with the largest readings, quoted, the largest first."""
    best = readings.argsort(dim=-1, descending=True, stable=True)[:, :EXTREMES]
    return np.array([" ".join(repr(characters[number]) for number in row) for row in best.tolist()], dtype=object)


def _note(values: Float[Tensor, "index"], circuit: str) -> str:
    """What is not unique about the directions."""
    note = "Where singular values are equal, or nearly so, only the space that their directions span is determined."
    tiny = int((values <= len(values) * torch.finfo(values.dtype).eps * values[0]).sum())
    if tiny:
        note += f" {tiny} of the {len(values)} singular values of {circuit} are zero; their directions are arbitrary."
    return note
