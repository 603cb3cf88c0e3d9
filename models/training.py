"""Training: a loop that can be stopped at any moment and gone on with, exactly.

Each step's randomness (which windows, which dropout) is a function of (seed, step) alone, and every save holds weights,
optimiser state and log together. A resumed run therefore sees the same batches in the same order, and on the CPU its
losses equal the uninterrupted run's to the last bit.

This module and what it imports need only torch, numpy, safetensors and tqdm: training runs in a bare PyTorch image.
Validation loss is the mean cross-entropy in nats per character over the whole validation split, in consecutive
non-overlapping windows of n_ctx characters, dropout off, float32.
"""

from __future__ import annotations

import csv
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from models import checkpoint
from models.config import GPTConfig, Recipe
from models.corpus import Corpus, windows
from models.errors import WorkbenchError
from models.gpt import GPT
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


# --- data and schedule: functions of the step alone ------------------------------------------------------------------


def batch(ids: np.ndarray, step: int, recipe: Recipe, n_ctx: int) -> tuple[Tensor, Tensor]:
    """Random windows of step `step`: inputs and next characters, (batch, position) each."""
    starts = np.random.default_rng((recipe.seed, step)).integers(0, len(ids) - n_ctx, recipe.batch_size)
    chunk = torch.from_numpy(ids[starts[:, None] + np.arange(n_ctx + 1)])
    return chunk[:, :-1], chunk[:, 1:]


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Share of the peak learning rate at a step: linear warm-up, then a cosine down to `final_fraction`."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    share = (step - recipe.warmup) / max(1, recipe.iterations - recipe.warmup)
    return recipe.final_fraction + (1 - recipe.final_fraction) * (1 + math.cos(math.pi * min(1.0, share))) / 2


