"""Which plans of a table are chosen: in how many places, what they leave out, and what they save together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortlab.memory.plan import MemoryPlan, PlanRow


_SUMMED: Final = ("saving_bytes", "peak_saving_bytes", "cost_ms")
"""Numbers of a row that are added up; measured ones are not, since nobody has measured the set."""


@dataclass(frozen=True)
class Totals:
    """The sums of the chosen plans' rows; the rows overlap, so that each sum is an upper bound."""

    plans: int  # how many are chosen
    # Predicted by ORT; None where no chosen row has the number, as for the next two.
    saving_bytes: float | None
    peak_saving_bytes: float | None  # off the peak, by simulation
    cost_ms: float | None  # predicted
    # Configurations of chosen rows that lack a number which others have, and so are not in its sum.
    unknown: tuple[str, ...] = ()

    @property
    def bytes_per_ms(self) -> float | None:
        """Bytes off the peak for each ms, both predicted by simulation; None where nothing is said to cost time."""
        if not self.cost_ms or self.peak_saving_bytes is None:
            return None
        return self.peak_saving_bytes / self.cost_ms


@dataclass(frozen=True)
class Choice:
    """The plans that a `memory_plan` chooses from a table."""

    plan: MemoryPlan  # the table
    chosen: tuple[str, ...]  # what `Options.memory_plan` holds; plans of other models stay in it

    def count(self, row: PlanRow) -> int:
        """Return in how many places a plan is chosen: 0 where it is not.

        A configuration of several plans (`A+:1:-1,B+:1:-1`) is chosen where all of them are, and in as many places
        as the least of them.
        """
        counts = {_without_count(one): int(one.rsplit(":", 1)[1]) for one in self.chosen}
        parts = [_without_count(one) for one in row.config.split(",")]
        if not all(part in counts for part in parts):
            return 0
        places = [counts[part] for part in parts]
        return min(row.frequency if count < 0 else min(count, row.frequency) for count in places)

    def as_chosen(self, row: PlanRow) -> PlanRow:
        """Return a row with what its chosen places save and cost, in proportion, as if all places were alike.

        A plan that is not chosen, and one in all its places, is returned as it is. Measured numbers stay.
        """
        count = self.count(row)
        if count in (0, row.frequency):
            return row
        part = count / row.frequency
        return replace(
            row,
            saving_bytes=None if row.saving_bytes is None else row.saving_bytes * part,
            peak_saving_bytes=None if row.peak_saving_bytes is None else row.peak_saving_bytes * part,
            cost_ms=None if row.cost_ms is None else row.cost_ms * part,
        )

    def adding(self, config: str, count: int = -1) -> tuple[str, ...]:
        """Return the `memory_plan` that also chooses a plan, and leaves out those that cannot act beside it.

        `count` is in how many of its places; -1, or as many as it has, for all. Raises KeyError where no row has this
        configuration.
        """
        row = self._row(config)
        wanted = -1 if count >= row.frequency else count
        parts = config.split(",")
        clusters = {_cluster(part) for part in parts}
        own = {_without_count(part) for part in parts}
        beaten = {
            _without_count(part)
            for other in self.plan.rows
            if other.config in row.excludes or row.config in other.excludes
            for part in other.config.split(",")
        } - own
        kept = [
            one for one in self.chosen if _cluster(one) not in clusters and _without_count(one) not in beaten
        ]
        return (*kept, *(f"{_without_count(part)}:{wanted}" for part in parts))

    def removing(self, config: str) -> tuple[str, ...]:
        """Return the `memory_plan` without a plan."""
        clusters = {_cluster(part) for part in config.split(",")}
        return tuple(one for one in self.chosen if _cluster(one) not in clusters)

    @property
    def totals(self) -> Totals:
        """What the chosen plans come to; a plan in a part of its places counts in proportion."""
        rows = [self.as_chosen(row) for row in self.plan.rows if self.count(row)]
        sums: dict[str, float | None] = {}
        unknown: set[str] = set()
        for name in _SUMMED:
            known = {row.config: value for row in rows if (value := getattr(row, name)) is not None}
            sums[name] = sum(known.values()) if known else None
            unknown |= {row.config for row in rows if known and row.config not in known}
        return Totals(len(rows), **sums, unknown=tuple(row.config for row in rows if row.config in unknown))

    def _row(self, config: str) -> PlanRow:
        return {row.config: row for row in self.plan.rows}[config]


def _without_count(part: str) -> str:
    return part.rsplit(":", 1)[0]


def _cluster(part: str) -> str:
    return part.split(":", 1)[0]
