"""n-grams explained: how much of each component's direct effect an n-gram table would give.

Reference: Elhage et al. (2021) for the direct path as a bigram table; Voita et al. (2023) for neurons that are n-grams.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from analyses.axes import labelled
from analyses.ngrams import ngram_codes, places_among
from analyses.over_corpus import kept
from analyses.passage import passage_windows
from analyses.progress import track
from analyses.spec import Knob, analysis
from analyses.stream import UnsupportedModel, decomposition, final_norm, require_standard, run
from analyses.views import Heatmap
from models.corpus import at_hand, windows
from models.hooked import vocabulary_of
from models.protocol import Model

LONGEST = 3  # characters
ROWS = 2_048  # positions in one forward pass: every component's effect on every logit is held for them
WRITTEN = ("hook_embed", "hook_pos_embed", "hook_z", "hook_attn_out", "hook_mlp_out", "hook_resid_post")
Texts = Literal["passage", "validation split"]


@analysis(
    Heatmap(title="Share of a component's direct effect that the last characters explain", x="component", y="order",
            colour="explained", text="rounded", scale="probability"),
    group="Inputs",
)  # fmt: skip
def ngram_explained(
    model: Model,
    texts: Annotated[Texts, Knob("What is read: the built-in passage, or the validation split of the text at hand")] = "passage",
) -> xr.Dataset:
    """n-grams explained: how much of what each component adds to the logits is a function of the last 1, 2 or 3 characters.

    A component's direct effect y at a place is what it adds to the logits there, through the final LayerNorm with the
    place's own scale, less its mean over the characters. The best table of y by the last n characters holds y's mean for
    each of them; it explains the share

        explained(n) = 1 − (1/N) Σ_g N_g s_g² / s²,

    where s_g² is the variance of y over the N_g places g where the same n characters end, and s² that over all N places,
    both with one degree of freedom taken off (and summed over the logits), so that neither is biased by a small N_g. All
    n are compared over the same places: those whose last three characters, inside their window, occur at least twice.
    What is left is what a component takes from further back, or from its position. On a text as short as the passage, where
    what repeats also repeats in the same surroundings, the shares come out too high: the validation split is for figures.

    Returns:
        `explained` (order, component) of embeddings, heads and MLPs: at most 1, and a little below 0 by chance where
        nothing is explained; `rounded`, the same to two decimals; `variance` (component), s², logits squared; `coverage`,
        the share of places that are used. b_O, which only the scale varies, is left out, and so are components that do
        not vary, which a note names. `identity_error`: all components and biases add up to the logits.

    Raises:
        UnsupportedModel: the model's stream is not a sum of such components, or nothing repeats in what is read.
        PassageError: the model does not know a character of the passage.
        CorpusError: the validation split is asked for, and there is no text at hand.
    """
    require_standard(model)
    if texts == "passage":
        read = passage_windows(model)
        found = _explained(model, read)
    else:
        corpus = at_hand()
        ids = windows(corpus.encoded("validation", vocabulary_of(model)), model.cfg.n_ctx)[0]
        read = torch.from_numpy(ids).to(model.cfg.device)
        found = kept(model, corpus, "ngram-explained-1", lambda: _explained(model, read))
    names = decomposition(model, run(model, read[0])[1]).names
    varies = found["variance"] > 1e-12 * found["size"]
    shown = [number for number, name in enumerate(names) if varies[number] and not name.endswith("attn_bias")]
    constant = [name for name, one in zip(names, varies.tolist(), strict=True) if not one and not name.endswith("attn_bias")]
    explained = found["explained"][:, shown]
    N, used = int(found["places"]), int(found["used"])
    notes = [f"{used:,} of {N:,} places are used."]
    if texts == "passage":
        notes.append("So short a text repeats itself with its surroundings, so the shares are rather too high.")
    if constant:
        notes.append(f"Left out, since they do not vary: {', '.join(constant)}.")
    return labelled(
        model,
        names={"component": [names[number] for number in shown], "order": list(range(1, len(explained) + 1))},
        identity=("components and biases add up to the logits", found["error"].item()),
        note=" ".join(notes),
        explained=(explained, "order component", "share explained", "1"),
        rounded=(explained.round(decimals=2) + 0.0, "order component", "share explained, two decimals", "1"),
        variance=(found["variance"][shown], "component", "variance over places, summed over logits", "1"),
        coverage=(used / N, "", "share of places that are used", "1"),
    )


def _explained(model: Model, read: Int[Tensor, "batch position"]) -> dict[str, Tensor]:
    """Sums of the effects and of their squares for each n-gram of the longest order; then the shares for all orders."""
    longest, V = min(LONGEST, model.cfg.n_ctx), model.cfg.d_vocab
    codes = ngram_codes(read, longest, V)
    ngram, count = torch.unique(codes, return_counts=True)
    repeated = (ngram > 0) & (count > 1)
    ngram, count = ngram[repeated], count[repeated].double()
    if not len(ngram):
        raise UnsupportedModel(
            f"no {longest} characters occur twice within the windows of the text that is read; give a longer text"
        )
    components = len(decomposition(model, run(model, read[0])[1]).names)
    sums = torch.zeros(len(ngram) + 1, components * V, dtype=torch.float64, device=read.device)  # the last for all others
    squares = torch.zeros(len(ngram) + 1, components, dtype=torch.float64, device=read.device)
    rows, error = max(1, ROWS // read.shape[1]), 0.0
    starts = range(0, len(read), rows)
    for start in track(starts, len(starts), "Direct effects of all components"):
        effect, off = _direct_effects(model, read[start : start + rows])
        ends = places_among(codes[start : start + rows].flatten(), ngram)
        sums.index_add_(0, ends, effect.flatten(1))
        squares.index_add_(0, ends, effect.square().sum(-1))
        error = max(error, off)
    sums, squares = sums[:-1], squares[:-1]
    shares = [_share(sums, squares, count, ngram % (V + 1) ** order) for order in range(1, longest + 1)]
    return {
        "explained": torch.stack([share for share, _ in shares]).cpu(),
        "variance": shares[0][1].cpu(),
        "size": (squares.sum(0) / count.sum()).cpu(),
        "places": torch.tensor(codes.numel()),
        "used": count.sum().long().cpu(),
        "error": torch.tensor(error, dtype=torch.float64),
    }


def _direct_effects(model: Model, batch: Int[Tensor, "batch position"]) -> tuple[Float[Tensor, "row component char"], float]:
    """What each component adds to the logits at every place, centred over characters; and how far all are from the logits."""
    logits, cache = model.run_with_cache(batch, names_filter=lambda name: name.endswith(WRITTEN))
    flat = {name: value.expand(len(batch), *value.shape[1:]).flatten(0, 1) for name, value in cache.items()}
    split, norm = decomposition(model, flat), final_norm(model)
    effect = norm.linear(split.parts) / norm.scale(split.stream) @ model.unembed.W_U
    whole = logits.flatten(0, 1) - norm.bias @ model.unembed.W_U - model.unembed.b_U
    effect, whole = (values - values.mean(-1, keepdim=True) for values in (effect, whole))
    return effect.transpose(0, 1).double(), (effect.sum(0) - whole).abs().max().item()


def _share(
    sums: Float[Tensor, "ngram component_char"],
    squares: Float[Tensor, "ngram component"],
    count: Float[Tensor, "ngram"],
    group: Int[Tensor, "ngram"],
) -> tuple[Float[Tensor, "component"], Float[Tensor, "component"]]:
    """The share that groups of n-grams explain, and the variance over all places; zero variance makes it not finite."""
    known, number = torch.unique(group, return_inverse=True)

    def grouped(values: Tensor) -> Tensor:
        return values.new_zeros(len(known), *values.shape[1:]).index_add(0, number, values)

    N, each = count.sum(), grouped(count)[:, None]
    within = each / (each - 1) * (grouped(squares) - _length(grouped(sums), squares.shape[1]) / each)
    variance = (squares.sum(0) - _length(sums.sum(0, keepdim=True), squares.shape[1])[0] / N) / (N - 1)
    return 1 - within.sum(0) / N / variance, variance


def _length(sums: Float[Tensor, "group component_char"], components: int) -> Float[Tensor, "group component"]:
    """Squared length over the characters."""
    return sums.unflatten(1, (components, -1)).square().sum(-1)
