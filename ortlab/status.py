"""What a lab is doing now: which engine, who executed the last call, what the next call will rebuild."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """The state of a lab, as its badge shows it.

    Attributes
    ----------
    engine
        The engine that was asked for: "ort", "eager" or "compile".
    state
        "not built", "rebuild pending", "ready", "fallback" or "unwrapped".
    executed_by
        Who executed the last forward: "ort", "eager", "compile", "fallback"; empty before the first.
    reason
        Why it fell back, or why the last build was needed.
    pending_stage
        What the next call redoes first: "export", "graph", "session", or "" for nothing.
    """

    engine: str
    state: str
    executed_by: str
    reason: str
    pending_stage: str
