"""What a lab is doing now: which engine, who executed the last call; what a step would rebuild, and what that took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ortlab.errors import OptionError
from ortlab.options.options import Effect, Options, declaration
from ortlab.records.runs import EXECUTED_BY_ORT, STAGE_ORDER, Coverage, Initialization, Run
from ortlab.shown import Shown

if TYPE_CHECKING:
    from ortlab.options.switches import Switch


@dataclass(frozen=True, repr=False)
class Status(Shown):
    """The state of a lab, as its badge shows it."""

    #: The engine that was asked for: "ort", "eager", "checkpoint" or "compile", with what it is told.
    engine: str
    state: str  #: "not built", "rebuild pending", "ready", "fallback" or "unwrapped"
    #: Who executed the last forward: "ort", "ort parts", "fallback", or the engine; empty before the first. See
    #: `Run.executed_by`.
    executed_by: str
    reason: str  #: Why it fell back, or why the last build was needed
    pending_stage: str  #: What the next call redoes first: "export", "graph", "session", or "" for nothing
    #: Where only parts of the model are wrapped: who executed each in the last forward; else empty.
    coverage: Coverage = field(default_factory=Coverage)
    #: What the engine does to this model, in words: the layers that are checkpointed; empty for the others.
    detail: str = ""
    can_repeat: bool = False  #: Whether a step has run in the lab, from whose start reruns and analyses go


@dataclass(frozen=True)
class Rebuild:
    """What a call redoes before it runs the model, and what that took when it was last measured."""

    #: What is redone first: "export", "graph" or "session"; "step" if the next step acts differently and nothing is
    #: redone, "" if nothing changes.
    stage: str
    #: Options that make the difference; empty where a call ran others, and what it put aside is made again.
    changed: tuple[str, ...] = ()
    is_first: bool = False  #: Whether nothing has been built yet, so that every stage is made in any case
    #: What that took when it was last measured in this lab, in ms; None if it was not. It is not a prediction.
    last_ms: float | None = None
    run: int | None = None  #: Number of the run in which it was measured


_OF_EFFECT = {Effect.GRAPH: "graph", Effect.SESSION: "session", Effect.STEP: "step"}
"""Every other effect means a new export."""


class Builder(Protocol):
    """What knows what is built: `ortlab.engine.ort.OrtEngine`."""

    @property
    def built_options(self) -> Options | None:
        """Switches of what is built; None if nothing is."""

    def stage_of(self, options: Options) -> str:
        """Return what a call with these switches would redo first."""


def rebuild(builder: Builder, runs: Iterable[Run], options: Options) -> Rebuild:
    """Say what a call would redo with some switches, which are not set; the runs are in order."""
    built = builder.built_options
    stage = builder.stage_of(options)
    last_ms, run = last_measured(runs, stage)
    changed = () if built is None or not stage else options.changed(built)
    return Rebuild(stage, changed, is_first=built is None, last_ms=last_ms, run=run)


def rebuild_of_switch(builder: Builder, runs: Iterable[Run], options: Options, name: str) -> Rebuild:
    """Say what a call would redo if one switch had another value; which one makes no difference."""
    one = declaration(name)
    try:
        return rebuild(builder, runs, options.replace(**{name: _other_value(one, getattr(options, name))}))
    except OptionError:  # it contradicts another switch: what it takes once that has been changed, too
        stage = _OF_EFFECT.get(one.effect, "export")
        last_ms, run = last_measured(runs, stage)
        return Rebuild(stage, (name,), is_first=builder.built_options is None, last_ms=last_ms, run=run)


def last_measured(runs: Iterable[Run], stage: str) -> tuple[float | None, int | None]:
    """Return what a stage and those after it took, in ms, in the newest run that went through them, and its number."""
    # Both are None if no run has built that.
    if stage not in STAGE_ORDER:
        return None, None
    for run in reversed(tuple(runs)):
        done = run.initialization
        if (
            run.engine != EXECUTED_BY_ORT
            or done is None
            or STAGE_ORDER.index(done.stage) > STAGE_ORDER.index(stage)
        ):
            continue
        return _spent(done, stage), run.number
    return None, None


def _spent(done: Initialization, stage: str) -> float:
    """Return the time from a stage on, in ms; from the earliest stage on, it includes that between the phases."""
    if done.stage == stage:
        return done.total_ms
    graph_ms = done.graph_builder_ms + done.detection_ms + done.graph_ms
    return done.session_ms + (graph_ms if stage == "graph" else 0.0)


def _other_value(one: Switch, value: object) -> object:
    """Return some other value that the switch takes."""
    if one.type is bool:
        return not value
    if one.type is tuple:
        return (
            () if value else one.read(one.choices[:1] or (one.syntax.example if one.syntax else "Reshape",))
        )
    others = [choice for choice in one.choices if choice != value]
    if others:
        return others[0]
    return value + 1 if isinstance(value, int) else (str(value) + "_")
