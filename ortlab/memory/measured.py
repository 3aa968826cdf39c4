"""What one training step was measured to need: its peak, the peak of each phase, and what the peak is made of."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ortlab.records import record_files
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

MEASURED: Final = "measured"
COMPUTED: Final = "computed"
"""From the sizes of tensors, each storage counted once; exact."""

PHASE_NAMES: Final = ("forward", "backward", "optimizer", "the rest")
"""Phases of a step; the rest is what a step does between the others: data, a loss outside the model, Python."""

_REST: Final = PHASE_NAMES[-1]
_NOISE: Final = 1 << 20
"""Bytes by which two peaks may differ that are one: what Python takes while levels are read."""

RESIDENT: Final = "resident set, large buffers mapped"
CUDA_ALLOCATED: Final = "CUDA allocated"


@dataclass(frozen=True)
class Known:
    """What the tensors of a model and of its optimizers take, in bytes, each storage counted once."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them, in bytes."""
        return self.parameters + self.buffers + self.gradients + self.optimizer


@dataclass(frozen=True)
class PhasePeak:
    """One phase of a step."""

    phase: str  #: One of `PHASE_NAMES`
    #: Level where the phase began. Of a phase that occurs several times in a step, the time with the highest peak.
    before_bytes: int
    peak_bytes: int  #: The highest level in it
    after_bytes: int  #: Level at its end


@dataclass(frozen=True)
class Piece:
    """One part of the peak."""

    name: str  #: What it is
    #: Its size; together the pieces are the peak. A measured piece may be a few pages below zero where there is
    #: nothing.
    number_of_bytes: int
    source: str  #: "computed" (exact, from tensors) or "measured" (a difference of measured levels)


@dataclass(frozen=True)
class StepMemory:
    """One step, as measured; levels are of the whole process or device, in bytes."""

    start_bytes: int  #: Before the step
    peak_bytes: int  #: At its highest point
    phases: tuple[PhasePeak, ...]  #: Each phase that the step has, in the order of `PHASE_NAMES`
    known_at_start: Known  #: What the tensors took before the step
    known_before: tuple[Known, ...]  #: What they took where each phase began, in the order of `phases`
    gradient_bytes: int  #: What all gradients of the step take, computed; they are not all there at the peak
    #: On CUDA, the allocator's own figures at the end of the step - "allocated", "cached" and "inactive", each now and
    #: at most. Empty on a CPU.
    cuda: dict[str, int]

    @property
    def rise_bytes(self) -> int:
        """How far the step rose above its start."""
        return self.peak_bytes - self.start_bytes

    @property
    def highest(self) -> PhasePeak:
        """The phase that has the peak.

        What lies between two phases begins at the level of the one before; it has the peak only if it rises above.
        """
        return max(self.phases, key=lambda phase: phase.peak_bytes - (_NOISE if phase.phase == _REST else 0))

    @property
    def known_at_peak(self) -> Known:
        """What the tensors took where the phase began that has the peak."""
        return self.known_before[self.phases.index(self.highest)]

    def phase(self, name: str) -> PhasePeak | None:
        """Return a phase by its name; None if the step does not have it."""
        return next((phase for phase in self.phases if phase.phase == name), None)


@dataclass(frozen=True, repr=False)
class MemoryMeasurement(Shown):
    """The memory of a step, measured in the running process; `lab.memory` makes it."""

    steps: tuple[StepMemory, ...]  #: The steps that were measured, after `warm_up` others
    engine: str  #: Who executed them: "ort", "eager", "compile", ...
    #: The switches they are for, as `Options.to_dict` gives them. On a CPU ORT's arena was off meanwhile, whatever they
    #: say: it keeps freed memory, so that no level can be told.
    options: dict[str, Any]
    kind: str  #: What was measured: "resident set, large buffers mapped" or "CUDA allocated"
    device: str  #: "cpu" or "cuda:0", ...
    #: Steps that ran before, unmeasured: builds, and what an optimizer allocates in its first step, are in them.
    warm_up: int
    scope: str = "this process"  #: Where: "this process"
    #: What `lab.activations()` names of that which the forward leaves behind, worked out from shapes; None where
    #: PyTorch executes, or a size is not known.
    named_activations_bytes: int | None = None

    @property
    def step(self) -> StepMemory:
        """The step with the highest rise: memory has to suffice for it. All figures below are of this step."""
        return max(self.steps, key=lambda step: step.rise_bytes)

    @property
    def start_bytes(self) -> int:
        """Level before the step, in bytes."""
        return self.step.start_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest level in the step, in bytes."""
        return self.step.peak_bytes

    @property
    def rise_bytes(self) -> int:
        """How far the step rises above its start, in bytes: what a recompute plan or another batch changes."""
        return self.step.rise_bytes

    @property
    def spread_bytes(self) -> int:
        """How far the rises of the measured steps lie apart, in bytes; 0 for one step."""
        rises = [step.rise_bytes for step in self.steps]
        return max(rises) - min(rises)

    @property
    def typical_rise_bytes(self) -> float:
        """Median of the steps' rises, in bytes."""
        return statistics.median(step.rise_bytes for step in self.steps)

    @property
    def saved_bytes(self) -> int | None:
        """What the forward left behind for the backward, outputs included, in bytes, measured; None without forward."""
        forward = self.step.phase("forward")
        return None if forward is None else forward.after_bytes - forward.before_bytes

    @property
    def label(self) -> str:
        """What was measured and where: "resident set, large buffers mapped, this process"."""
        return f"{self.kind}, {self.scope}"

    def breakdown(self) -> tuple[Piece, ...]:
        """Take the peak apart; the pieces add up to it exactly.

        Tensors are counted where the phase begins that has the peak, so gradients that a backward makes are among its
        temporaries until it ends. Saved activations and outputs are what was there besides, and, if the peak is in the
        forward, what the forward left.
        """
        step = self.step
        known, highest = step.known_at_peak, step.highest
        rest = step.start_bytes - step.known_at_start.total
        kept = highest.after_bytes if highest.phase == "forward" else highest.before_bytes
        temporaries = "temporaries" if highest.phase == _REST else f"temporaries of the {highest.phase}"
        return (
            Piece("parameters", known.parameters, COMPUTED),
            Piece("buffers", known.buffers, COMPUTED),
            Piece("gradients", known.gradients, COMPUTED),
            Piece("optimizer state", known.optimizer, COMPUTED),
            Piece("saved activations and outputs", kept - rest - known.total, MEASURED),
            Piece(temporaries, step.peak_bytes - kept, MEASURED),
            Piece("libraries and the rest", rest, MEASURED),
        )

    def table(self) -> pd.DataFrame:
        """One row per piece of the peak, in bytes."""
        import pandas as pd

        return pd.DataFrame(
            [
                {"piece": piece.name, "bytes": piece.number_of_bytes, "source": piece.source}
                for piece in self.breakdown()
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, readable by `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> MemoryMeasurement:
        """Rebuild a measurement from `to_dict`; a LedgerError says what is wrong with one that cannot be read."""
        with record_files.explained("This measurement of memory"):
            return record_files.checked(record_files.rebuilt(cls, record))
