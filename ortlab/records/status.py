"""What a lab is doing now: which engine, who executed the last call, what the next call will rebuild and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from ortlab.records.coverage import Coverage
from ortlab.shown import Shown


@dataclass(frozen=True, repr=False)
class Status(Shown):
    """The state of a lab, as its badge shows it.

    Attributes
    ----------
    engine
        The engine that was asked for: "ort", "eager", "checkpoint" or "compile", with what it is told.
    state
        "not built", "rebuild pending", "ready", "fallback" or "unwrapped".
    executed_by
        Who executed the last forward: "ort", "ort parts", "fallback", or the engine; empty before the first. See
        `Run.executed_by`.
    reason
        Why it fell back, or why the last build was needed.
    pending_stage
        What the next call redoes first: "export", "graph", "session", or "" for nothing.
    coverage
        Where only parts of the model are wrapped: who executed each in the last forward; else empty.
    detail
        What the engine does to this model, in words: the layers that are checkpointed; empty for the others.
    can_repeat
        Whether a step has run in the lab, from whose start reruns and analyses go.
    """

    engine: str
    state: str
    executed_by: str
    reason: str
    pending_stage: str
    coverage: Coverage = field(default_factory=Coverage)
    detail: str = ""
    can_repeat: bool = False


@dataclass(frozen=True)
class Rebuild:
    """What a call redoes before it runs the model, and what that took when it was last measured.

    Attributes
    ----------
    stage
        What is redone first: "export", "graph" or "session"; "step" if the next step acts differently and nothing is
        redone, "" if nothing changes.
    changed
        Options that make the difference.
    is_first
        Whether nothing has been built yet, so that every stage is made in any case.
    last_ms
        What that took when it was last measured in this lab, in ms; None if it was not. It is not a prediction.
    run
        Number of the run in which it was measured.
    """

    stage: str
    changed: tuple[str, ...] = ()
    is_first: bool = False
    last_ms: float | None = None
    run: int | None = None
