"""What happened in N training steps: the `Run` record with what ORT covered of the model, and the `Ledger` of a lab."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import LedgerError
from ortlab.options.options import Options, setting_words
from ortlab.records import record_files
from ortlab.records.density import Density
from ortlab.records.memory_phases import MemoryPhase, MemoryPhases
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Part:
    """One wrapped sub-module, and who executed it."""

    path: str  #: Where it is in the model, as `named_modules` says: "encoder.layer.0"
    kind: str  #: Name of its class
    parameters: int  #: Numbers in its parameters
    calls: int = 0  #: How often it was called
    on_ort: int = 0  #: How many of these calls ONNX Runtime executed
    fallback_reason: str = ""  #: Why PyTorch executed one of them; empty if it executed none

    @property
    def executed(self) -> bool:
        """Whether it was called, and ONNX Runtime executed every call."""
        return 0 < self.calls == self.on_ort


@dataclass(frozen=True)
class Coverage:
    """The wrapped parts of a model; empty, false, where all of it is wrapped or PyTorch was asked for."""

    parts: tuple[Part, ...] = ()  #: In the order of the model
    #: Numbers in the parameters of the parts that ONNX Runtime executed; before the first call, of all parts. A
    #: parameter that two parts share counts once.
    covered: int = 0
    parameters: int = 0  #: Numbers in the model's parameters

    def __bool__(self) -> bool:
        """Tell whether there are parts."""
        return bool(self.parts)

    @property
    def called(self) -> bool:
        """Whether any part was called."""
        return any(part.calls for part in self.parts)

    @property
    def executed(self) -> tuple[str, ...]:
        """Paths of the parts that ONNX Runtime executed in every call."""
        return tuple(part.path for part in self.parts if part.executed)

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Paths of the parts that were not called."""
        return tuple(part.path for part in self.parts if not part.calls)

    @property
    def fallback_reason(self) -> str:
        """Why PyTorch executed a part that ONNX Runtime was asked for, with its path; empty if it did not."""
        return "; ".join(
            f"{part.path}: {part.fallback_reason}" for part in self.parts if part.fallback_reason
        )

    @property
    def share(self) -> float | None:
        """Covered parameters as a fraction of the model's, 0 to 1; None for a model without any."""
        return self.covered / self.parameters if self.parameters else None


def names(paths: Iterable[str], shown: int = 2) -> str:
    """Write paths in a few words: "encoder, head"; "encoder.layer.0 and 11 more"."""
    listed = list(paths)
    if len(listed) <= shown:
        return ", ".join(listed)
    return f"{listed[0]} and {len(listed) - 1} more"


SCHEMA = 2
"""Version of the JSON layout of `Run.to_dict`."""

_FORMER: Final = 1
"""A layout without step memory and page faults, which is still read."""

NOT_MEASURED: Final = "It was not asked for."
NO_FORMER: Final = "An ortlab that did not measure it wrote this run."
STAGE_ORDER = ("export", "graph", "session")
EXECUTED_BY_ORT = "ort"
EXECUTED_BY_FALLBACK = "fallback"
EXECUTED_BY_EAGER = "eager"
EXECUTED_BY_PARTS = "ort parts"
"""ONNX Runtime all wrapped parts of the model that were called, and PyTorch the rest of it."""


@dataclass(frozen=True)
class Step:
    """One training step, as measured."""

    total_ms: float  #: Wall time of the whole step, in ms, initialisation left out
    #: Wall time inside the wrapped module's forward, inside `backward()` calls, and inside `optimizer.step()`, in ms.
    forward_ms: float
    backward_ms: float  #: See `forward_ms`
    optimizer_ms: float  #: See `forward_ms`
    #: Export, graph building and session creation that this step had to wait for, in ms; not part of the others.
    initialization_ms: float
    loss: float | None  #: The loss that the step reported, or None where it reported none
    #: Who executed the forward pass: "ort", "ort parts" (ORT the wrapped parts, PyTorch the rest), "eager",
    #: "checkpoint", "compile" (with what it was told: "compile:0.5") or "fallback" (PyTorch, because ORT could not).
    executed_by: str
    #: The part of `backward_ms` after the last gradient of this process: the exchange with other ranks, and the wait
    #: for slower ones. None where one process trains alone, and on CUDA, where it cannot be told apart.
    exchange_ms: float | None = None
    #: Pages that the process asked the system for in the step: an allocator that had given memory back takes it again,
    #: which takes time. None where the system does not tell.
    page_faults: int | None = None
    #: Pages among them that had to be read from a disk, as on a machine that swaps.
    swapped_pages: int | None = None

    @property
    def other_ms(self) -> float:
        """Data loading, loss computed outside the model, Python: what is left of `total_ms`, in ms."""
        return max(0.0, self.total_ms - self.forward_ms - self.backward_ms - self.optimizer_ms)


