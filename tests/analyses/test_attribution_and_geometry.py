"""Component cosines, the frozen lens, attribution to neurons and sources, LayerNorm geometry: against loops and known answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from analyses.component_cosines import component_cosines
from analyses.logit_attribution import logit_attribution
from analyses.logit_lens import logit_lens
from analyses.neuron_attribution import SHOWN, neuron_attribution
from analyses.norm_geometry import norm_geometry
from analyses.residual_stream import residual_stream
from analyses.source_attribution import source_attribution
from analyses.stream import UnsupportedModel, decomposition, run
from models.config import GPTConfig
from models.hooked import encode, to_hooked

TEXT = "abc\nj fd"
TARGET, VERSUS = 5, 0  # 'd' and newline among the twelve characters


def cached(model: Any, text: str = TEXT) -> Any:
    """TransformerLens' own cache of a text, without a batch axis."""
    with torch.no_grad():
        return model.run_with_cache(encode(model, text)[None], remove_batch_dim=True)[1]


def through(model: Any, written: torch.Tensor, stream: torch.Tensor, versus: bool = False) -> float:
    """What a vector adds to the logit, spelled out."""
    scale = ((stream - stream.mean()).pow(2).mean() + model.ln_final.eps).sqrt()
    direction = model.W_U[:, TARGET] - (model.W_U[:, VERSUS] if versus else 0)
    return (((written - written.mean()) / scale * model.ln_final.w) @ direction).item()


# --- the stream so far -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["sublayer", "head"])
def test_the_stream_so_far_is_the_models_own(random_model: Any, by: str) -> None:
    """Where a block begins and ends, TransformerLens has recorded it."""
    dataset, cache = residual_stream(random_model, TEXT, by), cached(random_model)
    for component, site in (("pos_embed", "blocks.0.hook_resid_pre"), ("L0.mlp", "blocks.0.hook_resid_post"),
                            ("L1.attn" if by == "sublayer" else "L1.attn_bias", "blocks.1.hook_resid_mid")):  # fmt: skip
        so_far = dataset.sel(component=component)
        np.testing.assert_allclose(so_far.cumulative_norm, cache[site].norm(dim=-1), atol=1e-12)
        last = cache["blocks.1.hook_resid_post"]
        cosine = (cache[site] * last).sum(-1) / cache[site].norm(dim=-1) / last.norm(dim=-1)
        np.testing.assert_allclose(so_far.cumulative_cosine, cosine, atol=1e-12)
    np.testing.assert_allclose(dataset.cumulative_cosine[-1], 1, atol=1e-12)
    np.testing.assert_allclose(dataset.cumulative_norm[-1], dataset.stream_norm, atol=1e-12)


def test_cosines_of_pairs(random_model: Any) -> None:
    dataset = component_cosines(random_model, TEXT, 2)
    split = decomposition(random_model, run(random_model, encode(random_model, TEXT))[1])
    one, other = (split.parts[split.names.index(name)].detach().numpy() for name in ("L0H1", "L1.mlp"))
    cosines = [a @ b / np.sqrt(a @ a) / np.sqrt(b @ b) for a, b in zip(one, other, strict=True)]
    pair = dataset.sel(component="L0H1", other_component="L1.mlp")
    assert pair.cosine.item() == pytest.approx(cosines[2], abs=1e-12)
    assert pair.mean_cosine.item() == pytest.approx(np.mean(cosines), abs=1e-12)
    assert dataset.length.sel(component="L0H1").item() == pytest.approx(np.sqrt(one[2] @ one[2]), abs=1e-12)
    for values in (dataset.cosine.values, dataset.mean_cosine.values):
        np.testing.assert_allclose(values, values.T, atol=1e-12)
        np.testing.assert_allclose(np.diag(values), 1, atol=1e-12)
    assert dataset.identity_error <= 1e-12


