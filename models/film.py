"""Films: the moments of one training run, each a checkpoint of its own, so that analyses can be watched over training.

baby-film/  step-00000/  step-00010/  …   README.md (the film's card)
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from models import checkpoint
from models.card import HeadScores, head_scores
from models.checkpoint import Checkpoint, CheckpointError
from models.corpus import Corpus
from models.repeated import SHORTEST, Induction, induction

MOMENT = re.compile(r"step-(\d+)")
OF_A_RUN = re.compile(r"(.+)-film/step-(\d+)")


def name_of(run: str, step: int) -> str:
    """What a moment of a run's film is called: `baby-film/step-00400`."""
    return f"{run}-film/step-{step:05d}"


def run_and_step(name: str) -> tuple[str, int | None]:
    """A checkpoint's name taken apart: the run, and the step if it is a moment of its film."""
    match = OF_A_RUN.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def moments(name: str | Path) -> dict[int, Path]:
    """The checkpoints of a film by step, in order, given the film's path or its name.

    Raises:
        CheckpointError: there is no such folder, or it holds no moments.
    """
    for folder in (Path(name), Path("checkpoints") / name, checkpoint.INSTALLED / name):
        if folder.is_dir():
            found = {
                int(match[1]): path
                for path in sorted(folder.iterdir())
                if (match := MOMENT.fullmatch(path.name)) and checkpoint.is_checkpoint(path)
            }
            if found:
                return dict(sorted(found.items()))
            raise CheckpointError(f"the folder {folder} holds no moments (step-00000 and so on); give the folder of a film")
    raise CheckpointError(f"there is no film {str(name)!r}; give its folder; `workbench train PRESET --film` makes one")


def write(name: str | Path, corpus: Corpus) -> Path:
    """Measure every moment and write the film's card, its README.md. Returns the card's path."""
    steps = moments(name)
    folder = next(iter(steps.values())).parent
    path = folder / "README.md"
    path.write_text(card({step: checkpoint.load(place) for step, place in steps.items()}, corpus), encoding="utf-8")
    return path


def card(found: dict[int, Checkpoint], corpus: Corpus) -> str:
    """The card's text: per moment the losses, and the best heads."""
    one = next(iter(found.values()))
    repeats = one.config.n_layers > 0 and one.config.n_ctx >= SHORTEST
    columns = ["step", "validation loss", "best previous-character head", "score"]
    if repeats:
        columns += ["loss before a repetition", "in it", "best induction head", "score"]
    lines = [
        f"# {one.preset or one.name}: a film\n",
        f'{len(found)} moments of one run, each a checkpoint in float16: `wb.load("{one.path.parent.name}/{one.path.name}")`. '
        "Validation loss is measured on the rounded weights, over the whole validation split of "
        f"`{corpus.name}`. The previous-character score is a mean over evenly spaced windows of that split"
        + (", loss and induction are measured on 256 random strings repeated with random periods.\n" if repeats else ".\n"),
        "| " + " | ".join(columns) + " |",
        "|" + "---:|" * len(columns),
    ]
    for step, moment in found.items():
        cells = [f"{step:,}", f"{moment.training['validation_loss']:.4f}", *_best_previous(head_scores(moment, corpus))]
        if repeats:
            cells += _best_induction(induction(moment.gpt))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _best_previous(scores: HeadScores) -> list[str]:
    return _best(scores.by_offset[1])


def _best_induction(score: Induction) -> list[str]:
    return [f"{score.first:.2f}", f"{score.later:.2f}", *_best(score.induction)]


def _best(scores: torch.Tensor) -> list[str]:
    """Name and score of the highest of (layer, head)."""
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return [f"L{layer}H{head}", f"{scores[layer, head].item():.3f}"]
