"""Residual stream, logit lens, logit attribution, attention: identities, TransformerLens, and known answers."""

from __future__ import annotations

from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from analyses.attention_patterns import attention_patterns
from analyses.logit_attribution import logit_attribution
from analyses.logit_lens import logit_lens
from analyses.residual_stream import residual_stream
from analyses.stream import UnsupportedModel, decomposition, final_norm, norm_of, run, unembed
from models.config import PRESETS, GPTConfig
from models.hooked import encode, to_hooked
from models.vocabulary import Vocabulary

TEXT = "abc\nj fd"


@pytest.mark.parametrize("by", ["sublayer", "head"])
def test_components_sum_to_the_stream(random_model: Any, by: str) -> None:
    _, cache = run(random_model, encode(random_model, TEXT))
    split = decomposition(random_model, cache, by)
    assert split.identity_error <= 1e-12
    assert len(split.names) == len(set(split.names)) == len(split.parts)


def test_components_equal_transformer_lens(random_model: Any) -> None:
    tokens = encode(random_model, TEXT)
    _, theirs = random_model.run_with_cache(tokens[None])
    stack, names = theirs.decompose_resid(return_labels=True)
    split = decomposition(random_model, run(random_model, tokens)[1], "sublayer")
    renamed = {"0_attn_out": "L0.attn", "0_mlp_out": "L0.mlp", "1_attn_out": "L1.attn", "1_mlp_out": "L1.mlp"}
    for name, part in zip(names, stack[:, 0], strict=True):
        torch.testing.assert_close(split.parts[split.names.index(renamed.get(name, name))], part, rtol=0, atol=1e-12)
    heads = theirs.stack_head_results(layer=-1)[:, 0]
    for number, part in enumerate(heads):
        ours = decomposition(random_model, run(random_model, tokens)[1], "head")
        torch.testing.assert_close(ours.parts[ours.names.index(f"L{number // 2}H{number % 2}")], part, rtol=0, atol=1e-12)


def test_a_heads_part_holds_its_value_bias_once(random_model: Any) -> None:
    tokens = encode(random_model, TEXT)
    before = decomposition(random_model, run(random_model, tokens)[1], "head")
    with torch.no_grad():
        random_model.blocks[1].attn.b_V[0] += 1
    after = decomposition(random_model, run(random_model, tokens)[1], "head")
    row = before.names.index("L1H0")
    expected = random_model.blocks[1].attn.W_O[0].sum(0).expand(len(tokens), -1)  # rows of attention sum to one
    torch.testing.assert_close(after.parts[row] - before.parts[row], expected, rtol=0, atol=1e-12)
    bias = before.names.index("L1.attn_bias")
    assert torch.equal(after.parts[bias], before.parts[bias])


def test_norms_and_cosines(random_model: Any) -> None:
    dataset = residual_stream(random_model, TEXT)
    split = decomposition(random_model, run(random_model, encode(random_model, TEXT))[1])
    part, stream = split.parts[3, 2].detach().numpy(), split.stream[2].detach().numpy()
    cell = dataset.isel(component=3, position=2)
    assert cell.norm == pytest.approx(np.sqrt((part**2).sum()), abs=1e-12)
    assert cell.cosine == pytest.approx(part @ stream / np.linalg.norm(part) / np.linalg.norm(stream), abs=1e-12)
    assert dataset.position_char.values.tolist() == list(TEXT)


def test_norm_taken_apart_equals_the_module(random_model: Any) -> None:
    x = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(final_norm(random_model)(x), random_model.ln_final(x), rtol=0, atol=1e-12)
    module = random_model.blocks[1].ln2
    torch.testing.assert_close(norm_of(random_model, module)(x), module(x), rtol=0, atol=1e-12)


def test_the_last_lens_is_the_model(random_model: Any) -> None:
    dataset = logit_lens(random_model, TEXT)
    logits = random_model(encode(random_model, TEXT)[None])[0].detach()
    probability, best = logits.softmax(-1).max(-1)
    np.testing.assert_allclose(dataset.probability[-1], probability, atol=1e-12)
    characters = [random_model.tokenizer.decode([number]) for number in best.tolist()]
    assert dataset.top_char[-1].values.tolist() == characters
    np.testing.assert_allclose(dataset.kl_to_output[-1], 0, atol=1e-12)
    assert dataset.identity_error <= 1e-12


def test_an_earlier_lens_uses_its_own_scale(random_model: Any) -> None:
    dataset = logit_lens(random_model, TEXT, "resid_mid")
    _, cache = random_model.run_with_cache(encode(random_model, TEXT)[None])
    logprobs = random_model.unembed(random_model.ln_final(cache["resid_mid", 0]))[0].log_softmax(-1).detach()
    np.testing.assert_allclose(dataset.entropy[0], -(logprobs.exp() * logprobs).sum(-1), atol=1e-12)
    output = cache.model(encode(random_model, TEXT)[None])[0].log_softmax(-1).detach()
    np.testing.assert_allclose(dataset.kl_to_output[0], (output.exp() * (output - logprobs)).sum(-1), atol=1e-12)


@pytest.mark.parametrize("versus", [None, "\n"])
@pytest.mark.parametrize("position", [None, 0, 3])
def test_contributions_sum_to_the_logit(random_model: Any, versus: str | None, position: int | None) -> None:
    dataset = logit_attribution(random_model, TEXT, "d", versus, position)
    row = random_model(encode(random_model, TEXT)[None])[0, -1 if position is None else position].detach()
    ids = {character: number for number, character in enumerate(sorted("\n abcdefghij"))}
    wanted = row[ids["d"]] - (row[ids[versus]] if versus else 0)
    assert dataset.contribution.sum().item() == pytest.approx(wanted.item(), abs=1e-10)
    assert dataset.identity_error <= 1e-10


