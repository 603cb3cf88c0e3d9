"""What a GPT is (`GPTConfig`), how it is trained (`Recipe`), and the named pairs of both (`PRESETS`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, get_args

from models.errors import WorkbenchError

Activation = Literal["gelu", "relu", "gelu_new"]
Optimiser = Literal["muon", "adamw"]
Initialisation = Literal["gpt2", "torch"]
Stored = Literal["float32", "float16"]


class ConfigError(WorkbenchError):
    """A configuration field has a value that is not allowed; the message names field, value and what is allowed."""


def _require(allowed: bool, field_name: str, got: object, expected: str) -> None:
    if not allowed:
        raise ConfigError(f"{field_name}: got {got!r}; expected {expected}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Architecture of a decoder-only character transformer; sizes bear TransformerLens' names.

    The switches are the steps of the course: a model grows from attention alone to the complete pre-norm GPT by
    turning on `mlp`, `residual`, `norm` and `final_norm`.

    Raises:
        ConfigError: a field is outside its range, or two fields contradict each other.
    """

    d_vocab: int = 65  # V, characters
    n_ctx: int  # T, positions
    d_model: int  # d, width of the stream
    n_layers: int  # L, blocks
    n_heads: int  # H, heads per block; d_head = d / H
    activation: Activation = "gelu"  # the exact one; gelu_new is its tanh approximation, as minGPT has it
    mlp: bool = True  # an MLP d -> 4d -> d after each attention
    residual: bool = True  # sublayers add to their input instead of replacing it
    norm: bool = True  # LayerNorm before attention and before the MLP
    final_norm: bool = True  # LayerNorm before the unembedding
    extra_projection: bool = False  # one more d x d linear after attention and after the MLP
    tied: bool = False  # unembedding = token embedding, transposed
    bias_qkv: bool = False
    bias_attention: bool = True  # of the output projection
    bias_mlp: bool = True
    bias_norm: bool = True
    bias_unembed: bool = False
    dropout: float = 0.0  # on the embedding and on what each sublayer writes
    dropout_attention: float = 0.0  # on attention weights; costs the fused attention kernel

    def __post_init__(self) -> None:
        for name in ("d_vocab", "n_ctx", "d_model", "n_heads"):
            value = getattr(self, name)
            _require(_is_whole(value) and value >= 1, name, value, "a whole number of at least 1")
        _require(_is_whole(self.n_layers) and self.n_layers >= 0, "n_layers", self.n_layers, "a whole number of at least 0")
        _require(
            self.d_model % self.n_heads == 0,
            "n_heads",
            self.n_heads,
            f"a divisor of d_model = {self.d_model}, so that every head has the same width",
        )
        _require(self.activation in get_args(Activation), "activation", self.activation, "'gelu', 'relu' or 'gelu_new'")
        for spec in fields(self):
            if spec.type == "bool":
                value = getattr(self, spec.name)
                _require(isinstance(value, bool), spec.name, value, "true or false")
        for name in ("dropout", "dropout_attention"):
            value = getattr(self, name)
            _require(_is_number(value) and 0 <= value < 1, name, value, "a number from 0 up to, not including, 1")
        if self.tied:
            _require(not self.bias_unembed, "bias_unembed", True, "false when tied is true")

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_heads

    @property
    def d_mlp(self) -> int:
        return 4 * self.d_model

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GPTConfig:
        """Build from parsed JSON; an unknown or missing field is an error that names it."""
        return _from_dict(cls, values)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a preset is trained: batches, optimiser, schedule, evaluation.

    `muon` puts the two-dimensional matrices inside the blocks under `torch.optim.Muon` and everything else
    (embeddings, unembedding, norms, biases) under AdamW; `adamw` puts everything under AdamW.
    """

    iterations: int = 3000
    batch_size: int = 64  # windows of n_ctx characters
    optimiser: Optimiser = "muon"
    learning_rate: float = 3e-3  # AdamW
    muon_learning_rate: float = 0.02
    weight_decay: float = 0.1  # decoupled, on matrices only
    muon_weight_decay: float = 0.01
    betas: Sequence[float] = (0.9, 0.99)  # kept as a tuple of two
    warmup: int = 100  # steps of linear warm-up, then a cosine
    final_fraction: float = 0.05  # of the peak learning rate, at the last step
    clip: float = 1.0  # largest gradient norm
    evaluate_every: int = 250  # steps between validations, each over the whole split; every one is a save
    initialisation: Initialisation = "gpt2"
    repeated: float = 0.0  # share of the windows that are repeated random strings instead of the corpus (models.repeated)
    periods: Sequence[int] = (10, 64)  # of those: smallest and largest, both included
    stored: Stored = "float32"  # what the weights are kept in; losses are measured after the rounding
    moments: Sequence[int] = ()  # steps that a film of the run keeps, ascending
    seed: int = 1337

    def __post_init__(self) -> None:
        for name in ("iterations", "batch_size", "evaluate_every"):
            value = getattr(self, name)
            _require(_is_whole(value) and value >= 1, name, value, "a whole number of at least 1")
        for name in ("warmup", "seed"):
            value = getattr(self, name)
            _require(_is_whole(value) and value >= 0, name, value, "a whole number of at least 0")
        for name in ("learning_rate", "muon_learning_rate", "clip"):
            value = getattr(self, name)
            _require(_is_number(value) and value > 0, name, value, "a number above 0")
        for name in ("weight_decay", "muon_weight_decay"):
            value = getattr(self, name)
            _require(_is_number(value) and value >= 0, name, value, "a number of at least 0")
        fraction = self.final_fraction
        _require(_is_number(fraction) and 0 <= fraction <= 1, "final_fraction", fraction, "a number from 0 to 1")
        betas = tuple(self.betas) if isinstance(self.betas, (tuple, list)) else ()
        betas_fit = len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)
        _require(betas_fit, "betas", betas or self.betas, "two numbers from 0 up to, not including, 1")
        object.__setattr__(self, "betas", betas)  # JSON gives a list
        _require(_is_number(self.repeated) and 0 <= self.repeated <= 1, "repeated", self.repeated, "a share from 0 to 1")
        expected = "two whole numbers of at least 1, the smaller first"
        periods = self._ascending("periods", 1, expected)
        _require(len(periods) == 2, "periods", periods, expected)
        moments = self._ascending("moments", 0, "steps of the run, ascending")
        _require(not moments or moments[-1] <= self.iterations, "moments", moments, f"steps up to iterations = {self.iterations}")
        _require(self.optimiser in get_args(Optimiser), "optimiser", self.optimiser, "'muon' or 'adamw'")
        schemes = get_args(Initialisation)
        _require(self.initialisation in schemes, "initialisation", self.initialisation, "'gpt2' or 'torch'")
        _require(self.stored in get_args(Stored), "stored", self.stored, "'float32' or 'float16'")

    def _ascending(self, name: str, least: int, expected: str) -> tuple[int, ...]:
        """A field of whole numbers in order, kept as a tuple; JSON gives a list."""
        value = getattr(self, name)
        numbers = tuple(value) if isinstance(value, (tuple, list)) else ("not a list",)
        fits = all(_is_whole(number) and number >= least for number in numbers) and list(numbers) == sorted(numbers)
        _require(fits, name, value, expected)
        object.__setattr__(self, name, numbers)
        return numbers

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """Build from parsed JSON; an unknown or missing field is an error that names it."""
        return _from_dict(cls, values)


def _from_dict(cls: Any, values: dict[str, Any]) -> Any:
    known = [spec.name for spec in fields(cls)]
    _require(isinstance(values, dict), cls.__name__, values, f"an object with the fields: {', '.join(known)}")
    for name in values:
        _require(name in known, name, values[name], f"only the fields of {cls.__name__}: {', '.join(known)}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{cls.__name__}: {error}; known fields: {', '.join(known)}") from None


class Term(NamedTuple):
    """One row of the parameter table."""

    name: str
    formula: str
    parameters: int


def parameter_table(config: GPTConfig) -> list[Term]:
    """Parameters by component, by arithmetic alone; the counts add up to the model's `numel`.

    Formulas use V, T, d, L as the course does. Nothing is read from a module: this is the paper side of the check.
    """
    V, T, d, L = config.d_vocab, config.n_ctx, config.d_model, config.n_layers
    sublayers = L * (2 if config.mlp else 1)
    norms = sublayers if config.norm else 0
    norm_width = 2 if config.bias_norm else 1
    terms = [
        Term("token embedding", "V·d", V * d),
        Term("position embedding", "T·d", T * d),
        Term("attention q, k, v", "L·3·d²", L * 3 * d * d),
        Term("attention q, k, v biases", "L·3·d", L * 3 * d if config.bias_qkv else 0),
        Term("attention output", "L·d²", L * d * d),
        Term("attention output bias", "L·d", L * d if config.bias_attention else 0),
        Term("MLP", "L·8·d²", L * 8 * d * d if config.mlp else 0),
        Term("MLP biases", "L·5·d", L * 5 * d if config.mlp and config.bias_mlp else 0),
        Term("extra projections", f"{sublayers}·(d² + d)", sublayers * (d * d + d) if config.extra_projection else 0),
        Term("block LayerNorms", f"{norms}·{norm_width}·d", norms * norm_width * d),
        Term("final LayerNorm", f"{norm_width}·d", norm_width * d if config.final_norm else 0),
        Term("unembedding", "d·V", 0 if config.tied else d * V),
        Term("unembedding bias", "V", V if config.bias_unembed else 0),
    ]
    return [term for term in terms if term.parameters]


def parameter_count(config: GPTConfig) -> int:
    """Number of parameters by the formula on paper."""
    return sum(term.parameters for term in parameter_table(config))


class Preset(NamedTuple):
    model: GPTConfig
    recipe: Recipe


def _walkthrough(**switches: Any) -> Preset:
    plain: dict[str, Any] = dict(
        n_ctx=8, d_model=32, n_layers=3, n_heads=4, activation="relu", bias_unembed=True,
        mlp=True, residual=False, norm=False, final_norm=False,
    )  # fmt: skip
    recipe = Recipe(iterations=5000, batch_size=32, optimiser="adamw", initialisation="torch", evaluate_every=500)
    return Preset(GPTConfig(**(plain | switches)), recipe)


def _attention_only(n_layers: int, norm: bool) -> Preset:
    """Elhage et al. (2021): attention only, no biases; without LayerNorm the logits are a sum of paths, exactly.

    Half of what they read are repeated random strings: on Shakespeare alone no induction circuit forms at this size.
    """
    model = GPTConfig(
        n_ctx=128, d_model=128, n_layers=n_layers, n_heads=8, mlp=False, norm=norm, final_norm=norm, bias_attention=False
    )
    recipe = Recipe(
        iterations=4000, initialisation="torch", repeated=0.5, weight_decay=0.0, muon_weight_decay=0.0,
        moments=(0, 50, 100, 150, 175, 200, 225, 250, 275, 300, 350, 400, 450, 500, 550, 600, 625, 650, 675, 700, 750, 850, 1000,
                 1300, 1700, 2400, 4000),
    )  # fmt: skip
    return Preset(model, recipe)


_BABY: dict[str, Any] = dict(n_ctx=64, d_model=128, n_layers=4, n_heads=4, dropout=0.1)
_NANOGPT: dict[str, Any] = dict(n_ctx=256, d_model=384, n_layers=6, n_heads=6, tied=True, dropout=0.2, dropout_attention=0.2)
_BIASED = GPTConfig(**_NANOGPT, bias_qkv=True)
_UNBIASED = replace(_BIASED, bias_qkv=False, bias_attention=False, bias_mlp=False, bias_norm=False)

_NANOGPT_RECIPE = Recipe(iterations=5000, stored="float16")
_BABY_RECIPE = Recipe(
    iterations=6000, moments=(0, 10, 20, 40, 80, 150, 250, 400, 600, 900, 1300, 1800, 2500, 3500, 4700, 6000)
)  # fmt: skip

PRESETS: dict[str, Preset] = {
    "baby": Preset(GPTConfig(**_BABY), _BABY_RECIPE),
    "baby-tied": Preset(GPTConfig(**_BABY, tied=True), _BABY_RECIPE),
    "nanogpt": Preset(_UNBIASED, _NANOGPT_RECIPE),
    "nanogpt-biased": Preset(_BIASED, _NANOGPT_RECIPE),
    "walkthrough-4.2": _walkthrough(n_layers=1, mlp=False),
    "walkthrough-4.4": _walkthrough(n_layers=1),
    "walkthrough-4.6": _walkthrough(),
    "walkthrough-4.7": _walkthrough(residual=True),
    "walkthrough-4.8": _walkthrough(residual=True, extra_projection=True),
    "walkthrough-4.9": _walkthrough(residual=True, norm=True),
    "walkthrough-4.10": _walkthrough(residual=True, norm=True, final_norm=True),
    "walkthrough-final": _walkthrough(
        residual=True, norm=True, final_norm=True,
        n_ctx=256, d_model=384, n_layers=6, n_heads=6, dropout=0.2, dropout_attention=0.2,
    ),
    "attn-only-0": _attention_only(0, norm=False),
    "attn-only-1": _attention_only(1, norm=False),
    "attn-only-2": _attention_only(2, norm=False),
    "attn-only-0-ln": _attention_only(0, norm=True),
    "attn-only-1-ln": _attention_only(1, norm=True),
    "attn-only-2-ln": _attention_only(2, norm=True),
}  # fmt: skip
