"""Sizes of tensors in terms of the input's dimensions: what a shape is for a batch, and how many bytes it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from ortlab.errors import OptionError
from ortlab.memory import formulas

Shape = tuple[int | str, ...]
"""Sizes of a tensor; a symbolic one is an expression over the input's dimensions: "input_ids_dim0*input_ids_dim1"."""

_KEPT: Final = 4096


def shape_at(shape: Sequence[int | str], symbols: Mapping[str, int]) -> tuple[int, ...] | None:
    """Evaluate a shape; None where a symbol has no value, or an expression cannot be read."""
    values = tuple(symbols.items())
    sizes = [size if isinstance(size, int) else _evaluated(size, values) for size in shape]
    known = [size for size in sizes if size is not None]
    return tuple(known) if len(known) == len(sizes) else None


def bytes_at(shape: Sequence[int | str], element_bytes: int, symbols: Mapping[str, int]) -> int | None:
    """Evaluate how many bytes a tensor takes; None as for `shape_at`."""
    sizes = shape_at(shape, symbols)
    return None if sizes is None else math.prod(sizes) * element_bytes


@lru_cache(_KEPT)
def simplified(size: str) -> int | str:
    """Simplify an expression; it stays as it is where it cannot be read."""
    try:
        text = formulas.read(size).simplified
    except OptionError:
        return size
    return int(text) if text.isdigit() else text


@lru_cache(_KEPT)
def bytes_formula(shape: Shape, element_bytes: int) -> str:
    """Write how many bytes a tensor takes in terms of the input's dimensions: "128*input_ids_dim0*input_ids_dim1".

    Empty where an expression cannot be read.
    """
    try:
        return formulas.read("*".join([str(element_bytes), *(f"({size})" for size in shape)])).simplified
    except OptionError:
        return ""


@lru_cache(_KEPT)
def _evaluated(expression: str, symbols: tuple[tuple[str, int], ...]) -> int | None:
    try:
        value = formulas.read(expression).value(dict(symbols))
    except OptionError:
        return None
    return None if value is None else int(value)
