"""Weights of heads multiplied out: QK and OV circuits, in the stream and in character space.

Row-vector convention throughout, as in TransformerLens: x W. For one head, with d = d_model,

    QK = W_Q W_Kᵀ   (d, d):  x_q QK x_kᵀ is the score of a query x_q against a key x_k, before 1/√d_head,
    OV = W_V W_O    (d, d):  x OV is what the head writes when it attends to x fully.

Reference: Elhage et al. (2021), where vectors are columns and both are transposed.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.stream import Norm, final_norm, norm_of
from models.protocol import Model

Fold = Literal["nothing", "norm weights", "norm weights and biases"]


def stack_heads(model: Model, name: str) -> Tensor:
    """A weight of every head, (layer, head, …): one of W_Q, W_K, W_V, W_O and their biases b_Q, b_K, b_V."""
    return torch.stack([getattr(block.attn, name) for block in model.blocks])


def qk_products(model: Model) -> Float[Tensor, "layer head d_model d_model"]:
    """W_Q W_Kᵀ of every head, as the full product."""
    return stack_heads(model, "W_Q") @ stack_heads(model, "W_K").mT


def ov_products(model: Model) -> Float[Tensor, "layer head d_model d_model"]:
    """W_V W_O of every head, as the full product."""
    return stack_heads(model, "W_V") @ stack_heads(model, "W_O")


def read(norm: Norm, x: Float[Tensor, "*batch d_model"], fold: Fold) -> Float[Tensor, "*batch d_model"]:
    """A vector as a sublayer reads it through its norm, as far as `fold` says; the norm's scale is left at one."""
    if fold == "nothing":
        return x
    return norm.linear(x) + norm.bias if fold == "norm weights and biases" else norm.linear(x)


def qk_scores(model: Model, layer: int, head: int, inputs: Float[Tensor, "row d_model"], fold: Fold) -> Float[Tensor, "row row"]:
    """Scores between all pairs of vectors, query by key, divided by √d_head as the model does.

    With biases folded in, queries and keys get b_Q and b_K as well as the norm's bias.
    """
    block = model.blocks[layer]
    x = read(norm_of(model, block.ln1), inputs, fold)
    q, k = x @ block.attn.W_Q[head], x @ block.attn.W_K[head]
    if fold == "norm weights and biases":
        q, k = q + block.attn.b_Q[head], k + block.attn.b_K[head]
    return q @ k.mT / block.attn.attn_scale


def ov_logits(model: Model, layer: int, head: int, inputs: Float[Tensor, "row d_model"], fold: Fold) -> Float[Tensor, "row char"]:
    """Logits that a head adds directly when it attends fully to a vector.

    With biases folded in, values get b_V as well as the norm's bias. The output bias b_O, the final norm's bias and b_U
    are no head's own and stay out.
    """
    block = model.blocks[layer]
    v = read(norm_of(model, block.ln1), inputs, fold) @ block.attn.W_V[head]
    if fold == "norm weights and biases":
        v = v + block.attn.b_V[head]
    written = v @ block.attn.W_O[head]
    return read(final_norm(model), written, "nothing" if fold == "nothing" else "norm weights") @ model.unembed.W_U
