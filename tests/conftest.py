"""Fixtures for every test: a small random model with nothing zero in it, a made-up corpus, and the real one if it is here."""

from __future__ import annotations

import hashlib
import math
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch

from models import corpus
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
def corpus_text() -> str:
    """About 6,000 characters of made-up words in lines, over the twelve characters of `vocabulary`."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 5))) for _ in range(30)]
    return "".join(draw.choice(words) + draw.choice("   \n") for _ in range(1500))


@pytest.fixture(scope="session")
def small_corpus(corpus_text: str) -> Corpus:
    return Corpus("made-up words", corpus_text, hashlib.sha256(corpus_text.encode()).hexdigest())


@pytest.fixture(scope="session")
def tiny_shakespeare() -> Corpus:
    """The real corpus, from WORKBENCH_DATA or the cache. Never downloaded here; CI must have it."""
    lack = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
    try:
        found = corpus.load() if os.environ.get(corpus.VARIABLE) else corpus.tiny_shakespeare(download=False)
    except corpus.CorpusError as error:
        lack(f"needs Tiny Shakespeare: {error}")
    if found.sha256 != corpus.SHA256:
        lack(f"needs Tiny Shakespeare, and {corpus.VARIABLE} is another text")
    return found
