"""Validation loss: mean cross-entropy in nats per character over the whole validation split.

Measured in consecutive non-overlapping windows of n_ctx characters, dropout off, float32; no other figure is called so.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from models.corpus import Corpus, windows
from models.gpt import GPT
from models.vocabulary import Vocabulary


@torch.no_grad()
def corpus_loss(logits_of: Callable[[Tensor], Tensor], ids: np.ndarray, n_ctx: int, device: torch.device | str = "cpu") -> float:
    """Mean cross-entropy, nats per character, over all of a text in consecutive windows of n_ctx characters."""
    inputs, targets = windows(ids, n_ctx)
    total, rows = 0.0, max(1, 16384 // n_ctx)
    for start in range(0, len(inputs), rows):
        idx = torch.from_numpy(inputs[start : start + rows]).to(device)
        wanted = torch.from_numpy(targets[start : start + rows]).to(device)
        total += F.cross_entropy(logits_of(idx).flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return total / targets.size


def validation_loss(gpt: GPT, corpus: Corpus, vocabulary: Vocabulary) -> float:
    """Validation loss of a model, as defined at the top of this module."""
    was_training = gpt.training
    gpt.eval()
    try:
        device = next(gpt.parameters()).device
        return corpus_loss(lambda idx: gpt(idx)[0], corpus.encoded("validation", vocabulary), gpt.config.n_ctx, device)
    finally:
        gpt.train(was_training)
