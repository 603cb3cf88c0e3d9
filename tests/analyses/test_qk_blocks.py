"""QK blocks: the parts of a score against a loop, the model's own scores, and heads whose part is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from analyses.qk_blocks import PARTS, qk_blocks
from analyses.stream import UnsupportedModel
from models.hooked import encode

TEXT = "abc\nj fd"


@pytest.mark.parametrize("layer", [0, 1])
def test_parts_are_those_of_a_loop_over_pairs(random_model: Any, layer: int) -> None:
    """One pair of places at a time, from the weights and the cached stream."""
    head, block = 1, random_model.blocks[layer]
    tokens = encode(random_model, TEXT)
    _, cache = random_model.run_with_cache(tokens[None])
    x, scale = cache["resid_pre", layer][0], cache["scale", layer, "ln1"][0]
    W_Q, W_K, b_Q, b_K = (getattr(block.attn, name)[head] for name in ("W_Q", "W_K", "b_Q", "b_K"))

    def parts(p: int) -> dict[str, Any]:
        char, position = random_model.W_E[tokens[p]], random_model.W_pos[p]
        vectors = {"char": char, "position": position, "rest": x[p] - char - position}
        return {name: (v - v.mean()) / scale[p] * block.ln1.w for name, v in vectors.items()}

    dataset = qk_blocks(random_model, TEXT, layer, head)
    for q in range(len(TEXT)):
        for k in range(q + 1):
            query, key = parts(q), parts(k)
            expected = {f"{a}-{b}": (query[a] @ W_Q) @ (key[b] @ W_K) / 8**0.5 for a in query for b in key}
            ours, theirs = block.ln1.b @ W_Q + b_Q, block.ln1.b @ W_K + b_K
            expected["bias-key"] = ours @ (sum(key.values()) @ W_K) / 8**0.5
            expected["query-bias"] = (sum(query.values()) @ W_Q + ours) @ theirs / 8**0.5
            found = dataset.score[:, q, k].values
            np.testing.assert_allclose(found, [expected[name].item() for name in PARTS], rtol=0, atol=1e-12)


def test_parts_add_up_to_the_models_scores(random_model: Any) -> None:
    dataset = qk_blocks(random_model, TEXT, 1, 0)
    _, cache = random_model.run_with_cache(encode(random_model, TEXT)[None])
    own, past = cache["attn_scores", 1][0, 0].detach().numpy(), np.tril(np.ones((8, 8), dtype=bool))
    np.testing.assert_allclose(dataset.score.sum("part").values[past], own[past], rtol=0, atol=1e-12)
    np.testing.assert_allclose(dataset.total.values[past], own[past], rtol=0, atol=1e-12)
    assert (dataset.score.values[:, ~past] == 0).all()
    assert 0 < dataset.identity_error <= 1e-12
    assert qk_blocks(random_model.to(torch.float32), TEXT).identity_error <= 1e-5


def test_shares_are_covariances_and_add_up_to_one(random_model: Any) -> None:
    dataset = qk_blocks(random_model, TEXT, 1, 1)
    pairs = [[part[q, : q + 1] - part[q, : q + 1].mean() for q in range(8)] for part in dataset.score.values]
    flat = np.array([np.concatenate(rows) for rows in pairs])
    expected = flat @ flat.sum(0) / (flat.sum(0) ** 2).sum()
    np.testing.assert_allclose(dataset.share, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(dataset.head_share.sum("part"), 1, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(dataset.head_share.sel(component="L1H1"), dataset.share)
    assert dataset.share.sel(part="query-bias") == pytest.approx(0, abs=1e-12)  # the softmax does not see it
    assert np.abs(dataset.head_share.sel(component="L0H0", part=[name for name in PARTS if "rest" in name])).max() == 0


def test_a_constant_on_the_queries_side_moves_no_share(random_model: Any) -> None:
    before = qk_blocks(random_model, TEXT)
    with torch.no_grad():
        random_model.blocks[0].attn.b_K.add_(1)
    after = qk_blocks(random_model, TEXT)
    assert np.abs(after.score.sel(part="query-bias") - before.score.sel(part="query-bias")).max() > 1e-2
    np.testing.assert_allclose(after.share, before.share, rtol=0, atol=1e-10)


def test_the_chosen_part_is_the_one_drawn(random_model: Any) -> None:
    dataset = qk_blocks(random_model, TEXT, part="position-char")
    np.testing.assert_array_equal(dataset.part_score, dataset.score.sel(part="position-char"))
    assert dataset.part_score.attrs["long_name"] == "score, position-char"


def test_a_head_of_places_is_all_places(previous_character_model: Any) -> None:
    dataset = qk_blocks(previous_character_model, "abcde")
    assert dataset.share.to_series().to_dict() == pytest.approx({name: float(name == "position-position") for name in PARTS})
    np.testing.assert_allclose(dataset.total, 60 * np.eye(5, k=-1), atol=1e-9)


def test_an_induction_head_asks_what_a_block_before_it_wrote(induction_model: Any) -> None:
    """Its queries are characters, its keys the previous characters that L0H0 wrote."""
    dataset = qk_blocks(induction_model, "abcdab", 1, 0)
    assert dataset.share.sel(part="char-rest").item() == pytest.approx(1, abs=1e-9)
    assert dataset.share.drop_sel(part="char-rest").values == pytest.approx(0, abs=1e-9)


def test_a_head_without_scores_has_no_shares_and_a_note_says_so(previous_character_model: Any) -> None:
    dataset = qk_blocks(previous_character_model, "abcde", 0, 1)
    assert "share" not in dataset
    assert dataset.component.values.tolist() == ["L0H0"]
    assert "The scores of L0H1 do not vary" in dataset.note
    assert qk_blocks.fitting_views(dataset)
    assert "head_share" not in qk_blocks(previous_character_model, "a")  # one place has no other to be compared with


def test_rotary_positions_are_refused(random_model: Any) -> None:
    random_model.cfg.positional_embedding_type = "rotary"
    with pytest.raises(UnsupportedModel, match="rotary positions"):
        qk_blocks(random_model, TEXT)
