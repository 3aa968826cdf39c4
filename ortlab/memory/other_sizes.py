"""Values of symbolic dimensions for another batch than the one that a graph was built with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ortlab.errors import OptionError, did_you_mean
from ortlab.memory import formulas

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
    counts = [name for name in (*label_totals, *_counting(names)) if name not in given]
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
    for name in dict.fromkeys(counts):
        symbols.pop(name, None)
        total = formulas.read(label_totals[name]) if name in label_totals else None
        labels = None if total is None else total.value(symbols)
        before = None if total is None else total.value(first)
        if labels is None:
            if density is not None:
                raise OptionError(
                    f"{name} cannot be worked out from a label density.",
                    why="How many labels a batch has, is not known for this loss.",
                    fix=f"Give the number of labels that count itself: plan.at({name}=...).",
                )
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


def _counting(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith("valid_indices_count")]


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
