"""The recompute plans that ORT offers for a model, with the savings it predicts, and what some of them come to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import OptionError
from ortlab.memory import dialects, formulas
from ortlab.memory.dialects import sentence
from ortlab.memory.recompute import LevelSet  # noqa: TC001 - asked for when a record is read
from ortlab.memory.symbolic_sizes import check_names, other_symbols, summed
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import os

    import pandas as pd


RECOMPUTE_IS: Final = "recompute="
"""Begins the configuration of a row that is a value of the switch `recompute`."""


@dataclass(frozen=True)
class PlanRow:
    """One way to keep less for backward."""

    #: What `Options.memory_plan` takes - "Gelu+:1:-1"; count -1 means every occurrence. Of what ortlab recomputes
    #: itself the switch as it is written - "recompute=layers:1/2".
    config: str
    cluster: str  #: The operators that would be recomputed together, ending in "+"; empty under `recompute`
    strategy: int  #: 1 recompute; 2 recompute with compromise, which saves a part of the size only
    frequency: int  #: Occurrences of the cluster in the graph; under `recompute` nodes that run again
    saving_symbolic: str  #: Predicted saving in bytes, in terms of the input dimensions
    #: The same at the sizes in `MemoryPlan.symbols`, in bytes; predicted by ORT (under `recompute` by ortlab), not
    #: measured. Where a symbol has no value, worked out from the shapes of this batch; None where those are unknown.
    saving_bytes: float | None
    enabled: bool  #: Whether the lab's present options ask for it
    sentence: str  #: What it does, in words
    parts: tuple[str, ...] = ()  #: Paths of those that have it, where only parts of the model are wrapped
    #: Configurations of the other ways to recompute the same activations - one of them at most can act.
    excludes: tuple[str, ...] = ()
    #: Occurrences that the present options ask for, -1 for all; None where it is not enabled.
    requested: int | None = None
    #: Occurrences that the session which runs recomputes, read from its graph. It need not be what was asked for:
    #: places that another plan takes are left out, and there may be fewer. None where it is not enabled.
    applied: int | None = None
    #: Symbols in the saving that have no value, so that ORT's formula gives no figure in bytes.
    unresolved: tuple[str, ...] = ()
    #: In how many layers of the model its occurrences are; None where that is not known.
    layers: int | None = None
    #: What it takes off the peak of a step, in bytes; predicted by simulation, not measured. None until profiled.
    peak_saving_bytes: float | None = None
    #: What it adds to a step, in ms; predicted from the times of a profiled step, not measured. None until profiled.
    cost_ms: float | None = None
    #: What it took off the peak, in bytes; measured. None until it was.
    measured_saving_bytes: float | None = None
    #: What it added to a step, in ms; measured. None until it was.
    measured_cost_ms: float | None = None

    @property
    def switches(self) -> dict[str, Any]:
        """What `Lab.set` takes to switch it on: `lab.set(**row.switches)`."""
        if self.config.startswith(RECOMPUTE_IS):
            return {"recompute": self.config.removeprefix(RECOMPUTE_IS).split(",")}
        return {"memory_plan": self.config.split(",")}

    @property
    def as_asked(self) -> bool:
        """Whether ORT applies it in as many places as asked for; true as well where nobody has asked or looked."""
        if self.requested is None or self.applied is None:
            return True
        return self.applied == (self.frequency if self.requested < 0 else self.requested)

    @property
    def bytes_per_ms(self) -> float | None:
        """Bytes off the peak for each ms, both predicted by simulation; infinite where it costs nothing."""
        return _per_ms(self.peak_saving_bytes, self.cost_ms)

    @property
    def measured_bytes_per_ms(self) -> float | None:
        """The same, both measured."""
        return _per_ms(self.measured_saving_bytes, self.measured_cost_ms)


@dataclass(frozen=True, repr=False)
class MemoryPlan(Shown, JsonRecord, noun="memory plan", layout=1):
    """Every recompute plan over a model's training graph, largest predicted saving first.

    The savings overlap where clusters share operators, and freed memory can lie away from the peak, so the sum of
    the rows is no prediction for all of them together. Measure: enable, rerun, compare.
    """

    rows: tuple[PlanRow, ...]  #: The plans
    #: Values of the symbolic dimensions that the savings were evaluated with; those of the first batch, unless
    #: `origins` says otherwise.
    symbols: Mapping[str, int]
    memory_level: int  #: The lab's memory level; at 1 and 2 it chooses the plans itself
    report: str  #: ORT's own MemoryInsight text
    #: Wrapped parts of the model that have no graph yet, because they were not called.
    missing: tuple[str, ...] = ()
    #: ORT's probe level: "1:0" looks for subgraphs anywhere, "1:1" within transformer layers only.
    probe: str = "1:0"
    #: Plans that the present options ask for and the model does not have; ORT itself passes over them in silence.
    absent: tuple[str, ...] = ()
    #: Where the value of a symbol comes from, in words, for those that the first batch does not give as they are.
    origins: Mapping[str, str] = field(default_factory=dict)
    #: For each symbol that counts labels which are not ignored: the number of all labels, a formula.
    label_totals: Mapping[str, str] = field(default_factory=dict)
    #: Where several parts of the model are wrapped: the plan of each by its path, of which this one is put together.
    of_parts: Mapping[str, MemoryPlan] = field(default_factory=dict)
    level_set: LevelSet | None = None  #: What `memory_level` stands for in this model; None at 0
    #: What any plan takes off the peak because ORT orders all nodes differently once there is one, in bytes; predicted
    #: by simulation, negative where the peak rises. It is part of each `peak_saving_bytes`.
    order_saving_bytes: float | None = None
    #: What ortlab recomputes by itself: values of the switch `recompute`, in place of plans. With costs, these are also
    #: the values of which none needs less memory and costs no more.
    recomputed: tuple[PlanRow, ...] = ()
    #: How the graph came about, where it was built for this; empty where it was there.
    note: str = field(default="", compare=False)

    @property
    def enabled(self) -> tuple[str, ...]:
        """Configurations of the plans that the present options ask for."""
        return tuple(row.config for row in self.rows if row.enabled)

    @property
    def asked(self) -> tuple[str, ...]:
        """The same with the counts that the present options ask for, one entry for each cluster."""
        return tuple(
            dict.fromkeys(
                f"{without_count(part)}:{row.requested}"
                for row in self.rows
                if row.requested is not None
                for part in row.config.split(",")
            )
        )

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Symbols without a value, in the order of their names."""
        rows = (*self.rows, *self.recomputed)
        return tuple(sorted({symbol for row in rows for symbol in row.unresolved}))

    def at(
        self,
        *,
        batch: int | None = None,
        sequence: int | None = None,
        label_density: float | None = None,
        **sizes: int,
    ) -> MemoryPlan:
        """Evaluate the savings for another batch, without building anything.

        Parameters
        ----------
        batch
            Samples: the first dimension of every input that has as many as the others.
        sequence
            Tokens: the second dimension of every input that has as many as the others.
        label_density
            Which part of the labels is not ignored, from 0 to 1. Where the savings count such labels and it is not
            given, the density of the first batch is kept.
        **sizes
            Symbols by name, as in `plan.at(input_ids_dim0=16)`; also those that have no value yet.

        Returns
        -------
        MemoryPlan
            The same plans, sorted by what they would save there. What a step has shown - peak, cost, anything
            measured - holds for its own batch, and is left out.

        Raises
        ------
        OptionError
            If there is no such symbol, a size is no whole number from 1, or `batch` could mean several.

        Examples
        --------
        >>> lab.plan().at(batch=32, sequence=512).rows[0].saving_bytes
        >>> lab.plan().at(label_density=0.15)
        """
        if self.of_parts:
            return self._parts_at(batch, sequence, label_density, sizes)
        known = (*self.symbols, *self.unresolved, *self.label_totals)
        symbols, origins = other_symbols(
            known,
            self.symbols,
            self.label_totals,
            batch=batch,
            sequence=sequence,
            label_density=label_density,
            sizes=sizes,
        )
        return replace(
            self,
            rows=tuple(sorted((_evaluated(row, symbols) for row in self.rows), key=by_saving)),
            recomputed=tuple(_evaluated(row, symbols) for row in self.recomputed),
            symbols=symbols,
            origins={**self.origins, **origins},
            order_saving_bytes=None,
        )

    def with_savings(self, savings: Mapping[str, float]) -> MemoryPlan:
        """Return the plan with these bytes, by configuration, where ORT's formula gives none."""
        rows = (
            replace(row, saving_bytes=savings.get(row.config)) if row.saving_bytes is None else row
            for row in self.rows
        )
        return replace(self, rows=tuple(sorted(rows, key=by_saving)))

    def _parts_at(
        self, batch: int | None, sequence: int | None, density: float | None, sizes: Mapping[str, int]
    ) -> MemoryPlan:
        known = {path: {*plan.symbols, *plan.unresolved} for path, plan in self.of_parts.items()}
        check_names(sizes, sorted(set().union(*known.values())))
        again = {
            path: plan.at(
                batch=batch,
                sequence=sequence if plan.has_sequence else None,
                label_density=density if plan.label_totals else None,
                **{name: size for name, size in sizes.items() if name in known[path]},
            )
            for path, plan in self.of_parts.items()
        }
        return merged(again, self.missing)

    @property
    def has_sequence(self) -> bool:
        """Whether an input has a second dimension that may change."""
        return any(name.endswith("_dim1") for name in self.symbols)

    def save(
        self, path: str | os.PathLike[str], *, plans: Iterable[str] | None = None, dialect: str = "2024"
    ) -> Path:
        """Write plans to a file, by default those that the present options ask for.

        Parameters
        ----------
        path
            The file; one that exists is replaced.
        plans
            Configurations; None for `enabled`.
        dialect
            "2024", the JSON list that ORTMODULE_MEMORY_OPT_CONFIG of 1.19.2 names; "2023", what that variable held
            itself; "2022", what ORTMODULE_ENABLE_MEMORY_ALLEVIATION held. "record" writes all of this record, what
            ortlab recomputes and what was measured among it, for `MemoryPlan.load`.

        Returns
        -------
        pathlib.Path
            The file.

        Raises
        ------
        OptionError
            If there is nothing to write, a plan cannot be written in the dialect, or the file cannot be written.

        Examples
        --------
        >>> lab.plan().save("plans.json")
        """
        if dialect == "record" and plans is None:
            return super().save(Path(path))
        chosen = self.asked if plans is None else tuple(plans)
        if not chosen:
            on = next((row.config for row in self.recomputed if row.enabled), "")
            raise OptionError(
                "There is no plan to write.",
                why="The present options ask for none of this model's plans."
                + f" {on} is none: ONNX Runtime's files have no words for it." * bool(on),
                fix="Switch one on, lab.set(memory_plan=[...]), or name them: plan.save(path, plans=[...]). "
                'All that is known of this model\'s plans: plan.save(path, dialect="record").',
            )
        return dialects.save(path, chosen, dialect)

    def table(self) -> pd.DataFrame:
        """One row per plan, then one per value of `recompute`; savings in bytes, predicted."""
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
                    "instead of": ", ".join(row.excludes),
                    "requested": row.requested,
                    "applied": row.applied,
                    "predicted peak saving [bytes]": row.peak_saving_bytes,
                    "predicted cost [ms]": row.cost_ms,
                    "predicted bytes per ms": row.bytes_per_ms,
                    "measured saving [bytes]": row.measured_saving_bytes,
                    "measured cost [ms]": row.measured_cost_ms,
                    "measured bytes per ms": row.measured_bytes_per_ms,
                    **({"parts": ", ".join(row.parts)} if row.parts else {}),
                }
                for row in (*self.rows, *self.recomputed)
            ]
        )


