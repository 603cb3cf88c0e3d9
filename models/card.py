"""The model card: a checkpoint's README.md, written from what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models import checkpoint, importers, reference, statistics
from models.checkpoint import Checkpoint
from models.config import PRESETS, parameter_count, parameter_table
from models.corpus import Corpus, windows
from models.losses import validation_loss
from models.repeated import SHORTEST, induction
from models.run import read_log
from models.training import with_options

OFFSETS = (0, 1, 2)  # how far back a score looks
SCORED_WINDOWS = 256


@dataclass(frozen=True)
class HeadScores:
    """Mean attention of every head to the character itself, the previous one, and the one before that."""

    by_offset: Tensor  # offset layer head, 0 to 1

    @property
    def best_previous(self) -> float:
        return self.by_offset[1].max().item()


@torch.no_grad()
def head_scores(found: Checkpoint, corpus: Corpus) -> HeadScores:
    """Mean attention by offset over evenly spaced windows of the validation split.

    For offset o it is the mean of pattern[q, q − o] over all windows and all q ≥ o. The patterns are the reference
    implementation's, mask and softmax written out.
    """
    inputs, _ = windows(corpus.encoded("validation", found.vocabulary), found.config.n_ctx)
    chosen = inputs[np.unique(np.linspace(0, len(inputs) - 1, SCORED_WINDOWS).astype(int))]
    patterns = torch.stack(reference.attention_patterns(found.gpt, torch.from_numpy(chosen)))  # layer batch head query key
    means = [patterns.diagonal(-offset, -2, -1).mean((1, 3)) for offset in OFFSETS if offset < found.config.n_ctx]
    return HeadScores(torch.stack(means))


def write(path: str | Path, corpus: Corpus, beside: str | Path | None = None) -> Path:
    """Measure a checkpoint's statistics and write its card into its folder.

    Args:
        beside: a checkpoint of another recipe, whose heads' scores go into the card for comparison.

    Returns:
        The path of the card.
    """
    found = checkpoint.load(path)
    other = checkpoint.load(beside) if beside is not None else None
    statistics.add(found.path, corpus)
    text = card(found, corpus, other)
    with checkpoint.replace_directory(found.path) as folder:
        (folder / "README.md").write_text(text, encoding="utf-8")
    return found.path / "README.md"


def card(found: Checkpoint, corpus: Corpus, other: Checkpoint | None = None) -> str:
    """The card's text, in Markdown."""
    loss = validation_loss(found.gpt, corpus, found.vocabulary)
    parts = [f"# {found.preset or found.name}", _what(found), _losses(found, corpus, loss), _recipe(found)]
    if found.config.n_layers:
        parts.append(_heads(found, corpus))
        if found.config.n_ctx >= SHORTEST:
            parts.append(_induction(found))
    if other is not None:
        other_loss = validation_loss(other.gpt, corpus, other.vocabulary)
        optimiser = other.recipe.optimiser if other.recipe else "unknown"
        steps = other.training.get("steps", "?")
        scores = head_scores(other, corpus)
        intro = (
            "## The other recipe\n\nThe same architecture and data, trained for comparison and not shipped: optimiser "
            f"`{optimiser}`, {steps} steps, validation loss {other_loss:.4f}, best previous-character score "
            f"{scores.best_previous:.3f}.\n\n"
        )
        parts.append(intro + _score_table(scores))
    return "\n\n".join(parts) + "\n"


def _what(found: Checkpoint) -> str:
    c = found.config
    rows = [f"| {t.name} | {t.formula} | {t.parameters:,} |" for t in parameter_table(c)]
    activation = f"{c.activation.upper()}" if c.mlp else "no MLP"
    text = (
        f"A character-level GPT: V = {c.d_vocab} characters, T = {c.n_ctx} positions, d = {c.d_model}, L = {c.n_layers} blocks, "
        f"H = {c.n_heads} heads, {activation}, {parameter_count(c):,} parameters."
    )
    if not c.residual:
        text += (
            "\n\nIt has no residual stream. Where analyses show one, it is the *widened stream* of the exact conversion: each "
            "sublayer reads the last d coordinates written and writes d fresh ones."
        )
    return text + "\n\n| component | formula | parameters |\n|---|---|---:|\n" + "\n".join(rows)


def _losses(found: Checkpoint, corpus: Corpus, loss: float) -> str:
    stored = "; the weights are kept in float16, and the loss is that of the rounded ones" if _is_half(found) else ""
    return (
        f"## Loss\n\nValidation loss **{loss:.4f}** nats per character: mean cross-entropy over the whole validation split of "
        f"`{corpus.name}` (the last 10 % of its characters), in consecutive non-overlapping windows of {found.config.n_ctx}, "
        f"dropout off, float32{stored}."
    )


