"""The direct path: against the model that is nothing else, against the corpus' counts, and where nothing was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analyses.direct_path import direct_path
from models.checkpoint import Checkpoint
from models.config import GPTConfig, Recipe
from models.hooked import encode, to_hooked
from models.vocabulary import Vocabulary


@pytest.fixture
def with_counts(random_weights: Any, vocabulary: Vocabulary) -> Any:
    """A model without blocks, with counts of a made-up corpus beside it: 'b' follows 'a' always, 'j' never occurs."""
    gpt = random_weights(GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=0, n_heads=2, bias_unembed=True))
    counts = torch.randint(0, 50, (12, 12), generator=torch.Generator().manual_seed(3))
    counts[vocabulary.ids["a"]] = 0
    counts[vocabulary.ids["a"], vocabulary.ids["b"]] = 400
    counts[vocabulary.ids["j"]] = 0
    model = to_hooked(gpt, vocabulary)
    model.checkpoint = Checkpoint(Path("made-up"), gpt, vocabulary, None, None, {"bigram": counts}, {})
    return model


def test_it_is_the_whole_model_where_there_is_nothing_else(with_counts: Any) -> None:
    """No blocks, positions put to zero: every logit at every place, norm and biases and all."""
    with torch.no_grad():
        with_counts.pos_embed.W_pos.zero_()
        text = "\n abcdefgj"
        own = with_counts(encode(with_counts, text)[None])[0]
    dataset = direct_path(with_counts, place="none")
    np.testing.assert_allclose(dataset.logit.sel(source_char=list(text)), own, rtol=0, atol=1e-12)
    np.testing.assert_allclose(dataset.logprob.sel(source_char=list(text)), own.log_softmax(-1), rtol=0, atol=1e-12)
    assert dataset.identity_error <= 1e-12
    assert dataset.logit.long_name == "logit of the direct path (LayerNorm weights, biases, own scale)"


def test_positions_are_one_more_bias(with_counts: Any) -> None:
    """It is as if their mean were in every row of W_E; and with all places alike it is the model as it stands."""
    before = direct_path(with_counts)
    with torch.no_grad():
        with_counts.embed.W_E.add_(with_counts.pos_embed.W_pos.mean(0))
        np.testing.assert_allclose(direct_path(with_counts, place="none").logit, before.logit, rtol=0, atol=1e-12)
        with_counts.pos_embed.W_pos[:] = with_counts.pos_embed.W_pos[3].clone()
        own = with_counts(encode(with_counts, "abcdef")[None])[0]
    dataset = direct_path(with_counts)
    np.testing.assert_allclose(dataset.logit.sel(source_char=list("abcdef")), own, rtol=0, atol=1e-12)
    assert dataset.logit.long_name == "logit of the direct path (LayerNorm weights, biases, own scale, mean position)"


def test_the_training_mix_has_the_random_strings_of_the_recipe(with_counts: Any) -> None:
    counts = with_counts.checkpoint.statistics["bigram"].double()
    assert direct_path(with_counts, beside="training mix").equals(direct_path(with_counts))  # without a recipe
    vars(with_counts.checkpoint)["recipe"] = Recipe(repeated=0.25)
    dataset = direct_path(with_counts, beside="training mix")
    mixed = 0.75 * counts + 0.25 * counts.sum() / 144
    np.testing.assert_allclose(dataset.unigram, mixed.sum(1) / counts.sum(), rtol=1e-12)
    expected = ((mixed + 1 / 12) / (mixed.sum(1, keepdim=True) + 1)).log()
    np.testing.assert_allclose(dataset.bigram_logprob, expected, rtol=0, atol=1e-12)


def test_plain_it_is_the_product_of_two_weights(random_model: Any) -> None:
    dataset = direct_path(random_model, "nothing", place="none", scale="one")
    np.testing.assert_allclose(dataset.logit, (random_model.W_E @ random_model.W_U).detach(), rtol=0, atol=1e-12)


def test_divergences_are_those_of_a_loop(with_counts: Any) -> None:
    dataset = direct_path(with_counts)
    counts = with_counts.checkpoint.statistics["bigram"].numpy().astype(float)
    N, V = counts.sum(), len(counts)
    unigram = (counts.sum(0) + 1 / V) / (N + 1)
    means, entropy = np.zeros(3), 0.0
    for s in range(V):
        p = np.array([(counts[s, o] + 1 / V) / (counts[s].sum() + 1) for o in range(V)])
        np.testing.assert_allclose(dataset.bigram_logprob[s], np.log(p), rtol=0, atol=1e-12)
        rows = (np.exp(dataset.logprob[s].values), unigram, np.full(V, 1 / V))
        found = [sum(p[o] * np.log(p[o] / row[o]) for o in range(V)) for row in rows]
        np.testing.assert_allclose([dataset[name][s] for name in ("kl", "kl_unigram", "kl_uniform")], found, rtol=0, atol=1e-12)
        means += counts[s].sum() / N * np.array(found)
        entropy -= counts[s].sum() / N * sum(p * np.log(p))
    np.testing.assert_allclose(
        [dataset[f"mean_{name}"] for name in ("kl", "kl_unigram", "kl_uniform")], means, rtol=0, atol=1e-12
    )
    assert dataset.bigram_entropy.item() == pytest.approx(entropy, abs=1e-12)
    pairs = np.corrcoef(dataset.logprob.values.ravel(), dataset.bigram_logprob.values.ravel())
    assert dataset.correlation.item() == pytest.approx(pairs[0, 1], abs=1e-12)
    assert dataset.unigram.sel(source_char=["a", "j"]).values == pytest.approx([400 / N, 0])
    assert dataset.kl_uniform.sel(source_char="j").item() == pytest.approx(0, abs=1e-12)  # never seen: anything may follow


def test_a_model_that_is_the_corpus_has_no_divergence(with_counts: Any) -> None:
    """Logits set to the logarithms of the counts, one coordinate per character; and it predicts what follows 'a'."""
    counts = with_counts.checkpoint.statistics["bigram"].double()
    with torch.no_grad():
        with_counts.embed.W_E.copy_(torch.eye(12, 16))
        with_counts.unembed.W_U.zero_()
        with_counts.unembed.W_U[:12] = ((counts + 1 / 12) / (counts.sum(1, keepdim=True) + 1)).log()
        with_counts.unembed.b_U.zero_()
    dataset = direct_path(with_counts, "nothing", place="none", scale="one")
    np.testing.assert_allclose(dataset.kl, 0, atol=1e-12)
    assert dataset.mean_kl.item() == pytest.approx(0, abs=1e-12)
    assert dataset.correlation.item() == pytest.approx(1, abs=1e-12)
    assert dataset.logprob.sel(source_char="a").idxmax("output_char") == "b"
    assert "0.000 for the direct path" in dataset.note.replace(" nats", "")


def test_where_nothing_is_direct_it_says_nothing(previous_character_model: Any) -> None:
    """The hand-made model predicts by its head alone: all logits are zero; and without counts there is nothing beside them."""
    dataset = direct_path(previous_character_model)
    assert np.abs(dataset.logit).max() == 0
    np.testing.assert_allclose(dataset.logprob, -np.log(5), atol=1e-12)
    assert set(dataset.data_vars) == {"logit", "logprob", "chance"}
    assert "no corpus counts beside it" in dataset.note
    assert [view.title for view in direct_path.fitting_views(dataset)] == ["Logits of the direct path", "Its prediction"]


def test_a_constant_prediction_has_no_correlation(with_counts: Any) -> None:
    with torch.no_grad():
        with_counts.unembed.W_U.zero_()
        with_counts.unembed.b_U.zero_()
    dataset = direct_path(with_counts)
    assert "correlation" not in dataset
    np.testing.assert_allclose(dataset.kl, dataset.kl_uniform, atol=1e-12)


def test_counts_of_another_vocabulary_are_not_used(with_counts: Any) -> None:
    vars(with_counts.checkpoint)["vocabulary"] = Vocabulary(tuple("abcdefghijkl"))
    assert "bigram_logprob" not in direct_path(with_counts)