def merged(plans: Mapping[str, MemoryPlan], missing: tuple[str, ...] = ()) -> MemoryPlan:
    """Put together the plans of a model's parts, by path: a configuration acts on all parts that have it.

    `missing` names the parts that have no plan yet.
    """
    together = sorted(_of_all({path: plan.rows for path, plan in plans.items()}), key=by_saving)
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
        recomputed=tuple(_of_all({path: plan.recomputed for path, plan in plans.items()})),
    )


def _of_all(of_parts: Mapping[str, Iterable[PlanRow]]) -> Iterator[PlanRow]:
    """Put rows of parts together that have the same configuration."""
    rows: dict[str, list[tuple[str, PlanRow]]] = {}
    for path, found in of_parts.items():
        for row in found:
            rows.setdefault(row.config, []).append((path, row))
    yield from map(_together, rows.values())


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
        sentence=sentence(rows[0].cluster, rows[0].strategy, frequency, layers)
        if rows[0].cluster
        else rows[0].sentence,
        parts=tuple(path for path, _ in places),
        excludes=tuple(dict.fromkeys(other for row in rows for other in row.excludes)),
        applied=summed(row.applied for row in rows),
        unresolved=tuple(dict.fromkeys(name for row in rows for name in row.unresolved)),
        layers=layers,
    )


