"""Spectra, copying, composition and virtual heads: known answers, TransformerLens, and plain products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from analyses.circuit_rank import circuit_rank, effective_rank
from analyses.composition import Products, composition, pairs_of, scored
from analyses.composition import random_scores as random_pairs
from analyses.copying import copying
from analyses.factors import copying_score, factored_svd, ov_factors, qk_factors, read_through, unembedding
from analyses.ov_circuit import ov_circuit
from analyses.qk_circuit import qk_circuit
from analyses.singular_vectors import singular_vectors
from analyses.spec import KnobError
from analyses.stream import UnsupportedModel, norm_of
from analyses.virtual_head import virtual_head
from models.config import GPTConfig
from models.hooked import to_hooked

Q, K, V = "Q", "K", "V"


@pytest.fixture
def three_blocks(random_weights: Any, vocabulary: Any) -> Any:
    return to_hooked(random_weights(GPTConfig(d_vocab=12, n_ctx=10, d_model=8, n_layers=3, n_heads=2)), vocabulary)


@pytest.fixture
def one_block(random_weights: Any, vocabulary: Any) -> Any:
    return to_hooked(random_weights(GPTConfig(d_vocab=12, n_ctx=10, d_model=8, n_layers=1, n_heads=2)), vocabulary)


# --- effective rank --------------------------------------------------------------------------------------------------


def test_effective_rank_of_known_spectra() -> None:
    values = torch.tensor([[2.0, 2, 2, 0], [5, 0, 0, 0], [0, 0, 0, 0], [3, 1, 0, 0]], dtype=torch.float64)
    expected = [3, 1, 0, np.exp(-0.75 * np.log(0.75) - 0.25 * np.log(0.25))]
    np.testing.assert_allclose(effective_rank(values), expected, atol=1e-12)


def test_effective_rank_counts_equal_directions(previous_character_model: Any) -> None:
    dataset = circuit_rank(previous_character_model)
    np.testing.assert_allclose(dataset.qk_effective_rank, [[7, 0]], atol=1e-9)
    np.testing.assert_allclose(dataset.ov_effective_rank, [[5, 0]], atol=1e-9)


# --- folding and factors ---------------------------------------------------------------------------------------------


def test_a_weight_read_through_a_norm_is_the_norms_linear_part(random_model: Any) -> None:
    norm, x = norm_of(random_model, random_model.blocks[1].ln1), torch.randn(5, 16, dtype=torch.float64)
    W = random_model.blocks[1].attn.W_Q[0]
    torch.testing.assert_close(x @ read_through(norm, W, "norm weights"), norm.linear(x) @ W, rtol=0, atol=1e-12)
    assert torch.equal(read_through(norm, W, "nothing"), W)


@pytest.mark.parametrize("fold", ["nothing", "norm weights"])
def test_factors_give_the_circuits_of_the_other_pages(random_model: Any, fold: Any) -> None:
    e, scale = random_model.W_E.detach(), random_model.blocks[1].attn.attn_scale
    (queries, keys), (reads, writes) = qk_factors(random_model, fold), ov_factors(random_model, fold)
    qk = e @ queries[1, 0] @ keys[1, 0].mT @ e.mT / scale
    ov = e @ reads[1, 0] @ writes[1, 0] @ unembedding(random_model, fold)
    np.testing.assert_allclose(qk.detach(), qk_circuit(random_model, fold=fold).score[1, 0], atol=1e-10)
    np.testing.assert_allclose(ov.detach(), ov_circuit(random_model, fold=fold).logit[1, 0], atol=1e-10)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(9, 4, 7), (3, 5, 8), (6, 6, 2)])
def test_singular_values_through_factors(rows: int, inner: int, columns: int) -> None:
    a, b = torch.randn(rows, inner, dtype=torch.float64), torch.randn(inner, columns, dtype=torch.float64)
    left, values, right = factored_svd(a, b)
    theirs = torch.linalg.svdvals(a @ b)
    torch.testing.assert_close(values[: len(theirs)], theirs[: len(values)], rtol=0, atol=1e-12)
    torch.testing.assert_close(left * values @ right.mT, a @ b, rtol=0, atol=1e-12)
    torch.testing.assert_close(left.mT @ left, torch.eye(len(values), dtype=torch.float64), rtol=0, atol=1e-12)


# --- singular vectors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("circuit", ["QK", "OV"])
@pytest.mark.parametrize("fold", ["nothing", "norm weights"])
def test_readings_add_up_to_the_circuit_between_characters(random_model: Any, circuit: Any, fold: Any) -> None:
    dataset = singular_vectors(random_model, 1, 1, circuit, fold)
    together = np.einsum("i,ia,ib->ab", dataset.singular_value, dataset.input_reading, dataset.output_reading)
    if circuit == "QK":
        expected = qk_circuit(random_model, fold=fold).score[1, 1] * random_model.blocks[1].attn.attn_scale
    else:
        expected = ov_circuit(random_model, fold=fold).logit[1, 1]
    np.testing.assert_allclose(together, expected, atol=1e-10)
    assert dataset.identity_error <= 1e-12
    assert dataset.sizes["index"] == 8
    assert dataset.attrs["folded"].startswith("nothing folded in" if fold == "nothing" else "LayerNorm weights")


def test_singular_vectors_equal_transformer_lens(random_model: Any) -> None:
    """Its FactoredMatrix, up to the sign that it leaves open."""
    dataset = singular_vectors(random_model, 0, 1, "OV", "nothing")
    theirs = random_model.OV[0, 1]
    np.testing.assert_allclose(dataset.singular_value, theirs.S.detach(), atol=1e-10)
    reading = (theirs.U.mT @ random_model.W_E.mT).detach()
    np.testing.assert_allclose(np.abs(dataset.input_reading), reading.abs(), atol=1e-9)


def test_the_largest_reading_of_the_input_side_is_positive(random_model: Any) -> None:
    for circuit in ("QK", "OV"):
        read = singular_vectors(random_model, 1, 0, circuit).input_reading.values
        assert (np.take_along_axis(read, np.abs(read).argmax(-1)[:, None], -1) > 0).all()


def test_characters_at_the_ends_are_those_put_there(previous_character_model: Any) -> None:
    """Strengths 5 4 3 2 1 for a to e make every character a direction of its own, and unlike the others the last two swap."""
    with torch.no_grad():
        attention = previous_character_model.blocks[0].attn
        attention.W_V[0] *= 0
        for number, to in enumerate([0, 1, 2, 4, 3]):
            attention.W_V[0, number, to] = 5.0 - number
    dataset = singular_vectors(previous_character_model, 0, 0, "OV")
    np.testing.assert_allclose(dataset.singular_value, [5, 4, 3, 2, 1, 0, 0, 0, 0, 0], atol=1e-12)
    assert [text[:3] for text in dataset.input_largest.values[:5]] == ["'a'", "'b'", "'c'", "'d'", "'e'"]
    assert [text[:3] for text in dataset.output_largest.values[:5]] == ["'a'", "'b'", "'c'", "'e'", "'d'"]
    assert "5 of the 10 singular values of OV are zero" in dataset.note


# --- copying ---------------------------------------------------------------------------------------------------------


def test_copying_heads_and_their_opposite(induction_model: Any) -> None:
    dataset = copying(induction_model)
    np.testing.assert_allclose(dataset.copying_score, [[0, 0], [1, 0]], atol=1e-12)
    assert "L0H0, L0H1, L1H1 is zero" in dataset.note  # L0H0 writes where the unembedding does not read
    np.testing.assert_allclose(dataset.real_part[1, 0], [10] * 5 + [0] * (dataset.sizes["index"] - 5), atol=1e-12)
    with torch.no_grad():
        induction_model.blocks[1].attn.W_O.neg_()
    assert copying(induction_model).copying_score[1, 0] == pytest.approx(-1, abs=1e-12)


def test_a_head_that_turns_characters_round_does_not_copy(induction_model: Any) -> None:
    """a → b → c → d → e → a: the eigenvalues are the fifth roots of one, and cancel."""
    with torch.no_grad():
        W_O = induction_model.blocks[1].attn.W_O[0]
        W_O[:5] = W_O[[1, 2, 3, 4, 0]]
    dataset = copying(induction_model)
    assert abs(float(dataset.copying_score[1, 0])) <= 1e-12
    roots = np.hypot(dataset.real_part[1, 0], dataset.imaginary_part[1, 0])
    np.testing.assert_allclose(roots[:5], 10, atol=1e-9)


@pytest.mark.parametrize("fold", ["nothing", "norm weights"])
def test_copying_is_that_of_the_ov_circuit(random_model: Any, fold: Any) -> None:
    dataset = copying(random_model, fold)
    for layer, head in np.ndindex(2, 2):
        values = np.linalg.eigvals(ov_circuit(random_model, fold=fold).logit[layer, head].values)
        assert dataset.copying_score[layer, head] == pytest.approx(values.real.sum() / np.abs(values).sum(), abs=1e-9)
        ours = np.hypot(dataset.real_part[layer, head], dataset.imaginary_part[layer, head])
        np.testing.assert_allclose(ours, np.sort(np.abs(values))[::-1][:8], atol=1e-9)
    assert 0 < dataset.identity_error <= 1e-10


def test_copying_equals_transformer_lens(random_model: Any) -> None:
    theirs = (random_model.W_E @ random_model.OV @ random_model.W_U).eigenvalues
    expected = (theirs.sum(-1).real / theirs.abs().sum(-1)).detach()
    np.testing.assert_allclose(copying(random_model, "nothing").copying_score, expected, atol=1e-10)


def test_the_baseline_is_that_of_random_heads_in_this_model(random_model: Any) -> None:
    """Other draws, put into the model itself and scored like its own heads."""
    dataset, scores = copying(random_model), []
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(60):
            for block in random_model.blocks:
                for weight in (block.attn.W_V, block.attn.W_O):
                    weight.copy_(torch.randn(weight.shape, generator=draw, dtype=torch.float64))
            left = random_model.W_E @ ov_factors(random_model, "norm weights")[0]
            right = random_model.blocks[0].attn.W_O, random_model.blocks[1].attn.W_O
            scores.append(copying_score(left, torch.stack(right) @ unembedding(random_model, "norm weights"))[0])
    expected = torch.stack(scores)  # draw layer head
    assert float(dataset.baseline_mean) == pytest.approx(float(expected.mean()), abs=0.06)
    assert float(dataset.baseline_sd) == pytest.approx(float(expected.std()), rel=0.15)
    assert f"{float(dataset.baseline_mean):.2f} ± {float(dataset.baseline_sd):.2f}" in dataset.note


def test_zero_to_rounding_is_zero() -> None:
    left, right = torch.eye(6, dtype=torch.float64)[:, :2], torch.eye(6, dtype=torch.float64)[2:4]
    turn = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    score, values = copying_score(turn @ left, right @ turn.mT)
    assert score == 0
    assert not values.any()


# --- composition -----------------------------------------------------------------------------------------------------


def plain(model: Any, sender: tuple[int, int], receiver: tuple[int, int], fold: bool) -> dict[str, float]:
    """Scores by d × d products and nothing else."""

    def through(layer: int) -> torch.Tensor:
        eye = torch.eye(model.cfg.d_model, dtype=torch.float64)
        return norm_of(model, model.blocks[layer].ln1).linear(eye) if fold else eye

    def ov(layer: int, head: int) -> torch.Tensor:
        return through(layer) @ model.blocks[layer].attn.W_V[head] @ model.blocks[layer].attn.W_O[head]

    attention, (layer, head) = model.blocks[receiver[0]].attn, receiver
    qk = through(layer) @ attention.W_Q[head] @ attention.W_K[head].mT @ through(layer).mT
    out = ov(*sender)
    pairs = {Q: qk, K: qk.mT, V: ov(*receiver)}
    return {name: float((out @ matrix).norm() / out.norm() / matrix.norm()) for name, matrix in pairs.items()}


@pytest.mark.parametrize("fold", ["nothing", "norm weights"])
def test_composition_is_that_of_the_products(three_blocks: Any, fold: Any) -> None:
    dataset = composition(three_blocks, "V", fold)
    assert dataset.sender.values.tolist() == ["L0H0", "L0H1", "L1H0", "L1H1"]
    assert dataset.receiver.values.tolist() == ["L1H0", "L1H1", "L2H0", "L2H1"]
    with torch.no_grad():
        for row, column in np.ndindex(4, 4):
            sender, receiver = divmod(row, 2), (column // 2 + 1, column % 2)
            expected = plain(three_blocks, sender, receiver, fold != "nothing") if sender[0] < receiver[0] else None
            for name in (Q, K, V):
                score = float(dataset.score.sel(composition=name)[row, column])
                assert score == pytest.approx(expected[name] if expected else 0, abs=1e-12)
    assert dataset.identity_error <= 1e-12


def test_composition_equals_transformer_lens(three_blocks: Any) -> None:
    if not hasattr(three_blocks, "all_composition_scores"):
        pytest.skip("this TransformerLens has no all_composition_scores")
    ours = composition(three_blocks, fold="nothing").score
    for name in (Q, K, V):
        theirs = three_blocks.all_composition_scores(name)[:2, :, 1:].reshape(4, 4).detach()  # layer head layer head
        np.testing.assert_allclose(ours.sel(composition=name), theirs, atol=1e-10)


def test_an_induction_pair_composes_through_keys_only(induction_model: Any) -> None:
    """The head before writes five directions, evenly; the induction head's keys read these five and no others."""
    dataset = composition(induction_model)
    relative = dataset.relative
    assert relative.sel(composition=K, sender="L0H0", receiver="L1H0") == pytest.approx(1, abs=1e-9)
    assert dataset.score.sel(composition=K, sender="L0H0", receiver="L1H0") == pytest.approx(5**-0.5, abs=1e-9)
    rest = relative.where(relative.composition != K, drop=True)
    assert np.abs(rest).max() <= 1e-12
    assert float(relative.sum()) == pytest.approx(1, abs=1e-9)
    assert dataset.strongest.sel(composition=K) == "L0H0 → L1H0"


