"""Functions of users are exported with their own backward, not with the derivative of a ``symbolic``.

torch's exporter puts the ``symbolic`` of an ``autograd.Function`` into the graph where there is one, and ONNX Runtime
then derives the gradient from that: a straight-through estimator, or a backward that is wrong, trains another way than
in PyTorch, without a word. While a training graph is exported, the symbolics of users' Functions are out of sight, and
the Functions run as they do in PyTorch, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd import Function

_OF_THE_EXPORT = ("torch", "onnxruntime")
"""Packages whose Functions with a symbolic are parts of an export."""


@contextmanager
def own_backwards() -> Iterator[None]:
    """Hide the symbolics of users' Functions in the block."""
    hidden = [
        (kind, vars(kind)["symbolic"])
        for kind in functions()
        if "symbolic" in vars(kind) and kind.__module__.partition(".")[0] not in _OF_THE_EXPORT
    ]
    for kind, _ in hidden:
        del kind.symbolic  # type: ignore[attr-defined] # it is in the class's own dictionary
    try:
        yield
    finally:
        for kind, symbolic in hidden:
            kind.symbolic = symbolic  # type: ignore[attr-defined]


def functions() -> Iterator[type[Function]]:
    """Go through all classes of Functions that there are in this process."""
    pending: list[type[Function]] = [Function]
    seen: set[type[Function]] = set()
    while pending:
        for kind in pending.pop().__subclasses__():
            if kind not in seen:
                seen.add(kind)
                pending.append(kind)
                yield kind
