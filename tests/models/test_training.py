"""Training: it learns, it can be stopped at any moment and gone on with exactly, and it keeps the best weights."""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from safetensors.torch import load_file

from models import checkpoint, reference, training
from models import run as runs
from models.checkpoint import CheckpointError
from models.config import PRESETS, GPTConfig, Recipe
from models.corpus import Corpus, CorpusError
from models.errors import WorkbenchError
from models.gpt import GPT
from models.losses import corpus_loss, validation_loss
from models.optimisers import Muon, build_optimisers, learning_rate_factor, orthogonalise
from models.parallel import Processes
from models.run import COLUMNS, LOG, RESUME, TrainingError
from models.vocabulary import Vocabulary, VocabularyError

ROOT = Path(__file__).resolve().parents[2]
CONFIG = GPTConfig(d_vocab=12, n_ctx=8, d_model=16, n_layers=2, n_heads=2, dropout=0.1, dropout_attention=0.1)
RECIPE = Recipe(iterations=20, batch_size=8, warmup=2, evaluate_every=5, muon_learning_rate=0.05, learning_rate=1e-2)
OPTIMISERS = ("muon", "adamw")


def train(out: Path, corpus: Corpus, config: GPTConfig = CONFIG, recipe: Recipe = RECIPE, **options: Any) -> Path:
    return training.train(config, recipe, corpus, out, device="cpu", show_progress=False, **options)


def rows(out: Path) -> list[dict[str, str]]:
    """training.csv as written, without the time, which is nobody's business here."""
    with (out / LOG).open(newline="") as file:
        found = list(csv.DictReader(file))
    for row in found:
        del row["seconds"]
    return found


def validation_losses(out: Path) -> list[float]:
    return [float(row["validation_loss"]) for row in rows(out)]


