"""GPT to TransformerLens 4, which has no `HookedTransformer` any more: the same conversion into a `TransformerBridge`.

The bridge's own components for such models (`TransformerBridge.boot_native`) compute the same logits, but some of their
hook points are not what their names say: `hook_attn_scores` fires on the pattern, after the softmax, and an edit there is
thrown away (in 3.9 one of `hook_pattern` too); and an edit of `hook_resid_mid` reaches the MLP but not the stream. So the
components here compute each step themselves, and a hook point means what it means in a `HookedTransformer`: same name, same
value, and an edit goes on into the computation.

With `models.hooked` this is the only module that names TransformerLens' classes. It loads them when it is imported, which
takes seconds, so import it inside functions. It works under TransformerLens 3.9 as well.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import AttentionBridge, BlockBridge, MLPBridge, NormalizationBridge, TransformerBridge
from transformer_lens.model_bridge.generalized_components import EmbeddingBridge, LinearBridge, PosEmbedBridge, UnembeddingBridge
from transformer_lens.model_bridge.supported_architectures.native import NativeArchitectureAdapter

from models.config import ConfigError, GPTConfig
from models.gpt import ACTIVATIONS, GPT
from models.hooked import architecture, attach_vocabulary, stream_weights
from models.vocabulary import Vocabulary

# What a HookedTransformer caches, in the order in which it fires; a model has those of the parts that it has.
FIRST = ("hook_embed", "hook_pos_embed")
IN_BLOCK = ("hook_resid_pre", "ln1.hook_scale", "ln1.hook_normalized", "attn.hook_q", "attn.hook_k", "attn.hook_v",
            "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z", "hook_attn_out", "hook_resid_mid", "ln2.hook_scale",
            "ln2.hook_normalized", "mlp.hook_pre", "mlp.hook_post", "hook_mlp_out", "hook_resid_post")  # fmt: skip
LAST = ("ln_final.hook_scale", "ln_final.hook_normalized", "unembed.hook_in", "unembed.hook_out")


def to_bridge(gpt: GPT, vocabulary: Vocabulary | None = None) -> Bridge:
    """The same function as a `TransformerBridge`, in the GPT's dtype and on its device; see `models.hooked.to_hooked`.

    Args:
        vocabulary: characters for the tokenizer; None for a model that takes token ids only.

    Raises:
        ConfigError: no residual connections but LayerNorm, which would see the widened stream whole.
    """
    cfg = TransformerBridgeConfig(**architecture(gpt), architecture="TransformerLensNative", tokenizer_prepends_bos=False)
    with torch.random.fork_rng(devices=[]):  # the modules draw weights, which are then replaced
        network = Network(cfg, gpt.config).to(cfg.device, cfg.dtype)
    adapter = NativeArchitectureAdapter(cfg)
    adapter.component_mapping = _components(cfg, gpt.config)
    bridge: Any = Bridge(network, adapter)
    given = stream_weights(gpt)
    with torch.no_grad():
        for name, weight in bridge.named_weights().items():
            weight.copy_(given[name]) if name in given else weight.zero_()
    bridge.eval()
    if vocabulary is not None:
        attach_vocabulary(bridge, vocabulary)
    return bridge


class Bridge(TransformerBridge):
    """A `TransformerBridge` that answers like a `HookedTransformer` where the two differ."""

    def __init__(self, network: Network, adapter: NativeArchitectureAdapter) -> None:
        super().__init__(network, adapter, None)
        if "ln_final" not in self._modules:
            self.ln_final = nn.Identity()
        names = [*FIRST, *(f"blocks.{layer}.{name}" for layer in range(self.cfg.n_layers) for name in IN_BLOCK), *LAST]
        points = self.hook_dict
        self.cached = frozenset(name for name in names if name in points)
        for name in self.cached:  # a point has several names; hooks are told this one
            points[name].name = name

    def named_weights(self) -> dict[str, Tensor]:
        """All parameters under HookedTransformer's names and in its shapes: views, so that writing into one is seen."""
        norm = ("w", "b")
        parts = {"embed": ("W_E",), "pos_embed": ("W_pos",), "ln_final": norm, "unembed": ("W_U", "b_U")}
        for layer, block in enumerate(self.blocks):
            attention = tuple(f"{kind}_{letter}" for kind in "Wb" for letter in "QKVO")
            parts |= {f"blocks.{layer}.ln1": norm, f"blocks.{layer}.attn": attention}
            if block.has_mlp:
                parts |= {f"blocks.{layer}.ln2": norm, f"blocks.{layer}.mlp": ("W_in", "b_in", "W_out", "b_out")}
        modules = {path: self.get_submodule(path) for path in parts}
        return {
            f"{path}.{name}": getattr(modules[path], name)
            for path, names in parts.items()
            for name in names
            if not isinstance(modules[path], nn.Identity)
        }

    def forward(self, input: Any, *args: Any, start_at_layer: int | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As TransformerLens has it; from `start_at_layer` on, blocks before it and their hooks are not run at all.

        Args:
            input: text or token ids; with `start_at_layer` the stream (batch, position, d_model) that enters that block.
        """
        if start_at_layer is None:
            return super().forward(input, *args, **kwargs)
        network: Any = self.original_model
        network.start = range(self.cfg.n_layers)[start_at_layer]
        try:
            return super().forward(input, *args, **kwargs)
        finally:
            network.start = None

    def run_with_cache(self, *args: Any, names_filter: Any = None, **kwargs: Any) -> Any:
        """Without a filter: what a HookedTransformer caches, each activation once and under its name there."""
        run: Any = super().run_with_cache
        return run(*args, names_filter=self.cached.__contains__ if names_filter is None else names_filter, **kwargs)

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Attach a tokenizer as it is: assigning one anew would add tokens to it and change d_vocab."""
        self._tokenizer = tokenizer


# --- components ------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """The modules of a GPT in the tree that TransformerLens' adapter expects; the components below take their places."""

    start: int | None = None  # block that a stream enters, instead of ids at the embedding

    def __init__(self, cfg: Any, config: GPTConfig) -> None:
        super().__init__()
        d, heads = cfg.d_model, cfg.n_heads * cfg.d_head
        self.tok_embed = nn.Embedding(cfg.d_vocab, d)
        self.pos = nn.Embedding(cfg.n_ctx, d)
        self.layers = nn.ModuleList()
        for _ in range(cfg.n_layers):
            attention = {name: nn.Linear(d, heads) for name in "qkv"} | {"o": nn.Linear(heads, d)}
            block: dict[str, nn.Module] = {"attn": nn.ModuleDict(attention)}
            if config.norm:
                block |= {"ln1": nn.LayerNorm(d)} | ({"ln2": nn.LayerNorm(d)} if config.mlp else {})
            if config.mlp:
                block["mlp"] = nn.ModuleDict({"fc_in": nn.Linear(d, cfg.d_mlp), "fc_out": nn.Linear(cfg.d_mlp, d)})
            self.layers.append(nn.ModuleDict(block))
        self.ln_out: nn.Module = nn.LayerNorm(d) if config.final_norm else nn.Identity()
        self.head = nn.Linear(d, cfg.d_vocab)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **_: Any,  # what concerns attention's output, caches and other things that models of transformers have
    ) -> Tensor:
        if attention_mask is not None and not attention_mask.all():
            raise ConfigError("this model reads every position of its text; give texts of equal length, without padding")
        if self.start is not None:
            stream = inputs_embeds
        else:
            embedded = self.tok_embed(input_ids) if inputs_embeds is None else inputs_embeds
            batch, length = embedded.shape[:2]
            stream = embedded + self.pos(torch.arange(length, device=embedded.device).expand(batch, length))
        for block in list(self.layers)[self.start or 0 :]:
            stream = block(stream)
        return self.head(self.ln_out(stream))


