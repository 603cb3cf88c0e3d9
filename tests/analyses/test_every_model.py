"""Every analysis on every model of the course, at its defaults: numbers that satisfy their identity, or one honest sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from analyses.axes import WIDENED
from analyses.catalogue import ANALYSES
from analyses.spec import KnobError
from analyses.stream import UnsupportedModel
from models import checkpoint, hooked
from models.checkpoint import Checkpoint
from models.config import PRESETS, GPTConfig
from models.vocabulary import Vocabulary

CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TALL = {"nanogpt", "nanogpt-biased", "walkthrough-final"}  # the same architecture in fewer, narrower blocks, for speed

# what there is to see in a model that has none
WITHOUT_BLOCKS = {
    "residual-stream",
    "component-cosines",
    "norm-geometry",
    "logit-attribution",
    "direct-path",
    "path-expansion",
    "enumeration",
    "ngram-explained",
}
OF_PAIRS = {"composition", "virtual-head"}  # what needs a block after another
OF_MLPS = {"neuron-attribution", "neurons", "neuron-table", "neuron-ablation"}  # what needs an MLP
NEEDS_NORM = {"norm-geometry"}  # what needs a LayerNorm somewhere


def small(name: str) -> GPTConfig:
    config = PRESETS[name].model
    return GPTConfig(**config.to_dict() | dict(n_layers=2, d_model=48, n_ctx=64)) if name in TALL else config


@pytest.fixture(scope="module", params=PRESETS)
def model(request, random_weights: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random weights with non-zero biases, float64, loaded as a user would, with means beside it."""
    gpt = random_weights(small(request.param))
    path = checkpoint.save(tmp_path_factory.mktemp("models") / request.param, gpt.float(), Vocabulary(tuple(CHARACTERS)))
    found = checkpoint.load(path)
    plain = hooked.hook(found)
    means = {f"mean.{site}": torch.zeros(1) for site in plain.hook_dict}
    statistics = means | {"weights": torch.tensor(list(hooked.content_hash(plain).encode()), dtype=torch.uint8)}
    return hooked.hook(Checkpoint(**vars(found) | dict(statistics=statistics))).to(torch.float64, print_details=False)


@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda analysis: analysis.slug)
def test_every_analysis_runs_at_its_defaults(model, analysis):
    lacks = "block" if model.cfg.n_layers == 0 and analysis.slug not in WITHOUT_BLOCKS else None
    lacks = "MLP" if model.cfg.attn_only and model.cfg.n_layers and analysis.slug in OF_MLPS else lacks
    lacks = "block" if model.cfg.n_layers < 2 and analysis.slug in OF_PAIRS else lacks
    config = model.checkpoint.config
    lacks = "LayerNorm" if not (config.norm or config.final_norm) and analysis.slug in NEEDS_NORM else lacks
    if lacks:
        with pytest.raises((UnsupportedModel, KnobError), match=lacks):
            analysis(model)
        return
    result = analysis(model)
    assert result.attrs.get("identity_error", 0.0) < 1e-9
    assert (WIDENED in result.attrs.get("note", "")) == (not model.checkpoint.config.residual)
    assert analysis.fitting_views(result)


def test_a_default_text_is_cropped_to_its_end_and_the_result_says_so(model):
    from analyses.activation_patching import activation_patching

    if model.cfg.n_layers == 0:
        pytest.skip("no blocks to patch")
    result = activation_patching(model, site="attn_out")
    assert result.sizes["position"] == min(13, model.cfg.n_ctx)
    assert result.attrs["knobs"].startswith('{"clean": "rd, I wi"' if model.cfg.n_ctx == 8 else '{"clean": "My lord, I wi"')
    with pytest.raises(KnobError, match=f"the model reads at most {model.cfg.n_ctx}"):
        activation_patching(model, clean="a" * (model.cfg.n_ctx + 1))
