"""What a layout of other people's checkpoints is, and how a file is held against one.

A layout is a table of names and shapes, written in V, T, d, H and d_head, where N counts blocks and M heads. A name with
a group in brackets is there for all blocks or for none; the group `mask` is of buffers that say nothing new. The layouts
themselves are in `models.foreign`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from models.config import Activation, GPTConfig
from models.errors import WorkbenchError

NUMBER = r"\.([0-9]{1,6})\."


class LayoutError(WorkbenchError):
    """Tensors do not fit a layout; the message names the first that is missing, unknown or of another shape."""


@dataclass(frozen=True)
class Entry:
    """A row of a layout's table."""

    pattern: str  # the tensor's name, N and M for numbers
    shape: tuple[str, ...]
    group: str  # empty where the tensor must be there

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.pattern).replace(r"\.N\.", NUMBER).replace(r"\.M\.", NUMBER))

    def name(self, layer: int, head: int) -> str:
        return self.pattern.replace(".N.", f".{layer}.").replace(".M.", f".{head}.")


@dataclass(frozen=True)
class Layout:
    """A layout with two readings of its tensors that share no code, so that one can bear witness for the other."""

    name: str
    table: tuple[Entry, ...]
    weights: Callable[[Fit], dict[str, Tensor]]  # renamed and regrouped into those of `models.gpt.GPT`
    logits: Callable[[Mapping[str, Tensor], Fit, Tensor], Tensor]  # forward pass of ids (batch, position) on the file's own names
    activation: Activation  # as the layout's published code has it
    always: tuple[str, ...] = ()  # switches of GPTConfig that are on whatever the file holds

    def in_common(self, names: list[str]) -> int:
        """How many of the names that must be there are there, each counted once for all blocks."""
        return sum(any(entry.regex.fullmatch(name) for name in names) for entry in self.required)

    @cached_property
    def required(self) -> list[Entry]:
        return [entry for entry in self.table if not entry.group]


@dataclass(frozen=True)
class Fit:
    """A layout that was found to fit a file, with what the file does not tell filled in."""

    layout: Layout
    tensors: Mapping[str, Tensor]  # under the file's own names
    sizes: Mapping[str, int]  # V T d L, and H where the tensors tell it
    groups: frozenset[str]  # those that are there
    heads: int  # 0 where it is not known yet
    activation: Activation

    def config(self, tied: bool, dropout: float) -> GPTConfig:
        """The architecture in our terms."""
        fields = GPTConfig.__dataclass_fields__
        switches = {entry.group: entry.group in self.groups for entry in self.layout.table if entry.group in fields}
        sizes = self.sizes
        return GPTConfig(
            d_vocab=sizes["V"], n_ctx=sizes["T"], d_model=sizes["d"], n_layers=sizes["L"], n_heads=self.heads,
            activation=self.activation, tied=tied, dropout=dropout, dropout_attention=dropout,
            **switches | dict.fromkeys(self.layout.always, True),
        )  # fmt: skip


def table(text: str) -> tuple[Entry, ...]:
    """Read a layout's table: `name  size × size  [group]`, one tensor a line."""
    rows = [re.fullmatch(r"(\S+) *([^\[]*?) *(?:\[(\w+)\])?", line.strip()) for line in text.strip().splitlines()]
    return tuple(Entry(row[1], tuple(row[2].replace("×", " ").split()), row[3] or "") for row in rows if row)


def fit(layout: Layout, tensors: Mapping[str, Tensor]) -> Fit:
    """Hold a file against a layout: every name, every shape, every mask.

    Raises:
        LayoutError: the first tensor that is missing, unknown, of another shape, or a mask that is not causal.
    """
    found = {name: next((entry for entry in layout.table if entry.regex.fullmatch(name)), None) for name in tensors}
    numbers = [match.groups() for name, entry in found.items() if entry and (match := entry.regex.fullmatch(name))]
    # Counted, not read off the largest number, which may be anything; what a gap lacks is then the first that is missing.
    layers, heads = (max(1, len({pair[place] for pair in numbers if len(pair) > place})) for place in (0, 1))
    groups = frozenset(entry.group for entry in found.values() if entry) - {"mask", ""}
    sizes = {"L": layers}
    for entry in layout.table:
        for name in dict.fromkeys(entry.name(layer, head) for layer in range(layers) for head in range(heads)):
            if name in tensors and not (
                entry.group == "mask" and tensors[name].numel() == 0
            ):  # TransformerLens 3.9 keeps the name only
                _compare(name, tuple(tensors[name].shape), entry.shape, sizes)
                if entry.group == "mask":
                    _require_causal(name, tensors[name])
            elif name not in tensors and (not entry.group or entry.group in groups):
                raise LayoutError(f"{name!r} is missing")
    unknown = next((name for name, entry in found.items() if entry is None), None)
    if unknown is not None:
        raise LayoutError(f"{unknown!r} has no place in it")
    if any(".M." in entry.pattern for entry in layout.table):
        sizes["H"] = heads
    if "H" in sizes and sizes["H"] * sizes["d_head"] != sizes["d"]:
        raise LayoutError(
            f"it has {sizes['H']} heads of width {sizes['d_head']}, and the workbench holds heads of width d / H only, "
            f"where d = {sizes['d']}"
        )
    return Fit(layout, tensors, sizes, groups, sizes.get("H", 0), layout.activation)


def _compare(name: str, shape: tuple[int, ...], wanted: tuple[str, ...], sizes: dict[str, int]) -> None:
    """Check a shape against words such as V or 4d; a size that is met for the first time is learned."""
    if len(shape) == len(wanted):
        for size, word in zip(shape, wanted, strict=True):
            if not word[0].isdigit():
                sizes.setdefault(word, size)
    if shape != tuple(_size(word, sizes) for word in wanted):
        known = {word.lstrip("0123456789") for word in wanted} & sizes.keys()
        where = ", ".join(f"{word} = {sizes[word]}" for word in sizes if word in known)
        expected = " × ".join(wanted) or "a single number"
        raise LayoutError(
            f"{name!r} has shape {shape}, and the workbench holds {expected} only" + (f", where {where}" if where else "")
        )


def _size(word: str, sizes: Mapping[str, int]) -> int | None:
    symbol = word.lstrip("0123456789")
    factor = int(word.removesuffix(symbol) or 1)
    return factor * sizes[symbol] if symbol in sizes else None if symbol else factor


def _require_causal(name: str, mask: Tensor) -> None:
    T = mask.shape[-1] if mask.ndim else 0  # a single number is what masked scores are set to
    if T and not torch.equal(mask.reshape(T, T) != 0, torch.ones(T, T, dtype=torch.bool).tril()):
        raise LayoutError(f"{name!r} is not the causal mask, so this model attends otherwise than the workbench's do")
