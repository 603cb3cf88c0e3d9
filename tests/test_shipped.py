"""What is shipped: every checkpoint passes its own check, every moment of a film is whole, and cards state what is measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from models import checkpoint, checks, film
from models.config import PRESETS, parameter_count
from models.run import recorded_loss

SHIPPED = Path(__file__).resolve().parent.parent / "checkpoints"
NAMES = sorted(path.name for path in SHIPPED.iterdir() if checkpoint.is_checkpoint(path))
FILMS = sorted(path.name for path in SHIPPED.glob("*-film"))


def test_baby_is_shipped():
    assert "baby" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_checkpoint_passes_every_check(name: str, request: Any) -> None:
    """The loss needs the corpus: where there is none, that check alone is not made."""
    found = checkpoint.load(SHIPPED / name)
    try:
        corpus = request.getfixturevalue("tiny_shakespeare")
    except pytest.skip.Exception:
        corpus = None
    results = checks.verify(found, corpus)
    assert [result for result in results if result.passed is False] == []
    unmade = [result.name for result in results if result.passed is None]
    allowed = {"validation loss, nats per character"} if corpus is None else set()
    assert set(unmade) <= allowed | ({"attention rows are probabilities over the past"} if found.config.n_layers == 0 else set())


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_card_states_what_the_checkpoint_is(name: str) -> None:
    found = checkpoint.load(SHIPPED / name)
    card = (SHIPPED / name / "README.md").read_text(encoding="utf-8")
    assert f"{parameter_count(found.config):,} parameters" in card
    assert f"**{recorded_loss(found.path):.4f}** nats per character" in card
    assert found.training["corpus_sha256"] in card
    assert (SHIPPED / name / "training.csv").is_file()
    assert not (SHIPPED / name / "resume").is_dir() or not list((SHIPPED / name / "resume").iterdir())


@pytest.mark.parametrize("name", FILMS)
def test_a_shipped_film_is_whole_and_of_the_run_that_is_shipped(name: str) -> None:
    moments = film.moments(SHIPPED / name)
    run = checkpoint.load(SHIPPED / name.removesuffix("-film"))
    assert run.preset in PRESETS
    assert run.recipe is not None
    assert tuple(moments) == run.recipe.moments
    for step, place in moments.items():
        moment = checkpoint.load(place)
        assert (moment.config, moment.recipe, moment.training["steps"]) == (run.config, run.recipe, step)
    card = (SHIPPED / name / "README.md").read_text(encoding="utf-8")
    assert [int(step.replace(",", "")) for step in re.findall(r"^\| ([\d,]+) \|", card, re.MULTILINE)] == list(moments)
    if run.training["best_step"] in moments:
        last = checkpoint.load(moments[run.training["best_step"]]).gpt.state_dict()
        for key, tensor in run.gpt.state_dict().items():
            assert torch.equal(tensor.half().float(), last[key]), key
