"""Component cosines: which components write along, or against, one another.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import xarray as xr
from torch.nn.functional import normalize

from analyses.axes import labelled
from analyses.spec import Knob, Position, Text, analysis
from analyses.stream import UnsupportedModel, decomposition, require_standard, run
from analyses.views import Heatmap
from models.hooked import encode
from models.protocol import Model


@analysis(
    Heatmap(title="Cosine of each pair, averaged over the text", x="other_component", y="component", colour="mean_cosine",
            scale="diverging"),
    Heatmap(title="Cosine of each pair at the chosen position", x="other_component", y="component", colour="cosine",
            scale="diverging"),
    group="Residual stream",
)  # fmt: skip
def component_cosines(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    position: Position = None,
    decompose: Annotated[Literal["sublayer", "head"], Knob("How finely attention is split")] = "head",
) -> xr.Dataset:
    """Component cosines: which components write along, or against, one another.

    For every pair of components that write to the residual stream at one position,

        cosine(a, b) = c_a · c_b / (‖c_a‖ ‖c_b‖),

    1 where they write the same direction, −1 where one erases what the other writes, 0 where they keep out of each
    other's way. The mean is that of the cosines over all positions of the text, each position for itself; it is not the
    cosine of mean vectors. Together with the lengths, the cosines are the length of the stream:

        ‖x‖² = Σ over a, b of cosine(a, b) ‖c_a‖ ‖c_b‖.

    A component that is zero somewhere in the text (a bias that the model lacks, a head that writes nothing) has no
    direction there and is left out; the note names it.

    Returns:
        `cosine` (component, other_component), −1 to 1, at `position`; `mean_cosine` (component, other_component), over
        all positions; `length` (component), ‖c‖ at `position`. `identity_error` is the largest difference between the
        two sides of the equation above, as lengths, over all positions.

    Raises:
        KnobError: the text cannot be read, or the position is outside it.
        UnsupportedModel: the model's stream is not such a sum, or nothing writes to it.
    """
    require_standard(model)
    tokens = encode(model, text)
    _, cache = run(model, tokens)
    split = decomposition(model, cache, by=decompose)
    lengths, directions = split.parts.norm(dim=-1), normalize(split.parts, dim=-1)  # where a part is zero, so are both
    cosines = torch.einsum("apd,bpd->abp", directions, directions)
    whole = torch.einsum("abp,ap,bp->p", cosines, lengths, lengths).clamp(min=0).sqrt()
    kept = (lengths > 0).all(-1).nonzero()[:, 0].tolist()
    if not kept:
        raise UnsupportedModel("every component of this model is zero somewhere in the text; give a model that writes something")
    shown = cosines[kept][:, kept]
    names = [split.names[row] for row in kept]
    left_out = [name for name in split.names if name not in names]
    place = len(tokens) - 1 if position is None else position
    pair, error = "component other_component", (whole - split.stream.norm(dim=-1)).abs().max().item()
    return labelled(
        model,
        names={"component": names, "other_component": names},
        identity=("‖sum of components‖ from lengths and cosines = ‖stream‖", error),
        note=f"Zero somewhere in this text, so without a direction and left out: {', '.join(left_out)}." if left_out else None,
        mean_cosine=(shown.mean(-1), pair, "cosine, mean over positions", "1"),
        cosine=(shown[..., place], pair, "cosine", "1"),
        length=(lengths[kept, place], "component", "length of the contribution", "1"),
    )
