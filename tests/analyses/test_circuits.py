"""QK, OV and their ranks: against the weights, against TransformerLens, against known circuits."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch

from analyses.circuit_rank import circuit_rank
from analyses.circuits import Fold, Scale
from analyses.direct_path import direct_path
from analyses.ov_circuit import ov_circuit
from analyses.qk_circuit import qk_circuit
from analyses.skip_trigrams import skip_trigrams
from analyses.spec import KnobError
from analyses.stream import UnsupportedModel
from models.hooked import encode
from models.vocabulary import VocabularyError


def test_qk_scores_are_the_models_own_before_the_scale(random_model: Any) -> None:
    """With everything folded in and the norm's scale divided out, the model's scores for single characters come out."""
    tokens = encode(random_model, "abc")
    with torch.no_grad():
        random_model.pos_embed.W_pos.zero_()  # so that the stream of block 0 is the embedding alone
        _, cache = random_model.run_with_cache(tokens[None])
        scale = cache["blocks.0.ln1.hook_scale"][0, :, 0]
        random_model.blocks[0].ln1.b.zero_()  # a bias is not divided by the scale, so leave it out of this comparison
        random_model.blocks[0].attn.b_Q.zero_()
        random_model.blocks[0].attn.b_K.zero_()
        _, cache = random_model.run_with_cache(tokens[None])
    score = qk_circuit(random_model, 0, 1, fold="norm weights").score[0, 1].sel(query_char="c", key_char=list("abc"))
    expected = cache["blocks.0.attn.hook_attn_scores"][0, 1, 2] * scale[2] * scale
    np.testing.assert_allclose(score, expected, atol=1e-12)


def test_plain_qk_and_ov_equal_transformer_lens_factored_matrices(random_model: Any) -> None:
    layer, head = 1, 0
    qk = (random_model.W_E @ random_model.QK[layer, head] @ random_model.W_E.T).AB / random_model.blocks[layer].attn.attn_scale
    ov = (random_model.W_E @ random_model.OV[layer, head] @ random_model.W_U).AB
    np.testing.assert_allclose(qk_circuit(random_model, fold="nothing").score[layer, head], qk.detach(), atol=1e-12)
    np.testing.assert_allclose(ov_circuit(random_model, fold="nothing").logit[layer, head], ov.detach(), atol=1e-12)


def test_ov_logits_are_what_full_attention_adds(random_model: Any) -> None:
    """Attend fully to one place: the head's direct effect there is the OV row, up to the two norms' scales."""
    tokens = encode(random_model, "a")
    with torch.no_grad():
        random_model.pos_embed.W_pos.zero_()
        _, cache = random_model.run_with_cache(tokens[None])
        block, norm = random_model.blocks[0], random_model.ln_final
        block.ln1.b.zero_()
        v = block.ln1(cache["blocks.0.hook_resid_pre"])[0, 0] @ block.attn.W_V[1]
        written = v @ block.attn.W_O[1]
        logits = (written - written.mean()) * norm.w @ random_model.W_U * cache["blocks.0.ln1.hook_scale"][0, 0]
    row = ov_circuit(random_model, 0, 1, fold="norm weights").logit[0, 1].sel(source_char="a")
    np.testing.assert_allclose(row, logits, atol=1e-12)


def test_biases_are_folded_in_where_asked(random_model: Any) -> None:
    block = random_model.blocks[1]
    plain, biased = (qk_circuit(random_model, fold=fold).score[1, 1] for fold in ("norm weights", "norm weights and biases"))
    x = (random_model.W_E - random_model.W_E.mean(-1, keepdim=True)) * block.ln1.w + block.ln1.b
    q, k = x @ block.attn.W_Q[1] + block.attn.b_Q[1], x @ block.attn.W_K[1] + block.attn.b_K[1]
    np.testing.assert_allclose(biased, (q @ k.T / 8**0.5).detach(), atol=1e-12)
    assert np.abs(biased - plain).max() > 1e-3
    v = x @ block.attn.W_V[1] + block.attn.b_V[1]
    written = v @ block.attn.W_O[1]
    expected = (written - written.mean(-1, keepdim=True)) * random_model.ln_final.w @ random_model.W_U
    logit = ov_circuit(random_model, fold="norm weights and biases").logit[1, 1]
    np.testing.assert_allclose(logit, expected.detach(), atol=1e-12)


def test_the_previous_character_circuit_is_found(previous_character_model: Any) -> None:
    places = qk_circuit(previous_character_model, space="position").score
    assert places.dims == ("layer", "head", "query_position", "key_position")
    np.testing.assert_allclose(places[0], [60 * np.eye(8, k=-1), np.zeros((8, 8))], atol=1e-9)
    assert np.abs(qk_circuit(previous_character_model).score).max() == 0
    dataset = ov_circuit(previous_character_model)
    np.testing.assert_allclose(dataset.logit[0], [10 * np.eye(5), np.zeros((5, 5))], atol=1e-9)
    assert dataset.attrs["folded"] == "no LayerNorm"


def test_rank_is_counted_not_assumed(previous_character_model: Any) -> None:
    """Seven places have one before them, five characters are copied, the other head does nothing; d_head is 10."""
    dataset = circuit_rank(previous_character_model)
    assert dataset.qk_rank.values.tolist() == [[7, 0]]
    assert dataset.ov_rank.values.tolist() == [[5, 0]]
    assert dataset.qk_bound == dataset.ov_bound == 10


def test_rank_of_a_random_head_is_d_head(random_model: Any) -> None:
    dataset = circuit_rank(random_model)
    assert (dataset.qk_rank == 8).all()
    assert (dataset.ov_rank == 8).all()
    products = random_model.W_Q @ random_model.W_K.mT
    assert (torch.linalg.matrix_rank(products.double()).numpy() == dataset.qk_rank.values).all()
    values = torch.linalg.svdvals(products.double()).detach().numpy()
    np.testing.assert_allclose(dataset.qk_singular_value, values, atol=1e-12)
    assert (dataset.qk_singular_value[:, :, 8:] < dataset.qk_tolerance).all()


def test_singular_values_equal_transformer_lens(random_model: Any) -> None:
    theirs = random_model.OV.S.detach().numpy()
    np.testing.assert_allclose(circuit_rank(random_model).ov_singular_value[:, :, :8], theirs, atol=1e-10)


def test_rank_in_float32_is_the_same(random_model: Any) -> None:
    """Weights held in float32 are multiplied in float64, so rounding does not look like rank."""
    dataset = circuit_rank(random_model.to(torch.float32))
    assert (dataset.qk_rank == 8).all()
    assert (dataset.ov_rank == 8).all()


def test_an_extra_row_of_biases_raises_the_bound_of_ov_only(random_model: Any) -> None:
    dataset = circuit_rank(random_model, biases=True)
    assert dataset.sizes["index"] == 16  # QK is 17 × 17, OV 17 × 16; d_model values of both are given
    assert (dataset.qk_rank == 8).all()
    assert (dataset.ov_rank == 9).all()
    assert (int(dataset.qk_bound), int(dataset.ov_bound)) == (8, 9)


@pytest.mark.parametrize("analysis", [qk_circuit, ov_circuit, direct_path, skip_trigrams])
def test_tokens_that_are_not_characters_are_refused_before_anything_is_computed(random_model: Any, analysis: Any) -> None:
    random_model.tokenizer = None
    random_model.embed = None  # touching its weight would be another error
    with pytest.raises(VocabularyError, match="this model has no tokenizer"):
        analysis(random_model)


def test_rotary_models_have_no_single_qk_matrix(random_model: Any) -> None:
    random_model.cfg.positional_embedding_type = "rotary"
    for analysis in (qk_circuit, circuit_rank):
        with pytest.raises(UnsupportedModel, match="rotary positions"):
            analysis(random_model)


@pytest.mark.parametrize("analysis", [qk_circuit, ov_circuit, direct_path])
@pytest.mark.parametrize("fold", get_args(Fold))
@pytest.mark.parametrize("scale", get_args(Scale))
def test_the_two_orders_of_multiplication_agree(random_model: Any, analysis: Any, fold: str, scale: str) -> None:
    dataset = analysis(random_model, fold=fold, scale=scale, embedding="W_E with first MLP", text="abc")
    if analysis is direct_path and fold == "nothing":
        assert "identity" not in dataset.attrs  # e W_U is a single product
        return
    assert 0 < dataset.identity_error <= 1e-12
    single = analysis(random_model.to(torch.float32), fold=fold, scale=scale, embedding="W_E with first MLP", text="abc")
    assert single.identity_error <= 1e-5


# --- what stands between embedding and head --------------------------------------------------------------------------


def test_scores_at_the_scale_of_each_embedding_are_the_models_own(random_model: Any) -> None:
    """Without positions block 0 reads bare embeddings: with everything folded in nothing is missing, biases included."""
    tokens = encode(random_model, "abcdefghij")
    with torch.no_grad():
        random_model.pos_embed.W_pos.zero_()
        _, cache = random_model.run_with_cache(tokens[None])
    dataset = qk_circuit(random_model, fold="norm weights and biases", scale="of each embedding")
    own, past = cache["blocks.0.attn.hook_attn_scores"][0].numpy(), np.tril(np.ones((10, 10), dtype=bool))
    found = dataset.score[0].sel(query_char=list("abcdefghij"), key_char=list("abcdefghij")).values
    np.testing.assert_allclose(found[:, past], own[:, past], rtol=0, atol=1e-12)
    assert dataset.attrs["folded"] == "LayerNorm weights, biases, own scale"


def test_frozen_scales_are_those_of_the_text(random_model: Any) -> None:
    """Divided by the mean over places of what each LayerNorm really divided by, as TransformerLens' hooks tell it."""
    _, cache = random_model.run_with_cache(encode(random_model, "abcabd")[None])
    frozen = dict(scale="frozen on a text", text="abcabd")
    qk, ov, direct = qk_circuit(random_model), ov_circuit(random_model), direct_path(random_model, "norm weights", scale="one")
    final = cache["ln_final.hook_scale"].mean().item()
    for layer in range(2):
        scale = cache[f"blocks.{layer}.ln1.hook_scale"][0, :, 0].mean().item()  # every head has the same
        found = qk_circuit(random_model, **frozen).score[layer]
        np.testing.assert_allclose(found, qk.score[layer] / scale**2, rtol=0, atol=1e-12)
        found = ov_circuit(random_model, **frozen).logit[layer]
        np.testing.assert_allclose(found, ov.logit[layer] / scale / final, rtol=0, atol=1e-12)
    found = direct_path(random_model, "norm weights", **frozen).logit
    np.testing.assert_allclose(found, direct.logit / final, rtol=0, atol=1e-12)


