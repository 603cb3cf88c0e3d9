"""The text: its split, its windows, its one download, and sentences when it cannot be had."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pooch
import pytest

from models import corpus
from models.corpus import SHA256, VARIABLE, Corpus, CorpusError, read, windows

TEXT = "A text of more than twenty characters.\n"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Tiny Shakespeare would be cached: an empty folder that is gone after the test."""
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda *args, **kwargs: str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "tinyshakespeare.txt"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def retrieve(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route to host\nand a second line")

    monkeypatch.setattr(pooch, "retrieve", retrieve)


def fetching(text: str, log: list[dict[str, Any]]) -> Callable[..., None]:
    """A pooch.retrieve that fetches this text and writes down how it was asked."""

    def retrieve(address: str, known_hash: str, fname: str, path: Path, **kwargs: Any) -> None:
        log.append({"address": address, "known_hash": known_hash})
        (Path(path) / fname).write_text(text, encoding="utf-8", newline="")

    return retrieve


# --- split and windows -----------------------------------------------------------------------------------------------


def test_tiny_shakespeare_is_split_as_nanogpt_does(tiny_shakespeare):
    train, validation = tiny_shakespeare.split("train"), tiny_shakespeare.split("validation")
    assert (len(train), len(validation)) == (1_003_854, 111_540)
    assert train + validation == tiny_shakespeare.text


def test_tiny_shakespeare_has_65_characters_newline_and_space_first(tiny_shakespeare):
    vocabulary = tiny_shakespeare.vocabulary()
    assert len(vocabulary) == 65
    assert vocabulary.characters[:2] == ("\n", " ")


def test_validation_in_windows_of_64_leaves_out_the_last_partial_one(tiny_shakespeare):
    inputs, targets = windows(tiny_shakespeare.encoded("validation", tiny_shakespeare.vocabulary()), 64)
    assert inputs.shape == targets.shape == (1_742, 64)


def test_encoded_parts_are_the_split(small_corpus, vocabulary):
    for part in ("train", "validation"):
        assert vocabulary.decode(small_corpus.encoded(part, vocabulary).tolist()) == small_corpus.split(part)


def test_windows_follow_each_other_and_targets_are_one_character_on():
    inputs, targets = windows(np.arange(10), 3)
    assert inputs.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert targets.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.mark.parametrize(("length", "count"), [(4, 1), (5, 1), (6, 1), (7, 2), (8, 2)])
def test_as_many_windows_as_have_a_target_for_every_character(length, count):
    assert len(windows(np.arange(length), 3)[0]) == count


def test_a_text_of_one_window_has_no_last_target():
    with pytest.raises(CorpusError, match="got 3 characters; expected more than one window of 3"):
        windows(np.arange(3), 3)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_is(tmp_path):
    raw = (TEXT + "é😀\r\n").encode()
    (tmp_path / "text.txt").write_bytes(raw)
    found = read(tmp_path / "text.txt")
    assert found == Corpus("text.txt", raw.decode(), hashlib.sha256(raw).hexdigest())
    assert "\r\n" in found.text


def test_bytes_that_are_not_utf_8_are_named_by_their_place(tmp_path):
    (tmp_path / "latin.txt").write_bytes(TEXT.encode() + "é".encode("latin-1"))
    with pytest.raises(CorpusError, match=f"latin.txt: byte {len(TEXT)} is not UTF-8; save the text as UTF-8"):
        read(tmp_path / "latin.txt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CorpusError, match=r"cannot read the text .*nowhere.txt.*No such file.*give the path of a UTF-8 file"):
        read(tmp_path / "nowhere.txt")


def test_a_folder_is_not_a_text(tmp_path):
    with pytest.raises(CorpusError, match="cannot read the text .*Is a directory"):
        read(tmp_path)


def test_a_text_too_short_to_split_is_refused():
    with pytest.raises(CorpusError, match="short: got 19 characters; expected a text of at least 20"):
        Corpus("short", "x" * 19, "")
    assert len(Corpus("enough", "x" * 20, "").split("validation")) == 2


def test_a_given_path_comes_before_the_variable_and_the_variable_before_the_cache(tmp_path, monkeypatch, cached, offline):
    for name in ("given", "variable"):
        (tmp_path / name).write_text(TEXT + name)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "variable"))
    assert corpus.load(tmp_path / "given").name == "given"
    assert corpus.load().name == "variable"
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(CorpusError, match="Tiny Shakespeare could not be fetched"):
        corpus.load()


# --- the download ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("offline")
def test_without_network_and_cache_the_error_names_both_ways_out(cached):
    with pytest.raises(CorpusError) as error:
        corpus.tiny_shakespeare()
    message = str(error.value)
    assert "no route to host" in message
    assert "connect to the network once" in message
    assert "--data PATH" in message
    assert f"{VARIABLE}=PATH" in message
    assert "\n" not in message


def test_download_false_never_asks_for_the_network(cached, monkeypatch):
    log: list[dict[str, Any]] = []
    monkeypatch.setattr(pooch, "retrieve", fetching(TEXT, log))
    with pytest.raises(CorpusError, match="not in the cache"):
        corpus.tiny_shakespeare(download=False)
    assert log == []


def test_the_download_is_checked_against_the_hash(cached, monkeypatch):
    log: list[dict[str, Any]] = []
    monkeypatch.setattr(pooch, "retrieve", fetching(TEXT, log))
    corpus.tiny_shakespeare()
    assert log == [{"address": corpus.ADDRESS, "known_hash": f"sha256:{SHA256}"}]


@pytest.mark.usefixtures("offline")
def test_a_cached_text_with_another_hash_is_not_used(cached):
    cached.write_text(TEXT)
    with pytest.raises(CorpusError, match="Tiny Shakespeare could not be fetched"):
        corpus.tiny_shakespeare()
    with pytest.raises(CorpusError, match="not in the cache"):
        corpus.tiny_shakespeare(download=False)


def test_the_real_text_is_fetched_once_and_then_taken_from_the_cache(cached, monkeypatch, tiny_shakespeare):
    log: list[dict[str, Any]] = []
    cached.write_text(TEXT)
    monkeypatch.setattr(pooch, "retrieve", fetching(tiny_shakespeare.text, log))
    assert corpus.tiny_shakespeare().sha256 == corpus.tiny_shakespeare().sha256 == SHA256
    assert len(log) == 1


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe damaged bytes that are not UTF-8"], ids=["empty", "not UTF-8"])
def test_a_damaged_cached_file_is_fetched_again(cached, monkeypatch, tiny_shakespeare, damage):
    cached.write_bytes(damage)
    monkeypatch.setattr(pooch, "retrieve", fetching(tiny_shakespeare.text, []))
    assert corpus.tiny_shakespeare().sha256 == SHA256