def without_count(part: str) -> str:
    """Return `<cluster>:<strategy>` of `<cluster>:<strategy>:<count>`."""
    return part.rsplit(":", 1)[0]


def by_saving(row: PlanRow) -> tuple[bool, float, str]:
    """Sort the largest predicted saving first, equal ones by name, and those without a figure last, by themselves."""
    return (row.saving_bytes is None, -(row.saving_bytes or 0.0), row.config)


def _evaluated(row: PlanRow, symbols: Mapping[str, int]) -> PlanRow:
    formula = formulas.read(row.saving_symbolic or "0")
    return replace(
        row,
        saving_bytes=formula.value(symbols) if row.saving_symbolic else None,
        unresolved=tuple(name for name in formula.symbols if name not in symbols),
        peak_saving_bytes=None,
        cost_ms=None,
        measured_saving_bytes=None,
        measured_cost_ms=None,
    )


def _per_ms(saved: float | None, cost: float | None) -> float | None:
    if saved is None or cost is None:
        return None
    if cost > 0:
        return saved / cost
    return math.inf if saved > 0 else 0.0


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
        counts = {without_count(one): int(one.rsplit(":", 1)[1]) for one in self.chosen}
        places = [counts.get(without_count(one), 0) for one in row.config.split(",")]
        return min(row.frequency if count < 0 else min(count, row.frequency) for count in places)

    def as_chosen(self, row: PlanRow) -> PlanRow:
        """Return a row with what its chosen places save and cost, in proportion, as if all places were alike.

        A plan that is not chosen, and one in all its places, is returned as it is. Measured numbers stay.
        """
        count = self.count(row)
        if count in (0, row.frequency):
            return row
        sums = {name: value for name in _SUMMED if (value := getattr(row, name)) is not None}
        return replace(row, **{name: value * (count / row.frequency) for name, value in sums.items()})

    def adding(self, config: str, count: int = -1) -> tuple[str, ...]:
        """Return the `memory_plan` that also chooses a plan, and leaves out those that cannot act beside it.

        `count` is in how many of its places; -1, or as many as it has, for all. Raises KeyError where no row has this
        configuration.
        """
        row = {row.config: row for row in self.plan.rows}[config]
        wanted = -1 if count >= row.frequency else count
        parts = config.split(",")
        clusters = {_cluster(part) for part in parts}
        own = {without_count(part) for part in parts}
        beaten = {
            without_count(part)
            for other in self.plan.rows
            if other.config in row.excludes or row.config in other.excludes
            for part in other.config.split(",")
        } - own
        kept = [
            one for one in self.chosen if _cluster(one) not in clusters and without_count(one) not in beaten
        ]
        return (*kept, *(f"{without_count(part)}:{wanted}" for part in parts))

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


def _cluster(part: str) -> str:
    return part.split(":", 1)[0]
