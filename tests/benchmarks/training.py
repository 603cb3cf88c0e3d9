"""How fast training is, beside a plain loop in the manner of nanoGPT: same model, same batch, in one run.

    python -m tests.benchmarks.training --data TEXT [--threads N] [--target 1.60] [--out FILE.csv]

Throughput: both loops in turn, each in a process of its own, several times; characters per second are medians over the
steps of a process, ratios are taken within a turn. Time to a loss: each loop runs with its own recipe until the loss over
the whole validation split, measured alike and not counted, is at most the target. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from models import run, training
from models.config import PRESETS, GPTConfig, Recipe
from models.corpus import Corpus, read
from models.gpt import GPT, Dropout
from models.losses import corpus_loss
from models.run import describe_device
from models.training import pick_device

WARM_UP, MEASURED, TURNS = 10, 40, 5
EVALUATE_EVERY = 100


class PlainLoop:
    """One AdamW, PyTorch's own dropout, a batch of slices: what most people write. Constants are nanoGPT's for Shakespeare."""

    peak, lowest, warmup, steps = 1e-3, 1e-4, 100, 5000

    def __init__(self, config: GPTConfig, recipe: Recipe, ids: np.ndarray, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.gpt = GPT(config).to(device)
        for module in list(self.gpt.modules()):
            for name, child in module.named_children():
                if isinstance(child, Dropout):
                    setattr(module, name, nn.Dropout(child.p))
        matrices = [p for p in self.gpt.parameters() if p.ndim >= 2]
        others = [p for p in self.gpt.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        fused = {"fused": True} if device.type == "cuda" else {}
        self.optimiser = torch.optim.AdamW(groups, lr=self.peak, betas=(0.9, 0.99), **fused)
        self.ids, self.batch_size, self.device, self.step = ids, recipe.batch_size, device, 0
        self.forward = torch.compile(self.gpt) if device.type == "cuda" else self.gpt

    def batch(self) -> tuple[Tensor, Tensor]:
        T = self.gpt.config.n_ctx
        starts = torch.randint(len(self.ids) - T, (self.batch_size,)).tolist()
        x = torch.stack([torch.from_numpy(self.ids[start : start + T]) for start in starts])
        y = torch.stack([torch.from_numpy(self.ids[start + 1 : start + 1 + T]) for start in starts])
        return x.to(self.device), y.to(self.device)

    def update(self) -> None:
        share = min(1.0, max(0.0, (self.step - self.warmup) / (self.steps - self.warmup)))
        rate = self.lowest + (self.peak - self.lowest) * (1 + math.cos(math.pi * share)) / 2
        for group in self.optimiser.param_groups:
            group["lr"] = rate * min(1.0, (self.step + 1) / (self.warmup + 1))
        self.gpt.train()
        low = torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")
        with low:
            _, loss = self.forward(*self.batch())
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.gpt.parameters(), 1.0)
        self.optimiser.step()
        self.step += 1

    def steps_with_model(self) -> Iterator[tuple[int, GPT]]:
        while True:
            self.update()
            yield self.step, self.gpt


class Reached(Exception):
    """The measured process has what it wanted; nothing is saved."""


def our_loop(config: GPTConfig, recipe: Recipe, corpus: Corpus, device: torch.device, seen: Callable[[int, GPT], None]) -> None:
    """The workbench's own training loop, `models.training.train` as it is, watched after every step."""
    draw, current = training.batch, []
    initialise = run.Run.__init__

    def watched_run(self: run.Run, *args: object, **options: object) -> None:
        initialise(self, *args, **options)  # type: ignore[arg-type]
        current.append(self)

    def watched_batch(ids: np.ndarray, step: int, *args: object) -> tuple[Tensor, Tensor]:
        if step:
            seen(step, current[0].gpt)
        return draw(ids, step, *args)  # type: ignore[arg-type]

    run.Run.__init__, training.batch = watched_run, watched_batch  # type: ignore[method-assign, assignment]
    run.Run.save = lambda self: None  # type: ignore[method-assign]
    out = Path("unsaved")
    recipe = replace(recipe, evaluate_every=recipe.iterations)
    training.train(config, recipe, corpus, out, device=device.type, show_progress=False)


