"""The recompute plans that ORT offers for a model, with the savings it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ortlab.memory import insight

if TYPE_CHECKING:
    import pandas as pd

STRATEGIES = {0: "keep", 1: "recompute", 2: "recompute with compromise"}
"""Names of the strategies in `<cluster>:<strategy>:<count>` (row F13)."""


@dataclass(frozen=True)
class PlanRow:
    """One way to keep less for backward.

    Attributes
    ----------
    config
        What `Options.memory_plan` takes: "Gelu+:1:-1"; count -1 means every occurrence.
    cluster
        The operators that would be recomputed together, ending in "+".
    strategy
        1 recompute; 2 recompute with compromise, which saves a part of the size only.
    frequency
        Occurrences of the cluster in the graph.
    saving_symbolic
        Predicted saving in bytes, in terms of the input dimensions.
    saving_bytes
        The same for the first batch's dimensions, in bytes; predicted by ORT, not measured. None where a symbol has
        no value.
    enabled
        Whether the lab's present options apply it.
    sentence
        What it does, in words.
    """

    config: str
    cluster: str
    strategy: int
    frequency: int
    saving_symbolic: str
    saving_bytes: float | None
    enabled: bool
    sentence: str


@dataclass(frozen=True)
class MemoryPlan:
    """Every recompute plan over a model's training graph, largest predicted saving first.

    The savings overlap where clusters share operators, and freed memory can lie away from the peak, so the sum of
    the rows is no prediction for all of them together. Measure: enable, rerun, compare.

    Attributes
    ----------
    rows
        The plans.
    symbols
        Values of the input dimensions that the savings were evaluated with, those of the first batch.
    memory_level
        The lab's memory level; at 1 and 2 it chooses the plans itself.
    report
        ORT's own MemoryInsight text.
    """

    rows: tuple[PlanRow, ...]
    symbols: Mapping[str, int]
    memory_level: int
    report: str

    @property
    def enabled(self) -> tuple[str, ...]:
        """Configurations of the plans that the present options apply."""
        return tuple(row.config for row in self.rows if row.enabled)

    def table(self) -> pd.DataFrame:
        """One row per plan; savings in bytes, predicted by ORT."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "enabled": row.enabled,
                    "plan": row.config,
                    "occurrences": row.frequency,
                    "predicted saving [bytes]": row.saving_bytes,
                    "formula": row.saving_symbolic,
                    "what it does": row.sentence,
                }
                for row in self.rows
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def read_plan(
    savings: Mapping[str, tuple[str, int]],
    symbols: Mapping[str, int],
    report: str,
    *,
    memory_level: int = 0,
    enabled: tuple[str, ...] = (),
) -> MemoryPlan:
    """Make the record from what ORT reports.

    Parameters
    ----------
    savings
        Configuration to the raw symbolic sum (one term per occurrence) and the number of occurrences, as
        `get_serialized_ortmodule_memory_stat` returns them (row F9).
    symbols
        Values of the symbolic dimensions.
    report
        ORT's MemoryInsight text; what it counts goes before `savings` (see `ortlab.memory.insight`).
    memory_level, enabled
        What the lab's options apply now.
    """
    rows = []
    wanted = {_without_count(part) for config in enabled for part in config.split(",")}
    counted = insight.savings(report)
    for config, (raw, frequency) in savings.items():
        every_output, places = counted.get(config, ("", 0))
        symbolic, value = evaluate(every_output if places == frequency else raw, symbols)
        strategy = max(int(part.split(":")[1]) for part in config.split(","))
        applied = (memory_level > 0 and strategy <= memory_level) or all(
            _without_count(part) in wanted for part in config.split(",")
        )
        cluster = ",".join(part.split(":")[0] for part in config.split(","))
        sentence = _sentence(cluster, strategy, frequency)
        rows.append(PlanRow(config, cluster, strategy, frequency, symbolic, value, applied, sentence))
    rows.sort(key=lambda row: (-(row.saving_bytes or 0.0), row.config))
    return MemoryPlan(tuple(rows), dict(symbols), memory_level, report)


def evaluate(expression: str, symbols: Mapping[str, int]) -> tuple[str, float | None]:
    """Simplify a symbolic size and evaluate it.

    Parameters
    ----------
    expression
        Arithmetic over symbols, such as "((input_ids_dim0)*(128)) * 4 * 1.000000".
    symbols
        Values by name.

    Returns
    -------
    tuple of str and (float or None)
        The simplified formula, and its value in bytes; None where a symbol has no value (row T16).
    """
    import sympy

    names = {name: sympy.Symbol(name, positive=True, integer=True) for name in symbols}
    parsed = sympy.sympify(expression, locals=names, rational=True)
    simplified = sympy.simplify(parsed)
    value = simplified.subs({names[name]: size for name, size in symbols.items()})
    return str(simplified), float(value) if value.is_number else None


def _sentence(cluster: str, strategy: int, frequency: int) -> str:
    operators = cluster.rstrip("+").replace("+", " -> ")
    what = "1 place" if frequency == 1 else f"{frequency} places"
    partly = ", where that saves a part of it" if strategy > 1 else ""
    return f"Recompute {operators} in {what} during backward instead of keeping the result{partly}."


def _without_count(part: str) -> str:
    return part.rsplit(":", 1)[0]
