"""Architectures, recipes and presets: the figures of the course, and errors that name what is wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from models.config import PRESETS, ConfigError, GPTConfig, Recipe, parameter_count, parameter_table
from models.gpt import GPT

PARAMETERS = {
    "walkthrough-4.2": 8_609,
    "walkthrough-4.4": 16_961,
    "walkthrough-4.6": 41_921,
    "walkthrough-4.7": 41_921,
    "walkthrough-4.8": 48_257,
    "walkthrough-4.9": 42_305,
    "walkthrough-4.10": 42_369,
    "walkthrough-final": 10_788_929,
    "baby": 816_640,
    "baby-tied": 808_320,
    "nanogpt": 10_745_088,
    "nanogpt-biased": 10_770_816,
    "attn-only-0": 33_024,  # 65·128 + 128·128 + 128·65
    "attn-only-1": 98_560,  # and 4·128² for each layer
    "attn-only-2": 164_096,
    "attn-only-0-ln": 33_280,  # and 2·128 for each LayerNorm: the final one, and one per layer
    "attn-only-1-ln": 99_072,
    "attn-only-2-ln": 164_864,
}
SIZES: dict[str, Any] = dict(n_ctx=8, d_model=12, n_layers=2, n_heads=3)


def on_meta(config: GPTConfig) -> GPT:
    """A GPT without memory: enough for counting."""
    with torch.device("meta"):
        return GPT(config)


def rows(config: GPTConfig) -> dict[str, int]:
    return {term.name: term.parameters for term in parameter_table(config)}


# --- the parameter table ---------------------------------------------------------------------------------------------


def test_presets_are_those_of_the_course():
    assert PRESETS.keys() == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_formula_and_numel_give_the_course_s_count(name):
    config = PRESETS[name].model
    assert parameter_count(config) == PARAMETERS[name]
    assert sum(parameter.numel() for parameter in on_meta(config).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("switch", ["mlp", "norm", "final_norm", "extra_projection", "tied", "bias_norm", "bias_mlp",
                                    "bias_attention", "bias_qkv"])  # fmt: skip
@pytest.mark.parametrize("value", [True, False])
def test_formula_equals_numel_under_every_switch(switch, value):
    config = GPTConfig(**SIZES, **{switch: value})
    assert parameter_count(config) == sum(parameter.numel() for parameter in on_meta(config).parameters())


def test_baby_is_broken_down_as_in_the_course():
    table = rows(PRESETS["baby"].model)
    groups = {
        "embeddings": table["token embedding"] + table["position embedding"],
        "attention": table["attention q, k, v"] + table["attention output"] + table["attention output bias"],
        "MLPs": table["MLP"] + table["MLP biases"],
        "block LayerNorms": table["block LayerNorms"],
        "final": table["final LayerNorm"] + table["unembedding"],
    }
    assert groups == {"embeddings": 16_512, "attention": 262_656, "MLPs": 526_848, "block LayerNorms": 2_048, "final": 8_576}
    assert sum(groups.values()) == sum(table.values()) == 816_640
    shares = [round(100 * groups[name] / 816_640, 1) for name in ("embeddings", "attention", "MLPs")]
    assert shares == [2.0, 32.2, 64.5]


def test_baby_s_breakdown_is_what_its_modules_hold():
    gpt = on_meta(PRESETS["baby"].model)

    def numel(part: str) -> int:
        return sum(p.numel() for name, p in gpt.named_parameters() if re.search(part, name))

    assert numel("embedding") - numel("unembedding") == 16_512
    assert numel("attention.inner") == 262_656
    assert numel("mlp.inner") == 526_848
    assert numel(r"blocks.*norm") == 2_048
    assert numel("final_norm|unembedding") == 8_576


def test_rule_of_thumb_misses_baby_s_biases_and_norms():
    config = PRESETS["baby"].model
    in_blocks = sum(p.numel() for p in on_meta(config).blocks.parameters())
    rule = 12 * config.n_layers * config.d_model**2
    assert (rule, in_blocks, in_blocks - rule) == (786_432, 791_552, 5_120)


def test_tying_saves_one_embedding():
    tied, untied = PRESETS["baby-tied"].model, PRESETS["baby"].model
    assert parameter_count(untied) - parameter_count(tied) == untied.d_vocab * untied.d_model


def test_residuals_add_no_parameters_and_extra_projections_1056_each():
    counts = {step: parameter_count(PRESETS[f"walkthrough-{step}"].model) for step in ("4.6", "4.7", "4.8")}
    assert counts["4.7"] == counts["4.6"]
    assert counts["4.8"] - counts["4.7"] == 3 * 2 * 1_056


def test_nanogpt_without_positions_is_what_nanogpt_reports():
    assert parameter_count(PRESETS["nanogpt"].model) - rows(PRESETS["nanogpt"].model)["position embedding"] == 10_646_784


def test_one_block_of_biased_nanogpt():
    block = on_meta(PRESETS["nanogpt-biased"].model).blocks[0]

    def numel(part: str) -> int:
        return sum(p.numel() for name, p in block.named_parameters() if re.search(part, name))

    assert (numel("attention.inner"), numel("mlp.inner"), numel("norm")) == (591_360, 1_181_568, 1_536)
    assert numel("") == 1_774_464


def test_nanogpt_has_no_bias_anywhere():
    assert [name for name, p in on_meta(PRESETS["nanogpt"].model).named_parameters() if p.ndim != 2 and "bias" in name] == []


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("d_vocab", 0, "at least 1"),
        ("d_vocab", True, "whole number"),
        ("n_ctx", -1, "at least 1"),
        ("n_ctx", 8.0, "whole number"),
        ("d_model", "12", "whole number"),
        ("n_layers", -1, "at least 0"),
        ("n_heads", 5, "a divisor of d_model = 12"),
        ("n_heads", 0, "at least 1"),
        ("activation", "swish", "'gelu', 'relu' or 'gelu_new'"),
        ("mlp", 1, "true or false"),
        ("tied", "yes", "true or false"),
        ("bias_norm", None, "true or false"),
        ("dropout", 1.0, "from 0 up to, not including, 1"),
        ("dropout", -0.1, "from 0 up to"),
        ("dropout", float("nan"), "from 0 up to"),
        ("dropout_attention", "0.1", "from 0 up to"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_architecture_errors_name_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ConfigError, match=re.escape(f"{field}: got {value!r}; expected")) as error:
        GPTConfig(**SIZES | {field: value})
    assert allowed in str(error.value)


def test_a_tied_unembedding_has_no_bias():
    with pytest.raises(ConfigError, match="bias_unembed: got True; expected false when tied is true"):
        GPTConfig(**SIZES, tied=True, bias_unembed=True)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("iterations", 0, "at least 1"),
        ("batch_size", 1.5, "whole number"),
        ("evaluate_every", 0, "at least 1"),
        ("warmup", -1, "at least 0"),
        ("seed", "x", "whole number"),
        ("learning_rate", 0, "above 0"),
        ("learning_rate", float("nan"), "above 0"),
        ("muon_learning_rate", -1, "above 0"),
        ("clip", 0.0, "above 0"),
        ("weight_decay", -0.1, "at least 0"),
        ("muon_weight_decay", True, "number"),
        ("final_fraction", 1.5, "from 0 to 1"),
        ("betas", (0.9,), "two numbers"),
        ("betas", (0.9, 1.0), "not including, 1"),
        ("betas", 0.9, "two numbers"),
        ("optimiser", "sgd", "'muon' or 'adamw'"),
        ("initialisation", "zeros", "'gpt2' or 'torch'"),
        ("stored", "int8", "'float32' or 'float16'"),
        ("repeated", 1.01, "from 0 to 1"),
        ("repeated", float("nan"), "from 0 to 1"),
        ("periods", (5,), "two whole numbers"),
        ("periods", (0, 5), "at least 1"),
        ("periods", (6, 5), "the smaller first"),
        ("periods", 5, "two whole numbers"),
        ("moments", (0, 2, 1), "ascending"),
        ("moments", (0, 1.5), "steps of the run"),
        ("moments", (-1,), "steps of the run"),
        ("moments", (0, 3001), "up to iterations = 3000"),
        ("moments", "12", "steps of the run"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_recipe_errors_name_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ConfigError, match=re.escape(f"{field}: got {value!r}; expected")) as error:
        Recipe(**{field: value})
    assert allowed in str(error.value)


@pytest.mark.parametrize("cls", [GPTConfig, Recipe])
def test_an_unknown_field_is_named_with_the_known_ones(cls):
    with pytest.raises(ConfigError, match=f"n_embd: got 3; expected only the fields of {cls.__name__}: .*(n_ctx|seed)"):
        cls.from_dict({"n_embd": 3})


@pytest.mark.usefixtures("unchecked_types")
def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match="'n_heads'"):
        GPTConfig.from_dict({name: value for name, value in SIZES.items() if name != "n_heads"})


@pytest.mark.usefixtures("unchecked_types")
def test_a_recipe_with_lists_survives_json():
    recipe = Recipe(betas=[0.9, 0.95], periods=[2, 3], moments=[0, 5])
    assert (recipe.betas, recipe.periods, recipe.moments) == ((0.9, 0.95), (2, 3), (0, 5))
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_presets_survive_json(name):
    model, recipe = PRESETS[name]
    assert GPTConfig.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
