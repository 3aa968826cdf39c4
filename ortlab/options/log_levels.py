"""The log levels of ORTModule: what each lets through, in five settings, declared once.

The engine applies the table, the documentation shows it, and the tests try every cell.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pandas as pd

SEVERITIES: Final = ("VERBOSE", "INFO", "WARNING", "ERROR", "FATAL")
"""How bad a message is, mildest first; a position is ONNX Runtime's own number for it."""

_PYTHON_LEVELS: Final[Mapping[str, int]] = {
    "VERBOSE": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


@dataclass(frozen=True, kw_only=True)
class LogLevel:
    """One value of the switch `log_level`, and the five settings that it stands for."""

    name: str  #: The value of the switch
    readers: str  #: Whom it is for
    backend: str  #: The mildest severity that ONNX Runtime's C++ code writes
    ortmodule: str  #: The mildest severity that ORTModule's Python code, and torch's exporter, write
    #: Whether, of many processes, only the one of rank 0 keeps what ORTModule and the exporter write.
    rank_zero_only: bool
    #: Whether lines of the exporter that mean nothing to a user are left out: those about operators of ONNX Runtime
    #: whose shapes the exporter does not know.
    export_filter: bool
    graph_filter: bool  #: Whether the graph that was traced is left out

    @property
    def backend_severity(self) -> int:
        """The backend's level as ONNX Runtime's own number, 0 (verbose) to 4 (fatal)."""
        return SEVERITIES.index(self.backend)

    @property
    def python_level(self) -> int:
        """ORTModule's level as a number of the standard `logging`."""
        return _PYTHON_LEVELS[self.ortmodule]

    def lets_through(self, severity: str) -> bool:
        """Say whether a message of ORTModule or of the exporter is severe enough."""
        return SEVERITIES.index(severity) >= SEVERITIES.index(self.ortmodule)

    @property
    def talks_in_steps(self) -> bool:
        """Whether the backend writes lines in every step, and not only when something is wrong."""
        return self.backend_severity < SEVERITIES.index("WARNING")


def _for_users(name: str) -> LogLevel:
    return LogLevel(
        name=name,
        readers="users",
        backend=name,
        ortmodule=name,
        rank_zero_only=True,
        export_filter=True,
        graph_filter=True,
    )


LOG_LEVELS: Final[tuple[LogLevel, ...]] = (
    _for_users("FATAL"),
    _for_users("ERROR"),
    _for_users("WARNING"),
    LogLevel(
        name="INFO",
        readers="users and developers of ONNX Runtime",
        backend="WARNING",  # its INFO lines are too many for a user
        ortmodule="INFO",
        rank_zero_only=True,
        export_filter=True,
        graph_filter=False,
    ),
    LogLevel(
        name="DEVINFO",
        readers="developers of ONNX Runtime",
        backend="INFO",
        ortmodule="INFO",
        rank_zero_only=False,
        export_filter=False,
        graph_filter=False,
    ),
    LogLevel(
        name="VERBOSE",
        readers="developers of ONNX Runtime, as the last resort",
        backend="VERBOSE",
        ortmodule="VERBOSE",
        rank_zero_only=False,
        export_filter=False,
        graph_filter=False,
    ),
)
"""Every level, from the quietest to the one that tells most, as ORTModule's Training Guidelines have them."""


def log_level(name: str) -> LogLevel:
    """Return the level of that name; `Options` lets no other name through."""
    return {level.name: level for level in LOG_LEVELS}[name]


def severity_of(python_level: int) -> str:
    """Name the severity of a record of the standard `logging`."""
    return max(
        (name for name in SEVERITIES if _PYTHON_LEVELS[name] <= python_level),
        key=SEVERITIES.index,
        default="VERBOSE",
    )


_HEADS: Final = (
    "level",
    "for",
    "ONNX Runtime (C++)",
    "ORTModule and exporter",
    "rank 0 only",
    "export filter",
    "graph filter",
)


def _cells(level: LogLevel) -> tuple[str, ...]:
    flags = (level.rank_zero_only, level.export_filter, level.graph_filter)
    return (
        level.name,
        level.readers,
        level.backend,
        level.ortmodule,
        *("on" if flag else "off" for flag in flags),
    )


def table() -> pd.DataFrame:
    """Every level as a row, with its five settings."""
    import pandas as pd

    return pd.DataFrame([_cells(level) for level in LOG_LEVELS], columns=list(_HEADS)).set_index("level")
