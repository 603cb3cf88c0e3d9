"""Training: a loop that can be stopped at any moment and gone on with, exactly.

Each step's randomness (which windows, which dropout) is a function of (seed, step) alone, and every save holds weights,
optimiser state and log together. A resumed run therefore sees the same batches in the same order, and on the CPU its
losses equal the uninterrupted run's to the last bit.

This module and what it imports need only torch, numpy, safetensors and tqdm: training runs in a bare PyTorch image.
"""

from __future__ import annotations

import ctypes
import math
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from models import checkpoint
from models.config import GPTConfig, Recipe, Stored
from models.corpus import Corpus, windows
from models.gpt import GPT
from models.losses import corpus_loss
from models.optimisers import learning_rate_factor
from models.parallel import Processes, own_device, this_process, together
from models.repeated import repeated_strings
from models.run import Run, TrainingError, film_of
from models.vocabulary import Vocabulary

Precision = Literal["auto", "float32", "bfloat16"]


# --- data: a function of the step alone ------------------------------------------------------------------------------


def batch(
    ids: np.ndarray, step: int, recipe: Recipe, config: GPTConfig, processes: Processes | None = None
) -> tuple[Tensor, Tensor]:
    """One process' share of step `step`: inputs and next characters, (batch, position) each.

    Random windows of the text; of them the share `recipe.repeated`, evenly spread, are repeated random strings instead.
    """
    processes = processes or Processes()
    generator = np.random.default_rng((recipe.seed, step))
    rows = np.arange(recipe.batch_size * processes.count)
    starts = generator.integers(0, len(ids) - config.n_ctx, len(rows))
    chunk = ids[starts[:, None] + np.arange(config.n_ctx + 1)]
    repeated = np.floor((rows + 1) * recipe.repeated) > np.floor(rows * recipe.repeated)
    if repeated.any():
        count = int(repeated.sum())
        chunk[repeated], _ = repeated_strings(generator, count, config.n_ctx + 1, config.d_vocab, recipe.periods)
    own = torch.from_numpy(chunk[processes.rank * recipe.batch_size :][: recipe.batch_size])
    return own[:, :-1], own[:, 1:]


# --- the run ---------------------------------------------------------------------------------------------------------


