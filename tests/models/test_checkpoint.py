"""Checkpoints: what is saved comes back, a save is whole or not at all, and a wrong file is called what it is."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import checkpoint
from models.checkpoint import CONFIG, STATISTICS, WEIGHTS, CheckpointError
from models.config import GPTConfig, Recipe
from models.gpt import GPT
from models.vocabulary import Vocabulary

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = dict(d_vocab=12, n_ctx=4, d_model=4, n_layers=1, n_heads=2)


def filled(value: float, **switches: Any) -> GPT:
    """A tiny GPT all of whose weights are one number, so that a mixture of two saves would show."""
    gpt = GPT(GPTConfig(**SIZES | switches))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.fill_(value)
    return gpt


def values(path: Path) -> set[float]:
    """The distinct weights of a checkpoint, after loading and checking it."""
    return {number for p in checkpoint.load(path).gpt.parameters() for number in p.unique().tolist()}


@pytest.fixture
def folder(tmp_path: Path, vocabulary: Vocabulary) -> Path:
    """A saved checkpoint, all weights 1."""
    return checkpoint.save(tmp_path / "run", filled(1), vocabulary, "baby", Recipe(seed=5))


def edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | changes))


def error_of(path: Path | str) -> str:
    """The one sentence with which loading fails."""
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path)
    message = str(error.value)
    assert "\n" not in message
    return message


# --- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_saved_comes_back(tmp_path, random_weights, vocabulary, tied):
    gpt = random_weights(GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=2, n_heads=2, tied=tied)).float()
    recipe = Recipe(seed=5, optimiser="adamw")
    checkpoint.save(tmp_path / "run", gpt, vocabulary, "some-preset", recipe)
    found = checkpoint.load(tmp_path / "run")
    assert (found.name, found.config, found.vocabulary) == ("run", gpt.config, vocabulary)
    assert (found.preset, found.recipe, found.statistics) == ("some-preset", recipe, {})
    assert not found.gpt.training
    assert (found.gpt.unembedding.weight is found.gpt.token_embedding.weight) is tied
    theirs = found.gpt.state_dict()
    assert theirs.keys() == gpt.state_dict().keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in gpt.state_dict().items())


def test_a_folder_holds_safetensors_and_json_and_no_pickle(folder):
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, CONFIG}
    assert load_file(folder / WEIGHTS).keys() == filled(1).state_dict().keys()
    assert json.loads((folder / CONFIG).read_text())["vocabulary"] == "\n abcdefghij"
    assert [path.name for path in folder.parent.iterdir()] == ["run"]  # nothing is left aside


def test_a_tied_unembedding_is_saved_once(tmp_path, vocabulary):
    checkpoint.save(tmp_path / "run", filled(1, tied=True), vocabulary)
    assert "unembedding.weight" not in load_file(tmp_path / "run" / WEIGHTS)


def test_statistics_are_read_where_there_are_some(folder):
    save_file({"mean": torch.arange(3.0)}, folder / STATISTICS)
    assert checkpoint.load(folder).statistics["mean"].tolist() == [0, 1, 2]


def test_double_weights_come_back_as_float32(tmp_path, random_gpt, vocabulary):
    checkpoint.save(tmp_path / "run", random_gpt, vocabulary)
    found = checkpoint.load(tmp_path / "run").gpt
    assert found.unembedding.weight.dtype == torch.float32
    assert torch.equal(found.unembedding.weight, random_gpt.unembedding.weight.float())


def test_saving_leaves_the_model_alone(tmp_path, vocabulary):
    gpt = filled(1, tied=True).train()
    checkpoint.save(tmp_path / "run", gpt, vocabulary)
    assert gpt.training
    assert gpt.unembedding.weight is gpt.token_embedding.weight
    assert gpt.unembedding.weight.requires_grad


# --- finding ---------------------------------------------------------------------------------------------------------


def test_a_name_is_a_path_then_one_of_checkpoints_then_an_installed_one(tmp_path, monkeypatch, vocabulary):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "INSTALLED", tmp_path / "installed")
    checkpoint.save(tmp_path / "installed" / "run", filled(3), vocabulary)
    assert values(Path("run")) == {3}
    checkpoint.save(tmp_path / "checkpoints" / "run", filled(2), vocabulary)
    assert values(Path("run")) == {2}
    assert checkpoint.available() == {"run": Path("checkpoints/run")}
    checkpoint.save(tmp_path / "run", filled(1), vocabulary)
    assert values(Path("run")) == {1}


def test_an_unknown_name_lists_those_that_exist(tmp_path, monkeypatch, vocabulary):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "INSTALLED", tmp_path / "installed")
    assert error_of("babe") == "there is no checkpoint 'babe'; give the path of its folder, or one of: none"
    for name in ("baby", "nanogpt"):
        checkpoint.save(tmp_path / "checkpoints" / name, filled(1), vocabulary)
    assert error_of("babe").endswith("or one of: baby, nanogpt")


@pytest.mark.parametrize("lacking", [[WEIGHTS], [CONFIG], [WEIGHTS, CONFIG]])
def test_a_folder_that_is_no_checkpoint_is_told_what_it_lacks(folder, lacking):
    for name in lacking:
        (folder / name).unlink()
    assert f"has no {' and '.join(lacking)}, so it is not a checkpoint" in error_of(folder)


def test_what_a_save_has_aside_is_not_listed(tmp_path, monkeypatch, vocabulary):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "INSTALLED", tmp_path / "installed")
    checkpoint.save(tmp_path / "checkpoints" / "run", filled(1), vocabulary)
    for aside in (".run.saving", ".run.previous"):
        shutil.copytree(tmp_path / "checkpoints" / "run", tmp_path / "checkpoints" / aside)
    assert list(checkpoint.available()) == ["run"]


@pytest.mark.parametrize("name", [
    "/",
    "x" * 300,
    "", ".", "no/such/folder", "a\nb",
])  # fmt: skip
def test_any_name_that_is_none_is_a_checkpoint_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        checkpoint.load(name)


# --- wrong files -----------------------------------------------------------------------------------------------------


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def _truncated_in_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:30])


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0]}))


def _torch(path: Path) -> None:
    torch.save({"weights": torch.ones(1)}, path)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda path: path.write_text("\n <!DOCTYPE html><html>404</html>"), "an HTML or XML page"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "a git-lfs pointer"),
        (_truncated, "a truncated or damaged safetensors file"),
        (_truncated_in_header, "a truncated or damaged safetensors file"),
        (_pickle, "a Python pickle"),
        (_torch, "a zip archive (a PyTorch .pt file?)"),
        (lambda path: path.write_bytes(b""), "an empty file"),
        (lambda path: path.write_bytes(b"\x00\x01" * 99), "a file of an unknown kind"),
    ],
    ids=["html", "git-lfs", "truncated", "truncated header", "pickle", "torch", "empty", "noise"],
)
def test_a_wrong_weights_file_is_called_what_it_is(folder, damage, name):
    damage(folder / WEIGHTS)
    message = error_of(folder)
    assert message.startswith(f"{folder / WEIGHTS} is {name}")
    assert "expected safetensors weights: fetch or train it again" in message


def test_a_pickle_is_not_executed(folder, tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb()))
    error_of(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("final_norm.bias"), "lacks 'final_norm.bias' (1 in all)"),
        (lambda weights: weights.update(extra=torch.ones(1)), "has 'extra' (1 in all), which the model has not"),
        (lambda weights: weights.clear(), "lacks 'blocks.0.attention.inner.key.weight'"),
        (
            lambda weights: weights.update({"token_embedding.weight": torch.ones(4, 12)}),
            "token_embedding.weight has shape (4, 12), the architecture in config.json asks for (12, 4)",
        ),
        (
            lambda weights: weights["unembedding.weight"].view(-1)[3].fill_(torch.nan),
            "unembedding.weight holds values that are not",
        ),
        (
            lambda weights: weights["final_norm.weight"].view(-1)[0].fill_(-torch.inf),
            "final_norm.weight holds values that are not",
        ),
    ],
    ids=["missing", "extra", "all missing", "shape", "nan", "inf"],
)
def test_weights_that_do_not_fit_are_named(folder, change, message):
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)
    assert message in error_of(folder)


def test_a_weight_too_large_for_float32_is_not_finite(folder):
    weights = load_file(folder / WEIGHTS)
    weights["final_norm.weight"] = torch.full((4,), 1e300, dtype=torch.float64)
    save_file(weights, folder / WEIGHTS)
    assert "not finite" in error_of(folder)


def test_an_untied_file_does_not_fit_a_tied_architecture(folder):
    edit(folder, architecture=replace(filled(1).config, tied=True).to_dict())
    assert "has 'unembedding.weight' (1 in all), which the model has not" in error_of(folder)


def test_damaged_statistics_are_named(folder):
    (folder / STATISTICS).write_text("<html>")
    assert f"{folder / STATISTICS} is an HTML or XML page" in error_of(folder)


def test_a_file_in_place_of_a_folder_is_called_what_it_is(folder):
    assert f"{folder / WEIGHTS} is a safetensors file; expected the folder of a checkpoint" in error_of(folder / WEIGHTS)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"text"', "{}", '{"architecture": {}}', "\ufeff{}"], ids=repr)
def test_a_broken_config_is_named(folder, text):
    (folder / CONFIG).write_text(text, encoding="utf-8")
    assert str(folder / CONFIG) in error_of(folder)


def test_a_config_that_is_not_utf_8_is_named(folder):
    (folder / CONFIG).write_bytes(b'{"\xff": 1}')
    assert f"{folder / CONFIG} cannot be read as JSON" in error_of(folder)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(architecture=SIZES | {"n_embd": 4}), "n_embd: got 4; expected only the fields of GPTConfig"),
        (dict(architecture={name: SIZES[name] for name in ("d_vocab", "n_ctx")}), "missing"),
        (dict(architecture=SIZES | {"n_heads": 3}), "n_heads: got 3; expected a divisor of d_model = 4"),
        (dict(architecture=SIZES | {"d_model": "4"}), "d_model: got '4'; expected a whole number"),
        (dict(architecture=None), CONFIG),
        (dict(architecture=[1]), CONFIG),
        (dict(recipe={"momentum": 1}), "momentum: got 1; expected only the fields of Recipe"),
        (dict(recipe={"betas": ["a", "b"]}), "betas: got ('a', 'b'); expected two numbers"),
        (dict(recipe={"betas": 5}), CONFIG),
        (dict(recipe=[1]), CONFIG),
        (dict(vocabulary="abc"), "the vocabulary has 3 characters, the architecture d_vocab = 12; they must be equal"),
        (dict(vocabulary="aabcdefghijk"), "holds each character once, got 'a' twice"),
        (dict(vocabulary=""), "at least one character"),
        (dict(vocabulary=[["a"]]), "single characters"),
        (dict(vocabulary=5), CONFIG),
    ],
    ids=str,
)
def test_a_config_with_a_wrong_value_is_named(folder, change, message):
    edit(folder, **change)
    assert message in error_of(folder)


# --- a save is whole or not at all -----------------------------------------------------------------------------------


def test_a_save_replaces_the_weights(folder, vocabulary):
    checkpoint.save(folder, filled(2), vocabulary)
    assert values(folder) == {2}


def test_other_files_in_the_folder_survive_a_save(folder, vocabulary):
    (folder / "README.md").write_text("card")
    (folder / "resume").mkdir()
    (folder / "resume" / "state.json").write_text("{}")
    checkpoint.save(folder, filled(2), vocabulary)
    assert (folder / "README.md").read_text() == "card"
    assert (folder / "resume" / "state.json").read_text() == "{}"


def test_a_save_makes_the_folders_above_and_takes_an_empty_one(tmp_path, vocabulary):
    (tmp_path / "a" / "b" / "run").mkdir(parents=True)
    assert values(checkpoint.save(tmp_path / "a" / "b" / "run", filled(2), vocabulary)) == {2}
    assert values(checkpoint.save(tmp_path / "c" / "d" / "run", filled(2), vocabulary)) == {2}


def test_a_relative_path_stays_where_it_was_meant(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with checkpoint.replace_directory(Path("run")) as aside:
        (aside / "mark").write_text("here")
        os.chdir(tmp_path / "elsewhere")
    assert (tmp_path / "run" / "mark").read_text() == "here"


def test_a_folder_that_is_something_else_is_refused_and_kept(tmp_path, vocabulary):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text.tex").write_text("all my work")
    with pytest.raises(
        CheckpointError, match="thesis exists and is not a checkpoint; give another path, so that nothing is lost"
    ):
        checkpoint.save(tmp_path / "thesis", filled(1), vocabulary)
    assert (tmp_path / "thesis" / "text.tex").read_text() == "all my work"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_a_file_in_the_way_is_refused_and_kept(tmp_path, vocabulary):
    (tmp_path / "run").write_text("<html>")
    with pytest.raises(CheckpointError, match="run is an HTML or XML page.*a checkpoint is a folder: give another path"):
        checkpoint.save(tmp_path / "run", filled(1), vocabulary)
    assert (tmp_path / "run").read_text() == "<html>"


def save_and_raise(path: Path, error: type[BaseException]) -> None:
    with checkpoint.replace_directory(path) as aside:
        save_file(checkpoint.weights_of(filled(2)), aside / WEIGHTS)
        raise error


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_the_old_checkpoint(folder, error):
    with pytest.raises(error):
        save_and_raise(folder, error)
    assert values(folder) == {1}
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


def test_a_block_that_raises_leaves_no_folder_where_there_was_none(tmp_path):
    with pytest.raises(RuntimeError):
        save_and_raise(tmp_path / "run", RuntimeError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_rename_that_fails_leaves_the_old_checkpoint(folder, vocabulary, monkeypatch, call, error):
    calls, rename = [], os.rename

    def failing(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) == call:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(error):
        checkpoint.save(folder, filled(2), vocabulary)
    monkeypatch.undo()
    assert len(calls) >= call
    assert [path.name for path in folder.parent.iterdir()] == ["run"]  # without waiting for the next load to move it back
    assert values(folder) == {1}
    checkpoint.save(folder, filled(3), vocabulary)
    assert values(folder) == {3}


def test_leftovers_of_a_killed_save_are_cleared_by_the_next(folder, vocabulary):
    shutil.copytree(folder, folder.with_name(".run.saving"))
    (folder.with_name(".run.saving") / "junk").write_text("half")
    checkpoint.save(folder, filled(2), vocabulary)
    assert values(folder) == {2}
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


def test_a_folder_killed_between_its_two_renames_is_found_again(folder, vocabulary):
    folder.rename(folder.with_name(".run.previous"))
    assert values(folder) == {1}
    assert checkpoint.load(folder).name == "run"
    checkpoint.save(folder, filled(2), vocabulary)
    assert values(folder) == {2}
    assert [path.name for path in folder.parent.iterdir()] == ["run"]


def test_a_checkpoint_behind_a_symbolic_link_can_be_saved_again_and_again(folder, vocabulary):
    link = folder.with_name("link")
    link.symlink_to(folder)
    for value in (2, 3):
        checkpoint.save(link, filled(value), vocabulary)
        assert values(link) == {value}


def test_loading_while_another_process_saves_does_not_break_the_save(folder, vocabulary, monkeypatch):
    rename = os.rename

    def renamed_and_read(source: Any, target: Any) -> None:
        rename(source, target)
        if str(target).endswith(".previous"):  # the narrow moment in which the folder is away
            checkpoint.load(folder)

    monkeypatch.setattr(os, "rename", renamed_and_read)
    checkpoint.save(folder, filled(2), vocabulary)
    assert values(folder) == {2}


def test_loading_deletes_nobody_s_backup(folder):
    backup = folder.with_name("run.previous")
    shutil.copytree(folder, backup)
    (backup / "README.md").write_text("my best run, kept by hand")
    checkpoint.load(folder)
    assert backup.exists()


@pytest.mark.parametrize("damage", ["vocabulary", "nan"])
def test_what_could_not_be_loaded_is_not_saved(folder, vocabulary, damage):
    gpt, characters = (filled(torch.nan), vocabulary) if damage == "nan" else (filled(2), Vocabulary.of("abc"))
    with pytest.raises(ValueError, match=r"not finite|characters"):
        checkpoint.save(folder, gpt, characters)
    assert values(folder) == {1}


# --- kill -9 ---------------------------------------------------------------------------------------------------------

PRELUDE = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import torch
from models import checkpoint
from models.config import GPTConfig
from models.gpt import GPT
from models.vocabulary import Vocabulary
torch.set_num_threads(1)
vocabulary = Vocabulary.of("\\n abcdefghij")
gpt = GPT(GPTConfig(d_vocab=12, n_ctx=4, d_model=4, n_layers=1, n_heads=2))
path = Path(sys.argv[1]) / "run"

def save(value):
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.fill_(value)
    checkpoint.save(path, gpt, vocabulary)

def load():
    try:
        return sorted({number for p in checkpoint.load(path).gpt.parameters() for number in p.unique().tolist()})
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def attempt(value):
    try:
        save(value)
        return load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def start_over(first_save):
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    if not first_save:
        save(1)

def child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid
"""


