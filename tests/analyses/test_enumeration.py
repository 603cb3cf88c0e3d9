"""Every short context, and what n-grams explain: against counting and loops, on models that are n-gram tables by design."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analyses import enumeration as of_contexts
from analyses import ngram_explained as of_components
from analyses.enumeration import enumeration
from analyses.ngram_explained import ngram_explained
from analyses.ngrams import every_context, ngram_table
from analyses.passage import PassageError
from analyses.spec import KnobError
from analyses.stream import UnsupportedModel, decomposition, run
from models import corpus
from models.config import GPTConfig
from models.gpt import GPT
from models.hooked import encode, to_hooked
from models.vocabulary import Vocabulary, VocabularyError

WORDS, LETTERS = "\n abcdefghij", "abcde"


def at_hand(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> str:
    path = folder / "given.txt"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv(corpus.VARIABLE, str(path))
    return text


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch, passage_at_hand: Path, corpus_text: str) -> str:
    """The made-up words that the random model reads, as the text at hand."""
    return at_hand(monkeypatch, passage_at_hand.parent, corpus_text[:3000])


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch, passage_at_hand: Path) -> str:
    """Letters a to e, each drawn for itself, which the models made by hand read."""
    return at_hand(monkeypatch, passage_at_hand.parent, "".join(random.Random(0).choices(LETTERS, (5, 4, 3, 2, 1), k=20_000)))


def followed(text: str, length: int) -> dict[str, Counter]:
    """What follows each context in the training split, counted one by one."""
    train, found = text[: int(0.9 * len(text))], defaultdict(Counter)
    for place in range(len(train) - length):
        found[train[place : place + length]][train[place + length]] += 1
    return found


# --- every context ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_table_is_the_model_context_by_context(random_model: Any, length: int) -> None:
    table, contexts = ngram_table(random_model, length).detach(), every_context(length, 12)
    assert table.shape == (12**length, 12)
    assert len({tuple(row) for row in contexts.tolist()}) == 12**length
    for row in random.Random(0).sample(range(12**length), 12):
        logits = random_model(contexts[row][None])[0, -1].detach()
        torch.testing.assert_close(table[row], logits.log_softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_context_that_occurs_is_compared(random_model: Any, words: str, length: int) -> None:
    dataset, expected = enumeration(random_model, length=length), followed(words, length)
    assert sorted(dataset.text.values) == sorted(expected)
    ids = {character: number for number, character in enumerate(WORDS)}
    for row in range(0, len(expected), 7):
        cell = dataset.isel(index=row)
        text, counter = str(cell.text.item()), expected[str(cell.text.item())]
        logprobs = random_model(encode(random_model, text)[None])[0, -1].log_softmax(-1).tolist()
        count = sum(counter.values())
        shares = {character: number / count for character, number in counter.items()}
        kl = sum(share * (math.log(share) - logprobs[ids[character]]) for character, share in shares.items())
        assert cell["count"] == count
        assert cell.log_count == pytest.approx(math.log10(count))
        assert cell.kl == pytest.approx(kl, abs=1e-10)
        assert cell.weight == pytest.approx(count * kl, abs=1e-9)
        assert cell.corpus_entropy == pytest.approx(-sum(share * math.log(share) for share in shares.values()), abs=1e-12)
        assert cell.entropy == pytest.approx(-sum(math.exp(value) * value for value in logprobs), abs=1e-12)
        assert counter[str(cell.corpus_top.item())] == max(counter.values())
        assert cell.top == WORDS[int(np.argmax(logprobs))]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_losses_are_means_over_the_training_split(random_model: Any, words: str, length: int) -> None:
    dataset, expected = enumeration(random_model, length=length), followed(words, length)
    ids = {character: number for number, character in enumerate(WORDS)}
    total = loss = own = 0.0
    contexts = list(expected)
    logprobs = random_model(torch.stack([encode(random_model, context) for context in contexts]))[:, -1].log_softmax(-1)
    for context, row in zip(contexts, logprobs.tolist(), strict=True):
        count = sum(expected[context].values())
        total += count
        loss -= sum(number * row[ids[character]] for character, number in expected[context].items())
        own -= sum(number * math.log(number / count) for number in expected[context].values())
    assert dataset.loss == pytest.approx(loss / total, abs=1e-12)
    assert dataset.corpus_loss == pytest.approx(own / total, abs=1e-12)
    assert dataset.excess == pytest.approx((loss - own) / total, abs=1e-12)
    assert dataset.identity_error <= 1e-12


@pytest.mark.parametrize(("sort", "name"), [("count × KL", "weight"), ("count", "count"), ("KL", "kl")])
def test_rows_are_in_the_order_that_is_asked_for(random_model: Any, words: str, sort: Any, name: str) -> None:
    assert (np.diff(enumeration(random_model, sort=sort)[name]) <= 0).all()


def test_the_whole_table_is_there(random_model: Any, words: str) -> None:
    expected = followed(words, 1)
    dataset = enumeration(random_model, length=1)
    for source in "a\n":
        count = sum(expected[source].values())
        for output in "b ":
            cell = dataset.sel(source_char=source, output_char=output)
            assert cell.corpus_share == pytest.approx(expected[source][output] / count)
            logprob = random_model(encode(random_model, source)[None])[0, -1].log_softmax(-1)[WORDS.index(output)].item()
            assert cell.probability == pytest.approx(math.exp(logprob), abs=1e-12)
    pairs = enumeration(random_model, length=2)
    assert pairs.sizes["context"] == 144
    assert pairs.following.sum() == sum(sum(counter.values()) for counter in followed(words, 2).values())
    assert pairs.following.sel(context="ab", output_char=" ") == followed(words, 2)["ab"][" "]
    expected_row = random_model(encode(random_model, "ab")[None])[0, -1].log_softmax(-1).detach()
    np.testing.assert_allclose(pairs.logprob.sel(context="ab"), expected_row, rtol=0, atol=1e-12)
    assert "logprob" not in enumeration(random_model, length=3)


def test_a_model_that_is_the_bigram_table_is_found_out(letters: str, random_model: Any) -> None:
    """No blocks, logits = log counts: nothing is lost after one character, and after two no more than chance."""
    expected = followed(letters, 1)
    gpt = GPT(GPTConfig(d_vocab=5, n_ctx=8, d_model=6, n_layers=0, n_heads=1, mlp=False, norm=False, final_norm=False)).double()
    with torch.no_grad():
        gpt.position_embedding.weight.zero_()
        gpt.token_embedding.weight.copy_(torch.eye(5, 6))
        counts = torch.tensor([[expected[source][output] for output in LETTERS] for source in LETTERS])
        gpt.unembedding.weight.zero_()
        gpt.unembedding.weight[:, :5] = counts.double().log().T
    model = to_hooked(gpt.eval(), Vocabulary(tuple(LETTERS)))
    dataset = enumeration(model, length=1)
    assert np.abs(dataset.kl).max() <= 1e-12
    assert abs(dataset.excess) <= 1e-12
    np.testing.assert_allclose(dataset.probability, dataset.corpus_share, atol=1e-12)
    pairs = enumeration(model, length=2)
    assert 0 < pairs.excess < 3 * 25 * 4 / 2 / 18_000  # (V − 1)/2 per context, in all, is what chance makes


def test_a_character_that_never_occurs_has_no_share(
    random_model: Any, passage_at_hand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_hand(monkeypatch, passage_at_hand.parent, "abab" * 20)
    dataset = enumeration(random_model, length=1)
    assert dataset.text.values.tolist() == ["a", "b"] or dataset.text.values.tolist() == ["b", "a"]
    assert dataset.corpus_share.sel(source_char="c").sum() == 0
    assert dataset.corpus_share.sel(source_char="a", output_char="b") == 1


def test_without_a_text_the_models_side_is_shown(
    random_model: Any, passage_at_hand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(corpus.VARIABLE, str(passage_at_hand.parent / "nothing.txt"))
    monkeypatch.setattr(of_contexts, "MOST_ROWS", 100)
    for length in (1, 2, 3):
        dataset = enumeration(random_model, length=length)
        assert dataset.note.startswith("The model's side only: cannot read the text")
        assert (np.diff(dataset.entropy) >= 0).all()
        assert dataset.sizes["index"] == min(100, 12**length)
        assert ("Listed are the 100 surest" in dataset.note) == (length > 1)
        assert "kl" not in dataset
        assert dataset.identity_error <= 1e-12
        assert [view.title for view in enumeration.fitting_views(dataset)][-1] == "Every context, the surest first"
    logprobs = random_model(encode(random_model, str(dataset.text.values[0]))[None])[0, -1].log_softmax(-1)
    assert dataset.top.values[0] == WORDS[int(logprobs.argmax())]
    assert dataset.entropy[0] == pytest.approx(-(logprobs.exp() * logprobs).sum().item(), abs=1e-12)


def test_the_large_table_is_made_once(random_model: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = enumeration(random_model, length=3)
    monkeypatch.setattr(of_contexts, "ngram_table", lambda *_: pytest.fail("computed again"))
    assert enumeration(random_model, length=3).identical(first)


def test_contexts_that_do_not_fit_are_refused(random_model: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_contexts, "MOST_NUMBERS", 12**3)
    with pytest.raises(KnobError, match="12 characters make 1,728 contexts of 3, too many to hold; give a smaller length"):
        enumeration(random_model, length=3)
    random_model.cfg.n_ctx = 1
    with pytest.raises(KnobError, match="the model reads at most 1 characters"):
        enumeration(random_model, length=2)


def test_a_text_of_other_characters_is_refused(random_model: Any) -> None:
    with pytest.raises(VocabularyError, match="not among the model's 12 characters"):
        enumeration(random_model)  # the passage is at hand


# --- what n-grams explain --------------------------------------------------------------------------------------------


def test_shares_equal_loops(random_model: Any, words: str) -> None:
    """Every group's variance by itself, in the logits, from the parts that make the stream."""
    dataset = ngram_explained(random_model, "validation split")
    text, ln = words[int(0.9 * len(words)) :], random_model.ln_final
    effects, contexts = [], []
    for start in range(0, (len(text) - 1) // 10 * 10, 10):
        window = text[start : start + 10]
        _, cache = run(random_model, encode(random_model, window))
        split = decomposition(random_model, cache)
        parts = (split.parts - split.parts.mean(-1, keepdim=True)) / cache["ln_final.hook_scale"] * ln.w
        logits = (parts @ random_model.W_U).detach().numpy()
        effects.append(logits - logits.mean(-1, keepdims=True))
        contexts += [window[place - 2 : place + 1] if place > 1 else "" for place in range(10)]
    occurs = Counter(contexts)
    used = [place for place, context in enumerate(contexts) if context and occurs[context] > 1]
    assert dataset.coverage == pytest.approx(len(used) / len(contexts))
    values = np.concatenate(effects, axis=1)[:, used]  # component place char
    for name in ("embed", "L0H1", "L1.mlp"):
        y = values[split.names.index(name)]
        total = y.var(0, ddof=1).sum()
        assert dataset.variance.sel(component=name) == pytest.approx(total, rel=1e-9)
        for order in (1, 2, 3):
            groups = defaultdict(list)
            for row, place in enumerate(used):
                groups[contexts[place][-order:]].append(y[row])
            within = sum(len(group) * np.var(group, axis=0, ddof=1).sum() for group in groups.values()) / len(used)
            share = dataset.explained.sel(component=name, order=order).item()
            assert share == pytest.approx(1 - within / total, abs=1e-9)
    assert dataset.identity_error <= 1e-10


def test_batches_make_no_difference(random_model: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = torch.stack([encode(random_model, words[start : start + 10]) for start in range(0, 600, 10)])
    whole = of_components._explained(random_model, windows)
    monkeypatch.setattr(of_components, "ROWS", 70)
    parts = of_components._explained(random_model, windows)
    torch.testing.assert_close(parts["explained"], whole["explained"], rtol=0, atol=1e-10)


def test_a_previous_character_head_needs_two_characters(previous_character_model: Any, letters: str) -> None:
    dataset = ngram_explained(previous_character_model, "validation split")
    assert dataset.component.values.tolist() == ["L0H0"]
    assert "do not vary: embed, pos_embed, L0H1." in dataset.note
    np.testing.assert_allclose(dataset.explained.sel(order=[2, 3])[:, 0], 1, atol=1e-9)
    assert abs(dataset.explained.sel(order=1).item()) < 0.02


def test_an_induction_head_is_no_ngram(induction_model: Any, letters: str) -> None:
    """On letters drawn for themselves, what once followed the present one is not in the last two."""
    explained = ngram_explained(induction_model, "validation split").explained.sel(component="L1H0")
    assert (explained < 0.5).all()  # some: a letter that follows itself is its own induction


def test_a_component_of_the_present_character_is_a_unigram_table(letters: str, random_weights: Any) -> None:
    """No attention to speak of, no positions, no final norm: embedding and MLP are functions of one character."""
    config = GPTConfig(d_vocab=5, n_ctx=8, d_model=16, n_layers=1, n_heads=2, final_norm=False)
    gpt = random_weights(config)
    with torch.no_grad():
        gpt.position_embedding.weight.zero_()
        gpt.blocks[0].attention.inner.output.weight.zero_()
    dataset = ngram_explained(to_hooked(gpt, Vocabulary(tuple(LETTERS))), "validation split")
    assert {"embed", "L0.mlp"} <= set(dataset.component.values)
    np.testing.assert_allclose(dataset.explained, 1, atol=1e-9)


def test_chance_explains_nothing(letters: str, random_weights: Any) -> None:
    """Positions have nothing to do with letters: the share is about 0 for all orders, though 3 has 125 contexts."""
    config = GPTConfig(d_vocab=5, n_ctx=8, d_model=16, n_layers=1, n_heads=2, final_norm=False)
    dataset = ngram_explained(to_hooked(random_weights(config), Vocabulary(tuple(LETTERS))), "validation split")
    assert np.abs(dataset.explained.sel(component="pos_embed")).max() < 0.02


def test_the_split_is_read_once(random_model: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ngram_explained(random_model, "validation split")
    monkeypatch.setattr(of_components, "_explained", lambda *_: pytest.fail("computed again"))
    assert ngram_explained(random_model, "validation split").identical(first)


def test_what_cannot_be_read_is_said(random_model: Any, passage_at_hand: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PassageError, match="the model does not know"):
        ngram_explained(random_model)
    at_hand(monkeypatch, passage_at_hand.parent, "abcdefghij" * 9 + "abcdefghij\n")
    with pytest.raises(UnsupportedModel, match="no 3 characters occur twice"):
        ngram_explained(random_model, "validation split")
