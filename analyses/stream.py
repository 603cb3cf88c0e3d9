"""The residual stream: what is written to it, and how it is read. Tensors in, tensors out.

Everything here is exact arithmetic on activations of one forward pass; the sums are identities, not estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from models.errors import WorkbenchError
from models.protocol import Model


class UnsupportedModel(WorkbenchError):
    """A model has a part that an analysis cannot take apart exactly; the message names it."""


def require_standard(model: Model) -> None:
    """Refuse models whose stream is not token + learned position embedding, then sequential blocks.

    Raises:
        UnsupportedModel: names what is different and what would do.
    """
    cfg = model.cfg
    odd = [
        (cfg.positional_embedding_type != "standard", f"{cfg.positional_embedding_type} positions", "learned positions"),
        (cfg.attention_dir != "causal", f"{cfg.attention_dir} attention", "causal attention"),
        (cfg.parallel_attn_mlp, "attention and MLP in parallel", "one after the other"),
        (cfg.normalization_type not in ("LN", "LNPre", None), f"{cfg.normalization_type} norms", "LayerNorm or none"),
        (cfg.post_embedding_ln, "a norm after the embedding", "none there"),
        (cfg.use_normalization_before_and_after, "norms after the sublayers", "norms before them only"),
        (cfg.n_key_value_heads not in (None, cfg.n_heads), "grouped keys and values", "as many key as query heads"),
        (cfg.attn_scores_soft_cap > 0 or cfg.output_logits_soft_cap > 0, "soft-capped scores or logits", "none"),
        (cfg.use_qk_norm, "norms on queries and keys", "none there"),
    ]
    for is_odd, got, expected in odd:
        if is_odd:
            raise UnsupportedModel(f"this model has {got}; this analysis is exact only with {expected}")


def require_blocks(model: Model) -> None:
    """Refuse a model without blocks where there would be nothing to look at.

    Raises:
        UnsupportedModel: it has none.
    """
    if model.cfg.n_layers == 0:
        raise UnsupportedModel("this model has no blocks, only embedding and unembedding; this analysis needs at least one block")


def require_mlps(model: Model) -> None:
    """Refuse a model whose blocks have attention only.

    Raises:
        UnsupportedModel: it has no MLP.
    """
    if model.cfg.attn_only:
        raise UnsupportedModel("this model has attention only and no MLP, so it has no neurons; give a model with MLPs")


# --- norms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """A LayerNorm taken apart: x → (x − mean)/scale · weight + bias, with scale = √(variance + ε).

    Without LayerNorm (`centred` false, weight one, bias zero, scale one) it is the identity.
    """

    weight: Float[Tensor, "d_model"]
    bias: Float[Tensor, "d_model"]
    centred: bool
    eps: float

    def centre(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """What the centred vector is divided by; ones without LayerNorm."""
        if not self.centred:
            return torch.ones_like(x[..., :1])
        return (self.centre(x).pow(2).mean(-1, keepdim=True) + self.eps).sqrt()

    def linear(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The part that is linear once the scale is known: centre, then weight."""
        return self.centre(x) * self.weight

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.linear(x) / self.scale(x) + self.bias


def norm_of(model: Model, module: nn.Module | None) -> Norm:
    """Read a norm off the module itself, since a configuration can say LN where an identity was put.

    Raises:
        UnsupportedModel: a norm that is neither LayerNorm nor the identity.
    """
    d_model, dtype, device = model.cfg.d_model, model.unembed.W_U.dtype, model.unembed.W_U.device
    ones, zeros = torch.ones(d_model, dtype=dtype, device=device), torch.zeros(d_model, dtype=dtype, device=device)
    kind = type(module).__name__
    parts: Any = module
    if module is None or kind == "Identity":
        return Norm(ones, zeros, centred=False, eps=0.0)
    if kind == "LayerNorm":
        return Norm(parts.w, parts.b, centred=True, eps=float(parts.eps))
    if kind == "LayerNormPre":
        return Norm(ones, zeros, centred=True, eps=float(parts.eps))
    raise UnsupportedModel(f"this model has a {kind}; this analysis takes apart LayerNorm, or no norm, only")


