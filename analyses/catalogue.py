"""All analyses, in reading order. The dashboard's pages, the command line and the tests follow this list."""

from __future__ import annotations

from analyses.ablation import ablation
from analyses.activation_patching import activation_patching
from analyses.attention_patterns import attention_patterns
from analyses.circuit_rank import circuit_rank
from analyses.logit_attribution import logit_attribution
from analyses.logit_lens import logit_lens
from analyses.ov_circuit import ov_circuit
from analyses.qk_circuit import qk_circuit
from analyses.residual_stream import residual_stream
from analyses.spec import Analysis

ANALYSES: tuple[Analysis, ...] = (
    residual_stream,
    logit_lens,
    logit_attribution,
    attention_patterns,
    qk_circuit,
    ov_circuit,
    circuit_rank,
    activation_patching,
    ablation,
)


def find(slug: str) -> Analysis:
    """The analysis with this slug.

    Raises:
        KeyError: there is none; the message lists those that exist.
    """
    for analysis in ANALYSES:
        if analysis.slug == slug:
            return analysis
    raise KeyError(f"there is no analysis {slug!r}; give one of: {', '.join(a.slug for a in ANALYSES)}")
