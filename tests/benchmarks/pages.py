"""How long a person waits for each page: every analysis on a checkpoint at its defaults, seconds, and peak memory.

    python -m tests.benchmarks.pages [--checkpoint baby] [--turns 3] [--data TEXT] [--only SLUG …] [--out FILE.csv]

Each analysis runs in a process of its own: loading is not counted, the first run is (a page's first visit), and the median
of the turns after it. What keeps its computation on disk, because it reads the whole corpus or all inputs, is marked: its
first run starts with an empty cache. Seconds depend on the machine, so each is also given as a ratio to one plain forward
pass over a full window with every hook point cached, timed in the same process. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from analyses import over_corpus
from analyses.catalogue import ANALYSES, find
from models import corpus, hooked

PASSES = 20
COLUMNS = ("analysis", "kept_on_disk", "first_s", "again_s", "in_passes", "peak_mib")


def one(slug: str, checkpoint: str, turns: int) -> dict[str, Any]:
    """An analysis in this process: seconds of the first run and of later ones, in forward passes too, and peak memory."""
    analysis, model = find(slug), hooked.load(checkpoint)
    tokens = torch.arange(model.cfg.n_ctx)[None] % model.cfg.d_vocab
    forward = statistics.median(_timed(lambda: model.run_with_cache(tokens)) for _ in range(PASSES))
    with tempfile.TemporaryDirectory() as cache:
        over_corpus.folder = lambda: Path(cache)
        first, *later = (_timed(lambda: analysis(model)) for _ in range(turns + 1))
        kept = any(Path(cache).iterdir())
    again = statistics.median(later)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return dict(zip(COLUMNS, (slug, kept, first, again, first / forward, peak), strict=True))


def _timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="baby")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--only", nargs="+", default=[analysis.slug for analysis in ANALYSES])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one, given.checkpoint, given.turns)))
        return
    rows = []
    print(f"{'analysis':24} {'first':>9} {'again':>9} {'passes':>8} {'peak':>10}")
    for slug in given.only:
        words = ["--checkpoint", given.checkpoint, "--turns", str(given.turns), "--one", slug]
        data = {corpus.VARIABLE: str(given.data.resolve())} if given.data else {}
        here = [sys.executable, "-m", "tests.benchmarks.pages"]
        done = subprocess.run([*here, *words], stdout=subprocess.PIPE, text=True, env=os.environ | data)
        if done.returncode:
            raise SystemExit(done.returncode)
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        seconds = f"{row['first_s']:7.2f} s {row['again_s']:7.2f} s {row['in_passes']:8.0f} {row['peak_mib']:6.0f} MiB"
        print(f"{slug:24} {seconds}" + "  kept on disk" * row["kept_on_disk"], flush=True)
    if given.out:
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
