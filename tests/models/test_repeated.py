"""Repeated random strings, and how heads that are known by construction score on them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from models.config import GPTConfig
from models.gpt import GPT
from models.repeated import RepeatedError, induction, repeated_strings


def induction_gpt(T: int = 10) -> GPT:
    """Two blocks by hand: L0H0 looks at the previous character, L1H0 at what followed the present one; other heads are empty."""
    V = 5
    token, position, previous, out = 0, V, V + T, 2 * V + T
    d_model = 3 * V + T + (3 * V + T) % 2
    sizes = dict(d_vocab=V, n_ctx=T, d_model=d_model, n_layers=2, n_heads=2)
    gpt = GPT(GPTConfig(**sizes, mlp=False, norm=False, final_norm=False)).double()
    sharp = 100 * gpt.config.d_head**0.5
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.zero_()
        gpt.token_embedding.weight[:, token : token + V] = torch.eye(V)
        gpt.position_embedding.weight[:, position : position + T] = torch.eye(T)
        first, second = (block.attention.inner for block in gpt.blocks)
        for place in range(1, T):
            first.query.weight[place - 1, position + place] = sharp
        for place in range(T):
            first.key.weight[place, position + place] = 1
        for character in range(V):
            first.value.weight[character, token + character] = 1
            first.output.weight[previous + character, character] = 1
            second.query.weight[character, token + character] = sharp
            second.key.weight[character, previous + character] = 1
            second.value.weight[character, token + character] = 1
            second.output.weight[out + character, character] = 1
        gpt.unembedding.weight[:, out : out + V] = 10 * torch.eye(V)
    return gpt


def test_every_row_repeats_with_its_own_period_and_nothing_else():
    ids, period = repeated_strings(np.random.default_rng(0), 400, 30, 1000, (3, 9))
    assert ids.shape == (400, 30)
    assert set(period) == set(range(3, 10))  # both ends are drawn
    for row, own in zip(ids, period, strict=True):
        assert (row[own:] == row[:-own]).all()
        assert not any((row[shorter:] == row[:-shorter]).all() for shorter in range(1, own))
    assert (ids.min(), ids.max()) == (0, 999)
    again, _ = repeated_strings(np.random.default_rng(0), 400, 30, 1000, (3, 9))
    assert (again == ids).all()


def by_hand(strings: int, T: int, offset: int) -> float:
    """What a head that attends everywhere alike gives to key q − n·period + offset, counted one query at a time."""
    _, periods = repeated_strings(np.random.default_rng(0), strings, T + 1, 5, (T // 2, T // 2))
    shares = []
    for period in periods:
        for query in range(period, T):
            keys = [key for n in range(1, T) if 0 <= (key := query - n * period + offset)]
            shares.append(len(keys) / (query + 1))
    return float(np.mean(shares))


def test_a_planted_induction_circuit_scores_one_and_is_silent_elsewhere():
    """Period 5 over 5 characters: a character may stand twice in one copy, so the planted head is not always right."""
    found = induction(induction_gpt(), strings=200)
    assert found.previous[0, 0].item() == pytest.approx(1, abs=1e-6)
    assert found.induction[1, 0] > 0.5
    assert found.induction[1, 0] > 3 * found.chance
    assert found.induction[0, 0] < 0.35  # a head that looks one back is no induction head
    assert found.induction[:, 1].tolist() == pytest.approx([found.chance] * 2, abs=1e-6)  # empty heads look everywhere alike
    assert found.duplicate[:, 1].tolist() == pytest.approx([by_hand(200, 10, offset=0)] * 2, abs=1e-6)
    assert found.chance == pytest.approx(by_hand(200, 10, offset=1), abs=1e-12)
    assert found.later < found.first - 1


def test_over_distinct_characters_the_planted_circuit_scores_what_it_does_on_paper(monkeypatch):
    from models import repeated

    def distinct(generator, count, length, d_vocab, periods):
        once = np.stack([generator.permutation(d_vocab) for _ in range(count)])
        return np.take_along_axis(once, np.tile(np.arange(length) % d_vocab, (count, 1)), axis=1), np.full(count, d_vocab)

    monkeypatch.setattr(repeated, "repeated_strings", distinct)
    found = induction(induction_gpt(), strings=64)
    # Of five queries four see one key. The first character has nothing before it but itself, so its query sees two.
    assert found.induction[1, 0].item() == pytest.approx(0.9, abs=1e-6)
    assert found.duplicate[1, 0].item() == pytest.approx(0.1, abs=1e-6)
    one_key, two_keys = math.log(1 + 4 * math.exp(-10)), math.log(2 + 3 * math.exp(-5))
    assert found.later == pytest.approx((4 * one_key + two_keys) / 5, abs=1e-6)


def test_an_untrained_model_scores_chance_and_loses_ln_v():
    gpt = GPT(GPTConfig(d_vocab=7, n_ctx=32, d_model=16, n_layers=1, n_heads=4))
    found = induction(gpt.train())
    assert gpt.training
    assert found.induction[0].tolist() == pytest.approx([found.chance] * 4, rel=0.05)
    assert (found.first, found.later) == pytest.approx((math.log(7), math.log(7)), abs=0.05)
    assert induction(gpt, seed=1).first != found.first
    assert induction(gpt).first == found.first  # the seed alone decides


@pytest.mark.parametrize(("n_ctx", "periods"), [(3, None), (8, (5, 6))])
def test_a_context_without_room_for_two_copies_is_refused(n_ctx, periods):
    gpt = GPT(GPTConfig(d_vocab=7, n_ctx=n_ctx, d_model=8, n_layers=1, n_heads=1))
    with pytest.raises(RepeatedError, match=f"reads {n_ctx} characters"):
        induction(gpt, periods=periods)
