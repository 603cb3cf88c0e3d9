"""Activation patching and ablation: equal to TransformerLens, exact where nothing changes, right on planted circuits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformer_lens.patching as patching

from analyses.ablation import ablation
from analyses.activation_patching import activation_patching
from analyses.spec import KnobError
from analyses.stream import UnsupportedModel
from models import hooked, statistics
from models.hooked import encode
from models.statistics import StatisticsError

CLEAN, CORRUPTED = "abc\nj fd", "abd\nj eg"
THEIRS = {
    "resid_pre": patching.get_act_patch_resid_pre,
    "attn_out": patching.get_act_patch_attn_out,
    "mlp_out": patching.get_act_patch_mlp_out,
    "head_z": patching.get_act_patch_attn_head_out_all_pos,
}


@pytest.mark.filterwarnings("ignore")  # TransformerLens' own, about pandas and progress bars
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize("site", THEIRS)
def test_equals_transformer_lens(random_model: Any, site: Any, direction: Any, dtype: torch.dtype, bound: float) -> None:
    model = random_model.to(dtype)
    dataset = activation_patching(model, CLEAN, CORRUPTED, "a", "b", site, direction)
    clean, corrupted = encode(model, CLEAN)[None], encode(model, CORRUPTED)[None]
    source, base = (clean, corrupted) if direction == "denoising" else (corrupted, clean)
    _, cache = model.run_with_cache(source)
    torch.set_default_dtype(dtype)  # TransformerLens collects its results in the default dtype
    try:
        expected = THEIRS[site](model, base, cache, lambda logits: logits[0, -1, 2] - logits[0, -1, 3])
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_allclose(dataset.metric, expected.detach(), rtol=0, atol=bound)


def test_recovered_is_zero_and_one_at_the_ends(random_model: Any) -> None:
    dataset = activation_patching(random_model, CLEAN, CORRUPTED, "a", "b")
    share = (dataset.metric - dataset.corrupted_metric) / (dataset.clean_metric - dataset.corrupted_metric)
    np.testing.assert_allclose(dataset.recovered, share, atol=1e-12)
    np.testing.assert_allclose(dataset.effect, dataset.metric - dataset.corrupted_metric, atol=1e-12)
    untouched = dataset.sel(layer=0, position=0)  # the same character in both texts
    assert untouched.changed == 0
    assert abs(untouched.recovered) <= 1e-12
    noised = activation_patching(random_model, CLEAN, CORRUPTED, "a", "b", direction="noising")
    np.testing.assert_allclose(noised.recovered.sel(layer=0, position=0), 1, rtol=0, atol=1e-12)


def test_a_text_patched_into_itself_changes_nothing(random_model: Any) -> None:
    dataset = activation_patching(random_model, CLEAN, CLEAN, "a", "b")
    assert np.abs(dataset.effect).max() <= 1e-12
    assert dataset.changed.sum() == 0
    assert "recovered" not in dataset
    assert "no share to recover" in dataset.attrs["note"]


def test_texts_of_unequal_length_are_refused(random_model: Any) -> None:
    with pytest.raises(KnobError, match="corrupted text has 3 characters, the clean one 2; .* make them equally long"):
        activation_patching(random_model, "ab", "abc")


def test_the_planted_circuit_carries_the_difference(induction_model: Any) -> None:
    """'abcdab' continues with c, 'aecdab' says nothing about b: the two planted heads carry it, the empty ones nothing."""
    heads = activation_patching(induction_model, "abcdab", "aecdab", "c", "d", "head_z")
    assert heads.recovered.sel(layer=1, head=0).item() == pytest.approx(1, abs=1e-9)
    assert heads.recovered.sel(layer=0, head=0).item() == pytest.approx(1, abs=1e-9)
    assert np.abs(heads.recovered.sel(head=1)).max() <= 1e-12
    places = activation_patching(induction_model, "abcdab", "aecdab", "c", "d", "resid_pre").recovered
    assert places.sel(layer=0, position=1).item() == pytest.approx(1, abs=1e-9)  # where the character differs
    assert places.sel(layer=1, position=2).item() == pytest.approx(1, abs=1e-9)  # moved one on by the first head
    others = places.copy()
    others.loc[{"layer": 0, "position": 1}] = others.loc[{"layer": 1, "position": 2}] = 0
    assert np.abs(others).max() <= 1e-9


def test_a_model_without_mlps_has_no_mlp_to_patch_or_ablate(induction_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="no MLP"):
        activation_patching(induction_model, "abc", "abd", "a", "b", "mlp_out")
    with pytest.raises(UnsupportedModel, match="no MLP"):
        ablation(induction_model, "abc", "mlp", "zero")


# --- ablation --------------------------------------------------------------------------------------------------------


def _loss_with(model: Any, text: str, changes: dict[str, Any]) -> float:
    """The literal version: one forward pass with whole activations replaced."""

    def hook(change: Any) -> Any:
        return lambda activation, hook: change(activation)

    tokens = encode(model, text)[None]
    logits = model.run_with_hooks(tokens, fwd_hooks=[(site, hook(change)) for site, change in changes.items()])
    return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).item()


def _zero_head(head: int) -> Any:
    def change(z: torch.Tensor) -> torch.Tensor:
        z[:, :, head] = 0
        return z

    return change


def test_zero_ablation_equals_one_forward_pass_each(random_model: Any) -> None:
    base = _loss_with(random_model, CLEAN, {})
    heads = ablation(random_model, CLEAN, "head", "zero")
    assert heads.loss == pytest.approx(base, abs=1e-12)
    for layer in range(2):
        for head in range(2):
            expected = _loss_with(random_model, CLEAN, {f"blocks.{layer}.attn.hook_z": _zero_head(head)}) - base
            assert heads.loss_increase[layer, head].item() == pytest.approx(expected, abs=1e-12)
    sites = {"attention": ["attn_out"], "mlp": ["mlp_out"], "block": ["attn_out", "mlp_out"]}
    for unit, names in sites.items():
        increase = ablation(random_model, CLEAN, unit, "zero").loss_increase
        for layer in range(2):
            changes = {f"blocks.{layer}.hook_{name}": torch.zeros_like for name in names}
            assert increase[layer].item() == pytest.approx(_loss_with(random_model, CLEAN, changes) - base, abs=1e-12)


def test_mean_ablation_puts_in_the_mean_over_the_training_split(small_model: Any, stored: Any) -> None:
    """The mean is measured again here, by hooks on the corpus' windows."""
    text = "KING RICHARD"
    mean = statistics.mean_activation(small_model, "blocks.1.hook_mlp_out")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(65, (3000,), generator=draw)[:2700]
    windows = ids[: (len(ids) - 1) // 64 * 64].reshape(-1, 64)
    _, cache = small_model.run_with_cache(windows)
    torch.testing.assert_close(mean, cache["blocks.1.hook_mlp_out"].mean((0, 1)), rtol=0, atol=1e-5)
    expected = _loss_with(small_model, text, {"blocks.1.hook_mlp_out": lambda x: mean.expand_as(x)})
    expected -= _loss_with(small_model, text, {})
    assert ablation(small_model, text, "mlp", "mean").loss_increase[1].item() == pytest.approx(expected, abs=1e-5)


def test_mean_ablation_of_a_head_uses_that_heads_mean(small_model: Any) -> None:
    text = "KING RICHARD"
    mean = statistics.mean_activation(small_model, "blocks.0.attn.hook_z")

    def put(head: int) -> Any:
        def change(z: torch.Tensor) -> torch.Tensor:
            z[:, :, head] = mean[head]
            return z

        return change

    increase = ablation(small_model, text).loss_increase
    base = _loss_with(small_model, text, {})
    for head in range(2):
        expected = _loss_with(small_model, text, {"blocks.0.attn.hook_z": put(head)}) - base
        assert increase[0, head].item() == pytest.approx(expected, abs=1e-6)
    assert abs(increase[0, 0] - increase[0, 1]) > 1e-5


def test_statistics_count_characters_and_pairs(small_model: Any) -> None:
    found = small_model.checkpoint.statistics
    assert found["unigram"].sum() == 2700
    assert found["bigram"].sum() == 2699
    assert (found["bigram"].sum(1) <= found["unigram"]).all()


def test_mean_ablation_without_statistics_says_what_to_do(random_model: Any) -> None:
    with pytest.raises(StatisticsError, match="no mean activations beside it; measure them with `workbench card"):
        ablation(random_model, CLEAN)


def test_statistics_of_other_weights_are_refused(small_model: Any) -> None:
    with torch.no_grad():
        small_model.blocks[0].attn.W_V.add_(0.1)
    with pytest.raises(StatisticsError, match="belong to weights"):
        ablation(small_model, "KING", "head", "mean")


def test_statistics_serve_every_precision(small_model: Any, stored: Any) -> None:
    single = ablation(small_model, "KING RICHARD").loss_increase
    double = ablation(hooked.load(stored).to(torch.float64), "KING RICHARD").loss_increase
    np.testing.assert_allclose(single, double, atol=1e-4)


def test_ablation_finds_the_planted_head(previous_character_model: Any) -> None:
    """Repeated letters are predicted by 'the previous character again'; without the head the guess is uniform."""
    dataset = ablation(previous_character_model, "aaaaaa", "head", "zero")
    assert dataset.loss_increase.sel(layer=0, head=0).item() > 1
    assert dataset.loss_increase.sel(layer=0, head=1).item() == pytest.approx(0, abs=1e-12)


def test_one_character_has_nothing_to_predict(random_model: Any) -> None:
    with pytest.raises(KnobError, match="nothing in it is predicted; give at least 2"):
        ablation(random_model, "a", "head", "zero")
