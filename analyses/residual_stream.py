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
    group="Residual stream",
)
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
    a term which is overwritten later shows a low or negative cosine.

    Returns:
        `norm` (component, position), ≥ 0; `cosine` (component, position), −1 to 1; `stream_norm` (position). Parts add
        up to the stream within `identity_error`.

    Raises:
        KnobError: the text is empty, too long or has unknown characters.
        UnsupportedModel: the model's stream is not such a sum.
    """
    require_standard(model)
    tokens = encode(model, text)
    _, cache = run(model, tokens)
    parts = decomposition(model, cache, by=decompose)
    return labelled(
        model,
        tokens,
        components=parts.names,
        identity=("sum of components = stream after the last block", parts.identity_error),
        norm=(parts.parts.norm(dim=-1), "component position", "length of the contribution", "1"),
        cosine=(
            cosine_similarity(parts.parts, parts.stream[None], dim=-1),
            "component position",
            "cosine with the final stream",
            "1",
        ),
        stream_norm=(parts.stream.norm(dim=-1), "position", "length of the final stream", "1"),
    )
