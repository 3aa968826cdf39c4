"""Records for the renderers: real `Run`s, with round numbers that a reader can add up in the head."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ortlab.options.options import Options
from ortlab.records.comparison import Comparison, compare
from ortlab.records.runs import Initialization, PeakMemory, Run, Step

MIB = 1 << 20


def make_run(number: int, engine: str = "ort", *, executed_by: str = "", step_ms: float = 10, **rest) -> Run:
    """Make a run of five steps whose passes are 40 and 45 percent of `step_ms`; the optimizer takes 1 ms."""
    steps = tuple(
        Step(
            total_ms=step_ms + 0.1 * (position % 3),
            forward_ms=0.4 * step_ms,
            backward_ms=0.45 * step_ms,
            optimizer_ms=1.0 + 0.001 * position,
            page_faults=3 * position,
            swapped_pages=0,
            initialization_ms=800.0 if position == 0 and engine == "ort" else 0.0,
            loss=7.0 - 0.5 * position,
            executed_by=executed_by or engine,
        )
        for position in range(5)
    )
    start_up = Initialization("export", 500.0, 20.0, 3.0, 130.0, 120.0, 800.0)
    values = {
        "number": number,
        "engine": engine,
        "options": Options(),
        "steps": steps,
        "initialization": start_up if engine == "ort" else None,
        "memory": PeakMemory(700 * MIB, (900 + number) * MIB, "resident set"),
        "fallback_reason": "",
        "device": "cpu",
        "start_digest": "a" * 64,
        "data_digest": "b" * 64,
        "seed": 7,
        "started_at": "2025-01-01T10:00:00+00:00",
        "graph_digests": {"exported": "c" * 64} if engine == "ort" else {},
        "versions": {"torch": "2.13.0"},
        "step_memory_bytes": (100 + 10 * number) * MIB,
        "others_cores": 0.04,
    }
    return Run(**{**values, **rest})


@pytest.fixture
def new_run() -> Callable[..., Run]:
    return make_run


@pytest.fixture
def fallback_run() -> Run:
    reason = "Unsupported operator\n<script>alert(1)</script>"
    return make_run(4, executed_by="fallback", fallback_reason=reason)


@pytest.fixture
def comparison(fallback_run: Run) -> Comparison:
    return compare(
        [
            make_run(1, "eager", step_ms=12.0),
            make_run(2),
            make_run(3, step_ms=11.0, options=Options(memory_level=1)),
            fallback_run,
        ]
    )
