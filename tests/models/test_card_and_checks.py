"""The model card and the self-check: what they measure, and that they fail when they should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from models import card, checkpoint, checks, statistics
from models.config import GPTConfig
from models.corpus import Corpus
from models.hooked import to_hooked
from models.losses import validation_loss
from models.vocabulary import Vocabulary


@pytest.fixture
def found(tmp_path: Path, random_weights: Any, vocabulary: Vocabulary) -> checkpoint.Checkpoint:
    config = GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=2, n_heads=2, bias_qkv=True)
    path = checkpoint.save(tmp_path / "small", random_weights(config).float(), vocabulary)
    return checkpoint.load(path)


def test_every_check_passes_on_a_sound_checkpoint(found: checkpoint.Checkpoint, small_corpus: Corpus) -> None:
    results = checks.verify(found, small_corpus)
    assert [check.passed for check in results] == [True] * 7 + [None]
    assert "nothing recorded" in results[-1].expected
    assert checks.verify(found)[-1].measured.startswith("not measured: no corpus")


def test_the_loss_is_held_against_what_was_recorded_on_that_text(
    found: checkpoint.Checkpoint, small_corpus: Corpus, vocabulary: Vocabulary
) -> None:
    """Also where there is no log: a moment of a film and an imported file carry one loss in their account."""
    loss = validation_loss(found.gpt, small_corpus, found.vocabulary)

    def verdict(**account: Any) -> checks.Check:
        checkpoint.save(found.path, found.gpt, vocabulary, training=account)
        return checks.verify(checkpoint.load(found.path), small_corpus)[-1]

    assert verdict(validation_loss=loss, corpus_sha256=small_corpus.sha256).passed is True
    assert verdict(validation_loss=loss + 0.01, measured_on_sha256=small_corpus.sha256).passed is False
    other = verdict(validation_loss=loss + 0.01, corpus_sha256="0" * 64)
    assert (other.passed, other.expected) == (None, "what is recorded was measured on another text")


def test_a_leaking_mask_is_found(found: checkpoint.Checkpoint) -> None:
    def leaking(idx: torch.Tensor) -> torch.Tensor:
        logits = found.gpt(idx)[0]
        return logits + 0.01 * logits.flip(1)

    past, present = checks.leak(leaking, checks.random_windows(found.gpt, 1)[0], 12)
    assert past > 1e-6
    assert present > 1e-6
    past, present = checks.leak(lambda idx: torch.zeros(*idx.shape, 12), checks.random_windows(found.gpt, 1)[0], 12)
    assert past == present == 0  # blind to everything: hides the future, and is no proof of causality


def test_the_causality_check_catches_attention_without_a_mask(found: checkpoint.Checkpoint, monkeypatch: Any) -> None:
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, dropout_p=0.0, is_causal=False: original(q, k, v, dropout_p=dropout_p, is_causal=False),
    )
    failed = {check.name for check in checks.verify(found) if check.passed is False}
    assert "causality, GPT" in failed
    kind = type(to_hooked(found.gpt)).__name__
    assert f"GPT = {kind}, float64" in failed
    assert f"causality, {kind}" not in failed


def test_the_shape_table_is_measured(found: checkpoint.Checkpoint) -> None:
    stages = {stage.name: stage for stage in checks.shapes(found, batch=3, length=7)}
    assert stages["tokens"].shape == (3, 7)
    assert stages["blocks.1.attn.hook_pattern"].shape == (3, 2, 7, 7)
    assert stages["blocks.0.attn.hook_q"].axes == "batch position head d_head"
    assert stages["logits"].shape == (3, 7, 12)
    for stage in stages.values():
        assert len(stage.axes.split()) == len(stage.shape)


def test_head_scores_find_a_previous_character_head(found: checkpoint.Checkpoint, small_corpus: Corpus) -> None:
    """Positions that ask for the one before them: score 1 for that head, by construction."""
    attention: Any = found.gpt.blocks[0].attention
    with torch.no_grad():
        found.gpt.position_embedding.weight.zero_()
        found.gpt.token_embedding.weight[:, 10:] = 0
        found.gpt.token_embedding.weight[:, :10] *= 0.01
        found.gpt.position_embedding.weight[:, :10] = 10 * torch.eye(10)
        attention.norm.weight.fill_(1)
        attention.norm.bias.zero_()
        for module in (attention.inner.query, attention.inner.key):
            module.weight[:8].zero_()
            module.bias[:8].zero_()
    # Eight dimensions carry nine places to look at as points on a circle, far enough apart for a sharp softmax.
    angle = torch.arange(10) * 2 * torch.pi / 10
    circle = torch.stack([angle.cos(), angle.sin()])
    with torch.no_grad():
        attention.inner.key.weight[:2, :10] = 30 * circle
        attention.inner.query.weight[:2, :10] = 30 * circle.roll(1, dims=1)
    scores = card.head_scores(found, small_corpus).by_offset
    assert scores.shape == (3, 2, 2)
    assert scores[1, 0, 0].item() == pytest.approx(1, abs=1e-3)
    assert scores[0, 0, 0].item() == pytest.approx(0.1, abs=1e-3)  # the first of ten places has none before it
    assert scores[1, 1, 1].item() < 0.9


def test_the_card_states_what_was_measured(found: checkpoint.Checkpoint, small_corpus: Corpus) -> None:
    path = card.write(found.path, small_corpus, beside=found.path)
    text = path.read_text()
    again = checkpoint.load(found.path)
    scores = card.head_scores(again, small_corpus)
    assert f"**{scores.best_previous:.3f}**" in text
    assert text.count("| L1H1 |") == 2  # its own heads and the other recipe's
    assert "nats per character" in text
    assert again.statistics.keys() >= {"unigram", "bigram", "mean.blocks.1.attn.hook_z", "mean.hook_pos_embed"}


def test_statistics_survive_another_save_but_not_other_weights(found: checkpoint.Checkpoint, small_corpus: Corpus) -> None:
    from models import hooked

    statistics.add(found.path, small_corpus)
    with torch.no_grad():
        found.gpt.unembedding.weight += 1
    checkpoint.save(found.path, found.gpt, found.vocabulary)
    with pytest.raises(statistics.StatisticsError, match="belong to weights"):
        statistics.mean_activation(hooked.load(found.path), "hook_embed")


def test_mean_of_an_embedding_is_the_count_weighted_row(found: checkpoint.Checkpoint, small_corpus: Corpus) -> None:
    """Independent arithmetic: the mean of hook_embed is the unigram frequencies times W_E, over the whole windows."""
    measured = statistics.measure(found, small_corpus)
    ids = torch.from_numpy(small_corpus.encoded("train", found.vocabulary))
    used = ids[: (len(ids) - 1) // 10 * 10]
    frequency = torch.bincount(used, minlength=12).double() / len(used)
    expected = frequency @ found.gpt.token_embedding.weight.double()
    torch.testing.assert_close(measured["mean.hook_embed"].double(), expected, rtol=0, atol=1e-6)
    mean_position = found.gpt.position_embedding.weight.mean(0)
    torch.testing.assert_close(measured["mean.hook_pos_embed"], mean_position, rtol=0, atol=1e-6)
