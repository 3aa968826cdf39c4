"""The pages and figures of measured memory: a step's breakdown and phases, the readings of a run, a GPU's blocks."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.memory.device_snapshot import block_words
from ortlab.memory.measured import RESIDENT
from ortlab.records.memory_phases import PHASES, MemoryPhases
from ortlab.render.execution_words import engine_words
from ortlab.render.page import Block, Cell, Column, Mark, Note, Page, Table, left_out, row
from ortlab.render.plots import COLOURS, INK, MIB, drawing, dress, key, new_figure, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from ortlab.memory.device_snapshot import MemorySnapshot, NamedBlock
    from ortlab.memory.measured import MemoryMeasurement, PhasePeak
    from ortlab.records.memory_phases import MemoryPhase

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
            drawing(
                "Memory of the phases above the start of the step; ortlab.plot(measured) draws it.",
                lambda: measurement_plot(measured),
            ),
            *_activations(measured),
            Note(_sources(measured), Mark.QUIET),
        ),
    )


def phases_page(phases: MemoryPhases) -> Page:
    """List memory at the points of the steps, and how it goes on over them."""
    title = f"Memory by phase, {phases.source}" if phases.source else "Memory by phase"
    if not phases.readings:
        note = "Nothing was read. Switch it on and run the steps again: %ort_rerun print_memory_stats=true."
        return Page(title, (Note(note, Mark.QUIET),))
    return Page(
        title,
        (
            steps_table(phases),
            drawing(
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
    rest = left_out(hidden, "more steps: phases.table() has them.")
    where = f", {phases.source}" if phases.source else ""
    return Table(f"{now} memory{where}".capitalize(), columns, tuple(rows), rest)


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
    left = f"The forward left {units.size(kept)} behind (measured)."
    names = f"lab.activations() names {units.size(named)} (worked out from shapes)"
    if named <= kept:
        return (Note(f"{left} Of that, {names}."),)
    # A page is told once, however many small buffers come to lie in it.
    return (Note(f"{left} {names}: more, since buffers also lie in memory that the process had before."),)


def _sources(measured: MemoryMeasurement) -> str:
    count = len(measured.steps)
    apart = "one step has no spread."
    if count > 1:
        median = units.size(measured.typical_rise_bytes)
        apart = f"the steps lie {units.size(measured.spread_bytes)} apart (median {median})."
    lines = [
        (
            f"Measured on {measured.device} in {units.many(measured.steps, 'step')} after "
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


def phases_table(phases: Sequence[MemoryPhase]) -> Table:
    """List the points of a step: the memory there in the first step, and the median of the later ones."""
    names = list(phases[0].sizes)
    first = min(phase.step for phase in phases)
    columns = [Column("point")]
    columns += [
        Column(name, numeric=True, meaning=f"measured: {name} memory in the first step") for name in names
    ]
    columns += [
        Column(f"{name}, later", numeric=True, meaning="measured: median of the later steps that were read")
        for name in names
    ]
    rows = []
    for point in PHASES:
        taken = [phase for phase in phases if phase.phase == point]
        earlier = [phase.sizes for phase in taken if phase.step == first]
        later = [phase.sizes for phase in taken if phase.step != first]
        sizes = [units.size(_median(part, name)) for part in (earlier, later) for name in names]
        rows.append(row(point.replace("_", " "), *sizes))
    return Table("Memory by phase: measured, all in run.phases", tuple(columns), tuple(rows))


def _median(sizes: list[dict[str, int]], name: str) -> float | None:
    return statistics.median(one[name] for one in sizes) if sizes else None


# ---- the figures ----------------------------------------------------------------------------------------------------


_LEVEL, _PEAK = COLOURS[4], COLOURS[5]
_MARKS: Final = ("o", "s", "D", "^")


def measurement_plot(measured: MemoryMeasurement) -> Figure:
    """Draw what each phase of a step takes above the start of the step: its level at the end, and its peak.

    Drawn is the step with the highest rise.
    """
    phases = measured.step.phases
    start = measured.start_bytes
    figure = new_figure(1.2 + 0.34 * len(phases))
    axes = figure.add_subplot()
    names = [phase.phase for phase in phases]
    peaks = [(phase.peak_bytes - start) / MIB for phase in phases]
    levels = [(phase.after_bytes - start) / MIB for phase in phases]
    axes.barh(names, peaks, height=0.6, color=_PEAK, label="peak in the phase")
    axes.barh(names, levels, height=0.28, color=_LEVEL, label="level at its end")
    for name, peak in zip(names, peaks, strict=True):
        axes.annotate(
            units.size(peak * MIB),
            (max(peak, 0.0), name),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.axvline(0.0, color=INK, linewidth=0.8)
    dress(axes, f"Above the start of the step, measured ({measured.label})", "MiB", "")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    key(axes)
    return figure


def phases_plot(phases: MemoryPhases) -> Figure:
    """Draw memory at the points of each step, and the highest so far."""
    figure = new_figure(2.8)
    axes = figure.add_subplot()
    if not phases.readings:
        dress(axes, "Memory by phase", "step", "MiB")
        say(axes, "Nothing was read.")
        return figure
    now = next((name for name in phases.names if not name.startswith("max ")), phases.names[0])
    places = {step: place for place, step in enumerate(phases.steps)}
    for point, colour, mark in zip(PHASES, COLOURS, _MARKS, strict=False):
        taken = [reading for reading in phases.at(point) if now in reading.sizes]
        axes.plot(
            [places[reading.step] for reading in taken],
            [reading.sizes[now] / MIB for reading in taken],
            label=point.replace("_", " "),
            color=colour,
            # Two points of a step are often at one level; open marks of two kinds let both be seen.
            marker=mark,
            markerfacecolor="none",
            linestyle=("-", "--", "-.", ":")[PHASES.index(point)],
            linewidth=1.5,
        )
    highest = f"max {now}"
    taken = [reading for reading in phases.at(PHASES[-1]) if highest in reading.sizes]
    if taken:
        axes.plot(
            [places[reading.step] for reading in taken],
            [reading.sizes[highest] / MIB for reading in taken],
            label=highest,
            color=INK,
            linewidth=1,
            drawstyle="steps-post",
        )
    axes.set_xticks(list(places.values()), [str(step) for step in places])
    dress(axes, f"Memory at the points of a step, measured ({now})", "step", "MiB")
    key(axes)
    return figure


# ---- the blocks of a GPU --------------------------------------------------------------------------------------------


BLOCKS_SHOWN: Final = 40
_SUMS: Final = (
    Column("asked for by"),
    Column(
        "what is in it is known by",
        meaning="address: a tensor's own; size: as an activation's, from its shape",
    ),
    Column("blocks", numeric=True),
    Column("bytes", numeric=True, meaning="as asked for; the allocator rounds up"),
    Column("share", numeric=True),
)

_BLOCKS: Final = (
    Column("what is in it", whole=True),
    Column("known by"),
    Column("bytes", numeric=True, meaning="as asked for; the allocator rounds up"),
    Column("asked for by"),
    Column("address"),
)


def snapshot_page(found: MemorySnapshot) -> Page:
    """Add the blocks up, and list the largest."""
    total = found.total_bytes
    sums = tuple(
        row(
            maker,
            known_by or Cell("unknown", Mark.WARN),
            units.count(count),
            units.size(size),
            units.percent(size / total if total else 0.0),
        )
        for (maker, known_by), (count, size) in found.bytes_by().items()
    )
    shown = found.blocks[:BLOCKS_SHOWN]
    hidden = len(found.blocks) - len(shown)
    blocks: list[Block] = [
        Table("Blocks in use when the forward had ended", _SUMS, sums),
        Table(
            "The largest blocks",
            _BLOCKS,
            tuple(_block_row(one) for one in shown),
            left_out(hidden, "more: snapshot.table() has all."),
        ),
    ]
    if found.unsized:
        blocks.append(
            Note(
                f"{units.count(found.unsized)} kept activations have no known size, so that they are among the unknown "
                "blocks.",
                Mark.WARN,
            )
        )
    blocks.append(Note(_BLOCKS_KNOWN, Mark.QUIET))
    return Page(
        f"Memory of {found.device} at the end of a forward on {engine_words(found.engine)}: {units.size(total)} in "
        f"{units.count(len(found.blocks))} blocks",
        tuple(blocks),
    )


def _block_row(block: NamedBlock) -> tuple[Cell, ...]:
    words = block_words(block)
    return row(
        words if block.names else Cell(words, Mark.WARN),
        block.known_by,
        units.size(block.requested),
        block.maker,
        f"{block.address:#x}",
    )


_BLOCKS_KNOWN: Final = (
    "Blocks, sizes and stacks are torch's. An address tells parameters, gradients, the batch and what an optimizer "
    "keeps exactly; the copies with which everything is put back after the step are among the unknown. "
    "ONNX Runtime does not say what it asks for: there a name is the activation of that size, and of several of one "
    "size the one whose turn it was; what may have been allocated in either order is one of several.\n"
    "snapshot.save('step.pickle') writes the whole step for https://pytorch.org/memory_viz, with these names."
)
