"""The points of a sweep: a configuration, and the runs that were made of it or the reason why there are none."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ortlab.options.configuration import Configuration
from ortlab.options.options import Effect, Options, switches
from ortlab.records.runs import Initialization, Run, Step, least_step_memory

if TYPE_CHECKING:
    from ortlab.studies.sweep_grid import Changes


@dataclass(frozen=True)
class Point:
    """One point of a sweep: a configuration and the runs that were made of it.

    Attributes
    ----------
    number
        1, 2, ... in the order of the grid; 0 for a baseline that is not among the points.
    changes
        What the point changes, as the user asked: options by name, "engine" among them.
    configuration
        Engine and all switches; None if they contradict each other or cannot act here.
    skipped
        Why the point is not run: a contradiction, or another point that does the same; "" otherwise.
    failure
        Why a run of it failed; "" otherwise. Its other runs, if any, count no more.
    runs
        One for each round that is done.
    """

    number: int
    changes: Changes
    configuration: Configuration | None
    skipped: str = ""
    failure: str = ""
    runs: tuple[Run, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether there is something to show: a run, and none that failed."""
        return bool(self.runs) and not self.failure

    @property
    def fell_back(self) -> bool:
        """Whether PyTorch executed any step of its runs that ORT was asked for."""
        return any(run.fell_back for run in self.runs)

    @property
    def warm_steps(self) -> tuple[Step, ...]:
        """The warm steps of all rounds; see `Run.warm_steps`."""
        return tuple(step for run in self.runs for step in run.warm_steps)

    @property
    def step_ms(self) -> float:
        """Median wall time of a warm step over all rounds, in ms; nan if nothing was measured."""
        return statistics.median(s.total_ms for s in self.warm_steps) if self.measured else math.nan

    @property
    def step_memory_bytes(self) -> float:
        """How far a step rises above its start, in bytes; nan if it was not measured. It is measured in two rounds."""
        known = least_step_memory(self.runs) if self.measured else None
        return math.nan if known is None else float(known)

    @property
    def no_step_memory(self) -> str:
        """Why `step_memory_bytes` is missing; else empty."""
        return self.runs[0].no_step_memory if self.measured and math.isnan(self.step_memory_bytes) else ""

    @property
    def builds(self) -> tuple[Initialization, ...]:
        """What was built for it, run by run."""
        return tuple(run.initialization for run in self.runs if run.initialization)

    @property
    def rebuilt(self) -> Initialization | None:
        """What was built for it, all runs together; None if everything was there."""
        total: Initialization | None = None
        for build in self.builds:
            total = build if total is None else total.plus(build)
        return total

    @property
    def state(self) -> str:
        """Say how far it got: "skipped", "failed", "measured" or "missing"."""
        if self.skipped:
            return "skipped"
        if self.failure:
            return "failed"
        return "measured" if self.runs else "missing"

    def value(self, name: str) -> object:
        """Return what an option, or "engine", is at this point; None if it is not known."""
        if self.configuration is None or name in self.changes:
            return self.changes.get(name)
        return self.configuration.engine if name == "engine" else getattr(self.configuration.options, name)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, readable by `from_dict`."""
        configuration = self.configuration and {
            "engine": self.configuration.engine,
            "options": self.configuration.options.to_dict(),
        }
        return {
            "number": self.number,
            "changes": {name: list(v) if isinstance(v, tuple) else v for name, v in self.changes.items()},
            "configuration": configuration,
            "skipped": self.skipped,
            "failure": self.failure,
            "runs": [run.to_dict() for run in self.runs],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Point:
        """Rebuild a point from `to_dict`; a missing field raises KeyError."""
        held = data["configuration"]
        return cls(
            number=data["number"],
            changes={name: tuple(v) if isinstance(v, list) else v for name, v in data["changes"].items()},
            configuration=held and Configuration(held["engine"], Options.from_dict(held["options"])),
            skipped=data["skipped"],
            failure=data["failure"],
            runs=tuple(Run.from_dict(run) for run in data["runs"]),
        )


def same_work(one: Configuration, other: Configuration) -> bool:
    """Tell whether two configurations do the same: only ONNX Runtime reads the switches."""
    if one.engine != other.engine:
        return False
    return one.engine != "ort" or one.options.stage_of_change(other.options) is None


def cheapest_order(points: Sequence[Point], first: int) -> list[int]:
    """Order positions so that those with equal exports, then equal graphs stand together; `first` comes first."""
    seen: dict[tuple[object, ...], int] = {}

    def rank(configuration: Configuration, until: Effect) -> int:
        values = tuple(
            getattr(configuration.options, one.name)
            for one in switches()
            if one.effect <= until and configuration.engine == "ort"
        )
        return seen.setdefault((configuration.engine, until, values), len(seen))

    keys = [
        (
            rank(one.configuration, Effect.EXPORT),
            rank(one.configuration, Effect.GRAPH),
            position != first,
            position,
        )
        for position, one in sorted(enumerate(points), key=lambda pair: pair[0] != first)
        if one.configuration is not None
    ]
    return [position for *_, position in sorted(keys)]
