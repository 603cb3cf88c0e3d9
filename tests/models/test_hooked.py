"""GPT and HookedTransformer are one function; the tokenizer is made of characters; a text is checked before it is read."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import checkpoint, hooked, reference
from models.checkpoint import CheckpointError
from models.config import PRESETS, ConfigError, GPTConfig
from models.gpt import GPT
from models.hooked import content_hash, encode, generate, parity, to_hooked, translate, vocabulary_of
from models.protocol import Model
from models.vocabulary import Vocabulary, VocabularyError

SMALL = [name for name, preset in PRESETS.items() if preset.model.d_model < 384]
SIZES: dict[str, Any] = dict(d_vocab=12, n_ctx=10, d_model=16, n_layers=2, n_heads=2)
NO_STREAM = {"walkthrough-4.2": 64, "walkthrough-4.4": 96, "walkthrough-4.6": 224}  # name: width of the widened stream


def ids(config: GPTConfig, rows: int = 3) -> Tensor:
    return torch.randint(config.d_vocab, (rows, config.n_ctx), generator=torch.Generator().manual_seed(1))


def characters(number: int) -> Vocabulary:
    return Vocabulary(tuple(chr(ord("0") + n) for n in range(number)))


# --- one function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_every_preset_has_an_exact_hooked_transformer(random_weights, name):
    gpt = random_weights(PRESETS[name].model)
    model = to_hooked(gpt)
    idx = ids(gpt.config)
    assert gpt(idx)[0].std() > 0.05  # the logits are not so small that any two would agree
    assert (model(idx) - gpt(idx)[0]).abs().max() < 1e-10
    assert parity(gpt, model) < 1e-10
    single = gpt.float()
    assert parity(single, to_hooked(single)) < 5e-5


def test_nanogpt_has_an_exact_hooked_transformer(random_weights):
    gpt = random_weights(PRESETS["nanogpt"].model)
    assert parity(gpt, to_hooked(gpt), batch=1) < 1e-10


@pytest.mark.parametrize("switches", [
    dict(bias_qkv=True, bias_unembed=True),
    dict(bias_qkv=True, bias_norm=False, bias_attention=False, bias_mlp=False),
    dict(tied=True, bias_qkv=True),
    dict(activation="relu", extra_projection=True, bias_attention=False, bias_mlp=False),
    dict(activation="gelu_new"),
    dict(norm=False), dict(norm=False, final_norm=False), dict(final_norm=False), dict(mlp=False), dict(n_layers=0),
    dict(residual=False, norm=False, final_norm=False, extra_projection=True, bias_qkv=True),
    dict(residual=False, norm=False, final_norm=False, bias_attention=False, bias_mlp=False),
    dict(residual=False, norm=False, final_norm=False, mlp=False, tied=True),
], ids=str)  # fmt: skip
def test_every_combination_of_switches_is_converted(random_weights, switches):
    gpt = random_weights(GPTConfig(**SIZES | switches))
    assert parity(gpt, to_hooked(gpt)) < 1e-10


@pytest.mark.parametrize("norm", [dict(norm=True, final_norm=False), dict(norm=False, final_norm=True)], ids=str)
def test_layer_norm_without_residuals_is_refused_with_a_sentence(norm):
    with pytest.raises(ValueError, match="residual"):
        to_hooked(GPT(GPTConfig(**SIZES, residual=False, **norm)))


def test_parity_sees_a_difference(random_gpt, random_model):
    """Every weight has its share in the logits, so that none could be forgotten in the conversion."""
    assert parity(random_gpt, random_model) < 1e-10
    for name, parameter in random_model.named_parameters():
        if name.endswith(("b_K", "k._original_component.bias")):  # moves a query's scores alike, which the softmax does not see
            continue
        changed = copy.deepcopy(random_model)
        with torch.no_grad():
            changed.get_parameter(name).view(-1)[: parameter.numel()] += torch.linspace(0.1, 0.5, parameter.numel())
        assert parity(random_gpt, changed) > 1e-5, name


def test_parity_leaves_the_mode_as_it_was_and_measures_without_dropout():
    gpt = GPT(GPTConfig(**SIZES, dropout=0.5), "torch").double().train()
    assert parity(gpt, to_hooked(gpt)) < 1e-10
    assert gpt.training


def test_converting_leaves_the_gpt_alone_and_shares_nothing_with_it(random_gpt):
    before = {name: tensor.clone() for name, tensor in random_gpt.state_dict().items()}
    random_gpt.train()
    model = to_hooked(random_gpt)
    assert random_gpt.training
    with torch.no_grad():
        for tensor in [*model.parameters(), *translate(random_gpt).values()]:
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in random_gpt.state_dict().items())


def test_the_model_is_plain(random_gpt, random_model):
    """Unprocessed weights under the names of the papers, eval mode, the GPT's dtype."""
    assert torch.equal(random_model.W_E, random_gpt.token_embedding.weight)
    assert torch.equal(random_model.W_U, random_gpt.unembedding.weight.T)
    assert torch.equal(random_model.b_U, random_gpt.unembedding.bias)
    assert torch.equal(random_model.blocks[1].ln2.w, random_gpt.blocks[1].mlp.norm.weight)
    query = random_gpt.blocks[1].attention.inner.query
    x = torch.randn(16, dtype=torch.float64)
    expected = (query.weight @ x + query.bias)[8:]  # head 1: the second half
    assert torch.allclose(x @ random_model.W_Q[1, 1] + random_model.b_Q[1, 1], expected, atol=1e-12)
    assert not random_model.training
    assert random_model.cfg.dtype == torch.float64
    assert not to_hooked(random_gpt).cfg.default_prepend_bos  # also without characters
    assert isinstance(random_model, Model)