def pick_device(wanted: str = "auto") -> torch.device:
    """`auto` takes CUDA, then Apple's MPS, then the CPU; asking for what is not there is an error."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(name for name, there in present.items() if there))
    if not present.get(wanted, False):
        names = ", ".join(name for name, there in present.items() if there)
        raise TrainingError(f"device {wanted!r} is not available here; give auto or one of: {names}")
    return torch.device(wanted)


def train(
    config: GPTConfig,
    recipe: Recipe,
    corpus: Corpus,
    out: str | Path,
    *,
    vocabulary: Vocabulary | None = None,
    preset: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
    resume: bool = False,
    film: bool = False,
    show_progress: bool = True,
) -> Path:
    """Train a GPT and keep its best weights, by validation loss, in the folder `out`.

    Args:
        vocabulary: the text's own characters unless given; must have d_vocab characters.
        precision: of the products in forward and backward; `auto` is bfloat16 on CUDA, float32 elsewhere. Weights,
            optimiser and validation are float32 always.
        resume: go on from the last save in `out`; without it `out` must not hold a checkpoint.
        film: keep the recipe's `moments` too, each as a checkpoint in the folder `out` + "-film".

    Started by torchrun, the processes train one model together, each with `batch_size` windows a step.

    Returns:
        The checkpoint's folder.

    Raises:
        TrainingError: `out` is taken, there is nothing to resume, the vocabulary has another size, or the loss is no
            longer finite. Ctrl-C passes through as KeyboardInterrupt; the last save stays.
    """
    out = Path(out)
    if this_process().is_first:
        checkpoint.recover(out)
    vocabulary = vocabulary or corpus.vocabulary()
    if len(vocabulary) != config.d_vocab:
        raise TrainingError(
            f"{corpus.name} has {len(vocabulary)} characters, the model d_vocab = {config.d_vocab}; make them equal"
        )
    if not resume and checkpoint.is_checkpoint(out):
        raise TrainingError(f"{out} already holds a checkpoint; go on with --resume, or give another folder with --out")
    if film and not recipe.moments:
        raise TrainingError("the recipe names no moments for a film; give some, or leave the film out")
    if film and not resume and film_of(out).exists():
        raise TrainingError(f"{film_of(out)} exists already; move it away, or give another folder with --out")
    run = Run(config, recipe, corpus, vocabulary, out, own_device(pick_device(device)), preset, this_process())
    if resume:
        run.restore()
    ids = corpus.encoded("train", vocabulary), corpus.encoded("validation", vocabulary)
    for part in ids:
        windows(part, config.n_ctx)  # a text too short for one window is an error before anything is trained
    devices = [run.device] if run.device.type == "cuda" else []
    _keep_memory()
    with torch.random.fork_rng(devices=devices), together(run.device), _bar(run, show_progress) as bar:
        run.processes.wait()  # until all have looked at `out`
        _loop(run, *ids, bar, frozenset(recipe.moments if film else ()), _autocast(run.device, precision))
        run.processes.wait()
    return out


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager:
    low = precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16) if low else nullcontext()


def _keep_memory() -> None:
    """Tell glibc to keep freed memory: a step frees and asks for the same large blocks, and each return costs page faults."""
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_threshold = -1, -3  # names in malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**30)


@contextmanager
def _bar(run: Run, shown: bool) -> Iterator[tqdm]:
    per_step = run.recipe.batch_size * run.gpt.config.n_ctx * run.processes.count
    with tqdm(
        total=run.recipe.iterations * per_step, initial=run.progress.step * per_step, unit="char", unit_scale=True,
        disable=not (shown and run.processes.is_first), mininterval=0.5, desc=str(run.out),
    ) as bar:  # fmt: skip
        yield bar


def _loop(
    run: Run,
    training_ids: np.ndarray,
    validation_ids: np.ndarray,
    bar: tqdm,
    moments: frozenset[int],
    autocast: AbstractContextManager,
) -> None:
    gpt, recipe, progress, processes = run.gpt, run.recipe, run.progress, run.processes
    forward = processes.share(gpt)
    if run.device.type == "cuda":
        forward = torch.compile(forward)  # type: ignore[assignment]
    own = () if processes.is_first else (processes.rank,)
    losses: list[Tensor] = []
    since = time.perf_counter()
    if not progress.rows:
        since = _evaluate(run, validation_ids, math.nan, since, moments)
    while progress.step < recipe.iterations:
        gpt.train()
        torch.manual_seed(int(np.random.default_rng((recipe.seed, progress.step, 1, *own)).integers(2**62)))  # dropout
        idx, targets = (part.to(run.device) for part in batch(training_ids, progress.step, recipe, gpt.config, processes))
        with autocast:
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
        bar.update(idx.numel() * processes.count)
        if progress.step % 20 == 0:
            bar.set_postfix(step=progress.step, loss=f"{loss.item():.3f}", best=f"{progress.best_loss:.4f}", refresh=False)
        is_due = progress.step % recipe.evaluate_every == 0 or progress.step == recipe.iterations
        if is_due or progress.step in moments:
            mean = processes.mean(torch.stack(losses).double().mean()).item()
            if not math.isfinite(mean):
                raise TrainingError(
                    f"the loss is no longer finite before step {progress.step}; lower the learning rate and train anew"
                )
            since = _evaluate(run, validation_ids, mean, since, moments)
            losses = []


def _evaluate(run: Run, validation_ids: np.ndarray, training_loss: float, since: float, moments: frozenset[int]) -> float:
    """Validate over the whole split, log, keep the weights if they are the best so far, save. Returns the time now."""
    if not run.processes.is_first:
        return since
    progress = run.progress

    def as_stored(precision: Stored) -> tuple[GPT, float]:
        gpt = rounded(run.gpt, precision).eval()
        return gpt, corpus_loss(lambda idx: gpt(idx)[0], validation_ids, gpt.config.n_ctx, run.device)

    gpt, loss = as_stored(run.recipe.stored)
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
            "characters": progress.step * run.recipe.batch_size * run.processes.count * gpt.config.n_ctx,
            "seconds": round(progress.seconds, 3),
        }
    )
    run.save()
    if progress.step in moments:
        run.keep_moment(*as_stored("float16"))
    return time.perf_counter()


def rounded(gpt: GPT, precision: Stored) -> GPT:
    """The model as it will be read back: itself in float32, else a copy whose weights are rounded."""
    if precision == "float32":
        return gpt
    copy = deepcopy(gpt)
    checkpoint.fill(copy, checkpoint.stored(checkpoint.weights_of(gpt), precision), Path("the model"))
    return copy


def with_options(
    config: GPTConfig,
    recipe: Recipe,
    *,
    iterations: int | None = None,
    optimiser: str | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    dropout: float | None = None,
    dropout_attention: float | None = None,
) -> tuple[GPTConfig, Recipe]:
    """A preset with what a command line overrides; shorter runs evaluate and warm up at least as often."""
    changes: dict[str, Any] = {"optimiser": optimiser, "seed": seed, "batch_size": batch_size}
    if iterations is not None:
        changes["iterations"] = iterations
        changes["evaluate_every"] = min(recipe.evaluate_every, iterations)
        changes["warmup"] = min(recipe.warmup, iterations // 10)
        changes["moments"] = tuple(step for step in recipe.moments if step <= iterations)
    dropouts = {"dropout": dropout, "dropout_attention": dropout_attention}
    return replace(config, **_given(dropouts)), replace(recipe, **_given(changes))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
