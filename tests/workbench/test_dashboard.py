"""The pages as functions, on a tiny random checkpoint: they draw, they never show a traceback, they say what they changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from streamlit.testing.v1 import AppTest

from analyses.catalogue import ANALYSES
from analyses.spec import Analysis
from models import checkpoint
from models.config import GPTConfig
from models.gpt import GPT
from models.vocabulary import Vocabulary
from workbench.dashboard import page, state

TEXT = "bad cafe"


@pytest.fixture
def folder(tmp_path: Path, random_gpt: GPT, vocabulary: Vocabulary) -> str:
    """A checkpoint of two blocks and twelve characters, without statistics, training record or card."""
    return str(checkpoint.save(tmp_path / "tiny", random_gpt, vocabulary))


def _script(slug: str, folder: str) -> None:
    from analyses.catalogue import find
    from workbench.dashboard import page

    page.show(find(slug), folder)


def _home(folder: str) -> None:
    from workbench.dashboard import home

    home.show(folder, {})


def opened(slug: str, folder: str, **link: str) -> AppTest:
    """The page after its first run, opened with an address."""
    test = AppTest.from_function(_script, kwargs={"slug": slug, "folder": folder}, default_timeout=60)
    for name, value in link.items():
        test.query_params[name] = value
    return test.run()


def told(test: AppTest) -> str:
    return " ".join(element.value.replace("\\", "") for element in test.info)


def failures(test: AppTest) -> list[str]:
    assert not test.exception
    return [element.value.replace("\\", "") for element in test.error]


def link_of(test: AppTest) -> dict[str, str]:
    """The address after a run; Streamlit gives a value as a text or as a list of one."""
    return {name: value if isinstance(value, str) else value[0] for name, value in test.query_params.items()}


def charts(test: AppTest) -> int:
    return len(test.get("vega_lite_chart"))


def widget(elements: Any, label: str) -> Any:
    (found,) = [element for element in elements if label in element.label]
    return found


@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda analysis: analysis.slug)
def test_every_page_draws_every_view(analysis: Analysis, stored: Path) -> None:
    test = opened(analysis.slug, str(stored))
    assert failures(test) == []
    assert charts(test) + len(test.dataframe) >= 1
    assert test.title[0].value == analysis.title
    assert any(analysis.function.__name__ in block.value for block in test.code)
    assert any(block.value.startswith(f"workbench run {analysis.slug}") for block in test.code)


def test_home_draws(folder: str) -> None:
    test = AppTest.from_function(_home, kwargs={"folder": folder}, default_timeout=120).run()
    assert failures(test) == []
    text = " ".join(element.value for element in test.markdown)
    assert "token embedding" in text
    assert "number of parameters" in text
    assert "fails" not in text


def test_home_writes(folder: str) -> None:
    test = AppTest.from_function(_home, kwargs={"folder": folder}, default_timeout=120).run()
    test.text_area[0].set_value("bad")
    test.button[0].click().run()
    assert failures(test) == []
    assert test.code[0].value.startswith("bad")
    assert len(test.code[0].value) == 303
    test.text_area[0].set_value("bäd")
    test.button[0].click().run()
    assert "'ä'" in failures(test)[0]


def test_a_text_that_cannot_be_read_is_one_sentence_and_stays(folder: str) -> None:
    test = opened("attention-patterns", folder, text=TEXT)
    test.text_area[0].set_value("bad!").run()
    (sentence,) = failures(test)
    assert "'!'" in sentence
    assert "not your fault" not in sentence
    assert test.text_area[0].value == "bad!"
    assert charts(test) == 0
    test.text_area[0].set_value("bad").run()
    assert failures(test) == []
    assert charts(test) >= 2


def test_missing_statistics_are_one_sentence(folder: str) -> None:
    (sentence,) = failures(opened("ablation", folder, text=TEXT))
    assert "no mean activations" in sentence


def test_an_unexpected_error_is_one_sentence(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("nothing left")

    monkeypatch.setattr("workbench.dashboard.computing.result", broken)
    (sentence,) = failures(opened("attention-patterns", folder, text=TEXT))
    assert "ZeroDivisionError: nothing left" in sentence
    assert "Traceback" not in sentence


def test_a_position_outside_a_shorter_text_is_moved_with_a_sentence(folder: str) -> None:
    test = opened("logit-attribution", folder, text=TEXT, position="6")
    assert told(test) == ""
    test.text_area[0].set_value("bad").run()
    assert "position 6" in told(test)
    assert "moved to 2" in told(test)
    assert failures(test) == []
    assert link_of(test)["position"] == "2"
    test.run()
    assert told(test) == ""


def test_a_default_text_is_made_readable(folder: str) -> None:
    test = opened("attention-patterns", folder)
    assert failures(test) == []
    assert "Changed to" in told(test)
    assert 0 < len(test.text_area[0].value) <= 10


BAD_LINKS: list[tuple[str, dict[str, str], str]] = [
    ("attention-patterns", {"text": TEXT, "layer": "9"}, "moved to 1"),
    ("attention-patterns", {"text": TEXT, "head": "first"}, "not a whole number"),
    ("attention-patterns", {"text": TEXT, "head": "-3"}, "moved to 0"),
    ("attention-patterns", {"text": ""}, "Changed to"),
    ("attention-patterns", {"text": "b" * 99}, "Changed to 'bbbbbbbbbb'"),
    ("attention-patterns", {"text": "BAD!"}, "Changed to 'bad '"),
    ("attention-patterns", {"text": TEXT, "nonsense": "1"}, "ignored"),
    ("attention-patterns", {"text": TEXT, "checkpoint": "nowhere"}, "no checkpoint 'nowhere'"),
    ("logit-attribution", {"text": TEXT, "char": "😀"}, "moved to ' '"),
    ("logit-attribution", {"text": TEXT, "position": "none", "versus": "ab"}, "moved to"),
    ("logit-lens", {"text": TEXT, "site": "everywhere"}, "moved to 'resid_post'"),
    ("circuit-rank", {"biases": "perhaps"}, "not true or false"),
]


@pytest.mark.parametrize(("slug", "link", "sentence"), BAD_LINKS, ids=[f"{slug} {link}" for slug, link, _ in BAD_LINKS])
def test_a_bad_link_gives_a_sentence_and_a_picture(slug: str, link: dict[str, str], sentence: str, folder: str) -> None:
    test = opened(slug, folder, **link)
    assert failures(test) == []
    assert sentence in told(test)
    assert charts(test) >= 1


def test_the_address_holds_everything_and_restores_it(folder: str) -> None:
    test = opened("qk-circuit", folder, layer="1", head="1", space="position")
    own = {"space": "position", "fold": "norm weights", "embedding": "W_E", "scale": "one"}
    text = "KING RICHARD III:\nNow is the winter"
    assert link_of(test) == {"checkpoint": folder, "layer": "1", "head": "1", "text": text, **own}
    assert told(test) == ""


def test_none_survives_in_a_widget(folder: str) -> None:
    test = opened("logit-attribution", folder, text=TEXT, position="3")
    widget(test.selectbox, "Position").select(state.NONE).run()
    assert failures(test) == []
    assert link_of(test)["position"] == "none"
    assert test.session_state["values"]["position"] is None


def test_no_checkpoint_at_all_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.checkpoint.available", dict)
    (sentence,) = failures(opened("logit-lens", "/nowhere"))
    assert "There is no checkpoint here" in sentence


def test_a_broken_checkpoint_is_one_sentence(folder: str) -> None:
    (Path(folder) / "model.safetensors").write_bytes(b"not weights")
    (sentence,) = failures(opened("logit-lens", folder))
    assert "expected safetensors weights" in sentence
    assert "not your fault" not in sentence


def test_markdown_in_a_sentence_is_shown_as_it_is() -> None:
    assert page.plain("a *b* $c$ [d] :red[e]") == r"a \*b\* \$c\$ \[d\] \:red\[e\]"


def test_a_film_gives_a_slider_over_the_training(folder: str, random_gpt: GPT, vocabulary: Vocabulary) -> None:
    for step in (0, 400):
        with torch.no_grad():
            random_gpt.unembedding.weight += 1 + step
        checkpoint.save(Path(folder + "-film") / f"step-{step:05d}", random_gpt, vocabulary)
    test = opened("logit-lens", folder, text=TEXT)
    assert failures(test) == []
    slider = widget(test.select_slider, "Step of its training")
    assert slider.options == ["0", "400", "trained"]
    assert slider.value == "trained"
    slider.set_value(400).run()
    assert failures(test) == []
    assert link_of(test)["checkpoint"] == f"{folder}-film/step-00400"
    assert charts(test)
    again = opened("logit-lens", folder, text=TEXT, checkpoint=f"{folder}-film/step-00000")
    assert told(again) == ""
    assert widget(again.select_slider, "Step of its training").value == 0
    absent = opened("logit-lens", folder, text=TEXT, checkpoint=f"{folder}-film/step-00001")
    assert "There is no checkpoint" in told(absent)
    assert widget(absent.select_slider, "Step of its training").value == "trained"


# --- beside each other, and over training ----------------------------------------------------------------------------


@pytest.fixture
def film(tmp_path: Path, vocabulary: Vocabulary, random_weights: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A checkpoint `run` whose film has two moments, in ./checkpoints."""
    config = GPTConfig(d_vocab=12, n_ctx=10, d_model=8, n_layers=2, n_heads=2)
    for name in ("run", "run-film/step-00000", "run-film/step-00007"):
        checkpoint.save(tmp_path / "checkpoints" / name, random_weights(config).float(), vocabulary)
    monkeypatch.chdir(tmp_path)
    return "run"