def test_single_precision_becomes_double_with_to(random_gpt):
    single = random_gpt.float()
    model = to_hooked(single).to(torch.float64)
    assert model.cfg.dtype == torch.float64
    assert parity(single.double(), model) < 1e-10


def test_attention_patterns_are_those_of_the_reference(random_gpt, random_model):
    idx = ids(random_gpt.config)
    _, cache = random_model.run_with_cache(idx)
    for layer, expected in enumerate(reference.attention_patterns(random_gpt, idx)):
        assert torch.allclose(cache["pattern", layer], expected, atol=1e-12)


@pytest.mark.parametrize(("name", "d_head"), [("baby", 32), ("walkthrough-4.10", 8), ("walkthrough-4.6", 8)])
def test_a_head_s_circuits_have_rank_d_head(random_weights, name, d_head):
    model = to_hooked(random_weights(PRESETS[name].model))
    for circuit in (model.W_Q @ model.W_K.transpose(-1, -2), model.W_V @ model.W_O):
        assert (torch.linalg.matrix_rank(circuit) == d_head).all()


def test_conversion_is_silent_and_draws_nothing_at_random(random_gpt, vocabulary, capfd, caplog):
    before, filters = torch.get_rng_state(), list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = to_hooked(random_gpt, vocabulary)
        model("abc\nab")
    assert [str(warning.message) for warning in caught] == []
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert torch.equal(torch.get_rng_state(), before)
    assert warnings.filters == filters


# --- the steps of the course -----------------------------------------------------------------------------------------


def test_extra_projections_are_folded_into_what_they_follow(random_weights):
    gpt = random_weights(PRESETS["walkthrough-4.8"].model)
    state = translate(gpt)
    for layer, block in enumerate(gpt.blocks):
        outputs = {"attn.W_O": block.attention.inner.output, "mlp.W_out": block.mlp.inner.output}
        for name, output in outputs.items():
            folded = state[f"blocks.{layer}.{name}"].reshape(-1, 32)
            assert (folded - output.weight.T).norm() > 0.5 * output.weight.norm()  # it is another matrix
            sublayer = block.attention if "attn" in name else block.mlp
            x = torch.randn(5, folded.shape[0], dtype=torch.float64)
            bias = state[f"blocks.{layer}.{name.replace('W', 'b')}"]
            assert torch.allclose(x @ folded + bias, sublayer.projection(output(x)), atol=1e-12)
    assert sum(tensor.numel() for tensor in state.values()) == 41_921  # the parameters of 4.7 again


def test_step_4_9_has_no_final_norm_whatever_its_configuration_says(random_weights):
    model = to_hooked(random_weights(PRESETS["walkthrough-4.9"].model))
    assert isinstance(model.ln_final, nn.Identity)
    assert model.cfg.normalization_type == "LN"
    assert not any(isinstance(norm, nn.Identity) for block in model.blocks for norm in (block.ln1, block.ln2))


@pytest.mark.parametrize("name", ["walkthrough-4.7", "walkthrough-4.8"])
def test_steps_without_norms_have_none(random_weights, name):
    model = to_hooked(random_weights(PRESETS[name].model))
    assert model.cfg.normalization_type is None
    assert not any("ln" in key for key in model.state_dict())


