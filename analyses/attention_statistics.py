"""Attention statistics: where heads look on average, by distance and by character.  Reference: Voita et al. (2019)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xarray as xr
from einops import rearrange
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import one_hot

from analyses.axes import labelled
from analyses.over_corpus import corpus_ids, kept
from analyses.spec import Head, Layer, analysis
from analyses.stream import require_blocks, require_standard
from analyses.texts import Texts, passage_batches, patterns, text_batches
from analyses.views import HeadGrid, Heatmap, Lines
from models import corpus
from models.protocol import Model


@analysis(
    Lines(title="Mean attention by distance", x="offset", y="by_offset", hue="head", facet="layer", x_scale="symlog"),
    HeadGrid(title="From each character to all earlier ones of a kind", x="key_char", y="query_char", colour="attended",
             scale="probability"),
    Heatmap(title="From each character to all earlier ones of a kind", x="key_char", y="query_char", colour="attended",
            scale="probability", at=("layer", "head")),
    Heatmap(title="From one character to one other", x="key_char", y="query_char", colour="by_pair", at=("layer", "head")),
    group="Attention",
)  # fmt: skip
def attention_statistics(model: Model, texts: Texts = "passage", layer: Layer = 0, head: Head = 0) -> xr.Dataset:
    """Attention statistics: where every head looks on average, by distance and by character.

    Over all windows of n_ctx characters of a text, with A[q, k] the attention from place q to place k ≤ q,

        by_offset(o)   = mean of A[q, q − o] over all q ≥ o,
        by_pair(a, b)  = mean of A[q, k] over all pairs k ≤ q with character a at q and b at k,
        attended(a, b) = mean over all q with character a of Σ over k ≤ q with character b of A[q, k].

    `by_pair` says how much one b gets when an a looks, `attended` how much all of them get, so that its rows add up to 1;
    common characters stand out in the second only. Both mix what a head is drawn to with how far away it usually stands.

    `texts` is the built-in passage, or all of the text that the model was trained on.

    Returns:
        `by_offset` (layer, head, offset), `by_pair` and `attended` (layer, head, query_char, key_char), probability;
        `pair_count` (query_char, key_char) and `query_count` (query_char), how many there were. Where there were none,
        the mean is undefined and 0 stands in its place. All weights put back, by offset and by pair, rows of attention
        add up to 1 on average within `identity_error`. `layer` and `head` choose which head is drawn large.

    Raises:
        PassageError: the model does not know the passage's characters; give its own text.
        CorpusError: there is no such text at hand.
        KnobError: there is no such head.
    """
    require_standard(model)
    require_blocks(model)
    sums = _sums_of(model, texts)
    pairs, queries, offsets, windows = (sums[name] for name in ("pair_count", "query_count", "offset", "windows"))
    by_offset = offsets / (windows * torch.arange(model.cfg.n_ctx, 0, -1))
    by_pair = sums["pair"] / pairs.clamp(min=1)
    attended = sums["pair"] / queries.clamp(min=1)[:, None]
    rows = windows * model.cfg.n_ctx
    by_distance = (by_offset * torch.arange(model.cfg.n_ctx, 0, -1)).sum(-1) / model.cfg.n_ctx
    back = torch.stack([by_distance, (by_pair * pairs).sum((-1, -2)) / rows, (attended.sum(-1) * queries).sum(-1) / rows])
    matrix, missing = "layer head query_char key_char", int((pairs == 0).sum())
    return labelled(
        model,
        identity=("rows of attention, put back from offsets and from pairs, sum to 1", (back - 1).abs().max().item()),
        note=f"{missing} of {pairs.numel()} pairs of characters never occur in this text; 0 stands for their mean."
        * (missing > 0),
        by_offset=(by_offset, "layer head offset", "mean attention", "probability"),
        attended=(attended, matrix, "mean attention to all of a character", "probability"),
        by_pair=(by_pair, matrix, "mean attention to one of a character", "probability"),
        pair_count=(pairs.long(), "query_char key_char", "pairs of places with these characters", "1"),
        query_count=(queries.long(), "query_char", "queries with this character", "1"),
    )


def _sums_of(model: Model, texts: str) -> dict[str, Tensor]:
    if texts == "passage":
        return summed(model, passage_batches(model))
    text = corpus.at_hand()
    batches = text_batches(model, corpus_ids(model, text), "Reading the corpus")
    return kept(model, text, "attention-statistics-1", lambda: summed(model, batches))


def summed(model: Model, batches: Iterable[Int[Tensor, "batch position"]]) -> dict[str, Tensor]:
    """Attention added up: `offset` (layer, head, offset), `pair` (layer, head, query_char, key_char), and the counts."""
    cfg = model.cfg
    shape = {
        "offset": (cfg.n_layers, cfg.n_heads, cfg.n_ctx), "pair": (cfg.n_layers, cfg.n_heads, cfg.d_vocab, cfg.d_vocab),
        "pair_count": (cfg.d_vocab, cfg.d_vocab), "query_count": (cfg.d_vocab,), "windows": (),
    }  # fmt: skip
    sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in shape.items()}
    for tokens in batches:
        pattern = torch.stack(patterns(model, tokens), dim=1)  # batch layer head query_position key_position
        characters = one_hot(tokens, cfg.d_vocab).to(pattern.dtype)  # batch position char
        sums["pair_count"] += torch.einsum("bqa,bqc->ac", characters, characters.cumsum(1)).double().cpu()
        sums["query_count"] += characters.sum((0, 1)).double().cpu()
        sums["windows"] += len(tokens)
        looked = pattern.flatten(1, 3) @ characters  # batch (layer head query_position) char
        by_place = rearrange(looked, "batch (head query) char -> (batch query) head char", query=tokens.shape[1])
        by_char = by_place.new_zeros(cfg.d_vocab, *by_place.shape[1:]).index_add(0, tokens.flatten(), by_place)
        sums["pair"] += (
            rearrange(by_char, "query_char (layer head) char -> layer head query_char char", head=cfg.n_heads).double().cpu()
        )
        summed_up = pattern.sum(0)
        diagonals = [summed_up.diagonal(-offset, -2, -1).sum(-1) for offset in range(tokens.shape[1])]
        sums["offset"] += torch.stack(diagonals, dim=-1).double().cpu()
    return sums
