"""Repeated random strings: a text that nothing but its own past predicts.

A random string of `period` characters is written again and again. Its first copy cannot be predicted (ln V nats per
character); each later one can, by looking at what followed the last time. That is induction (Olsson et al. 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models import reference
from models.errors import WorkbenchError
from models.gpt import GPT


class RepeatedError(WorkbenchError):
    """A context is too short for what is asked; the message says how long it must be."""


def repeated_strings(
    generator: np.random.Generator, count: int, length: int, d_vocab: int, periods: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Random strings, each repeated with a period of its own.

    Args:
        periods: smallest and largest period, both included; drawn uniformly for each row.

    Returns:
        ids (batch, position), int64, and the period of each row (batch,).
    """
    period = generator.integers(periods[0], periods[1] + 1, count)
    once = generator.integers(0, d_vocab, (count, periods[1]))
    return np.take_along_axis(once, np.arange(length) % period[:, None], axis=1), period


@dataclass(frozen=True)
class Induction:
    """How a model and its heads do on repeated random strings."""

    first: float  # loss until one copy has been seen, nats per character: ln V is the best there is
    later: float  # loss from there on
    induction: Tensor  # layer head, 0 to 1: mean attention to the character after the last occurrence of the present one
    duplicate: Tensor  # layer head: to that last occurrence itself
    previous: Tensor  # layer head: to the previous character
    chance: float  # what a head scores that attends everywhere alike


@torch.no_grad()
def induction(gpt: GPT, strings: int = 256, seed: int = 0, periods: Sequence[int] | None = None) -> Induction:
    """Measure induction over random periods, which no head that looks a fixed distance back can fake.

    Every query q that has a whole period behind it counts: the induction key is q − period + 1, the duplicate q − period.
    Patterns are the reference implementation's.

    Args:
        periods: smallest and largest; 10 to half the context unless given.

    Raises:
        RepeatedError: two copies of the shortest string do not fit the context.
    """
    T = gpt.config.n_ctx
    low, high = periods or (min(10, T // 2), T // 2)
    if T < 4 or 2 * low > T:
        raise RepeatedError(f"the model reads {T} characters; repeated strings need at least {max(4, 2 * low)}")
    ids, period = repeated_strings(np.random.default_rng(seed), strings, T + 1, gpt.config.d_vocab, (low, high))
    queries = np.arange(T) >= period[:, None]
    places = np.arange(T) - period[:, None]
    device = next(gpt.parameters()).device
    losses, totals, chance = [], torch.zeros(3, gpt.config.n_layers, gpt.config.n_heads, dtype=torch.float64), 0.0
    was_training = gpt.training
    gpt.eval()
    for rows in np.array_split(np.arange(strings), max(1, strings // 32)):
        idx = torch.from_numpy(ids[rows]).to(device)
        logits, patterns = reference.run(gpt, idx[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten(), reduction="none")
        losses.append(loss.view(len(rows), T).double().cpu())
        batch, query = np.nonzero(queries[rows])
        for kind, key in enumerate((places[rows][batch, query] + 1, places[rows][batch, query], query - 1)):
            for layer, pattern in enumerate(patterns):
                totals[kind, layer] += pattern[batch, :, query, key].sum(0).double().cpu()
        chance += (1 / (query + 1)).sum()
    gpt.train(was_training)
    loss, count = torch.cat(losses), queries.sum()
    is_later = torch.from_numpy(queries)
    to_induction, to_duplicate, to_previous = (totals / count).float()
    return Induction(
        first=loss[~is_later].mean().item(),
        later=loss[is_later].mean().item(),
        induction=to_induction,
        duplicate=to_duplicate,
        previous=to_previous,
        chance=chance / count,
    )
