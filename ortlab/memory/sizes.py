"""Sizes as users write them ("6 GiB", "512 MiB", 1_000_000), in bytes."""

from __future__ import annotations

import re
from typing import Final

from ortlab.errors import OptionError

# Of 1024 with an "i" (IEC 80000-13), of 1000 without; a bare "G" is taken for both in the field, so it is refused.
UNITS: Final = {
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
_SIZE: Final = re.compile(
    r"\s*([+-]?[0-9][0-9_]{0,30}(?:\.[0-9]+)?|[+-]?\.[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII
)
_LARGEST: Final = 2**63 - 1  # what the system's own calls take
_SHOWN: Final = 60
_FIX: Final = (
    'Write a number and a unit, as in "6 GiB" or "512 MiB" (1024-based; "GB" and "MB" are 1000-based), '
    "or a whole number of bytes."
)


def read_size(value: object, *, name: str = "limit") -> int:
    """Return in bytes, at least 1, a size such as "6 GiB", "512MiB", "1.5 gb", "1048576 B" or 1048576.

    `name` tells the error what the size is of: "limit", "budget". Raises OptionError where the value is no size, has an
    unknown unit, is not above zero, or is 8 EiB or more.
    """
    number, unit = _number_and_unit(value, name)
    if unit not in UNITS:
        known = "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB"
        unit_shown = repr(unit) if unit else "no unit"
        raise OptionError(
            f"The {name} {_shown(value)} has {unit_shown}.", why=f"The units are {known}.", fix=_FIX
        )
    if not 1 <= (size := number * UNITS[unit]) <= _LARGEST:
        raise OptionError(
            f"The {name} is {_shown(value)}.", why="Memory is above zero, and below 8 EiB.", fix=_FIX
        )
    return int(size)


def _number_and_unit(value: object, name: str) -> tuple[float, str]:
    if isinstance(value, int) and not isinstance(value, bool):
        return value, "b"
    if isinstance(value, str):
        if match := _SIZE.fullmatch(value):
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