@dataclass(frozen=True)
class Initialization:
    """Where the time before the first step went, in ms, by phase as ORT's own tracker reports it."""

    stage: str  #: The earliest stage that was redone: "export", "graph" or "session"
    #: Export to ONNX, creation of the graph builder, input detection, gradient-graph building, session creation.
    export_ms: float
    graph_builder_ms: float  #: See `export_ms`
    detection_ms: float  #: See `export_ms`
    graph_ms: float  #: See `export_ms`
    session_ms: float  #: See `export_ms`
    total_ms: float  #: End to end, as measured; shape inference and the first eager forward are in here only
    #: What had changed - an input, or the module - where no change of options asked for it; else empty.
    reason: str = ""

    def plus(self, later: Initialization) -> Initialization:
        """Add up two builds of one run, for example one for training and one for evaluation."""
        words = ("stage", "reason")
        times = {name: getattr(self, name) + getattr(later, name) for name in vars(self) if name not in words}
        stage = min(self.stage, later.stage, key=STAGE_ORDER.index)
        reasons = dict.fromkeys(one for one in (self.reason, later.reason) if one)
        return Initialization(stage=stage, **times, reason="; ".join(reasons))


@dataclass(frozen=True)
class PeakMemory:
    """The memory a run needed, and what exactly was measured."""

    start_bytes: int  #: At the start of the run and at its highest point, in bytes
    peak_bytes: int  #: See `start_bytes`
    #: "resident set" (CPU: the whole process, Python included) or "CUDA allocated" (torch's allocator).
    kind: str
    #: "this process" or "fresh process". In a process that has run other things before, freed memory that the allocator
    #: kept can hide a part of the rise.
    scope: str = "this process"

    @property
    def rise_bytes(self) -> int:
        """How far the run rose above its start, in bytes."""
        return self.peak_bytes - self.start_bytes


