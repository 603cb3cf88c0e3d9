"""The same GPT as textbooks write it: one loop per head, mask and softmax spelled out.

Slow on purpose. It reads a `GPT`'s weights and shares none of its forward code, so that it can bear witness against
it: `forward` here must equal `GPT.forward`, and `attention_patterns` is where the causal mask can be seen.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.config import Activation
from models.gpt import GPT, MLP, Attention, Sublayer


def layer_norm(x: Tensor, norm: nn.Module) -> Tensor:
    """(x − mean) / √(variance + ε) · weight + bias along d_model; the identity where the model has no norm."""
    if isinstance(norm, nn.Identity):
        return x
    assert isinstance(norm, nn.LayerNorm)
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    normalised = centred / torch.sqrt(variance + norm.eps) * norm.weight
    return normalised if norm.bias is None else normalised + norm.bias


def linear(x: Tensor, module: nn.Module) -> Tensor:
    """x W (+ b), with W stored transposed as PyTorch does; the identity where the model has no such linear."""
    if isinstance(module, nn.Identity):
        return x
    assert isinstance(module, nn.Linear)
    product = x @ module.weight.T
    return product if module.bias is None else product + module.bias


def head_pattern(q: Tensor, k: Tensor) -> Tensor:
    """Attention of one head: softmax over the past of q·k / √d_head. Returns (batch, query_position, key_position)."""
    T, d_head = q.shape[-2:]
    scores = q @ k.transpose(-1, -2) / math.sqrt(d_head)
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = scores.masked_fill(future, -math.inf)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return weights / weights.sum(dim=-1, keepdim=True)


def attention(x: Tensor, module: Attention) -> tuple[Tensor, Tensor]:
    """Output (batch, position, d_model) and patterns (batch, head, query_position, key_position)."""
    q, k, v = linear(x, module.query), linear(x, module.key), linear(x, module.value)
    d_head = x.shape[-1] // module.n_heads
    outputs, patterns = [], []
    for head in range(module.n_heads):
        own = slice(head * d_head, (head + 1) * d_head)
        pattern = head_pattern(q[..., own], k[..., own])
        outputs.append(pattern @ v[..., own])
        patterns.append(pattern)
    return linear(torch.cat(outputs, dim=-1), module.output), torch.stack(patterns, dim=1)


def mlp(x: Tensor, module: MLP) -> Tensor:
    return linear(activate(linear(x, module.input), module.activation_name), module.output)


def activate(hidden: Tensor, name: Activation) -> Tensor:
    """ReLU; GELU x·Φ(x) by the error function; or its approximation by a tanh (Hendrycks & Gimpel 2016), `gelu_new`."""
    if name == "relu":
        return hidden.clamp(min=0)
    if name == "gelu":
        return hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3))) / 2


def run(gpt: GPT, idx: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits (batch, position, d_vocab), and each layer's patterns (batch, head, query_position, key_position)."""
    x = gpt.token_embedding.weight[idx] + gpt.position_embedding.weight[: idx.shape[-1]]
    patterns = []
    for block in gpt.blocks:
        for sublayer in block.children():
            if not isinstance(sublayer, Sublayer):
                continue
            normed = layer_norm(x, sublayer.norm)
            if isinstance(sublayer.inner, Attention):
                written, pattern = attention(normed, sublayer.inner)
                patterns.append(pattern)
            else:
                written = mlp(normed, sublayer.inner)
            written = linear(written, sublayer.projection)
            x = x + written if sublayer.residual else written
    return linear(layer_norm(x, gpt.final_norm), gpt.unembedding), patterns


def forward(gpt: GPT, idx: Tensor) -> Tensor:
    """Logits (batch, position, d_vocab) of `gpt` without dropout, for ids `idx` (batch, position)."""
    return run(gpt, idx)[0]


def attention_patterns(gpt: GPT, idx: Tensor) -> list[Tensor]:
    """Each layer's attention (batch, head, query_position, key_position): rows are probabilities over the past."""
    return run(gpt, idx)[1]
