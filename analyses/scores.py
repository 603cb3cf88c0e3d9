"""Scores of heads: how much of a head's attention goes to keys of a kind, against what its position alone would give it.

A score is the mean, over all queries that have such a key, of the attention to all of them together. Its baseline is what
the same attention would score if the head did not see what it is scored for:

    uniform          attention spread evenly over the past.
    another text     the same attention, with the keys of the kind where they are in other windows. It knows where such keys
                     stand on average, and how texts run, not where they are here.
    another query    the same attention, with the characters that other windows have at the query. It knows at which
                     characters of this text the head likes to look, not what it looks for.

Keys at a fixed place are held against the first; keys that stand out in a text, such as the first letter of a word, against
the second; keys that match the query against the second and the third, whichever is higher. Other windows are the next
four of the text. Characters permuted within a window would be no fair baseline: words of permuted characters are shorter
and capitals do not come in runs, so a head that looks one back would seem to find both.

A verdict is given only where a score exceeds its baseline by 5 standard errors and by a fifth of all attention, and is at
least three tenths of it.  References: Olsson et al. (2022) for induction; Wang et al. (2022) for duplicate tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from analyses.texts import POSITIONS, passage_batches, patterns
from models import repeated
from models.hooked import vocabulary_of
from models.protocol import Model

ERRORS, MARGIN, SHARE = 5, 0.2, 0.3  # of a verdict: standard errors and attention above the baseline, attention in all
SHIFTS = (1, 2, 3, 4)  # windows further on, which make the baselines
STRINGS = 64  # repeated random strings that are read
NONE = "–"

Null = Literal["uniform", "another text", "either"]
Pattern = Float[Tensor, "batch layer head query key"]
Keys = Bool[Tensor, "batch score query key"]


class Kind(NamedTuple):
    """What heads are scored for."""

    name: str
    null: Null


KINDS = (
    Kind("itself", "uniform"),
    Kind("previous character", "uniform"),
    Kind("two back", "uniform"),
    Kind("first position", "uniform"),
    Kind("start of word", "another text"),
    Kind("start of line", "another text"),
    Kind("same character", "either"),
    Kind("induction", "either"),
    Kind("capital to capital", "either"),
    Kind("vowel to vowel", "either"),
    Kind("punctuation to punctuation", "either"),
)
REPEATED = (Kind("repeats: induction", "either"), Kind("repeats: same place", "either"))


@dataclass(frozen=True)
class HeadScores:
    """Every score of every head; kinds that are found in fewer than two windows are left out."""

    names: tuple[str, ...]
    left_out: tuple[str, ...]
    value: Float[Tensor, "score layer head"]
    baseline: Float[Tensor, "score layer head"]
    standard_error: Float[Tensor, "score layer head"]
    queries: Int[Tensor, "score"]

    def verdicts(self) -> np.ndarray:
        """What each head is (layer, head): the names of all scores that clear their baseline, the clearest first."""
        excess = self.value - self.baseline
        clear = (excess > ERRORS * self.standard_error) & (excess >= MARGIN) & (self.value >= SHARE)
        found = np.full(tuple(clear.shape[1:]), NONE, dtype=object)
        for layer, head in np.ndindex(found.shape):
            rows = [row for row in excess[:, layer, head].argsort(descending=True).tolist() if clear[row, layer, head]]
            found[layer, head] = ", ".join(self.names[row] for row in rows) or NONE
        return found


def head_verdicts(model: Model) -> np.ndarray:
    """What each head is (layer, head), "–" where it is none of these, measured on the built-in passage.

    Raises:
        PassageError: the model does not know the passage's characters.
    """
    return finished(measured(model, passage_batches(model))).verdicts()


# --- which keys ------------------------------------------------------------------------------------------------------


class Classes(NamedTuple):
    """Which ids of a vocabulary are of a kind."""

    letter: Bool[Tensor, "char"]
    newline: Bool[Tensor, "char"]
    capital: Bool[Tensor, "char"]
    vowel: Bool[Tensor, "char"]
    punctuation: Bool[Tensor, "char"]


def classes(model: Model) -> Classes:
    """Letters; newline; capitals; the small letters a, e, i, o, u; and what is neither letter, digit nor blank."""
    characters = vocabulary_of(model).characters
    kinds = (
        [character.isalpha() for character in characters],
        [character == "\n" for character in characters],
        [character.isupper() for character in characters],
        [character in "aeiou" for character in characters],
        [not character.isalnum() and not character.isspace() for character in characters],
    )
    return Classes(*(torch.tensor(kind, device=model.cfg.device) for kind in kinds))


def matching(queries: Int[Tensor, "batch position"], keys: Int[Tensor, "batch position"], kinds: Classes) -> Keys:
    """Keys of each of `KINDS`, in order; none is after its query, and only "itself" and "induction" can be the query.

    Args:
        queries, keys: the characters at queries and at keys: the same, except in a baseline.
    """
    place = torch.arange(keys.shape[1], device=keys.device)
    back = (place[:, None] - place).expand(len(keys), -1, -1)  # batch query key
    before = back > 0
    followed = torch.nn.functional.pad(keys[:, :-1], (1, 0), value=-1)  # the character before each key
    letter = kinds.letter[keys]
    found = [
        (back == 0) & (place > 0)[:, None],  # the first character has nowhere else to look
        back == 1,
        back == 2,
        before & (place == 0),
        _first_after(~letter) & letter[:, :, None],
        _first_after(kinds.newline[keys]),
        before & (queries[:, :, None] == keys[:, None]),
        (back >= 0) & (queries[:, :, None] == followed[:, None]),
        *(before & kind[queries][:, :, None] & kind[keys][:, None] for kind in (kinds.capital, kinds.vowel, kinds.punctuation)),
    ]
    return torch.stack(found, dim=1)


def _first_after(ends: Bool[Tensor, "batch position"]) -> Bool[Tensor, "batch query key"]:
    """The key that follows the last end before each query, if it is before the query too."""
    place = torch.arange(ends.shape[1], device=ends.device)
    last = torch.where(ends, place, -1).cummax(1).values
    start = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1) + 1  # 0 where nothing has ended yet
    return (place == start[:, :, None]) & (place < place[:, None]) & (start > 0)[:, :, None]


# --- measuring -------------------------------------------------------------------------------------------------------


def measured(model: Model, batches: Iterable[Int[Tensor, "batch position"]]) -> dict[str, Tensor]:
    """Sums over all windows that `finished` makes scores of; repeated random strings too, if the context allows.

    Args:
        batches: consecutive windows of text, at least two to a batch.
    """
    found, kinds = [], classes(model)
    for tokens in batches:
        others = [tokens.roll(-shift, dims=0) for shift in SHIFTS[: len(tokens) - 1]]
        texts = [matching(other, other, kinds) for other in others]
        queries = [matching(other, tokens, kinds) for other in others]
        found.append(_sums(_pattern(model, tokens), matching(tokens, tokens, kinds), texts, queries))
    sums = {name: torch.stack([each[name] for each in found]).sum(0) for name in found[0]}
    if model.cfg.n_ctx < repeated.SHORTEST:
        return sums
    strings = _on_repeated_strings(model)
    return {name: torch.cat([sums[name], strings[name]]) for name in sums}


def _pattern(model: Model, tokens: Int[Tensor, "batch position"]) -> Pattern:
    return torch.stack(patterns(model, tokens), dim=1)


def _on_repeated_strings(model: Model) -> dict[str, Tensor]:
    """Here the places of earlier copies stand for the characters, so both baselines are that of another string's period."""
    T, kinds = model.cfg.n_ctx, len(REPEATED)
    ids, period = repeated.repeated_strings(np.random.default_rng(0), STRINGS, T, model.cfg.d_vocab, (10, T // 2))
    found = []
    for rows in torch.arange(STRINGS).split(max(2, POSITIONS // T)):
        own, tokens = (torch.from_numpy(array)[rows].to(model.cfg.device) for array in (period, ids))
        keys = [repeated.matching_keys(own.roll(-shift), T)[0][:kinds].transpose(0, 1) for shift in (0, *SHIFTS)]
        found.append(_sums(_pattern(model, tokens), keys[0], keys[1:], []))
    return {name: torch.stack([each[name] for each in found]).sum(0) for name in found[0]}


def _sums(pattern: Pattern, keys: Keys, texts: list[Keys], queries: list[Keys]) -> dict[str, Tensor]:
    """Sums over windows of s, attention to the keys, and n, queries that have one: what means and their errors need.

    For each baseline likewise: `evenly`, if attention were uniform; with another `text`, or another `query`.
    """
    s, n = _attention(pattern, keys), _having(keys)
    past = torch.arange(1, keys.shape[-1] + 1, device=keys.device, dtype=torch.float64)
    sums = {
        "s": s.sum(0), "ss": (s * s).sum(0), "sn": torch.einsum("bslh,bs->slh", s, n),
        "n": n.sum(0), "nn": (n * n).sum(0), "windows": (n > 0).sum(0).double(),
        "evenly": (keys.sum(-1) / past).sum((0, -1)).cpu(),
    }  # fmt: skip
    for name, nulls in (("text", texts), ("query", queries)):
        sums[name] = sum((_attention(pattern, null).sum(0) for null in nulls), torch.zeros_like(sums["s"]))
        sums[f"{name}_n"] = sum((_having(null).sum(0) for null in nulls), torch.zeros_like(sums["n"]))
    return sums


def _attention(pattern: Pattern, keys: Keys) -> Float[Tensor, "batch score layer head"]:
    """Attention to the keys, summed over queries and keys: one product per window."""
    found = keys.flatten(2).to(pattern.dtype) @ pattern.flatten(3).flatten(1, 2).mT  # batch score unit
    return found.unflatten(2, pattern.shape[1:3]).double().cpu()


def _having(keys: Keys) -> Float[Tensor, "batch score"]:
    return keys.any(-1).sum(-1).double().cpu()


def finished(sums: dict[str, Tensor]) -> HeadScores:
    """Means, baselines, and standard errors over windows (of a ratio of sums, by the usual linearisation)."""
    kinds = (*KINDS, *REPEATED)[: len(sums["n"])]
    kept = [row for row in range(len(kinds)) if sums["windows"][row] > 1 and sums["text_n"][row] > 0]
    one = {name: each[kept] if each.ndim == 3 else each[kept][:, None, None] for name, each in sums.items()}
    value, windows = one["s"] / one["n"], one["windows"]
    text, query = one["text"] / one["text_n"], one["query"] / one["query_n"].clamp(min=1)
    uniform = torch.tensor([kinds[row].null == "uniform" for row in kept])[:, None, None]
    matches = torch.tensor([kinds[row].null == "either" for row in kept])[:, None, None]
    baseline = torch.where(uniform, one["evenly"] / one["n"], torch.where(matches, torch.maximum(text, query), text))
    residual = (one["ss"] - 2 * value * one["sn"] + value**2 * one["nn"]).clamp(min=0)  # Σ (s − value · n)²
    return HeadScores(
        names=tuple(kinds[row].name for row in kept),
        left_out=tuple(kind.name for row, kind in enumerate(kinds) if row not in kept),
        value=value,
        baseline=baseline,
        standard_error=(residual * windows / (windows - 1)).sqrt() / one["n"],
        queries=sums["n"][kept].long(),
    )
