"""Enumeration: every short context there is, through the model, against the counts of the corpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from analyses.axes import labelled
from analyses.ngrams import every_context, ngram_codes, ngram_ids, ngram_table
from analyses.over_corpus import kept
from analyses.spec import Knob, analysis
from analyses.views import Heatmap, Scatter, Table
from models.corpus import Corpus, CorpusError, at_hand
from models.hooked import vocabulary_of
from models.protocol import Model
from models.vocabulary import Vocabulary

MOST_NUMBERS = 2**27  # of a table: half a gigabyte in float32
MOST_ROWS = 5_000  # listed where there is no corpus
Length = Literal[1, 2, 3]
Sort = Literal["count × KL", "count", "KL"]


def _is_enumerable(model: Model, _: Mapping[str, Any], length: int) -> None:
    V = model.cfg.d_vocab
    if length > model.cfg.n_ctx:
        raise ValueError(f"the model reads at most {model.cfg.n_ctx} characters; give a length of at most {model.cfg.n_ctx}")
    if V ** (length + 1) > MOST_NUMBERS:
        raise ValueError(f"{V} characters make {V**length:,} contexts of {length}, too many to hold; give a smaller length")


@analysis(
    Heatmap(title="The model after one character", x="output_char", y="source_char", colour="probability", scale="probability"),
    Heatmap(title="The corpus after one character", x="output_char", y="source_char", colour="corpus_share", scale="probability"),
    Table(title="Every context that occurs", rows=("index",),
          columns=("text", "count", "kl", "weight", "top", "corpus_top", "entropy", "corpus_entropy")),
    Scatter(title="KL by how often the context occurs", x="log_count", y="kl", over="index"),
    Table(title="Every context, the surest first", rows=("index",), columns=("text", "top", "entropy")),
    group="Inputs",
)  # fmt: skip
def enumeration(
    model: Model,
    length: Annotated[Length, Knob("Characters of a context", check=_is_enumerable)] = 2,
    sort: Annotated[Sort, Knob("What the rows are in order of, the highest first")] = "count × KL",
) -> xr.Dataset:
    """Enumeration: what the model predicts after every context of one, two or three characters, against the corpus.

    All V^length contexts are read, each at the start of a window, where training has shown the model such short ones too,
    as windows start anywhere in the text. That is the model's own n-gram table. For every context c that occurs in the
    training split, with the counts of what follows it there,

        KL(c) = Σ share(x | c) · log [share(x | c)/p(x | c)],    nats,

    and count × KL says where the model loses most against the best possible n-gram table of that text. The counts are
    exact, and a context that occurs seldom has a large KL for want of counts, whatever the model does: (V − 1)/(2·count)
    is what an exact model would show, roughly, where all V characters can follow.

    Returns:
        Per context that occurs (index), in the order of `sort`: `text`, `count`, its logarithm to base 10 `log_count`,
        `kl`, `weight` = count × kl, nats; `top` and `corpus_top`, the likeliest next character; `entropy` of the
        model's prediction and of the corpus' shares. Over all places of the training split that have such a context:
        `loss`, the model's, `corpus_loss`, that of the corpus' own shares, and `excess`, their difference, nats.
        For length 1 also `probability` and `corpus_share` (source_char, output_char), 0 where the source never
        occurs; for lengths 1 and 2 the whole table: `logprob` (context, output_char) and `following`, its counts.
        `identity_error`: the loss, place by place, is the mean of entropy + KL. Without a text at hand: the model's side
        only, and that its probabilities add up to 1.

    Raises:
        KnobError: the contexts are too long for the model, or too many.
        VocabularyError: the text at hand has characters that the model does not know.
    """
    vocabulary = vocabulary_of(model)
    try:
        corpus = at_hand()
    except CorpusError as error:
        return _without_corpus(model, vocabulary, length, f"The model's side only: {error}.")
    table = _table(model, length)
    context, following, places = _counts(corpus, vocabulary, length)
    rows = _row(context, length, len(vocabulary))
    found = _compared(table[rows].double(), following.double())
    N = following.sum()
    loss = -table[_row(places[0], length, len(vocabulary)), places[1]].double().mean()
    excess, corpus_loss = ((found["count"] * found[name]).sum() / N for name in ("kl", "corpus_entropy"))
    order = found[{"count × KL": "weight", "count": "count", "KL": "kl"}[sort]].argsort(descending=True, stable=True)
    return labelled(
        model,
        names={"context": _texts(every_context(length, len(vocabulary)), vocabulary)} if length < 3 else None,
        identity=("loss over the training split = mean of entropy + KL", (loss - corpus_loss - excess).abs().item()),
        note=f"Counts are of the training split of {corpus.name}: {int(N):,} places, {len(context):,} different contexts.",
        **_columns(vocabulary, ngram_ids(context, length, len(vocabulary))[order], {k: v[order] for k, v in found.items()}),
        **_whole(table, rows, following, length),
        loss=(loss, "", "loss of the model with contexts of this length", "nats"),
        corpus_loss=(corpus_loss, "", "loss of the corpus' own n-gram table", "nats"),
        excess=(excess, "", "loss in excess of the n-gram table's", "nats"),
    )


def _table(model: Model, length: int) -> Float[Tensor, "context char"]:
    """The model's n-gram table, kept on disk where it takes long."""
    if length == 1:
        return ngram_table(model, length)
    return kept(model, None, f"ngram-table-{length}-1", lambda: {"logprob": ngram_table(model, length)})["logprob"]


