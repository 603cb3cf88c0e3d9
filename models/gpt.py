"""The GPT: a decoder-only transformer over characters, one screen per class.

Everything the course builds step by step is one network with switches (`models.config.GPTConfig`). Complete, it is
pre-norm: x += attention(LN1(x)); x += MLP(LN2(x)); logits = LN_f(x) W_U. `models.reference` computes the same function
the slow way, one loop per head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import ConfigError, GPTConfig, Initialisation

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
}


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose bias can be left out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.d_model, bias=config.bias_norm)


class Dropout(nn.Dropout):
    """Dropout that draws its mask sixteen bits at a time on the CPU, where PyTorch's one draw per value takes a fifth of a step.

    The bits come from NumPy's SFC64, seeded by PyTorch's generator. The probability is rounded to a multiple of 2⁻¹⁶
    there, and what stays is scaled by the rounded one.
    """

    def forward(self, x: Tensor) -> Tensor:
        dropped = min(round(self.p * 2**16), 2**16 - 1)
        if not self.training or dropped == 0 or x.device.type != "cpu":
            return super().forward(x)
        bits = np.random.Generator(np.random.SFC64(int(torch.randint(2**62, ()))))
        draws = bits.integers(-(2**63), 2**63 - 1, (x.numel() + 3) // 4, np.int64, endpoint=True)
        uniform = torch.from_numpy(draws).view(torch.int16)[: x.numel()].view(x.shape)  # −2¹⁵ to 2¹⁵ − 1
        kept = torch.ge(uniform, dropped - 2**15, out=torch.empty(x.shape, dtype=x.dtype))
        return x * kept.mul_(2**16 / (2**16 - dropped))


class Attention(nn.Module):
    """Causal self-attention, all heads in one batched product."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        d = config.d_model
        self.n_heads, self.dropout = config.n_heads, config.dropout_attention
        self.query = nn.Linear(d, d, bias=config.bias_qkv)
        self.key = nn.Linear(d, d, bias=config.bias_qkv)
        self.value = nn.Linear(d, d, bias=config.bias_qkv)
        self.output = nn.Linear(d, d, bias=config.bias_attention)

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, position, d_model) to the same shape; scores are scaled by 1/√d_head and masked before the softmax."""
        batch, position, d_model = x.shape
        split = (batch, position, self.n_heads, d_model // self.n_heads)
        q, k, v = (linear(x).view(split).transpose(1, 2) for linear in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        z = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.output(z.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    """Two linears around a non-linearity, the same at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation_name = config.activation
        self.activation = ACTIVATIONS[config.activation]
        self.input = nn.Linear(config.d_model, config.d_mlp, bias=config.bias_mlp)
        self.output = nn.Linear(config.d_mlp, config.d_model, bias=config.bias_mlp)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.activation(self.input(x)))


