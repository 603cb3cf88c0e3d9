"""One look for every picture: colour-blind-safe palettes, visible glyphs for blank characters, number formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

# Light to dark, so that more ink is more; diverging maps are white at zero. Hues differ in lightness as well as colour.
COLOURS = {
    "sequential": ("#f7fbff", "#d2e3f3", "#9ac8e1", "#529dcc", "#1c6cb1", "#08306b"),
    "probability": ("#f7fbff", "#d2e3f3", "#9ac8e1", "#529dcc", "#1c6cb1", "#08306b"),
    "diverging": ("#8c2d04", "#d95f0e", "#fdae6b", "#fee8d3", "#f7f7f7", "#d6e6f4", "#7fb5d9", "#2a79b9", "#08306b"),
}
CATEGORIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d00", "#4d4d4d")  # after Okabe & Ito
POSITIVE, NEGATIVE = "#0072b2", "#d55e00"

GLYPHS = {" ": "␣", "\n": "⏎", "\t": "⇥"}


def glyph(character: str) -> str:
    """A character as it is shown in labels: blanks made visible, the rest as it is."""
    return GLYPHS.get(character, character)


def visible(text: str) -> str:
    """A text on one line, its line breaks made visible."""
    return text.replace("\n", "⏎").replace("\t", "⇥")


def number(value: float) -> str:
    """A number for labels: three significant digits, no needless zeros."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.1e}"


@cache
def colormap(scale: str) -> LinearSegmentedColormap:
    return LinearSegmentedColormap.from_list(scale, COLOURS[scale])


def rgba(values: np.ndarray, scale: str, low: float, high: float) -> np.ndarray:
    """Colours (…, 4), 0–255, of values on a scale."""
    return colormap(scale)((values - low) / (high - low), bytes=True)


def ink_on(value: float, scale: str, low: float, high: float) -> str:
    """Black or white, whichever is readable on the colour of a value."""
    red, green, blue, _ = colormap(scale)((value - low) / (high - low))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"


def limits(values: np.ndarray) -> tuple[float, float]:
    """Ends of an axis that holds all values with a little room."""
    low, high = float(values.min()), float(values.max())
    room = 0.05 * (high - low) or 0.5
    return low - room, high + room


def with_units(name: str, units: str) -> str:
    """An axis or colour bar's title: the long name, and the units unless they are none."""
    said = units in ("1", "character") or units.rstrip("s") in name
    return name if said else f"{name} ({units})"


def joined(parts: Sequence[str]) -> str:
    return " · ".join(part for part in parts if part)
