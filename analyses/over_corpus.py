"""Computations over the whole text that a model was trained on: streamed, and kept on disk once made.

What is kept is named by the model's weights and precision and by the text, so that it is never taken for another's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import platformdirs
import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from analyses.progress import track
from models.corpus import Corpus, windows
from models.hooked import content_hash, vocabulary_of
from models.protocol import Model

ROWS_BUDGET = 16_384  # positions in one forward pass


def corpus_ids(model: Model, corpus: Corpus) -> np.ndarray:
    """The whole text as ids (position,), training and validation split after one another.

    Raises:
        VocabularyError: it has characters that the model does not know.
    """
    return vocabulary_of(model).encode(corpus.text)


def corpus_batches(model: Model, ids: np.ndarray, what: str) -> Iterator[tuple[int, Int[Tensor, "batch position"]]]:
    """Consecutive windows of n_ctx characters in batches, each with the place in `ids` where its first window starts.

    Progress is told as `what`. The last partial window is left out.
    """
    T = model.cfg.n_ctx
    inputs, _ = windows(ids, T)
    rows = max(1, ROWS_BUDGET // T)
    starts = range(0, len(inputs), rows)
    for start in track(starts, len(starts), what):
        yield start * T, torch.from_numpy(inputs[start : start + rows]).to(model.cfg.device)


def kept(model: Model, corpus: Corpus | None, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `compute` gives, from disk if it has been computed before for this model and this text.

    Args:
        corpus: the text; None if what is computed depends on the model alone.
        name: of the computation, with a version that changes when its meaning does: "neurons-1".
    """
    of = "no-text" if corpus is None else corpus.sha256[:12]
    path = folder() / f"{name}-{content_hash(model)}-{_precision(model)}-{of}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        pass
    found = {key: tensor.contiguous() for key, tensor in compute().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.saving")
    save_file(found, aside)
    aside.replace(path)
    return found


def folder() -> Path:
    """Where results are kept: the user's cache folder."""
    return Path(platformdirs.user_cache_dir("tiny-gpt-workbench", appauthor=False)) / "results"


def _precision(model: Model) -> str:
    return str(model.unembed.W_U.dtype).removeprefix("torch.")
