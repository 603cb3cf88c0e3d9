"""Residual stream: who writes what, at every position.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated, Literal

import xarray as xr
from torch.nn.functional import cosine_similarity

from analyses.axes import labelled
from analyses.spec import Knob, Text, analysis
from analyses.stream import decomposition, require_standard, run
from analyses.views import Heatmap
from models.hooked import encode
from models.protocol import Model


@analysis(
    Heatmap(title="Size of each contribution", x="position", y="component", colour="norm"),
    Heatmap(title="Direction: cosine with the final stream", x="position", y="component", colour="cosine", scale="diverging"),
    Heatmap(title="Size of the stream so far", x="position", y="component", colour="cumulative_norm"),
    Heatmap(title="Direction of the stream so far: cosine with the final stream", x="position", y="component",
            colour="cumulative_cosine", scale="diverging"),
    group="Residual stream",
)  # fmt: skip
def residual_stream(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    decompose: Annotated[Literal["sublayer", "head"], Knob("How finely attention is split")] = "head",
) -> xr.Dataset:
    """Residual stream: the size and direction of what every component writes, at every position.

    The stream after the last block is a plain sum,

        x = embed + pos_embed + Σ over layers (attention + MLP),

    and attention is a sum over heads, each with its value bias, plus the output bias b_O. Every term is read off one
    forward pass. The size of a term is its length ‖c‖; its direction is the cosine between c and the stream x, so that
    a term which is overwritten later shows a low or negative cosine. The stream so far, at a component, is the sum of
    that component and all above it in the list, in the order in which they are written; heads of one block write at the
    same time and are listed by number.

    Returns:
        `norm` (component, position), ≥ 0; `cosine` (component, position), −1 to 1, and 0 for a component that is zero;
        `cumulative_norm`, `cumulative_cosine` (component, position), the same of the stream so far; `stream_norm`
        (position). Parts add up to the stream within `identity_error`.

    Raises:
        KnobError: the text is empty, too long or has unknown characters.
        UnsupportedModel: the model's stream is not such a sum.
    """
    require_standard(model)
    tokens = encode(model, text)
    _, cache = run(model, tokens)
    split = decomposition(model, cache, by=decompose)
    so_far, stream, dims = split.parts.cumsum(0), split.stream[None], "component position"
    return labelled(
        model,
        tokens,
        names={"component": split.names},
        identity=("sum of components = stream after the last block", split.identity_error),
        norm=(split.parts.norm(dim=-1), dims, "length of the contribution", "1"),
        cosine=(cosine_similarity(split.parts, stream, dim=-1), dims, "cosine with the final stream", "1"),
        cumulative_norm=(so_far.norm(dim=-1), dims, "length of the stream so far", "1"),
        cumulative_cosine=(cosine_similarity(so_far, stream, dim=-1), dims, "cosine of the stream so far with the last", "1"),
        stream_norm=(split.stream.norm(dim=-1), "position", "length of the final stream", "1"),
    )