def final_norm(model: Model) -> Norm:
    """The norm before the unembedding."""
    return norm_of(model, getattr(model, "ln_final", None))


# --- what is written -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decomposition:
    """The parts that add up to the residual stream, in the order in which they are written."""

    names: tuple[str, ...]
    parts: Float[Tensor, "component position d_model"]
    stream: Float[Tensor, "position d_model"]  # as the model computed it, after the last block

    @property
    def identity_error(self) -> float:
        """max |Σ parts − stream|."""
        return (self.parts.sum(0) - self.stream).abs().max().item()


def run(model: Model, tokens: Int[Tensor, "position"]) -> tuple[Float[Tensor, "position d_vocab"], dict[str, Tensor]]:
    """One forward pass: logits, and every activation by hook name, without a batch axis."""
    logits, cache = model.run_with_cache(tokens[None])
    return logits[0], {name: activation[0] for name, activation in cache.items()}


def head_outputs(model: Model, cache: dict[str, Tensor], layer: int) -> Float[Tensor, "head position d_model"]:
    """What each head of a block writes: its mixed values times W_O. The value bias is in; b_O is not."""
    z = cache[f"blocks.{layer}.attn.hook_z"]  # position head d_head
    return torch.einsum("phd,hdm->hpm", z, model.blocks[layer].attn.W_O)


def decomposition(model: Model, cache: dict[str, Tensor], by: str = "head") -> Decomposition:
    """Split the stream after the last block into what wrote it.

    Args:
        by: `layer` keeps each block whole (`L0`); `sublayer` each attention layer (`L0.attn`); `head` splits attention
            into heads, each with its value bias (`L0H1`), and the output bias b_O alone (`L0.attn_bias`).

    The model must be one that `require_standard` lets pass.
    """
    embed, pos_embed = cache["hook_embed"], cache["hook_pos_embed"]
    names, parts = ["embed", "pos_embed"], [embed, pos_embed.expand_as(embed)]
    for layer in range(model.cfg.n_layers):
        if by == "layer":
            names.append(f"L{layer}")
            parts.append(torch.stack([cache[f"blocks.{layer}.hook_{name}_out"] for name in sublayers(model)]).sum(0))
            continue
        if by == "sublayer":
            names.append(f"L{layer}.attn")
            parts.append(cache[f"blocks.{layer}.hook_attn_out"])
        else:
            heads = head_outputs(model, cache, layer)
            names += [f"L{layer}H{head}" for head in range(len(heads))] + [f"L{layer}.attn_bias"]
            parts += [*heads, model.blocks[layer].attn.b_O.expand_as(embed)]
        if not model.cfg.attn_only:
            names.append(f"L{layer}.mlp")
            parts.append(cache[f"blocks.{layer}.hook_mlp_out"])
    return Decomposition(tuple(names), torch.stack(parts), final_stream(model, cache))


def sublayers(model: Model) -> tuple[str, ...]:
    """What writes in each block, in order."""
    return ("attn",) if model.cfg.attn_only else ("attn", "mlp")


def final_stream(model: Model, cache: dict[str, Tensor]) -> Float[Tensor, "position d_model"]:
    """The stream after the last block, before the final norm."""
    last = model.cfg.n_layers - 1
    return cache[f"blocks.{last}.hook_resid_post"] if last >= 0 else cache["hook_embed"] + cache["hook_pos_embed"]


# --- how it is read --------------------------------------------------------------------------------------------------


def unembed(model: Model, stream: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch char"]:
    """Logits of a stream: final norm with the stream's own scale, then W_U and b_U."""
    return final_norm(model)(stream) @ model.unembed.W_U + model.unembed.b_U


def character_loss(
    logits: Float[Tensor, "*batch position char"], tokens: Int[Tensor, "position"]
) -> Float[Tensor, "*batch predicted"]:
    """Cross-entropy, nats, of each character but the first, given the logits one place before it."""
    logprobs = logits[..., :-1, :].log_softmax(-1)
    following = tokens[1:].expand(logprobs.shape[:-1])
    return -logprobs.gather(-1, following[..., None])[..., 0]
