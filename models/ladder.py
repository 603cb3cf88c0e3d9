"""The ladder: the course's models 4.2 to 4.10, each with one piece more, trained alike. What does each piece buy?"""

from __future__ import annotations

from pathlib import Path

from models import card, checkpoint, training
from models.config import PRESETS, parameter_count
from models.corpus import Corpus
from models.run import read_log

RUNGS = {
    "walkthrough-4.2": "attention alone, one block",
    "walkthrough-4.4": "+ MLP",
    "walkthrough-4.6": "+ two more blocks",
    "walkthrough-4.7": "+ residual connections",
    "walkthrough-4.8": "+ extra projections, which add no new function",
    "walkthrough-4.9": "+ LayerNorm in the blocks; extra projections gone",
    "walkthrough-4.10": "+ final LayerNorm",
}
TABLE = "LADDER.md"


def climb(
    folder: str | Path, corpus: Corpus, *, iterations: int | None = None, seed: int | None = None, device: str = "cpu"
) -> Path:
    """Train every rung that is not in the folder yet, same budget and seed, and write the table.

    Returns:
        The table's path, `LADDER.md` in the folder.

    Raises:
        TrainingError: a rung in the folder was trained with another budget or seed, so that the table would compare unlike runs.
    """
    folder = Path(folder)
    for name in RUNGS:
        config, recipe = training.with_options(*PRESETS[name], iterations=iterations, seed=seed)
        path = folder / name
        if checkpoint.is_checkpoint(path):
            found = checkpoint.load(path)
            if found.recipe != recipe or found.training.get("corpus_sha256") != corpus.sha256:
                raise training.TrainingError(f"{path} was trained with another recipe or text; give a fresh folder with --out")
            if found.training.get("steps") == recipe.iterations:
                continue
            training.train(config, recipe, corpus, path, preset=name, device=device, resume=True)
        else:
            training.train(config, recipe, corpus, path, preset=name, device=device)
        card.write(path, corpus)
    path = folder / TABLE
    path.write_text(table(folder), encoding="utf-8")
    return path


def table(folder: str | Path) -> str:
    """Validation loss of every rung at every logged step, in Markdown, from the checkpoints' own logs."""
    folder = Path(folder)
    logs = {name: read_log(folder / name) for name in RUNGS}
    steps = [row["step"] for row in logs["walkthrough-4.10"]]
    losses = {name: {row["step"]: float(row["validation_loss"]) for row in log} for name, log in logs.items()}
    found = checkpoint.load(folder / "walkthrough-4.10")
    recipe = found.recipe
    assert recipe is not None
    lines = [
        "# What each piece buys\n",
        f"The course's models, each with one piece more than the one before, trained alike: {recipe.iterations:,} steps of "
        f"{recipe.batch_size} windows of {found.config.n_ctx} characters, {recipe.optimiser}, seed {recipe.seed}, on "
        f"`{found.training['corpus']}`. Validation loss in nats per character, over the whole validation split.\n",
        "| model | what is new | parameters | best | change | " + " | ".join(f"step {int(step):,}" for step in steps) + " |",
        "|---|---|---:|---:|---:|" + "---:|" * len(steps),
    ]
    before = None
    for name, piece in RUNGS.items():
        best = min(losses[name].values())
        change = "" if before is None else f"{best - before:+.3f}"
        cells = [f"{losses[name][step]:.3f}" for step in steps]
        count = parameter_count(PRESETS[name].model)
        lines.append(f"| {name} | {piece} | {count:,} | **{best:.3f}** | {change} | " + " | ".join(cells) + " |")
        before = best
    lines.append("\nAgain: `workbench ladder --out DIR`.")
    return "\n".join(lines) + "\n"
