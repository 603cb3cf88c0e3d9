"""The layouts of other people's checkpoints that can be read: nanoGPT and minGPT, the video lecture, TransformerLens.

Per layout: its table, the tensors renamed into ours, and the forward pass written out on the file's own names.

Sources: karpathy/nanoGPT and karpathy/minGPT (`model.py`), karpathy/ng-video-lecture (`gpt.py`), TransformerLens 3
(`HookedTransformer.state_dict`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor

from models.layouts import Fit, Layout, table
from models.reference import activate

Tensors = Mapping[str, Tensor]


def nearest(tensors: Tensors) -> Layout:
    """The layout that shares most names with a file, as a fraction of those that the layout must have."""
    names = list(tensors)
    return max(LAYOUTS, key=lambda layout: layout.in_common(names) / len(layout.required))


# --- words that the forward passes share -----------------------------------------------------------------------------


def _linear(t: Tensors, name: str, x: Tensor) -> Tensor:
    product = x @ t[f"{name}.weight"].T
    return product + t[f"{name}.bias"] if f"{name}.bias" in t else product


def _normed(t: Tensors, weight: str, bias: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * t[weight]
    return scaled + t[bias] if bias in t else scaled


def _norm(t: Tensors, name: str, x: Tensor) -> Tensor:
    return _normed(t, f"{name}.weight", f"{name}.bias", x)


def _look_back(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head: each query averages the values up to its own position, by the softmax of q·k / √d_head."""
    T, d_head = q.shape[-2:]
    scores = (q @ k.mT / math.sqrt(d_head)).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v


