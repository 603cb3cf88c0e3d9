"""A training run as it is kept: progress, log, best and latest weights, optimiser state; saved whole, taken up exactly."""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models import checkpoint
from models.config import GPTConfig, Recipe
from models.corpus import Corpus
from models.errors import WorkbenchError
from models.gpt import GPT
from models.optimisers import build_optimisers
from models.parallel import Processes
from models.vocabulary import Vocabulary

COLUMNS = ("step", "training_loss", "validation_loss", "learning_rate_factor", "characters", "seconds")
LOG, RESUME = "training.csv", "resume"


class TrainingError(WorkbenchError):
    """Training cannot start or go on; the message says why and what to do. The last save is untouched."""


@dataclass
class Progress:
    """Where a run is. All of it goes into every save."""

    step: int = 0  # updates made
    seconds: float = 0.0  # of training, pauses left out
    best_loss: float = math.inf  # nats per character, validation
    best_step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)  # of training.csv


def film_of(out: Path) -> Path:
    """Folder of the film that belongs to a run's folder."""
    return out.with_name(f"{out.name}-film")


# --- the log ---------------------------------------------------------------------------------------------------------


def recorded_loss(folder: Path) -> float | None:
    """The best validation loss in a checkpoint's training.csv; None without one."""
    return min((float(row["validation_loss"]) for row in read_log(folder)), default=None)


def read_log(folder: Path) -> list[dict[str, str]]:
    """Rows of a checkpoint's training.csv; none without one."""
    path = folder / LOG
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- saving and going on ---------------------------------------------------------------------------------------------


def _pack_optimiser(optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    state = optimiser.state_dict()
    tensors = {
        f"{index}.{name}": torch.as_tensor(value).detach().cpu().contiguous().clone()
        for index, values in state["state"].items()
        for name, value in values.items()
        if value is not None
    }
    return tensors, state["param_groups"]


def _unpack_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    groups = [group | {"betas": tuple(group["betas"])} if "betas" in group else group for group in groups]
    optimiser.load_state_dict({"state": state, "param_groups": groups})


class Run:
    """One training run: model, optimisers, progress, and the folder that they are saved in."""

    def __init__(
        self,
        config: GPTConfig,
        recipe: Recipe,
        corpus: Corpus,
        vocabulary: Vocabulary,
        out: Path,
        device: torch.device,
        preset: str | None,
        processes: Processes,
    ) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.gpt = GPT(config, recipe.initialisation).to(device)
        self.best = checkpoint.weights_of(self.gpt)
        self.recipe, self.corpus, self.vocabulary = recipe, corpus, vocabulary
        self.out, self.device, self.preset, self.processes = out, device, preset, processes
        self.optimisers = build_optimisers(self.gpt, recipe)
        self.progress = Progress()

    def save(self) -> None:
        """One save, whole: best weights as the checkpoint, latest weights and optimiser state under `resume/`."""
        with checkpoint.replace_directory(self.out) as folder:
            save_file(checkpoint.stored(self.best, self.recipe.stored), folder / checkpoint.WEIGHTS)
            config = self.gpt.config
            checkpoint.write_config(folder, config, self.vocabulary, self.preset, self.recipe, self.account())
            with (folder / LOG).open("w", newline="") as file:
                log = csv.DictWriter(file, COLUMNS)
                log.writeheader()
                log.writerows(self.progress.rows)
            (folder / RESUME).mkdir(exist_ok=True)
            save_file(checkpoint.weights_of(self.gpt), folder / RESUME / "latest.safetensors")
            groups = []
            for number, optimiser in enumerate(self.optimisers):
                tensors, group = _pack_optimiser(optimiser)
                save_file(tensors, folder / RESUME / f"optimiser-{number}.safetensors")
                groups.append(group)
            state = {"progress": vars(self.progress), "groups": groups}
            (folder / RESUME / "state.json").write_text(json.dumps(state))

    def keep_moment(self, gpt: GPT, loss: float) -> None:
        """A model, rounded to float16, into the film: a checkpoint of its own, `step-00500` for step 500."""
        account = self.account() | {"best_step": self.progress.step, "validation_loss": loss}
        with checkpoint.replace_directory(film_of(self.out) / f"step-{self.progress.step:05d}") as folder:
            save_file(checkpoint.stored(checkpoint.weights_of(gpt), "float16"), folder / checkpoint.WEIGHTS)
            checkpoint.write_config(folder, gpt.config, self.vocabulary, self.preset, self.recipe, account)

    def account(self) -> dict[str, Any]:
        """How the weights came about, for `config.json` and the model card."""
        return {
            "corpus": self.corpus.name,
            "corpus_sha256": self.corpus.sha256,
            "device": describe_device(self.device),
            "processes": self.processes.count,
            "torch": torch.__version__,
            "steps": self.progress.step,
            "seconds": round(self.progress.seconds, 1),
            "best_step": self.progress.best_step,
            "validation_loss": self.progress.best_loss,
        }

    def restore(self) -> None:
        """Take up the last save in `out`."""
        resume = self.out / RESUME
        if not (resume / "state.json").is_file():
            raise TrainingError(f"{self.out} holds nothing to go on from; start without --resume, or give the run's --out")
        saved = checkpoint.load(self.out)
        if saved.training.get("corpus_sha256") != self.corpus.sha256:
            raise TrainingError(
                f"{self.out} was trained on another text ({saved.training.get('corpus')}); give that, or another --out"
            )
        if saved.training.get("processes", 1) != self.processes.count:
            raise TrainingError(
                f"{self.out} was trained by {saved.training.get('processes', 1)} processes together, now there are "
                f"{self.processes.count}; go on with as many, or give another --out"
            )
        if saved.config != self.gpt.config or saved.vocabulary != self.vocabulary or saved.recipe != self.recipe:
            theirs, ours = (saved.recipe, self.recipe) if saved.config == self.gpt.config else (saved.config, self.gpt.config)
            raise TrainingError(
                f"{self.out} was trained otherwise ({_difference(theirs, ours)}); go on with the same preset, options and text, "
                "or give another --out"
            )
        try:
            state = json.loads((resume / "state.json").read_text())
            progress, groups = Progress(**state["progress"]), state["groups"]
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{resume / 'state.json'} is damaged ({error}); train anew into another --out") from None
        checkpoint.fill(self.gpt, checkpoint.load_weights(resume / "latest.safetensors"), resume / "latest.safetensors")
        self.best = checkpoint.weights_of(saved.gpt)
        for number, (optimiser, group) in enumerate(zip(self.optimisers, groups, strict=True)):
            _unpack_optimiser(optimiser, checkpoint.load_weights(resume / f"optimiser-{number}.safetensors"), group)
        self.progress = progress


def _difference(saved: Any, asked: Any) -> str:
    if saved is None:
        return "it has no recipe"
    changed = [name for name in vars(asked) if getattr(saved, name) != getattr(asked, name)]
    return ", ".join(f"{name} {getattr(saved, name)!r}, now {getattr(asked, name)!r}" for name in changed) or "another vocabulary"


def _threads() -> str:
    count = torch.get_num_threads()
    return "1 thread" if count == 1 else f"{count} threads"


def describe_device(device: torch.device) -> str:
    """A device in words: the GPU's name, or the processor's and the threads used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "Apple GPU (MPS)"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    return f"CPU ({name}, {_threads()})"
