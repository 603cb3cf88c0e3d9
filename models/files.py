"""Files from elsewhere, opened without running any code that may be in them.

Weights are read with `weights_only=True` or as safetensors, and nanoGPT's `meta.pkl` by an unpickler that knows no class
and no function.
"""

from __future__ import annotations

import math
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models import checkpoint
from models.errors import WorkbenchError
from models.vocabulary import Vocabulary

WRAPPERS = ("model", "state_dict", "model_state_dict")  # keys under which training scripts put the weights
PREFIXES = ("_orig_mod.", "module.")  # of a compiled and of a distributed model


class ImporterError(WorkbenchError):
    """A file cannot be imported; the message says what it is, what was expected and what to do."""


class Contents(NamedTuple):
    """What a file holds besides the zip or pickle around it."""

    tensors: dict[str, Tensor]  # float32, but for whole numbers, as masks may be
    arguments: Mapping[str, Any]  # nanoGPT's model_args; empty where there are none
    claims: dict[str, int | float]  # what the file says of its own training
    notes: list[str]


# --- weights ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Contents:
    """Open a file and take what it holds apart.

    Raises:
        ImporterError: it is not a file of tensors by name.
    """
    opened = _opened(path)
    if not isinstance(opened, Mapping):
        raise ImporterError(f"{path} holds a {type(opened).__name__}; expected tensors by name: save model.state_dict()")
    wrapper = next((key for key in WRAPPERS if isinstance(opened.get(key), Mapping)), None)
    state, around = (opened[wrapper], opened) if wrapper else (opened, {})
    names = ", ".join(repr(key) for key in list(state)[:4]) or "none"
    if not any(isinstance(value, Tensor) for value in state.values()):
        raise ImporterError(f"{path} holds no tensors, only the keys: {names}; expected tensors by name: save model.state_dict()")
    tensors, notes, rounded = {}, [], 0
    for key, value in state.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise ImporterError(f"{path}: {key!r} is a {type(value).__name__}; expected tensors by name only")
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_complex():
            raise ImporterError(f"{path}: {key!r} is not a plain tensor of real numbers; save the model in float32")
        for prefix in PREFIXES:
            key = key.removeprefix(prefix)
        if key in tensors:
            raise ImporterError(f"{path} holds {key!r} twice, with a prefix and without; save one model's state_dict()")
        tensors[key] = value.detach().to(torch.float32) if value.is_floating_point() else value
        rounded += value.dtype == torch.float64 and not torch.equal(tensors[key].double(), value)
    if rounded:
        notes.append(f"{rounded} tensors in float64 were rounded to float32")
    arguments = around.get("model_args")
    claims = {name: _number(around.get(name)) for name in ("iter_num", "best_val_loss")}
    return Contents(
        tensors,
        arguments if isinstance(arguments, Mapping) else {},
        {name: value for name, value in claims.items() if value is not None},
        notes,
    )


def _opened(path: Path) -> Any:
    """The object in a safetensors file or in one of `torch.save`."""
    try:
        what = checkpoint.describe_file(path)
    except OSError as error:
        raise ImporterError(f"{path} cannot be read ({error.strerror}); give another file") from None
    if what == "a safetensors file":
        return checkpoint.load_weights(path)
    if not what.startswith(("a zip archive", "a Python pickle")):
        raise ImporterError(f"{path} is {what}; expected a file that torch.save or safetensors wrote: fetch it again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other pickles, which are refused anyway
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"asks to run {asked[1]} on loading" if asked else "is a Python pickle that torch.save did not write"
        raise ImporterError(
            f"{path} {why}, so it was not opened; expected nothing but tensors: save model.state_dict(), not the model"
        ) from None
    except Exception as error:  # RuntimeError, OSError, EOFError and more, as the damage may be
        raise ImporterError(
            f"{path} cannot be read as a file of torch.save ({_first_line(error)}): it is truncated, damaged or something else; "
            "fetch it again"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _number(value: Any) -> int | float | None:
    """A finite number, also one in a tensor; None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if fits else None


# --- characters ------------------------------------------------------------------------------------------------------


class _Inert(pickle.Unpickler):
    """Reads numbers, strings and containers; a pickle that names a class or a function is refused before it is called."""

    def find_class(self, module: str, name: str) -> Any:
        raise ImporterError(f"it asks to run {module}.{name} on loading")


def read_meta(path: str | Path) -> Vocabulary:
    """The characters in nanoGPT's `meta.pkl`, read without running any code of it.

    Raises:
        ImporterError: it is not that file, or its parts contradict each other.
        VocabularyError: its tokens are not single characters.
    """
    path = Path(path)
    instead = "give nanoGPT's meta.pkl, or the text that the model was trained on with --data (data= in Python)"
    try:
        with path.open("rb") as file:
            meta = _Inert(file).load()
    except OSError as error:
        raise ImporterError(f"the vocabulary {str(path)!r} cannot be read ({error.strerror}); {instead}") from None
    except Exception as error:  # whatever a damaged pickle makes of the unpickler
        why = f"is {checkpoint.describe_file(path)} that cannot be read as a vocabulary ({_first_line(error)})"
        raise ImporterError(f"{path} {why}; {instead}") from None
    itos = meta.get("itos") if isinstance(meta, dict) else None
    numbered = dict(enumerate(itos)) if isinstance(itos, list) else itos if isinstance(itos, dict) else {}
    characters = [numbered.get(number) for number in range(len(numbered))]
    if not characters or not all(isinstance(character, str) for character in characters):
        raise ImporterError(f"{path} holds no itos, the characters by id from 0; {instead}")
    vocabulary = Vocabulary(tuple(map(str, characters)))
    if meta.get("vocab_size", len(vocabulary)) != len(vocabulary) or meta.get("stoi", vocabulary.ids) != vocabulary.ids:
        raise ImporterError(f"{path}: itos, stoi and vocab_size contradict each other; {instead}")
    return vocabulary