def files(out: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every tensor of a run's folder: best and latest weights, optimiser state."""
    return {str(path.relative_to(out)): load_file(path) for path in sorted(out.rglob("*.safetensors"))}


def assert_same_run(one: Path, other: Path) -> None:
    """Same log and same bits in every tensor that was saved."""
    assert rows(one) == rows(other)
    ours, theirs = files(one), files(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) >= 3
    for name, tensors in ours.items():
        assert tensors.keys() == theirs[name].keys()
        assert all(torch.equal(tensor, theirs[name][key]) for key, tensor in tensors.items()), name


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Make the step with this number raise."""
    batch = training.batch

    def stopping(ids: np.ndarray, number: int, *args: Any) -> Any:
        if number == step:
            raise error
        return batch(ids, number, *args)

    monkeypatch.setattr(training, "batch", stopping)


@pytest.fixture(scope="module", params=OPTIMISERS)
def uninterrupted(request, tmp_path_factory, small_corpus) -> Iterator[tuple[Recipe, Path]]:
    """A whole run of 20 steps, with dropout, for each optimiser."""
    recipe = replace(RECIPE, optimiser=request.param)
    return recipe, train(tmp_path_factory.mktemp("run") / request.param, small_corpus, recipe=recipe)


# --- it learns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_the_loss_falls(tmp_path, small_corpus, optimiser):
    out = train(tmp_path / "run", small_corpus, recipe=replace(RECIPE, iterations=60, evaluate_every=20, optimiser=optimiser))
    losses = validation_losses(out)
    assert losses[0] == pytest.approx(math.log(12), abs=0.1)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_fifty_steps_on_one_batch_and_its_loss_plummets(tmp_path, small_corpus, monkeypatch, optimiser):
    batch = training.batch
    monkeypatch.setattr(training, "batch", lambda ids, step, *args: batch(ids, 0, *args))
    recipe = replace(RECIPE, iterations=50, evaluate_every=1, batch_size=4, optimiser=optimiser, learning_rate=2e-2)
    config = replace(CONFIG, d_model=32, dropout=0.0, dropout_attention=0.0)
    out = train(tmp_path / "run", small_corpus, config, recipe)
    losses = [float(row["training_loss"]) for row in rows(out)[1:]]
    assert losses[0] == pytest.approx(math.log(12), abs=0.1)
    assert losses[-1] < 0.1


def test_the_log_says_where_the_run_was(uninterrupted):
    recipe, out = uninterrupted
    with (out / LOG).open(newline="") as file:
        assert tuple(csv.DictReader(file).fieldnames or ()) == COLUMNS
    log = rows(out)
    assert [int(row["step"]) for row in log] == [0, 5, 10, 15, 20]
    assert [int(row["characters"]) for row in log] == [step * 8 * 8 for step in (0, 5, 10, 15, 20)]
    assert log[0]["training_loss"] == "nan"
    assert all(1 < float(row["training_loss"]) < 3 for row in log[1:])


def test_a_run_whose_length_is_no_multiple_of_the_interval_is_validated_at_its_end(tmp_path, small_corpus):
    out = train(tmp_path / "run", small_corpus, recipe=replace(RECIPE, iterations=7))
    assert [int(row["step"]) for row in rows(out)] == [0, 5, 7]


def test_a_run_with_a_seed_is_the_same_again_and_with_another_is_not(uninterrupted, tmp_path, small_corpus):
    recipe, out = uninterrupted
    assert_same_run(out, train(tmp_path / "again", small_corpus, recipe=recipe))
    other = train(tmp_path / "other", small_corpus, recipe=replace(recipe, seed=recipe.seed + 1))
    assert rows(other) != rows(out)


# --- what is kept ----------------------------------------------------------------------------------------------------


RANDOM = Corpus("random characters", "".join(random.Random(1).choices("\n abcdefghij", weights=range(1, 13), k=200)), "")


def overfit(out: Path, **options: Any) -> Path:
    """A model with room to learn 180 random characters by heart: its validation loss falls, then rises."""
    config = replace(CONFIG, d_model=32, dropout=0.0, dropout_attention=0.0)
    recipe = replace(RECIPE, iterations=150, evaluate_every=15, batch_size=16, optimiser="adamw")
    return train(out, RANDOM, config, recipe, **options)


def test_the_checkpoint_holds_the_best_weights_and_not_the_last(tmp_path, monkeypatch):
    """Also when the run was stopped after its best step and gone on with."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 140)
        with pytest.raises(KeyboardInterrupt):
            overfit(out)
    overfit(out, resume=True)
    losses = validation_losses(out)
    best = losses.index(min(losses))
    assert 0 < best < 9  # the run is of the kind that is meant
    assert losses[-1] > losses[best] + 0.3
    found = checkpoint.load(out)
    assert validation_loss(found.gpt, RANDOM, found.vocabulary) == pytest.approx(losses[best], abs=1e-6)
    latest = GPT(found.config)
    checkpoint.fill(latest, load_file(out / RESUME / "latest.safetensors"), out)
    assert validation_loss(latest, RANDOM, found.vocabulary) == pytest.approx(losses[-1], abs=1e-6)


def test_the_checkpoint_is_complete_and_none_of_it_is_a_pickle(uninterrupted, vocabulary):
    recipe, out = uninterrupted
    found = checkpoint.load(out)
    assert (found.config, found.recipe, found.vocabulary, found.preset) == (CONFIG, recipe, vocabulary, None)
    assert {path.suffix for path in out.rglob("*") if path.is_file()} == {".safetensors", ".json", ".csv"}


def test_the_preset_s_name_is_kept(tmp_path, small_corpus):
    out = train(tmp_path / "run", small_corpus, recipe=replace(RECIPE, iterations=1), preset="baby")
    assert checkpoint.load(out).preset == "baby"


# --- stopped and gone on with ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [[13], [7, 8, 16], [0], [19]], ids=str)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(uninterrupted, tmp_path, small_corpus, monkeypatch, stops):
    """KeyboardInterrupt leaves the last save; losses, weights and optimiser state then come out the same to the last bit."""
    recipe, whole = uninterrupted
    out = tmp_path / "run"
    for number, step in enumerate(stops):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            with pytest.raises(KeyboardInterrupt):
                train(out, small_corpus, recipe=recipe, resume=number > 0)
        assert rows(out) == rows(whole)[: 1 + step // 5]
    assert_same_run(train(out, small_corpus, recipe=recipe, resume=True), whole)


def test_a_run_interrupted_while_it_saves_goes_on_from_the_save_before(uninterrupted, tmp_path, small_corpus, monkeypatch):
    recipe, whole = uninterrupted
    out, save_file, saves = tmp_path / "run", runs.save_file, []

    def interrupted(tensors: Any, path: Path) -> None:
        saves.append(path.name)
        if len(saves) == 8:
            raise KeyboardInterrupt
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(out, small_corpus, recipe=recipe)
    assert 0 < len(rows(out)) < len(rows(whole))
    assert rows(out) == rows(whole)[: len(rows(out))]
    assert_same_run(train(out, small_corpus, recipe=recipe, resume=True), whole)


def test_a_run_killed_with_kill_9_goes_on_as_if_it_had_not_been(uninterrupted, tmp_path, small_corpus):
    recipe, whole = uninterrupted
    script = """
        import json, os, signal, sys
        import torch
        from models import training
        from models.config import GPTConfig, Recipe
        from models.corpus import read

        torch.set_num_threads(1)
        batch = training.batch

        def killed(ids, step, *rest):
            if step == 13:
                os.kill(os.getpid(), signal.SIGKILL)
            return batch(ids, step, *rest)

        training.batch = killed
        config, recipe = (cls.from_dict(json.loads(text)) for cls, text in zip((GPTConfig, Recipe), sys.argv[3:]))
        training.train(config, recipe, read(sys.argv[1]), sys.argv[2], device="cpu", show_progress=False)
    """
    (tmp_path / "text").write_text(small_corpus.text)
    out = tmp_path / "run"
    arguments = [str(tmp_path / "text"), str(out), json.dumps(CONFIG.to_dict()), json.dumps(recipe.to_dict())]
    done = run_python(script, *arguments)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert rows(out) == rows(whole)[:3]
    assert_same_run(train(out, small_corpus, recipe=recipe, resume=True), whole)


def test_a_run_that_is_complete_is_left_as_it_is_by_resuming(tmp_path, small_corpus):
    out = train(tmp_path / "run", small_corpus)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    train(out, small_corpus, resume=True)
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


# --- refusals --------------------------------------------------------------------------------------------------------


def unchanged(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_an_existing_checkpoint_is_not_overwritten(uninterrupted, small_corpus):
    recipe, out = uninterrupted
    before = unchanged(out)
    with pytest.raises(TrainingError, match="already holds a checkpoint; go on with --resume, or give another folder with --out"):
        train(out, small_corpus, recipe=recipe)
    assert unchanged(out) == before


def test_a_checkpoint_killed_between_its_two_renames_is_not_overwritten(tmp_path, small_corpus):
    out = train(tmp_path / "run", small_corpus, recipe=replace(RECIPE, iterations=1))
    out.rename(tmp_path / ".run.previous")
    with pytest.raises(TrainingError, match="already holds a checkpoint"):
        train(out, small_corpus)


def test_nothing_to_resume_is_an_error(tmp_path, small_corpus):
    with pytest.raises(TrainingError, match="holds nothing to go on from; start without --resume"):
        train(tmp_path / "nowhere", small_corpus, resume=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "recipe", "difference"),
    [
        (dict(d_model=32), {}, "d_model 16, now 32"),
        (dict(tied=True, n_ctx=4), {}, "n_ctx 8, now 4, tied False, now True"),
        ({}, dict(learning_rate=1.0), "learning_rate 0.01, now 1.0"),
        ({}, dict(iterations=40, seed=7), "iterations 20, now 40, seed 1337, now 7"),
    ],
    ids=str,
)
def test_resuming_with_other_options_is_refused_and_the_difference_named(tmp_path, small_corpus, config, recipe, difference):
    out = train(tmp_path / "run", small_corpus)
    before = unchanged(out)
    with pytest.raises(TrainingError, match=f"was trained otherwise \\({difference}\\); go on with the same preset"):
        train(out, small_corpus, replace(CONFIG, **config), replace(RECIPE, **recipe), resume=True)
    assert unchanged(out) == before


def test_resuming_with_other_characters_is_refused(tmp_path, small_corpus):
    out = train(tmp_path / "run", small_corpus)
    other = Corpus("other characters", small_corpus.text.replace("j", "z"), "")
    with pytest.raises(TrainingError, match="another text"):
        train(out, other, resume=True)


def test_resuming_with_another_text_of_the_same_characters_is_refused(tmp_path, small_corpus, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 13)
        with pytest.raises(KeyboardInterrupt):
            train(out, small_corpus)
    text = small_corpus.text[::-1]
    other = Corpus("backwards", text, hashlib.sha256(text.encode()).hexdigest())
    with pytest.raises(TrainingError, match="text|corpus"):
        train(out, other, resume=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state.json", "{"),
        ("state.json", "{}"),
        ("latest.safetensors", "<html>"),
        ("optimiser-0.safetensors", "<html>"),
    ],
)
def test_a_damaged_resume_file_is_named(tmp_path, small_corpus, name, text):
    out = train(tmp_path / "run", small_corpus)
    (out / RESUME / name).write_text(text)
    with pytest.raises(WorkbenchError, match=name):
        train(out, small_corpus, resume=True)


def test_a_vocabulary_of_another_size_is_refused(tmp_path, small_corpus):
    with pytest.raises(TrainingError, match="made-up words has 12 characters, the model d_vocab = 65; make them equal"):
        train(tmp_path / "run", small_corpus, replace(CONFIG, d_vocab=65))
    assert list(tmp_path.iterdir()) == []


def test_a_text_with_characters_outside_the_given_vocabulary_is_refused(tmp_path, small_corpus):
    with pytest.raises(VocabularyError, match="character 'j' at place .* is not among the model's 12 characters"):
        train(tmp_path / "run", small_corpus, vocabulary=Vocabulary.of("\n abcdefghiX"))
    assert list(tmp_path.iterdir()) == []


def test_a_given_vocabulary_numbers_the_characters(tmp_path, small_corpus, vocabulary):
    backwards = Vocabulary(vocabulary.characters[::-1])
    out = train(tmp_path / "run", small_corpus, recipe=replace(RECIPE, iterations=1), vocabulary=backwards)
    assert checkpoint.load(out).vocabulary == backwards


def test_a_text_too_short_to_validate_is_refused_before_training(tmp_path, small_corpus):
    short = Corpus("short", small_corpus.text[:70], "")
    with pytest.raises(CorpusError, match="got 7 characters; expected more than one window of 8"):
        train(tmp_path / "run", short, vocabulary=small_corpus.vocabulary())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_something_else_is_refused_and_kept(tmp_path, small_corpus):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").write_text("all my work")
    with pytest.raises(CheckpointError, match="exists and is not a checkpoint"):
        train(tmp_path / "thesis", small_corpus)
    assert (tmp_path / "thesis" / "text.tex").read_text() == "all my work"


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_a_device_that_is_not_there_is_refused(tmp_path, small_corpus, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TrainingError, match=f"device '{device}' is not available here; give auto or one of: .*cpu"):
        training.train(CONFIG, RECIPE, small_corpus, tmp_path / "run", device=device)


def diverging(out: Path, corpus: Corpus) -> str:
    with pytest.raises(TrainingError) as error:
        train(out, corpus, recipe=replace(RECIPE, optimiser="adamw", learning_rate=1e30))
    return str(error.value)


def test_a_run_that_diverges_says_so_and_leaves_a_checkpoint_that_loads(tmp_path, small_corpus):
    message = diverging(tmp_path / "run", small_corpus)
    assert "the loss is no longer finite before step 5" in message
    checkpoint.load(tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == ["0"]


def test_the_advice_to_a_run_that_diverged_can_be_followed(tmp_path, small_corpus):
    advice = diverging(tmp_path / "run", small_corpus)
    assert "lower the learning rate" in advice
    assert "train anew" in advice  # another rate is another recipe, which --resume refuses
    train(tmp_path / "anew", small_corpus, recipe=replace(RECIPE, optimiser="adamw"))


# --- what is measured ------------------------------------------------------------------------------------------------


def test_validation_loss_is_the_mean_over_the_whole_split_in_windows(uninterrupted, small_corpus, vocabulary):
    """Window by window, with the reference model, and the softmax written out in numpy."""
    _, out = uninterrupted
    gpt = checkpoint.load(out).gpt
    ids, losses = vocabulary.encode(small_corpus.split("validation")), []
    for start in range(0, len(ids) - 8, 8):
        logits = reference.forward(gpt, torch.from_numpy(ids[start : start + 8])[None])[0].detach().double().numpy()
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        losses += [-math.log(probabilities[place, ids[start + 1 + place]]) for place in range(8)]
    assert len(losses) == (len(ids) - 1) // 8 * 8
    expected = sum(losses) / len(losses)
    assert validation_loss(gpt, small_corpus, vocabulary) == pytest.approx(expected, abs=1e-6)
    assert min(validation_losses(out)) == pytest.approx(expected, abs=1e-6)


def test_a_long_text_is_measured_whole():
    """More windows than go through at once, the last group a partial one; the model is a table of bigrams."""
    draw = np.random.default_rng(0)
    ids, table = draw.integers(0, 5, 40_003), torch.from_numpy(draw.normal(size=(5, 5)))
    calls = []

    def logits_of(idx: torch.Tensor) -> torch.Tensor:
        calls.append(len(idx))
        return table[idx]

    measured = corpus_loss(logits_of, ids, 3)
    assert len(calls) > 1
    assert calls[-1] != calls[0]
    count = (len(ids) - 1) // 3 * 3  # the last partial window is left out
    pairs = np.stack([ids[:count], ids[1 : count + 1]])
    expected = -table.log_softmax(-1).numpy()[pairs[0], pairs[1]].mean()
    assert measured == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mode", [True, False])
def test_validation_is_without_dropout_and_leaves_the_mode_as_it_was(small_corpus, vocabulary, mode):
    gpt = GPT(replace(CONFIG, dropout=0.5)).train(mode)
    losses = [validation_loss(gpt, small_corpus, vocabulary) for _ in range(2)]
    assert losses[0] == losses[1]
    assert gpt.training is mode


# --- functions of the step -------------------------------------------------------------------------------------------


def test_a_batch_is_windows_of_the_text_with_the_characters_that_follow():
    ids = np.arange(100, 140)
    idx, targets = training.batch(ids, 0, replace(RECIPE, batch_size=500), CONFIG)
    assert idx.shape == targets.shape == (500, 8)
    assert torch.equal(targets, idx + 1)
    assert torch.equal(idx[:, 1:], idx[:, :-1] + 1)
    assert (idx.min().item(), targets.max().item()) == (100, 139)  # every place can be drawn, the last too


def test_a_batch_depends_on_seed_and_step_alone():
    ids = np.arange(1000)
    first = training.batch(ids, 3, RECIPE, CONFIG)[0]
    assert torch.equal(first, training.batch(ids, 3, RECIPE, CONFIG)[0])
    assert not torch.equal(first, training.batch(ids, 4, RECIPE, CONFIG)[0])
    assert not torch.equal(first, training.batch(ids, 3, replace(RECIPE, seed=1), CONFIG)[0])


def test_the_rate_warms_up_and_falls_along_a_cosine():
    recipe = Recipe(iterations=110, warmup=10, final_fraction=0.2)
    factors = [learning_rate_factor(step, recipe) for step in range(111)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[10] == 1
    assert factors[60] == pytest.approx(0.6)  # half way between 1 and 0.2
    assert factors[110] == pytest.approx(0.2)
    assert factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_every_step_uses_its_rate_and_clipped_gradients(tmp_path, small_corpus, monkeypatch, optimiser):
    recipe = replace(RECIPE, iterations=12, optimiser=optimiser, clip=0.01)
    rates, norms = [], []

    def watched(gpt: GPT, recipe: Recipe) -> list[torch.optim.Optimizer]:
        def note(*_: Any) -> None:
            norms.append(torch.stack([parameter.grad.norm() for parameter in gpt.parameters()]).norm().item())
            rates.append([group["lr"] / group["peak_lr"] for own in optimisers for group in own.param_groups])

        optimisers = build_optimisers(gpt, recipe)
        optimisers[-1].register_step_post_hook(note)  # by then every optimiser has its rate
        return optimisers

    monkeypatch.setattr(runs, "build_optimisers", watched)
    train(tmp_path / "run", small_corpus, recipe=recipe)
    assert norms == pytest.approx([0.01] * 12, rel=1e-3)
    for step, factors in enumerate(rates):
        assert factors == pytest.approx([learning_rate_factor(step, recipe)] * len(factors))


def test_without_warm_up_the_rate_starts_at_its_peak():
    assert learning_rate_factor(0, Recipe(warmup=0)) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_muon_has_the_matrices_inside_the_blocks_and_adamw_the_rest(tied):
    gpt = GPT(replace(CONFIG, tied=tied))
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    adamw, muon = build_optimisers(gpt, RECIPE)
    assert (type(adamw), type(muon)) == (torch.optim.AdamW, Muon)
    decayed, plain = ({names[id(p)] for p in group["params"]} for group in adamw.param_groups)
    inner = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    unembedding = set() if tied else {"unembedding.weight"}
    assert decayed == {"token_embedding.weight", "position_embedding.weight"} | unembedding
    assert inner == {name for name, p in gpt.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
    assert plain == {name for name, p in gpt.named_parameters() if p.ndim == 1}
    assert [group["weight_decay"] for group in adamw.param_groups] == [RECIPE.weight_decay, 0]
    assert [group["lr"] for group in adamw.param_groups + muon.param_groups] == [1e-2, 1e-2, 0.05]


def test_adamw_alone_has_every_parameter_once():
    gpt = GPT(CONFIG)
    (adamw,) = build_optimisers(gpt, replace(RECIPE, optimiser="adamw"))
    held = [id(p) for group in adamw.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in gpt.parameters())
    assert all((p.ndim == 2) == (group["weight_decay"] > 0) for group in adamw.param_groups for p in group["params"])


def test_a_preset_is_overridden_by_a_command_line_and_stays_sound():
    recipe = Recipe(iterations=3000, evaluate_every=250, warmup=100, moments=(0, 40, 3000))
    assert training.with_options(CONFIG, recipe) == (CONFIG, recipe)
    config, shorter = training.with_options(CONFIG, recipe, iterations=50, optimiser="adamw", seed=0, batch_size=3, dropout=0.0)
    assert (shorter.iterations, shorter.evaluate_every, shorter.warmup, shorter.moments) == (50, 50, 5, (0, 40))
    assert (shorter.optimiser, shorter.seed, shorter.batch_size) == ("adamw", 0, 3)
    assert config == replace(CONFIG, dropout=0.0)
    assert training.with_options(CONFIG, recipe, dropout_attention=0.0)[0] == replace(CONFIG, dropout_attention=0.0)
    _, longer = training.with_options(CONFIG, recipe, iterations=9000)
    assert (longer.iterations, longer.evaluate_every, longer.warmup) == (9000, 250, 100)


# --- Muon ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_muon_makes_pytorch_s_updates(shape):
    """Up to the bfloat16 in which that one works: five steps with momentum, decay and both shapes' scale."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    gradients = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))
    ends = []
    for kind in (Muon, torch.optim.Muon):
        parameter = torch.nn.Parameter(start.clone())
        optimiser = kind([parameter], lr=0.1, weight_decay=0.5)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimiser.step()
        ends.append(parameter.detach())
    ours, theirs = (end - start for end in ends)
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_matrices_are_made_nearly_orthogonal_each_by_itself():
    matrices = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1, 1e3])[:, None, None]
    near = orthogonalise(matrices)
    assert torch.linalg.svdvals(near).min() > 0.6
    assert torch.linalg.svdvals(near).max() < 1.3
    U, _, Vh = torch.linalg.svd(matrices, full_matrices=False)
    assert (near - U @ Vh).norm() < 0.3 * (U @ Vh).norm()
    assert torch.allclose(orthogonalise(matrices.mT), near.mT, atol=1e-5)
    assert torch.allclose(orthogonalise(matrices[1:2]), near[1:2], atol=1e-5)


# --- repeated strings, several processes -----------------------------------------------------------------------------


def test_a_share_of_the_windows_are_repeated_strings():
    ids = np.arange(100, 140)  # nothing that a random string over 12 characters could hold
    recipe = replace(RECIPE, batch_size=40, repeated=0.25, periods=(2, 3))
    idx, targets = training.batch(ids, 0, recipe, CONFIG)
    drawn = idx[:, 0] < 100
    assert drawn.sum() == 10
    assert drawn[3::4].all()  # evenly spread, so that every process has its share
    whole = torch.cat([idx, targets[:, -1:]], dim=1)[drawn]
    assert all(any(torch.equal(row[period:], row[:-period]) for period in (2, 3)) for row in whole)
    assert (training.batch(ids, 0, replace(recipe, repeated=0.0), CONFIG)[0] >= 100).all()
    assert (training.batch(ids, 0, replace(recipe, repeated=1.0), CONFIG)[0] < 100).all()


@pytest.mark.parametrize("repeated", [0.0, 0.5])
def test_two_processes_share_what_one_would_draw_with_twice_the_batch(repeated):
    ids, recipe = np.arange(1000), replace(RECIPE, repeated=repeated)
    whole = training.batch(ids, 7, replace(recipe, batch_size=16), CONFIG)
    shares = [training.batch(ids, 7, recipe, CONFIG, Processes(2, rank)) for rank in range(2)]
    for part in range(2):
        assert torch.equal(torch.cat([share[part] for share in shares]), whole[part])


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_float16_weights_have_the_loss_that_is_recorded(tmp_path, small_corpus):
    recipe = replace(RECIPE, stored="float16")
    out = train(tmp_path / "run", small_corpus, recipe=recipe)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.float16}
    found = checkpoint.load(out)
    assert validation_loss(found.gpt, small_corpus, found.vocabulary) == pytest.approx(
        found.training["validation_loss"], abs=1e-7
    )
    latest = load_file(out / RESUME / "latest.safetensors")
    assert {tensor.dtype for tensor in latest.values()} == {torch.float32}
    assert not torch.equal(latest["blocks.0.mlp.inner.input.weight"], found.gpt.state_dict()["blocks.0.mlp.inner.input.weight"])
    plain = train(tmp_path / "plain", small_corpus)  # the run itself takes no notice of how it is stored
    assert torch.equal(
        load_file(plain / RESUME / "latest.safetensors")["token_embedding.weight"], latest["token_embedding.weight"]
    )


def test_a_film_keeps_the_moments_as_checkpoints(tmp_path, small_corpus):
    recipe = replace(RECIPE, moments=(0, 3, 20))
    out = train(tmp_path / "run", small_corpus, recipe=recipe, film=True)
    assert [row["step"] for row in rows(out)] == ["0", "3", "5", "10", "15", "20"]
    moments = sorted((tmp_path / "run-film").iterdir())
    assert [moment.name for moment in moments] == ["step-00000", "step-00003", "step-00020"]
    for moment, step in zip(moments, recipe.moments, strict=True):
        found = checkpoint.load(moment)
        assert found.training["steps"] == step
        measured = validation_loss(found.gpt, small_corpus, found.vocabulary)
        assert measured == pytest.approx(found.training["validation_loss"], abs=1e-7)
        logged = next(float(row["validation_loss"]) for row in rows(out) if row["step"] == str(step))
        assert measured == pytest.approx(logged, abs=1e-3)
    unfilmed = train(tmp_path / "plain", small_corpus, recipe=replace(recipe, moments=()))
    ends = [load_file(folder / RESUME / "latest.safetensors") for folder in (out, unfilmed)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())  # filming changes nothing


def test_a_film_that_was_interrupted_goes_on(tmp_path, small_corpus, monkeypatch):
    recipe, out = replace(RECIPE, moments=(2, 7, 12)), tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_at(patch, 9)
        with pytest.raises(KeyboardInterrupt):
            train(out, small_corpus, recipe=recipe, film=True)
    train(out, small_corpus, recipe=recipe, film=True, resume=True)
    whole = train(tmp_path / "whole", small_corpus, recipe=recipe, film=True)
    assert_same_run(out, whole)
    for step in recipe.moments:
        films = [load_file(tmp_path / film / f"step-{step:05d}" / "model.safetensors") for film in ("run-film", "whole-film")]
        assert all(torch.equal(tensor, films[1][name]) for name, tensor in films[0].items())


def test_a_film_needs_moments_and_a_free_place(tmp_path, small_corpus):
    with pytest.raises(TrainingError, match="moments"):
        train(tmp_path / "run", small_corpus, film=True)
    (tmp_path / "run-film").mkdir()
    with pytest.raises(TrainingError, match="run-film exists"):
        train(tmp_path / "run", small_corpus, recipe=replace(RECIPE, moments=(1,)), film=True)
    assert not (tmp_path / "run").exists()


def test_bfloat16_products_are_used_when_asked_for(tmp_path, small_corpus):
    exact, low = (train(tmp_path / name, small_corpus, precision=name) for name in ("float32", "bfloat16"))
    assert {tensor.dtype for tensor in load_file(low / "model.safetensors").values()} == {torch.float32}
    assert 0 < abs(validation_losses(exact)[-1] - validation_losses(low)[-1]) < 0.05


# --- good manners ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_types")  # the checks draw from Python's generator themselves
def test_training_leaves_the_global_generators_alone(tmp_path, small_corpus):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    train(tmp_path / "run", small_corpus)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_resuming_leaves_the_global_generator_alone(tmp_path, small_corpus):
    out = train(tmp_path / "run", small_corpus)
    before = torch.get_rng_state()
    train(out, small_corpus, resume=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_generator_has_no_say_in_training(uninterrupted, tmp_path, small_corpus):
    recipe, whole = uninterrupted
    torch.manual_seed(999)
    assert_same_run(train(tmp_path / "run", small_corpus, recipe=recipe), whole)


def test_training_is_silent_unless_progress_is_asked_for(tmp_path, small_corpus, capfd):
    train(tmp_path / "run", small_corpus)
    assert capfd.readouterr() == ("", "")
    training.train(CONFIG, RECIPE, small_corpus, tmp_path / "shown", device="cpu")
    out, err = capfd.readouterr()
    assert out == ""
    assert "shown: 100%" in err


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def top_level_names_beside(*allowed: str) -> list[str]:
    """Importable names of every installed distribution that these distributions do not need themselves."""
    todo, needed = list(allowed), set()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in needed:
            continue
        needed.add(name)
        with suppress(importlib.metadata.PackageNotFoundError):
            for text in importlib.metadata.requires(name) or []:
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    todo.append(requirement.name)
    owners = importlib.metadata.packages_distributions()
    return sorted(name for name, found in owners.items() if not needed & {canonicalize_name(owner) for owner in found})


def test_training_needs_nothing_but_torch_numpy_safetensors_and_tqdm(tmp_path, small_corpus):
    """`python -m models` for two steps, in a Python where everything else that is installed cannot be imported."""
    script = """
        import runpy
        import sys

        absent = set(sys.argv.pop(1).split()) - {"models", "analyses", "workbench", "checkpoints"}

        class Bare:
            def __init__(self, finder):
                self.finder = finder

            def find_spec(self, name, path=None, target=None):
                return None if name.partition(".")[0] in absent else self.finder.find_spec(name, path, target)

        sys.meta_path[:] = map(Bare, sys.meta_path)
        runpy.run_module("models", run_name="__main__", alter_sys=True)
    """
    absent = top_level_names_beside("torch", "numpy", "safetensors", "tqdm")
    assert {"transformer_lens", "transformers", "xarray", "pandas", "einops", "jaxtyping", "pooch", "platformdirs"} <= set(absent)
    assert not {"torch", "numpy", "safetensors", "tqdm"} & set(absent)
    text = tmp_path / "text"
    text.write_text("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" + small_corpus.text)
    command = ["walkthrough-4.10", "--data", str(text), "--out", str(tmp_path / "run"), "--device", "cpu", "--iterations", "2"]
    done = run_python(script, " ".join(absent), *command)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(tmp_path / "run")] == ["0", "2"]
    again = run_python(script, " ".join(absent), *command)
    assert again.returncode == 2
    assert "already holds a checkpoint" in again.stderr.splitlines()[-1]


def test_every_preset_can_make_its_optimisers():
    for name in ("baby", "baby-tied", "walkthrough-4.2", "walkthrough-4.8"):
        model, recipe = PRESETS[name]
        gpt = GPT(model)
        held = [p for optimiser in build_optimisers(gpt, recipe) for g in optimiser.param_groups for p in g["params"]]
        assert sum(p.numel() for p in held) == sum(p.numel() for p in gpt.parameters())