def test_components_that_write_in_blocks_of_their_own_are_at_right_angles(previous_character_model: Any) -> None:
    """Token, position and head write to coordinates of their own; the head that writes nothing has no direction."""
    dataset = component_cosines(previous_character_model, "abcd")
    assert dataset.component.values.tolist() == ["embed", "pos_embed", "L0H0"]
    assert dataset.note == "Zero somewhere in this text, so without a direction and left out: L0H1, L0.attn_bias."
    np.testing.assert_allclose(dataset.cosine, np.eye(3), atol=1e-9)
    np.testing.assert_allclose(dataset.mean_cosine, np.eye(3), atol=1e-9)
    assert dataset.identity_error <= 1e-12


def test_a_component_that_is_zero_at_one_place_has_no_direction_there(random_model: Any) -> None:
    with torch.no_grad():
        random_model.embed.W_E[2] = 0  # 'a'
    dataset = component_cosines(random_model, TEXT)
    assert dataset.note == "Zero somewhere in this text, so without a direction and left out: embed."
    assert dataset.identity_error <= 1e-12  # which counts it where it writes
    assert "note" not in component_cosines(random_model, TEXT[1:]).attrs


def test_a_model_that_writes_nothing_has_no_cosines(previous_character_model: Any) -> None:
    with torch.no_grad():
        for parameter in previous_character_model.parameters():
            parameter.zero_()
    with pytest.raises(UnsupportedModel, match="every component of this model is zero"):
        component_cosines(previous_character_model, "abcd")


# --- the lens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post"])
def test_the_frozen_lens_uses_the_last_scale(random_model: Any, site: str) -> None:
    dataset, cache = logit_lens(random_model, TEXT, site, "final"), cached(random_model)
    x = cache[f"blocks.0.hook_{site}"]
    scale = cache["ln_final.hook_scale"]
    logits = ((x - x.mean(-1, keepdim=True)) / scale * random_model.ln_final.w + random_model.ln_final.b) @ random_model.W_U
    logprobs = (logits + random_model.b_U).log_softmax(-1).detach()
    np.testing.assert_allclose(dataset.entropy[0], -(logprobs.exp() * logprobs).sum(-1), atol=1e-12)
    assert dataset.identity_error <= 1e-12
    assert dataset.folded == "the final scale, frozen"
    own = logit_lens(random_model, TEXT, site)
    assert own.folded == "each layer's own scale"
    assert np.abs(own.entropy[0] - dataset.entropy[0]).max() > 1e-3


def test_both_lenses_end_in_the_model(random_model: Any) -> None:
    logits = random_model(encode(random_model, TEXT)[None])[0].detach()
    for scale in ("own", "final"):
        dataset = logit_lens(random_model, TEXT, scale=scale)
        np.testing.assert_allclose(dataset.probability[-1], logits.softmax(-1).max(-1).values, atol=1e-12)
        np.testing.assert_allclose(dataset.kl_to_output[-1], 0, atol=1e-12)


def test_without_a_final_norm_there_is_one_lens(previous_character_model: Any) -> None:
    own, frozen = (logit_lens(previous_character_model, "abcd", scale=scale) for scale in ("own", "final"))
    np.testing.assert_array_equal(own.kl_to_output, frozen.kl_to_output)
    assert "folded" not in own.attrs
    assert "no final LayerNorm" in own.note
    assert frozen.identity_error <= 1e-12


# --- attribution -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versus", [None, "\n"])
def test_coarser_attributions_add_up_the_finer_ones(random_model: Any, versus: str | None) -> None:
    by = {
        each: logit_attribution(random_model, TEXT, "d", versus, 3, by=each).contribution
        for each in ("layer", "sublayer", "head")
    }
    assert by["layer"].component.values.tolist() == ["embed", "pos_embed", "L0", "L1", "final_norm_bias", "unembed_bias"]
    for layer in ("L0", "L1"):
        whole = by["layer"].sel(component=layer).item()
        for finer in ("sublayer", "head"):
            own = [name for name in by[finer].component.values if name.startswith(layer)]
            assert by[finer].sel(component=own).sum().item() == pytest.approx(whole, abs=1e-12)
    assert logit_attribution(random_model, TEXT, "d", versus, 3, by="layer").identity_error <= 1e-12