@dataclass(frozen=True, repr=False)
class Run(Shown, JsonRecord, noun="run", layout=SCHEMA):
    """N training steps under one engine and one set of options; JSON in and out."""

    #: 1, 2, ... in the order of the lab's ledger.
    number: int
    #: The engine that was asked for: "ort", "eager", "checkpoint" or "compile", with what it was told.
    engine: str
    options: Options  #: Every switch as it stood
    steps: tuple[Step, ...]  #: One record per step
    #: Export, graph and session time, or None where nothing had to be built.
    initialization: Initialization | None
    memory: PeakMemory | None  #: Peak memory of the process, a detail; or None where the platform cannot tell
    fallback_reason: str  #: Why PyTorch executed a step that ORT was asked for; empty where ORT did
    device: str  #: "cpu" or "cuda:0", ...
    #: Digest of weights, buffers, optimizer state and random state at the start; equal digests, equal starts.
    start_digest: str
    data_digest: str  #: Digest of the model's inputs over all steps, in order; equal digests, equal data
    seed: int  #: `torch.initial_seed()` at the start
    started_at: str  #: Start, ISO 8601, UTC
    #: SHA-256 of each ONNX graph by stage, empty for engines that have none.
    graph_digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  #: Package versions by name
    sweep: int = 0  #: Number of the lab's sweep that the run belongs to; 0 for a run of its own
    #: How much of the inputs was not padding, step by step; empty unless `print_input_density` was on.
    density: Density = field(default_factory=Density)
    #: Memory before and after forward and backward; empty unless `print_memory_stats` was on.
    phases: tuple[MemoryPhase, ...] = ()
    #: "training" or "evaluation", as the model was at its forwards; "mixed" if it was both.
    mode: str = "training"
    #: Where only parts of the model are wrapped: who executed each; else empty.
    coverage: Coverage = field(default_factory=Coverage)
    #: Names of the optimizers that stepped, with the kernels that they told of; see `optimizer_name`.
    optimizers: tuple[str, ...] = ()
    #: Step memory: how far a step rises above its start, in bytes, as `lab.memory().rise_bytes`. This is what runs are
    #: compared by. None where it was not measured.
    step_memory_bytes: int | None = None
    no_step_memory: str = ""  #: Why it is missing, one sentence; else empty
    #: Cores that other programs used meanwhile, on average; None where the system does not tell.
    others_cores: float | None = None
    #: How many steps were asked for; there are fewer in `steps` if Ctrl-C stopped the run. 0 where nobody knew, as in a
    #: training that somebody else's loop runs.
    planned_steps: int = 0
    #: What the step changes and a rerun cannot put back, such as ``ticks, a count of itertools``.
    unkept: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether Ctrl-C stopped it before its last step."""
        return len(self.steps) < self.planned_steps

    @property
    def executed_by(self) -> str:
        """Who executed the steps; "fallback" as soon as PyTorch executed what ORT was asked for."""
        who = {step.executed_by for step in self.steps}
        return who.pop() if len(who) == 1 else EXECUTED_BY_FALLBACK

    @property
    def fell_back(self) -> bool:
        """Whether PyTorch executed any step that ORT was asked for; such a run is no result of ORT."""
        return self.executed_by == EXECUTED_BY_FALLBACK

    @property
    def fallback_steps(self) -> tuple[int, ...]:
        """Numbers of the steps, from 1 on, that PyTorch executed though ORT was asked for."""
        return tuple(
            number
            for number, step in enumerate(self.steps, start=1)
            if step.executed_by == EXECUTED_BY_FALLBACK
        )

    @property
    def title(self) -> str:
        """Name for tables: number, who executed it, and the switches that differ from the defaults."""
        who = "PyTorch (fallback)" if self.executed_by == EXECUTED_BY_FALLBACK else self.executed_by
        if 0 < len(self.fallback_steps) < len(self.steps):
            who = f"PyTorch (fallback in {len(self.fallback_steps)} of {len(self.steps)} steps)"
        if self.executed_by == EXECUTED_BY_PARTS:
            who = f"ort in {names(self.coverage.executed)}"
        changed = self.options.changed(Options()) if self.engine == EXECUTED_BY_ORT else ()
        shown = ", ".join(setting_words(name, getattr(self.options, name)) for name in changed)
        partial = f", partial: {len(self.steps):,} of {self.planned_steps:,} steps" if self.is_partial else ""
        return f"#{self.number} {who}" + (f" ({shown})" if shown else "") + partial

    @property
    def losses(self) -> tuple[float | None, ...]:
        """The loss of every step, in order."""
        return tuple(step.loss for step in self.steps)

    @property
    def warm_steps(self) -> tuple[Step, ...]:
        """The steps that statistics are made of: all but the first and those that waited for a build.

        The first step after a build pays for caches and allocations that the others reuse, so it is kept in
        `steps` and left out here. A run of one step has only that one.
        """
        warm = tuple(s for s in self.steps[1:] if s.initialization_ms == 0.0)
        return warm or self.steps

    @property
    def step_ms(self) -> float:
        """Median wall time of a warm step, in ms."""
        return statistics.median(s.total_ms for s in self.warm_steps)

    @property
    def memory_phases(self) -> MemoryPhases:
        """The readings of `phases` as a record of their own, with a table, a figure and ORTModule's log lines."""
        return MemoryPhases(self.phases, f"run {self.number}")

    def _fields(self) -> dict[str, Any]:
        return {**asdict(self), "options": self.options.to_dict(), "density": self.density.to_list()}

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Run:
        fields["density"] = {"rows": fields.get("density", ())}
        run = record_files.rebuilt(cls, fields)
        if not run.steps:
            raise ValueError("a run has at least one step")
        return run

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Run:
        """Rebuild a run from `to_dict`; a LedgerError says what is wrong with one that cannot be read."""
        if isinstance(record, Mapping) and record.get("schema") == _FORMER:
            record = {**record, "schema": SCHEMA, "no_step_memory": NO_FORMER}
        return super().from_dict(record)


