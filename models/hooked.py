"""GPT to TransformerLens: the conversion, the character tokenizer, and the proof that both compute the same.

The result is a plain `HookedTransformer`: weights unprocessed (nothing folded, nothing centred), eval mode, characters
attached, so that the whole TransformerLens ecosystem works on it. This is the only module that names the class. Under
TransformerLens 4, which has none, everything here gives the `TransformerBridge` of `models.bridge` instead.
"""

from __future__ import annotations

import hashlib
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from models import checkpoint
from models.config import Activation, ConfigError
from models.gpt import GPT, Sublayer, sample
from models.protocol import Model
from models.vocabulary import Vocabulary, VocabularyError

PAD = "<pad>"  # special token whose id is V, outside the model's vocabulary
PRIVATE_USE = range(0xE000, 0xF900)  # code points that Unicode gives to nobody


# --- conversion ------------------------------------------------------------------------------------------------------


def to_hooked(gpt: GPT, vocabulary: Vocabulary | None = None) -> Any:
    """The same function as a `transformer_lens.HookedTransformer`, in the GPT's dtype and on its device.

    Under TransformerLens 4 it is `models.bridge.to_bridge`, and the same holds.

    Extra projections are folded into what they follow (two linear maps in a row are one). A norm that the GPT lacks
    is an `nn.Identity`, whatever the configuration says. Without residual connections there is no stream to read, and
    the model becomes one on a *widened stream* (see `_widen`), the same function again.

    Args:
        vocabulary: characters for the tokenizer; None for a model that takes token ids only.

    Raises:
        ConfigError: no residual connections but LayerNorm, which would see the widened stream whole.
    """
    if int(version("transformer-lens").partition(".")[0]) >= 4:
        from models.bridge import to_bridge  # which needs this module for its weights

        return to_bridge(gpt, vocabulary)
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config, cfg = gpt.config, HookedTransformerConfig(**architecture(gpt))
    device = gpt.token_embedding.weight.device
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
        model = HookedTransformer(cfg, move_to_device=False).to(device, print_details=False)
    for block in model.blocks:
        if cfg.normalization_type and not config.norm:
            block.ln1 = nn.Identity()
            if config.mlp:
                block.ln2 = nn.Identity()
    if cfg.normalization_type and not config.final_norm:
        model.ln_final = nn.Identity()
    model.setup()
    state = {name: torch.zeros_like(tensor) if name.split(".")[-1].startswith("b") else tensor
             for name, tensor in model.state_dict().items()}  # fmt: skip
    model.load_state_dict(state | stream_weights(gpt))
    model.eval()
    if vocabulary is not None:
        attach_vocabulary(model, vocabulary)
    return model


def architecture(gpt: GPT) -> dict[str, Any]:
    """TransformerLens' configuration of a GPT: the fields that its classes of models have in common.

    Raises:
        ConfigError: no residual connections but LayerNorm, which would see the widened stream whole.
    """
    config, weight = gpt.config, gpt.token_embedding.weight
    if not config.residual and (config.norm or config.final_norm):
        raise ConfigError(
            "a model without residual connections but with LayerNorm has no exact HookedTransformer; "
            "turn residual on, or norm and final_norm off"
        )
    return dict(
        n_layers=config.n_layers,
        d_model=config.d_model if config.residual else config.d_model * (1 + _sublayers(gpt)),
        n_ctx=config.n_ctx,
        d_head=config.d_head,
        n_heads=config.n_heads,
        d_mlp=config.d_mlp if config.mlp else None,
        attn_only=not config.mlp,
        d_vocab=config.d_vocab,
        act_fn=config.activation,
        normalization_type="LN" if config.norm or config.final_norm else None,
        default_prepend_bos=False,
        device=str(weight.device),
        dtype=weight.dtype,
        model_name="gpt",
        init_weights=False,
    )


def stream_weights(gpt: GPT) -> dict[str, Tensor]:
    """`translate(gpt)`; without residual connections on the widened stream (see `_widen`)."""
    return translate(gpt) if gpt.config.residual else _widen(translate(gpt), _sublayers(gpt))


def _sublayers(gpt: GPT) -> int:
    return gpt.config.n_layers * (2 if gpt.config.mlp else 1)