def _is_half(found: Checkpoint) -> bool:
    return any(t.dtype == torch.float16 for t in checkpoint.load_weights(found.path / checkpoint.WEIGHTS).values())


def _recipe(found: Checkpoint) -> str:
    told = found.training
    lines = []
    if "steps" in told:
        minutes = told["seconds"] / 60
        together = f" by {told['processes']} processes together" if told.get("processes", 1) > 1 else ""
        lines.append(
            f"Trained on `{told['corpus']}` (sha256 `{told['corpus_sha256']}`), on {told['device']}{together}, torch "
            f"{told['torch']}: {told['steps']:,} steps in {minutes:.1f} minutes on the clock; "
            f"the weights are those of step {told['best_step']:,}, the best by validation loss."
            + (" `training.csv` has the whole run." if read_log(found.path) else "")
        )
    elif "imported_from" in told:
        lines.append("Imported, not trained here.\n\n" + "\n".join(f"* {line}" for line in importers.report(found)))
    elif told:
        lines.append("What is known of it: " + "; ".join(f"{name} {value}" for name, value in told.items()) + ".")
    if found.recipe is not None:
        settings = ", ".join(f"{name} {value}" for name, value in found.recipe.to_dict().items())
        lines.append(f"Recipe: {settings}; dropout {found.config.dropout}, on attention {found.config.dropout_attention}.")
    again = _again(found)
    if again:
        lines.append(f"Again: `{again}`.")
    return "## Training\n\n" + "\n\n".join(lines or ["Nothing is recorded."])


def _again(found: Checkpoint) -> str | None:
    """The command that trains it anew: the preset, and whatever was asked for otherwise; None where no command would."""
    if found.preset not in PRESETS or found.recipe is None:
        return None
    preset, options = PRESETS[found.preset], []
    changes: dict[str, Any] = {}
    for name in ("iterations", "optimiser", "seed", "batch_size"):
        if getattr(found.recipe, name) != getattr(preset.recipe, name):
            changes[name] = getattr(found.recipe, name)
    for name in ("dropout", "dropout_attention"):
        if getattr(found.config, name) != getattr(preset.model, name):
            changes[name] = getattr(found.config, name)
    if with_options(*preset, **changes) != (found.config, found.recipe):
        return None
    options = [f"--{name.replace('_', '-')} {value}" for name, value in changes.items()]
    return " ".join(["workbench train", found.preset, *options, "--out DIR"])


def _heads(found: Checkpoint, corpus: Corpus) -> str:
    scores = head_scores(found, corpus)
    return (
        f"## Heads\n\nMean attention to the character itself, to the previous one, and to the one before that, over up to "
        f"{SCORED_WINDOWS} evenly spaced windows of the validation split. Best previous-character score: "
        f"**{scores.best_previous:.3f}**.\n\n" + _score_table(scores)
    )


def _induction(found: Checkpoint) -> str:
    score = induction(found.gpt)
    best = score.induction.max().item()
    intro = (
        f"## Induction\n\nOn 256 random strings, each repeated with a random period of 10 to {found.config.n_ctx // 2}: loss "
        f"**{score.first:.2f}** nats per character until one copy has been seen, **{score.later:.2f}** from there on (ln V = "
        f"{math.log(found.config.d_vocab):.2f} is chance). Mean attention to what followed the present place in earlier "
        f"copies: best **{best:.3f}**; a head that attends everywhere alike has {score.chance:.3f}.\n\n"
    )
    columns = (score.induction, score.duplicate, score.previous)
    rows = [
        f"| L{layer}H{head} | " + " | ".join(f"{column[layer, head].item():.3f}" for column in columns) + " |"
        for layer in range(found.config.n_layers)
        for head in range(found.config.n_heads)
    ]
    header = "| head | induction | the same place in earlier copies | previous character |\n|---|---:|---:|---:|\n"
    return intro + header + "\n".join(rows)


def _score_table(scores: HeadScores) -> str:
    names = ["itself", "previous character", "the one before"][: len(scores.by_offset)]
    rows = [
        f"| L{layer}H{head} | " + " | ".join(f"{value:.3f}" for value in scores.by_offset[:, layer, head].tolist()) + " |"
        for layer in range(scores.by_offset.shape[1])
        for head in range(scores.by_offset.shape[2])
    ]
    header = "| head | " + " | ".join(names) + " |\n|---" + "|---:" * len(names) + "|\n"
    return header + "\n".join(rows)
