"""Fixtures for every test: random models with nothing zero in them, models whose circuits were put there by hand, a made-up
corpus, and the real one if it is here."""

from __future__ import annotations

import hashlib
import math
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch

from analyses import over_corpus
from analyses.passage import PASSAGE
from models import checkpoint, corpus, hooked, statistics
from models.config import GPTConfig
from models.corpus import Corpus
from models.gpt import GPT
from models.hooked import to_hooked
from models.vocabulary import Vocabulary

torch.set_num_threads(1)  # small models: threads only get into each other's way, and sums keep their order


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that talks to anything but this machine fails, whatever the code under test catches."""

    def guarded(method: Any) -> Any:
        def connect(self: socket.socket, address: Any) -> Any:
            if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
                pytest.fail(f"a test must not use the network, tried {address}")
            return method(self, address)

        return connect

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, guarded(getattr(socket.socket, name)))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Whatever draws from torch's global generator draws the same in every run and every order of tests."""
    torch.manual_seed(0)


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Annotations are checked while tests run; a test of what our own code says about a wrong type needs that off."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def vocabulary() -> Vocabulary:
    """Twelve characters: newline, space, a to j."""
    return Vocabulary.of("\n abcdefghij")


def _random_weights(config: GPTConfig, seed: int = 0) -> GPT:
    """A float64 GPT in eval mode: PyTorch's default weights, and noise on biases and LayerNorm weights."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        gpt = GPT(config, "torch").double().eval()
    with torch.no_grad():
        if config.tied:  # an N(0, 1) embedding used as unembedding makes huge logits
            gpt.token_embedding.weight /= math.sqrt(config.d_model)
        for parameter in gpt.parameters():
            if parameter.ndim == 1:  # biases and LayerNorm weights
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return gpt


@pytest.fixture(scope="session")
def random_weights() -> Callable[..., GPT]:
    """`random_weights(config, seed=0)`: a float64 GPT of any architecture, no bias 0 and no LayerNorm weight 1."""
    return _random_weights


@pytest.fixture
def random_gpt(vocabulary: Vocabulary) -> GPT:
    """Two blocks, two heads, untied, every bias there is; float64; no bias is 0 and no LayerNorm weight is 1."""
    sizes = dict(d_vocab=len(vocabulary), n_ctx=10, d_model=16, n_layers=2, n_heads=2)
    return _random_weights(GPTConfig(**sizes, bias_qkv=True, bias_unembed=True))


@pytest.fixture
def random_model(random_gpt: GPT, vocabulary: Vocabulary) -> Any:
    """`random_gpt` as a HookedTransformer, float64, with characters; a test may change it."""
    return to_hooked(random_gpt, vocabulary)


@pytest.fixture(scope="session")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three random models of one shape as the moments of a run: twelve characters, two blocks of two heads."""
    folder = tmp_path_factory.mktemp("films") / "random-film"
    vocabulary = Vocabulary(tuple("\n $:GIKNORSf"))
    config = GPTConfig(d_vocab=12, n_ctx=16, d_model=8, n_layers=2, n_heads=2, bias_qkv=True)
    for number, step in enumerate((0, 10, 400)):
        gpt = _random_weights(config).float()
        with torch.no_grad():
            gpt.token_embedding.weight *= 1 + number
        path = checkpoint.save(folder / f"step-{step:05d}", gpt, vocabulary)
        statistics.add(path, Corpus("twelve", "".join(vocabulary.characters) * 30, "none"))
    return folder


@pytest.fixture(scope="session")
def corpus_text() -> str:
    """About 6,000 characters of made-up words in lines, over the twelve characters of `vocabulary`."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 5))) for _ in range(30)]
    return "".join(draw.choice(words) + draw.choice("   \n") for _ in range(1500))


@pytest.fixture(scope="session")
def small_corpus(corpus_text: str) -> Corpus:
    return Corpus("made-up words", corpus_text, hashlib.sha256(corpus_text.encode()).hexdigest())


GIVEN_TEXT = os.environ.get(corpus.VARIABLE)  # before any test puts another there


@pytest.fixture
def passage_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in passage as the text that analyses of the whole corpus read, and an empty folder for what they keep."""
    folder = tmp_path_factory.mktemp("passage")
    text = folder / "passage.txt"
    text.write_text(PASSAGE, encoding="utf-8")
    monkeypatch.setenv(corpus.VARIABLE, str(text))
    monkeypatch.setattr(over_corpus, "folder", lambda: folder / "results")
    return text


