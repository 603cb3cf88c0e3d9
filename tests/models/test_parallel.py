"""Two processes with half the batch each train as one with the whole: the same losses, step by step."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from models import checkpoint, training
from models.config import PRESETS, GPTConfig, Recipe
from models.corpus import Corpus, read
from models.run import TrainingError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
    import json, sys
    import torch
    from models import training
    from models.config import GPTConfig, Recipe
    from models.corpus import read

    torch.set_num_threads(1)
    config, recipe = (cls.from_dict(json.loads(text)) for cls, text in zip((GPTConfig, Recipe), sys.argv[3:]))
    training.train(config, recipe, read(sys.argv[1]), sys.argv[2], device="cpu", show_progress=False)
"""


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Two processes on this machine, which find each other at a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def log(out: Path) -> list[dict[str, float]]:
    with (out / "training.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def text(small_corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_text(small_corpus.text)
    return path


@pytest.mark.parametrize("repeated", [0.0, 0.5])
def test_two_processes_train_as_one_with_twice_the_batch(tmp_path, text, repeated):
    """`baby` in small: 50 steps, dropout 0, training and validation loss after every one, to 1e-4."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    config = GPTConfig(**PRESETS["baby"].model.to_dict() | dict(d_vocab=12, n_ctx=16, d_model=32, dropout=0.0))
    recipe = Recipe(iterations=50, batch_size=8, warmup=5, evaluate_every=1, repeated=repeated, periods=(2, 6))
    done = torchrun(str(script), str(text), str(tmp_path / "two"), json.dumps(config.to_dict()), json.dumps(recipe.to_dict()))
    assert done.returncode == 0, done.stderr
    whole = Recipe(**recipe.to_dict() | dict(batch_size=16))
    training.train(config, whole, read(text), tmp_path / "one", device="cpu", show_progress=False)
    ours, theirs = log(tmp_path / "two"), log(tmp_path / "one")
    assert [row["step"] for row in ours] == list(range(51))
    assert ours[50]["validation_loss"] < ours[0]["validation_loss"] - 0.05  # it did train
    for one, other in zip(ours, theirs, strict=True):
        assert one["validation_loss"] == pytest.approx(other["validation_loss"], abs=1e-4)
        assert one["training_loss"] == pytest.approx(other["training_loss"], abs=1e-4, nan_ok=True)
        assert one["characters"] == other["characters"]


def test_the_command_line_trains_with_two_processes(tmp_path, small_corpus):
    text = tmp_path / "text"
    text.write_text("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" + small_corpus.text)
    options = ["--data", str(text), "--iterations", "4", "--batch-size", "4", "--device", "cpu", "--out", str(tmp_path / "run")]
    done = torchrun("-m", "workbench", "train", "walkthrough-4.10", *options)
    assert done.returncode == 0, done.stderr
    assert log(tmp_path / "run")[-1]["characters"] == 4 * 2 * 4 * 8  # steps, processes, windows, positions
    found = checkpoint.load(tmp_path / "run")
    assert found.training["processes"] == 2
    assert done.stdout.count("README.md") == 1  # one of them speaks
    with pytest.raises(TrainingError, match="by 2 processes together, now there are 1"):
        training.train(found.config, found.recipe, read(text), tmp_path / "run", device="cpu", resume=True, show_progress=False)
