"""Statistics that ship with a checkpoint: mean activations over the training split, and n-gram counts.

With them mean ablation and bigram comparisons need no corpus. They carry the content hash of the weights that they were
measured on, and are refused for any others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from models import checkpoint
from models.checkpoint import Checkpoint
from models.corpus import Corpus, windows
from models.errors import WorkbenchError
from models.hooked import content_hash, hook
from models.protocol import Model

SITES = ("hook_attn_out", "hook_mlp_out", "hook_resid_pre", "hook_resid_mid", "hook_resid_post", "mlp.hook_pre", "mlp.hook_post",
         "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z")  # fmt: skip
PREFIX = "mean."


class StatisticsError(WorkbenchError):
    """Statistics are missing or belong to other weights; the message says how to make them."""


@torch.no_grad()
def measure(found: Checkpoint, corpus: Corpus) -> dict[str, Tensor]:
    """Statistics of a checkpoint over a corpus' training split.

    Returns:
        `mean.<hook name>`: mean over all positions of all consecutive windows of n_ctx characters, accumulated in
        float64; `unigram` (char,) and `bigram` (char, following char), counts, int64; `weights`, the content hash.
    """
    model = hook(found)
    ids = corpus.encoded("train", found.vocabulary)
    inputs, _ = windows(ids, found.config.n_ctx)
    wanted = {"hook_embed", "hook_pos_embed"} | {
        name for layer in range(model.cfg.n_layers) for site in SITES if (name := f"blocks.{layer}.{site}") in model.hook_dict
    }
    sums: dict[str, Tensor] = {}
    rows = max(1, 8192 // found.config.n_ctx)
    for start in range(0, len(inputs), rows):
        idx = torch.from_numpy(inputs[start : start + rows]).to(model.cfg.device)
        _, cache = model.run_with_cache(idx, names_filter=lambda name: name in wanted)
        for name, activation in cache.items():
            total = activation.sum((0, 1), dtype=torch.float64).cpu()
            sums[name] = sums.get(name, 0) + total
    V = len(found.vocabulary)
    bigram = np.bincount(ids[:-1] * V + ids[1:], minlength=V * V).reshape(V, V)
    return {PREFIX + name: (total / inputs.size).float() for name, total in sums.items()} | {
        "unigram": torch.from_numpy(np.bincount(ids, minlength=V)),
        "bigram": torch.from_numpy(bigram),
        "weights": torch.tensor(list(content_hash(model).encode()), dtype=torch.uint8),
    }


def add(path: str | Path, corpus: Corpus) -> None:
    """Measure a checkpoint's statistics and put them into its folder."""
    found = checkpoint.load(path)
    measured = measure(found, corpus)
    with checkpoint.replace_directory(found.path) as folder:
        save_file(measured, folder / checkpoint.STATISTICS)


def mean_activation(model: Model, site: str) -> Tensor:
    """Mean activation at a hook point over the training split, without batch and position axes.

    Raises:
        StatisticsError: the model came without statistics, or its weights are not those that were measured.
    """
    found: Any = getattr(model, "checkpoint", None)
    make = "measure them with `workbench card CHECKPOINT --data TEXT`, or use zeros instead"
    if found is None or not found.statistics:
        raise StatisticsError(f"this model has no mean activations beside it; {make}")
    measured_on = bytes(found.statistics["weights"].tolist()).decode()
    if measured_on != content_hash(model):
        raise StatisticsError(f"the mean activations belong to weights {measured_on}, this model has others; {make}")
    if PREFIX + site not in found.statistics:
        raise StatisticsError(f"there is no mean activation for {site!r}; {make}")
    return found.statistics[PREFIX + site].to(model.cfg.device, model.cfg.dtype)