def test_the_first_mlp_is_what_the_model_adds_to_a_bare_embedding(random_model: Any) -> None:
    """Put into W_E by hand, from the weights; block 0 reads before its MLP, so its heads are as they were."""
    given = dict(fold="norm weights and biases", scale="of each embedding")
    found = [
        analysis(random_model, embedding="W_E with first MLP", **given) for analysis in (qk_circuit, ov_circuit, direct_path)
    ]
    plain = [analysis(random_model, **given) for analysis in (qk_circuit, ov_circuit)]
    with torch.no_grad():
        e, mlp, norm = random_model.embed.W_E, random_model.blocks[0].mlp, random_model.blocks[0].ln2
        x = (e - e.mean(-1, keepdim=True)) / (e.var(-1, keepdim=True, correction=0) + norm.eps).sqrt() * norm.w + norm.b
        hidden = torch.nn.functional.gelu(x @ mlp.W_in + mlp.b_in)
        e += hidden @ mlp.W_out + mlp.b_out
        random_model.blocks[0].mlp = None  # not used for this
    expected = [analysis(random_model, **given) for analysis in (qk_circuit, ov_circuit, direct_path)]
    for name, mine, old, new in zip(("score", "logit"), found, plain, expected, strict=False):
        np.testing.assert_allclose(mine[name][1], new[name][1], rtol=0, atol=1e-12)
        np.testing.assert_array_equal(mine[name][0], old[name][0])
        assert np.abs(mine[name][1] - old[name][1]).max() > 1e-3
        assert mine.attrs["folded"] == "LayerNorm weights, biases, first MLP, own scale"
    np.testing.assert_allclose(found[2].logit, expected[2].logit, rtol=0, atol=1e-12)


@pytest.mark.parametrize("analysis", [qk_circuit, ov_circuit, direct_path, skip_trigrams])
def test_without_an_mlp_there_is_none_to_put_in(previous_character_model: Any, analysis: Any) -> None:
    with pytest.raises(UnsupportedModel, match="this model has no MLP, so there is no first one"):
        analysis(previous_character_model, embedding="W_E with first MLP", text="abc")


def test_a_text_is_read_only_where_a_scale_is_frozen_on_it(random_model: Any) -> None:
    """The default text has characters that this model lacks; the circuits do not need it."""
    assert qk_circuit(random_model).equals(qk_circuit(random_model, text="ABC"))
    with pytest.raises(KnobError, match="text: character 'A' at place 0"):
        qk_circuit(random_model, scale="frozen on a text", text="ABC")


def test_all_positions_are_there_whatever_the_text(random_model: Any) -> None:
    dataset = qk_circuit(random_model, space="position", scale="frozen on a text", text="ab")
    assert dataset.score.shape == (2, 2, 10, 10)
    assert [view.title for view in qk_circuit.fitting_views(dataset)] == ["All heads", "The chosen head"]
