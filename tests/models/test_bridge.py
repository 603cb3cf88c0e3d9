"""The bridge of TransformerLens 4 is the GPT, and answers like a HookedTransformer; under 3.9 both are at hand."""

from __future__ import annotations

import copy
import importlib.metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformer_lens import FactoredMatrix

from models import checkpoint, hooked
from models.bridge import Bridge, to_bridge
from models.config import PRESETS, ConfigError, GPTConfig
from models.hooked import content_hash, parity, to_hooked, vocabulary_of
from models.protocol import Model
from models.vocabulary import Vocabulary

SIZES: dict[str, Any] = dict(d_vocab=12, n_ctx=10, d_model=16, n_layers=2, n_heads=2)
SWITCHES: list[dict[str, Any]] = [
    dict(bias_qkv=True, bias_unembed=True),
    dict(bias_qkv=True, bias_norm=False, bias_attention=False, bias_mlp=False),
    dict(tied=True, bias_qkv=True),
    dict(activation="relu", extra_projection=True, bias_attention=False, bias_mlp=False),
    dict(activation="gelu_new"),
    dict(norm=False), dict(norm=False, final_norm=False), dict(final_norm=False), dict(mlp=False), dict(n_layers=0),
    dict(residual=False, norm=False, final_norm=False, extra_projection=True, bias_qkv=True),
    dict(residual=False, norm=False, final_norm=False, bias_attention=False, bias_mlp=False),
    dict(residual=False, norm=False, final_norm=False, mlp=False, tied=True),
]  # fmt: skip
two_classes = pytest.mark.skipif(
    importlib.metadata.version("transformer-lens").startswith("4."), reason="TransformerLens 4 has no HookedTransformer"
)