def _renamed(t: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Our names for theirs, `.weight` and, where there is one, `.bias`."""
    kinds = ("weight", "bias")
    return {
        f"{ours}.{kind}": t[f"{theirs}.{kind}"] for ours, theirs in names.items() for kind in kinds if f"{theirs}.{kind}" in t
    }


# --- nanoGPT and minGPT ----------------------------------------------------------------------------------------------


def _gpt2_weights(fit: Fit) -> dict[str, Tensor]:
    t, weights = fit.tensors, {}
    names = {
        "token_embedding": "transformer.wte",
        "position_embedding": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "unembedding": "lm_head",
    }
    for layer in range(fit.sizes["L"]):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        names |= {
            f"{ours}.attention.norm": f"{theirs}.ln_1",
            f"{ours}.attention.inner.output": f"{theirs}.attn.c_proj",
            f"{ours}.mlp.norm": f"{theirs}.ln_2",
            f"{ours}.mlp.inner.input": f"{theirs}.mlp.c_fc",
            f"{ours}.mlp.inner.output": f"{theirs}.mlp.c_proj",
        }
        for name, tensor in _renamed(t, {"": f"{theirs}.attn.c_attn"}).items():
            for part, third in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                weights[f"{ours}.attention.inner.{part}{name}"] = third
    return weights | _renamed(t, names)


def _gpt2_logits(t: Tensors, fit: Fit, idx: Tensor) -> Tensor:
    x = t["transformer.wte.weight"][idx] + t["transformer.wpe.weight"]
    for layer in range(fit.sizes["L"]):
        block = f"transformer.h.{layer}"
        projected = _linear(t, f"{block}.attn.c_attn", _norm(t, f"{block}.ln_1", x))
        columns = projected.chunk(3 * fit.heads, -1)  # queries of all heads, then keys, then values
        heads = [_look_back(*columns[head :: fit.heads]) for head in range(fit.heads)]
        x = x + _linear(t, f"{block}.attn.c_proj", torch.cat(heads, -1))
        hidden = activate(_linear(t, f"{block}.mlp.c_fc", _norm(t, f"{block}.ln_2", x)), fit.activation)
        x = x + _linear(t, f"{block}.mlp.c_proj", hidden)
    x = _norm(t, "transformer.ln_f", x)
    return x @ t["lm_head.weight" if "lm_head.weight" in t else "transformer.wte.weight"].T


_GPT2_TABLE = table("""
    transformer.wte.weight               V × d
    transformer.wpe.weight               T × d
    transformer.h.N.ln_1.weight          d
    transformer.h.N.ln_1.bias            d              [bias_norm]
    transformer.h.N.attn.c_attn.weight   3d × d
    transformer.h.N.attn.c_attn.bias     3d             [bias_qkv]
    transformer.h.N.attn.c_proj.weight   d × d
    transformer.h.N.attn.c_proj.bias     d              [bias_attention]
    transformer.h.N.attn.bias            1 × 1 × T × T  [mask]
    transformer.h.N.ln_2.weight          d
    transformer.h.N.ln_2.bias            d              [bias_norm]
    transformer.h.N.mlp.c_fc.weight      4d × d
    transformer.h.N.mlp.c_fc.bias        4d             [bias_mlp]
    transformer.h.N.mlp.c_proj.weight    d × 4d
    transformer.h.N.mlp.c_proj.bias      d              [bias_mlp]
    transformer.ln_f.weight              d
    transformer.ln_f.bias                d              [bias_norm]
    lm_head.weight                       V × d          [unembedding]
""")
NANOGPT = Layout("nanoGPT", _GPT2_TABLE, _gpt2_weights, _gpt2_logits, "gelu")
MINGPT = Layout("minGPT", _GPT2_TABLE, _gpt2_weights, _gpt2_logits, "gelu_new")  # the same names: importers tells them apart


# --- the video lecture "Let's build GPT" -----------------------------------------------------------------------------


def _lecture_weights(fit: Fit) -> dict[str, Tensor]:
    t, weights = fit.tensors, {}
    names = {
        "token_embedding": "token_embedding_table",
        "position_embedding": "position_embedding_table",
        "final_norm": "ln_f",
        "unembedding": "lm_head",
    }
    for layer in range(fit.sizes["L"]):
        block = f"blocks.{layer}"
        names |= {
            f"{block}.attention.norm": f"{block}.ln1",
            f"{block}.attention.inner.output": f"{block}.sa.proj",
            f"{block}.mlp.norm": f"{block}.ln2",
            f"{block}.mlp.inner.input": f"{block}.ffwd.net.0",
            f"{block}.mlp.inner.output": f"{block}.ffwd.net.2",
        }
        for part in ("query", "key", "value"):
            heads = [t[f"{block}.sa.heads.{head}.{part}.weight"] for head in range(fit.heads)]
            weights[f"{block}.attention.inner.{part}.weight"] = torch.cat(heads)
    return weights | _renamed(t, names)


def _lecture_logits(t: Tensors, fit: Fit, idx: Tensor) -> Tensor:
    x = t["token_embedding_table.weight"][idx] + t["position_embedding_table.weight"]
    for layer in range(fit.sizes["L"]):
        block, heads = f"blocks.{layer}", []
        normed = _norm(t, f"{block}.ln1", x)
        for head in range(fit.heads):
            name = f"{block}.sa.heads.{head}"
            heads.append(_look_back(*(_linear(t, f"{name}.{part}", normed) for part in ("query", "key", "value"))))
        x = x + _linear(t, f"{block}.sa.proj", torch.cat(heads, -1))
        hidden = activate(_linear(t, f"{block}.ffwd.net.0", _norm(t, f"{block}.ln2", x)), fit.activation)
        x = x + _linear(t, f"{block}.ffwd.net.2", hidden)
    return _linear(t, "lm_head", _norm(t, "ln_f", x))


_LECTURE_TABLE = table("""
    token_embedding_table.weight         V × d
    position_embedding_table.weight      T × d
    blocks.N.sa.heads.M.key.weight       d_head × d
    blocks.N.sa.heads.M.query.weight     d_head × d
    blocks.N.sa.heads.M.value.weight     d_head × d
    blocks.N.sa.heads.M.tril             T × T          [mask]
    blocks.N.sa.proj.weight              d × d
    blocks.N.sa.proj.bias                d
    blocks.N.ffwd.net.0.weight           4d × d
    blocks.N.ffwd.net.0.bias             4d
    blocks.N.ffwd.net.2.weight           d × 4d
    blocks.N.ffwd.net.2.bias             d
    blocks.N.ln1.weight                  d
    blocks.N.ln1.bias                    d
    blocks.N.ln2.weight                  d
    blocks.N.ln2.bias                    d
    ln_f.weight                          d
    ln_f.bias                            d
    lm_head.weight                       V × d
    lm_head.bias                         V
""")
_LECTURE_BIASES = ("bias_attention", "bias_mlp", "bias_norm", "bias_unembed")
LECTURE = Layout("the video lecture's gpt.py", _LECTURE_TABLE, _lecture_weights, _lecture_logits, "relu", _LECTURE_BIASES)


# --- TransformerLens -------------------------------------------------------------------------------------------------


def _hooked_weights(fit: Fit) -> dict[str, Tensor]:
    t = fit.tensors
    weights = {
        "token_embedding.weight": t["embed.W_E"],
        "position_embedding.weight": t["pos_embed.W_pos"],
        "final_norm.weight": t["ln_final.w"],
        "final_norm.bias": t["ln_final.b"],
        "unembedding.weight": t["unembed.W_U"].T,
        "unembedding.bias": t["unembed.b_U"],
    }
    for layer in range(fit.sizes["L"]):
        block = f"blocks.{layer}"
        inner = f"{block}.attention.inner"
        for letter, part in (("Q", "query"), ("K", "key"), ("V", "value")):
            per_head = t[f"{block}.attn.W_{letter}"]
            weights[f"{inner}.{part}.weight"] = rearrange(per_head, "head d_model d_head -> (head d_head) d_model")
            weights[f"{inner}.{part}.bias"] = t[f"{block}.attn.b_{letter}"].flatten()
        weights[f"{inner}.output.weight"] = rearrange(t[f"{block}.attn.W_O"], "head d_head d_model -> d_model (head d_head)")
        weights[f"{inner}.output.bias"] = t[f"{block}.attn.b_O"]
        sublayers = [("attention", "ln1")]
        if "mlp" in fit.groups:
            sublayers.append(("mlp", "ln2"))
            for theirs, ours in (("in", "input"), ("out", "output")):
                weights[f"{block}.mlp.inner.{ours}.weight"] = t[f"{block}.mlp.W_{theirs}"].T
                weights[f"{block}.mlp.inner.{ours}.bias"] = t[f"{block}.mlp.b_{theirs}"]
        for ours, theirs in sublayers:
            weights[f"{block}.{ours}.norm.weight"] = t[f"{block}.{theirs}.w"]
            weights[f"{block}.{ours}.norm.bias"] = t[f"{block}.{theirs}.b"]
    return weights


def _hooked_logits(t: Tensors, fit: Fit, idx: Tensor) -> Tensor:
    x = t["embed.W_E"][idx] + t["pos_embed.W_pos"]
    for layer in range(fit.sizes["L"]):
        block = f"blocks.{layer}"
        normed, written = _normed(t, f"{block}.ln1.w", f"{block}.ln1.b", x), t[f"{block}.attn.b_O"]
        for head in range(fit.heads):
            q, k, v = (normed @ t[f"{block}.attn.W_{c}"][head] + t[f"{block}.attn.b_{c}"][head] for c in "QKV")
            written = written + _look_back(q, k, v) @ t[f"{block}.attn.W_O"][head]
        x = x + written
        if "mlp" in fit.groups:
            before = _normed(t, f"{block}.ln2.w", f"{block}.ln2.b", x) @ t[f"{block}.mlp.W_in"] + t[f"{block}.mlp.b_in"]
            x = x + activate(before, fit.activation) @ t[f"{block}.mlp.W_out"] + t[f"{block}.mlp.b_out"]
    return _normed(t, "ln_final.w", "ln_final.b", x) @ t["unembed.W_U"] + t["unembed.b_U"]


_HOOKED_TABLE = table("""
    embed.W_E                            V × d
    pos_embed.W_pos                      T × d
    blocks.N.ln1.w                       d
    blocks.N.ln1.b                       d
    blocks.N.attn.W_Q                    H × d × d_head
    blocks.N.attn.W_K                    H × d × d_head
    blocks.N.attn.W_V                    H × d × d_head
    blocks.N.attn.W_O                    H × d_head × d
    blocks.N.attn.b_Q                    H × d_head
    blocks.N.attn.b_K                    H × d_head
    blocks.N.attn.b_V                    H × d_head
    blocks.N.attn.b_O                    d
    blocks.N.attn.mask                   T × T          [mask]
    blocks.N.attn.IGNORE                                [mask]
    blocks.N.ln2.w                       d              [mlp]
    blocks.N.ln2.b                       d              [mlp]
    blocks.N.mlp.W_in                    d × 4d         [mlp]
    blocks.N.mlp.b_in                    4d             [mlp]
    blocks.N.mlp.W_out                   4d × d         [mlp]
    blocks.N.mlp.b_out                   d              [mlp]
    ln_final.w                           d
    ln_final.b                           d
    unembed.W_U                          d × V
    unembed.b_U                          V
""")
_HOOKED_BIASES = ("bias_qkv", "bias_attention", "bias_mlp", "bias_norm", "bias_unembed")
HOOKED = Layout("TransformerLens", _HOOKED_TABLE, _hooked_weights, _hooked_logits, "gelu", _HOOKED_BIASES)

LAYOUTS = (NANOGPT, LECTURE, HOOKED)
