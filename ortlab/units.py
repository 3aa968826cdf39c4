"""Numbers with their units: in words, which is the only place that rounds, and sizes read from words.

Sizes are 1024-based (1 MiB is 1,048,576 bytes). Every function takes None and nan, whose answer is "n/a".
Measured numbers keep three significant digits, because the fourth changes from run to run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sized
from typing import Final, TypeGuard

from ortlab.errors import OptionError

MISSING: Final = "n/a"

_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE_BASE: Final = 1024
_FLOPS: Final = ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs")
_FLOP_BASE: Final = 1000
_MS_PER_S: Final = 1000
_S_PER_MIN: Final = 60
_HUNDREDTHS_RUN_OUT: Final = 0.1

# Of 1024 with an "i" (IEC 80000-13), of 1000 without; a bare "G" is taken for both in the field, so it is refused.
_UNITS: Final = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_WRITTEN: Final = re.compile(
    r"\s*([+-]?[0-9][0-9_]{0,30}(?:\.[0-9]+)?|[+-]?\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII
)
_LARGEST: Final = 2**63 - 1  # what the system's own calls take
_SHOWN: Final = 60
_FIX: Final = (
    'Write a number and a unit, as in "6 GiB" or "512 MiB" (1024-based; "GB" and "MB" are 1000-based), '
    "or a whole number of bytes."
)


def size(number_of_bytes: float | None) -> str:
    """Write a size in bytes, 1024-based: "512 B", "3.25 MiB", "1.50 GiB"."""
    value = _number(number_of_bytes)
    if math.isnan(value):
        return MISSING
    unit = 0
    while abs(round(value)) >= _SIZE_BASE and unit < len(_SIZES) - 1:
        value /= _SIZE_BASE
        unit += 1
    return f"{value:,.0f} B" if unit == 0 else f"{_three_digits(value)} {_SIZES[unit]}"


def duration(milliseconds: float | None) -> str:
    """Write a time given in ms: "0.042 ms", "12.3 ms", "1.23 s", "2 min 05 s"."""
    value = _number(milliseconds)
    if math.isnan(value):
        return MISSING
    # Rounded before the unit is chosen, so that 999.7 ms becomes "1.00 s" and not "1,000 ms".
    rounded = _significant(value)
    if abs(rounded) < _MS_PER_S:
        return f"{_three_digits(rounded)} ms"
    if abs(rounded) < _MS_PER_S * _S_PER_MIN:
        return f"{_three_digits(rounded / _MS_PER_S)} s"
    minutes, seconds = divmod(round(value / _MS_PER_S), _S_PER_MIN)
    return f"{minutes:,} min {seconds:02d} s"


def ratio(value: float | None) -> str:
    """Write a ratio without unit: "0.83x" is 0.83 times the baseline."""
    number = _number(value)
    return MISSING if math.isnan(number) else f"{_hundredths(number)}x"


def ratio_interval(value: float | None, low: float | None, high: float | None) -> str:
    """Write a ratio and its confidence interval: "0.83x [0.80, 0.86]"; the ratio alone if there is none."""
    number, lower, upper = _number(value), _number(low), _number(high)
    if math.isnan(number + lower + upper):
        return ratio(value)
    return f"{ratio(value)} [{_hundredths(lower)}, {_hundredths(upper)}]"


def times(value: float | None, low: float | None, high: float | None) -> str:
    """Write how many times, in a sentence: "1.08 times [1.03, 1.12]"; the number alone if there is no interval."""
    number, lower, upper = _number(value), _number(low), _number(high)
    if math.isnan(number):
        return MISSING
    interval = "" if math.isnan(lower + upper) else f" [{_hundredths(lower)}, {_hundredths(upper)}]"
    return f"{_hundredths(number)} times{interval}"


def rate(per_second: float | None) -> str:
    """Write how many samples go through in a second: "41.2/s"."""
    value = _number(per_second)
    return MISSING if math.isnan(value) else f"{_three_digits(value)}/s"


def percent(fraction: float | None) -> str:
    """Write a fraction of one as a percentage: 0.125 is "12.5 %"."""
    number = _number(fraction)
    return MISSING if math.isnan(number) else f"{100 * number:.1f} %"


def change(ratio: float | None) -> str:
    """Write a ratio as a change in percent: 1.214 is "+21 %", 0.42 is "-58 %"."""
    number = _number(ratio)
    return MISSING if math.isnan(number) else f"{100 * (number - 1):+.0f} %"


def rounded_percent(fraction: float | None) -> str:
    """Write a fraction of one as a percentage for a sentence: "30 %", "4 %", "0.4 %"."""
    number = 100 * _number(fraction)
    if math.isnan(number):
        return MISSING
    return f"{number:.0f} %" if abs(number) >= 1 else f"{number:.1g} %"


def density(fraction: float | None) -> str:
    """Write a density as ORTModule's table did, with two digits behind the point: "35.21 %"."""
    number = _number(fraction)
    return MISSING if math.isnan(number) else f"{100 * number:.2f} %"