def ids(config: GPTConfig, rows: int = 3) -> Tensor:
    return torch.randint(config.d_vocab, (rows, config.n_ctx), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def bridge(random_gpt, vocabulary) -> Any:
    return to_bridge(random_gpt, vocabulary)


# --- one function ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_an_exact_bridge(random_weights, name):
    gpt = random_weights(PRESETS[name].model)
    batch = 16 if gpt.config.d_model < 384 else 1
    assert parity(gpt, to_bridge(gpt), batch) < 1e-10
    assert content_hash(to_bridge(gpt)) == content_hash(to_hooked(gpt))
    single = gpt.float()
    assert parity(single, to_bridge(single), batch) < 5e-5


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_every_combination_of_switches_is_converted(random_weights, switches):
    gpt = random_weights(GPTConfig(**SIZES | switches))
    assert parity(gpt, to_bridge(gpt)) < 1e-10


@two_classes
@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@torch.no_grad()
def test_activations_weights_and_parts_are_those_of_the_hooked_transformer(random_weights, switches):
    gpt = random_weights(GPTConfig(**SIZES | switches))
    ours, theirs = to_bridge(gpt), to_hooked(gpt)
    idx = ids(gpt.config)
    found, expected = ours.run_with_cache(idx)[1], theirs.run_with_cache(idx)[1]
    assert list(found) == list(expected)
    for name, activation in expected.items():
        torch.testing.assert_close(found[name], activation, rtol=0, atol=1e-12, msg=name)
    weights = {name: tensor for name, tensor in theirs.state_dict().items() if not name.endswith((".mask", ".IGNORE"))}
    assert ours.named_weights().keys() == weights.keys()
    assert all(torch.equal(ours.named_weights()[name], tensor) for name, tensor in weights.items())
    assert content_hash(ours) == content_hash(theirs)
    for layer in range(theirs.cfg.n_layers):
        for norm in ("ln1",) if theirs.cfg.attn_only else ("ln1", "ln2"):
            kinds = {type(getattr(model.blocks[layer], norm)).__name__ for model in (ours, theirs)}
            assert kinds == {"LayerNorm" if gpt.config.norm else "Identity"}
    last = {type(getattr(model, "ln_final", nn.Identity())).__name__ for model in (ours, theirs)}
    assert last == {"LayerNorm" if gpt.config.final_norm else "Identity"}
    same = ("d_model", "d_head", "d_mlp", "d_vocab", "n_ctx", "n_heads", "attn_only", "normalization_type", "act_fn", "dtype")
    assert {field: getattr(ours.cfg, field) for field in same} == {field: getattr(theirs.cfg, field) for field in same}


def test_layer_norm_without_residuals_is_refused_with_a_sentence(random_weights):
    with pytest.raises(ConfigError, match="turn residual on"):
        to_bridge(random_weights(GPTConfig(**SIZES, residual=False, norm=True, final_norm=False)))


def test_weights_by_name_are_views(bridge, random_gpt):
    """Writing into one changes the model, so what is hashed is what computes."""
    before = content_hash(bridge)
    for name, weight in bridge.named_weights().items():
        changed = copy.deepcopy(bridge)
        with torch.no_grad():
            changed.named_weights()[name].view_as(weight).add_(torch.linspace(0.1, 0.5, weight.numel()).view_as(weight))
        assert content_hash(changed) != before, name
        if not name.endswith("b_K"):  # moves all scores of a query alike, which the softmax does not see
            assert parity(random_gpt, changed) > 1e-5, name
    assert parity(random_gpt, bridge) < 1e-10


def test_double_precision_and_processing_keep_weights_and_function_together(bridge, random_gpt):
    """Folding puts other parameters in the place of the old ones; the named weights are the new ones."""
    model = to_bridge(copy.deepcopy(random_gpt).float()).to(torch.float64, print_details=False)
    assert model.cfg.dtype == torch.float64
    assert parity(random_gpt.float().double(), model) < 1e-10
    bridge.process_weights(fold_ln=True, center_writing_weights=False, center_unembed=False)
    assert parity(random_gpt, bridge) < 1e-6  # TransformerLens folds with some float32 in between
    weights = bridge.named_weights()
    assert torch.equal(weights["blocks.0.ln1.w"], torch.ones(16, dtype=torch.float64))
    assert torch.equal(weights["ln_final.b"], torch.zeros(16, dtype=torch.float64))


# --- hooks -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_stream_enters_at_a_block_and_the_blocks_before_it_are_not_run(bridge, random_gpt):
    idx = ids(random_gpt.config)
    logits, cache = bridge.run_with_cache(idx)
    stream, seen = cache["blocks.1.hook_resid_pre"], []
    record = [(name, lambda activation, hook: seen.append(hook.name)) for name in bridge.cached]
    with bridge.hooks(fwd_hooks=record):
        for layer in (1, -1):
            torch.testing.assert_close(bridge(stream, start_at_layer=layer), logits, rtol=0, atol=1e-12)
    assert set(seen) == {name for name in bridge.cached if name.startswith(("blocks.1", "ln_final", "unembed"))}
    assert torch.equal(bridge(idx), logits)  # and the next text begins at the embedding again
    with pytest.raises(IndexError):
        bridge(stream, start_at_layer=2)
    assert torch.equal(bridge(idx), logits)


@torch.no_grad()
def test_a_stop_gives_the_stream_that_enters_a_block(bridge, random_gpt):
    idx = ids(random_gpt.config)
    _, cache = bridge.run_with_cache(idx)
    assert torch.equal(bridge(idx, stop_at_layer=1), cache["blocks.1.hook_resid_pre"])
    stream, part = bridge.run_with_cache(idx, stop_at_layer=1)
    assert torch.equal(stream, cache["blocks.1.hook_resid_pre"])
    assert not [name for name in part if name.startswith("blocks.1")]


@torch.no_grad()
def test_hooks_are_told_the_name_that_they_were_given(bridge, random_gpt):
    told = []
    names = sorted(bridge.cached)
    record = [(name, lambda activation, hook: told.append(hook.name)) for name in names]
    bridge.run_with_hooks(ids(random_gpt.config), fwd_hooks=record)
    assert sorted(told) == names


@torch.no_grad()
def test_a_filter_chooses_among_all_hook_points(bridge, random_gpt):
    idx = ids(random_gpt.config)
    some = ["blocks.0.attn.hook_pattern", "blocks.1.hook_resid_mid"]
    for names_filter in (some, lambda name: name in some):
        assert list(bridge.run_with_cache(idx, names_filter=names_filter)[1]) == some
    assert list(bridge.run_with_cache(idx, names_filter=some[0])[1]) == some[:1]
    assert len(bridge.run_with_cache(idx, names_filter=[])[1]) == 0


def test_forks_of_the_attention_s_input_are_refused(bridge):
    for choose in (bridge.set_use_attn_result, bridge.set_use_split_qkv_input, bridge.set_use_attn_in):
        with pytest.raises(NotImplementedError):
            choose(True)
    assert not [name for name in bridge.hook_dict if name.endswith(("q_input", "k_input", "v_input", "attn_in"))]  # none is dead


@torch.no_grad()
def test_the_mlp_s_own_copy_of_the_stream_can_be_edited(bridge, random_gpt):
    """`hook_mlp_in`, where it is asked for: an edit there does not reach the stream."""
    idx = ids(random_gpt.config)
    bridge.set_use_hook_mlp_in(True)
    logits, cache = bridge.run_with_cache(idx)
    zero = [("blocks.1.hook_mlp_in", lambda stream, hook: 0 * stream)]
    with bridge.hooks(fwd_hooks=zero):
        edited, changed = bridge.run_with_cache(idx)
    assert (edited - logits).abs().max() > 1e-3
    assert torch.equal(changed["blocks.1.hook_resid_mid"], cache["blocks.1.hook_resid_mid"])
    expected = cache["blocks.1.hook_resid_mid"] + changed["blocks.1.hook_mlp_out"]
    torch.testing.assert_close(changed["blocks.1.hook_resid_post"], expected, rtol=0, atol=1e-12)


def test_gradients_reach_every_weight_and_every_hook(bridge, random_gpt):
    idx = ids(random_gpt.config)
    seen = set()
    record = [(name, lambda gradient, hook: seen.add(hook.name)) for name in bridge.cached]
    with bridge.hooks(bwd_hooks=record):
        bridge(idx)[:, -1, 3].sum().backward()
    assert seen == bridge.cached
    assert all(parameter.grad is not None for parameter in bridge.parameters())


# --- what else a model does ------------------------------------------------------------------------------------------


def test_characters_stay_outside_of_pad_when_attached_again(bridge, random_gpt, vocabulary):
    before = bridge.tokenizer.get_vocab()
    hooked.attach_vocabulary(bridge, vocabulary)
    assert bridge.tokenizer.get_vocab() == before
    assert bridge.cfg.d_vocab == bridge.cfg.d_vocab_out == bridge.tokenizer.pad_token_id == 12
    assert vocabulary_of(bridge) == vocabulary
    assert bridge.to_str_tokens("abc\nab") == list("abc\nab")


def test_a_padded_text_is_refused(bridge, random_gpt):
    idx = ids(random_gpt.config)
    mask = torch.ones_like(idx)
    assert torch.equal(bridge(idx, attention_mask=mask), bridge(idx))
    mask[0, 0] = 0
    with pytest.raises(ConfigError, match="without padding"):
        bridge(idx, attention_mask=mask)


@torch.no_grad()
def test_circuits_of_transformer_lens_are_the_products(bridge):
    assert isinstance(bridge.QK, FactoredMatrix)
    torch.testing.assert_close(bridge.QK.AB, bridge.W_Q @ bridge.W_K.mT, rtol=0, atol=1e-12)
    torch.testing.assert_close(bridge.OV.AB, bridge.W_V @ bridge.W_O, rtol=0, atol=1e-12)


def test_loss_is_that_of_the_gpt(bridge, random_gpt):
    idx = ids(random_gpt.config)
    expected = torch.nn.functional.cross_entropy(random_gpt(idx)[0][:, :-1].flatten(0, 1), idx[:, 1:].flatten())
    torch.testing.assert_close(bridge(idx, return_type="loss"), expected, rtol=0, atol=1e-12)


def test_it_is_what_load_gives_under_4_and_the_protocol_holds(bridge, random_gpt, vocabulary, tmp_path):
    assert isinstance(bridge, Model)
    assert not bridge.training
    for cfg in (bridge.cfg, to_bridge(random_gpt).cfg):  # also without characters
        assert not cfg.default_prepend_bos
        assert not cfg.tokenizer_prepends_bos  # the tokenizer has no such token
    checkpoint.save(tmp_path / "mine", random_gpt.float(), vocabulary)
    loaded = hooked.load(tmp_path / "mine")
    is_4 = importlib.metadata.version("transformer-lens").startswith("4.")
    assert isinstance(loaded, Bridge) == is_4


def test_shipped_statistics_belong_to_the_shipped_weights_in_both_classes():
    """The hash in them was taken of a HookedTransformer."""
    found = checkpoint.load("baby")
    expected = bytes(found.statistics["weights"].tolist()).decode()
    assert content_hash(to_bridge(found.gpt)) == content_hash(to_hooked(found.gpt)) == expected
    assert len(found.vocabulary) == 65
    assert Vocabulary(found.vocabulary.characters) == found.vocabulary


def test_conversion_draws_nothing_at_random(random_gpt):
    before = torch.get_rng_state()
    to_bridge(random_gpt)
    assert torch.equal(torch.get_rng_state(), before)
