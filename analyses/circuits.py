"""Weights of heads multiplied out: QK and OV circuits, in the stream and in character space.

Row-vector convention throughout, as in TransformerLens: x W. For one head, with d = d_model,

    QK = W_Q W_Kᵀ   (d, d):  x_q QK x_kᵀ is the score of a query x_q against a key x_k, before 1/√d_head,
    OV = W_V W_O    (d, d):  x OV is what the head writes when it attends to x fully.

In character space x is an embedding as the head reads it; `Reading` says how that is, in one place for all analyses.

Reference: Elhage et al. (2021), where vectors are columns and both are transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.spec import Knob
from analyses.stream import Norm, UnsupportedModel, final_norm, final_stream, norm_of, require_standard, run
from models.hooked import encode
from models.protocol import Model

Fold = Literal["nothing", "norm weights", "norm weights and biases"]
Embedding = Literal["W_E", "W_E with first MLP"]
Scale = Literal["one", "of each embedding", "frozen on a text"]
Space = Literal["char", "position"]

FoldKnob = Annotated[Fold, Knob("What of the LayerNorms and the biases is multiplied in")]
EmbeddingKnob = Annotated[Embedding, Knob("What stands for a character")]
ScaleKnob = Annotated[Scale, Knob("What the LayerNorms divide by")]


def _is_readable_if_frozen(model: Model, knobs: Mapping[str, Any], text: str) -> None:
    if knobs["scale"] == "frozen on a text":  # else any model will do, whatever its characters
        encode(model, text)


ScaleText = Annotated[str, Knob("Text that a frozen scale is measured on", cursor="text", check=_is_readable_if_frozen)]


def stack_heads(model: Model, name: str) -> Tensor:
    """A weight of every head, (layer, head, …): one of W_Q, W_K, W_V, W_O and their biases b_Q, b_K, b_V."""
    return torch.stack([getattr(block.attn, name) for block in model.blocks])


def qk_products(model: Model) -> Float[Tensor, "layer head d_model d_model"]:
    """W_Q W_Kᵀ of every head, as the full product."""
    return stack_heads(model, "W_Q") @ stack_heads(model, "W_K").mT


def ov_products(model: Model) -> Float[Tensor, "layer head d_model d_model"]:
    """W_V W_O of every head, as the full product."""
    return stack_heads(model, "W_V") @ stack_heads(model, "W_O")


def read(
    norm: Norm, x: Float[Tensor, "*batch d_model"], fold: Fold, scale: Tensor | float = 1.0
) -> Float[Tensor, "*batch d_model"]:
    """A vector as a sublayer reads it through its norm, as far as `fold` says, divided by a given scale."""
    if fold == "nothing":
        return x / scale
    return norm.linear(x) / scale + (norm.bias if fold == "norm weights and biases" else 0.0)


# --- embeddings as they are read -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Embeddings as the heads and the unembedding read them, as far as the knobs `fold`, `embedding` and `scale` say.

    An embedding e is read through a LayerNorm as (e − mean e)·w/s + b.

    * `fold`: nothing, then e/s; the norm's weight w and the mean; or these and b, with b_Q, b_K, b_V (and b_U).
    * `embedding`: e is a row of W_E; or that row and what the first MLP makes of it, e + MLP₀(LN₂(e)) with LN₂ entire,
      without attention and without a position. Block 0 reads before its MLP, so for its heads e stays a row of W_E.
    * `scale`: s is one; √(var e + ε), that of the bare embedding; or the mean, over the places of a text, of the scale
      that this very LayerNorm had there. The final norm, behind a head, reads no embedding: its s is one for the second.

    Made by `reading`.
    """

    model: Model
    fold: Fold
    embedding: Embedding
    scale: Scale
    frozen: tuple[float, ...]  # of the blocks' ln1, then of the final norm; ones unless the scale is frozen

    def embeddings(self, layer: int | None, space: Space = "char") -> Float[Tensor, "row d_model"]:
        """What reaches a block's heads, or the unembedding if `layer` is None: a row per character, or per position."""
        model = self.model
        e = model.embed.W_E if space == "char" else model.pos_embed.W_pos  # type: ignore[attr-defined]
        if self.embedding == "W_E" or layer == 0:
            return e
        block = model.blocks[0]
        return e + block.mlp(block.ln2(e[None]))[0]

    def heads_read(self, layer: int, space: Space = "char") -> Float[Tensor, "row d_input"]:
        """The embeddings as a block's heads read them; with biases a one more, which `weight` has a row for."""
        e, norm = self.embeddings(layer, space), norm_of(self.model, self.model.blocks[layer].ln1)
        x = read(norm, e, self.fold, self.scale_of(norm, e, layer))
        return torch.cat([x, torch.ones_like(x[:, :1])], dim=1) if self.biases else x

    def weight(self, layer: int, letter: Literal["Q", "K", "V"]) -> Float[Tensor, "head d_input d_head"]:
        """W_Q, W_K or W_V of a block's heads; with biases folded in, b_Q, b_K or b_V is the last row."""
        attn = self.model.blocks[layer].attn
        W, b = getattr(attn, f"W_{letter}"), getattr(attn, f"b_{letter}")
        return torch.cat([W, b[:, None]], dim=1) if self.biases else W

    def scores(self, layer: int, space: Space = "char") -> Float[Tensor, "head query key"]:
        """QK: every row as a query against every row as a key, divided by √d_head as the model does."""
        x = self.heads_read(layer, space)
        return (x @ self.weight(layer, "Q")) @ (x @ self.weight(layer, "K")).mT / self.model.blocks[layer].attn.attn_scale

    def values(self, layer: int) -> Float[Tensor, "head char d_head"]:
        """The value that each head has for each character."""
        return self.heads_read(layer) @ self.weight(layer, "V")

    def head_logits(self, written: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch char"]:
        """Logits that follow directly from what a head writes. The final norm's bias and b_U are no head's own."""
        fold: Fold = "nothing" if self.fold == "nothing" else "norm weights"
        return read(final_norm(self.model), written, fold, self.frozen[-1]) @ self.model.unembed.W_U

    def logits(self, layer: int) -> Float[Tensor, "head source output"]:
        """OV: what full attention to a character adds to every logit. The output bias b_O is no head's own."""
        return self.head_logits(self.values(layer) @ self.model.blocks[layer].attn.W_O)

    def direct(self, e: Float[Tensor, "source d_model"]) -> Float[Tensor, "source output"]:
        """Logits of embeddings themselves, past all heads."""
        norm = final_norm(self.model)
        logits = read(norm, e, self.fold, self.scale_of(norm, e, None)) @ self.model.unembed.W_U
        return logits + self.model.unembed.b_U if self.biases else logits

    def scale_of(self, norm: Norm, e: Float[Tensor, "row d_model"], layer: int | None) -> Tensor | float:
        """What a block's first norm, or the final one if `layer` is None, divides embeddings by."""
        return norm.scale(e) if self.scale == "of each embedding" else self.frozen[-1 if layer is None else layer]

    @property
    def biases(self) -> bool:
        return self.fold == "norm weights and biases"

    @property
    def folded(self) -> str:
        """What was multiplied in, for the titles of pictures."""
        norms = [norm_of(self.model, block.ln1) for block in self.model.blocks] + [final_norm(self.model)]
        has_norms = any(norm.centred for norm in norms)
        folded = {"nothing": "nothing folded in", "norm weights": "LayerNorm weights"}.get(self.fold, "LayerNorm weights, biases")
        if not has_norms and self.fold != "nothing":
            folded = "biases" if self.biases else "no LayerNorm"
        scale = {"one": "scale 1", "of each embedding": "own scale"}.get(self.scale, "frozen scale")
        mlp = "first MLP" if self.embedding != "W_E" else ""
        return ", ".join(part for part in (folded, mlp, scale if has_norms else "") if part)


def reading(model: Model, fold: Fold, embedding: Embedding = "W_E", scale: Scale = "one", text: str = "") -> Reading:
    """How embeddings are read in a model; the text is read only if the scale is to be frozen on it.

    Raises:
        UnsupportedModel: positions or norms of another kind; or there is no MLP to put into the embedding.
    """
    require_standard(model)
    if embedding != "W_E" and (model.cfg.attn_only or not model.cfg.n_layers):
        raise UnsupportedModel("this model has no MLP, so there is no first one to put into the embedding; give embedding 'W_E'")
    norms = [norm_of(model, block.ln1) for block in model.blocks] + [final_norm(model)]
    frozen = [1.0] * len(norms)
    if scale == "frozen on a text":
        _, cache = run(model, encode(model, text))
        streams = [cache[f"blocks.{layer}.hook_resid_pre"] for layer in range(model.cfg.n_layers)] + [final_stream(model, cache)]
        frozen = [norm.scale(stream).mean().item() for norm, stream in zip(norms, streams, strict=True)]
    return Reading(model, fold, embedding, scale, tuple(frozen))
