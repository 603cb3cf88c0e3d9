"""All analyses, in reading order. The dashboard's pages, the command line and the tests follow this list."""

from __future__ import annotations

from analyses.ablation import ablation
from analyses.activation_patching import activation_patching
from analyses.attention_patterns import attention_patterns
from analyses.attention_statistics import attention_statistics
from analyses.circuit_rank import circuit_rank
from analyses.component_cosines import component_cosines
from analyses.composition import composition
from analyses.copying import copying
from analyses.direct_path import direct_path
from analyses.enumeration import enumeration
from analyses.head_atlas import head_atlas
from analyses.head_scores import head_scores
from analyses.logit_attribution import logit_attribution
from analyses.logit_lens import logit_lens
from analyses.neuron_ablation import neuron_ablation
from analyses.neuron_attribution import neuron_attribution
from analyses.neuron_table import neuron_table
from analyses.neurons import neurons
from analyses.ngram_explained import ngram_explained
from analyses.norm_geometry import norm_geometry
from analyses.ov_circuit import ov_circuit
from analyses.path_expansion import path_expansion
from analyses.qk_blocks import qk_blocks
from analyses.qk_circuit import qk_circuit
from analyses.residual_stream import residual_stream
from analyses.singular_vectors import singular_vectors
from analyses.skip_trigrams import skip_trigrams
from analyses.source_attribution import source_attribution
from analyses.spec import Analysis
from analyses.virtual_head import virtual_head
from models.errors import WorkbenchError


class UnknownAnalysis(WorkbenchError):
    """There is no analysis of this name; the message lists those that exist."""


ANALYSES: tuple[Analysis, ...] = (
    residual_stream,
    component_cosines,
    norm_geometry,
    logit_lens,
    logit_attribution,
    source_attribution,
    neuron_attribution,
    head_atlas,
    attention_patterns,
    attention_statistics,
    head_scores,
    direct_path,
    qk_circuit,
    qk_blocks,
    ov_circuit,
    skip_trigrams,
    circuit_rank,
    singular_vectors,
    copying,
    composition,
    virtual_head,
    path_expansion,
    neuron_table,
    neurons,
    neuron_ablation,
    enumeration,
    ngram_explained,
    activation_patching,
    ablation,
)


def find(slug: str) -> Analysis:
    """The analysis with this slug.

    Raises:
        UnknownAnalysis: there is none; the message lists those that exist.
    """
    for analysis in ANALYSES:
        if analysis.slug == slug:
            return analysis
    raise UnknownAnalysis(f"there is no analysis {slug!r}; give one of: {', '.join(a.slug for a in ANALYSES)}")
