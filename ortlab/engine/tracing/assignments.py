"""Assignments to parts of a tensor, ``x[places] = values``, in words that the exporter translates rightly.

Torch writes them as views and a copy, and the exporter puts the views together again
(``torch/csrc/jit/passes/onnx/pattern_conversion/pattern_conversion.cpp``). It takes each tensor among the places for a
list of numbers there, so that ``x[rows[:, None], columns, :]`` ends in "Incompatible dimensions", and for complex
numbers it knows neither shape nor dtype. Where all places are tensors, there is nothing to put together.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_WHOLE: Final = slice(None)


def translatable(x: torch.Tensor, index: Any, values: Any) -> tuple[Any, Any]:
    """Return index and values of an assignment that means the same."""
    places = _in_full(x, index if isinstance(index, tuple) else (index,))
    if x.is_complex() and all(isinstance(one, (int, slice)) and one is not True for one in places):
        places, values = _ranges_for_numbers(x, places, values)
        return _tensors_for_slices(x, places, []), values
    tensors = [place for place, one in enumerate(places) if _is_of_numbers(one)]
    if max((places[place].dim() for place in tensors), default=0) > 1 and all(
        isinstance(one, slice) or place in tensors for place, one in enumerate(places)
    ):
        return _tensors_for_slices(x, places, tensors), values
    return index, values


def _in_full(x: torch.Tensor, places: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return places without an ellipsis, and without the whole dimensions at the end."""
    ellipses = [place for place, one in enumerate(places) if one is ...]
    if len(ellipses) == 1 and not any(one is None or isinstance(one, bool) for one in places):
        (place,) = ellipses
        places = (*places[:place], *[_WHOLE] * (x.dim() - len(places) + 1), *places[place + 1 :])
    while places and isinstance(places[-1], slice) and places[-1] == _WHOLE:
        places = places[:-1]
    return places


def _is_of_numbers(place: Any) -> bool:
    return isinstance(place, torch.Tensor) and place.dtype not in (torch.bool, torch.uint8)


def _ranges_for_numbers(x: torch.Tensor, places: tuple[Any, ...], values: Any) -> tuple[Any, Any]:
    """Replace each number by a range of one place, and give the values a dimension for it."""
    found = list(places)
    for place, number in reversed([*enumerate(places)]):
        if isinstance(number, int):
            found[place] = slice(number, number + 1 or None)
            behind = x.dim() - place - 1  # dimensions of the result, with those that were put in already
            if isinstance(values, torch.Tensor) and values.dim() > behind:
                values = values.unsqueeze(-behind - 1)
    return tuple(found), values


def _tensors_for_slices(
    x: torch.Tensor, places: tuple[Any, ...], tensors: list[int]
) -> tuple[torch.Tensor, ...]:
    """Replace each slice by the places that it means, in the dimensions that torch gives the result."""
    depth = max((places[place].dim() for place in tensors), default=0)
    slices = [place for place in range(len(places)) if place not in tensors]
    first = tensors[0] if tensors else len(places)
    together = not tensors or tensors[-1] - first + 1 == len(tensors)
    before = [place for place in slices if together and place < first]
    after = [place for place in slices if place not in before]
    found = list(places)
    for place in tensors:
        found[place] = places[place][(..., *[None] * len(after))]
    for place in slices:
        behind = (
            len(after) - after.index(place) - 1
            if place in after
            else depth + len(slices) - before.index(place) - 1
        )
        found[place] = torch.arange(x.size(place), device=x.device)[places[place]][(..., *[None] * behind)]
    return tuple(found)
