"""The atlas sums up other pages: its numbers are theirs, and its verdicts those of the heads that were planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from analyses.ablation import ablation
from analyses.attention_patterns import attention_patterns
from analyses.copying import copying
from analyses.head_atlas import head_atlas
from analyses.head_scores import head_scores
from analyses.ov_circuit import ov_circuit
from analyses.qk_circuit import qk_circuit

TEXT = "KING:\nO king"


def test_every_number_is_that_of_its_own_page(small_model: Any) -> None:
    found = head_atlas(small_model, TEXT)
    np.testing.assert_array_equal(found.pattern, attention_patterns(small_model, TEXT).pattern)
    np.testing.assert_array_equal(found.score, qk_circuit(small_model).score)
    np.testing.assert_array_equal(found.logit, ov_circuit(small_model).logit)
    np.testing.assert_array_equal(found.copying_score, copying(small_model).copying_score)
    np.testing.assert_array_equal(found.loss_increase, ablation(small_model, TEXT, method="zero").loss_increase)
    np.testing.assert_array_equal(found.verdict, head_scores(small_model).verdict)
    means = head_atlas(small_model, TEXT, without="mean")
    np.testing.assert_array_equal(means.loss_increase, ablation(small_model, TEXT, method="mean").loss_increase)
    assert not np.allclose(means.loss_increase, found.loss_increase)


def test_attention_to_the_past_is_averaged_over_queries_that_have_one(small_model: Any) -> None:
    found = head_atlas(small_model, TEXT)
    pattern = attention_patterns(small_model, TEXT).pattern.values
    places = range(1, len(TEXT))
    for layer, head in np.ndindex(2, 2):
        one = pattern[layer, head]
        assert found.to_previous.values[layer, head] == pytest.approx(np.mean([one[q, q - 1] for q in places]))
        assert found.to_first.values[layer, head] == pytest.approx(np.mean([one[q, 0] for q in places]))
        entropies = [-sum(p * np.log(p) for p in one[q, : q + 1]) for q in places]
        assert found.entropy.values[layer, head] == pytest.approx(np.mean(entropies), rel=1e-5)


def test_a_planted_head_stands_out_and_a_model_without_the_passage_s_characters_has_no_verdict(
    previous_character_model: Any,
) -> None:
    found = head_atlas(previous_character_model, "abcade")
    torch.testing.assert_close(torch.as_tensor(found.to_previous.values[0, 0]), torch.tensor(1.0, dtype=torch.float64))
    assert found.entropy.values[0, 0] == pytest.approx(0, abs=1e-12)
    assert found.copying_score.values[0].tolist() == [1.0, 0.0]  # the other head is empty
    assert found.loss_increase.values[0, 1] == 0
    assert abs(found.loss_increase.values[0, 0]) > 0.1
    assert (found.verdict == "not measured").all()
    assert "the model does not know" in found.attrs["note"]
