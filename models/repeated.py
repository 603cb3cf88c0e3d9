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

SHORTEST = 20  # positions that two copies of ten characters need; below that, scores say little


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
    induction: Tensor  # layer head, 0 to 1: attention to what followed the same place of earlier copies
    duplicate: Tensor  # layer head: to the same place of earlier copies itself
    previous: Tensor  # layer head: to the previous character
    chance: float  # induction of a head that attends everywhere alike


def matching_keys(period: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Where a head that follows the repetition looks, for every query with a whole period behind it, query q ≥ period.

    Args:
        period: of each string (batch,).

    Returns:
        keys (kind, batch, query, key), bool: induction keys q − n·period + 1 for n = 1, 2, …; duplicate keys
        q − n·period; the previous one q − 1. And the queries (batch, query), bool.
    """
    place = torch.arange(length, device=period.device)
    back, period = place[:, None] - place, period[:, None, None]  # query key; string query key
    counts = (place >= period[..., 0])[..., None]
    kinds = [
        counts & ((back + 1) % period == 0) & (back + 1 >= period),
        counts & (back % period == 0) & (back >= period),
        counts & (back == 1),
    ]
    return torch.stack(kinds), counts[..., 0]


@torch.no_grad()
def induction(gpt: GPT, strings: int = 256, seed: int = 0, periods: Sequence[int] | None = None) -> Induction:
    """Measure induction over random periods, which no head that looks a fixed distance back can fake.

    Scores are means over every query that has a whole period behind it of the attention to all its `matching_keys`.
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
    ids, drawn = repeated_strings(np.random.default_rng(seed), strings, T + 1, gpt.config.d_vocab, (low, high))
    device = next(gpt.parameters()).device
    targets, seen = (found.to(device) for found in matching_keys(torch.from_numpy(drawn), T))
    place = torch.arange(T, device=device)
    losses, scores = [], torch.zeros(3, gpt.config.n_layers, gpt.config.n_heads, dtype=torch.float64)
    was_training = gpt.training
    gpt.eval()
    for rows in torch.arange(strings).split(32):
        idx = torch.from_numpy(ids)[rows].to(device)
        logits, patterns = reference.run(gpt, idx[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten(), reduction="none")
        losses.append(loss.view(len(rows), T).double().cpu())
        for layer, pattern in enumerate(patterns):
            own = targets[:, rows].to(pattern.dtype)
            scores[:, layer] += torch.einsum("sijk,nsjk->ni", pattern, own).double().cpu()
    gpt.train(was_training)
    loss, seen, queries = torch.cat(losses), seen.cpu(), seen.sum().cpu()
    uniform = (targets[0].double() / (place[:, None] + 1)).sum().item()
    to_induction, to_duplicate, to_previous = (scores / queries).float()
    return Induction(
        first=loss[~seen].mean().item(),
        later=loss[seen].mean().item(),
        induction=to_induction,
        duplicate=to_duplicate,
        previous=to_previous,
        chance=uniform / queries.item(),
    )
