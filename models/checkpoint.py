"""Checkpoints: one folder each, `model.safetensors` beside a readable `config.json`.

    baby/  model.safetensors         weights, float32 or float16
           config.json               architecture, vocabulary, preset, recipe
           statistics.safetensors    mean activations over the training split (models.statistics)
           training.csv  README.md   the run and the model card
           resume/                   while training: latest weights, optimiser, progress

Nothing here is a pickle. A save is one directory, written aside and renamed whole (`replace_directory`), so that a
process killed at any moment leaves either the old checkpoint or the new one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import ConfigError, GPTConfig, Recipe, Stored
from models.errors import WorkbenchError
from models.gpt import GPT
from models.vocabulary import Vocabulary, VocabularyError

WEIGHTS, CONFIG, STATISTICS = "model.safetensors", "config.json", "statistics.safetensors"
SAVING, PREVIOUS = ".saving", ".previous"  # what a save has aside: hidden folders `.NAME.saving` and `.NAME.previous`
INSTALLED = Path(__file__).resolve().parent.parent / "checkpoints"


class CheckpointError(WorkbenchError):
    """A checkpoint is missing, broken or not a checkpoint; the message says what it is and what to do."""


@dataclass(frozen=True)
class Checkpoint:
    """A trained GPT with all that belongs to it."""

    path: Path
    gpt: GPT
    vocabulary: Vocabulary
    preset: str | None
    recipe: Recipe | None
    statistics: Mapping[str, Tensor]  # empty where the folder has none
    training: Mapping[str, Any]  # device, corpus, steps, seconds, losses; empty where it is not known

    @property
    def name(self) -> str:
        """The folder's name; with its film's for a moment of one: `baby-film/step-00400`."""
        film = self.path.parent.name
        return f"{film}/{_own_name(self.path)}" if film.endswith("-film") else _own_name(self.path)

    @property
    def config(self) -> GPTConfig:
        return self.gpt.config


# --- finding ---------------------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    try:
        return (path / WEIGHTS).is_file() and (path / CONFIG).is_file()
    except OSError:  # a name that no file can have
        return False


def available() -> dict[str, Path]:
    """Checkpoints by name: those under ./checkpoints, then those installed with the package."""
    found: dict[str, Path] = {}
    for folder in (Path("checkpoints"), INSTALLED):
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                name = _own_name(path)
                unfinished = path.name.startswith(".") and path.name.endswith(SAVING)
                if is_checkpoint(path) and not unfinished and (name == path.name or not (folder / name).exists()):
                    found.setdefault(name, path)
    return found


def find(name: str | Path) -> Path:
    """The folder of a checkpoint, given its path or its name.

    Raises:
        CheckpointError: there is none; the message lists the names that exist.
    """
    for path in (Path(name), Path("checkpoints") / name, INSTALLED / name):
        for place in (path, _aside(path, PREVIOUS)):  # the second is there alone for a moment of a save, or after a kill in it
            if is_checkpoint(place):
                return place
    path = Path(name)
    known = ", ".join(available()) or "none"
    if len(path.name) < 256 and path.is_file():
        what, ours = describe_file(path), path.name == WEIGHTS and is_checkpoint(path.parent)
        way = (
            f"give its folder {path.parent}" if ours else f"import it first with `workbench import {path} --out checkpoints/NAME`"
        )
        way = f"; {way}" if what.startswith(("a zip archive", "a Python pickle", "a safetensors file")) else ""
        raise CheckpointError(f"{path} is {what}; expected the folder of a checkpoint, or one of: {known}{way}")
    for folder in (path, Path("checkpoints") / name, INSTALLED / name):
        moments = sorted(place for place in folder.glob("step-*") if is_checkpoint(place)) if len(path.name) < 256 else []
        if moments:
            raise CheckpointError(f"{name} is a film: give one of its moments, such as {Path(name) / moments[0].name}")
    if len(path.name) < 256 and path.is_dir():
        lacking = " and ".join(part for part in (WEIGHTS, CONFIG) if not (path / part).is_file())
        raise CheckpointError(f"the folder {path} has no {lacking}, so it is not a checkpoint; known names: {known}")
    raise CheckpointError(f"there is no checkpoint {str(name)!r}; give the path of its folder, or one of: {known}")


def describe_file(path: Path) -> str:
    """What a file is, from its first bytes: for messages about wrong files."""
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "an empty file"
    if head.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the weights themselves (run `git lfs pull`)"
    if head.lstrip()[:1] == b"<":
        return "an HTML or XML page (a download that went to a web page?)"
    if head.startswith(b"PK"):
        return "a zip archive (a PyTorch .pt file?)"
    if head.startswith(b"\x80"):
        return "a Python pickle"
    if head[8:9] == b"{":
        return "a safetensors file"
    return "a file of an unknown kind"


# --- loading ---------------------------------------------------------------------------------------------------------


def load_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; a wrong or truncated file is a CheckpointError that says what it is."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError) as error:
        what = describe_file(path)
        what = "a truncated or damaged safetensors file" if what == "a safetensors file" else what
        raise CheckpointError(f"{path} is {what}; expected safetensors weights: fetch or train it again ({error})") from None


def read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / CONFIG} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict) or not {"architecture", "vocabulary"} <= values.keys():
        raise CheckpointError(f"{path / CONFIG}: expected the keys 'architecture' and 'vocabulary'")
    return values


def load(name: str | Path) -> Checkpoint:
    """Load a checkpoint by name or path, and check it whole.

    Raises:
        CheckpointError: it is missing, its parts contradict each other, or a weight is not finite.
    """
    path = find(name)
    values = read_config(path)
    try:
        config = GPTConfig.from_dict(values["architecture"])
        vocabulary = Vocabulary(tuple(values["vocabulary"]))
        recipe = Recipe.from_dict(values["recipe"]) if values.get("recipe") else None
    except (ConfigError, VocabularyError, TypeError) as error:
        raise CheckpointError(f"{path / CONFIG}: {error}") from None
    if len(vocabulary) != config.d_vocab:
        raise CheckpointError(
            f"{path / CONFIG}: the vocabulary has {len(vocabulary)} characters, the architecture d_vocab = {config.d_vocab}; "
            "they must be equal"
        )
    with torch.random.fork_rng(devices=[]):  # weights are drawn and overwritten; nobody's generator should notice
        gpt = GPT(config)
    fill(gpt, load_weights(path / WEIGHTS), path / WEIGHTS)
    statistics = load_weights(path / STATISTICS) if (path / STATISTICS).is_file() else {}
    return Checkpoint(path, gpt.eval(), vocabulary, values.get("preset"), recipe, statistics, values.get("training") or {})


def require_finite(name: str, tensor: Tensor, source: Path) -> None:
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{source}: {name} holds values that are not finite; the training diverged or the file is damaged")


def weights_of(gpt: GPT) -> dict[str, Tensor]:
    """The model's own tensors, contiguous and on the CPU; a tied unembedding is left out."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in gpt.state_dict().items()}
    if gpt.config.tied:
        del state["unembedding.weight"]
    return state


