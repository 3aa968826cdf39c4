"""The pages of measured memory: a step's breakdown and phases, and the readings of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.memory.measured import RESIDENT
from ortlab.records.memory_phases import PHASES, MemoryPhases
from ortlab.render.page import Cell, Column, Drawing, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

    from ortlab.memory.measured import MemoryMeasurement, PhasePeak

STEPS_SHOWN: Final = 8
"""Steps of a run that a page lists: the first ones and the last."""

_PIECES = (
    Column("piece"),
    Column("size", numeric=True),
    Column("share", numeric=True, meaning="part of the peak"),
    Column("where it comes from"),
)
_PHASES = (
    Column("phase"),
    Column("before", numeric=True, meaning="measured: above the start of the step, where the phase began"),
    Column("peak", numeric=True, meaning="measured: above the start of the step, highest in the phase"),
    Column("after", numeric=True, meaning="measured: above the start of the step, at the phase's end"),
)


def measurement_page(measured: MemoryMeasurement) -> Page:
    """Say what a step was measured to need, and what its peak is made of."""
    from ortlab.render.memory_plot import measurement_plot
    from ortlab.render.run_pages import engine_words

    step = measured.step
    rows = [
        row(
            piece.name,
            units.size(piece.number_of_bytes),
            units.percent(piece.number_of_bytes / measured.peak_bytes),
            Cell(piece.source, Mark.QUIET),
        )
        for piece in measured.breakdown()
    ]
    rows.append(
        row(
            "together: the peak",
            units.size(measured.peak_bytes),
            units.percent(1.0),
            Cell("measured", Mark.QUIET),
        )
    )
    return Page(
        f"Memory of a step on {engine_words(measured.engine)}: {units.size(measured.rise_bytes)} above its start",
        (
            Note(
                f"Peak {units.size(measured.peak_bytes)}, in the {_phase_words(step.highest)}; "
                f"start {units.size(measured.start_bytes)}."
            ),
            Table(f"The peak, taken apart ({measured.label})", _PIECES, tuple(rows)),
            Table("Phases, above the start of the step", _PHASES, tuple(_phase_rows(measured))),
            _drawing(
                "Memory of the phases above the start of the step; ortlab.plot(measured) draws it.",
                lambda: measurement_plot(measured),
            ),
            *_activations(measured),
            Note(_sources(measured), Mark.QUIET),
        ),
    )


def phases_page(phases: MemoryPhases) -> Page:
    """List memory at the points of the steps, and how it goes on over them."""
    from ortlab.render.memory_plot import phases_plot

    title = f"Memory by phase, {phases.source}" if phases.source else "Memory by phase"
    if not phases.readings:
        note = "Nothing was read. Switch it on and run the steps again: %ort_rerun print_memory_stats=true."
        return Page(title, (Note(note, Mark.QUIET),))
    return Page(
        title,
        (
            steps_table(phases),
            _drawing(
                "Memory at the points of each step; ortlab.plot(phases) draws it.",
                lambda: phases_plot(phases),
            ),
            Note(
                f"Measured, in {units.count(len(phases.steps))} steps: the first ten, then powers of two. "
                + (
                    "Resident set of the whole process, with what allocators keep for reuse. "
                    "%ort_memory measures a step without that."
                    if "resident" in phases.names
                    else "As PyTorch's CUDA allocator reports it."
                ),
                Mark.QUIET,
            ),
        ),
    )


def live_page(phases: MemoryPhases) -> Page:
    """List the last step that was read, for the panel."""
    last = phases.steps[-1]
    readings = tuple(reading for reading in phases.readings if reading.step == last)
    return Page("", (steps_table(MemoryPhases(readings, phases.source)),))


def steps_table(phases: MemoryPhases) -> Table:
    """List what there is now at each point, one row per step; then the highest, and what is cached."""
    steps = phases.steps
    shown = steps if len(steps) <= STEPS_SHOWN else (*steps[: STEPS_SHOWN - 1], steps[-1])
    now, *others = [name for name in phases.names if not name.startswith("max ")] or list(phases.names)
    highest = [name for name in phases.names if name.startswith("max ")]
    columns = (
        Column("step", numeric=True),
        *(
            Column(f"{point.replace('_', ' ')}", numeric=True, meaning=f"measured: {now} at this point")
            for point in PHASES
        ),
        *(
            Column(name, numeric=True, meaning=f"measured: {name} at the end of the backward")
            for name in (*highest, *others)
        ),
    )
    rows = []
    for step in shown:
        sizes = {reading.phase: reading.sizes for reading in phases.readings if reading.step == step}
        last = sizes.get(PHASES[-1]) or next(reversed(sizes.values()))
        rows.append(
            row(
                units.count(step),
                *(units.size(sizes[point].get(now)) if point in sizes else units.MISSING for point in PHASES),
                *(units.size(last.get(name)) for name in (*highest, *others)),
            )
        )
    hidden = len(steps) - len(shown)
    left_out = f"{units.count(hidden)} more steps: phases.table() has them." if hidden else ""
    where = f", {phases.source}" if phases.source else ""
    return Table(f"{now} memory{where}".capitalize(), columns, tuple(rows), left_out)


def _phase_rows(measured: MemoryMeasurement) -> list[tuple[Cell, ...]]:
    start = measured.start_bytes
    return [
        row(
            phase.phase,
            units.size(phase.before_bytes - start),
            Cell(
                units.size(phase.peak_bytes - start),
                Mark.WARN if phase is measured.step.highest else Mark.PLAIN,
            ),
            units.size(phase.after_bytes - start),
        )
        for phase in measured.step.phases
    ]


def _phase_words(phase: PhasePeak) -> str:
    return "rest of the step" if phase.phase == "the rest" else phase.phase


def _activations(measured: MemoryMeasurement) -> tuple[Note, ...]:
    named, kept = measured.named_activations_bytes, measured.saved_bytes
    if named is None or kept is None:
        return ()
    return (
        Note(
            f"The forward left {units.size(kept)} behind (measured). Of that, lab.activations() names "
            f"{units.size(named)} (worked out from shapes)."
        ),
    )


def _sources(measured: MemoryMeasurement) -> str:
    count = len(measured.steps)
    apart = "one step has no spread."
    if count > 1:
        median = units.size(measured.typical_rise_bytes)
        apart = f"the steps lie {units.size(measured.spread_bytes)} apart (median {median})."
    lines = [
        (
            f"Measured on {measured.device} in {units.count(count)} {'step' if count == 1 else 'steps'} after "
            f"{units.count(measured.warm_up)} to warm up. Shown is the highest; {apart}"
        ),
        (
            f"Gradients of the whole step: {units.size(measured.step.gradient_bytes)} (computed); those in the table "
            "were there when the phase of the peak began."
        ),
        (
            "Libraries and the rest is what was there before the step besides the tensors above: Python, other "
            "models, and the copies that ortlab puts back."
        ),
    ]
    if measured.kind == RESIDENT:
        arena = " and ONNX Runtime's arena was off" if measured.engine == "ort" else ""
        lines.append(
            f"Large buffers were mapped one by one{arena}, so that the resident set follows what is alive. With memory "
            "kept for reuse a process holds more."
        )
    if measured.step.cuda:
        sizes = ", ".join(f"{name} {units.size(size)}" for name, size in measured.step.cuda.items())
        lines.append(f"The allocator at the end of the step: {sizes}.")
    return "\n".join(lines)


def _drawing(what: str, draw: Callable[[], Figure]) -> Drawing:
    def svg() -> str:
        from ortlab.render.plots import svg as inline

        return inline(draw(), what)

    return Drawing(what, svg)
