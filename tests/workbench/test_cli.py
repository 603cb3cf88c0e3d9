"""The command line as a person uses it: in a process of its own."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from analyses.activation_patching import activation_patching
from analyses.attention_patterns import attention_patterns
from analyses.catalogue import ANALYSES
from analyses.circuit_rank import circuit_rank
from analyses.logit_lens import logit_lens
from analyses.qk_circuit import qk_circuit
from models import hooked
from workbench import cli


def workbench(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "import sys; from workbench.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd, timeout=300)


def in_process(capsys: Any, monkeypatch: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of one call, without the cost of a new process."""
    monkeypatch.setattr(sys, "argv", ["workbench", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['workbench', '--help']\n"
        "from workbench.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'xarray', 'transformer_lens', 'streamlit', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("run", "list", "analyses", "generate", "train", "verify", "app"):
        assert command in done.stdout


def test_every_analysis_has_help_with_every_knob(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for analysis in ANALYSES:
        code, out, _ = in_process(capsys, monkeypatch, "run", analysis.slug, "--help")
        assert code == 0
        for parameter in analysis.parameters.values():
            assert parameter.option in out, (analysis.slug, parameter.option)


def test_run_writes_the_same_numbers_as_python(stored: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    out = tmp_path / "lens.nc"
    arguments = (
        "run",
        "logit-lens",
        "--checkpoint",
        str(stored),
        "--text",
        r"KING:\nNow",
        "--site",
        "resid_pre",
        "--out",
        str(out),
    )
    code, printed, _ = in_process(capsys, monkeypatch, *arguments)
    assert (code, printed.strip()) == (0, str(out))
    expected = logit_lens(hooked.load(stored), "KING:\nNow", "resid_pre")
    with xr.open_dataset(out, engine="h5netcdf") as read:
        xr.testing.assert_equal(read.load(), expected)


@pytest.mark.parametrize(
    ("analysis", "knobs", "panel"),
    [
        (logit_lens, {"text": "O,\n 'tis $3; so", "site": "resid_mid"}, 3),
        (qk_circuit, {"layer": 1, "head": 1, "space": "position", "fold": "norm weights and biases"}, 1),
        (circuit_rank, {"biases": True}, 2),
        (activation_patching, {"clean": "\nab", "corrupted": " ab", "correct": "\n", "wrong": "'"}, 1),
    ],
)
def test_the_shown_command_line_does_what_it_says(
    analysis: Any, knobs: Any, panel: int, stored: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    model = hooked.load(stored)
    expected = analysis(model, **knobs)
    out = tmp_path / "result.nc"
    line = cli.command_line(analysis, str(stored), analysis.check(model, knobs), str(out), panel)
    words = shlex.split(line)
    code, _, err = in_process(capsys, monkeypatch, *words[1:])
    assert code == 0, err
    assert ("--panel" in words) == (panel > 1)
    with xr.open_dataset(out, engine="h5netcdf") as read:
        xr.testing.assert_equal(read.load(), expected)


def test_csv_holds_every_value_with_its_coordinates(stored: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    out = tmp_path / "qk.csv"
    code, _, _ = in_process(capsys, monkeypatch, "run", "qk-circuit", "--checkpoint", str(stored), "--out", str(out))
    table = pd.read_csv(out, keep_default_na=False)
    assert code == 0
    assert list(table.columns) == ["layer", "head", "query_char", "key_char", "score"]
    assert len(table) == 2 * 2 * 65 * 65
    assert {"\n", " ", "'"} <= set(table.query_char)
    expected = qk_circuit(hooked.load(stored)).score.values.ravel()
    np.testing.assert_allclose(table.score, expected, rtol=1e-6)


def test_a_panel_can_be_chosen(stored: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    out = tmp_path / "kl.csv"
    arguments = ("run", "logit-lens", "--checkpoint", str(stored), "--panel", "3", "--out", str(out))
    code, _, _ = in_process(capsys, monkeypatch, *arguments)
    assert code == 0
    assert list(pd.read_csv(out).columns) == ["layer", "position", "position_char", "kl_to_output"]


def test_compare_writes_both_sides_and_their_difference(film: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    names = [str(film / step) for step in ("step-00010", "step-00400")]
    out = tmp_path / "both.nc"
    options = ("--checkpoint", names[0], "--second", names[1], "--knob", r"text=KING:\nO", "--panel", "3", "--out", str(out))
    code, printed, err = in_process(capsys, monkeypatch, "compare", "logit-lens", *options)
    assert (code, printed.strip()) == (0, str(out)), err
    expected = [logit_lens(hooked.load(name), "KING:\nO").kl_to_output.values for name in names]
    with xr.open_dataset(out, engine="h5netcdf") as read:
        both = read.kl_to_output
        for side, values in zip(("first", "second", "difference"), (*expected, expected[1] - expected[0]), strict=True):
            np.testing.assert_array_equal(both.sel(side=side), values)


def test_compare_takes_two_texts_of_one_checkpoint(film: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    out = tmp_path / "both.csv"
    options = ("--checkpoint", str(film / "step-00010"), "--knob", "text=KING", "--second-knob", "text=RING", "--out", str(out))
    code, _, err = in_process(capsys, monkeypatch, "compare", "attention-patterns", *options)
    assert code == 0, err
    table = pd.read_csv(out)
    assert set(table.side) == {"first", "second", "difference"}
    assert "K/R" in set(table.key_position_char)


def test_over_training_adds_the_step_and_keeps_a_slice(film: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    out = tmp_path / "forming.nc"
    options = ("--film", str(film), "--knob", "text=KING", "--at", "layer=1", "--at", "head=0", "--out", str(out))
    code, _, err = in_process(capsys, monkeypatch, "over-training", "attention-patterns", *options)
    assert code == 0, err
    with xr.open_dataset(out, engine="h5netcdf") as read:
        assert read.step.values.tolist() == [0, 10, 400]
        for step in (0, 10, 400):
            single = attention_patterns(hooked.load(film / f"step-{step:05d}"), text="KING").pattern.sel(layer=1, head=0)
            np.testing.assert_array_equal(read.pattern.sel(step=step), single)


def test_corpus_says_what_is_read(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    text = tmp_path / "small.txt"
    text.write_bytes(b"abc\ncab\n" * 2_000)
    code, out, _ = in_process(capsys, monkeypatch, "corpus", "--data", str(text))
    assert code == 0
    assert out.startswith("small.txt: 16,000 characters, 4 distinct, sha256 ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "qk-circuit", "--layer", "9", "--out", "x.svg"), "layer 9 is outside the model's 2 blocks; give 0–1"),
        (("run", "logit-lens", "--text", "é", "--out", "x.svg"), "character 'é' at place 0"),
        (("run", "logit-lens", "--out", "x.jpg"), "cannot write 'x.jpg'; give a name that ends in one of .svg"),
        (("run", "circuit-rank", "--panel", "99", "--out", "x.svg"), "give one of: 1 Singular values of QK; 2 Singular values"),
        (("compare", "qk-circuit", "--knob", "layer", "--out", "x.svg"), "expected name=value"),
        (("compare", "logit-lens", "--panel", "99", "--out", "x.svg"), "panel 99 is not among this result's pictures"),
        (("over-training", "circuit-rank", "--film", "nowhere", "--out", "x.svg"), "nowhere"),
        (("over-training", "circuit-rank", "--at", "sausage=1", "--out", "x.svg"), "circuit-rank has no dimension 'sausage'"),
        (("corpus", "--data", "nowhere.txt"), "nowhere.txt"),
        (("generate", "--temperature", "-1"), "temperature: got -1.0; expected a number of at least 0"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: tuple[str, ...], sentence: str, stored: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    named = () if arguments[0] in ("over-training", "corpus") else ("--checkpoint", str(stored))
    code, out, err = in_process(capsys, monkeypatch, *arguments, *named)
    assert code == 2
    assert sentence in err
    assert err.startswith("workbench: ")
    assert err.count("\n") == 1
    assert not out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("verify", "nobody"), "there is no checkpoint 'nobody'; give the path of its folder, or one of:"),
        (("train", "giant"), "there is no preset 'giant'; give one of: baby,"),
        (("app", "--checkpoint", "nobody"), "there is no checkpoint 'nobody'"),
        (("train", "baby", "--data", "missing.txt"), "cannot read the text 'missing.txt'"),
        (("card", "nobody", "--data", "missing.txt"), "cannot read the text 'missing.txt'"),
    ],
)
def test_a_wrong_name_is_one_sentence(arguments: tuple[str, ...], sentence: str, capsys: Any, monkeypatch: Any) -> None:
    code, _, err = in_process(capsys, monkeypatch, *arguments)
    assert code == 2
    assert sentence in err


def test_a_mistake_in_a_real_process(tmp_path: Path) -> None:
    done = workbench("verify", "nobody", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("workbench: there is no checkpoint 'nobody'")
    assert "Traceback" not in done.stderr


def test_train_verify_generate_list(corpus_text: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """A whole small life: train, refuse to overwrite, resume, verify, list, write."""
    data = tmp_path / "text.txt"
    vocabulary = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    data.write_text(vocabulary + corpus_text)
    monkeypatch.chdir(tmp_path)
    train = ("train", "walkthrough-4.10", "--data", str(data), "--iterations", "20")
    code, out, err = in_process(capsys, monkeypatch, *train)
    assert code == 0, err
    assert Path(out.strip()) == Path("checkpoints/walkthrough-4.10/README.md")
    assert "42,369 parameters" in Path(out.strip()).read_text()
    code, _, err = in_process(capsys, monkeypatch, *train)
    assert code == 2
    assert "already holds a checkpoint; go on with --resume" in err
    code, _, err = in_process(capsys, monkeypatch, *train, "--resume")
    assert code == 0, err
    code, out, _ = in_process(capsys, monkeypatch, "verify", "walkthrough-4.10", "--data", str(data))
    assert code == 0, out
    assert out.count("pass") == 8
    code, out, _ = in_process(capsys, monkeypatch, "list")
    assert "walkthrough-4.10" in out
    assert "42,369 parameters" in out
    code, out, _ = in_process(capsys, monkeypatch, "generate", "ab", "--checkpoint", "walkthrough-4.10", "--length", "30")
    assert code == 0
    assert out.startswith("ab")
    assert len(out) == 33  # prompt, thirty characters, the terminal's line break


def test_verify_fails_on_a_broken_record(stored: Path, tmp_path: Path, corpus_text: str, capsys: Any, monkeypatch: Any) -> None:
    """A checkpoint whose log claims another loss than it has does not pass."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(stored, copy)
    (copy / "training.csv").write_text("step,training_loss,validation_loss\n0,nan,0.5\n")
    data = tmp_path / "text.txt"
    data.write_text(corpus_text)
    code, out, _ = in_process(capsys, monkeypatch, "verify", str(copy), "--data", str(data))
    assert code == 1
    assert "FAIL  validation loss" in out


def test_presets_and_analyses_are_listed(capsys: Any, monkeypatch: Any) -> None:
    _, out, _ = in_process(capsys, monkeypatch, "presets")
    assert "baby                      816,640 parameters" in out
    _, out, _ = in_process(capsys, monkeypatch, "analyses")
    assert [line.split()[0] for line in out.splitlines()] == [analysis.slug for analysis in ANALYSES]