@pytest.mark.parametrize("versus", [None, "\n"])
def test_every_neuron_by_a_loop(random_model: Any, versus: str | None) -> None:
    dataset, cache = neuron_attribution(random_model, TEXT, 1, "d", versus, 3), cached(random_model)
    activation, stream, W_out = cache["blocks.1.mlp.hook_post"][3], cache["blocks.1.hook_resid_post"][3], random_model.W_out[1]
    for neuron in (0, 17, 63):
        written = activation[neuron] * W_out[neuron]
        cell = dataset.sel(neuron=neuron)
        assert cell.contribution.item() == pytest.approx(through(random_model, written, stream, versus is not None), abs=1e-12)
        assert cell.activation.item() == pytest.approx(activation[neuron].item(), abs=1e-12)
        assert cell.length.item() == pytest.approx(abs(activation[neuron].item()) * W_out[neuron].norm().item(), abs=1e-12)
    assert dataset.identity_error <= 1e-12
    whole = logit_attribution(random_model, TEXT, "d", versus, 3, by="sublayer").contribution.sel(component="L1.mlp").item()
    assert dataset.mlp_contribution.item() == pytest.approx(whole, abs=1e-12)
    assert (dataset.contribution.sum() + dataset.bias_contribution).item() == pytest.approx(whole, abs=1e-12)
    assert abs(dataset.bias_contribution.item()) > 1e-3


def test_neurons_must_add_up_to_the_output_not_to_the_logit_alone(random_model: Any) -> None:
    """What is added to all coordinates alike no LayerNorm lets through, so no logit shows it."""
    with random_model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", lambda activation, hook: activation + 1)]):
        assert neuron_attribution(random_model, TEXT, 1, "d").identity_error == pytest.approx(1, abs=1e-9)


def test_the_largest_neurons_come_first_and_are_named(random_model: Any) -> None:
    dataset = neuron_attribution(random_model, TEXT, 0, "d")
    order = np.argsort(-np.abs(dataset.contribution.values), kind="stable")[:SHOWN]
    assert dataset["index"].values.tolist() == [f"L0N{neuron}" for neuron in order]
    np.testing.assert_array_equal(dataset.top_contribution, dataset.contribution[order])


def test_one_neuron_that_was_put_there(random_model: Any) -> None:
    """All rows of W_out but one are zero, so that neuron and the bias are all there is."""
    with torch.no_grad():
        random_model.blocks[1].mlp.W_out[:5] = 0
        random_model.blocks[1].mlp.W_out[6:] = 0
    dataset = neuron_attribution(random_model, TEXT, 1, "d")
    assert dataset["index"][0] == "L1N5"
    assert np.abs(dataset.contribution.drop_sel(neuron=5)).max() == 0
    rest = dataset.mlp_contribution - dataset.bias_contribution
    assert dataset.contribution.sel(neuron=5).item() == pytest.approx(rest.item(), abs=1e-12)


def test_attention_alone_has_no_neurons(previous_character_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="attention only, so there are no neurons; give a model whose blocks have an MLP"):
        neuron_attribution(previous_character_model, "abc", target="a")


@pytest.mark.parametrize("versus", [None, "\n"])
def test_every_source_by_a_loop(random_model: Any, versus: str | None) -> None:
    place = 5
    dataset, cache = source_attribution(random_model, TEXT, "d", versus, place, 1, 0), cached(random_model)
    stream = cache["blocks.1.hook_resid_post"][place]
    assert dataset.key_position_char.values.tolist() == list(TEXT[: place + 1])
    for layer, head, key in ((0, 1, 0), (1, 0, 3), (1, 1, 5)):
        block = random_model.blocks[layer]
        normed = cache[f"blocks.{layer}.ln1.hook_normalized"][key] * block.ln1.w + block.ln1.b
        value = normed @ block.attn.W_V[head] + block.attn.b_V[head]
        share = cache[f"blocks.{layer}.attn.hook_pattern"][head, place, key]
        cell = dataset.sel(component=f"L{layer}H{head}", key_position=key)
        added = through(random_model, share * value @ block.attn.W_O[head], stream, versus is not None)
        assert cell.contribution.item() == pytest.approx(added, abs=1e-12)
        assert cell.attention.item() == pytest.approx(share.item(), abs=1e-12)
    heads = logit_attribution(random_model, TEXT, "d", versus, place).contribution.sel(component=dataset.component)
    np.testing.assert_allclose(dataset.contribution.sum("key_position"), heads, atol=1e-12)
    np.testing.assert_allclose(dataset.total, heads, atol=1e-12)
    np.testing.assert_array_equal(dataset.head_contribution, dataset.contribution.sel(component="L1H0"))
    assert dataset.identity_error <= 1e-12


