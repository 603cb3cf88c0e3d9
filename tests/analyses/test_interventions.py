"""The engine under patching and ablation: exact, batched, and never silent about an edit that did not happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from analyses import interventions
from analyses.interventions import Edit, InterventionError, intervene
from analyses.stream import run
from models.hooked import encode

TEXT = "abc\nj fd"


@pytest.fixture
def cells(random_model: Any) -> list[list[Edit]]:
    """Edits of many kinds: one place, a head, a whole layer, several sites at once, the embedding."""
    draw = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    return [
        [Edit("blocks.0.hook_resid_pre", (2,), noise(16))],
        [Edit("blocks.1.attn.hook_z", (slice(None), 1), noise(len(TEXT), 8))],
        [Edit("blocks.1.hook_mlp_out", (slice(None),), torch.zeros(()))],
        [Edit("blocks.1.attn.hook_q", (3, 0), noise(8)), Edit("blocks.0.hook_attn_out", (5,), noise(16))],
        [Edit("blocks.0.attn.hook_pattern", (1, 4, 2), torch.ones(()))],
        [Edit("hook_embed", (0,), noise(16))],
    ]


def _one_by_one(model: Any, tokens: torch.Tensor, edits: list[Edit]) -> torch.Tensor:
    """The literal version: TransformerLens, one whole forward pass per cell."""

    def hook(edit: Edit) -> Any:
        def change(activation: torch.Tensor, hook: Any) -> torch.Tensor:
            activation[0][edit.index] = edit.value.to(activation.dtype)
            return activation

        return change

    return model.run_with_hooks(tokens[None], fwd_hooks=[(edit.site, hook(edit)) for edit in edits])[0]


def test_batched_equals_one_by_one(random_model: Any, cells: list[list[Edit]]) -> None:
    tokens = encode(random_model, TEXT)
    with torch.no_grad():
        _, cache = run(random_model, tokens)
        logits = intervene(random_model, tokens, cells, cache).logits
        for row, edits in zip(logits, cells, strict=True):
            torch.testing.assert_close(row, _one_by_one(random_model, tokens, edits), rtol=0, atol=1e-12)


def test_small_chunks_give_the_same(random_model: Any, cells: list[list[Edit]], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = encode(random_model, TEXT)
    with torch.no_grad():
        _, cache = run(random_model, tokens)
        whole = intervene(random_model, tokens, cells, cache)
        monkeypatch.setattr(interventions, "CELL_BUDGET", 1)
        apart = intervene(random_model, tokens, cells, cache)
    torch.testing.assert_close(whole.logits, apart.logits, rtol=0, atol=1e-12)
    assert torch.equal(whole.changed, apart.changed)


def test_changed_counts_the_values_that_differ(random_model: Any) -> None:
    tokens = encode(random_model, TEXT)
    _, cache = run(random_model, tokens)
    site = "blocks.1.hook_resid_pre"
    half = cache[site][4].clone()
    half[:5] += 1
    outcome = intervene(random_model, tokens, [[Edit(site, (4,), half)], [Edit(site, (4,), cache[site][4])]], cache)
    assert outcome.changed.tolist() == [5, 0]


def test_own_activations_change_nothing_at_all(random_model: Any) -> None:
    tokens = encode(random_model, TEXT)
    logits, cache = run(random_model, tokens)
    sites = [name for name in cache if name.startswith("blocks.") and "scale" not in name and "normalized" not in name]
    edits = [[Edit(site, (slice(None),), cache[site])] for site in sites if cache[site].ndim > 1]
    outcome = intervene(random_model, tokens, edits, cache)
    assert (outcome.logits - logits).abs().max() <= 1e-12
    assert outcome.changed.sum() == 0


def test_an_unknown_site_raises(random_model: Any) -> None:
    tokens = encode(random_model, TEXT)
    _, cache = run(random_model, tokens)
    with pytest.raises(InterventionError, match="no hook point 'blocks.10.hook_resid_pre'"):
        intervene(random_model, tokens, [[Edit("blocks.10.hook_resid_pre", (0,), torch.zeros(16))]], cache)


def test_a_site_that_is_not_reached_raises(random_model: Any) -> None:
    """The result hook fires only where the configuration asks for it; a bridge refuses it, but has another such hook."""
    site = "blocks.0.attn.hook_hidden_states" if hasattr(random_model, "original_model") else "blocks.0.attn.hook_result"
    tokens = encode(random_model, TEXT)
    _, cache = run(random_model, tokens)
    with pytest.raises(InterventionError, match=f"never reached '{site}'"):
        intervene(random_model, tokens, [[Edit(site, (0,), torch.zeros(16))]], cache)


def test_a_cell_without_an_edit_raises(random_model: Any) -> None:
    tokens = encode(random_model, TEXT)
    _, cache = run(random_model, tokens)
    with pytest.raises(InterventionError, match="cell 0 has no edit"):
        intervene(random_model, tokens, [[]], cache)


def test_hooks_are_gone_after_an_exception_and_the_users_stay(random_model: Any) -> None:
    tokens = encode(random_model, TEXT)
    _, cache = run(random_model, tokens)
    random_model.add_hook("blocks.1.hook_resid_post", lambda activation, hook: activation)
    wrong_shape = [[Edit("blocks.0.hook_resid_pre", (0,), torch.zeros(3))]]
    with pytest.raises(RuntimeError):
        intervene(random_model, tokens, wrong_shape, cache)
    left = {point.name: len(point.fwd_hooks) for point in random_model.hook_dict.values() if point.fwd_hooks}
    assert left == {"blocks.1.hook_resid_post": 1}
