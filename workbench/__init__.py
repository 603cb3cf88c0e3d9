"""A mechanistic-interpretability workbench on trained tiny GPTs.

    import workbench as wb
    model = wb.load("baby")            # a transformer_lens.HookedTransformer
    wb.generate(model, "KING ")

Analyses live in `analyses`, one function per file: `from analyses.ov_circuit import ov_circuit`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import analyses
import models

_HERE = Path(__file__).resolve().parent.parent
for _package in (models, analyses):
    if Path(_package.__path__[0]).resolve().parent != _HERE:
        raise ImportError(
            f"the folder {_package.__path__[0]} is imported as {_package.__name__!r} and hides the workbench's own; "
            "rename it, or run from another folder"
        )

if TYPE_CHECKING:
    from models.checkpoint import available
    from models.hooked import encode, generate, load
    from workbench.figures import save

__all__ = ["available", "encode", "generate", "load", "save"]

_SOURCES = {
    "available": "models.checkpoint",
    "encode": "models.hooked",
    "generate": "models.hooked",
    "load": "models.hooked",
    "save": "workbench.figures",
}


def __getattr__(name: str) -> Any:
    """Import on first use: TransformerLens takes seconds, and `workbench --help` should not wait for it."""
    if name not in _SOURCES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_SOURCES[name]), name)