class Ledger(Shown, Sequence[Run]):
    """The runs of one lab, in order; `ledger[-1]` is the last, `ledger.run(3)` is run number 3."""

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        self._runs = list(runs)

    def __len__(self) -> int:
        """Count the runs."""
        return len(self._runs)

    def __getitem__(self, index: Any) -> Any:
        """Return the run (or runs) at a position, as a list does."""
        return self._runs[index]

    def __iter__(self) -> Iterator[Run]:
        """Iterate in order."""
        return iter(self._runs)

    @property
    def next_number(self) -> int:
        """The number that the next run gets."""
        return self._runs[-1].number + 1 if self._runs else 1

    def add(self, run: Run) -> None:
        """Append a run."""
        self._runs.append(run)

    def run(self, number: int) -> Run:
        """Return the run of that number.

        Raises
        ------
        LedgerError
            If there is none.
        """
        for run in self._runs:
            if run.number == number:
                return run
        known = ", ".join(str(r.number) for r in self._runs) or "none yet"
        raise LedgerError(f"There is no run {number}.", fix=f"Runs in the ledger: {known}.")

    def table(self) -> pd.DataFrame:
        """One row per run: who executed it, steps, loss, times in ms, step memory in bytes."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "run": run.number,
                    "sweep": run.sweep,
                    "engine": run.engine,
                    "executed by": run.executed_by,
                    "fallback steps": len(run.fallback_steps),
                    "steps": len(run.steps),
                    "first loss": run.losses[0],
                    "last loss": run.losses[-1],
                    "step [ms]": run.step_ms,
                    **part_columns(run.warm_steps, run.step_ms),
                    "initialisation [ms]": run.initialization.total_ms if run.initialization else 0.0,
                    "step memory [bytes]": run.step_memory_bytes,
                }
                for run in self._runs
            ]
        )

    def save(self, path: str | Path) -> Path:
        """Write all runs as JSON and return the path."""
        return record_files.write(path, [run.to_dict() for run in self._runs])

    @classmethod
    def load(cls, path: str | Path) -> Ledger:
        """Read what `save` wrote.

        Raises
        ------
        LedgerError
            If the file is not a ledger.
        """
        records = record_files.read(
            path,
            list,
            file=f"The ledger file {path}",
            other=f"The file {path} is not a ledger.",
            fix="Give a file that Ledger.save wrote.",
        )
        if not all(isinstance(record, dict) for record in records):
            raise LedgerError(f"The file {path} is not a ledger.", fix="Give a file that Ledger.save wrote.")
        ledger = cls([Run.from_dict(record) for record in records])
        return record_files.shown(ledger, f"The ledger file {path}")


def step_parts(steps: Sequence[Step], step_ms: float) -> dict[str, float]:
    """Return the ms that each part takes of a step of `step_ms`, the median of these; they add up to it."""
    # Medians of the parts would not: a slow forward and a slow backward need not be in the same step. So each part has
    # its share of all steps together.
    whole = sum(step.total_ms for step in steps) or 1.0
    spent = {
        "forward": sum(step.forward_ms for step in steps),
        "backward": sum(step.backward_ms for step in steps),
        "optimizer": sum(step.optimizer_ms for step in steps),
        "everything else": sum(step.other_ms for step in steps),
    }
    return {name: step_ms * ms / whole for name, ms in spent.items()}


def part_columns(steps: Sequence[Step], step_ms: float) -> dict[str, float]:
    """Return the ms of a step inside forward, backward and optimizer, by the columns of tables."""
    parts = step_parts(steps, step_ms)
    return {f"{name} [ms]": parts[name] for name in ("forward", "backward", "optimizer")}


def least_step_memory(runs: Sequence[Run]) -> int | None:
    """Return the step memory of one configuration, in bytes: the least that its runs have read, None if none has."""
    # What else happens in the process while a step is read adds to that reading, and takes nothing away.
    return min((run.step_memory_bytes for run in runs if run.step_memory_bytes is not None), default=None)


OVERRIDDEN_BY: Final = "ortlab_fp16_functions"
"""Attribute of an optimizer whose methods `ortlab.optim.fp16_optimizer` replaced: what computes in them."""

_PATHS: Final = ("fused", "foreach")


def optimizer_name(optimizer: object) -> str:
    """Name an optimizer."""
    # "AdamW"; "AdamW, fused" where the user asked torch for that; "FusedAdam by ORT's fused_ops"; or "FusedAdam by
    # PyTorch's fused kernel: ..." with the reason why it is not ORT's.
    words = type(optimizer).__name__
    groups = getattr(optimizer, "param_groups", ())
    asked = next((path for path in _PATHS if any(group.get(path) for group in groups)), "")
    if asked:
        words += f", {asked}"
    if by := getattr(optimizer, "implementation", ""):
        words += f" by {by}"
    if by := getattr(optimizer, OVERRIDDEN_BY, ""):
        words += f", FP16_Optimizer by {by}"
    return words
