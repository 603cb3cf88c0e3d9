"""What an analysis of many windows reads: the built-in passage, or the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.over_corpus import corpus_batches
from analyses.passage import PassageError, passage_windows
from analyses.spec import Knob
from models.protocol import Model

Texts = Annotated[Literal["passage", "corpus"], Knob("The built-in passage, or the text that the model was trained on")]
POSITIONS = 4096  # read at once where every pattern is held


def passage_batches(model: Model) -> Iterator[Int[Tensor, "batch position"]]:
    """The windows of the built-in passage, a few thousand positions at a time.

    Raises:
        PassageError: the model does not know a character of it, or reads more than half of it at once.
    """
    windows = passage_windows(model)
    if len(windows) < 2:
        raise PassageError(
            f"the model reads {model.cfg.n_ctx} characters; the built-in passage has fewer than two windows of that"
        )
    yield from _pieces(windows)


def text_batches(model: Model, ids: np.ndarray, what: str) -> Iterator[Int[Tensor, "batch position"]]:
    """The windows of a text of one's own, likewise; progress is told as `what`."""
    for _, tokens in corpus_batches(model, ids, what):
        yield from _pieces(tokens)


def _pieces(tokens: Int[Tensor, "batch position"]) -> Iterator[Int[Tensor, "batch position"]]:
    """Windows in pieces of about equal size whose attention fits into memory, two windows at least to a piece."""
    yield from tokens.tensor_split(max(1, min(-(-tokens.numel() // POSITIONS), len(tokens) // 2)))


def patterns(model: Model, tokens: Int[Tensor, "batch position"]) -> list[Float[Tensor, "batch head query key"]]:
    """Every block's attention on a batch of windows, and nothing else of the forward pass."""
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=lambda name: name in names)
    return [cache[name] for name in names]
