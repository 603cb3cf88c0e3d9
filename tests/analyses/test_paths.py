"""Path expansion: against the model, against a loop over paths, and on an induction circuit put there by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from analyses.logit_attribution import logit_attribution
from analyses.path_expansion import path_expansion
from analyses.paths import expand, number_of_paths
from analyses.spec import KnobError
from analyses.stream import UnsupportedModel, norm_of, run
from models.config import GPTConfig
from models.hooked import encode, to_hooked

TEXT = "abc\nj fd"


def expanded(model: Any, text: str, target: int, place: int) -> Any:
    _, cache = run(model, encode(model, text))
    return expand(model, cache, place, model.unembed.W_U[:, target], model.unembed.b_U[target])


@pytest.fixture
def attention_only(random_weights: Any, vocabulary: Any) -> Any:
    """Two blocks of attention alone, no norms, every other bias there is."""
    sizes = dict(d_vocab=len(vocabulary), n_ctx=6, d_model=8, n_layers=2, n_heads=2)
    config = GPTConfig(**sizes, mlp=False, norm=False, final_norm=False, bias_qkv=True, bias_unembed=True)
    return to_hooked(random_weights(config), vocabulary)


def forward(model: Any, cache: dict[str, torch.Tensor], heads: tuple[int | None, ...], x: torch.Tensor) -> torch.Tensor:
    """A vector per place sent forward through one path, by the model's own modules' weights; the stream at the end."""
    for layer, head in enumerate(heads):
        if head is not None:
            block = model.blocks[layer]
            norm = norm_of(model, block.ln1)
            scale = cache[f"blocks.{layer}.ln1.hook_scale"] if norm.centred else 1.0
            values = norm.linear(x) / scale @ block.attn.W_V[head]
            x = cache[f"blocks.{layer}.attn.hook_pattern"][head] @ values @ block.attn.W_O[head]
    return x


@torch.no_grad()
def test_every_path_equals_the_same_path_gone_forward(random_model: Any) -> None:
    """One path after another, from the inputs to the logit, as the definition has it."""
    _, cache = run(random_model, encode(random_model, TEXT))
    place, target = 5, 7
    found = expanded(random_model, TEXT, target, place)
    norm, W_U = random_model.ln_final, random_model.W_U[:, target]
    scale = cache["ln_final.hook_scale"][place]
    for number, heads in enumerate(product([None, 0, 1], repeat=2)):
        name = " → ".join(f"L{layer}H{head}" for layer, head in enumerate(heads) if head is not None) or "direct"
        assert found.name(number) == name
        assert found.order[number] == sum(head is not None for head in heads)
        start = min([layer for layer, head in enumerate(heads) if head is not None], default=2)
        sources = {"embed": cache["hook_embed"], "pos_embed": cache["hook_pos_embed"]}
        ways: dict[str, tuple[int, torch.Tensor]] = {name: (0, x) for name, x in sources.items()}
        for layer, block in enumerate(random_model.blocks):
            ways[f"L{layer}.attn_bias"] = (layer + 1, block.attn.b_O.expand(len(TEXT), -1))
            ways[f"L{layer}.mlp"] = (layer + 1, cache[f"blocks.{layer}.hook_mlp_out"])
            if heads[layer] is not None and start == layer:
                written = block.attn.W_O[heads[layer]]
                ways[f"L{layer}.value_bias"] = (layer + 1, (block.attn.b_V[heads[layer]] @ written).expand(len(TEXT), -1))
                bias = block.ln1.b @ block.attn.W_V[heads[layer]] @ written
                ways[f"L{layer}.norm_bias"] = (layer + 1, bias.expand(len(TEXT), -1))
        for component, value in zip(found.components, found.contribution[number], strict=True):
            expected = torch.zeros((), dtype=torch.float64)
            if component in ways:
                since, x = ways[component]
                inside = component.endswith(("value_bias", "norm_bias"))
                rest = tuple(head if layer >= since else None for layer, head in enumerate(heads))
                if start >= since or inside:
                    end = forward(random_model, cache, rest, x)[place]
                    expected = (end - end.mean()) / scale * norm.w @ W_U
            elif number == 0 and component == "final_norm_bias":
                expected = norm.b @ W_U
            elif number == 0 and component == "unembed_bias":
                expected = random_model.b_U[target]
            torch.testing.assert_close(value, expected.reshape(()), rtol=0, atol=1e-12, msg=f"{name} from {component}")


@torch.no_grad()
def test_all_paths_give_all_logits_without_mlps(attention_only: Any) -> None:
    """Nothing but the patterns is frozen: every logit of every place is the sum of its nine paths."""
    text = "ab\ncaj"
    logits, _ = run(attention_only, encode(attention_only, text))
    sums = [[expanded(attention_only, text, target, place).contribution.sum() for target in range(12)] for place in range(6)]
    torch.testing.assert_close(torch.tensor(sums), logits, rtol=0, atol=1e-12)
    note = path_expansion(attention_only, text, "d").note
    assert note == "9 paths. Frozen as measured on this text: attention patterns."


@torch.no_grad()
def test_the_patterns_alone_make_it_linear(attention_only: Any) -> None:
    """With the pattern held, twice the embedding gives twice what comes from it along every path."""
    text = "abcaba"
    _, cache = run(attention_only, encode(attention_only, text))
    W_U, b_U = attention_only.W_U[:, 3], attention_only.b_U[3]
    once = expand(attention_only, cache, 5, W_U, b_U).contribution
    twice = expand(attention_only, cache | {"hook_embed": 2 * cache["hook_embed"]}, 5, W_U, b_U).contribution
    torch.testing.assert_close(twice[:, 0], 2 * once[:, 0], rtol=0, atol=1e-12)
    assert torch.equal(twice[:, 1:], once[:, 1:])


@pytest.mark.parametrize("versus", [None, "\n"])
@pytest.mark.parametrize("position", [None, 0, 4])
@pytest.mark.parametrize("shown", [1, 5, 1000])
def test_every_way_of_adding_up_gives_the_logit(random_model: Any, versus: Any, position: Any, shown: int) -> None:
    dataset = path_expansion(random_model, TEXT, "d", versus, position, shown)
    row = random_model(encode(random_model, TEXT)[None])[0, -1 if position is None else position].detach()
    expected = row[5] - (row[0] if versus else 0)  # 'd' is number 5, the newline 0
    for name in ("largest", "by_order", "contribution"):
        assert float(dataset[name].sum()) == pytest.approx(float(expected), abs=1e-10)
    assert dataset.identity_error <= 1e-10
    assert dataset.sizes["path"] == min(shown + 1, 9)
    whole = logit_attribution(random_model, TEXT, "d", versus, position)
    last = path_expansion(random_model, TEXT, "d", versus, position, 1000).contribution.sel(path="direct")
    for component in ("embed", "pos_embed", "L1.mlp", "L1.attn_bias", "final_norm_bias", "unembed_bias"):
        assert float(last.sel(component=component)) == pytest.approx(
            float(whole.contribution.sel(component=component)), abs=1e-10
        )


@pytest.mark.parametrize("head", [0, 1])
def test_paths_that_end_in_a_head_add_up_to_its_contribution(random_model: Any, head: int) -> None:
    dataset = path_expansion(random_model, TEXT, "d", shown=1000)
    ending = [name for name in dataset.path.values if name.endswith(f"L1H{head}")]
    whole = logit_attribution(random_model, TEXT, "d").contribution
    assert float(dataset.contribution.sel(path=ending).sum()) == pytest.approx(
        float(whole.sel(component=f"L1H{head}")), abs=1e-10
    )


def test_what_is_not_listed_is_named_and_counted(random_model: Any) -> None:
    everything = path_expansion(random_model, TEXT, "d", shown=1000)
    assert "other" not in " ".join([*everything.path.values, *everything.index.values])
    few = path_expansion(random_model, TEXT, "d", shown=4)
    assert few.path.values[-1] == "5 other paths"
    assert few.index.values[-1] == f"{everything.sizes['index'] - 4} others"
    np.testing.assert_allclose(few.largest[:4], everything.largest[:4], atol=1e-12)
    assert (np.diff(np.abs(everything.largest)) <= 0).all()
    assert float(few.largest[-1]) == pytest.approx(float(everything.largest[4:].sum()), abs=1e-12)


def test_the_induction_circuit_is_found(induction_model: Any) -> None:
    """The value comes from the embedding through the later head alone; the earlier one acts through the pattern only."""
    dataset = path_expansion(induction_model, "abcdab", "c")
    assert dataset.index.values[0] == "embed → L1H0"
    np.testing.assert_allclose(dataset.largest[0], 10, atol=1e-9)
    assert np.abs(dataset.largest[1:]).sum() <= 1e-9
    np.testing.assert_allclose(dataset.by_order, [0, 10, 0], atol=1e-9)
    assert np.abs(path_expansion(induction_model, "abcdab", "d").largest).max() <= 1e-9


def test_a_virtual_head_shows_as_a_path_of_two(induction_model: Any) -> None:
    with torch.no_grad():  # the later head moves what the earlier one has written
        W_V = induction_model.blocks[1].attn.W_V[0]
        W_V[15:20], W_V[:5] = W_V[:5].clone(), 0
    dataset = path_expansion(induction_model, "abcdab", "b")  # it attends to 'c', before which there is 'b'
    assert dataset.index.values[0] == "embed → L0H0 → L1H0"
    np.testing.assert_allclose(dataset.by_order, [0, 0, 10], atol=1e-9)


def test_without_blocks_there_is_one_path(random_weights: Any, vocabulary: Any) -> None:
    config = GPTConfig(d_vocab=12, n_ctx=10, d_model=8, n_layers=0, n_heads=2, norm=False, final_norm=False, mlp=False)
    dataset = path_expansion(to_hooked(random_weights(config), vocabulary), TEXT, "d")
    assert dataset.path.values.tolist() == ["direct"]
    assert dataset.by_order.shape == (1,)
    assert dataset.note == "One path, the direct one. Frozen as measured on this text: nothing."
    assert dataset.identity_error <= 1e-12


def test_what_is_frozen_is_said(random_model: Any) -> None:
    note = path_expansion(random_model, TEXT, "d").note
    assert note.endswith("attention patterns, the scales of the LayerNorms and the outputs of the MLPs.")


def test_in_float32_only_rounding_is_lost(random_model: Any) -> None:
    assert path_expansion(random_model.to(torch.float32), TEXT, "d").identity_error <= 1e-5


def test_too_many_paths_and_nothing_to_list_are_refused(random_model: Any) -> None:
    with pytest.raises(KnobError, match="shown: got 0; give 1 or more"):
        path_expansion(random_model, TEXT, "d", shown=0)
    random_model.cfg.n_layers = 13
    with pytest.raises(UnsupportedModel, match="this model has 1,594,323 paths; at most 1,000,000 are expanded"):
        number_of_paths(random_model)