def test_contributions_equal_transformer_lens(random_model: Any) -> None:
    """Where TransformerLens has the same notion: its logit_attrs, components through the final norm's scale and weight."""
    tokens = encode(random_model, TEXT)
    _, cache = random_model.run_with_cache(tokens[None])
    stack, names = cache.decompose_resid(return_labels=True)
    scaled = cache.apply_ln_to_stack(stack, layer=-1, pos_slice=-1)[:, 0, -1] * random_model.ln_final.w
    theirs = dict(zip(names, (scaled @ random_model.W_U[:, 5]).tolist(), strict=True))
    ours = logit_attribution(random_model, TEXT, "d").contribution  # 'd' is number 5
    assert ours.sel(component="embed").item() == pytest.approx(theirs["embed"], abs=1e-10)
    assert ours.sel(component="L1.mlp").item() == pytest.approx(theirs["1_mlp_out"], abs=1e-10)
    heads = ours.sel(component=["L0H0", "L0H1", "L0.attn_bias"]).sum().item()
    assert heads == pytest.approx(theirs["0_attn_out"], abs=1e-10)


def test_attribution_names_the_head_that_was_put_there(previous_character_model: Any) -> None:
    contribution = logit_attribution(previous_character_model, "abcd", "c").contribution
    assert contribution.sel(component="L0H0").item() == pytest.approx(10, abs=1e-9)
    assert np.abs(contribution.drop_sel(component="L0H0")).max() <= 1e-12


def test_patterns_are_the_models(random_model: Any) -> None:
    dataset = attention_patterns(random_model, TEXT)
    _, cache = random_model.run_with_cache(encode(random_model, TEXT)[None])
    np.testing.assert_allclose(dataset.pattern[1], cache["pattern", 1][0].detach(), atol=1e-12)
    assert (np.triu(dataset.pattern.values, 1) == 0).all()


def test_the_previous_character_head_is_seen(previous_character_model: Any) -> None:
    pattern = attention_patterns(previous_character_model, "abcde").pattern
    np.testing.assert_allclose(np.diagonal(pattern[0, 0], -1), 1, atol=1e-9)
    np.testing.assert_allclose(pattern[0, 1, 3, :4], 0.25)  # the empty head looks everywhere alike


def test_the_induction_head_looks_behind_the_last_occurrence(induction_model: Any) -> None:
    pattern = attention_patterns(induction_model, "abcdab").pattern
    assert pattern.sel(layer=1, head=0, query_position=5, key_position=2).item() == pytest.approx(1, abs=1e-9)
    assert logit_lens(induction_model, "abcdab").top_char[-1, -1] == "c"


@pytest.mark.parametrize("preset", ["walkthrough-4.2", "walkthrough-4.6", "walkthrough-4.8", "walkthrough-4.9", "baby-tied"])
def test_models_of_the_course_decompose_exactly(preset: str, random_weights: Any) -> None:
    """Without residual connections, without a final norm, with folded projections, tied: the same sum."""
    model = to_hooked(random_weights(PRESETS[preset].model), Vocabulary(tuple(chr(33 + n) for n in range(65))))
    logits, cache = run(model, encode(model, "2KING!"))
    assert decomposition(model, cache).identity_error <= 1e-12
    assert logit_attribution(model, "2KING!", "A").identity_error <= 1e-10
    torch.testing.assert_close(unembed(model, decomposition(model, cache).stream), logits, rtol=0, atol=1e-10)


def test_a_model_without_mlps_has_no_resid_mid(previous_character_model: Any) -> None:
    with pytest.raises(UnsupportedModel, match="no resid_mid; give resid_pre or resid_post"):
        logit_lens(previous_character_model, "abc", "resid_mid")


@pytest.mark.parametrize(("field", "value"), [("positional_embedding_type", "rotary"), ("parallel_attn_mlp", True)])
def test_other_architectures_are_refused_by_name(random_model: Any, field: str, value: Any) -> None:
    setattr(random_model.cfg, field, value)
    with pytest.raises(UnsupportedModel, match="this analysis is exact only with"):
        residual_stream(random_model, TEXT)


def test_folded_layer_norm_is_read_as_such(random_weights: Any, vocabulary: Vocabulary) -> None:
    """TransformerLens' own processing (LNPre, folded weights) gives a model that decomposes just as well."""
    config = GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=2, n_heads=2, bias_qkv=True, bias_unembed=True)
    model = to_hooked(random_weights(config), vocabulary)
    plain = model(encode(model, TEXT)[None]).detach()
    process = getattr(model, "process_weights_", None) or model.process_weights  # a bridge's name for it
    process(fold_ln=True, center_writing_weights=False, center_unembed=False)
    folded = model(encode(model, TEXT)[None]).detach()
    torch.testing.assert_close(plain, folded, rtol=0, atol=1e-6)  # TransformerLens folds with some float32 in between
    assert logit_attribution(model, TEXT, "d").identity_error <= 1e-9


def test_shapes_in_annotations_are_checked_while_tests_run(random_model: Any) -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="tokens"):
        run(random_model, encode(random_model, TEXT)[None])
