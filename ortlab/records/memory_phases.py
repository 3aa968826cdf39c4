"""Memory at the points of a step, as measured; and the lines in which ORTModule writes it, read and written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

PHASES: Final = ("pre_forward", "post_forward", "pre_backward", "post_backward")
"""Where memory is read, in the order of a step."""

ALWAYS_READ: Final = 10
"""The first steps are all read; after them those whose number from 0 on is a power of two, as ORTModule does it."""

_MIB: Final = 1 << 20
_LINE: Final = re.compile(
    r"step (?P<step>\d+) memory \(MiB\) \| phase: (?P<phase>\w+)(?P<sizes>(?:(?!step \d+ memory)[^\n])*)"
)
_SIZE: Final = re.compile(r"\| (?P<name>[a-z][a-z ]*?): (?P<mib>-?\d+)(?= |$)")


def is_read(step: int) -> bool:
    """Tell whether memory is read in a step."""
    from_zero = step - 1
    return from_zero < ALWAYS_READ or not from_zero & (from_zero - 1)


@dataclass(frozen=True)
class MemoryPhase:
    """Memory at one point of one step."""

    step: int  #: Number of the step in its run, from 1
    phase: str  #: "pre_forward", "post_forward", "pre_backward" or "post_backward"
    #: Name to bytes, measured. CPU: "resident" and "max resident", of the whole process, the latter since the run or
    #: its last build began. CUDA: "allocated", "cached" and "inactive" of torch's allocator, each now and at most.
    sizes: dict[str, int]


@dataclass(frozen=True, repr=False)
class MemoryPhases(Shown):
    """Memory at the points of the steps of a run: `run.memory_phases`, or a log that was read."""

    readings: tuple[MemoryPhase, ...]  #: In the order in which they were taken
    source: str = ""  #: Where they are from: "run 3", or "a log"

    @property
    def names(self) -> tuple[str, ...]:
        """What was read, such as "allocated" and "max allocated"."""
        return tuple(dict.fromkeys(name for reading in self.readings for name in reading.sizes))

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps, from 1, that were read."""
        return tuple(dict.fromkeys(reading.step for reading in self.readings))

    def at(self, phase: str) -> tuple[MemoryPhase, ...]:
        """Return the readings at one point, step by step."""
        return tuple(reading for reading in self.readings if reading.phase == phase)

    def table(self) -> pd.DataFrame:
        """One row per reading: step, phase, and sizes in bytes."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "step": reading.step,
                    "phase": reading.phase,
                    **{f"{name} [bytes]": size for name, size in reading.sizes.items()},
                }
                for reading in self.readings
            ]
        )

    def log(self, prefix: str = "") -> str:
        """Write the lines that ORTModule logs, which count steps from 0 and round to MiB, without a last line break."""
        return "\n".join(
            f"{prefix}step {reading.step - 1} memory (MiB) | phase: {reading.phase}"
            + "".join(f" | {name}: {size / _MIB:.0f}" for name, size in reading.sizes.items())
            for reading in self.readings
        )

    @classmethod
    def read(cls, text: str) -> MemoryPhases:
        """Read the lines of a log, from any release that writes them; prefixes and other lines may stand around.

        Parameters
        ----------
        text
            The log.

        Raises
        ------
        OptionError
            If there is no such line in it.
        """
        readings = tuple(
            MemoryPhase(
                int(line["step"]) + 1,
                line["phase"],
                {size["name"]: int(size["mib"]) * _MIB for size in _SIZE.finditer(line["sizes"])},
            )
            for line in _LINE.finditer(text)
        )
        if not readings:
            raise OptionError(
                "This text holds no line of ORTModule's memory statistics.",
                why='They read "step 0 memory (MiB) | phase: pre_forward | allocated: 1866 | ...".',
                fix="Write the log with ORTMODULE_PRINT_MEMORY_STATS=1 and log level INFO, on a GPU.",
            )
        return cls(readings, "a log")


def read_phases(path: str | Path) -> MemoryPhases:
    """Read the memory statistics in a log file."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise OptionError(f"The log {path} cannot be read.", why=f"{error.strerror}.") from error
    return MemoryPhases.read(text)
