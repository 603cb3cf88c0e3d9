"""Characters and their ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsInt

import numpy as np

from models.errors import WorkbenchError


class VocabularyError(WorkbenchError):
    """A text cannot be encoded, or a vocabulary is malformed; the message says what and where."""


@dataclass(frozen=True)
class Vocabulary:
    """An ordered set of characters; a character's id is its place.

    Raises:
        VocabularyError: no characters, one twice, or one that is longer than one character.
    """

    characters: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.characters:
            raise VocabularyError("a vocabulary needs at least one character, got none")
        for character in self.characters:
            if not isinstance(character, str) or len(character) != 1:
                raise VocabularyError(f"a vocabulary holds single characters, got {character!r}")
        if len(set(self.characters)) != len(self.characters):
            twice = next(c for c in self.characters if self.characters.count(c) > 1)
            raise VocabularyError(f"a vocabulary holds each character once, got {twice!r} twice")

    @classmethod
    def of(cls, text: str) -> Vocabulary:
        """The distinct characters of a text in code-point order, as nanoGPT numbers them."""
        return cls(tuple(sorted(set(text))))

    def __len__(self) -> int:
        return len(self.characters)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters)}

    def encode(self, text: str) -> np.ndarray:
        """Ids (position,) of a text, int64.

        Raises:
            VocabularyError: a character is unknown; the message names it, its place and its line.
        """
        ids = self.ids
        try:
            return np.fromiter((ids[character] for character in text), dtype=np.int64, count=len(text))
        except KeyError as error:
            unknown = error.args[0]
            place = text.index(unknown)
            line = text.count("\n", 0, place) + 1
            raise VocabularyError(
                f"character {unknown!r} at place {place} (line {line}) is not among the model's {len(self)} characters: "
                f"{''.join(self.characters)!r}; remove or replace it"
            ) from None

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """The text of a sequence of ids; an id outside the vocabulary is an error."""
        numbers = [int(number) for number in ids]
        for number in numbers:
            if not 0 <= number < len(self):
                raise VocabularyError(f"id {number} is outside the vocabulary; expected 0–{len(self) - 1}")
        return "".join(self.characters[number] for number in numbers)
