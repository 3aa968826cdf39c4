"""Tensors in nested sequences and mappings, such as what a module takes and returns, by their places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch


def _is_observed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not value.is_sparse


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of floating-point numbers in nested sequences and mappings, with their places."""
    found: list[tuple[str, torch.Tensor]] = []

    def note(place: str, tensor: torch.Tensor) -> torch.Tensor:
        found.append((place, tensor))
        return tensor

    replaced(value, note, name)
    yield from found


def replaced(value: Any, take: Callable[[str, torch.Tensor], torch.Tensor], name: str = "") -> Any:
    """Return a nested value with other tensors in it; the same object where nothing has been changed."""
    if _is_observed(value):
        return take(name or "0", value)
    if isinstance(value, Mapping):
        new = {key: replaced(item, take, _inside(name, key)) for key, item in value.items()}
        return value if all(new[key] is item for key, item in value.items()) else _with_items(value, new)
    if isinstance(value, (tuple, list)):
        items = [replaced(item, take, _inside(name, number)) for number, item in enumerate(value)]
        make: Any = getattr(type(value), "_make", type(value))
        return value if all(map(is_, items, value)) else make(items)
    return value


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    """Return a mapping with other values; the outputs of transformers can be changed, and know their keys."""
    if type(value) is dict:
        return items
    for key, item in items.items():
        value[key] = item
    return value


def _inside(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
