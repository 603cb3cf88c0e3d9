"""Analyses of the whole corpus read the built-in passage here."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _corpus(passage_at_hand: Path) -> None:
    """See `passage_at_hand`."""
