"""What a user asks for: a share of what a step needs, so many bytes of it, or so much of a whole device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.memory.sizes import read_size

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIX: Final = (
    'Write "70%" or "-30%" of what a step needs without plans, "400 MiB" of step memory, '
    'or device="6 GiB" for the whole process or GPU.'
)
_PERCENT: Final = re.compile(r"\s*([+\-\u2212]?)\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\s*[+\-\u2212]?\s*[0-9][0-9_]*(?:\.[0-9]*)?\s*", re.ASCII)
_ALL: Final = 100.0


@dataclass(frozen=True)
class Request:
    """A budget as it was asked for; one of share, step bytes and device bytes is given."""

    asked: str  # in words
    share: float | None = None  # of what a step needs without plans
    step_bytes: int | None = None  # above the start of the step
    device_bytes: int | None = None  # of the whole process or device

    def limit(self, without_bytes: float, held_bytes: float = 0.0) -> int:
        """Return the limit of step memory, in bytes; it is not above zero where a device holds more than was asked for.

        `without_bytes` is step memory without plans; `held_bytes` is what process or device holds as a step starts.
        """
        if self.share is not None:
            return int(without_bytes * self.share)
        if self.device_bytes is not None:
            return int(self.device_bytes - held_bytes)
        return self.step_bytes or 0


def read_request(limit: object, device: object) -> Request:
    """Read what `Lab.budget` was called with.

    Raises OptionError for both or neither, for what is no share and no size, and for a share that no step can keep.
    """
    if limit is None and device is None:
        raise OptionError("A budget needs a limit.", fix=_FIX)
    if limit is not None and device is not None:
        raise OptionError(
            "A budget is of step memory or of the whole device, not of both.",
            why=f"It was asked for {_shown(limit)}, and for device={_shown(device)}.",
            fix="Leave one of the two out.",
        )
    if device is not None:
        return _of_device(device)
    if isinstance(limit, str) and (percent := _PERCENT.fullmatch(limit)):
        return _of_share(limit.strip(), percent[1], float(percent[2]))
    size = _size(limit, "budget")
    return Request(limit.strip() if isinstance(limit, str) else f"{size:,} B", step_bytes=size)


def _of_device(device: object) -> Request:
    if isinstance(device, str) and _PERCENT.fullmatch(device):
        raise OptionError(
            f"The device budget is {device.strip()!r}.",
            why="A percentage is of what a step needs; of a device, say how much it is.",
            fix='Write device="6 GiB", or leave device out: lab.budget("70%").',
        )
    size = _size(device, "device budget")
    asked = device.strip() if isinstance(device, str) else f"{size:,} B"
    return Request(f"{asked} for the whole device", device_bytes=size)


def _of_share(text: str, sign: str, percent: float) -> Request:
    if sign in {"-", "\u2212"}:
        if not 0 < percent < _ALL:
            why = (
                "Nothing would be left for a step." if percent else "That asks for no less than a step needs."
            )
            raise OptionError(f"The budget is {text!r}.", why=why, fix=_FIX)
        return Request(f"-{percent:g} %", share=1 - percent / _ALL)
    if sign or percent > _ALL:
        raise OptionError(
            f"The budget is {text!r}.",
            why="A step needs 100 % of its memory without any plan; a budget asks for less.",
            fix=_FIX,
        )
    if not percent:
        raise OptionError(f"The budget is {text!r}.", why="Nothing would be left for a step.", fix=_FIX)
    return Request(f"{percent:g} %", share=percent / _ALL)


def _size(value: object, name: str) -> int:
    """Read a size as `read_size` does; a bare number in a text is no size, since it may mean MiB or per cent."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        number = value.strip()
        raise OptionError(
            f"The {name} {number!r} has no unit.",
            why="It may mean bytes, MiB, or per cent.",
            fix=f'Write "{number} MiB", "{number} B" or "{number}%". A whole number, not in quotes, is bytes.',
        )
    if isinstance(value, float):
        raise OptionError(
            f"The {name} is {value!r}, a number without a unit.",
            why="It may mean a share, or bytes.",
            fix=f'Write a share as text: "{value * _ALL:g}%".' if 0 < value < 1 else _FIX,
        )
    return read_size(value, name=name)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"  # noqa: PLR2004 - a line


def counted(configs: Sequence[str], counts: Sequence[int], places: Sequence[int]) -> tuple[str, ...]:
    """Write plans as `Options.memory_plan` takes them: "Gelu+:1" in 3 of 12 places is "Gelu+:1:3", in all ":-1".

    Two plans that go together, "A+:1,B+:1", are two entries.
    """
    return tuple(
        f"{part}:{-1 if count == most else count}"
        for config, count, most in zip(configs, counts, places, strict=True)
        if count
        for part in config.split(",")
    )
