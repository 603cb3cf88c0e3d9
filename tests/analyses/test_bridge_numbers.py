"""Hook points and analyses give the same numbers for a HookedTransformer and for the bridge of TransformerLens 4.

`reference_numbers.json` holds what a HookedTransformer gives. Under 3.9 both classes are held against it, under 4 the bridge,
so a file that is out of date is found in either.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from reference_numbers import STORED, TEXT, dataset_numbers, digest, hook_numbers, reference_model

from analyses.activation_patching import activation_patching
from analyses.catalogue import ANALYSES
from models.bridge import to_bridge
from models.hooked import content_hash, encode, to_hooked

NUMBERS: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
ANEW = "if that is meant, make the numbers anew: see tests/analyses/reference_numbers.py"


@pytest.fixture(scope="module", params=[to_hooked, to_bridge], ids=lambda convert: convert.__name__)
def model(request) -> Any:
    """Under 4 `to_hooked` is `to_bridge`."""
    return reference_model(request.param)


def close(found: Any, expected: Any) -> bool:
    """Equal texts and dimensions; numbers to 1e-9, which is rounding in float64 and nothing else."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(close(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected))
    return found == expected if isinstance(expected, str) else abs(found - expected) <= 1e-9


def test_weights_have_the_same_hash(model):
    assert content_hash(model) == NUMBERS["hash"]


def test_hook_points_are_the_same_in_the_same_order(model):
    assert list(model.run_with_cache(encode(model, TEXT)[None])[1]) == list(NUMBERS["hooks"])


def test_activations_are_the_same_and_an_edit_of_each_does_the_same(model):
    expected, found = NUMBERS["hooks"], hook_numbers(model)
    assert [name for name in expected if not close([*found[name]], expected[name])] == []
    as_it_is = digest(model(encode(model, TEXT)[None]).detach().numpy())
    dead = [name for name, (_, edited) in found.items() if abs(edited - as_it_is) < 1e-6]
    assert dead == []  # an edit that did nothing would agree with another that did nothing


@pytest.mark.parametrize("analysis", ANALYSES, ids=lambda analysis: analysis.slug)
def test_every_analysis_gives_the_same_numbers(model, analysis):
    expected = NUMBERS["analyses"].get(analysis.slug)
    assert expected, f"{analysis.slug} has no numbers yet; {ANEW}"
    assert close(dataset_numbers(analysis(model)), expected), ANEW


def test_every_site_of_patching_gives_the_same_numbers_in_both_classes():
    """Also in float32, to rounding."""
    models = [reference_model(convert) for convert in (to_hooked, to_bridge)]
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for site in ("resid_pre", "attn_out", "mlp_out", "head_z"):
            first, second = (activation_patching(m.to(dtype, print_details=False), site=site).metric for m in models)
            np.testing.assert_allclose(first, second, rtol=0, atol=bound)