@torch.no_grad()
def translate(gpt: GPT) -> dict[str, Tensor]:
    """The GPT's parameters under TransformerLens' names and in its shapes; biases that it lacks are left out."""
    heads = gpt.config.n_heads
    state = {
        "embed.W_E": gpt.token_embedding.weight,
        "pos_embed.W_pos": gpt.position_embedding.weight,
        "unembed.W_U": gpt.unembedding.weight.T,
        **_biased("unembed.b_U", gpt.unembedding.bias),
        **_norm("ln_final", gpt.final_norm),
    }
    blocks: Any = gpt.blocks
    for layer, block in enumerate(blocks):
        name = f"blocks.{layer}"
        attention = block.attention.inner
        state |= _norm(f"{name}.ln1", block.attention.norm)
        for letter, module in (("Q", attention.query), ("K", attention.key), ("V", attention.value)):
            split = rearrange(module.weight, "(head d_head) d_model -> head d_model d_head", head=heads)
            state[f"{name}.attn.W_{letter}"] = split
            if module.bias is not None:
                state[f"{name}.attn.b_{letter}"] = rearrange(module.bias, "(head d_head) -> head d_head", head=heads)
        W_O, b_O = _fold(block.attention)
        state[f"{name}.attn.W_O"] = rearrange(W_O, "(head d_head) d_model -> head d_head d_model", head=heads)
        state |= _biased(f"{name}.attn.b_O", b_O)
        if gpt.config.mlp:
            state |= _norm(f"{name}.ln2", block.mlp.norm)
            state[f"{name}.mlp.W_in"] = block.mlp.inner.input.weight.T
            state |= _biased(f"{name}.mlp.b_in", block.mlp.inner.input.bias)
            W_out, b_out = _fold(block.mlp)
            state[f"{name}.mlp.W_out"] = W_out
            state |= _biased(f"{name}.mlp.b_out", b_out)
    return {key: tensor.detach().clone() for key, tensor in state.items()}


def _fold(sublayer: Sublayer) -> tuple[Tensor, Tensor | None]:
    """Output weight (inner, d_model) and bias of a sublayer, its extra projection multiplied in if it has one."""
    output = sublayer.inner.output
    W, b = output.weight.T, output.bias
    if not isinstance(sublayer.projection, nn.Linear):
        return W, b
    P, p = sublayer.projection.weight.T, sublayer.projection.bias
    return W @ P, p if b is None else b @ P + p


def _biased(name: str, bias: Tensor | None) -> dict[str, Tensor]:
    return {} if bias is None else {name: bias}


def _norm(name: str, norm: nn.Module) -> dict[str, Tensor]:
    return {f"{name}.w": norm.weight, **_biased(f"{name}.b", norm.bias)} if isinstance(norm, nn.LayerNorm) else {}


def _widen(state: dict[str, Tensor], sublayers: int) -> dict[str, Tensor]:
    """A model without residual connections on a stream of width d·(1 + sublayers).

    The embedding writes the first d coordinates. Each sublayer reads the last d that were written and writes the next
    d, which were zero, so adding is the same as replacing. The unembedding reads the last d. Exact, as long as there
    is no LayerNorm, which would see the whole width.
    """
    wide = dict(state)
    d = state["embed.W_E"].shape[1]
    slots = 1 + sublayers

    def place(tensor: Tensor, slot: int, axis: int) -> Tensor:
        shape = list(tensor.shape)
        shape[axis] = d * slots
        out = tensor.new_zeros(shape)
        out.narrow(axis, d * slot, d).copy_(tensor)
        return out

    wide["embed.W_E"] = place(state["embed.W_E"], 0, 1)
    wide["pos_embed.W_pos"] = place(state["pos_embed.W_pos"], 0, 1)
    wide["unembed.W_U"] = place(state["unembed.W_U"], slots - 1, 0)
    layers = [name for name in state if name.endswith("attn.W_O")]
    per_layer = sublayers // max(1, len(layers))
    for layer in range(len(layers)):
        name, read = f"blocks.{layer}", layer * per_layer
        for letter in "QKV":
            wide[f"{name}.attn.W_{letter}"] = place(state[f"{name}.attn.W_{letter}"], read, 1)
        writes = {"attn.W_O": 2, "attn.b_O": 0}
        if per_layer == 2:
            wide[f"{name}.mlp.W_in"] = place(state[f"{name}.mlp.W_in"], read + 1, 0)
            writes |= {"mlp.W_out": 1, "mlp.b_out": 0}
        for part, axis in writes.items():
            slot = read + (1 if part.startswith("attn") else 2)
            if f"{name}.{part}" in state:
                wide[f"{name}.{part}"] = place(state[f"{name}.{part}"], slot, axis)
    return wide


# --- characters ------------------------------------------------------------------------------------------------------


