"""Numbers of every hook point and every analysis, from a model whose weights no version of anything can change.

`reference_numbers.json` holds them as a `HookedTransformer` of TransformerLens 3.9 gives them, for TransformerLens 4, which
has none. Made anew, after an analysis is added or means to give other numbers, by

    PYTHONPATH=. .venv/bin/python tests/analyses/reference_numbers.py
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import xarray as xr

from analyses import over_corpus
from analyses.catalogue import ANALYSES
from analyses.passage import PASSAGE
from models import corpus
from models.checkpoint import Checkpoint
from models.config import GPTConfig
from models.gpt import GPT
from models.hooked import content_hash, encode, to_hooked
from models.vocabulary import Vocabulary

STORED = Path(__file__).with_suffix(".json")
TEXT = "KING RICHARD III:\nNow"
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@torch.no_grad()
def reference_model(convert: Callable[..., Any] = to_hooked) -> Any:
    """Two blocks, two heads, every norm and bias, float64, and made-up mean activations beside it, as mean ablation needs them.

    The weights are a fixed sequence, not PyTorch's generator. `convert` is `to_hooked` or `to_bridge`.
    """
    gpt = GPT(GPTConfig(n_ctx=64, d_model=16, n_layers=2, n_heads=2, bias_qkv=True, bias_unembed=True)).double().eval()
    draw = np.random.RandomState(0)  # NumPy keeps this one as it is for good
    for parameter in gpt.parameters():
        values = torch.from_numpy(draw.standard_normal(tuple(parameter.shape)))
        parameter.copy_(values / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else 0.3 * values + (parameter == 1))
    vocabulary = Vocabulary(tuple(CHARACTERS))
    model = convert(gpt, vocabulary)
    _, cache = model.run_with_cache(torch.zeros(1, 1, dtype=torch.int64))
    means = {f"mean.{site}": torch.from_numpy(draw.standard_normal(tuple(cache[site].shape[2:]))) for site in sorted(cache)}
    weights = torch.tensor(list(content_hash(model).encode()), dtype=torch.uint8)
    model.checkpoint = Checkpoint(Path("reference"), gpt, vocabulary, None, None, means | {"weights": weights}, {})
    return model


def digest(values: np.ndarray) -> Any:
    """A number that changes with every value and with their order; texts as they are, long ones as their hash."""
    if values.dtype.kind not in "fiub":
        text = "".join(map(str, values.ravel()))
        return text if len(text) <= 100 else hashlib.sha256(text.encode()).hexdigest()
    weights = np.cos(np.arange(1, values.size + 1))
    return float((np.where(np.isinf(values), -1.0, values).ravel() * weights).sum())


@torch.no_grad()
def hook_numbers(model: Any) -> dict[str, tuple[float, float]]:
    """Per hook point: its activation, and the logits when it is bent to 0.9 x + 0.1 (scores where they are finite)."""
    tokens = encode(model, TEXT)[None]
    _, cache = model.run_with_cache(tokens)
    found = {}
    for name, activation in cache.items():
        logits = model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: 0.9 * x + 0.1)])
        found[name] = digest(activation.numpy()), digest(logits.numpy())
    return found


def dataset_numbers(dataset: xr.Dataset) -> dict[str, Any]:
    """Per variable and coordinate of a result: its dimensions and its digest."""
    return {str(name): [*variable.dims, digest(variable.values)] for name, variable in sorted(dataset.variables.items())}


def main() -> None:
    model = reference_model()
    if type(model).__name__ != "HookedTransformer":
        raise SystemExit("these numbers are those of TransformerLens 3.9, and this is another version")
    with TemporaryDirectory() as folder:  # the corpus at hand is the passage, as in the tests
        text = Path(folder) / "passage.txt"
        text.write_text(PASSAGE, encoding="utf-8")
        os.environ[corpus.VARIABLE] = str(text)
        over_corpus.folder = lambda: Path(folder)
        numbers = {
            "hash": content_hash(model),
            "hooks": hook_numbers(model),
            "analyses": {analysis.slug: dataset_numbers(analysis(model)) for analysis in ANALYSES},
        }
    STORED.write_text(json.dumps(numbers, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