@pytest.mark.parametrize("through", [Q, K, V])
def test_each_input_is_told_from_the_others(induction_model: Any, through: str) -> None:
    """What the earlier head writes (two directions, to the third and fourth of its block) is read by one input only.

    All three matrices of the later head have different shapes of support, so that no transpose could pass for another.
    """
    previous = 5 + 10  # where L0H0 writes the character before
    with torch.no_grad():
        attention = induction_model.blocks[1].attn
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            getattr(attention, name).zero_()
        attention.W_Q[0, 0, 0] = attention.W_K[0, 1, 0] = attention.W_V[0, 2, 0] = attention.W_O[0, 0, 3] = 1
        getattr(attention, f"W_{through}")[0, :, 0] = 0
        getattr(attention, f"W_{through}")[0, previous + 2, 0] = 2
    score = composition(induction_model).score.sel(sender="L0H0", receiver="L1H0")
    expected = [5**-0.5 if name == through else 0 for name in (Q, K, V)]
    np.testing.assert_allclose(score, expected, atol=1e-9)


def test_the_bound_is_reached_by_aligned_heads_and_never_passed() -> None:
    turn = torch.linalg.qr(torch.randn(3, 9, 9, dtype=torch.float64)).Q
    strengths = torch.tensor([4.0, 2, 1], dtype=torch.float64)
    ours = Products((turn[:1, :, :3] * strengths), turn[1:2, :, :3].mT)
    aligned = Products(turn[1:2, :, :3] * strengths.sqrt(), turn[2:3, :, :3].mT)
    turned = Products(turn[1:2, :, [2, 1, 0]] * strengths.sqrt(), turn[2:3, :, :3].mT)
    apart = Products(turn[1:2, :, 3:6] * strengths.sqrt(), turn[2:3, :, :3].mT)
    allowed = torch.ones(1, 1, dtype=torch.bool)
    relative = [float(scored(ours, theirs, allowed)[1]) for theirs in (aligned, turned, apart)]
    assert relative[0] == pytest.approx(1, abs=1e-12)
    assert relative[1] == pytest.approx(((16 * 1 + 4 * 2 + 1 * 4) / (16 * 4 + 4 * 2 + 1 * 1)) ** 0.5, abs=1e-12)
    assert relative[2] == pytest.approx(0, abs=1e-12)


