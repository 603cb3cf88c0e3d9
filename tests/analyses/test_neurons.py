"""Every neuron over the whole text, against loops; neurons whose meaning was put there by hand; single neurons taken away."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from analyses import neuron_statistics as module
from analyses import over_corpus
from analyses.axes import NotFinite
from analyses.neuron_ablation import neuron_ablation
from analyses.neuron_statistics import BELOW, BINS, NeuronStatistics, neuron_statistics
from analyses.neuron_table import neuron_table
from analyses.neurons import neurons
from analyses.ngrams import ngram_codes, ngram_ids, ngram_text, places_among
from analyses.spec import KnobError
from analyses.stream import UnsupportedModel
from models import corpus
from models.config import GPTConfig
from models.corpus import Corpus, CorpusError
from models.gpt import GPT
from models.hooked import encode, hook, to_hooked
from models.statistics import StatisticsError, mean_activation
from models.vocabulary import Vocabulary, VocabularyError

TEXT = "abc\nj fd"


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch, passage_at_hand: Path, corpus_text: str) -> Corpus:
    """The made-up words, which the random model reads, as the text at hand; read in several batches."""
    path = passage_at_hand.parent / "words.txt"
    path.write_text(corpus_text[:3000], encoding="utf-8")
    monkeypatch.setenv(corpus.VARIABLE, str(path))
    monkeypatch.setattr(over_corpus, "ROWS_BUDGET", 700)
    return corpus.at_hand()


def activations(model: Any, text: str) -> np.ndarray:
    """Activation (layer, window, position, neuron) over consecutive windows."""
    T = model.cfg.n_ctx
    windows = torch.stack([encode(model, text[start : start + T]) for start in range(0, (len(text) - 1) // T * T, T)])
    _, cache = model.run_with_cache(windows)
    return np.stack([cache[f"blocks.{layer}.mlp.hook_post"].detach().numpy() for layer in range(model.cfg.n_layers)])


@pytest.fixture
def naive(random_model: Any, words: Corpus) -> np.ndarray:
    return activations(random_model, words.text)


@pytest.fixture
def found(random_model: Any, words: Corpus) -> NeuronStatistics:
    return neuron_statistics(random_model, words)


# --- n-grams ---------------------------------------------------------------------------------------------------------


def test_ngrams_are_told_apart_and_stay_in_their_window(vocabulary: Vocabulary) -> None:
    windows = torch.from_numpy(np.stack([vocabulary.encode("abca"), vocabulary.encode("\n\n\nb")]))
    written = {
        order: [[ngram_text(code, vocabulary) for code in row] for row in ngram_codes(windows, order, 12).tolist()]
        for order in (1, 2, 3)
    }
    assert written[1] == [["a", "b", "c", "a"], ["\n", "\n", "\n", "b"]]
    assert written[2] == [["", "ab", "bc", "ca"], ["", "\n\n", "\n\n", "\nb"]]
    assert written[3] == [["", "", "abc", "bca"], ["", "", "\n\n\n", "\n\nb"]]
    assert ngram_codes(windows, 5, 12).abs().max() == 0  # longer than the window
    codes = ngram_codes(windows, 2, 12)[:, 1:].flatten()
    assert ngram_ids(codes, 2, 12)[0].tolist() == vocabulary.encode("ab").tolist()
    assert places_among(codes, torch.tensor(sorted({int(codes[1]), int(codes[0])}))).tolist() == [0, 1, 2, 2, 2, 2]


# --- the pass over the text ------------------------------------------------------------------------------------------


def test_the_highest_activations_of_all_and_their_places(found: NeuronStatistics, naive: np.ndarray) -> None:
    flat = naive.reshape(2, -1, 64)
    expected = -np.sort(-flat, axis=1)[:, :20].swapaxes(1, 2)
    np.testing.assert_allclose(found.top_activation, expected, rtol=0, atol=1e-12)
    at = np.take_along_axis(flat.swapaxes(1, 2), found.top_place.numpy(), axis=2)
    np.testing.assert_allclose(found.top_activation, at, rtol=0, atol=1e-12)
    assert all(len(set(places)) == 20 for places in found.top_place.flatten(0, 1).tolist())


def test_the_histogram_holds_every_activation(found: NeuronStatistics, naive: np.ndarray) -> None:
    flat = naive.reshape(2, -1, 64)
    for layer, neuron in ((0, 0), (0, 63), (1, 17), (1, 40)):
        values = flat[layer, :, neuron]
        width = 2.0**-8
        while values.max() >= (BINS - BELOW) * width or values.min() < -BELOW * width:
            width *= 2
        assert found.width[layer, neuron] == width
        edges = (np.arange(BINS + 1) - BELOW) * width
        assert found.histogram[layer, neuron].tolist() == np.histogram(values, edges)[0].tolist()
    assert len(found.width.unique()) > 1  # each has its own
    assert (found.histogram.sum(-1) == found.positions).all()
    assert (found.active.numpy() == (flat > 0).sum(1)).all()


def test_a_histogram_is_joined_in_pairs_without_losing_its_place(random_model: Any) -> None:
    running = module._Running(random_model, torch.tensor([1]))
    values = torch.linspace(-3, 200, 9000, dtype=torch.float64)[:, None].expand(-1, 64)
    for part in (values[130:180], values[100:600], values):  # −0.06 to 1.04, up to 10.5, and all
        running._widen(part.amin(0), part.amax(0))
        running._count(part)
    joined = np.concatenate([values[130:180, 0], values[100:600, 0], values[:, 0]])
    edges = (np.arange(BINS + 1) - BELOW) * float(running.width[0])
    assert running.width[0] == 2
    assert running.histogram[0].tolist() == np.histogram(joined, edges)[0].tolist()


def test_sums_after_every_ngram(found: NeuronStatistics, naive: np.ndarray, words: Corpus, vocabulary: Vocabulary) -> None:
    sums: dict[str, Any] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for window, position in np.ndindex(naive.shape[1:3]):
        for order in range(1, min(3, position + 1) + 1):
            place = window * 10 + position
            ngram = words.text[place - order + 1 : place + 1]
            sums[ngram] = sums[ngram] + naive[:, window, position]
            counts[ngram] += 1
    expected = {ngram for ngram, count in counts.items() if len(ngram) < 3 or count >= 20}
    names = [ngram_text(code, vocabulary) for code in found.ngram.tolist()]
    assert set(names) == expected
    assert len(names) == len(expected)
    for row, ngram in enumerate(names):
        assert found.count[row] == counts[ngram]
        assert found.order[row] == len(ngram)
        np.testing.assert_allclose(found.sums[:, row], sums[ngram], rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.mean(1), naive[1].mean((0, 1)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_the_share_that_ngrams_explain_is_the_adjusted_r_squared(
    found: NeuronStatistics, naive: np.ndarray, words: Corpus, order: int
) -> None:
    values, groups = [], defaultdict(list)
    for window, position in np.ndindex(naive.shape[1:3]):
        place = window * 10 + position
        if position >= order - 1:
            values.append(naive[0, window, position, 5])
            groups[words.text[place - order + 1 : place + 1]].append(values[-1])
    within = sum(((np.array(group) - np.mean(group)) ** 2).sum() for group in groups.values())
    N = len(values)
    expected = 1 - within / (N - len(groups)) / np.var(values, ddof=1)
    assert found.explained(0, order)[5].item() == pytest.approx(expected, abs=1e-10)


def test_the_number_of_batches_makes_no_difference(
    random_model: Any, words: Corpus, found: NeuronStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_corpus, "ROWS_BUDGET", 10**6)
    whole = module._measured(random_model, words)
    for name, values in whole.items():
        if name != "top_place":  # equal activations may come in any order
            torch.testing.assert_close(values, getattr(found, name), rtol=0, atol=1e-9)


def test_the_pass_is_made_once(
    random_model: Any, words: Corpus, found: NeuronStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_measured", lambda *_: pytest.fail("computed again"))
    again = neuron_statistics(random_model, words)
    assert all(torch.equal(values, getattr(found, name)) for name, values in vars(again).items())


def test_single_precision_is_close(random_model: Any, words: Corpus, found: NeuronStatistics) -> None:
    single = neuron_statistics(random_model.to(torch.float32), words)
    torch.testing.assert_close(single.top_activation.double(), found.top_activation, rtol=0, atol=1e-5)
    torch.testing.assert_close(single.sums.double(), found.sums, rtol=0, atol=1e-3)
    torch.testing.assert_close(single.explained(1, 2), found.explained(1, 2), rtol=0, atol=1e-5)


def test_activations_that_are_not_finite_are_refused(random_model: Any, words: Corpus) -> None:
    with torch.no_grad():
        random_model.blocks[1].mlp.b_in[3] = torch.inf
    with pytest.raises(NotFinite, match="a neuron's activation is not finite"):
        neuron_statistics(random_model, words)


def test_a_text_shorter_than_what_is_kept(random_model: Any, words: Corpus) -> None:
    short = Corpus("short", "abcdefghij" * 2 + "a", "short")
    assert neuron_statistics(random_model, short).top_activation.shape == (2, 64, 20)
    with torch.no_grad():
        random_model.blocks[0].mlp.W_in.add_(0.1)
    few = Corpus("few", "abcdefghij" * 2, "few")  # one window of ten
    assert neuron_statistics(random_model, few).top_place[1, 3].sort().values.tolist() == list(range(10))


# --- one neuron, and all of a layer ----------------------------------------------------------------------------------


def test_a_neuron_is_shown_as_it_is(random_model: Any, words: Corpus, found: NeuronStatistics, naive: np.ndarray) -> None:
    dataset = neurons(random_model, layer=1, neuron=7, top=6)
    assert dataset.identity_error <= 1e-12
    assert dataset.sizes["index"] == 6
    for row in range(6):
        place, start = int(dataset.place[row]), int(dataset.place[row]) // 10 * 10
        assert dataset.text.values[row] == f"{words.text[start:place]}⟨{words.text[place]}⟩"
        assert dataset.following.values[row] == words.text[place + 1]
        assert dataset.activation[row] == pytest.approx(naive[1].reshape(-1, 64)[place, 7], abs=1e-12)
    assert dataset.activation[0] == pytest.approx(naive[1, :, :, 7].max(), abs=1e-12)
    assert dataset["count"].sum() == naive[1, :, :, 7].size
    assert dataset["count"][0] > 0
    assert dataset["count"][-1] > 0
    assert abs(dataset.bin[0] - naive[1, :, :, 7].min()) <= found.width[1, 7].item()
    assert dataset.fraction_active == pytest.approx((naive[1, :, :, 7] > 0).mean())
    assert dataset["mean"] == pytest.approx(naive[1, :, :, 7].mean(), abs=1e-12)


def test_what_a_neuron_writes(random_model: Any, words: Corpus) -> None:
    dataset = neurons(random_model, layer=0, neuron=4)
    W = random_model.blocks[0].mlp.W_out[4].detach().numpy()
    logits = ((W - W.mean()) * random_model.ln_final.w.detach().numpy()) @ random_model.unembed.W_U.detach().numpy()
    np.testing.assert_allclose(dataset.effect, logits - logits.mean(), rtol=0, atol=1e-12)
    order = np.argsort(-logits)
    characters = np.array(sorted("\n abcdefghij"))
    assert dataset.output_char.values.tolist() == characters[order].tolist()  # twelve characters: both ends are all of them
    np.testing.assert_allclose(dataset.strongest_effect, (logits - logits.mean())[order], rtol=0, atol=1e-12)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, passage_at_hand: Path) -> Any:
    """No attention, ReLU. Neuron 0 is 3 on 'c' and makes 'd' likelier; 1 is always 1, 2 never active, 3 is 1 on 'a', and
    writes nothing. Its text is "abcde" in random order, with 'd' after every 'c'."""
    draw = torch.Generator().manual_seed(0)
    letters = "".join("abcde"[number] for number in torch.randint(5, (3000,), generator=draw).tolist()).replace("c", "cd")
    path = passage_at_hand.parent / "letters.txt"
    path.write_text(letters, encoding="utf-8")
    monkeypatch.setenv(corpus.VARIABLE, str(path))
    config = GPTConfig(d_vocab=5, n_ctx=8, d_model=10, n_layers=1, n_heads=1, activation="relu", norm=False, final_norm=False)
    gpt = GPT(config).double().eval()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.zero_()
        gpt.token_embedding.weight[:, :5] = torch.eye(5)
        block: Any = gpt.blocks[0]
        block.mlp.inner.input.weight[0, 2] = 3
        block.mlp.inner.input.bias[1] = 1
        block.mlp.inner.input.weight[3, 0] = 1
        block.mlp.inner.output.weight[5, 0] = 1
        gpt.unembedding.weight[3, 5] = 2
    return to_hooked(gpt, Vocabulary(tuple("abcde")))


def test_a_planted_neuron_is_read_off(planted: Any) -> None:
    dataset = neurons(planted, neuron=0)
    assert {text[-3:] for text in dataset.text.values} == {"⟨c⟩"}
    assert set(dataset.following.values) == {"d"}
    np.testing.assert_array_equal(dataset.activation, 3)
    assert dataset.output_char.values[0] == "d"
    np.testing.assert_allclose(dataset.effect, np.array([-0.4, -0.4, -0.4, 1.6, -0.4]), atol=1e-12)
    best = {length: dataset.context.values[dataset.length.values == length][0] for length in (1, 2, 3)}
    assert best[1] == "c"
    assert best[2].endswith("c")
    assert best[3].endswith("c")
    assert dataset.mean_activation.sel(context="c") == 3
    assert dataset.mean_activation.sel(context="a") == 0
    assert (dataset.occurrences >= 20).all()
    share = dataset["count"].values / dataset["count"].values.sum()
    assert share[[0, -1]].tolist() == pytest.approx([1 - float(dataset.fraction_active), float(dataset.fraction_active)])
    assert share[1:-1].sum() == 0


def test_the_table_tells_neurons_apart(planted: Any) -> None:
    dataset = neuron_table(planted)
    assert sorted(dataset.neuron.values.tolist()) == [0, 3]  # 1 and 2 never vary, and the rest are zero
    assert "never vary: 1, 2, 4, 5" in dataset.note
    row = dataset.sel(neuron=0)
    assert row.best_one == "c"
    assert row.promoted == "d"
    assert row.explained_by_one == pytest.approx(1, abs=1e-12)
    assert dataset.sel(neuron=3).best_one == "a"
    assert dataset.maximum.sel(neuron=[0, 3]).values.tolist() == [3, 1]
    by_maximum = neuron_table(planted, sort="maximum")
    assert by_maximum.neuron.values.tolist() == [0, 3]
    by_activity = neuron_table(planted, sort="fraction active")
    assert (np.diff(by_activity.fraction_active) <= 0).all()


def test_the_table_agrees_with_the_pages(random_model: Any, words: Corpus) -> None:
    table = neuron_table(random_model, layer=1, sort="explained by two")
    assert table.sizes["neuron"] == 64
    assert (np.diff(table.explained_by_two) <= 0).all()
    for neuron in (0, 31):
        page, row = neurons(random_model, layer=1, neuron=neuron), table.sel(neuron=neuron)
        assert row.maximum == page.activation[0]
        assert row["mean"] == page["mean"]
        assert row.fraction_active == page.fraction_active
        assert row.promoted == page.output_char.values[0]
        assert row.suppressed == page.output_char.values[-1]
        for length, name in ((1, "best_one"), (2, "best_two")):
            assert row[name] == page.context.values[page.length.values == length][0]


def test_what_cannot_be_shown_is_said(
    random_model: Any, previous_character_model: Any, words: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KnobError, match="top 21 is outside the 20 places that are kept; give 1–20"):
        neurons(random_model, top=21)
    with pytest.raises(KnobError, match="the 0 neurons of an MLP"):
        neurons(previous_character_model)
    for analysis in (neuron_table, neuron_ablation):
        with pytest.raises(UnsupportedModel, match="no MLP"):
            analysis(previous_character_model, **({"text": "abc"} if analysis is neuron_ablation else {}))
    monkeypatch.setenv(corpus.VARIABLE, "/nowhere/at/all.txt")
    with pytest.raises(CorpusError, match="cannot read the text"):
        neurons(random_model)


def test_a_text_of_other_characters_is_refused(random_model: Any) -> None:
    with pytest.raises(VocabularyError, match="not among the model's 12 characters"):
        neurons(random_model)  # the passage is at hand, and the model knows a to j only


# --- without a neuron ------------------------------------------------------------------------------------------------


def loss_without(model: Any, layer: int, neuron: int, replacement: float) -> float:
    """The literal way: one pass, with the neuron's activation replaced inside the MLP."""
    tokens = encode(model, TEXT)

    def replace(activation: Any, hook: Any) -> Any:
        activation[:, :, neuron] = replacement
        return activation

    with torch.no_grad():
        logprobs = model.run_with_hooks(tokens[None], fwd_hooks=[(f"blocks.{layer}.mlp.hook_post", replace)])[0].log_softmax(-1)
    return -logprobs[:-1].gather(-1, tokens[1:, None]).mean().item()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_equals_one_pass_per_neuron(random_model: Any, layer: int, dtype: torch.dtype, bound: float) -> None:
    model = random_model.to(dtype)
    dataset = neuron_ablation(model, TEXT, layer, "zero")
    expected = [loss_without(model, layer, neuron, 0.0) - float(dataset.loss) for neuron in range(64)]
    np.testing.assert_allclose(dataset.loss_increase, expected, rtol=0, atol=bound)
    assert np.abs(dataset.loss_increase).min() > 0
    assert dataset.identity_error <= bound
    order = np.argsort(-np.abs(dataset.loss_increase.values), kind="stable")[:30]
    assert dataset["index"].values.tolist() == [f"L{layer}N{number}" for number in order]


