"""Progress of long computations, told to whoever listens: a bar in the terminal, a bar on the page, nobody in a script.

    for batch in track(batches, total=17, what="Reading the corpus"):
        …

A listener may raise, which ends the computation: that is how a page cancels one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
Listener = Callable[[int, int, str], None]  # done, of how many, what

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def reporting(listener: Listener) -> Iterator[None]:
    """Tell `listener` about every step of what is computed inside."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def track(items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
    """The items, one by one; the listener hears how many are done before each, and when all are."""
    listener = _LISTENER.get()
    for done, item in enumerate(items):
        if listener is not None:
            listener(done, total, what)
        yield item
    if listener is not None:
        listener(total, total, what)
