"""The text that models learn from: Tiny Shakespeare by default, any UTF-8 file with `--data`.

Source: karpathy/char-rnn, `data/tinyshakespeare/input.txt` (Karpathy 2015): 1,115,394 characters, 65 distinct. It is
downloaded once from its public address, checked against its sha256 and cached; it is never part of this repository.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from models.errors import WorkbenchError
from models.vocabulary import Vocabulary

ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
VARIABLE = "WORKBENCH_DATA"  # a path; stands in for --data where no command line is at hand
TRAINING_SHARE = 0.9  # nanoGPT's split: the first 90 % of the characters train, the rest validate

Split = Literal["train", "validation"]


class CorpusError(WorkbenchError):
    """There is no usable text; the message says what was tried and the ways out."""


@dataclass(frozen=True)
class Corpus:
    """A text with its provenance and its split."""

    name: str
    text: str
    sha256: str

    def __post_init__(self) -> None:
        if len(self.text) < 20:
            raise CorpusError(f"{self.name}: got {len(self.text)} characters; expected a text of at least 20 to split")

    def split(self, part: Split) -> str:
        """The first 90 % of the characters (`train`) or the last 10 % (`validation`)."""
        boundary = int(TRAINING_SHARE * len(self.text))
        return self.text[:boundary] if part == "train" else self.text[boundary:]

    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.text)

    def encoded(self, part: Split, vocabulary: Vocabulary) -> np.ndarray:
        """Ids (position,) of one part of the split."""
        return vocabulary.encode(self.split(part))


def read(path: str | Path) -> Corpus:
    """Read a UTF-8 text file.

    Raises:
        CorpusError: no such file, a folder, or bytes that are not UTF-8.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CorpusError(f"cannot read the text {str(path)!r} ({error.strerror}); give the path of a UTF-8 file") from None
    try:
        text = raw.decode("utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: byte {error.start} is not UTF-8; save the text as UTF-8 and try again") from None
    return Corpus(path.name, text, hashlib.sha256(raw).hexdigest())


def load(path: str | Path | None = None) -> Corpus:
    """The text at `path`; else the one that the variable WORKBENCH_DATA names; else Tiny Shakespeare.

    Raises:
        CorpusError: the file cannot be used, or Tiny Shakespeare is neither cached nor reachable.
    """
    path = path or os.environ.get(VARIABLE)
    return read(path) if path else tiny_shakespeare()


def at_hand() -> Corpus:
    """The text that WORKBENCH_DATA names; else Tiny Shakespeare if it is cached. Nothing is fetched.

    Raises:
        CorpusError: neither is there, or the file cannot be used.
    """
    return read(path) if (path := os.environ.get(VARIABLE)) else tiny_shakespeare(download=False)


def tiny_shakespeare(download: bool = True) -> Corpus:
    """Tiny Shakespeare from the cache, or from the network if `download`.

    Raises:
        CorpusError: it is not cached, and could not be fetched or has the wrong hash.
    """
    import platformdirs
    import pooch

    folder = Path(platformdirs.user_cache_dir("tiny-gpt-workbench", appauthor=False))
    name = "tinyshakespeare.txt"
    cached = folder / name
    with suppress(CorpusError):  # not cached, or damaged: then it is fetched anew
        corpus = read(cached)
        if corpus.sha256 == SHA256:
            return corpus
    ways_out = f"connect to the network once so that it can be cached, or give a text with --data PATH (or {VARIABLE}=PATH)"
    if not download:
        fetch = f"`workbench corpus` fetches it once; or give a text with --data PATH (or {VARIABLE}=PATH)"
        raise CorpusError(f"Tiny Shakespeare, which this reads, is not in the cache {folder}; {fetch}")
    try:
        pooch.retrieve(ADDRESS, known_hash=f"sha256:{SHA256}", fname=name, path=folder, progressbar=False)
    except Exception as error:  # requests, urllib3, OSError and pooch's own ValueError for a wrong hash
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorpusError(f"Tiny Shakespeare could not be fetched from {ADDRESS} ({reason[:200]}); {ways_out}") from None
    return read(cached)


def windows(ids: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Consecutive non-overlapping windows of a text: inputs and next characters, (batch, position) each.

    The last partial window is left out. This is how every validation loss here is measured.

    Raises:
        CorpusError: the text is not longer than one window.
    """
    count = (len(ids) - 1) // length
    if count < 1:
        raise CorpusError(f"got {len(ids)} characters; expected more than one window of {length}: give a longer text")
    inputs = ids[: count * length].reshape(count, length)
    targets = ids[1 : count * length + 1].reshape(count, length)
    return inputs, targets