@pytest.fixture(scope="session")
def tiny_shakespeare() -> Corpus:
    """The real corpus, from WORKBENCH_DATA or the cache. Never downloaded here; CI must have it."""
    lack = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    try:
        found = corpus.read(GIVEN_TEXT) if GIVEN_TEXT else corpus.tiny_shakespeare(download=False)
    except corpus.CorpusError as error:
        lack(f"needs Tiny Shakespeare: {error}")
    if found.sha256 != corpus.SHA256:
        lack(f"needs Tiny Shakespeare, and {corpus.VARIABLE} is another text")
    return found


SHAKESPEARE = tuple("\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory, random_weights: Any) -> Any:
    """A small random checkpoint over the 65 characters of Shakespeare, with statistics, as a folder."""
    config = GPTConfig(n_ctx=64, d_model=16, n_layers=2, n_heads=2, bias_qkv=True, bias_unembed=True)
    gpt = random_weights(config).float()
    path = tmp_path_factory.mktemp("checkpoints") / "small"
    vocabulary = Vocabulary(SHAKESPEARE)
    checkpoint.save(path, gpt, vocabulary)
    draw = torch.Generator().manual_seed(0)
    text = vocabulary.decode(torch.randint(65, (3000,), generator=draw).tolist())
    statistics.add(path, Corpus("random characters", text, "none"))
    return path


@pytest.fixture
def small_model(stored: Any) -> Any:
    """The stored checkpoint as `workbench.load` gives it; every analysis' defaults run on it."""
    return hooked.load(stored)


# --- circuits put there by hand --------------------------------------------------------------------------------------

SHARP = 60.0  # score that makes a softmax one-hot to 1e-20
LETTERS = "abcde"


def _blank(d_model: int, n_layers: int, n_ctx: int) -> GPT:
    config = GPTConfig(
        d_vocab=len(LETTERS), n_ctx=n_ctx, d_model=d_model, n_layers=n_layers, n_heads=2, mlp=False, norm=False, final_norm=False
    )
    gpt = GPT(config).double().eval()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.zero_()
    return gpt


@torch.no_grad()
def _embed(gpt: GPT, token_block: int, position_block: int) -> None:
    V, T = gpt.config.d_vocab, gpt.config.n_ctx
    gpt.token_embedding.weight[:, token_block : token_block + V] = torch.eye(V, dtype=torch.float64)
    gpt.position_embedding.weight[:, position_block : position_block + T] = torch.eye(T, dtype=torch.float64)


@torch.no_grad()
def _previous_character_head(gpt: GPT, layer: int, token_block: int, position_block: int, out_block: int) -> None:
    """Head 0: position p asks for position p − 1, and the character there is copied to `out_block`."""
    V, T, sharp = gpt.config.d_vocab, gpt.config.n_ctx, SHARP * gpt.config.d_head**0.5
    attention: Any = gpt.blocks[layer].attention.inner
    for place in range(1, T):
        attention.query.weight[place - 1, position_block + place] = sharp
    for place in range(T):
        attention.key.weight[place, position_block + place] = 1
    for character in range(V):
        attention.value.weight[character, token_block + character] = 1
        attention.output.weight[out_block + character, character] = 1


@pytest.fixture
def previous_character_model() -> Any:
    """One block; head 0 copies the previous character, head 1 is empty; it predicts that character with logit 10."""
    V, T = len(LETTERS), 8
    gpt = _blank(2 * V + T + 2, 1, T)
    _embed(gpt, 0, V)
    _previous_character_head(gpt, 0, token_block=0, position_block=V, out_block=V + T)
    with torch.no_grad():
        gpt.unembedding.weight[:, V + T : 2 * V + T] = 10 * torch.eye(V, dtype=torch.float64)
    return hooked.to_hooked(gpt, Vocabulary(tuple(LETTERS)))


@pytest.fixture
def induction_model() -> Any:
    """Two blocks: L0H0 copies the previous character, L1H0 looks for where the present one was previous, and copies.

    The other two heads are empty. After 'abca' it predicts 'b' with logit 10.
    """
    V, T = len(LETTERS), 10
    token, position, previous, out = 0, V, V + T, 2 * V + T
    gpt = _blank(3 * V + T + 3, 2, T)
    _embed(gpt, token, position)
    _previous_character_head(gpt, 0, token, position, previous)
    attention: Any = gpt.blocks[1].attention.inner
    with torch.no_grad():
        for character in range(V):
            attention.query.weight[character, token + character] = SHARP * gpt.config.d_head**0.5
            attention.key.weight[character, previous + character] = 1
            attention.value.weight[character, token + character] = 1
            attention.output.weight[out + character, character] = 1
        gpt.unembedding.weight[:, out : out + V] = 10 * torch.eye(V, dtype=torch.float64)
    return hooked.to_hooked(gpt, Vocabulary(tuple(LETTERS)))
