"""Sizes in terms of the input's dimensions: what a shape takes, and what the dimensions are in another batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeVar

from ortlab.errors import OptionError, did_you_mean
from ortlab.memory import formulas

Shape = tuple[int | str, ...]
"""Sizes of a tensor; a symbolic one is an expression over the input's dimensions: "input_ids_dim0*input_ids_dim1"."""

_KEPT: Final = 4096


_Size = TypeVar("_Size", int, float)


def summed(sizes: Iterable[_Size | None]) -> _Size | None:
    """Add sizes up; None where one of them is not known."""
    known = list(sizes)
    return None if None in known else sum(size for size in known if size is not None)


def shape_at(shape: Sequence[int | str], symbols: Mapping[str, int]) -> tuple[int, ...] | None:
    """Evaluate a shape; None where a symbol has no value, or an expression cannot be read."""
    values = tuple(symbols.items())
    sizes = [size if isinstance(size, int) else _evaluated(size, values) for size in shape]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


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


_LARGEST: Final = 2**40
"""More than any dimension has."""


def other_symbols(
    known: Iterable[str],
    first: Mapping[str, int],
    label_totals: Mapping[str, str],
    *,
    batch: int | None,
    sequence: int | None,
    label_density: float | None,
    sizes: Mapping[str, int],
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the value of each symbol, and in words where each comes from that the first batch does not give.

    `label_totals` gives, for each symbol that counts labels which are not ignored, the number of all labels as a
    formula. Such a symbol has no value where that number is not known and other sizes have changed. What is wished is
    as in `MemoryPlan.at`. Raises OptionError where there is no such symbol, a size is no whole number from 1, or
    `batch` could mean several.
    """
    names = list(dict.fromkeys(known))
    check_names(sizes, names)
    given = {**_all_first(first, 0, batch, "batch"), **_all_first(first, 1, sequence, "sequence")}
    for name, size in sizes.items():
        if given.get(name, size) != size:
            raise OptionError(
                f"{name} is given twice: {given[name]} by batch or sequence, and {size}.",
                fix="Leave one of the two out.",
            )
        given[name] = _size(name, size)
    symbols = {**first, **given}
    origins = dict.fromkeys(given, "given")
    counting = (name for name in names if name.startswith("valid_indices_count"))
    counts = [name for name in dict.fromkeys((*label_totals, *counting)) if name not in given]
    if label_density is None and not given:
        return symbols, origins
    density = None if label_density is None else _density(label_density)
    if density is not None and not counts:
        raise OptionError(
            "label_density changes nothing here.",
            why="No saving of this plan depends on how many labels are ignored: they belong to no loss from which "
            "ORT leaves rows out.",
            fix="Leave it out.",
        )
    for name in counts:
        symbols.pop(name, None)
        total = formulas.read(label_totals[name]) if name in label_totals else None
        labels, before = (total.value(symbols), total.value(first)) if total else (None, None)
        if labels is None and density is not None:
            raise OptionError(
                f"{name} cannot be worked out from a label density.",
                why="How many labels a batch has, is not known for this loss.",
                fix=f"Give the number of labels that count itself: plan.at({name}=...).",
            )
        if labels is None:
            continue
        if density is not None:
            symbols[name] = round(density * labels)
            origins[name] = f"label density {density:.1%}, given"
        elif name in first and before:
            symbols[name] = round(first[name] / before * labels)
            origins[name] = f"label density {first[name] / before:.1%}, that of the first batch"
    return symbols, origins


def check_names(sizes: Mapping[str, int], known: Iterable[str]) -> None:
    """Refuse a symbol that does not exist, with an OptionError that names the near ones."""
    names = list(known)
    for name in sizes:
        if name not in names:
            raise OptionError(
                f"There is no symbolic dimension {name!r}.",
                why=f"Those of this plan are {', '.join(names)}." if names else "This plan has none.",
                fix=did_you_mean(name, names, most=3, cutoff=0.4)
                or "plan.symbols has them, with their values.",
            )


def _all_first(first: Mapping[str, int], axis: int, size: int | None, what: str) -> dict[str, int]:
    """Give a size to one dimension of all inputs; refuse it where the inputs differ in that dimension."""
    if size is None:
        return {}
    size = _size(what, size)
    names = [name for name in first if name.endswith(f"_dim{axis}")]
    if not names:
        raise OptionError(
            f"No input has a {what} dimension that may change.",
            why=f"Symbolic dimensions are {', '.join(first) or 'none'}.",
            fix="Name the dimension: plan.at(<symbol>=...).",
        )
    if len({first[name] for name in names}) > 1:
        shown = ", ".join(f"{name} = {first[name]}" for name in names)
        raise OptionError(
            f"What the {what} is, cannot be told.",
            why=f"The inputs differ in it: {shown}.",
            fix=f"Name those that you mean: plan.at({names[0]}={size}).",
        )
    return dict.fromkeys(names, size)


def _size(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= _LARGEST:
        raise OptionError(
            f"{name} cannot be {size!r}.",
            why="A size is a whole number from 1.",
            fix=f"Write for example {name}=16.",
        )
    return size


def _density(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise OptionError(
            f"label_density cannot be {value!r}.",
            why="It is the part of the labels that is not ignored, from 0 to 1.",
            fix="Write for example label_density=0.15.",
        )
    return float(value)


_AXES: Final = (("batch", 0), ("sequence", 1))
_FURTHER: Final = 8
"""How many times the present size a slider goes up to."""

_LABELS: Final = "label_density"
_PERCENT: Final = 100


@dataclass(frozen=True)
class FreeSize:
    """One size of a batch that may be changed."""

    # Argument of `MemoryPlan.at` and `SavedActivations.at`: "batch", "sequence", "label_density" or a symbol.
    key: str
    label: str
    value: int  # the present size; the label density in percent
    low: int  # a slider goes from here to `high`
    high: int


def free_sizes(
    symbols: Mapping[str, int], sizes: Iterable[str], label_totals: Mapping[str, str] | None = None
) -> tuple[FreeSize, ...]:
    """List the sizes that the formulas `sizes` depend on; a symbol that is in none of them is left out.

    `symbols` holds the present value of each symbolic dimension; for `label_totals` see `MemoryPlan.label_totals`.
    """
    used = {symbol for size in sizes for symbol in formulas.read(size).symbols}
    counting = {name: formulas.read(total) for name, total in (label_totals or {}).items() if name in used}
    used |= {symbol for total in counting.values() for symbol in total.symbols}
    found = []
    single = [name for name in symbols if name in used and name not in counting]
    for word, axis in _AXES:
        alike = [name for name in symbols if name.endswith(f"_dim{axis}")]
        if used.isdisjoint(alike) or len({symbols[name] for name in alike}) != 1:
            continue
        found.append(_slider(word, symbols[alike[0]]))
        single = [name for name in single if name not in alike]
    found += [_slider(name, symbols[name]) for name in single]
    for name, total in counting.items():
        labels = total.value(symbols)
        if labels:
            density = round(_PERCENT * symbols.get(name, labels) / labels)
            found.append(FreeSize(_LABELS, "labels that count, %", density, 0, _PERCENT))
            break
    return tuple(found)


def arguments(values: Mapping[str, int]) -> dict[str, int | float]:
    """Turn values of sliders, by key, into arguments of `at`."""
    return {key: value / _PERCENT if key == _LABELS else value for key, value in values.items()}


def _slider(key: str, value: int) -> FreeSize:
    return FreeSize(key, key, value, 1, _FURTHER * value)
