"""n-grams as numbers: which n characters end at every place, sums over the places of each, and the model's own table of them.

An n-gram is written in base V + 1, its characters' ids plus one as digits, the last character last. So n-grams of all
lengths are told apart, 0 is none, and the last k characters are the remainder by (V + 1)^k.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.over_corpus import ROWS_BUDGET
from analyses.progress import track
from models.protocol import Model
from models.vocabulary import Vocabulary


def ngram_codes(windows: Int[Tensor, "batch position"], order: int, d_vocab: int) -> Int[Tensor, "batch position"]:
    """The n-gram that ends at each place; 0 where it would reach over its window's start."""
    codes, length = torch.zeros_like(windows), windows.shape[1]
    for back in range(order):
        codes[:, order - 1 :] += (windows[:, order - 1 - back : length - back] + 1) * (d_vocab + 1) ** back
    return codes


def ngram_ids(codes: Int[Tensor, "ngram"], order: int, d_vocab: int) -> Int[Tensor, "ngram order"]:
    """The characters of n-grams of one length."""
    return _digits(codes, order, d_vocab + 1) - 1


def ngram_text(code: int, vocabulary: Vocabulary) -> str:
    """The characters of one n-gram, as text."""
    text = ""
    while code:
        code, digit = divmod(code, len(vocabulary) + 1)
        text = vocabulary.characters[digit - 1] + text
    return text


def places_among(codes: Int[Tensor, "*batch"], among: Int[Tensor, "ngram"]) -> Int[Tensor, "*batch"]:
    """The place of each n-gram in a list in rising order; the list's length for one that is not in it."""
    place = torch.searchsorted(among, codes).clamp(max=len(among) - 1)
    return torch.where(among[place] == codes, place, len(among))


def every_context(length: int, d_vocab: int) -> Int[Tensor, "context position"]:
    """All V^length texts of that many characters, in the order of their ids."""
    return _digits(torch.arange(d_vocab**length), length, d_vocab)


def ngram_table(model: Model, length: int) -> Float[Tensor, "context char"]:
    """Log-probabilities of the next character after every text of `length` characters, all at the start of a window.

    Rows are in the order of `every_context`.
    """
    contexts = every_context(length, model.cfg.d_vocab)
    size = max(1, ROWS_BUDGET // length)
    table = torch.empty(len(contexts), model.cfg.d_vocab, dtype=model.unembed.W_U.dtype)
    starts = range(0, len(contexts), size)
    for start in track(starts, len(starts), "Every context through the model"):
        batch = contexts[start : start + size].to(model.cfg.device)
        table[start : start + size] = model(batch)[:, -1].log_softmax(-1)
    return table


def _digits(numbers: Int[Tensor, "number"], count: int, base: int) -> Int[Tensor, "number digit"]:
    """The last `count` digits of numbers, the first digit first."""
    powers = base ** torch.arange(count - 1, -1, -1, device=numbers.device)
    return numbers[:, None] // powers % base