class LayerNorm(NormalizationBridge):
    """(x − mean)/scale · w + b, with hooks on the scale and on the quotient."""

    property_aliases: dict[str, str] = {}  # taken once, they would miss that folding puts other parameters in place
    w = property(lambda self: self.original_component.weight)
    b = property(lambda self: self.original_component.bias)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        x = self.hook_in(hidden_states)
        x = x - x.mean(-1, keepdim=True)
        scale = self.hook_scale((x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        return self.hook_out(self.hook_normalized(x / scale) * self.w + self.b)


class Attention(AttentionBridge):
    """Causal attention, whose scores and pattern are edited before they are used."""

    supports_split_qkv_fork = False  # so that asking for hook_q_input and the like is an error

    def __init__(self, cfg: Any) -> None:
        linear: dict[str, Any] = {name: LinearBridge(name=name) for name in "qkvo"}
        super().__init__("attn", cfg, submodules=linear)
        self.hook_in.hook_conversion = self.hook_out.hook_conversion = None  # they are streams, as they should be
        self.n_heads, self.attn_scale = cfg.n_heads, cfg.d_head**0.5

    def forward(self, stream: Tensor, **_: Any) -> Tensor:
        stream = self.hook_in(stream)
        q, k, v = (
            rearrange(linear(stream), "batch position (head d_head) -> batch head position d_head", head=self.n_heads)
            for linear in (self.q, self.k, self.v)
        )
        scores = q @ k.mT / self.attn_scale
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(diagonal=1)
        scores = self.hook_attn_scores(scores.masked_fill(future, -torch.inf))
        pattern = self.hook_pattern(scores.softmax(-1))
        z = rearrange(pattern @ v, "batch head position d_head -> batch position (head d_head)")
        return self.hook_out(self.o(z))


class MLP(MLPBridge):
    """Linear, activation, linear; hooks before and after the activation are those of the linear maps."""

    property_aliases: dict[str, str] = {}  # as in LayerNorm
    b_in = property(lambda self: self.get_submodule("in").bias)
    b_out = property(lambda self: self.out.bias)

    def __init__(self, cfg: Any) -> None:
        super().__init__("mlp", cfg, submodules={"in": LinearBridge(name="fc_in"), "out": LinearBridge(name="fc_out")})
        self.activation = ACTIVATIONS[cfg.act_fn]

    def forward(self, stream: Tensor, **_: Any) -> Tensor:
        hidden = self.get_submodule("in")(self.hook_in(stream))
        return self.hook_out(self.out(self.activation(hidden)))


class Block(BlockBridge):
    """Two sublayers that read the stream and add to it; `hook_resid_mid` is the stream between them."""

    hook_aliases = {"hook_resid_pre": "hook_in", "hook_attn_out": "attn.hook_out", "hook_resid_post": "hook_out"}

    def __init__(self, cfg: Any, config: GPTConfig) -> None:
        parts: dict[str, Any] = {"attn": Attention(cfg)} | ({"mlp": MLP(cfg)} if config.mlp else {})
        norms = {name: LayerNorm(name, cfg) for name in ("ln1", "ln2") if config.norm and (config.mlp or name == "ln1")}
        super().__init__("layers", cfg, submodules=parts | norms)
        self.has_mlp = config.mlp
        for name in {"ln1", "ln2"} - norms.keys():
            self.add_module(name, nn.Identity())
        if config.mlp:
            self.hook_aliases = self.hook_aliases | {"hook_mlp_out": "mlp.hook_out"}
            self.hook_resid_mid = HookPoint()

    def forward(self, stream: Tensor, **_: Any) -> Tensor:
        self._check_stop_at_layer(stream)
        stream = self.hook_in(stream)
        stream = stream + self.attn(self.ln1(stream))
        if self.has_mlp:
            stream = self.hook_resid_mid(stream)
            entering = self.hook_mlp_in(stream) if self._read_use_hook_mlp_in() else stream
            stream = stream + self.mlp(self.ln2(entering))
        return self.hook_out(stream)


def _components(cfg: Any, config: GPTConfig) -> dict[str, Any]:
    """What takes the place of each of the network's modules, by TransformerLens' name for it."""
    return {
        "embed": EmbeddingBridge(name="tok_embed"),
        "pos_embed": PosEmbedBridge(name="pos"),
        "blocks": Block(cfg, config),
        **({"ln_final": LayerNorm("ln_out", cfg)} if config.final_norm else {}),
        "unembed": UnembeddingBridge(name="head"),
    }