def test_chunks_make_no_difference(random_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = neuron_ablation(random_model, TEXT, method="zero")
    monkeypatch.setattr("analyses.interventions.CELL_BUDGET", 2**20 // 2)
    parts = neuron_ablation(random_model, TEXT, method="zero")
    np.testing.assert_allclose(parts.loss_increase, whole.loss_increase, rtol=0, atol=1e-12)
    np.testing.assert_allclose(parts.direct_increase, whole.direct_increase, rtol=0, atol=1e-12)


def test_the_mean_takes_the_place_of_a_neuron(small_model: Any) -> None:
    text = "KING"
    model = small_model.to(torch.float64)
    dataset = neuron_ablation(model, text, 1, "mean")
    mean = mean_activation(model, "blocks.1.mlp.hook_post")
    tokens, neuron = encode(model, text), 9

    def replace(activation: Any, hook: Any) -> Any:
        activation[:, :, neuron] = mean[neuron]
        return activation

    logprobs = model.run_with_hooks(tokens[None], fwd_hooks=[("blocks.1.mlp.hook_post", replace)])[0].log_softmax(-1)
    expected = -logprobs[:-1].gather(-1, tokens[1:, None]).mean() - float(dataset.loss)
    assert dataset.loss_increase[neuron] == pytest.approx(expected.item(), abs=1e-12)


def test_no_means_no_mean_ablation(random_model: Any) -> None:
    with pytest.raises(StatisticsError, match="no mean activations"):
        neuron_ablation(random_model, TEXT)


def test_the_direct_effect_holds_the_rest_still(random_model: Any) -> None:
    """The model's logits, less the neuron's output through the final norm with its scale as it was."""
    dataset = neuron_ablation(random_model, TEXT, 0, "zero")
    tokens = encode(random_model, TEXT)
    logits, cache = random_model.run_with_cache(tokens[None])
    block, ln = random_model.blocks[0], random_model.ln_final
    written = cache["blocks.0.mlp.hook_post"][0, :, 11, None] * block.mlp.W_out[11]
    part = (written - written.mean(-1, keepdim=True)) / cache["ln_final.hook_scale"][0] * ln.w @ random_model.W_U
    logprobs = (logits[0] - part).log_softmax(-1)
    expected = -logprobs[:-1].gather(-1, tokens[1:, None]).mean() - float(dataset.loss)
    assert dataset.direct_increase[11] == pytest.approx(expected.item(), abs=1e-12)


def test_a_planted_neuron_is_missed_and_no_other(planted: Any) -> None:
    """After 'c', logit 6 for 'd' against 0 for the others: without neuron 0 all are alike."""
    dataset = neuron_ablation(planted, "cdcd", 0, "zero")
    lost = math.log(5) + math.log(math.exp(6) / (math.exp(6) + 4))  # at two of three places
    assert dataset.loss_increase[0] == pytest.approx(2 / 3 * lost, abs=1e-12)
    assert np.abs(dataset.loss_increase[1:]).max() == 0
    np.testing.assert_allclose(dataset.direct_increase, dataset.loss_increase, atol=1e-12)  # nothing comes after it
    assert dataset["index"].values[0] == "L0N0"


def test_it_runs_on_a_stored_checkpoint(stored: Any) -> None:
    from models import checkpoint

    dataset = neuron_ablation(hook(checkpoint.load(stored)))
    assert dataset.identity_error <= 1e-5