@pytest.mark.parametrize(("name", "width"), NO_STREAM.items())
def test_without_residuals_each_sublayer_writes_its_own_coordinates_of_a_wider_stream(random_weights, name, width):
    gpt = random_weights(PRESETS[name].model)
    model = to_hooked(gpt)
    idx = ids(gpt.config)
    assert model.cfg.d_model == width
    _, cache = model.run_with_cache(idx)
    x = gpt.token_embedding(idx) + gpt.position_embedding.weight
    expected = [x]
    for block in gpt.blocks:
        for sublayer in [block.attention] + ([block.mlp] if gpt.config.mlp else []):
            expected.append(sublayer(expected[-1]))
    assert torch.allclose(cache["resid_post", -1], torch.cat(expected, dim=-1), atol=1e-12)


# --- characters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["abc\nab", "\n", " ", "  \n\n a", "j" * 10])
def test_text_survives_the_tokenizer(random_model, text):
    tokens = random_model.to_tokens(text)
    assert tokens.shape == (1, len(text))  # no beginning-of-text token
    assert random_model.to_str_tokens(text) == list(text)
    assert random_model.to_string(tokens[0]) == text


def test_no_character_is_cleaned_up_merged_or_stripped():
    """Spaces before punctuation, contractions, line ends, combining accents and brackets are what they are."""
    text = " . , ! ?\n n't 's\r\n\té e\u0301 😀[UNK]\u00a0\u200b"
    vocabulary = Vocabulary.of(text)
    model = to_hooked(GPT(GPTConfig(**SIZES | dict(d_vocab=len(vocabulary), n_ctx=64))), vocabulary)
    tokens = model.to_tokens(text)[0]
    assert tokens.tolist() == vocabulary.encode(text).tolist()
    assert model.to_string(tokens) == text


def test_ids_are_those_of_the_vocabulary_and_pad_lies_outside_the_model(random_model, vocabulary):
    assert random_model.to_tokens("".join(vocabulary.characters)[:10])[0].tolist() == list(range(10))
    assert random_model.tokenizer.pad_token_id == random_model.tokenizer.eos_token_id == random_model.cfg.d_vocab == 12
    assert not random_model.cfg.default_prepend_bos


def test_an_uneven_batch_fails_loudly(random_model):
    assert random_model(["abc", "bca"]).shape == (2, 3, 12)
    with pytest.raises(IndexError):
        random_model(["abc", "a"])


def test_an_unknown_character_fails_in_the_tokenizer(random_model):
    with pytest.raises(Exception, match="UNK"):
        random_model.to_tokens("abX")


def test_a_text_that_looks_like_the_pad_token_is_characters():
    vocabulary = Vocabulary.of("<pad>")
    model = to_hooked(GPT(GPTConfig(**SIZES | dict(d_vocab=5))), vocabulary)
    assert model.to_tokens("<pad>")[0].tolist() == vocabulary.encode("<pad>").tolist()


@pytest.mark.parametrize("cached", [True, False])
def test_transformer_lens_neither_stops_at_a_newline_nor_drops_one(random_model, cached):
    """A model that writes nothing but newlines, with TransformerLens' own `generate`."""
    with torch.no_grad():
        random_model.unembed.b_U[0] = 1e4
    drawn = random_model.generate("ab\n", max_new_tokens=5, temperature=0.0, use_past_kv_cache=cached, verbose=False)
    assert drawn == "ab\n" + 5 * "\n"


def test_transformer_lens_generates_the_same_with_and_without_a_cache(random_model):
    drawn = [
        random_model.generate("ab", max_new_tokens=7, temperature=0.0, use_past_kv_cache=cached, verbose=False)
        for cached in (True, False)
    ]  # fmt: skip
    assert drawn[0] == drawn[1] == generate(random_model, "ab", 7, temperature=0.0)
    assert len(drawn[0]) == 9


def test_the_vocabulary_comes_back_from_the_model(random_model, vocabulary):
    assert vocabulary_of(random_model) == vocabulary


def test_a_vocabulary_of_another_size_is_refused(random_gpt):
    with pytest.raises(VocabularyError, match="got 3 characters for a model with d_vocab = 12; they must be equal"):
        to_hooked(random_gpt, Vocabulary.of("abc"))


def test_a_model_without_tokenizer_is_told_how_to_get_one(random_gpt, vocabulary):
    model = to_hooked(random_gpt)
    with pytest.raises(VocabularyError, match="has no tokenizer.*attach characters with models.hooked.attach_vocabulary"):
        vocabulary_of(model)
    hooked.attach_vocabulary(model, vocabulary)
    assert vocabulary_of(model) == vocabulary