class Sublayer(nn.Module):
    """One read from the stream and one write to it: norm, inner module, extra projection, dropout, residual."""

    def __init__(self, config: GPTConfig, inner: Attention | MLP) -> None:
        super().__init__()
        self.residual = config.residual
        self.norm = LayerNorm(config) if config.norm else nn.Identity()
        self.inner: Attention | MLP = inner
        self.projection = nn.Linear(config.d_model, config.d_model) if config.extra_projection else nn.Identity()
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        written = self.dropout(self.projection(self.inner(self.norm(x))))
        return x + written if self.residual else written


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Sublayer(config, Attention(config))
        self.mlp = Sublayer(config, MLP(config)) if config.mlp else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class GPT(nn.Module):
    """Decoder-only transformer. `forward` is nanoGPT's: (idx, targets) to (logits, loss).

    Args:
        config: the architecture.
        initialisation: how the weights start, see `initialise`.
    """

    def __init__(self, config: GPTConfig, initialisation: Initialisation = "gpt2") -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.d_vocab, config.d_model)
        self.position_embedding = nn.Embedding(config.n_ctx, config.d_model)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.final_norm = LayerNorm(config) if config.final_norm else nn.Identity()
        self.unembedding = nn.Linear(config.d_model, config.d_vocab, bias=config.bias_unembed)
        if config.tied:
            self.unembedding.weight = self.token_embedding.weight
        self.initialise(initialisation)

    @torch.no_grad()
    def initialise(self, scheme: Initialisation, scale_outputs: bool = True) -> None:
        """Draw the weights anew.

        Args:
            scheme: `gpt2` draws every matrix from N(0, 0.02²) with zero biases; `torch` keeps PyTorch's defaults.
            scale_outputs: divide what writes into a residual stream by √(number of sublayers), because as many
                variances add up there. Without residual connections nothing adds up and nothing is scaled.
        """
        embeddings_last = sorted(self.modules(), key=lambda module: isinstance(module, nn.Embedding))
        for module in embeddings_last:  # so that a tied unembedding starts as an embedding does
            if isinstance(module, (nn.Linear, nn.Embedding, nn.LayerNorm)):
                module.reset_parameters()
            if scheme == "gpt2" and isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        sublayers = [module for module in self.modules() if isinstance(module, Sublayer)]
        if scale_outputs and self.config.residual:
            for sublayer in sublayers:
                sublayer.inner.output.weight /= math.sqrt(len(sublayers))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Next-character logits, and their mean cross-entropy in nats if targets are given.

        Args:
            idx: token ids (batch, position), at most n_ctx positions.
            targets: ids of the characters that follow, same shape; None for no loss.

        Returns:
            logits (batch, position, d_vocab) and the loss, a scalar, or None.

        Raises:
            ConfigError: more positions than n_ctx; there is no position embedding for them.
        """
        T = idx.shape[-1]
        if T > self.config.n_ctx:
            raise ConfigError(f"got {T} positions, expected at most n_ctx = {self.config.n_ctx}; crop the context")
        positions = torch.arange(T, device=idx.device)
        x = self.dropout(self.token_embedding(idx) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.unembedding(self.final_norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Continue `idx` (batch, position) by sampling; dropout off. Returns (batch, position + max_new_tokens).

        The context is cropped to the last n_ctx characters, because the position table has no further row.

        Args:
            max_new_tokens: how many characters to append.
            temperature: divides the logits before the softmax; 0 takes the likeliest character.
            top_k: sample among the k likeliest only; None for all.
            seed: makes the draw repeatable and leaves torch's global generator alone; None for a fresh draw.

        Raises:
            ConfigError: an empty context, a negative temperature, or a top_k below 1.
        """
        was_training = self.training
        self.eval()
        try:
            return sample(lambda context: self(context)[0], idx, self.config.n_ctx, max_new_tokens, temperature, top_k, seed)
        finally:
            self.train(was_training)


def sample(logits_of, idx: Tensor, n_ctx: int, max_new_tokens: int, temperature: float = 1.0,
           top_k: int | None = None, seed: int | None = None) -> Tensor:  # fmt: skip
    """Autoregressive sampling from any function of ids (batch, position) to logits (batch, position, d_vocab)."""
    if idx.shape[-1] == 0:
        raise ConfigError("got an empty context; give at least one character to continue from")
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens: got {max_new_tokens}; expected at least 0")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError(f"temperature: got {temperature}; expected a number of at least 0 (0 is the likeliest character)")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k: got {top_k}; expected at least 1, or nothing for all characters")
    generator = torch.Generator(device=idx.device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    for _ in range(max_new_tokens):
        logits = logits_of(idx[:, -n_ctx:])[:, -1]
        if temperature == 0:
            following = logits.argmax(-1, keepdim=True)
        else:
            logits = (logits - logits.amax(-1, keepdim=True)) / temperature  # the largest is 0, so none overflows
            if top_k is not None and top_k < logits.shape[-1]:
                kept = logits.topk(top_k).indices
                logits = torch.full_like(logits, -math.inf).scatter(-1, kept, logits.gather(-1, kept))
            following = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        idx = torch.cat([idx, following], dim=-1)
    return idx
