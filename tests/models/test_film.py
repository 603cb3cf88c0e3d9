"""Films and the ladder: what was measured at each moment, and what each rung was trained with."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from models import checkpoint, film, ladder, training
from models.checkpoint import CheckpointError
from models.config import PRESETS, GPTConfig, Recipe
from models.corpus import Corpus
from models.repeated import induction
from models.run import TrainingError, read_log

ALPHABET = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def corpus(corpus_text: str) -> Corpus:
    return Corpus("text", (ALPHABET + corpus_text) * 3, "0" * 64)


@pytest.fixture(scope="module")
def filmed(small_corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = GPTConfig(d_vocab=12, n_ctx=20, d_model=16, n_layers=2, n_heads=2)
    recipe = Recipe(iterations=12, batch_size=8, warmup=2, evaluate_every=6, moments=(0, 5, 12))
    out = tmp_path_factory.mktemp("films") / "small"
    training.train(config, recipe, small_corpus, out, device="cpu", film=True, show_progress=False)
    return out.with_name("small-film")


def test_moments_are_found_by_step_and_know_whose_they_are(filmed, tmp_path, monkeypatch):
    assert list(film.moments(filmed)) == [0, 5, 12]
    assert checkpoint.load(film.moments(filmed)[5]).name == "small-film/step-00005"
    shutil.copytree(filmed, tmp_path / "checkpoints" / "small-film")
    monkeypatch.chdir(tmp_path)
    assert list(film.moments("small-film")) == [0, 5, 12]
    assert checkpoint.load("small-film/step-00012").training["steps"] == 12


def test_what_is_no_film_is_told_apart(filmed, tmp_path):
    with pytest.raises(CheckpointError, match="there is no film"):
        film.moments(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no moments"):
        film.moments(film.moments(filmed)[0])
    with pytest.raises(CheckpointError, match="is a film: give one of its moments, such as .*small-film/step-00000"):
        checkpoint.load(filmed)


def test_the_film_s_card_states_what_each_moment_measures(filmed, small_corpus):
    lines = film.write(filmed, small_corpus).read_text().splitlines()
    cells = [re.split(r"\s*\|\s*", line) for line in lines if re.match(r"\| \d", line)]
    rows = {int(row[1]): row for row in cells}
    assert list(rows) == [0, 5, 12]
    for step, place in film.moments(filmed).items():
        found = checkpoint.load(place)
        score = induction(found.gpt)
        assert rows[step][2] == f"{found.training['validation_loss']:.4f}"
        assert rows[step][5:7] == [f"{score.first:.2f}", f"{score.later:.2f}"]
        layer, head = int(rows[step][7][1]), int(rows[step][7][3])
        assert f"{score.induction[layer, head].item():.3f}" == rows[step][8] == f"{score.induction.max().item():.3f}"


def test_the_ladder_trains_what_is_missing_and_tabulates_all(corpus, tmp_path):
    path = ladder.climb(tmp_path, corpus, iterations=6)
    table = path.read_text()
    for name in ladder.RUNGS:
        found = checkpoint.load(tmp_path / name)
        assert found.config == PRESETS[name].model
        assert found.recipe == training.with_options(*PRESETS[name], iterations=6)[1]
        losses = [float(row["validation_loss"]) for row in read_log(tmp_path / name)]
        (row,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
        assert f"**{min(losses):.3f}**" in row
        assert row.endswith(" | ".join(f"{loss:.3f}" for loss in losses) + " |")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    shutil.rmtree(tmp_path / "walkthrough-4.4")
    assert ladder.climb(tmp_path, corpus, iterations=6).read_text() == table  # the same run again
    changed = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert [path.parent.name for path in changed] == ["walkthrough-4.4"]
    with pytest.raises(TrainingError, match="another recipe or text"):
        ladder.climb(tmp_path, corpus, iterations=7)
    with pytest.raises(TrainingError, match="another recipe or text"):
        ladder.climb(tmp_path, replace(corpus, sha256="1" * 64), iterations=6)


def test_every_rung_adds_what_it_says():
    models = [PRESETS[name].model for name in ladder.RUNGS]
    added = [{name for name in vars(a) if getattr(a, name) != getattr(b, name)} for a, b in zip(models, models[1:], strict=False)]
    assert added == [{"mlp"}, {"n_layers"}, {"residual"}, {"extra_projection"}, {"extra_projection", "norm"}, {"final_norm"}]
    recipes = {PRESETS[name].recipe for name in ladder.RUNGS}
    assert len(recipes) == 1  # same budget and seed
