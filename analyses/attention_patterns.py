"""Attention patterns: where each head looks.  Reference: Vaswani et al. (2017); Elhage et al. (2021)."""

from __future__ import annotations

import torch
import xarray as xr

from analyses.axes import labelled
from analyses.spec import Head, Layer, Text, analysis
from analyses.stream import run
from analyses.views import HeadGrid, Heatmap, Lines
from models.hooked import encode
from models.protocol import Model


@analysis(
    HeadGrid(title="All heads", x="key_position", y="query_position", colour="pattern", scale="probability"),
    Heatmap(
        title="The chosen head", x="key_position", y="query_position", colour="pattern", scale="probability",
        at=("layer", "head"),
    ),
    Lines(title="How spread out each head looks: entropy", x="query_position", y="entropy", hue="head", facet="layer"),
    Lines(title="Attention to the first position", x="query_position", y="attention_to_first", hue="head", facet="layer"),
    group="Attention",
)  # fmt: skip
def attention_patterns(
    model: Model, text: Text = "KING RICHARD III:\nNow is the winter", layer: Layer = 0, head: Head = 0
) -> xr.Dataset:
    """Attention patterns: where every head looks, for every character of a text.

    Each row is a probability over the past,

        A[q, k] = softmax over k ≤ q of (x_q W_Q + b_Q)·(x_k W_K + b_K)/√d_head,

    with x the stream after the block's first LayerNorm. Rows are queries, columns keys; nothing is above the diagonal.
    The entropy of a row, −Σ A ln A, says how spread out it is: 0 for one place, ln(q + 1) for all alike, the most there
    is at query q. Heads that have nothing to do often rest on the first position, so A[q, 0] is given too.

    Returns:
        `pattern` (layer, head, query_position, key_position), probability; rows add up to one within
        `identity_error`. `entropy` (layer, head, query_position), nats; `attention_to_first` (layer, head,
        query_position), probability, 1 at query 0. `layer` and `head` choose which pattern is drawn large.

    Raises:
        KnobError: the text cannot be read, or there is no such head.
    """
    tokens = encode(model, text)
    _, cache = run(model, tokens)
    pattern = torch.stack([cache[f"blocks.{number}.attn.hook_pattern"] for number in range(model.cfg.n_layers)])
    each = "layer head query_position"
    return labelled(
        model,
        tokens,
        identity=("every row of attention sums to 1", (pattern.sum(-1) - 1).abs().max().item()),
        pattern=(pattern, "layer head query_position key_position", "attention", "probability"),
        entropy=(torch.special.entr(pattern).sum(-1), each, "entropy of attention", "nats"),
        attention_to_first=(pattern[..., 0], each, "attention to the first position", "probability"),
    )