def flops(number: float | None) -> str:
    """Write a number of floating-point operations, 1000-based: "512 FLOPs", "3.21 MFLOPs", "1.50 GFLOPs"."""
    value = _number(number)
    if math.isnan(value):
        return MISSING
    unit = 0
    while abs(_significant(value)) >= _FLOP_BASE and unit < len(_FLOPS) - 1:
        value /= _FLOP_BASE
        unit += 1
    return f"{value:,.0f} {_FLOPS[0]}" if unit == 0 else f"{_three_digits(value)} {_FLOPS[unit]}"


def count(number: float | None) -> str:
    """Write a whole number with thousands separators: "12,345"."""
    value = _number(number)
    return MISSING if math.isnan(value) else f"{value:,.0f}"


def many(of: Sized | int, one: str, several: str = "") -> str:
    """Write how many there are of something: "1 step", "12 steps"; `several` where the plural has no plain s."""
    number = of if isinstance(of, int) else len(of)
    return f"{count(number)} {one if number == 1 else several or f'{one}s'}"


def loss(value: float | None) -> str:
    """Write a loss with five significant digits: "6.9315"; enough to see two runs part."""
    # A loss that is nan is a result, not a missing one, and is written "nan".
    return MISSING if value is None else f"{value:#.5g}"


def difference(value: float | None) -> str:
    """Write a relative difference with two significant digits: "1.2e-07"; exactly equal is "0"."""
    number = _number(value)
    if math.isnan(number):
        return MISSING
    return "0" if number == 0 else f"{number:.1e}"


def fold(text: str, limit: int = 160) -> str:
    """Shorten a text to `limit` characters by leaving out its middle: exporters make long names."""
    if len(text) <= limit:
        return text
    head = (limit - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def printable(text: str) -> str:
    """Return `text` with control characters written out, so that a name cannot break a table or a terminal."""
    # A line break becomes a space, and an escape sequence its Python escape: "\\x1b[31m".
    flat = " ".join(text.splitlines())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in flat)


def read_size(value: object, *, name: str = "limit") -> int:
    """Return in bytes, at least 1, a size such as "6 GiB", "512MiB", "1.5 gb", "1048576 B" or 1048576."""
    # `name` tells the error what the size is of: "limit", "budget".
    number, unit = _number_and_unit(value, name)
    if unit not in _UNITS:
        known = "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        unit_shown = repr(unit) if unit else "no unit"
        raise OptionError(
            f"The {name} {_shown(value)} has {unit_shown}.", why=f"The units are {known}.", fix=_FIX
        )
    if not 1 <= (size := number * _UNITS[unit]) <= _LARGEST:
        raise OptionError(
            f"The {name} is {_shown(value)}.", why="Memory is above zero, and below 8 EiB.", fix=_FIX
        )
    return int(size)


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Say whether something is a whole number from `least` on; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_tolerance(value: object) -> TypeGuard[float]:
    """Say whether something is a number from 0 on; nan, True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _significant(value: float) -> float:
    return float(f"{value:.3g}")


def _three_digits(value: float) -> str:
    """Write three significant digits, all digits before the point, at most three behind it, no exponent."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(_significant(value)))))
    return f"{value:,.{min(decimals, 3)}f}"


def _hundredths(value: float) -> str:
    """Round to hundredths, or to two significant digits where hundredths would leave only zeros."""
    return f"{value:.2g}" if 0 < abs(value) < _HUNDREDTHS_RUN_OUT else f"{value:.2f}"


def _number_and_unit(value: object, name: str) -> tuple[float, str]:
    if isinstance(value, int) and not isinstance(value, bool):
        return value, "b"
    if isinstance(value, str):
        if match := _WRITTEN.fullmatch(value):
            number, unit = match.groups()
            plain = number.replace("_", "")
            return (float(plain) if "." in plain else int(plain)), unit.lower()
        raise OptionError(f"The {name} {_shown(value)} cannot be read as a size.", fix=_FIX)
    raise OptionError(
        f"The {name} is {_shown(value)}.",
        why=f"A size is text or a whole number, not {type(value).__name__}.",
        fix=_FIX,
    )


def _shown(value: object) -> str:
    text = (
        hex(value) if isinstance(value, int) and abs(value) > _LARGEST else repr(value)
    )  # repr refuses 4,300 digits
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