def run_script(script: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of JSON that a script prints, in a Python of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def killed_at_every_step(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A save killed with SIGKILL before each of its operations on the file system in turn, seen through Python's audit hook.

    Each row: whether there was a checkpoint before, the operation, whether the kill came, the weights that are loaded
    after it, and those after one more save.
    """
    script = """
        def killed_at(step):
            def work():
                left = [step]
                def hook(event, args):
                    if event == "open" or event.startswith(("os.", "shutil.")) and event != "os.kill":
                        if left[0] == 0:
                            os.write(report, event.encode())
                            os.kill(os.getpid(), signal.SIGKILL)
                        left[0] -= 1
                sys.addaudithook(hook)
                save(2)
            return work

        for first_save in (False, True):
            for step in range(500):
                start_over(first_save)
                reading, report = os.pipe()
                _, status = os.waitpid(child(killed_at(step)), 0)
                os.close(report)
                event = os.read(reading, 99).decode()
                os.close(reading)
                killed = os.WIFSIGNALED(status)
                row = {"first": first_save, "step": step, "event": event, "killed": killed, "loaded": load(), "again": attempt(3)}
                print(json.dumps(row))
                if not killed:
                    break
    """
    return run_script(script, tmp_path_factory.mktemp("killed") / "work")


def test_a_save_killed_at_any_step_leaves_the_old_checkpoint_or_the_new(killed_at_every_step):
    rows = [row for row in killed_at_every_step if not row["first"]]
    assert {"os.rename", "os.remove", "os.mkdir", "open"} <= {row["event"] for row in rows}
    assert [row["killed"] for row in rows] == [True] * (len(rows) - 1) + [False]
    loaded = [row["loaded"] for row in rows]
    switch = loaded.index([2])  # the step from which the new one is there
    assert switch > 5
    assert loaded == [[1]] * switch + [[2]] * (len(rows) - switch)


def test_a_first_save_killed_at_any_step_leaves_nothing_or_the_checkpoint(killed_at_every_step):
    rows = [row for row in killed_at_every_step if row["first"]]
    loaded = [row["loaded"] for row in rows]
    switch = loaded.index([2])
    assert all("CheckpointError: there is no checkpoint" in text for text in loaded[:switch])
    assert loaded[switch:] == [[2]] * (len(rows) - switch)


def test_after_a_save_killed_at_any_step_the_next_one_works(killed_at_every_step):
    assert [(row["event"], row["again"]) for row in killed_at_every_step if row["again"] != [3]] == []


def test_a_process_killed_at_random_moments_of_a_tight_loop_of_saves_leaves_a_whole_checkpoint(tmp_path):
    script = """
        def work():
            value = 2
            while True:
                save(value)
                value += 1

        draw = random.Random(0)
        for round in range(20):
            start_over(False)
            pid = child(work)
            time.sleep(draw.uniform(0.005, 0.06))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            print(json.dumps({"signal": os.WTERMSIG(status), "loaded": load()}))
    """
    rows = run_script(script, tmp_path / "work")
    assert len(rows) == 20
    assert {row["signal"] for row in rows} == {signal.SIGKILL}
    assert all(len(row["loaded"]) == 1 and row["loaded"][0] >= 1 for row in rows), rows
    assert max(row["loaded"][0] for row in rows) > 1  # some kills came after a save