def attach_vocabulary(model: Model, vocabulary: Vocabulary) -> None:
    """Give a model a character tokenizer, so that `to_tokens`, `to_str_tokens` and `generate` take text.

    Pad and end-of-text are one special token outside the vocabulary; with a real character in their place generation
    would stop at it or drop it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if len(vocabulary) != model.cfg.d_vocab:
        raise VocabularyError(
            f"got {len(vocabulary)} characters for a model with d_vocab = {model.cfg.d_vocab}; they must be equal"
        )
    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary.ids), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad = PAD
    if set(PAD) <= vocabulary.ids.keys():  # the model can read the word "<pad>", so another name must do
        pad = next(chr(point) for point in PRIVATE_USE if chr(point) not in vocabulary.ids)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=pad)
    model.set_tokenizer(fast)  # type: ignore[attr-defined]
    model.cfg.default_prepend_bos = False


def vocabulary_of(model: Model) -> Vocabulary:
    """The characters of a model, by id.

    Raises:
        VocabularyError: it has no tokenizer, or one whose tokens are not single characters.
    """
    attach = "attach characters with models.hooked.attach_vocabulary(model, Vocabulary(tuple('abc')))"
    if model.tokenizer is None:
        raise VocabularyError(f"this model has no tokenizer, so its tokens have no characters; {attach}")
    ids = {number: token for token, number in model.tokenizer.get_vocab().items() if number < model.cfg.d_vocab}
    characters = tuple(ids.get(number, "") for number in range(model.cfg.d_vocab))
    odd = next((c for c in characters if len(c) != 1), None)
    if odd is not None:
        raise VocabularyError(f"this model's tokens are not single characters (one is {odd!r}); {attach}")
    return Vocabulary(characters)


def encode(model: Model, text: str) -> Tensor:
    """Token ids (position,) of a text, checked: not empty, at most n_ctx characters, each in the vocabulary.

    Raises:
        VocabularyError: names what is wrong, where, and what to do.
    """
    n_ctx = model.cfg.n_ctx
    if not text:
        raise VocabularyError(f"the text is empty; give 1–{n_ctx} characters")
    if len(text) > n_ctx:
        raise VocabularyError(
            f"the text has {len(text)} characters; the model reads at most {n_ctx}: shorten it by {len(text) - n_ctx}"
        )
    return torch.from_numpy(vocabulary_of(model).encode(text)).to(model.cfg.device)


@torch.no_grad()
def generate(
    model: Model,
    prompt: str,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
) -> str:
    """Continue a prompt of any length (the context is cropped to n_ctx). Returns the prompt and what follows it.

    Raises:
        VocabularyError: the prompt is empty or has an unknown character.
        ConfigError: a sampling option is out of range (see `models.gpt.GPT.generate`).
    """
    vocabulary = vocabulary_of(model)
    if not prompt:
        raise VocabularyError("the prompt is empty; give at least one character to continue from")
    idx = torch.from_numpy(vocabulary.encode(prompt)).to(model.cfg.device)[None]
    return vocabulary.decode(sample(model, idx, model.cfg.n_ctx, max_new_tokens, temperature, top_k, seed)[0].tolist())


# --- loading and identity --------------------------------------------------------------------------------------------


def content_hash(model: Model) -> str:
    """Twelve hex digits that identify a model's weights, whatever precision they are held in."""
    digest = hashlib.sha256()
    named: dict[str, Tensor] = getattr(model, "named_weights", model.state_dict)()  # one and the same names, whatever the class
    for name, tensor in sorted(named.items()):
        if name.endswith((".mask", ".IGNORE")):
            continue
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(np.ascontiguousarray(tensor.detach().to("cpu", torch.float32).numpy()).tobytes())
    return digest.hexdigest()[:12]


def hook(found: checkpoint.Checkpoint) -> Any:
    """A loaded checkpoint as a HookedTransformer that remembers where it came from (`model.checkpoint`)."""
    model = to_hooked(found.gpt, found.vocabulary)
    model.cfg.model_name = found.name
    model.checkpoint = found
    return model


def load(
    name: str | Path = "baby",
    *,
    vocabulary: str | Path | None = None,
    data: str | Path | None = None,
    heads: int | None = None,
    activation: Activation | None = None,
) -> Any:
    """Load a checkpoint, by name or path, as a HookedTransformer (see the module's first lines).

    The path may also be a file of nanoGPT and others; the other arguments are for such a file: see `models.importers.load`.

    Raises:
        models.checkpoint.CheckpointError: it is missing or broken.
        models.importers.ImporterError: it is a file of a layout that is not known, or does not tell enough.
    """
    from models import importers  # which needs this module for its proof

    return hook(importers.load(name, vocabulary=vocabulary, data=data, heads=heads, activation=activation))


# --- proof -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def parity(gpt: GPT, model: Model, batch: int = 16, seed: int = 0) -> float:
    """Largest |difference of logits| between GPT and HookedTransformer over random full-length windows."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(gpt.config.d_vocab, (batch, gpt.config.n_ctx), generator=generator).to(model.cfg.device)
    was_training = gpt.training
    gpt.eval()
    difference = (gpt(idx)[0] - model(idx)).abs().max().item()
    gpt.train(was_training)
    return difference