def build_optimisers(gpt: GPT, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or AdamW beside Muon for the two-dimensional matrices inside the blocks.

    Weight decay is for matrices; norms and biases have none.
    """
    named = dict(gpt.named_parameters())
    inner = [p for name, p in named.items() if recipe.optimiser == "muon" and name.startswith("blocks.") and p.ndim == 2]
    taken = {id(p) for p in inner}
    rest = [p for p in named.values() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=recipe.learning_rate, betas=(recipe.betas[0], recipe.betas[1]))
    ]
    if inner:
        optimisers.append(torch.optim.Muon(inner, lr=recipe.muon_learning_rate, weight_decay=recipe.muon_weight_decay))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak_lr"] = group["lr"]
    return optimisers


# --- measuring -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def corpus_loss(logits_of: Callable[[Tensor], Tensor], ids: np.ndarray, n_ctx: int, device: torch.device | str = "cpu") -> float:
    """Mean cross-entropy, nats per character, over all of a text in consecutive windows of n_ctx characters."""
    inputs, targets = windows(ids, n_ctx)
    total, rows = 0.0, max(1, 16384 // n_ctx)
    for start in range(0, len(inputs), rows):
        idx = torch.from_numpy(inputs[start : start + rows]).to(device)
        wanted = torch.from_numpy(targets[start : start + rows]).to(device)
        total += F.cross_entropy(logits_of(idx).flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return total / targets.size


def validation_loss(gpt: GPT, corpus: Corpus, vocabulary: Vocabulary) -> float:
    """Validation loss of a model as defined at the top of this module."""
    was_training = gpt.training
    gpt.eval()
    try:
        device = next(gpt.parameters()).device
        return corpus_loss(lambda idx: gpt(idx)[0], corpus.encoded("validation", vocabulary), gpt.config.n_ctx, device)
    finally:
        gpt.train(was_training)


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
    ) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.gpt = GPT(config, recipe.initialisation).to(device)
        self.best = checkpoint.weights_of(self.gpt)
        self.recipe, self.corpus, self.vocabulary = recipe, corpus, vocabulary
        self.out, self.device, self.preset = out, device, preset
        self.optimisers = build_optimisers(self.gpt, recipe)
        self.progress = Progress()

    def save(self) -> None:
        """One save, whole: best weights as the checkpoint, latest weights and optimiser state under `resume/`."""
        with checkpoint.replace_directory(self.out) as folder:
            save_file(self.best, folder / checkpoint.WEIGHTS)
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

    def account(self) -> dict[str, Any]:
        """How the weights came about, for `config.json` and the model card."""
        return {
            "corpus": self.corpus.name,
            "corpus_sha256": self.corpus.sha256,
            "device": describe_device(self.device),
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


# --- the loop --------------------------------------------------------------------------------------------------------


def pick_device(wanted: str = "auto") -> torch.device:
    """`auto` takes CUDA, then Apple's MPS, then the CPU; asking for what is not there is an error."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(name for name, there in present.items() if there))
    if not present.get(wanted, False):
        names = ", ".join(name for name, there in present.items() if there)
        raise TrainingError(f"device {wanted!r} is not available here; give auto or one of: {names}")
    return torch.device(wanted)


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
    return f"CPU ({name}, {torch.get_num_threads()} threads)"


def train(
    config: GPTConfig,
    recipe: Recipe,
    corpus: Corpus,
    out: str | Path,
    *,
    vocabulary: Vocabulary | None = None,
    preset: str | None = None,
    device: str = "auto",
    resume: bool = False,
    show_progress: bool = True,
) -> Path:
    """Train a GPT and keep its best weights, by validation loss, in the folder `out`.

    Args:
        vocabulary: the text's own characters unless given; must have d_vocab characters.
        resume: go on from the last save in `out`; without it `out` must not hold a checkpoint.

    Returns:
        The checkpoint's folder.

    Raises:
        TrainingError: `out` is taken, there is nothing to resume, the vocabulary has another size, or the loss is no
            longer finite. Ctrl-C passes through as KeyboardInterrupt; the last save stays.
    """
    out = Path(out)
    checkpoint.recover(out)
    vocabulary = vocabulary or corpus.vocabulary()
    if len(vocabulary) != config.d_vocab:
        raise TrainingError(
            f"{corpus.name} has {len(vocabulary)} characters, the model d_vocab = {config.d_vocab}; make them equal"
        )
    if not resume and checkpoint.is_checkpoint(out):
        raise TrainingError(f"{out} already holds a checkpoint; go on with --resume, or give another folder with --out")
    run = Run(config, recipe, corpus, vocabulary, out, pick_device(device), preset)
    if resume:
        run.restore()
    ids = corpus.encoded("train", vocabulary), corpus.encoded("validation", vocabulary)
    for part in ids:
        windows(part, config.n_ctx)  # a text too short for one window is an error before anything is trained
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _bar(run, show_progress) as bar:
        _loop(run, *ids, bar)
    return out


@contextmanager
def _bar(run: Run, shown: bool) -> Iterator[tqdm]:
    per_step = run.recipe.batch_size * run.gpt.config.n_ctx
    with tqdm(
        total=run.recipe.iterations * per_step, initial=run.progress.step * per_step, unit="char", unit_scale=True,
        disable=not shown, mininterval=0.5, desc=str(run.out),
    ) as bar:  # fmt: skip
        yield bar


def _loop(run: Run, training_ids: np.ndarray, validation_ids: np.ndarray, bar: tqdm) -> None:
    gpt, recipe, progress = run.gpt, run.recipe, run.progress
    on_cuda = run.device.type == "cuda"
    forward = torch.compile(gpt) if on_cuda else gpt
    precision = torch.autocast("cuda", torch.bfloat16) if on_cuda else nullcontext()
    losses: list[Tensor] = []
    since = time.perf_counter()
    if not progress.rows:
        _evaluate(run, validation_ids, math.nan, since)
    while progress.step < recipe.iterations:
        gpt.train()
        torch.manual_seed(int(np.random.default_rng((recipe.seed, progress.step, 1)).integers(2**62)))  # dropout
        idx, targets = (part.to(run.device) for part in batch(training_ids, progress.step, recipe, gpt.config.n_ctx))
        with precision:
            _, loss = forward(idx, targets)
        for optimiser in run.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), recipe.clip)
        factor = learning_rate_factor(progress.step, recipe)
        for optimiser in run.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimiser.step()
        losses.append(loss.detach())
        progress.step += 1
        bar.update(idx.numel())
        if progress.step % 20 == 0:
            bar.set_postfix(step=progress.step, loss=f"{loss.item():.3f}", best=f"{progress.best_loss:.4f}", refresh=False)
        if progress.step % recipe.evaluate_every == 0 or progress.step == recipe.iterations:
            mean = torch.stack(losses).double().mean().item()
            if not math.isfinite(mean):
                raise TrainingError(
                    f"the loss is no longer finite before step {progress.step}; lower the learning rate and train anew"
                )
            since = _evaluate(run, validation_ids, mean, since)
            losses = []


def _evaluate(run: Run, validation_ids: np.ndarray, training_loss: float, since: float) -> float:
    """Validate over the whole split, log, keep the weights if they are the best so far, save. Returns the time now."""
    gpt, progress = run.gpt, run.progress
    gpt.eval()
    loss = corpus_loss(lambda idx: gpt(idx)[0], validation_ids, gpt.config.n_ctx, run.device)
    if loss < progress.best_loss:
        progress.best_loss, progress.best_step = loss, progress.step
        run.best = checkpoint.weights_of(gpt)
    now = time.perf_counter()
    progress.seconds += now - since
    progress.rows.append(
        {
            "step": progress.step,
            "training_loss": training_loss,
            "validation_loss": loss,
            "learning_rate_factor": learning_rate_factor(progress.step, run.recipe),
            "characters": progress.step * run.recipe.batch_size * gpt.config.n_ctx,
            "seconds": round(progress.seconds, 3),
        }
    )
    run.save()
    return time.perf_counter()


def with_options(recipe: Recipe, iterations: int | None = None, optimiser: str | None = None, seed: int | None = None) -> Recipe:
    """A recipe with what a command line overrides; shorter runs evaluate and warm up at least as often."""
    changes: dict[str, Any] = {}
    if optimiser is not None:
        changes["optimiser"] = optimiser
    if seed is not None:
        changes["seed"] = seed
    if iterations is not None:
        changes["iterations"] = iterations
        changes["evaluate_every"] = min(recipe.evaluate_every, iterations)
        changes["warmup"] = min(recipe.warmup, iterations // 10)
    return replace(recipe, **changes)
