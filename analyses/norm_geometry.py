"""LayerNorm geometry: what normalisation does to the stream, measured.  Reference: Brody, Alon & Yahav (2023)."""

from __future__ import annotations

import torch
import xarray as xr
from torch import Tensor

from analyses.axes import labelled
from analyses.spec import Text, analysis
from analyses.stream import Norm, UnsupportedModel, final_norm, final_stream, norm_of, require_standard, run
from analyses.views import Heatmap
from models.hooked import encode
from models.protocol import Model


@analysis(
    Heatmap(title="Length of the stream before normalisation", x="position", y="reading", colour="length"),
    Heatmap(title="And after it, in units of √d", x="position", y="reading", colour="radius"),
    group="Residual stream",
)
def norm_geometry(model: Model, text: Text = "KING RICHARD III:\nNow is the winter") -> xr.Dataset:
    """LayerNorm geometry: where normalisation puts the stream, at every LayerNorm and position.

    Before its weight and bias, LayerNorm takes the stream x, with mean μ and standard deviation σ over its d
    coordinates, to

        n = (x − μ)/√(σ² + ε).

    The subtraction projects x onto the hyperplane at right angles to (1, …, 1), so the mean of n is 0; the division
    projects it towards a sphere about the origin. There σ = ‖x − μ‖/√d, so the length of n is not quite √d but

        ‖n‖ = √d · σ/√(σ² + ε).

    The sublayers therefore read the stream's direction within the hyperplane and nothing else: what they see lies on a
    sphere of d − 2 dimensions, as far as σ is large against √ε. n is the model's own, recorded in a forward pass; μ and
    σ are computed from the stream before it.

    Returns:
        All (reading, position): `mean` of n; `radius`, ‖n‖/√d; `expected_radius`, σ/√(σ² + ε), 0 to 1; `scale`,
        √(σ² + ε), as the model recorded it; `length`, ‖x‖; `stream_mean`, μ. Readings are `L0.ln1`, before attention,
        `L0.ln2`, before the MLP, and so on, and `final`. `identity_error` is the largest of |radius − expected radius|
        and |mean|.

    Raises:
        KnobError: the text is empty, too long or has unknown characters.
        UnsupportedModel: the model has no LayerNorm, or norms of another kind.
    """
    require_standard(model)
    tokens = encode(model, text)
    readings, without = _readings(model)
    if not readings:
        raise UnsupportedModel("this model has no LayerNorm anywhere, so nothing is normalised; give one with, such as 'baby'")
    _, cache = run(model, tokens)
    streams = {"final": final_stream(model, cache)} | {
        f"L{layer}.{name}": cache[f"blocks.{layer}.hook_{site}"]
        for layer in range(model.cfg.n_layers)
        for name, site in (("ln1", "resid_pre"), ("ln2", "resid_mid"))
        if f"L{layer}.{name}" in readings
    }
    names = list(readings)
    x = torch.stack([streams[name] for name in names])  # reading position d_model
    n, scale = (_recorded(cache, names, point) for point in ("hook_normalized", "hook_scale"))
    eps = torch.tensor([readings[name].eps for name in names], dtype=x.dtype, device=x.device)[:, None]
    variance = x.var(-1, unbiased=False)
    radius, expected = n.pow(2).mean(-1).sqrt(), (variance / (variance + eps)).sqrt()
    error = torch.maximum((radius - expected).abs().max(), n.mean(-1).abs().max()).item()
    dims = "reading position"
    return labelled(
        model,
        tokens,
        names={"reading": names},
        identity=("‖n‖ = √d · σ/√(σ² + ε), and the mean of n is 0", error),
        note=f"No LayerNorm in this model, so left out: {', '.join(without)}." if without else None,
        radius=(radius, dims, "length after normalisation, divided by √d", "1"),
        expected_radius=(expected, dims, "σ/√(σ² + ε)", "1"),
        mean=(n.mean(-1), dims, "mean after normalisation", "1"),
        scale=(scale[..., 0], dims, "√(variance + ε)", "1"),
        length=(x.norm(dim=-1), dims, "length of the stream", "1"),
        stream_mean=(x.mean(-1), dims, "mean of the stream", "1"),
    )


def _readings(model: Model) -> tuple[dict[str, Norm], list[str]]:
    """The LayerNorms by the name of the reading, in order; and the readings that have none."""
    norms = {
        f"L{layer}.{name}": norm_of(model, getattr(block, name))
        for layer, block in enumerate(model.blocks)
        for name in (("ln1",) if model.cfg.attn_only else ("ln1", "ln2"))
    } | {"final": final_norm(model)}
    return {name: norm for name, norm in norms.items() if norm.centred}, [name for name in norms if not norms[name].centred]


def _recorded(cache: dict[str, Tensor], readings: list[str], point: str) -> Tensor:
    """What the model's LayerNorms recorded, (reading, position, …)."""
    paths = ("ln_final" if name == "final" else f"blocks.{name[1:]}" for name in readings)
    return torch.stack([cache[f"{path}.{point}"] for path in paths])
