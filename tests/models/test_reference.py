"""The textbook GPT, one loop per head, bears witness: the fast one computes the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models import reference
from models.config import PRESETS, GPTConfig
from models.gpt import GPT

BOUNDS = {torch.float32: 5e-5, torch.float64: 1e-10}


def ids(config: GPTConfig, rows: int = 2, length: int = 64) -> Tensor:
    shape = (rows, min(length, config.n_ctx))
    return torch.randint(config.d_vocab, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PRESETS)
@torch.no_grad()
def test_loop_over_heads_equals_the_batched_product(random_weights, name):
    gpt = random_weights(PRESETS[name].model)
    idx = ids(gpt.config)
    spread = gpt(idx)[0].std()
    assert spread > 0.05  # the logits are not so small that any two would agree
    for dtype, bound in BOUNDS.items():
        gpt.to(dtype)
        slow, fast = reference.forward(gpt, idx), gpt(idx)[0]
        assert slow.dtype == fast.dtype == dtype
        assert (slow - fast).abs().max() < bound


@pytest.mark.parametrize("switches", [
    dict(bias_qkv=True, bias_unembed=True),
    dict(bias_norm=False, bias_attention=False, bias_mlp=False),
    dict(residual=False), dict(mlp=False), dict(norm=False), dict(final_norm=False), dict(extra_projection=True), dict(tied=True),
], ids=str)  # fmt: skip
def test_every_switch_means_the_same_in_both(random_weights, switches):
    gpt = random_weights(GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=2, n_heads=2, **switches))
    idx = ids(gpt.config)
    assert (reference.forward(gpt, idx) - gpt(idx)[0]).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["baby", "walkthrough-4.2", "walkthrough-4.10"])
@torch.no_grad()
def test_attention_rows_are_a_simplex_over_the_past(random_weights, name):
    gpt = random_weights(PRESETS[name].model)
    T = gpt.config.n_ctx
    patterns = reference.attention_patterns(gpt, ids(gpt.config))
    assert len(patterns) == gpt.config.n_layers
    for pattern in patterns:
        assert pattern.shape == (2, gpt.config.n_heads, T, T)
        assert (pattern >= 0).all()
        assert (pattern.sum(-1) - 1).abs().max() < 1e-12
        assert (pattern.triu(1) == 0).all()
        assert (pattern.tril() > 0).sum() == 2 * gpt.config.n_heads * T * (T + 1) // 2  # the past is open, all of it


def test_one_head_by_hand():
    """Two positions, d_head 4: scores are q·k/2, and the second row is their softmax."""
    q = torch.tensor([[1.0, 0, 0, 0], [2.0, 0, 0, 1.0]], dtype=torch.float64)
    k = torch.tensor([[3.0, 0, 0, 0], [0.0, 0, 0, 2.0]], dtype=torch.float64)
    first, second = math.exp(6 / 2), math.exp(2 / 2)
    expected = torch.tensor([[1, 0], [first / (first + second), second / (first + second)]], dtype=torch.float64)
    assert torch.allclose(reference.head_pattern(q, k), expected, rtol=1e-14)


def test_large_scores_do_not_overflow():
    q = torch.tensor([[1e3], [1e3]])
    assert reference.head_pattern(q, torch.tensor([[1e3], [-1e3]])).tolist() == [[1, 0], [1, 0]]


def test_layer_norm_by_hand(random_gpt):
    norm = random_gpt.final_norm
    x = torch.arange(16, dtype=torch.float64)[None]  # mean 7.5, variance (16² − 1)/12
    expected = (x - 7.5) / math.sqrt(255 / 12 + 1e-5) * norm.weight + norm.bias
    assert torch.allclose(reference.layer_norm(x, norm), expected, rtol=1e-12)


def test_dropout_plays_no_part():
    gpt = GPT(GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=2, n_heads=2, dropout=0.5, dropout_attention=0.5))
    idx = ids(gpt.config)
    slow = reference.forward(gpt.train(), idx)
    assert torch.allclose(slow, gpt.eval()(idx)[0], atol=1e-6)
