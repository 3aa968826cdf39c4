"""Types and shapes of the values of two graphs: which of them are really different."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortlab.graphs.stages import Value

_NAMELESS: Final = re.compile(r"unk_|\?|\.\.\.|output-|.*/|.+_o\d+__d\d+$")
"""Sizes that the exporter or shape inference has named after the node that they are of: nobody knows them."""


class Sizes:
    """Types and shapes of two graphs.

    ORT names a size that two inputs share after either of them, in one process after this and in another after that;
    and names that shape inference makes up mean nothing. A name is another size only if the other graph does not have
    it, while the name that it takes the place of is still there.

    Parameters
    ----------
    before, after
        Types and shapes by name of the value.
    """

    def __init__(self, before: Mapping[str, Value], after: Mapping[str, Value]) -> None:
        self._values = before, after
        self._names = tuple(
            {size for value in graph.values() for size in value.shape if isinstance(size, str)}
            for graph in self._values
        )

    def differences(self, left: str, right: str) -> Iterator[tuple[str, str, str]]:
        """Yield what is different about a value of the first graph and one of the second: "dtype", "shape"."""
        one, other = self._values[0].get(left), self._values[1].get(right)
        if one is None or other is None:
            return
        if one.dtype != other.dtype and one.dtype and other.dtype:
            yield "dtype", one.dtype, other.dtype
        if self._is_other(one.shape, other.shape):
            yield "shape", shape_words(one.shape), shape_words(other.shape)

    def _is_other(self, left: tuple[int | str, ...], right: tuple[int | str, ...]) -> bool:
        if ("...",) in (left, right):
            return False
        if len(left) != len(right):
            return True
        return any(self._differs(one, other) for one, other in zip(left, right, strict=True))

    def _differs(self, one: int | str, other: int | str) -> bool:
        if one == other or _is_nameless(one) or _is_nameless(other):
            return False
        if isinstance(one, str) and isinstance(other, str):
            return (other not in self._names[0]) != (one not in self._names[1])
        return True


def shape_words(shape: tuple[int | str, ...]) -> str:
    """Write a shape: "2 x 5 x 8"; "scalar" for one without sizes."""
    return " x ".join(map(str, shape)) or "scalar"


def _is_nameless(size: int | str) -> bool:
    return isinstance(size, str) and (not size or _NAMELESS.match(size) is not None)