def _following(name: str) -> None:
    from workbench.dashboard import over_training

    over_training.show(name)


def test_another_checkpoint_lies_beside_the_first_with_the_difference(film: str) -> None:
    test = opened("logit-lens", film, text=TEXT, **{"with": "run-film/step-00007"})
    assert failures(test) == []
    assert charts(test) == 3 * 3  # three pictures, each twice and the difference
    assert "compare(first, second" in "".join(block.value for block in test.code)
    assert "wb.load('run-film/step-00007')" in "".join(block.value for block in test.code)
    widget(test.selectbox, "Another checkpoint").set_value("nothing").run()
    assert charts(test) == 3
    assert "with" not in link_of(test)


def test_another_text_lies_beside_the_first_if_it_is_as_long(film: str) -> None:
    test = opened("logit-lens", film, text=TEXT)
    widget(test.text_area, "Another text").set_value("face bad").run()
    assert failures(test) == []
    assert charts(test) == 9
    assert link_of(test)["with_text"] == "face bad"
    widget(test.text_area, "Another text").set_value("bad").run()
    assert all("give texts of equal length" in sentence for sentence in failures(test))
    assert len(failures(test)) == 3


def test_the_page_over_training_follows_a_number(film: str) -> None:
    test = AppTest.from_function(_following, kwargs={"name": film}, default_timeout=60).run()
    widget(test.selectbox, "Analysis").set_value("circuit-rank").run()
    assert failures(test) == []
    assert charts(test) == 2  # curves, and the heads at the slider's step
    assert widget(test.selectbox, "Index").value == 0  # singular values are (layer, head, index): one index is chosen
    widget(test.selectbox, "Number").set_value("ov_rank").run()
    assert failures(test) == []
    assert charts(test) == 2
    assert not [box for box in test.selectbox if "Index" in box.label]
    assert "over_training(circuit_rank, 'run-film', biases=False)" in "".join(block.value for block in test.code)


def test_without_a_film_the_page_says_how_to_make_one(folder: str) -> None:
    test = AppTest.from_function(_following, kwargs={"name": folder}, default_timeout=60).run()
    assert failures(test) == []
    assert "There is no film" in told(test)
