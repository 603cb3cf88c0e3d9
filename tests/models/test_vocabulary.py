"""Characters and ids: a bijection, and errors that name character and place."""

from __future__ import annotations

import numpy as np
import pytest

from models.vocabulary import Vocabulary, VocabularyError


def test_ids_are_places_in_code_point_order():
    vocabulary = Vocabulary.of("hello\n World")
    assert vocabulary.characters == ("\n", " ", "W", "d", "e", "h", "l", "o", "r")
    assert vocabulary.encode("\n W").tolist() == [0, 1, 2]
    assert vocabulary.encode("o").dtype == np.int64


@pytest.mark.parametrize("text", ["abc\nab", "", "\n\n", "jihgfedcba \n"])
def test_decoding_undoes_encoding(vocabulary, text):
    assert vocabulary.decode(vocabulary.encode(text).tolist()) == text


def test_characters_beyond_ascii_are_single_ids():
    vocabulary = Vocabulary.of("é😀e\u0301")
    assert len(vocabulary) == 4
    assert vocabulary.decode(vocabulary.encode("😀e\u0301é").tolist()) == "😀e\u0301é"


def test_an_unknown_character_is_named_with_its_first_place_and_line(vocabulary):
    with pytest.raises(VocabularyError, match=r"character 'X' at place 6 \(line 3\) is not among the model's 12 characters"):
        vocabulary.encode("ab\nc\na" + "XabX")


@pytest.mark.parametrize("number", [-1, 12])
def test_an_id_outside_the_vocabulary_is_an_error(vocabulary, number):
    with pytest.raises(VocabularyError, match=f"id {number} is outside the vocabulary; expected 0–11"):
        vocabulary.decode([0, number])


@pytest.mark.parametrize(
    ("characters", "message"),
    [
        ((), "at least one character, got none"),
        (("a", "bc"), "single characters, got 'bc'"),
        (("a", ""), "single characters, got ''"),
        (("a", "b", "a"), "each character once, got 'a' twice"),
    ],
)
def test_a_malformed_vocabulary_is_refused(characters, message):
    with pytest.raises(VocabularyError, match=message):
        Vocabulary(characters)


def test_vocabularies_of_the_same_characters_are_equal(vocabulary):
    assert len(vocabulary.ids) == 12  # fills the cache of one of them
    assert vocabulary == Vocabulary(vocabulary.characters)
    assert hash(vocabulary) == hash(Vocabulary(vocabulary.characters))
    assert vocabulary != Vocabulary(vocabulary.characters[::-1])
