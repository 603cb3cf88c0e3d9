"""Skip-trigrams: against a loop over all triples, against counting in a text by hand, and planted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analyses import over_corpus
from analyses.ov_circuit import ov_circuit
from analyses.qk_circuit import qk_circuit
from analyses.skip_trigrams import skip_trigrams, triple_counts
from analyses.spec import KnobError
from analyses.stream import UnsupportedModel
from models import corpus
from models.vocabulary import VocabularyError

GIVEN = dict(fold="norm weights and biases", scale="of each embedding")


@pytest.mark.parametrize("order", ["promoted", "suppressed"])
def test_strengths_are_those_of_a_loop(random_model: Any, order: str) -> None:
    """Every triple from the two circuits as their own pages give them, sorted in Python."""
    scores, logits = qk_circuit(random_model, **GIVEN).score[1, 0].values, ov_circuit(random_model, **GIVEN).logit[1, 0].values
    characters = list(ov_circuit(random_model, **GIVEN).source_char.values)
    expected = {}
    for d in range(12):
        attention = np.exp(scores[d]) / np.exp(scores[d]).sum()
        for s in range(12):
            for o in range(12):
                name = characters[s] + characters[d] + characters[o]
                expected[name] = attention[s] * (logits[s, o] - logits[s].mean())
    dataset = skip_trigrams(random_model, 1, 0, order, 12**3, **GIVEN)
    triples = zip(dataset.source.values, dataset.destination.values, dataset.output.values, strict=True)
    found = dict(zip(map("".join, triples), dataset.strength.values, strict=True))
    assert found == pytest.approx(expected, abs=1e-12)
    assert len(found) == 12**3
    steps = np.diff(dataset.strength)
    assert (steps <= 0).all() if order == "promoted" else (steps >= 0).all()
    np.testing.assert_allclose(dataset.attention * dataset.logit, dataset.strength, rtol=0, atol=1e-12)
    assert 0 < dataset.identity_error <= 1e-12


def test_the_first_are_the_first_of_all(random_model: Any) -> None:
    every, few = (skip_trigrams(random_model, 0, 1, top=top, **GIVEN) for top in (12**3, 7))
    assert few.equals(every.isel(index=slice(7)))
    with pytest.raises(KnobError, match="top 1729 is outside the 1,728 triples of characters; give 1–1728"):
        skip_trigrams(random_model, top=1729, **GIVEN)


def test_a_planted_skip_trigram_is_found(previous_character_model: Any) -> None:
    """At 'c' the head looks for 'a' and then says 'e'. Nothing else is there, so nothing else is strong."""
    attn, a, c, e = previous_character_model.blocks[0].attn, 0, 2, 4
    with torch.no_grad():
        for weight in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O):
            weight.zero_()
        attn.W_Q[0, c, 0] = 60 * 10**0.5
        attn.W_K[0, a, 0] = 1
        attn.W_V[0, a, 1] = 1
        attn.W_O[0, 1, 13 + e] = 1
    dataset = skip_trigrams(previous_character_model, scale="one", top=125)
    first = dataset.isel(index=0)
    assert (first.source.item(), first.destination.item(), first.output.item()) == ("a", "c", "e")
    assert first.strength.item() == pytest.approx(10 * 4 / 5)  # logit 10 for one output in five, less their mean
    assert first.attention.item() == pytest.approx(1)
    assert dataset.strength[1].item() == pytest.approx(8 / 5)  # elsewhere attention is even
    assert (dataset.source[dataset.strength.values > 0] == "a").all()
    empty = skip_trigrams(previous_character_model, head=1, scale="one")
    assert np.abs(empty.strength).max() == 0


def test_counts_are_those_of_a_loop() -> None:
    ids = np.random.default_rng(0).integers(0, 4, 300)
    for T in (1, 2, 5, 400):
        expected = np.zeros((4, 4, 4), dtype=int)
        for p in range(len(ids) - 1):
            for source in set(ids[max(0, p - T + 1) : p].tolist()):
                expected[source, ids[p], ids[p + 1]] += 1
        np.testing.assert_array_equal(triple_counts(ids, 4, T), expected)


def test_counts_of_the_text_at_hand_and_what_chance_would_give(small_model: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """'x' stands before 'ab', 'y' before 'ac': after 'a', 'x' makes 'b' likelier. Windows are longer than the text."""
    text = "xzab" + "z" * 80 + "yzac"
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.setenv(corpus.VARIABLE, str(tmp_path / "text.txt"))
    dataset = skip_trigrams(small_model, top=65**3)
    triples = zip(dataset.source.values, dataset.destination.values, dataset.output.values, strict=True)
    places = {triple: place for place, triple in enumerate(map("".join, triples))}
    found = dataset.isel(index=[places["xab"], places["xac"], places["zac"], places["QZJ"]])
    assert found["count"].values.tolist() == [1, 0, 1, 0]
    assert found.expected.values.tolist() == [0.5, 0.5, 1, 0]
    assert found.lift.values == pytest.approx([2 / 1.5, 1 / 1.5, 1, 1])
    assert dataset["count"].sum() == triple_counts(over_corpus.corpus_ids(small_model, corpus.at_hand()), 65, 64).sum()


def test_only_those_of_the_corpus_if_asked(small_model: Any, random_model: Any) -> None:
    every, often = skip_trigrams(small_model, top=65**3), skip_trigrams(small_model, top=65**3, least=5)
    expected = every.isel(index=every["count"].values >= 5)
    assert 0 < often.sizes["index"] == expected.sizes["index"] < 65**3
    for name in often.data_vars:
        np.testing.assert_array_equal(often[name], expected[name])
    with pytest.raises(KnobError, match="least 99999: no triple is so frequent; give at most"):
        skip_trigrams(small_model, least=99999)
    with pytest.raises(KnobError, match="least: got -1; give 0 for all triples"):
        skip_trigrams(small_model, least=-1)
    with pytest.raises(VocabularyError, match="is not among the model's 12 characters"):
        skip_trigrams(random_model, least=1, **GIVEN)


def test_counts_are_kept(small_model: Any, monkeypatch: Any) -> None:
    before = skip_trigrams(small_model)
    monkeypatch.setattr("analyses.skip_trigrams.triple_counts", None)
    assert skip_trigrams(small_model).identical(before)
    (file,) = over_corpus.folder().iterdir()
    assert file.name.startswith("skip-trigrams-64-1-")


def test_without_a_corpus_there_are_no_counts_and_a_note_says_how_to_get_them(random_model: Any, monkeypatch: Any) -> None:
    assert "is not among the model's 12 characters" in skip_trigrams(random_model, **GIVEN).note  # the passage has others

    def none() -> None:
        raise corpus.CorpusError("there is none; `workbench corpus` fetches it once")

    monkeypatch.setattr(corpus, "at_hand", none)
    dataset = skip_trigrams(random_model, **GIVEN)
    assert "count" not in dataset
    assert dataset.note.endswith("there is none; `workbench corpus` fetches it once.")
    assert [view.title for view in skip_trigrams.fitting_views(dataset)] == ["Strongest skip-trigrams"]


def test_more_characters_than_can_be_tabulated_are_refused(random_model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("analyses.skip_trigrams.MOST_CHARACTERS", 11)
    with pytest.raises(UnsupportedModel, match="this model has 12 characters, too many"):
        skip_trigrams(random_model, **GIVEN)