def test_tokens_longer_than_a_character_are_refused(random_gpt, monkeypatch):
    model = to_hooked(random_gpt, characters(12))
    words = {("th" if number == 3 else character): number for number, character in enumerate(characters(12).characters)}
    monkeypatch.setattr(model.tokenizer, "get_vocab", lambda: words)
    with pytest.raises(VocabularyError, match=r"not single characters \(one is 'th'\)"):
        vocabulary_of(model)


# --- encode ----------------------------------------------------------------------------------------------------------


def test_encoding_gives_the_ids_of_a_text(random_model, vocabulary):
    tokens = encode(random_model, "abc\nab")
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == vocabulary.encode("abc\nab").tolist() == random_model.to_tokens("abc\nab")[0].tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is empty; give 1–10 characters"),
        ("a" * 11, "the text has 11 characters; the model reads at most 10: shorten it by 1"),
        ("a" * 13, "the text has 13 characters; the model reads at most 10: shorten it by 3"),
        ("ab\ncX", r"character 'X' at place 4 \(line 2\) is not among the model's 12 characters"),
    ],
)
def test_a_text_that_cannot_be_read_is_told_why(random_model, text, message):
    with pytest.raises(VocabularyError, match=message):
        encode(random_model, text)


def test_a_text_as_long_as_the_context_is_read(random_model):
    assert random_model(encode(random_model, "a" * 10)[None]).shape == (1, 10, 12)


# --- generate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(temperature=0.0), dict(seed=3), dict(seed=3, temperature=2.0, top_k=4)], ids=str)
@pytest.mark.parametrize("prompt", ["a", "abc\nab", "abcdefghij" * 3])
def test_generation_draws_what_the_gpt_draws_also_past_the_context(random_gpt, random_model, vocabulary, prompt, options):
    drawn = generate(random_model, prompt, 30, **options)
    expected = random_gpt.generate(torch.from_numpy(vocabulary.encode(prompt))[None], 30, **options)[0]
    assert drawn == vocabulary.decode(expected.tolist())
    assert drawn.startswith(prompt)
    assert len(drawn) == len(prompt) + 30


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ("", {}, VocabularyError, "the prompt is empty; give at least one character"),
        ("aXb", {}, VocabularyError, "character 'X' at place 1"),
        ("a", dict(temperature=-1.0), ConfigError, "temperature: got -1.0"),
        ("a", dict(top_k=0), ConfigError, "top_k: got 0"),
    ],
)
def test_a_prompt_or_option_that_will_not_do_is_told_why(random_model, prompt, options, error, message):
    with pytest.raises(error, match=message):
        generate(random_model, prompt, 3, **options)


# --- identity --------------------------------------------------------------------------------------------------------


def test_the_hash_is_of_the_weights_and_not_of_their_precision_or_the_tokenizer(random_gpt, vocabulary):
    single = random_gpt.float()
    first = content_hash(to_hooked(single))
    assert len(first) == 12
    assert int(first, 16) >= 0
    assert content_hash(to_hooked(single, vocabulary)) == first
    assert content_hash(to_hooked(single).to(torch.float64)) == first
    assert content_hash(to_hooked(copy.deepcopy(single).double())) == first


def test_the_hash_changes_with_any_weight(random_model):
    seen = {content_hash(random_model)}
    for parameter in random_model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 0.01
        seen.add(content_hash(random_model))
    assert len(seen) == 1 + len(list(random_model.parameters()))


def test_the_hash_changes_when_two_weights_change_places(random_model):
    before = content_hash(random_model)
    with torch.no_grad():
        random_model.W_E[0, :2] = random_model.W_E[0, :2].flip(0)
    assert content_hash(random_model) != before


def test_the_hash_is_of_the_shapes_too():
    """Two models of nothing but zeros, as many of them, shared among other heads."""
    hashes = set()
    for heads in (2, 4):
        model = to_hooked(GPT(GPTConfig(**SIZES | dict(n_heads=heads))))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        hashes.add(content_hash(model))
    assert len(hashes) == 2


# --- loading ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_as_a_model_that_knows_where_it_came_from(tmp_path, random_gpt, vocabulary):
    checkpoint.save(tmp_path / "mine", random_gpt.float(), vocabulary, "baby")
    model = hooked.load(tmp_path / "mine")
    assert parity(random_gpt, model) < 5e-5
    assert model.cfg.model_name == model.checkpoint.name == "mine"
    assert vocabulary_of(model) == vocabulary
    assert not any("checkpoint" in name for name in model.state_dict())


def test_a_name_that_is_none_is_the_checkpoint_s_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint 'nobody'"):
        hooked.load("nobody")