def stored(weights: Mapping[str, Tensor], precision: Stored) -> dict[str, Tensor]:
    """Weights as they are kept on disk: in float32, or rounded to float16."""
    return {name: tensor.to(getattr(torch, precision)) for name, tensor in weights.items()}


def fill(gpt: GPT, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Put tensors into a model after checking names, shapes and finiteness against it."""
    expected = weights_of(gpt)
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        parts = [f"lacks {missing[0]!r} ({len(missing)} in all)"] if missing else []
        parts += [f"has {extra[0]!r} ({len(extra)} in all), which the model has not"] if extra else []
        raise CheckpointError(f"{source} {' and '.join(parts)}; it does not fit the architecture in {CONFIG}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise CheckpointError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the architecture in {CONFIG} asks for "
                f"{tuple(expected[name].shape)}"
            )
        require_finite(name, tensor.to(torch.float32), source)
    complete = dict(tensors)
    if gpt.config.tied:
        complete["unembedding.weight"] = complete["token_embedding.weight"]
    gpt.load_state_dict({name: tensor.to(torch.float32) for name, tensor in complete.items()})


# --- saving ----------------------------------------------------------------------------------------------------------


def write_config(
    folder: Path,
    config: GPTConfig,
    vocabulary: Vocabulary,
    preset: str | None = None,
    recipe: Recipe | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write `config.json` into a folder that `replace_directory` gave."""
    values = {
        "preset": preset,
        "architecture": config.to_dict(),
        "recipe": recipe.to_dict() if recipe else None,
        "training": dict(training) if training else None,
        "vocabulary": "".join(vocabulary.characters),
    }
    (folder / CONFIG).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(
    path: str | Path,
    gpt: GPT,
    vocabulary: Vocabulary,
    preset: str | None = None,
    recipe: Recipe | None = None,
    training: Mapping[str, Any] | None = None,
) -> Path:
    """Save a model as a checkpoint folder; files beside the weights and the configuration stay as they are.

    Raises:
        CheckpointError: the folder exists and is something else than a checkpoint; or what was given could not be
            loaded again, because the vocabulary has another size than d_vocab or a weight is not finite.
    """
    path, tensors = Path(path), weights_of(gpt)
    if len(vocabulary) != gpt.config.d_vocab:
        raise CheckpointError(f"got {len(vocabulary)} characters for d_vocab = {gpt.config.d_vocab}; they must be equal")
    for name, tensor in tensors.items():
        require_finite(name, tensor, path)
    with replace_directory(path) as folder:
        save_file(tensors, folder / WEIGHTS)
        write_config(folder, gpt.config, vocabulary, preset, recipe, training)
    return path


@contextmanager
def replace_directory(path: Path) -> Iterator[Path]:
    """Give a folder that starts as a copy of `path` and takes its place whole when the block ends well.

    A block that raises leaves `path` as it was. So does a process killed at any moment: at worst the old folder is then
    called `.NAME.previous`, where `find` still sees it and the next save moves it back. One process saves at a time; any
    number may read.
    """
    path = Path(os.path.realpath(path))
    recover(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is {describe_file(path)}; a checkpoint is a folder: give another path")
    if path.is_dir() and any(path.iterdir()) and not is_checkpoint(path):
        raise CheckpointError(f"the folder {path} exists and is not a checkpoint; give another path, so that nothing is lost")
    aside, previous = _aside(path, SAVING), _aside(path, PREVIOUS)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        if path.is_dir():
            shutil.copytree(path, aside)
        else:
            aside.mkdir()
        yield aside
        if path.is_dir():
            os.rename(path, previous)
        os.rename(aside, path)
        shutil.rmtree(previous, ignore_errors=True)
    except BaseException:
        recover(path)
        shutil.rmtree(aside, ignore_errors=True)
        raise


def recover(path: Path) -> None:
    """Finish what a killed save left: move the previous folder back if `path` is gone, drop it if `path` is there."""
    path = Path(os.path.realpath(path))
    previous = _aside(path, PREVIOUS)
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
    elif previous.is_dir():
        os.rename(previous, path)


def _aside(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}{suffix}"


def _own_name(path: Path) -> str:
    """A folder's name; for one that a killed save left as `.NAME.previous`, NAME."""
    aside = path.name.startswith(".") and path.name.endswith(PREVIOUS)
    return path.name.removeprefix(".").removesuffix(PREVIOUS) if aside else path.name
