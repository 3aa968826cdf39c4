"""Which sizes of a batch may be changed to see what memory would be then, as a slider offers them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ortlab.memory import formulas

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
        found.append(_size(word, word, symbols[alike[0]]))
        single = [name for name in single if name not in alike]
    found += [_size(name, name, symbols[name]) for name in single]
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


def _size(key: str, label: str, value: int) -> FreeSize:
    return FreeSize(key, label, value, 1, _FURTHER * value)
