"""Tables of what a run counts and reads only on request: the density of its inputs, and memory by phase."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from ortlab import units
from ortlab.records.density import EMBED
from ortlab.records.memory_phases import PHASES
from ortlab.render.page import Column, Table, row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ortlab.records.density import Density
    from ortlab.records.memory_phases import MemoryPhase

_INPUT = (
    Column("input", meaning="name of the model's argument"),
    Column("holds", meaning="tokens that an embedding looks up, or labels of a cross entropy"),
    Column("left out", numeric=True, meaning="the padding token, or the label that is ignored"),
    Column("density", numeric=True, meaning="counted: share that is not left out, over all steps of the run"),
    Column("last step", numeric=True, meaning="counted: how many are not left out, and how many there are"),
    Column("per sample", numeric=True, meaning="counted in the last step: fewest and most of one sample"),
)


def density_table(density: Density) -> Table:
    """List each input once: its mean density, and the counts of the last step."""
    rows = []
    for last, mean in density.means():
        samples = last.valid_per_sample
        rows.append(
            row(
                last.name,
                "tokens" if last.kind == EMBED else "labels",
                str(last.pad_index),
                units.percent(mean),
                f"{units.count(last.valid)} of {units.count(last.total)}",
                f"{units.count(min(samples))} to {units.count(max(samples))}" if samples else "-",
            )
        )
    return Table("Density of the inputs: counted, all steps in run.density.table()", _INPUT, tuple(rows))


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
