"""Models for analyses: one as real users have them, and two whose circuits were put there by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models import checkpoint, hooked, statistics
from models.config import GPTConfig
from models.corpus import Corpus
from models.gpt import GPT
from models.vocabulary import Vocabulary

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
