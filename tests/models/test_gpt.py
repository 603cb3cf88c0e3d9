"""The GPT: what it computes, what it may not see, where it starts, and how it draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import PRESETS, ConfigError, GPTConfig
from models.corpus import Corpus
from models.gpt import GPT, Dropout, LayerNorm, Sublayer
from models.training import batch

SMALL = [name for name, preset in PRESETS.items() if preset.model.d_model < 384]
LN_V = math.log(65)


def windows_of(config: GPTConfig, rows: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(config.d_vocab, (rows, config.n_ctx), generator=torch.Generator().manual_seed(seed))


def started(name: str, initialisation: str, seed: int) -> GPT:
    """A preset as it starts, dropout off."""
    torch.manual_seed(seed)
    return GPT(PRESETS[name].model, initialisation).eval()


# --- against PyTorch's own modules -----------------------------------------------------------------------------------


def causal_mask(T: int) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def test_attention_is_pytorch_s_own(random_gpt):
    """All heads in one batched product = nn.MultiheadAttention with the same weights and a causal mask."""
    ours = random_gpt.blocks[0].attention.inner
    theirs = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    parts = (ours.query, ours.key, ours.value)
    theirs.load_state_dict({
        "in_proj_weight": torch.cat([part.weight for part in parts]),
        "in_proj_bias": torch.cat([part.bias for part in parts]),
        "out_proj.weight": ours.output.weight,
        "out_proj.bias": ours.output.bias,
    })  # fmt: skip
    x = torch.randn(3, 10, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected, _ = theirs(x, x, x, attn_mask=causal_mask(10))
    assert torch.allclose(ours(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_block_is_pytorch_s_pre_norm_layer(random_weights, activation):
    gpt = random_weights(GPTConfig(d_vocab=5, n_ctx=6, d_model=8, n_layers=1, n_heads=2, bias_qkv=True, activation=activation))
    theirs = nn.TransformerEncoderLayer(8, 2, 32, 0.0, activation, batch_first=True, norm_first=True, dtype=torch.float64)
    attention, mlp = gpt.blocks[0].attention, gpt.blocks[0].mlp
    parts = (attention.inner.query, attention.inner.key, attention.inner.value)
    state = {
        "self_attn.in_proj_weight": torch.cat([part.weight for part in parts]),
        "self_attn.in_proj_bias": torch.cat([part.bias for part in parts]),
    }
    names = {
        "self_attn.out_proj": attention.inner.output, "linear1": mlp.inner.input, "linear2": mlp.inner.output,
        "norm1": attention.norm, "norm2": mlp.norm,
    }  # fmt: skip
    for name, module in names.items():
        state |= {f"{name}.weight": module.weight, f"{name}.bias": module.bias}
    theirs.load_state_dict(state)
    x = torch.randn(3, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(gpt.blocks[0](x), theirs(x, src_mask=causal_mask(6)), atol=1e-12, rtol=0)


def test_loss_is_the_mean_negative_log_probability_of_the_targets(random_gpt):
    idx, targets = windows_of(random_gpt.config, seed=1), windows_of(random_gpt.config, seed=2)
    logits, loss = random_gpt(idx, targets)
    picked = torch.softmax(logits, -1).gather(-1, targets[..., None])
    assert loss.item() == pytest.approx(-picked.log().mean().item(), rel=1e-12)
    assert random_gpt(idx)[1] is None


# --- what it may not see ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_changing_a_character_changes_nothing_before_it(random_weights, name):
    gpt = random_weights(PRESETS[name].model)
    T = gpt.config.n_ctx
    idx = windows_of(gpt.config, rows=1)
    changed = idx.repeat(T, 1)
    changed[torch.arange(T), torch.arange(T)] = (idx[0] + 1) % 65  # row t differs from idx at place t alone
    difference = (gpt(changed)[0] - gpt(idx)[0]).abs().amax(-1)  # t, position
    before = torch.ones(T, T, dtype=torch.bool).tril(-1)
    assert difference[before].max() < 1e-12
    assert difference.diagonal().min() > 1e-6  # and the change was seen where it was made


def test_a_shorter_text_has_the_same_logits(random_gpt):
    idx = windows_of(random_gpt.config)
    assert torch.allclose(random_gpt(idx[:, :4])[0], random_gpt(idx)[0][:, :4], atol=1e-12, rtol=0)


def test_more_positions_than_the_table_has_is_an_error(random_gpt):
    assert random_gpt.position_embedding.num_embeddings == 10
    with pytest.raises(ConfigError, match="got 11 positions, expected at most n_ctx = 10; crop the context"):
        random_gpt(torch.zeros(1, 11, dtype=torch.long))


# --- LayerNorm geometry ----------------------------------------------------------------------------------------------


def test_layer_norm_projects_onto_a_sphere_in_the_hyperplane_of_mean_zero():
    """Mean 0, and norm √d·σ/√(σ² + ε), exactly; the direction is that of x − mean."""
    norm = LayerNorm(GPTConfig(d_model=16, n_ctx=1, n_layers=1, n_heads=1)).double()
    scales = torch.tensor([1e-3, 1e-2, 1.0, 50.0], dtype=torch.float64)[:, None]
    x = 3 + scales * torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    centred = x - x.mean(-1, keepdim=True)
    sigma = x.std(-1, correction=0)
    y = norm(x)
    assert y.mean(-1).abs().max() < 1e-12
    assert torch.allclose(y.norm(dim=-1), math.sqrt(16) * sigma / (sigma**2 + 1e-5).sqrt(), rtol=1e-12)
    assert torch.allclose(F.cosine_similarity(y, centred), torch.ones(4, dtype=torch.float64), rtol=1e-12)


# --- where it starts -------------------------------------------------------------------------------------------------


def mean_initial_loss(name: str, corpus: Corpus, random_targets: bool, seeds: int) -> float:
    """Mean over seeds of the untrained model's loss on a real batch, with PyTorch's default initialisation."""
    model, recipe = PRESETS[name]
    ids = corpus.encoded("train", corpus.vocabulary())
    losses = []
    for seed in range(seeds):
        idx, targets = batch(ids, seed, recipe, model)
        if random_targets:
            targets = torch.randint(65, targets.shape, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            losses.append(started(name, "torch", seed)(idx, targets)[1].item())
    return sum(losses) / seeds


@pytest.mark.parametrize(
    ("name", "random_targets", "seeds", "low", "high"),
    [
        ("baby", False, 4, 4.2, 4.4),
        ("baby", True, 4, 4.3, 4.4),
        ("baby-tied", False, 12, 86, 88),  # one seed is anywhere from 82 to 94
        ("walkthrough-4.7", False, 20, 4.5, 4.7),
        ("walkthrough-4.7", True, 20, 4.5, 4.7),
        ("walkthrough-4.9", False, 20, 4.35, 4.55),
        ("walkthrough-4.10", False, 20, 4.2, 4.4),
    ],
)
def test_pytorch_s_initialisation_starts_at_the_measured_loss(tiny_shakespeare, name, random_targets, seeds, low, high):
    assert low < mean_initial_loss(name, tiny_shakespeare, random_targets, seeds) < high


@pytest.mark.parametrize("name", SMALL)
def test_gpt2_s_initialisation_starts_at_ln_v(name):
    """Also the tied one: the 0.02 is what makes tying start well."""
    gpt = started(name, "gpt2", seed=0)
    with torch.no_grad():
        loss = gpt(windows_of(gpt.config, 32), windows_of(gpt.config, 32, seed=1))[1].item()
    assert LN_V - 0.03 < loss < LN_V + 0.08


def outputs(gpt: GPT) -> list[nn.Linear]:
    return [module.inner.output for module in gpt.modules() if isinstance(module, Sublayer)]


@pytest.mark.parametrize(
    ("name", "factor"),
    [("baby", math.sqrt(8)), ("baby-tied", math.sqrt(8)), ("walkthrough-4.10", math.sqrt(6)), ("walkthrough-4.6", 1.0)],
)
@pytest.mark.parametrize("scheme", ["gpt2", "torch"])
def test_what_writes_into_the_stream_starts_smaller_by_the_root_of_the_sublayers(name, factor, scheme):
    """1/√(2L), and only where there is a stream; nothing else is touched."""
    plain, scaled = started(name, scheme, 0), started(name, scheme, 0)
    for gpt, scale in ((plain, False), (scaled, True)):
        torch.manual_seed(1)
        gpt.initialise(scheme, scale_outputs=scale)
    for smaller, larger in zip(outputs(scaled), outputs(plain), strict=True):
        assert torch.allclose(smaller.weight * factor, larger.weight)
    touched = {id(linear.weight) for gpt in (plain, scaled) for linear in outputs(gpt)}
    for one, other in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert id(one) in touched or torch.equal(one, other)


def test_gpt2_s_initialisation_is_normal_with_std_0_02_and_zero_biases():
    gpt = started("nanogpt-biased", "gpt2", 0)
    for name, parameter in gpt.named_parameters():
        if parameter.ndim == 2:
            expected = 0.02 / math.sqrt(12) if "inner.output" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < 2e-4, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm.weight" in name))), name


def test_tied_unembedding_is_the_token_embedding():
    gpt = started("baby-tied", "torch", 0)
    assert gpt.unembedding.weight is gpt.token_embedding.weight
    assert gpt.unembedding.weight.std().item() == pytest.approx(1, rel=0.05)  # starts as an embedding does


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["dropout", "dropout_attention"])
def test_dropout_is_noise_in_training_and_absent_in_evaluation(where):
    gpt = GPT(GPTConfig(d_vocab=5, n_ctx=6, d_model=8, n_layers=1, n_heads=2, **{where: 0.5}), "torch")
    idx = windows_of(gpt.config)
    assert not torch.equal(gpt(idx)[0], gpt(idx)[0])
    gpt.eval()
    assert torch.equal(gpt(idx)[0], gpt(idx)[0])


# --- how it draws ----------------------------------------------------------------------------------------------------


def greedy(gpt: GPT, idx: Tensor, steps: int) -> Tensor:
    """The likeliest continuation, by hand."""
    for _ in range(steps):
        idx = torch.cat([idx, gpt(idx[:, -gpt.config.n_ctx :])[0][:, -1].argmax(-1, keepdim=True)], dim=-1)
    return idx


def test_generation_goes_past_the_context_because_it_is_cropped(random_gpt):
    start = windows_of(random_gpt.config)[:, :3]
    continued = random_gpt.generate(start, 25, temperature=0.0)
    assert continued.shape == (2, 28)
    assert torch.equal(continued, greedy(random_gpt, start, 25))


def test_a_prompt_longer_than_the_context_is_cropped_and_kept(random_gpt):
    start = windows_of(random_gpt.config).repeat(1, 2)
    continued = random_gpt.generate(start, 3, temperature=0.0)
    assert torch.equal(continued[:, :20], start)
    assert torch.equal(continued[:, 20:], random_gpt.generate(start[:, -10:], 3, temperature=0.0)[:, 10:])


def test_top_k_of_one_is_the_likeliest(random_gpt):
    start = windows_of(random_gpt.config)
    assert torch.equal(random_gpt.generate(start, 20, top_k=1, seed=0), random_gpt.generate(start, 20, temperature=0.0))


def test_top_k_draws_every_one_of_the_k_likeliest_and_no_other(random_gpt):
    start = windows_of(random_gpt.config, rows=1)
    likeliest = random_gpt(start)[0][0, -1].topk(3).indices
    drawn = random_gpt.generate(start.repeat(500, 1), 1, top_k=3, seed=0)[:, -1]
    assert set(drawn.tolist()) == set(likeliest.tolist())


def test_top_k_beyond_the_vocabulary_is_no_limit(random_gpt):
    start = windows_of(random_gpt.config)
    assert torch.equal(random_gpt.generate(start, 20, top_k=99, seed=0), random_gpt.generate(start, 20, seed=0))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_characters_are_drawn_from_the_softmax_of_the_divided_logits(random_gpt, temperature):
    start = windows_of(random_gpt.config, rows=1)
    expected = torch.softmax(random_gpt(start)[0][0, -1] / temperature, -1)
    drawn = random_gpt.generate(start.repeat(10_000, 1), 1, temperature=temperature, seed=0)[:, -1]
    shares = torch.bincount(drawn, minlength=12) / 10_000
    assert (shares - expected).abs().max() < 0.02  # more than four standard errors


def test_a_lower_temperature_is_sharper(random_gpt):
    start = windows_of(random_gpt.config, rows=1)
    likeliest = random_gpt(start)[0][0, -1].argmax()
    shares = []
    for temperature in (0.005, 0.5, 1.0, 5.0):
        drawn = random_gpt.generate(start.repeat(2_000, 1), 1, temperature=temperature, seed=0)[:, -1]
        shares.append((drawn == likeliest).double().mean().item())
    assert shares[0] > 0.99
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 4


def test_the_smallest_temperatures_take_the_likeliest(random_gpt):
    start = windows_of(random_gpt.config)
    drawn = random_gpt.float().generate(start, 20, temperature=1e-40, seed=0)
    assert torch.equal(drawn, random_gpt.generate(start, 20, temperature=0.0))


def test_a_seed_repeats_the_draw_and_no_seed_does_not(random_gpt):
    start = windows_of(random_gpt.config)
    before = torch.get_rng_state()
    draws = [random_gpt.generate(start, 30, temperature=2.0, seed=seed) for seed in (7, 7, 8, None, None)]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[3], draws[4])


@pytest.mark.parametrize("training", [True, False])
def test_generation_is_without_dropout_and_leaves_the_mode_as_it_was(training):
    gpt = GPT(GPTConfig(d_vocab=12, n_ctx=10, d_model=16, n_layers=2, n_heads=2, dropout=0.5), "torch").train(training)
    start = windows_of(gpt.config)
    drawn = gpt.generate(start, 20, temperature=0.0)
    assert all(module.training is training for module in gpt.modules())
    assert torch.equal(drawn, greedy(gpt.eval(), start, 20))


def test_generation_builds_no_graph(random_gpt):
    assert all(parameter.requires_grad for parameter in random_gpt.parameters())
    assert not random_gpt.generate(windows_of(random_gpt.config), 2).requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=-1.0), "temperature: got -1.0; expected a number of at least 0"),
        (dict(temperature=math.nan), "temperature: got nan"),
        (dict(temperature=math.inf), "temperature: got inf"),
        (dict(top_k=0), "top_k: got 0; expected at least 1"),
        (dict(max_new_tokens=-1), "max_new_tokens: got -1; expected at least 0"),
    ],
)
def test_options_out_of_range_are_named_and_the_mode_is_restored(random_gpt, options, message):
    random_gpt.train()
    with pytest.raises(ConfigError, match=message):
        random_gpt.generate(windows_of(random_gpt.config), **dict(max_new_tokens=1) | options)
    assert random_gpt.training


def test_an_empty_context_cannot_be_continued(random_gpt):
    with pytest.raises(ConfigError, match="empty context; give at least one character"):
        random_gpt.generate(torch.zeros(1, 0, dtype=torch.long), 1)


def test_nothing_more_to_draw_returns_the_context(random_gpt):
    start = windows_of(random_gpt.config)
    assert torch.equal(random_gpt.generate(start, 0), start)


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("shape", [(1_000_000,), (999, 1001)])  # the second does not fill its last draw
def test_dropout_drops_its_share_anywhere_and_scales_what_stays(p, shape):
    dropout, x = Dropout(p).train(), torch.ones(shape, requires_grad=True)
    y = dropout(x)
    assert (y == 0).double().mean().item() == pytest.approx(p, abs=0.002)  # four standard deviations
    kept = y[y != 0]
    assert torch.equal(kept, torch.full_like(kept, 2**16 / (2**16 - round(p * 2**16))))
    assert y.mean().item() == pytest.approx(1, abs=0.005)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # what was dropped has no gradient, what stays the same factor
    quarters = (y == 0).double().flatten()[: x.numel() // 4 * 4].view(-1, 4).mean(0)  # the four of one draw
    assert quarters.tolist() == pytest.approx([p] * 4, abs=0.004)


def test_dropout_is_pytorch_s_otherwise():
    x = torch.randn(100)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0).train()(x), x)
    assert Dropout(0.999999).train()(x).isfinite().all()
    assert Dropout(0.5).train()(x.double()).dtype == torch.float64
    torch.manual_seed(3)
    one = Dropout(0.5).train()(x)
    torch.manual_seed(3)
    assert torch.equal(Dropout(0.5).train()(x), one)
    assert not torch.equal(Dropout(0.5).train()(x), one)
