"""QK circuit on a text: how much of a head's score is characters, how much is places.  Reference: Elhage et al. (2021)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from analyses.axes import labelled
from analyses.spec import Head, Knob, Layer, Text, analysis
from analyses.stream import norm_of, require_standard, run
from analyses.views import Bars, Heatmap
from models.hooked import encode
from models.protocol import Model

Part = Literal["char-char", "char-position", "char-rest", "position-char", "position-position", "position-rest",
               "rest-char", "rest-position", "rest-rest", "bias-key", "query-bias"]  # fmt: skip
PARTS: tuple[Part, ...] = get_args(Part)


@analysis(
    Bars(title="Share of every part in the variance of the score", x="share", y="part"),
    Heatmap(title="The chosen part", x="key_position", y="query_position", colour="part_score", scale="diverging"),
    Heatmap(title="All parts together", x="key_position", y="query_position", colour="total", scale="diverging"),
    Heatmap(title="Beside all other heads", x="component", y="part", colour="head_share", scale="diverging"),
    group="Circuits",
)
def qk_blocks(
    model: Model,
    text: Text = "KING RICHARD III:\nNow is the winter",
    layer: Layer = 0,
    head: Head = 0,
    part: Annotated[Part, Knob("Which part of the score to draw, query side first")] = "char-char",
) -> xr.Dataset:
    """QK blocks: a head's score on a text as a sum of what characters, places and earlier blocks ask of each other.

    The stream that enters a block is x = char + position + rest: the rows of W_E and W_pos, and all that earlier blocks
    wrote. Its LayerNorm divides by the scale s that it really has at that place, and then all is linear, so

        score[q, k] = Σ_a Σ_b a_q W_Q W_Kᵀ b_kᵀ/√d_head + bias-key + query-bias,    a_p = (part a of x_p − its mean)·w/s_p,

    exactly, with nine terms for a, b ∈ {char, position, rest}. `bias-key` is what the constants of the query, LayerNorm's
    bias times W_Q and b_Q, score with a key: the same from every query. `query-bias` is every query with the constants of
    the key: the same for every key, so that the softmax does not see it.

    A part's share of a head is the share of the score's variance over the pairs k ≤ q,

        share_b = Cov(term_b, score)/Var(score),    each row of keys centred first,

    because a constant per query changes no attention. Shares add up to one; one is negative where a part works against
    the others, and text ties characters to places, so that shares are of this text.

    Returns:
        `score` (part, query_position, key_position), 1, of the chosen head; `part_score`, the chosen part of it, and
        `total`, the sum; all are 0 above the diagonal, where attention is masked. `share` (part), 1; `head_share` (part,
        component), the same for every head, by name. `identity_error` is max |Σ parts − the model's own scores| over all
        heads and all k ≤ q.

    Raises:
        KnobError: the text cannot be read, or there is no such head.
        UnsupportedModel: positions or norms of another kind.
    """
    require_standard(model)
    tokens = encode(model, text)
    _, cache = run(model, tokens)
    past = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=tokens.device).tril()
    chosen, error, names = None, 0.0, []
    shares: list[Tensor] = []
    for number in range(model.cfg.n_layers):
        terms = score_parts(model, cache, number).masked_fill(~past, 0.0)
        own = cache[f"blocks.{number}.attn.hook_attn_scores"].masked_fill(~past, 0.0)
        error = max(error, (terms.sum(0) - own).abs().max().item())
        for place, share in enumerate(variance_shares(terms, past)):
            if share is not None:
                names.append(f"L{number}H{place}")
                shares.append(share)
        if number == layer:
            chosen = terms[:, head]
    assert chosen is not None  # the knob's limits
    pair, unit = "query_position key_position", "1"
    variables: dict[str, Any] = {
        "score": (chosen, f"part {pair}", "part of the score", unit),
        "part_score": (chosen[PARTS.index(part)], pair, f"score, {part}", unit),
        "total": (chosen.sum(0), pair, "score before the softmax", unit),
    }
    own_name = f"L{layer}H{head}"
    flat = [f"L{number}H{place}" for number in range(model.cfg.n_layers) for place in range(model.cfg.n_heads)]
    if own_name in names:
        variables["share"] = (shares[names.index(own_name)], "part", "share of the score's variance", unit)
    if shares:
        variables["head_share"] = (torch.stack(shares, 1), "part component", "share of the score's variance", unit)
    lacking = [name for name in flat if name not in names]
    return labelled(
        model,
        tokens,
        names={"part": PARTS, "component": names},
        identity=("Σ parts = the model's own scores", error),
        note=f"The scores of {', '.join(lacking)} do not vary on this text, so nothing has a share in that." if lacking else None,
        **variables,
    )


def score_parts(model: Model, cache: dict[str, Tensor], layer: int) -> Float[Tensor, "part head query key"]:
    """The terms of every head's scores in the order of `PARTS`, for all pairs of places, masked or not.

    Args:
        cache: activations of one text without a batch axis, from `analyses.stream.run`.
    """
    block = model.blocks[layer]
    norm, attn = norm_of(model, block.ln1), block.attn
    char, stream = cache["hook_embed"], cache[f"blocks.{layer}.hook_resid_pre"]
    position = cache["hook_pos_embed"].expand_as(char)
    rest = stream - char - position if layer else torch.zeros_like(char)  # in block 0 it would be rounding
    parts = norm.linear(torch.stack([char, position, rest])) / norm.scale(stream)
    queries = torch.einsum("apm,hmd->ahpd", parts, attn.W_Q)
    keys = torch.einsum("bpm,hmd->bhpd", parts, attn.W_K)
    query_bias, key_bias = (norm.bias @ W + b for W, b in ((attn.W_Q, attn.b_Q), (attn.W_K, attn.b_K)))  # head d_head
    pairs = torch.einsum("ahqd,bhkd->abhqk", queries, keys).flatten(0, 1)
    from_bias = torch.einsum("hd,hkd->hk", query_bias, keys.sum(0))[:, None, :].expand_as(pairs[0])
    to_bias = torch.einsum("hqd,hd->hq", queries.sum(0) + query_bias[:, None], key_bias)[:, :, None].expand_as(pairs[0])
    return torch.cat([pairs, from_bias[None], to_bias[None]]) / attn.attn_scale


def variance_shares(
    terms: Float[Tensor, "part head query key"], past: Bool[Tensor, "query key"]
) -> list[Float[Tensor, "part"] | None]:
    """Per head: Cov(term, Σ terms)/Var(Σ terms) over the pairs of the past, rows centred; None where nothing varies."""
    mean = (terms * past).sum(-1, keepdim=True) / past.sum(-1, keepdim=True)
    centred = (terms - mean) * past
    total = centred.sum(0)
    variance = total.pow(2).sum((-2, -1))
    rounding = 100 * torch.finfo(terms.dtype).eps * (terms.abs().sum(0) * past).pow(2).sum((-2, -1)).sqrt()
    covariance = (centred * total).sum((-2, -1))  # part head
    return [
        covariance[:, head] / variance[head] if variance[head] > rounding[head] ** 2 else None for head in range(len(variance))
    ]