def watch(
    loop: str, config: GPTConfig, recipe: Recipe, corpus: Corpus, device: torch.device, seen: Callable[[int, GPT], None]
) -> None:
    try:
        if loop == "ours":
            our_loop(config, recipe, corpus, device, seen)
        else:
            plain = PlainLoop(config, recipe, corpus.encoded("train", corpus.vocabulary()), device)
            for step, gpt in plain.steps_with_model():
                seen(step, gpt)
    except Reached:
        pass


def throughput(loop: str, config: GPTConfig, recipe: Recipe, corpus: Corpus, device: torch.device) -> dict[str, float]:
    """Characters per second of one loop: median over the steps after a warm-up."""
    times: list[float] = []

    def seen(step: int, gpt: GPT) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        if len(times) > WARM_UP + MEASURED:
            raise Reached

    watch(loop, config, recipe, corpus, device, seen)
    seconds = statistics.median(b - a for a, b in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False))
    return {"characters_per_second": recipe.batch_size * config.n_ctx / seconds}


def time_to(
    target: float, loop: str, config: GPTConfig, recipe: Recipe, corpus: Corpus, device: torch.device
) -> dict[str, float]:
    """Seconds of training until the validation loss is at most the target; the validations themselves are not counted."""
    ids = corpus.encoded("validation", corpus.vocabulary())
    result: dict[str, float] = {}
    spent, since = 0.0, time.perf_counter()

    def seen(step: int, gpt: GPT) -> None:
        nonlocal spent, since
        if step % EVALUATE_EVERY:
            return
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent += time.perf_counter() - since
        gpt.eval()
        loss = corpus_loss(lambda idx: gpt(idx)[0], ids, config.n_ctx, device)
        gpt.train()
        print(f"  {loop:6} step {step:5}  {spent:7.1f} s  validation loss {loss:.4f}", file=sys.stderr, flush=True)
        if loss <= target:
            result.update(steps=step, seconds=spent, validation_loss=loss)
            raise Reached
        since = time.perf_counter()

    watch(loop, config, recipe, corpus, device, seen)
    if not result:
        raise SystemExit(f"the {loop} loop ended above {target}")
    return result


def in_own_process(options: argparse.Namespace, loop: str, what: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.training", "--data", str(options.data), "--preset", options.preset]
    command += ["--threads", str(options.threads), "--target", str(options.target), "--device", options.device]
    done = subprocess.run([*command, "--loop", loop, "--what", what], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--preset", default="baby")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", type=float, default=1.60)
    parser.add_argument("--only-throughput", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--loop", choices=["plain", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=["throughput", "time"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = pick_device(options.device)
    torch.set_num_threads(options.threads)
    if options.loop:
        arguments = (options.loop, *PRESETS[options.preset], read(options.data), device)
        measured = throughput(*arguments) if options.what == "throughput" else time_to(options.target, *arguments)
        print(json.dumps(measured))
        return
    print(f"{options.preset}, {describe_device(device)}, torch {torch.__version__}")
    rows: list[dict[str, object]] = []
    ratios = []
    for turn in range(TURNS):
        speeds = {loop: in_own_process(options, loop, "throughput")["characters_per_second"] for loop in ("plain", "ours")}
        ratios.append(speeds["ours"] / speeds["plain"])
        rows.append({"what": f"characters per second, turn {turn + 1}", **speeds, "ratio": ratios[-1]})
        print(
            f"turn {turn + 1}: plain {speeds['plain']:,.0f}, ours {speeds['ours']:,.0f} characters per second, {ratios[-1]:.2f}×"
        )
    print(f"throughput: {statistics.median(ratios):.2f}× (median of {TURNS}; {min(ratios):.2f} to {max(ratios):.2f})")
    if not options.only_throughput:
        reached = {loop: in_own_process(options, loop, "time") for loop in ("plain", "ours")}
        seconds = {loop: found["seconds"] for loop, found in reached.items()}
        ratio = seconds["plain"] / seconds["ours"]
        rows.append({"what": f"seconds to a validation loss of {options.target}", **seconds, "ratio": ratio})
        for loop, found in reached.items():
            print(f"{loop}: {found['validation_loss']:.4f} after {found['steps']} steps, {found['seconds']:.0f} s")
        print(f"time to {options.target}: {ratio:.2f}× sooner")
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["what", "plain", "ours", "ratio"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
