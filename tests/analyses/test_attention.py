"""Attention over whole texts: entropy, statistics by distance and character, what heads are; against loops and known heads."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analyses import scores
from analyses.attention_patterns import attention_patterns
from analyses.attention_statistics import attention_statistics
from analyses.head_scores import head_scores
from analyses.passage import PASSAGE, PassageError, passage_windows
from analyses.scores import KINDS, classes, head_verdicts, matching
from analyses.stream import UnsupportedModel
from models import corpus
from models.config import GPTConfig
from models.corpus import Corpus
from models.gpt import GPT
from models.hooked import encode, to_hooked, vocabulary_of
from models.repeated import induction
from models.vocabulary import Vocabulary

TEXT = "abc\nj fd"
NAMES = [kind.name for kind in KINDS]


@pytest.fixture
def letters_at_hand(monkeypatch: pytest.MonkeyPatch, passage_at_hand: Path) -> None:
    """Random letters a to e as the text that a model was trained on: the models made by hand know no others."""
    text = passage_at_hand.parent / "letters.txt"
    text.write_text("".join(random.Random(0).choices("abcde", k=6000)), encoding="utf-8")
    monkeypatch.setenv(corpus.VARIABLE, str(text))


@pytest.fixture
def words_at_hand(monkeypatch: pytest.MonkeyPatch, passage_at_hand: Path, small_corpus: Corpus) -> str:
    """Made-up words in lines as that text: 500 characters, of which the last 50 validate."""
    text = passage_at_hand.parent / "words.txt"
    text.write_text(small_corpus.text[:500], encoding="utf-8")
    monkeypatch.setenv(corpus.VARIABLE, str(text))
    return small_corpus.text[:500]


def windows_of(model: Any, text: str) -> list[tuple[str, np.ndarray]]:
    """Every whole window of a text that is followed by a character, with its attention (layer, head, query, key)."""
    T = model.cfg.n_ctx
    found = []
    for start in range(0, (len(text) - 1) // T * T, T):
        tokens = encode(model, text[start : start + T])
        _, cache = model.run_with_cache(tokens[None])
        pattern = torch.stack([cache["pattern", layer][0] for layer in range(model.cfg.n_layers)])
        found.append((text[start : start + T], pattern.detach().numpy()))
    return found


# --- one text --------------------------------------------------------------------------------------------------------


def test_entropy_and_attention_to_the_first_place(random_model: Any) -> None:
    dataset = attention_patterns(random_model, TEXT)
    row = dataset.pattern.sel(layer=1, head=0, query_position=4).values[:5]
    cell = dataset.sel(layer=1, head=0, query_position=4)
    assert cell.entropy.item() == pytest.approx(-sum(p * np.log(p) for p in row), abs=1e-12)
    assert cell.attention_to_first.item() == pytest.approx(row[0], abs=1e-12)
    np.testing.assert_allclose(dataset.attention_to_first.sel(query_position=0), 1, atol=1e-12)


def test_entropy_is_zero_for_one_place_and_largest_for_all(previous_character_model: Any) -> None:
    dataset = attention_patterns(previous_character_model, "abcde")
    np.testing.assert_allclose(dataset.entropy[0, 0], 0, atol=1e-9)
    np.testing.assert_allclose(dataset.entropy[0, 1], np.log(np.arange(1, 6)), atol=1e-12)


# --- many windows ----------------------------------------------------------------------------------------------------


def test_statistics_by_a_loop(random_model: Any, words_at_hand: str) -> None:
    dataset = attention_statistics(random_model, "corpus")
    by_offset, by_pair, attended, queries = defaultdict(list), defaultdict(list), defaultdict(list), defaultdict(int)
    for text, pattern in windows_of(random_model, words_at_hand):
        for q, character in enumerate(text):
            queries[character] += 1
            for other in sorted(set(text[: q + 1])):
                attended[character, other].append(sum(pattern[1, 1, q, k] for k in range(q + 1) if text[k] == other))
            for k in range(q + 1):
                by_offset[q - k].append(pattern[1, 1, q, k])
                by_pair[character, text[k]].append(pattern[1, 1, q, k])
    head = dataset.sel(layer=1, head=1)
    np.testing.assert_allclose(head.by_offset, [np.mean(by_offset[o]) for o in range(10)], atol=1e-12)
    for a in dataset.query_char.values:
        assert dataset.query_count.sel(query_char=a) == queries[a]
        for b in dataset.key_char.values:
            cell, pairs = head.sel(query_char=a, key_char=b), by_pair[a, b]
            assert cell.pair_count == len(pairs)
            assert cell.by_pair.item() == pytest.approx(np.mean(pairs) if pairs else 0, abs=1e-12)
            assert cell.attended.item() == pytest.approx(sum(attended[a, b]) / max(queries[a], 1), abs=1e-12)
    assert dataset.identity_error <= 1e-12


def test_a_head_that_looks_one_back_has_all_its_weight_there(previous_character_model: Any, letters_at_hand: None) -> None:
    dataset = attention_statistics(previous_character_model, "corpus")
    np.testing.assert_allclose(dataset.by_offset[0, 0], [1 / 8, 1, 0, 0, 0, 0, 0, 0], atol=1e-9)  # place 0 has only itself
    assert "note" not in dataset.attrs  # all pairs of letters occur
    np.testing.assert_allclose(dataset.attended.sum("key_char"), 1, atol=1e-9)


def test_pairs_that_never_occur_are_counted(random_model: Any, words_at_hand: str) -> None:
    dataset = attention_statistics(random_model, "corpus")
    missing = int((dataset.pair_count == 0).sum())
    assert missing > 0
    assert dataset.note == f"{missing} of 144 pairs of characters never occur in this text; 0 stands for their mean."
    assert (dataset.by_pair.where(dataset.pair_count == 0, 0) == 0).all()


def test_the_passage_is_read_as_it_stands(small_model: Any) -> None:
    dataset = attention_statistics(small_model)
    T = small_model.cfg.n_ctx
    read = PASSAGE[: len(PASSAGE) // T * T]
    counts = [read.count(character) for character in dataset.query_char.values]
    assert dataset.query_count.values.tolist() == counts
    assert int(dataset.pair_count.sum()) == len(read) // T * T * (T + 1) // 2


@pytest.mark.parametrize("analysis", [attention_statistics, head_scores])
def test_a_model_that_cannot_read_the_passage_says_so(random_model: Any, analysis: Any) -> None:
    with pytest.raises(PassageError, match="the model does not know"):
        analysis(random_model)


def test_a_model_that_reads_more_than_half_the_passage_says_so(random_weights: Any) -> None:
    config = GPTConfig(d_vocab=len(set(PASSAGE)), n_ctx=2000, d_model=4, n_layers=1, n_heads=1)
    model = to_hooked(random_weights(config), Vocabulary.of(PASSAGE))
    with pytest.raises(PassageError, match="reads 2000 characters; the built-in passage has fewer than two windows"):
        head_scores(model)


# --- what heads are --------------------------------------------------------------------------------------------------

LINES = "JO: a bee\nIs in. Ab cabba!\n\nTO  me"


def by_definition(name: str, text: str, q: int) -> list[int]:
    """Keys of a kind, one query at a time."""
    vowel, capital, point = (lambda c: c in "aeiou"), str.isupper, (lambda c: c in ".:!,")

    def first(inside: Any) -> list[int]:
        k = q
        while k >= 0 and inside(text[k]):
            k -= 1
        return [k + 1] if 0 <= k < q - 1 else []

    def earlier(kind: Any) -> list[int]:
        return [k for k in range(q) if kind(text[q]) and kind(text[k])]

    if name == "start of line":
        before = text.rfind("\n", 0, q)
        return [before + 1] if 0 <= before < q - 1 else []
    return {
        "itself": [q] if q else [],
        "previous character": [q - 1] if q else [],
        "two back": [q - 2] if q > 1 else [],
        "first position": [0] if q else [],
        "start of word": first(str.isalpha),
        "same character": [k for k in range(q) if text[k] == text[q]],
        "induction": [k for k in range(1, q + 1) if text[k - 1] == text[q]],
        "capital to capital": earlier(capital),
        "vowel to vowel": earlier(vowel),
        "punctuation to punctuation": earlier(point),
    }[name]


@pytest.fixture
def reader() -> Any:
    """An untrained model over the characters of `LINES`: what it computes does not matter here, only what they are."""
    vocabulary = Vocabulary.of(LINES)
    config = GPTConfig(d_vocab=len(vocabulary), n_ctx=len(LINES), d_model=4, n_layers=1, n_heads=1)
    return to_hooked(GPT(config).eval(), vocabulary)


@pytest.mark.parametrize("row", range(len(KINDS)), ids=NAMES)
def test_keys_of_a_kind_by_their_definition(reader: Any, row: int) -> None:
    tokens = encode(reader, LINES)[None]
    found = matching(tokens, tokens, classes(reader))[0, row]
    expected = [by_definition(NAMES[row], LINES, q) for q in range(len(LINES))]
    assert [keys.nonzero()[:, 0].tolist() for keys in found] == expected
    assert any(expected)


def test_scores_and_baselines_by_a_loop(random_model: Any, words_at_hand: str) -> None:
    """A validation split of four windows: means over queries, errors over windows, baselines from the other three."""
    dataset = head_scores(random_model, "corpus")
    windows = windows_of(random_model, words_at_hand[450:])
    assert len(windows) == 4
    ids = {character: number for number, character in enumerate(vocabulary_of(random_model).characters)}

    def attention(name: str, pattern: np.ndarray, keys_of: str, queries_of: str) -> list[float]:
        mixed = lambda q: by_definition(name, keys_of, q) if keys_of == queries_of else [  # noqa: E731
            k for k in range(q + (name == "induction")) if k >= (name == "induction")
            and (keys_of[k - 1] if name == "induction" else keys_of[k]) == queries_of[q]
        ]  # fmt: skip
        return [sum(pattern[1, 0, q, k] for k in mixed(q)) for q in range(len(keys_of)) if mixed(q)]

    assert set(ids) >= set(words_at_hand)
    for name in ("previous character", "start of word", "same character", "induction"):
        cell = dataset.sel(score=name, layer=1, head=0)
        own = [attention(name, pattern, text, text) for text, pattern in windows]
        pooled = np.concatenate(own)
        assert cell.value.item() == pytest.approx(pooled.mean(), abs=1e-12)
        assert cell.queries == len(pooled)
        residual = [sum(each) - pooled.mean() * len(each) for each in own]
        error = np.sqrt(np.sum(np.square(residual)) * 4 / 3) / len(pooled)
        assert cell.standard_error.item() == pytest.approx(error, abs=1e-12)
        others = [
            (pattern, text, windows[(n + shift) % 4][0]) for shift in (1, 2, 3) for n, (text, pattern) in enumerate(windows)
        ]
        text_null = np.concatenate([attention(name, pattern, other, other) for pattern, _, other in others])
        if name == "previous character":
            baseline = np.mean([1 / (q + 1) for q in range(1, 10)])
        elif name == "start of word":
            baseline = text_null.mean()
        else:
            query_null = np.concatenate([attention(name, pattern, text, other) for pattern, text, other in others])
            baseline = max(text_null.mean(), query_null.mean())
        assert cell.baseline.item() == pytest.approx(baseline, abs=1e-12)


def test_the_planted_heads_and_no_others_are_named(
    previous_character_model: Any, induction_model: Any, letters_at_hand: None
) -> None:
    assert head_scores(previous_character_model, "corpus").verdict.values.tolist() == [["previous character", "–"]]
    dataset = head_scores(induction_model, "corpus")
    assert dataset.verdict.values.tolist() == [["previous character", "–"], ["induction", "–"]]
    assert dataset.clearest[1, 0] == "induction"
    cell = dataset.sel(score="induction", layer=1, head=0)
    assert dataset.clearest_value[1, 0] == cell.value
    assert dataset.written.sel(component="L1H0", score="induction") == f"{cell.value.item():.2f}".removeprefix("0")
    assert dataset.written.sel(component="L0H0", score="two back") == ""
    assert dataset.excess.sel(component="L1H0", score="induction") == cell.value - cell.baseline
    assert "reads 10 characters; repeated strings need 20" in dataset.note
    assert "Found in fewer than two windows of this text and left out: start of word, start of line, capital" in dataset.note


def test_a_head_that_looks_one_back_does_not_look_for_vowels(
    previous_character_model: Any, monkeypatch: pytest.MonkeyPatch, passage_at_hand: Path
) -> None:
    """Where vowels come in runs, what is one back from a vowel is one; the same attention finds that in other windows too."""
    draw = random.Random(0)
    runs = ("".join(draw.choices(kind, k=draw.randint(3, 9))) for _ in range(500) for kind in ("ae", "bcd"))
    text = passage_at_hand.parent / "runs.txt"
    text.write_text("".join(runs), encoding="utf-8")
    monkeypatch.setenv(corpus.VARIABLE, str(text))
    dataset = head_scores(previous_character_model, "corpus")
    vowels = dataset.sel(score="vowel to vowel", layer=0, head=0)
    assert vowels.value > 0.8
    assert abs(vowels.value - vowels.baseline) < 0.1
    assert dataset.verdict.values.tolist() == [["previous character", "–"]]


def test_a_verdict_clears_all_three_hurdles() -> None:
    """In turn: it does; too few errors above; too little above; too little in all; and two at once, the clearer first."""
    value = torch.tensor([[0.5, 0.5, 0.95, 0.29, 0.6], [0.0, 0.0, 0.0, 0.0, 0.9]])[:, None]
    baseline = torch.tensor([[0.2, 0.2, 0.8, 0.01, 0.1], [0.0, 0.0, 0.0, 0.0, 0.1]])[:, None]
    error = torch.tensor([[0.05, 0.07, 0.01, 0.01, 0.01], [0.0, 0.0, 0.0, 0.0, 0.01]])[:, None]
    found = scores.HeadScores(("one", "two"), (), value, baseline, error, torch.tensor([9, 9])).verdicts()
    assert found.tolist() == [["one", "–", "–", "–", "two, one"]]


def test_a_model_of_zeros_is_nothing(small_model: Any, letters_at_hand: None) -> None:
    with torch.no_grad():
        for parameter in small_model.parameters():
            parameter.zero_()
    dataset = head_scores(small_model)
    assert (dataset.verdict == "–").all()
    fixed = dataset.sel(score=["itself", "previous character", "two back", "first position"])
    np.testing.assert_allclose(fixed.value, fixed.baseline, atol=1e-6)
    assert (head_verdicts(small_model) == "–").all()
    assert head_verdicts(small_model).shape == (2, 2)


def test_random_weights_are_nothing(small_model: Any) -> None:
    assert (head_scores(small_model).verdict == "–").all()


def test_on_repeated_strings_the_score_is_that_of_training(small_model: Any) -> None:
    """`models.repeated` measures it with the reference implementation, on the same strings."""
    found = induction(small_model.checkpoint.gpt, strings=scores.STRINGS)
    value = head_scores(small_model).value
    np.testing.assert_allclose(value.sel(score="repeats: induction"), found.induction, atol=1e-6)
    np.testing.assert_allclose(value.sel(score="repeats: same place"), found.duplicate, atol=1e-6)


def test_windows_far_apart_are_in_pieces(small_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over pieces are the sums over all; only the baseline's other windows differ."""
    whole = attention_statistics(small_model)
    monkeypatch.setattr("analyses.texts.POSITIONS", 400)
    pieces = attention_statistics(small_model)
    np.testing.assert_allclose(pieces.by_pair, whole.by_pair, atol=1e-6)
    assert (pieces.pair_count == whole.pair_count).all()
    assert len(passage_windows(small_model)) > 6


def test_a_model_without_blocks_has_no_heads_to_score(random_weights: Any, vocabulary: Vocabulary) -> None:
    model = to_hooked(random_weights(GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=0, n_heads=2)), vocabulary)
    with pytest.raises(UnsupportedModel, match="no blocks"):
        head_scores(model)