def test_random_heads_score_one_over_root_d(random_model: Any) -> None:
    scores = random_pairs(random_model)
    assert scores.shape == (3, 100)
    np.testing.assert_allclose(scores.mean(-1), 16**-0.5, rtol=0.05)
    dataset = composition(random_model)
    np.testing.assert_allclose(dataset.baseline_mean, scores.mean(-1), atol=1e-12)
    np.testing.assert_allclose(dataset.excess, dataset.score - dataset.baseline_mean, atol=1e-12)


def test_one_block_has_nothing_to_compose(one_block: Any) -> None:
    with pytest.raises(UnsupportedModel, match="this model has 1 block; give one with at least 2"):
        composition(one_block)
    with pytest.raises(KnobError, match="nothing to choose among the model's 0 blocks that have another after them"):
        virtual_head(one_block)


def test_products_are_those_of_senders_and_receivers(three_blocks: Any) -> None:
    senders, queries, keys, values = pairs_of(three_blocks, "nothing")
    torch.testing.assert_close(senders.first[3] @ senders.second[3], three_blocks.OV[1, 1].AB, rtol=0, atol=1e-12)
    torch.testing.assert_close(queries.first[0] @ queries.second[0], three_blocks.QK[1, 0].AB, rtol=0, atol=1e-12)
    torch.testing.assert_close(keys.first[2] @ keys.second[2], three_blocks.QK[2, 0].AB.mT, rtol=0, atol=1e-12)
    torch.testing.assert_close(values.first[1] @ values.second[1], three_blocks.OV[1, 1].AB, rtol=0, atol=1e-12)


