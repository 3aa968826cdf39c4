"""Makes the record of a memory plan from what ORT reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ortlab.memory import formulas, insight
from ortlab.memory.dialects import sentence
from ortlab.memory.plan import MemoryPlan, PlanRow, by_saving, without_count
from ortlab.records.density import LABEL

if TYPE_CHECKING:
    from ortlab.memory.recompute import LevelSet
    from ortlab.records.runs import Run


def read_plan(  # noqa: PLR0913 - each is one fact of the report, given by name
    savings: Mapping[str, tuple[str, int]],
    symbols: Mapping[str, int],
    report: str,
    *,
    memory_level: int = 0,
    enabled: tuple[str, ...] = (),
    applied: Mapping[str, int] | None = None,
    label_totals: Mapping[str, str] | None = None,
    layers: Mapping[str, int] | None = None,
    level_set: LevelSet | None = None,
    probe: str = "1:0",
) -> MemoryPlan:
    """Make the record of a memory plan from what ORT reports.

    `savings` holds by configuration the raw symbolic sum (one term per occurrence) and the number of occurrences, as
    `get_serialized_ortmodule_memory_stat` returns them. `report` is ORT's MemoryInsight text; what it counts
    goes before `savings` (see `ortlab.memory.insight`). `enabled` is what the lab's options ask for now; at a memory
    level without it, every plan of the level's strategies is wanted. `applied` and `layers` are by plan without its
    count, "Gelu+:1": in how many places the session that runs applies it, None where nobody has looked, and in how many
    layers of the model its occurrences are.
    """
    asked = {
        without_count(part): int(part.rsplit(":", 1)[1])
        for config in enabled
        for part in config.split(",")
        if part.split(":")[1] != "0"  # strategy 0 switches a plan off
    }
    table = insight.read(report)
    counted, exclusive = table.savings(), table.exclusive()
    rows = []
    for config, (raw, frequency) in savings.items():
        every_output, places = counted.get(config, ("", 0))
        formula = formulas.read(every_output if places == frequency else raw)
        symbolic = formulas.read(formula.simplified)
        parts = config.split(",")
        strategy = max(int(part.split(":")[1]) for part in parts)
        by_level = not enabled and 0 < strategy <= memory_level
        wanted = by_level or all(asked.get(without_count(part), 0) for part in parts)
        in_layers = (layers or {}).get(without_count(parts[0])) if len(parts) == 1 else None
        cluster = ",".join(part.split(":")[0] for part in parts)
        requested = -1 if by_level else min(asked.get(without_count(part), -1) for part in parts)
        acting = min((applied or {}).get(without_count(part), 0) for part in parts)
        rows.append(
            PlanRow(
                config,
                cluster,
                strategy,
                frequency,
                symbolic.text,
                symbolic.value(symbols),
                wanted,
                sentence(cluster, strategy, frequency, in_layers),
                excludes=exclusive.get(config, ()),
                requested=requested if wanted else None,
                applied=acting if wanted and applied is not None else None,
                unresolved=tuple(name for name in symbolic.symbols if name not in symbols),
                layers=in_layers,
            )
        )
    rows.sort(key=by_saving)
    there = {without_count(part) for config in savings for part in config.split(",")}
    there |= {name for name, count in (applied or {}).items() if count}
    absent = tuple(f"{name}:{count}" for name, count in asked.items() if count and name not in there)
    return MemoryPlan(
        tuple(rows),
        dict(symbols),
        memory_level,
        report,
        probe=probe,
        absent=() if memory_level else absent,
        label_totals=dict(label_totals or {}),
        level_set=level_set,
    )


def with_measured_density(plan: MemoryPlan, runs: Iterable[Run]) -> MemoryPlan:
    """Evaluate what depends on a count of labels that the first batch does not tell, with the density of the last run.

    Only runs with `print_input_density` know how many labels are not ignored; without one the plan stays as it is.
    """
    counts = [name for name in plan.label_totals if name not in plan.symbols]
    measured = [(run.number, mean) for run in runs for row, mean in run.density.means() if row.kind == LABEL]
    if not counts or not measured:
        return plan
    number, density = measured[-1]
    found = plan.at(label_density=density)
    words = f"label density {density:.1%}, measured in run {number}"
    return replace(found, origins={**found.origins, **dict.fromkeys(counts, words)})
