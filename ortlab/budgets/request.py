"""What a user asks for: so many bytes, or so much less than a step needs without plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.memory.sizes import read_size

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIX: Final = 'Write lab.budget("6 GiB") or lab.budget(saving=0.3).'


@dataclass(frozen=True)
class Request:
    """A budget as it was asked for.

    Attributes
    ----------
    asked
        The same in words.
    limit_bytes
        The most that a step may take; None where a saving was asked for.
    saving
        The share of the peak without plans that is to go; None where bytes were asked for.
    """

    asked: str
    limit_bytes: int | None = None
    saving: float | None = None

    def limit(self, peak_bytes: float) -> int:
        """Return the limit in bytes for a step that has this peak without plans."""
        if self.limit_bytes is not None:
            return self.limit_bytes
        return int(peak_bytes * (1 - (self.saving or 0.0)))


def read_request(limit: object, saving: object) -> Request:
    """Read what `Lab.budget` was called with.

    Raises
    ------
    OptionError
        If it is both or neither, no size, not above zero, or no share between 0 and 1.
    """
    if (limit is None) == (saving is None):
        both = limit is not None
        raise OptionError(
            f"A budget is either a limit or a saving, not {'both' if both else 'neither'}.", fix=_FIX
        )
    if limit is not None:
        size = read_size(limit, name="budget")
        return Request(limit.strip() if isinstance(limit, str) else f"{size:,} B", limit_bytes=size)
    if isinstance(saving, bool) or not isinstance(saving, (int, float)):
        raise OptionError(f"The saving is {saving!r}.", why="It is a number between 0 and 1.", fix=_FIX)
    if not 0 < saving < 1:
        raise OptionError(
            f"The saving is {saving!r}.",
            why="It is the share of the peak without plans that is to go: above 0 and below 1.",
            fix=_FIX,
        )
    return Request(f"saving of {100 * saving:.3g} %", saving=float(saving))


def counted(configs: Sequence[str], counts: Sequence[int], places: Sequence[int]) -> tuple[str, ...]:
    """Write plans as `Options.memory_plan` takes them: "Gelu+:1" in 3 of 12 places is "Gelu+:1:3", in all ":-1"."""
    return tuple(
        f"{config}:{-1 if count == most else count}"
        for config, count, most in zip(configs, counts, places, strict=True)
        if count
    )