def _row(codes: Int[Tensor, "ngram"], length: int, V: int) -> Int[Tensor, "ngram"]:
    """Rows of contexts in the table, which is in the order of their ids."""
    return (ngram_ids(codes, length, V) * V ** torch.arange(length - 1, -1, -1)).sum(-1)


def _counts(
    corpus: Corpus, vocabulary: Vocabulary, length: int
) -> tuple[Int[Tensor, "context"], Int[Tensor, "context char"], tuple[Int[Tensor, "place"], Int[Tensor, "place"]]]:
    """The contexts of the training split, how often each character follows them, and both at each place in turn."""
    V = len(vocabulary)
    ids = torch.from_numpy(corpus.encoded("train", vocabulary))
    at, following = ngram_codes(ids[None, :-1], length, V)[0, length - 1 :], ids[length:]
    context, number = torch.unique(at, return_inverse=True)
    counts = torch.bincount(number * V + following, minlength=len(context) * V).reshape(-1, V)
    return context, counts, (at, following)


def _compared(logprobs: Float[Tensor, "context char"], following: Float[Tensor, "context char"]) -> dict[str, Tensor]:
    """Per context: count, KL(corpus ‖ model), their product, both entropies and both likeliest characters."""
    count = following.sum(-1)
    share = following / count[:, None]
    kl = (torch.xlogy(share, share) - share * logprobs).sum(-1).clamp(min=0)
    return {
        "count": count,
        "kl": kl,
        "weight": count * kl,
        "entropy": _entropy(logprobs),
        "corpus_entropy": -torch.xlogy(share, share).sum(-1),
        "top": logprobs.argmax(-1),
        "corpus_top": share.argmax(-1),
    }


def _entropy(logprobs: Float[Tensor, "context char"]) -> Float[Tensor, "context"]:
    return -(logprobs.exp() * logprobs).sum(-1)


def _columns(vocabulary: Vocabulary, ids: Int[Tensor, "index order"], found: dict[str, Tensor]) -> dict[str, Any]:
    variables: dict[str, Any] = {
        "text": (np.array(_texts(ids, vocabulary), dtype=object), "index", "context", "character"),
        "count": (found["count"].long(), "index", "count", "1"),
        "log_count": (found["count"].log10(), "index", "log₁₀ of the count", "1"),
        "kl": (found["kl"], "index", "KL from the corpus to the model", "nats"),
        "weight": (found["weight"], "index", "count × KL", "nats"),
        "entropy": (found["entropy"], "index", "entropy of the model", "nats"),
        "corpus_entropy": (found["corpus_entropy"], "index", "entropy of the corpus", "nats"),
    }
    for name, title in (("top", "likeliest"), ("corpus_top", "most frequent")):
        characters = _texts(found[name][:, None], vocabulary)
        variables[name] = (np.array(characters, dtype=object), "index", title, "character")
    return variables


def _whole(
    table: Float[Tensor, "every char"], rows: Int[Tensor, "context"], following: Int[Tensor, "context char"], length: int
) -> dict[str, Any]:
    """The whole tables of model and corpus, where they are not too large."""
    if length == 3:
        return {}
    counts = torch.zeros(table.shape, dtype=following.dtype).index_copy(0, rows, following)
    variables: dict[str, Any] = {
        "logprob": (table, "context output_char", "log-probability after the context", "nats"),
        "following": (counts, "context output_char", "count after the context", "1"),
    }
    if length == 1:
        share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        variables["probability"] = (table.exp(), "source_char output_char", "probability after the character", "probability")
        variables["corpus_share"] = (share, "source_char output_char", "share of what follows in the corpus", "probability")
    return variables


def _texts(ids: Int[Tensor, "context position"], vocabulary: Vocabulary) -> list[str]:
    return ["".join(vocabulary.characters[number] for number in row) for row in ids.tolist()]


def _without_corpus(model: Model, vocabulary: Vocabulary, length: int, note: str) -> xr.Dataset:
    """The model's own table, the contexts with the surest prediction first."""
    table, V = _table(model, length), len(vocabulary)
    entropy = _entropy(table)
    surest = entropy.argsort(stable=True)[:MOST_ROWS]
    if len(entropy) > MOST_ROWS:
        note += f" Listed are the {MOST_ROWS:,} surest of {len(entropy):,} contexts."
    texts = _texts(every_context(length, V), vocabulary)
    top = _texts(table.argmax(-1)[surest][:, None], vocabulary)
    whole: dict[str, Any] = {"logprob": (table, "context output_char", "log-probability after the context", "nats")}
    if length == 1:
        whole["probability"] = (table.exp(), "source_char output_char", "probability after the character", "probability")
    return labelled(
        model,
        names={"context": texts} if length < 3 else None,
        identity=("probabilities add up to 1", (table.exp().sum(-1) - 1).abs().max().item()),
        note=note,
        text=(np.array([texts[number] for number in surest.tolist()], dtype=object), "index", "context", "character"),
        top=(np.array(top, dtype=object), "index", "likeliest", "character"),
        entropy=(entropy[surest], "index", "entropy of the model", "nats"),
        **(whole if length < 3 else {}),
    )
