"""Other people's checkpoints: a foreign file in, one of ours out, with the proof that both compute the same.

Files are opened in `models.files`, which runs no code of theirs, and recognised by the tables in `models.foreign`. What a
file does not tell is assumed aloud, in the checkpoint's notes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import checkpoint, corpus, files, foreign, layouts, reference
from models.checkpoint import Checkpoint, CheckpointError
from models.checks import random_windows
from models.config import Activation, parameter_count
from models.corpus import Corpus
from models.files import Contents, ImporterError, read_meta
from models.gpt import GPT
from models.hooked import to_hooked
from models.layouts import Fit, LayoutError
from models.losses import validation_loss
from models.vocabulary import Vocabulary, VocabularyError

BOUND = 1e-10  # largest difference of logits, float64
BYTE_PAIRS = (50257, 50304)  # GPT-2's tokens, and their number rounded up as nanoGPT does
SIZES = {"n_layer": "L", "n_embd": "d", "block_size": "T", "vocab_size": "V"}  # nanoGPT's words for ours
TOLD = {"gelu": "exact GELU", "gelu_new": "GELU's tanh approximation", "relu": "ReLU"}


def load(
    name: str | Path,
    *,
    vocabulary: str | Path | None = None,
    data: str | Path | None = None,
    heads: int | None = None,
    activation: Activation | None = None,
) -> Checkpoint:
    """A checkpoint by name or folder, or a foreign file read into one; nothing is written.

    Args:
        vocabulary: nanoGPT's `meta.pkl`, for a file.
        data: the text that the model was trained on, whose distinct characters are the vocabulary where there is no meta.
        heads: how many, for a file that does not tell.
        activation: of the MLP, for a file that does not tell; the layout's own unless given.

    Raises:
        CheckpointError, ImporterError, VocabularyError, CorpusError: something is missing, broken or of another kind.
    """
    path = Path(name)
    if not os.path.isfile(path) or _is_inside_checkpoint(path):
        found = checkpoint.load(path.parent if os.path.isfile(path) else name)
        if any(option is not None for option in (vocabulary, data, heads, activation)):
            raise ImporterError(
                f"{name} is one of our checkpoints, which knows its own vocabulary, heads and activation; leave these out"
            )
        return found
    contents = files.read(path)
    fit, notes = _recognised(path, contents, heads, activation)
    tied = fit.layout in (foreign.NANOGPT, foreign.MINGPT) and _is_tied(contents.tensors)
    for tensor_name, tensor in contents.tensors.items():
        if not _is_mask(fit, tensor_name):
            if not tensor.is_floating_point():
                raise ImporterError(f"{path}: {tensor_name!r} holds {tensor.dtype}, not weights; save the model in float32")
            checkpoint.require_finite(tensor_name, tensor, path)
    characters, told = _vocabulary(path, vocabulary, data, fit.sizes["V"])
    with torch.random.fork_rng(devices=[]):  # weights are drawn and overwritten; nobody's generator should notice
        dropout = contents.arguments.get("dropout")
        gpt = GPT(fit.config(tied, dropout if isinstance(dropout, float) else 0.0)).eval()
    weights = fit.layout.weights(fit)
    if tied:
        weights.pop("unembedding.weight", None)
    checkpoint.fill(gpt, weights, path)
    tensors = {tensor_name: tensor.double() for tensor_name, tensor in contents.tensors.items()}
    account = {
        "imported_from": {"file": path.name, "sha256": _sha256(path), "layout": fit.layout.name},
        "notes": [*contents.notes, *notes, told],
        "claims": contents.claims,
        "largest_difference_of_logits": _proven(gpt, lambda idx: fit.layout.logits(tensors, fit, idx)),
    }
    return Checkpoint(path, gpt, characters, None, None, {}, account)


def bring(
    source: str | Path,
    out: str | Path,
    *,
    vocabulary: str | Path | None = None,
    data: str | Path | None = None,
    heads: int | None = None,
    activation: Activation | None = None,
) -> Checkpoint:
    """Write a foreign file as a checkpoint folder, or copy one of ours after the same proof; arguments as for `load`.

    With `data` the validation loss is measured too. Nothing is written unless all went well.

    Raises:
        CheckpointError: `out` exists or cannot be written; otherwise as `load`.
    """
    out = Path(out)
    if not os.path.exists(source):
        raise ImporterError(f"there is no file {str(source)!r}; give the path of a checkpoint, as in out/ckpt.pt")
    checkpoint.recover(out)
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already; give another folder with --out, so that nothing is lost")
    if os.path.isdir(source) and not checkpoint.is_checkpoint(Path(source)):
        raise ImporterError(_about_folder(Path(source)))
    ours = os.path.isdir(source) or _is_inside_checkpoint(Path(source))
    text = None if data is None else corpus.read(data) if ours else _text(data)
    found = load(source, vocabulary=vocabulary, data=None if ours else data, heads=heads, activation=activation)
    account = dict(found.training)
    if ours:
        double = deepcopy(found.gpt).double()
        account["largest_difference_of_logits"] = _proven(found.gpt, lambda idx: reference.forward(double, idx))
    if text is not None:
        account["validation_loss"] = validation_loss(found.gpt, text, found.vocabulary)
        account |= {"measured_on": text.name, "measured_on_sha256": text.sha256}
    try:
        if not ours:
            checkpoint.save(out, found.gpt, found.vocabulary, training=account)
        elif found.path.resolve() in out.resolve().parents:
            raise CheckpointError(f"{out} lies inside {found.path}, which is to be copied; give another folder with --out")
        else:
            with checkpoint.replace_directory(out) as folder:
                shutil.copytree(found.path, folder, dirs_exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{out} cannot be written ({error.strerror}: {error.filename}); give another folder with --out"
        ) from None
    return replace(checkpoint.load(out), training=account)


def report(found: Checkpoint) -> list[str]:
    """What is known of an imported checkpoint, a line each."""
    account, c = found.training, found.config
    source, claims = account.get("imported_from"), account.get("claims") or {}
    lines = [f"{source['file']}: {source['layout']}, sha256 {source['sha256']}" if source else "one of our checkpoints, copied"]
    sizes = f"V {c.d_vocab}, T {c.n_ctx}, d {c.d_model}, L {c.n_layers}, H {c.n_heads}"
    lines.append(f"{parameter_count(c):,} parameters: {sizes}, {TOLD[c.activation] if c.mlp else 'no MLP'}")
    witness = "the file's own tensors, read literally" if source else "one loop per head"
    lines.append(
        f"largest difference of logits, HookedTransformer and {witness}, float64: "
        f"{account['largest_difference_of_logits']:.0e} (at most {BOUND:.0e})"
    )
    lines += [f"note: {note}" for note in account.get("notes", [])]
    if claims:
        told = ", ".join(f"{name} {value:.6g}" for name, value in claims.items())
        lines.append(f"the file claims: {told}" + (" (estimated on random batches)" if "best_val_loss" in claims else ""))
    if "measured_on" in account:
        lines.append(
            f"validation loss: {account['validation_loss']:.4f} nats per character over the last 10 % of {account['measured_on']}"
        )
    return lines


# --- the place -------------------------------------------------------------------------------------------------------


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_inside_checkpoint(path: Path) -> bool:
    return path.name == checkpoint.WEIGHTS and checkpoint.is_checkpoint(path.parent)


def _about_folder(path: Path) -> str:
    inside = [file.name for file in sorted(path.iterdir()) if file.suffix in (".pt", ".pth", ".ckpt", ".safetensors")]
    advice = f"give the file in it: {', '.join(inside)}" if inside else "give the path of a file, as in out/ckpt.pt"
    return f"{path} is a folder and not one of our checkpoints; {advice}"


# --- the layout ------------------------------------------------------------------------------------------------------


def _recognised(path: Path, contents: Contents, heads: int | None, activation: Activation | None) -> tuple[Fit, list[str]]:
    """The layout that fits a file, completed by what was asked for, and what was assumed."""
    tensors, arguments = contents.tensors, contents.arguments
    layout = foreign.nearest(tensors)
    _refuse_known_others(path, tensors, layout)
    try:
        fit = layouts.fit(layout, tensors)
    except LayoutError as error:
        raise ImporterError(f"{path} {_diagnosis(tensors, layout, error)}") from None
    for word, symbol in SIZES.items():
        said = arguments.get(word)
        if isinstance(said, int) and said != fit.sizes[symbol]:
            raise ImporterError(
                f"{path}: model_args says {word} = {said}, the weights have {fit.sizes[symbol]}; "
                "the file contradicts itself: save it again"
            )
    notes = []
    if layout is foreign.NANOGPT and not arguments:
        biased, tied = bool(fit.groups - {"unembedding"}), _is_tied(tensors)
        layout = foreign.MINGPT if biased and not tied else foreign.NANOGPT
        why = "the unembedding is the token embedding" if tied else "there are no biases"
        why = why if layout is foreign.NANOGPT else "there are biases, and an unembedding of its own"
        notes.append(f"no model_args in the file; taken for {layout.name}'s, because {why}")
    chosen, told = _activation(layout, arguments, activation)
    fit = replace(fit, layout=layout, activation=chosen, heads=_heads(path, fit, arguments.get("n_head"), heads))
    if layout is foreign.LECTURE:
        notes.append(
            "attention scores are divided by √d_head, as in the lecture's published code; an earlier version divided by √d, "
            "which the file does not tell: multiply such a model's query weights by √(d_head / d) first"
        )
    if layout is foreign.HOOKED:
        notes.append(
            "the file holds no configuration; assumed: attention to the whole past, scaled by 1/√d_head; LayerNorm, ε 1e-5"
        )
    return fit, [*notes, *told]


def _refuse_known_others(path: Path, tensors: Mapping[str, Tensor], layout: layouts.Layout) -> None:
    """What is recognised and still cannot be read."""
    if "token_embedding.weight" in tensors and any(".attention.inner." in name for name in tensors):
        raise ImporterError(
            f"{path} holds the weights of one of our checkpoints without their {checkpoint.CONFIG}; put both into one folder, "
            f"the weights as {checkpoint.WEIGHTS}, and give the folder"
        )
    embedding = tensors.get(layout.table[0].pattern)
    if embedding is not None and embedding.ndim and embedding.shape[0] in BYTE_PAIRS:
        raise ImporterError(
            f"{path} has {embedding.shape[0]:,} tokens, GPT-2's byte pairs, so it is not a character model; the workbench shows "
            "whole vocabularies and needs one of characters"
        )
    normed = "ln_final.w" in tensors or any(".ln1." in name for name in tensors)
    if layout is foreign.HOOKED and "embed.W_E" in tensors and not normed:
        raise ImporterError(
            f"{path} has no LayerNorm weights: they were folded into others, or the model had none, and the file does not "
            "tell which; save the model unprocessed (fold_ln=False)"
        )


def _diagnosis(tensors: Mapping[str, Tensor], layout: layouts.Layout, error: LayoutError) -> str:
    names = list(tensors)
    common = layout.in_common(names)
    held = f"holds {len(names)} tensors ({', '.join(map(repr, names[:3]))}{', …' if len(names) > 3 else ''})"
    known = ", ".join(known.name for known in (foreign.NANOGPT, foreign.MINGPT, foreign.LECTURE, foreign.HOOKED))
    if not common:
        return f"{held}, whose names are of no layout known here; rename them as one of these has them: {known}"
    return (
        f"{held}; nearest is the layout of {layout.name} ({common} of {len(layout.required)} names in common), but {error}; "
        "save the whole unprocessed state dict of such a model"
    )


def _heads(path: Path, fit: Fit, claimed: Any, asked: int | None) -> int:
    told = fit.heads or (claimed if isinstance(claimed, int) else 0)
    if asked is not None and told and asked != told:
        raise ImporterError(f"{path} has {told} heads, got --heads {asked}; leave it out")
    heads, d = told or asked, fit.sizes["d"]
    divisors = ", ".join(str(number) for number in range(1, d + 1) if d % number == 0)
    if heads is None:
        raise ImporterError(
            f"{path} does not tell how many heads it has; give --heads (heads= in Python), a divisor of its width {d}: {divisors}"
        )
    if heads < 1 or d % heads:
        raise ImporterError(f"{path}: got {heads} heads; expected a divisor of its width {d}: {divisors}")
    return heads


def _activation(layout: layouts.Layout, arguments: Mapping[str, Any], asked: Activation | None) -> tuple[Activation, list[str]]:
    """The activation, and the note on where it comes from."""
    if asked is not None:
        return asked, [f"activation: {TOLD.get(asked, asked)}, as asked for"]
    other = "--activation says otherwise"
    if layout is foreign.NANOGPT and arguments and "bias" not in arguments:
        early = "as nanoGPT had it before its option `bias` (January 2023), of which model_args say nothing"
        return "gelu_new", [f"activation: {TOLD['gelu_new']}, {early}; {other}"]
    own = layout.activation
    whose = {
        foreign.NANOGPT.name: "as nanoGPT has had it since May 2023; before, its tanh approximation, and the file does not tell",
        foreign.HOOKED.name: "assumed, because the file does not tell",
    }
    return own, [f"activation: {TOLD[own]}, {whose.get(layout.name, f'as {layout.name} has it')}; {other}"]


def _is_tied(tensors: Mapping[str, Tensor]) -> bool:
    embedding = tensors["transformer.wte.weight"]
    return torch.equal(tensors.get("lm_head.weight", embedding), embedding)


def _is_mask(fit: Fit, name: str) -> bool:
    return any(entry.group == "mask" and entry.regex.fullmatch(name) for entry in fit.layout.table)


# --- the characters --------------------------------------------------------------------------------------------------


def _vocabulary(path: Path, meta: str | Path | None, data: str | Path | None, size: int) -> tuple[Vocabulary, str]:
    """The characters, and the note on where they come from: the meta that was given, the text, the meta beside the file."""
    beside = path.parent / "meta.pkl"
    if meta is None and data is None:
        if not beside.is_file():
            raise ImporterError(
                f"{path} does not hold its characters; give nanoGPT's meta.pkl with --vocabulary (vocabulary= in Python) or put "
                "it beside the file, or give the text that it was trained on with --data (data=)"
            )
        meta = beside
    if meta is not None:
        found, told = read_meta(meta), f"characters: those of {Path(meta).name}" + (" beside the file" if meta is beside else "")
    else:
        text = _text(data)  # type: ignore[arg-type]
        found, told = text.vocabulary(), f"characters: the distinct ones of {text.name} in code-point order, as nanoGPT has them"
    if len(found) != size:
        raise VocabularyError(
            f"{meta if meta is not None else data} has {len(found)} characters, the model in {path} has {size}; give the "
            "meta.pkl or the text that it was trained on"
        )
    return found, told


def _text(path: str | Path) -> Corpus:
    """A text as Python's text mode gives it, and so nanoGPT and the lecture read theirs: every line end is a newline."""
    found = corpus.read(path)
    return replace(found, text=found.text.replace("\r\n", "\n").replace("\r", "\n"))


# --- the proof -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _proven(gpt: GPT, logits_of: Callable[[Tensor], Tensor]) -> float:
    """Largest |difference of logits| between the HookedTransformer and a witness, float64, over random full-length windows.

    Raises:
        ImporterError: it is above `BOUND`.
    """
    idx = random_windows(gpt, 2)
    difference = (to_hooked(deepcopy(gpt).double())(idx) - logits_of(idx)).abs().max().item()
    if not difference <= BOUND:
        raise ImporterError(
            f"the imported model and the file's own tensors differ by {difference:.0e} in their logits, at most {BOUND:.0e} was "
            "expected; nothing was written: please report this file's layout"
        )
    return difference
