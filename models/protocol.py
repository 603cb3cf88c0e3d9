"""What the analyses ask of a model. A TransformerLens `HookedTransformer` has all of it, and so has `models.bridge.Bridge`.

Our own small protocol instead of the class's name: under TransformerLens 4 even looking the name up raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Model(Protocol):
    """A transformer with TransformerLens' configuration, weights and hook names."""

    cfg: Any
    tokenizer: Any
    blocks: Any
    unembed: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def run_with_cache(self, *args: Any, **kwargs: Any) -> Any: ...

    def hooks(self, fwd_hooks: Sequence[tuple[str, Callable]] = ..., **kwargs: Any) -> AbstractContextManager[Any]: ...

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]: ...
