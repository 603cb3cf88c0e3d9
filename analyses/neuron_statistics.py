"""What every neuron does over the whole corpus: one streamed pass that keeps the places where it is most active, a
histogram of its activation, and its mean after every n-gram. Exact, in bounded memory. And what it writes.

The text is read in consecutive windows of n_ctx characters, as for the validation loss, training and validation split after
one another. A context never reaches over its window's start.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from analyses.axes import NotFinite
from analyses.interventions import layer_of
from analyses.ngrams import ngram_codes, places_among
from analyses.over_corpus import corpus_batches, corpus_ids, kept
from analyses.stream import final_norm
from models.corpus import Corpus, windows
from models.protocol import Model

TOP = 20  # places kept per neuron
LONGEST = 3  # characters of an n-gram
OFTEN = 20  # occurrences from which an n-gram's mean is compared with others', and from which those of 3 characters are kept
BINS, BELOW, FINEST = 128, 8, 2.0**-8  # bins of a histogram, how many of them lie below 0, the smallest width
IN_CACHE = 1024  # places counted at once, so that what is made on the way stays in the processor's cache


@dataclass(frozen=True)
class NeuronStatistics:
    """Of every neuron of every MLP, over all `positions` places of the windows.

    Args:
        top_activation, top_place: the highest activations, in falling order, and their places in the text.
        histogram, width: bin i of a neuron counts the activations in [(i − 8)·width, (i − 7)·width). The width is a power
            of two, doubled from 1/256 on until all activations fit, so nothing lies outside.
        active: how many activations are above 0.
        squares: sums of squared activations over the places that have one, and two, characters in their window.
        ngram, order, count: all n-grams of 1 and 2 characters, and those of 3 that occur at least 20 times; how many
            characters each has, and at how many places it ends.
        sums: the activation summed over the places where the n-gram ends: the last character is the one being read.
    """

    top_activation: Float[Tensor, "layer neuron index"]
    top_place: Int[Tensor, "layer neuron index"]
    histogram: Int[Tensor, "layer neuron bin"]
    width: Float[Tensor, "layer neuron"]
    active: Int[Tensor, "layer neuron"]
    squares: Float[Tensor, "layer two neuron"]
    ngram: Int[Tensor, "ngram"]
    order: Int[Tensor, "ngram"]
    count: Int[Tensor, "ngram"]
    sums: Float[Tensor, "layer ngram neuron"]
    positions: Int[Tensor, ""]

    def mean(self, layer: int) -> Float[Tensor, "neuron"]:
        """Mean activation over all places."""
        return self.sums[layer, self.order == 1].sum(0, dtype=torch.float64) / self.positions

    def often(self, order: int) -> Int[Tensor, "often"]:
        """Rows of the n-grams of one length that occur often enough for their means to be compared."""
        return ((self.order == order) & (self.count >= OFTEN)).nonzero()[:, 0]

    def ngram_means(self, layer: int, rows: Int[Tensor, "row"]) -> Float[Tensor, "row neuron"]:
        """Mean activation where these n-grams end."""
        return self.sums[layer, rows] / self.count[rows, None]

    def explained(self, layer: int, order: int) -> Float[Tensor, "neuron"]:
        """Share of a neuron's variance that its last one or two characters explain, corrected for their number.

            1 − [within/(N − G)] / [total/(N − 1)],

        the adjusted R² of the G means over the N places that have so many characters. Not finite for a neuron that
        never varies.
        """
        rows = self.order == order
        sums, count = self.sums[layer, rows].double(), self.count[rows].double()
        squares, N = self.squares[layer, order - 1].double(), count.sum()
        within = squares - (sums.square() / count[:, None]).sum(0)
        total = squares - sums.sum(0).square() / N
        return 1 - within / (N - len(count)) / (total / (N - 1))


def neuron_statistics(model: Model, corpus: Corpus) -> NeuronStatistics:
    """One pass over a corpus, or what an earlier one has left on disk.

    Raises:
        VocabularyError: the text has characters that the model does not know.
        CorpusError: it is shorter than one window.
        NotFinite: a neuron's activation is not finite.
    """
    return NeuronStatistics(**kept(model, corpus, "neurons-1", lambda: _measured(model, corpus)))


def direct_effects(model: Model, layer: int) -> Float[Tensor, "neuron char"]:
    """What a unit of activation of each neuron adds to the logits directly: the final norm's scale one, less the mean over
    the characters."""
    effect = final_norm(model).linear(model.blocks[layer].mlp.W_out) @ model.unembed.W_U
    return effect - effect.mean(-1, keepdim=True)


@torch.no_grad()
def _measured(model: Model, corpus: Corpus) -> dict[str, Tensor]:
    ids, V = corpus_ids(model, corpus), model.cfg.d_vocab
    inputs = torch.from_numpy(windows(ids, model.cfg.n_ctx)[0])
    found = _occurring(inputs, V)
    layers = [_Running(model, found["ngram"]) for _ in range(model.cfg.n_layers)]
    for start, batch in corpus_batches(model, ids, "Every neuron over the corpus"):
        codes = torch.stack([ngram_codes(batch, order, V).flatten() for order in range(1, LONGEST + 1)])
        hook = partial(_add, layers, start, places_among(codes, found["ngram"].to(batch.device)))
        with model.hooks(fwd_hooks=[(f"blocks.{layer}.mlp.hook_post", hook) for layer in range(len(layers))]):
            model(batch)
    each = [running.results(inputs.numel()) for running in layers]
    stacked = {name: torch.stack([results[name] for results in each]).cpu() for name in each[0]}
    return stacked | found | {"positions": torch.tensor(inputs.numel())}


def _occurring(inputs: Int[Tensor, "batch position"], d_vocab: int) -> dict[str, Tensor]:
    """The n-grams that are looked at, in rising order, their lengths and how often they occur."""
    parts = []
    for order in range(1, LONGEST + 1):
        ngram, count = torch.unique(ngram_codes(inputs, order, d_vocab), return_counts=True)
        wanted = (ngram > 0) & (count >= (OFTEN if order == LONGEST else 1))
        parts.append((ngram[wanted], torch.full((int(wanted.sum()),), order), count[wanted]))
    return {name: torch.cat(part) for name, part in zip(("ngram", "order", "count"), zip(*parts, strict=True), strict=True)}


def _add(layers: list[_Running], start: int, ngrams: Tensor, activation: Tensor, hook: Any) -> None:
    layers[layer_of(hook.name)].add(activation, start, ngrams)


class _Running:
    """Statistics of the neurons of one MLP, as far as the text has been read."""

    def __init__(self, model: Model, ngram: Tensor) -> None:
        n, like = model.cfg.d_mlp, dict(dtype=model.unembed.W_U.dtype, device=model.cfg.device)
        whole: dict[str, Any] = dict(dtype=torch.int64, device=model.cfg.device)
        self.top, self.place = torch.full((n, TOP), -torch.inf, **like), torch.zeros(n, TOP, **whole)
        self.histogram, self.width = torch.zeros(n, BINS, **whole), torch.full((n,), FINEST, **like)
        self.active, self.squares = torch.zeros(n, **whole), torch.zeros(2, n, dtype=torch.float64, device=model.cfg.device)
        self.sums = torch.zeros(len(ngram) + 1, n, **like)  # the last for n-grams that are not looked at

    def results(self, positions: int) -> dict[str, Tensor]:
        shown = min(TOP, positions)
        return {
            "top_activation": self.top[:, :shown], "top_place": self.place[:, :shown], "histogram": self.histogram,
            "width": self.width, "active": self.active, "squares": self.squares, "sums": self.sums[:-1],
        }  # fmt: skip

    def add(self, activation: Float[Tensor, "batch position neuron"], start: int, ngrams: Int[Tensor, "order row"]) -> None:
        """The activations of a batch of windows, where in the text the first starts, and which n-grams end at each place."""
        rows, highest = activation.flatten(0, 1), activation.amax(1)
        lowest = rows.amin(0)
        if not (highest.isfinite().all() and lowest.isfinite().all()):
            raise NotFinite("a neuron's activation is not finite, so nothing is shown; check the model's weights")
        self._keep_highest(activation, highest, start)
        self._widen(lowest, highest.amax(0))
        for some in rows.split(IN_CACHE):
            self._count(some)
            self.active += some.clone().gt_(0).sum(0).long()  # ones and zeros as numbers: faster than as truths
        squares = activation.square().sum(0)
        self.squares += torch.stack([squares.sum(0), squares[1:].sum(0)])
        part = torch.zeros_like(self.sums)  # sums of few numbers first, so that little is rounded
        for ends in ngrams:
            part.index_add_(0, ends, rows)
        self.sums += part

    def _keep_highest(self, activation: Tensor, highest: Float[Tensor, "batch neuron"], start: int) -> None:
        """The highest activations lie in the windows with the highest maxima: only as many windows are looked through."""
        T, n = activation.shape[1:]
        window = highest.topk(min(TOP, len(highest)), dim=0).indices.T  # neuron, its best windows
        values = activation[window, :, torch.arange(n, device=window.device)[:, None]]  # neuron window position
        places = start + window[..., None] * T + torch.arange(T, device=window.device)
        values, places = torch.cat([self.top, values.flatten(1)], 1), torch.cat([self.place, places.flatten(1)], 1)
        self.top, best = values.topk(TOP)
        self.place = places.gather(1, best)

    def _widen(self, lowest: Float[Tensor, "neuron"], highest: Float[Tensor, "neuron"]) -> None:
        """Join the histogram's bins in pairs, until nothing lies outside."""
        while (outside := (highest >= (BINS - BELOW) * self.width) | (lowest < -BELOW * self.width)).any():
            pairs = self.histogram[outside].unflatten(1, (-1, 2)).sum(-1)
            self.histogram[outside] = torch.nn.functional.pad(pairs, (BELOW // 2, BINS // 2 - BELOW // 2))
            self.width[outside] *= 2

    def _count(self, rows: Float[Tensor, "row neuron"]) -> None:
        bins = (rows / self.width).floor_().to(torch.int32)  # exact: the width is a power of two
        bins += BELOW + BINS * torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
        self.histogram += torch.bincount(bins.flatten(), minlength=self.histogram.numel()).view_as(self.histogram)