# --- virtual heads ---------------------------------------------------------------------------------------------------


def test_a_virtual_head_is_two_heads_in_a_row(induction_model: Any) -> None:
    """Let the second head read what the first has written, and the pair copies; as it was, it reads something else."""
    apart = virtual_head(induction_model)
    assert np.abs(apart.logit).max() == 0
    assert apart.copying_score == apart.composition == 0
    with torch.no_grad():
        W_V = induction_model.blocks[1].attn.W_V[0]
        W_V[15:20], W_V[:5] = W_V[:5].clone(), 0
    pair = virtual_head(induction_model)
    np.testing.assert_allclose(pair.logit, 10 * np.eye(5), atol=1e-12)
    assert pair.copying_score == pytest.approx(1, abs=1e-12)
    assert pair.composition == pytest.approx(5**-0.5, abs=1e-12)


def test_a_virtual_head_equals_transformer_lens_and_the_composition_page(three_blocks: Any) -> None:
    dataset = virtual_head(three_blocks, 0, 1, 2, 0, "nothing")
    OV = three_blocks.OV
    theirs = (three_blocks.W_E @ OV[0, 1] @ OV[2, 0] @ three_blocks.W_U).AB.detach()
    np.testing.assert_allclose(dataset.logit, theirs, atol=1e-12)
    values = np.linalg.eigvals(theirs.numpy())
    assert dataset.copying_score == pytest.approx(values.real.sum() / np.abs(values).sum(), abs=1e-7)
    folded = virtual_head(three_blocks, 0, 1, 2, 0)
    score = composition(three_blocks).score.sel(composition=V, sender="L0H1", receiver="L2H0")
    assert folded.composition == pytest.approx(float(score), abs=1e-12)
    assert 0 < folded.identity_error <= 1e-12


def test_the_receiver_comes_after_the_sender(three_blocks: Any) -> None:
    with pytest.raises(KnobError, match="receiver_layer 1 is outside the blocks after the sender's, 1; give 2"):
        virtual_head(three_blocks, sender_layer=1, receiver_layer=1)
