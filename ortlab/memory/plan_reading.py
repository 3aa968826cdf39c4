"""Makes the record of a memory plan from what ORT reports, and says in words what each plan does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Final

from ortlab.memory import formulas, insight
from ortlab.memory.plan import MemoryPlan, PlanRow, by_saving, without_count
from ortlab.memory.symbolic_sizes import summed
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
    `get_serialized_ortmodule_memory_stat` returns them (row F9). `report` is ORT's MemoryInsight text; what it counts
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


def merged(plans: Mapping[str, MemoryPlan], missing: tuple[str, ...] = ()) -> MemoryPlan:
    """Put together the plans of a model's parts, by path: a configuration acts on all parts that have it.

    `missing` names the parts that have no plan yet.
    """
    rows: dict[str, list[tuple[str, PlanRow]]] = {}
    for path, plan in plans.items():
        for row in plan.rows:
            rows.setdefault(row.config, []).append((path, row))
    together = sorted((_together(places) for places in rows.values()), key=by_saving)
    symbols: dict[str, int] = {}
    origins: dict[str, str] = {}
    for path, plan in plans.items():
        for name, size in plan.symbols.items():
            alike = all(other.symbols.get(name, size) == size for other in plans.values())
            shown = name if alike else f"{path}: {name}"
            symbols[shown] = size
            if name in plan.origins:
                origins[shown] = plan.origins[name]
    report = "\n\n".join(f"{path}\n{plan.report}" for path, plan in plans.items() if plan.report)
    several = list(plans.values())
    sets = [one.level_set for one in several if one.level_set]
    absent = [one for one in several[0].absent if all(one in other.absent for other in several)]
    return MemoryPlan(
        tuple(together),
        symbols,
        max(plan.memory_level for plan in several),
        report,
        missing,
        probe=several[0].probe,
        absent=tuple(absent),
        origins=origins,
        of_parts=dict(plans),
        level_set=reduce(add, sets) if sets else None,
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


def _together(places: list[tuple[str, PlanRow]]) -> PlanRow:
    rows = [row for _, row in places]
    frequency = sum(row.frequency for row in rows)
    layers = summed(row.layers for row in rows)
    return replace(
        rows[0],
        frequency=frequency,
        saving_symbolic="; ".join(f"{path}: {row.saving_symbolic}" for path, row in places),
        saving_bytes=summed(row.saving_bytes for row in rows),
        enabled=any(row.enabled for row in rows),
        sentence=sentence(rows[0].cluster, rows[0].strategy, frequency, layers),
        parts=tuple(path for path, _ in places),
        excludes=tuple(dict.fromkeys(other for row in rows for other in row.excludes)),
        applied=summed(row.applied for row in rows),
        unresolved=tuple(dict.fromkeys(name for row in rows for name in row.unresolved)),
        layers=layers,
    )


_WORDS: Final = {
    "Gelu": "GELU",
    "FastGelu": "GELU",
    "QuickGelu": "GELU",
    "BiasGelu": "GELU and its bias",
    "Relu": "ReLU",
    "Dropout": "dropout",
    "BitmaskDropout": "dropout",
    "BiasDropout": "dropout and a bias",
    "LayerNormalization": "layer normalisation",
    "SimplifiedLayerNormalization": "RMS normalisation",
    "SkipLayerNormalization": "layer normalisation",
    "Softmax": "softmax",
    "BiasSoftmax": "softmax and its bias",
    "BiasSoftmaxDropout": "softmax and dropout",
    "MatMul": "matmul",
    "FusedMatMul": "matmul",
    "Gemm": "matmul",
    "Add": "addition",
    "Sub": "subtraction",
    "Mul": "multiplication",
    "Div": "division",
    "Pow": "power",
    "Sqrt": "square root",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Erf": "error function",
    "Neg": "negation",
    "Cast": "cast",
    "Where": "where",
    "Gather": "gather",
    "Concat": "concat",
    "Slice": "slice",
    "Split": "split",
    "Expand": "expand",
    "Tile": "tile",
    "Reshape": "reshape",
    "Transpose": "transpose",
    "Squeeze": "reshape",
    "Unsqueeze": "reshape",
}
"""Operators in words; others keep ORT's name."""


def operators(cluster: str) -> list[str]:
    """Split a cluster, or several with commas, into its operators: "Where+Dropout+" holds two."""
    return [name for name in re.split(r"[+,]", cluster) if name]


def sentence(cluster: str, strategy: int, frequency: int, layers: int | None = None) -> str:
    """Say what a plan does in `frequency` places, which are in `layers` layers of the model.

    Strategy 1 recomputes, 2 recomputes with compromise. `layers` is None where that is not known.
    """
    words: list[str] = []
    for name in operators(cluster):
        word = _WORDS.get(name, name)
        if word not in words[-1:]:
            words.append(word)
    what = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
    where = _counted(frequency, "place")
    if layers:
        where = (
            _counted(layers, "layer") if layers == frequency else f"{where} of {_counted(layers, 'layer')}"
        )
    partly = "; that saves a part of it" if strategy > 1 else ""
    return f"Recompute {what} in {where} instead of keeping it{partly}."


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
