"""Self-check of a checkpoint: the identities that every model here must satisfy, measured.

Each check says what was measured, what is expected, and whether it holds. None is skipped silently: one that could not be
made has `passed=None` and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models import reference
from models.checkpoint import Checkpoint
from models.config import parameter_count
from models.corpus import Corpus
from models.gpt import GPT
from models.hooked import parity, to_hooked
from models.losses import validation_loss
from models.run import LOG, recorded_loss
from models.vocabulary import VocabularyError


@dataclass(frozen=True)
class Check:
    name: str
    measured: str
    expected: str
    passed: bool | None  # None: it could not be made, and `measured` says why


class Stage(NamedTuple):
    """A tensor on its way through the model: hook name, its axes' names, its shape."""

    name: str
    axes: str
    shape: tuple[int, ...]


def verify(found: Checkpoint, corpus: Corpus | None = None) -> list[Check]:
    """All checks of a checkpoint; the one on validation loss needs the corpus that it was trained on."""
    gpt = found.gpt
    hooked, double = to_hooked(gpt), deepcopy(gpt).double()
    hooked_double = to_hooked(double)
    kind = type(hooked).__name__  # a HookedTransformer, or under TransformerLens 4 the bridge
    checks = [
        _bounded(f"GPT = {kind}, float32 (largest difference of logits)", parity(gpt, hooked), 5e-5),
        _bounded(f"GPT = {kind}, float64", parity(double, hooked_double), 1e-10),
        _bounded("GPT = loop over heads, float64", _reference_difference(double), 1e-10),
        _causality("causality, GPT", lambda idx: double(idx)[0], double),
        _causality(f"causality, {kind}", hooked_double, double),
        _simplex(double, hooked_double),
        _parameters(gpt),
        _loss(found, corpus),
    ]
    return checks


def shapes(found: Checkpoint, batch: int = 1, length: int | None = None) -> list[Stage]:
    """The tensor's shape after every stage of a forward pass, measured on random characters."""
    hooked = to_hooked(found.gpt)
    idx = random_windows(found.gpt, batch)[:, :length]
    with torch.no_grad():
        logits, cache = hooked.run_with_cache(idx)
    stages = [Stage("tokens", "batch position", tuple(idx.shape))]
    stages += [Stage(name, _axes(name, activation), tuple(activation.shape)) for name, activation in cache.items()]
    return [*stages, Stage("logits", "batch position d_vocab", tuple(logits.shape))]


def _axes(name: str, activation: Tensor) -> str:
    last = name.rsplit(".", 1)[-1]
    if last in ("hook_attn_scores", "hook_pattern"):
        return "batch head query_position key_position"
    if last in ("hook_q", "hook_k", "hook_v", "hook_z"):
        return "batch position head d_head"
    if ".mlp." in name:
        return "batch position neuron"
    if last == "hook_scale":
        return "batch position 1"
    return "batch position d_model"


def random_windows(gpt: GPT, batch: int, seed: int = 0) -> Tensor:
    """Random characters (batch, n_ctx) on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(gpt.config.d_vocab, (batch, gpt.config.n_ctx), generator=generator)
    return idx.to(next(gpt.parameters()).device)


def _bounded(name: str, measured: float, bound: float) -> Check:
    return Check(name, f"{measured:.1e}", f"at most {bound:.0e}", measured <= bound)


@torch.no_grad()
def _reference_difference(gpt: GPT) -> float:
    idx = random_windows(gpt, 4)
    return (gpt(idx)[0] - reference.forward(gpt, idx)).abs().max().item()


@torch.no_grad()
def leak(logits_of: Callable[[Tensor], Tensor], idx: Tensor, d_vocab: int) -> tuple[float, float]:
    """Change each character of one text in turn, of a long one 64 evenly spaced ones, and compare the logits.

    Args:
        idx: ids (position,).

    Returns:
        The largest change of a logit before the changed place (0 where the future is hidden), and the smallest, over
        places, of the largest change at that place (above 0 where the change was seen at all).
    """
    T = len(idx)
    places = torch.linspace(0, T - 1, min(T, 64), device=idx.device).round().long()
    rows = torch.arange(len(places), device=idx.device)
    changed = idx.repeat(len(places), 1)
    changed[rows, places] = (idx[places] + 1) % d_vocab
    difference = (logits_of(changed) - logits_of(idx[None])).abs().amax(-1)  # changed place, position
    before = torch.arange(T, device=idx.device) < places[:, None]
    return difference[before].max().item() if T > 1 else 0.0, difference[rows, places].min().item()


def _causality(name: str, logits_of: Callable[[Tensor], Tensor], gpt: GPT) -> Check:
    past, present = leak(logits_of, random_windows(gpt, 1)[0], gpt.config.d_vocab)
    measured = f"{past:.1e} before the changed character, {present:.1e} or more at it"
    return Check(name, measured, "at most 1e-12 before, above 1e-6 at it", past <= 1e-12 and present > 1e-6)


@torch.no_grad()
def _simplex(gpt: GPT, hooked: Callable) -> Check:
    idx = random_windows(gpt, 2)
    _, cache = hooked.run_with_cache(idx, names_filter=lambda name: name.endswith("hook_pattern"))  # type: ignore[attr-defined]
    patterns = [*reference.attention_patterns(gpt, idx), *cache.values()]
    if not patterns:
        return Check("attention rows are probabilities over the past", "the model has no attention", "", None)
    stacked = torch.stack(patterns)
    lowest, off = stacked.min().item(), (stacked.sum(-1) - 1).abs().max().item()
    future = stacked.triu(diagonal=1).abs().max().item()
    measured = f"smallest weight {lowest:.1e}, rows sum to 1 within {off:.1e}, largest weight on the future {future:.1e}"
    holds = lowest >= 0 and off <= 1e-12 and future == 0
    return Check("attention rows are probabilities over the past", measured, "≥ 0, within 1e-12, exactly 0", holds)


def _parameters(gpt: GPT) -> Check:
    counted, on_paper = sum(p.numel() for p in gpt.parameters()), parameter_count(gpt.config)
    return Check("number of parameters", f"{counted:,}", f"{on_paper:,} by the formula", counted == on_paper)


def _loss(found: Checkpoint, corpus: Corpus | None) -> Check:
    name, account = "validation loss, nats per character", found.training
    recorded = recorded_loss(found.path) if (found.path / LOG).is_file() else account.get("validation_loss")
    recorded_on = account.get("corpus_sha256", account.get("measured_on_sha256"))
    if corpus is None:
        return Check(name, "not measured: no corpus at hand; `workbench verify NAME --data TEXT` measures it", "", None)
    try:
        loss = validation_loss(found.gpt, corpus, found.vocabulary)
    except VocabularyError as error:
        return Check(name, f"not measured: {error}", "", None)
    if recorded is None or recorded_on not in (None, corpus.sha256):
        why = "nothing recorded to compare with" if recorded is None else "what is recorded was measured on another text"
        return Check(name, f"{loss:.4f} on {corpus.name}", why, None)
    expected = f"{recorded:.4f} as recorded, within 1e-3"
    return Check(name, f"{loss:.4f} on {corpus.name}", expected, abs(loss - recorded) <= 1e-3)