def test_the_source_is_the_previous_character(previous_character_model: Any) -> None:
    dataset = source_attribution(previous_character_model, "abcd", "c")
    np.testing.assert_allclose(dataset.contribution.sel(component="L0H0"), [0, 0, 10, 0], atol=1e-9)
    assert np.abs(dataset.contribution.sel(component="L0H1")).max() == 0


def test_the_source_of_induction_is_what_followed(induction_model: Any) -> None:
    dataset = source_attribution(induction_model, "abcdab", "c", layer=1)
    np.testing.assert_allclose(dataset.head_contribution, [0, 0, 10, 0, 0, 0], atol=1e-9)


# --- LayerNorm -------------------------------------------------------------------------------------------------------


def test_normalised_streams_lie_on_their_sphere(random_model: Any) -> None:
    with torch.no_grad():
        random_model.embed.W_E[2:5] *= 0.02  # streams so short that ε is seen
        random_model.pos_embed.W_pos[:3] *= 0.02
    dataset, cache = norm_geometry(random_model, TEXT), cached(random_model)
    assert dataset.reading.values.tolist() == ["L0.ln1", "L0.ln2", "L1.ln1", "L1.ln2", "final"]
    sites = ("0.hook_resid_pre", "0.hook_resid_mid", "1.hook_resid_pre", "1.hook_resid_mid", "1.hook_resid_post")
    for row, site in enumerate(sites):
        stream = cache[f"blocks.{site}"].numpy()
        σ = stream.std(-1)
        np.testing.assert_allclose(dataset.radius[row], σ / np.sqrt(σ**2 + 1e-5), atol=1e-12)
        np.testing.assert_allclose(dataset.expected_radius[row], dataset.radius[row], atol=1e-12)
        np.testing.assert_allclose(dataset.scale[row], np.sqrt(σ**2 + 1e-5), atol=1e-12)
        np.testing.assert_allclose(dataset.length[row], np.linalg.norm(stream, axis=-1), atol=1e-12)
        np.testing.assert_allclose(dataset.stream_mean[row], stream.mean(-1), atol=1e-12)
    assert np.abs(dataset["mean"]).max() <= 1e-12
    assert dataset.radius.min() < 0.99  # ε was seen
    assert dataset.identity_error <= 1e-12


def test_the_radius_is_of_the_forward_pass(random_model: Any) -> None:
    """A LayerNorm that computes something else than LayerNorm is found out."""
    with random_model.hooks(fwd_hooks=[("blocks.1.ln2.hook_normalized", lambda activation, hook: activation * 1.1)]):
        dataset = norm_geometry(random_model, TEXT)
    assert dataset.identity_error == pytest.approx(0.1 * dataset.expected_radius.sel(reading="L1.ln2").max().item(), abs=1e-9)


def test_a_norm_that_is_not_there_is_left_out(random_weights: Any, vocabulary: Any) -> None:
    config = GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=1, n_heads=2, final_norm=False)
    dataset = norm_geometry(to_hooked(random_weights(config), vocabulary), TEXT)
    assert dataset.reading.values.tolist() == ["L0.ln1", "L0.ln2"]
    assert dataset.note == "No LayerNorm in this model, so left out: final."


def test_a_model_without_norms_is_refused(previous_character_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="no LayerNorm anywhere"):
        norm_geometry(previous_character_model, "abc")


def test_in_float32_identities_hold_to_its_rounding(random_model: Any) -> None:
    model = random_model.to(torch.float32)
    for analysis in (residual_stream, component_cosines, norm_geometry):
        assert analysis(model, TEXT).identity_error < 1e-5
    assert logit_lens(model, TEXT, scale="final").identity_error < 1e-5
    for analysis in (source_attribution, neuron_attribution):
        assert 0 < analysis(model, TEXT, target="d").identity_error < 1e-5
