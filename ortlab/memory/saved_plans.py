"""Plans from a configuration file or an old log, of any release since 2022, held against a model of today."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import OptionError
from ortlab.memory import dialects, formulas, insight
from ortlab.memory.dialects import sentence
from ortlab.memory.plan import without_count
from ortlab.options import variables
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.memory.dialects import Log
    from ortlab.memory.plan import MemoryPlan

_OF_2024: Final = ("config file path", "<config.json>", "Max Saving(Bytes)")
"""What logs say since plans are read from a JSON file."""

_SUFFIXES: Final = frozenset({".json", ".txt", ".log", ".out", ".err", ".cfg"})

_TEXT: Final = "a text"

_NAME_LENGTH: Final = 4096
"""The most characters of a path; a longer text is no path."""


@dataclass(frozen=True)
class SavedPlan:
    """One plan that a file or a log names."""

    config: str  #: As `Options.memory_plan` takes it today - "Gelu+:1:-1"
    on: bool  #: Whether it was switched on
    places: int | None = None  #: Occurrences, by the log; None if it does not say
    #: Saving in bytes that the log gives, a prediction of ORT for the batch of then; None if it gives none.
    printed_bytes: int | None = None
    saving_symbolic: str = ""  #: The same as a formula, as the log has it; empty if it has none
    #: What the formula comes to with the log's own sizes, in bytes; None where one has no value.
    saving_bytes: float | None = None
    #: Places that were asked for (-1 for all), and in which ORT applied it; None if the log does not say.
    requested: int | None = None
    applied: int | None = None
    excludes: tuple[str, ...] = ()  #: Other ways to recompute the same, by the log; one at most could be on
    shapes: tuple[str, ...] = ()  #: What it would not have kept, as the log has it
    present: bool | None = None  #: Whether the model of today has it; None where nobody has looked
    near: tuple[str, ...] = ()  #: Clusters of the model with a similar name, if it has not

    @property
    def cluster(self) -> str:
        """The operators that are recomputed together."""
        return ",".join(part.split(":")[0] for part in self.config.split(","))

    @property
    def sentence(self) -> str:
        """What it does, in words; empty where the log does not say in how many places."""
        strategy = max(int(part.split(":")[1]) for part in self.config.split(","))
        return sentence(self.cluster, strategy, self.places) if self.places is not None else ""


@dataclass(frozen=True, repr=False)
class SavedPlans(Shown):
    """Everything that a file or a log says about plans."""

    source: str  #: Name of the file, or "a text"
    dialect: str  #: "2022", "2023" or "2024", after the year of the release that wrote or read it so
    rows: tuple[SavedPlan, ...]  #: The plans, in its order
    symbols: Mapping[str, int]  #: Sizes of the batch that the log's figures are for
    log: Log | None = None  #: Its tables; None for a configuration
    complete: bool = True  #: Whether no table was cut off before its end

    @property
    def enabled(self) -> tuple[str, ...]:
        """Configurations of those that are on."""
        return tuple(row.config for row in self.rows if row.on)

    @property
    def present(self) -> tuple[str, ...]:
        """Configurations of those that are on and that the model has, for `lab.set(memory_plan=...)`."""
        return tuple(row.config for row in self.rows if row.on and row.present)

    @property
    def absent(self) -> tuple[str, ...]:
        """Configurations, on or off, that the model does not have."""
        return tuple(row.config for row in self.rows if row.present is False)

    def against(self, plan: MemoryPlan) -> SavedPlans:
        """Say which of them a model has.

        Parameters
        ----------
        plan
            The model's own, `lab.plan()`.
        """
        parts = {without_count(part): part for row in plan.rows for part in row.config.split(",")}
        clusters = list(dict.fromkeys(name.split(":")[0] for name in parts))
        rows = []
        for row in self.rows:
            lacking = [part for part in row.config.split(",") if without_count(part) not in parts]
            near = [
                name
                for part in lacking
                for name in difflib.get_close_matches(part.split(":")[0], clusters, n=3)
            ]
            rows.append(replace(row, present=not lacking, near=tuple(dict.fromkeys(near))))
        return replace(self, rows=tuple(rows))

    def save(self, path: str | os.PathLike[str], dialect: str = "2024") -> Path:
        """Write the plans that are on, in a dialect of your choice, as `MemoryPlan.save` does.

        Raises
        ------
        OptionError
            If none is on, one cannot be written in the dialect, or the file cannot be written.
        """
        if not self.enabled:
            raise OptionError("There is no plan to write.", why=f"In {self.source}, none is switched on.")
        return dialects.save(path, self.enabled, dialect)

    def tables(self) -> str:
        """Return the lines of the log's tables; empty for a configuration."""
        return "" if self.log is None else self.log.tables

    def table(self) -> pd.DataFrame:
        """One row per plan; savings in bytes, as the log predicted them for its own batch."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "plan": row.config,
                    "on": row.on,
                    "occurrences": row.places,
                    "printed saving [bytes]": row.printed_bytes,
                    "evaluated saving [bytes]": row.saving_bytes,
                    "formula": row.saving_symbolic,
                    "requested": row.requested,
                    "applied": row.applied,
                    "instead of": ", ".join(row.excludes),
                    "shapes": "; ".join(row.shapes),
                    "in this model": row.present,
                    "near names": ", ".join(row.near),
                    "what it does": row.sentence,
                }
                for row in self.rows
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


def read_saved(source: str | os.PathLike[str]) -> SavedPlans:
    """Read plans that somebody has kept: a configuration in any dialect, or a log with tables of plans.

    Nothing of the text is executed; formulas in it are read as arithmetic.

    Parameters
    ----------
    source
        A file, or the text itself: what stood in an environment variable, or what was printed.

    Raises
    ------
    OptionError
        If there is no such file, or the text names no plans in any of the dialects.

    Examples
    --------
    >>> old = ortlab.memory.read_saved("train_2023.log").against(lab.plan())
    >>> lab.set(memory_plan=old.present)
    """
    name, text = _text_of(source)
    if not text.strip():
        raise OptionError(
            f"{_begun(name)} is empty.", fix="Give a configuration, or a log with a table of plans."
        )
    log = dialects.read_log(text)
    if not log:
        try:
            plans, dialect = variables.read_plans(text), variables.dialect_of(text)
        except OptionError as error:
            raise OptionError(
                f"{_begun(name)} holds neither plans nor a table of plans.",
                why=f"{error.what} {error.why}".strip(),
                fix=f"{error.fix} Or give a log from the title of a table on: MemoryAlleviation Summary, features "
                "ON/OFF, or MemoryInsight Summary.",
            ) from None
        return SavedPlans(name, dialect, tuple(SavedPlan(plan, on=True) for plan in plans), {})
    symbols = dict(log.matrix.symbols)
    rows = {row.config: row for row in (*_of_2022(log.alleviations), *_of_matrix(log.matrix, symbols))}
    for row in _of_insight(log.insight, symbols):
        known = rows.get(row.config)
        rows[row.config] = (
            row
            if known is None
            else replace(
                known,
                on=known.on or row.on,
                requested=row.requested,
                applied=row.applied,
                excludes=row.excludes,
                shapes=row.shapes,
            )
        )
    dialect = "2022" if log.alleviations else "2024" if any(mark in text for mark in _OF_2024) else "2023"
    return SavedPlans(name, dialect, tuple(rows.values()), symbols, log, log.complete)


def _of_2022(summaries: tuple[dialects.Alleviation, ...]) -> list[SavedPlan]:
    return [
        SavedPlan(
            one.config,
            on=one.on,
            places=sum(kept.places for kept in one.patterns),
            shapes=tuple(f"{kept.places} x [{' x '.join(kept.shape)}]" for kept in one.patterns),
        )
        for summary in summaries
        for one in summary.subgraphs
    ]


def _of_matrix(matrix: dialects.FeatureMatrix, symbols: Mapping[str, int]) -> list[SavedPlan]:
    return [
        SavedPlan(
            plan.config,
            on=plan.on,
            places=plan.places,
            printed_bytes=plan.saving_bytes,
            saving_symbolic=plan.saving_symbolic,
            saving_bytes=_value(plan.saving_symbolic, symbols),
        )
        for plan in matrix.plans
    ]


def _of_insight(table: insight.MemoryInsight, symbols: Mapping[str, int]) -> list[SavedPlan]:
    exclusive, applied, savings = table.exclusive(), table.applied_counts(), table.savings()
    rows: dict[str, SavedPlan] = {}
    for row in table.rows:
        for option in row.options:
            before = rows.get(option.config) or SavedPlan(option.config, on=False, places=0)
            shapes = tuple(_shape(row.places, activations) for activations in option.outputs)
            formula = savings.get(option.config, ("", 0))[0]
            rows[option.config] = SavedPlan(
                option.config,
                on=before.on or option.requested is not None,
                places=row.places + (before.places or 0),
                saving_symbolic=formula,
                saving_bytes=_value(formula, symbols) if symbols else None,
                requested=before.requested if option.requested is None else option.requested,
                applied=applied.get(f"{option.cluster}:{option.strategy}"),
                excludes=exclusive.get(option.config, ()),
                shapes=(*before.shapes, *shapes),
            )
    return list(rows.values())


def _shape(places: int, activations: insight.SavedOutput) -> str:
    shape = activations.shape.strip()
    return f"{places} x [{shape}], {activations.element_bytes} bytes each, {activations.saved_percent}% saved"


def _value(formula: str, symbols: Mapping[str, int]) -> float | None:
    """Evaluate a formula of a log; one that was cut off or damaged has no value."""
    try:
        return formulas.read(formula).value(symbols) if formula else None
    except OptionError:
        return None


def _text_of(source: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the name and the text of a source, which is a file or the text itself."""
    if isinstance(source, str) and not _is_path(source):
        return _TEXT, source
    file = Path(source)
    try:
        data = file.read_bytes()
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{file} cannot be read.", why=f"{error}.", fix="Give the path of a file, or the text itself."
        ) from None
    encoding = "utf-16" if data[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig"
    return file.name, data.decode(encoding, errors="replace")


def _begun(name: str) -> str:
    return "This text" if name == _TEXT else name


def _is_path(source: str) -> bool:
    """Tell whether a text is meant as the path of a file: it names one, or looks like nothing else."""
    if "\n" in source.strip() or len(source) > _NAME_LENGTH or "\0" in source:
        return False
    try:
        return Path(source).is_file() or Path(source).suffix.lower() in _SUFFIXES
    except OSError:
        return False
