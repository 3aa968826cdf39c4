"""Density: how much of a batch is worth computing, the rest being padding or ignored labels; what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from ortlab.records import record_files
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

EMBED: Final = "EMBED"
LABEL: Final = "LABEL"


@dataclass(frozen=True)
class DensityRow:
    """One input in one step."""

    step: int  #: Number of the step in its run, from 1
    #: "EMBED": tokens that an embedding with a padding index looks up. "LABEL": targets of a cross entropy.
    kind: str
    name: str  #: Name of the input
    pad_index: int  #: The token that is padding, or the label that is ignored
    valid: int  #: How many are something else
    total: int  #: How many there are
    #: Valid tokens of each sample of the batch; empty for labels, as in ORTModule's own table.
    valid_per_sample: tuple[int, ...] = ()

    @property
    def density(self) -> float:
        """The valid part, from 0 to 1; 0 for an empty input."""
        return self.valid / self.total if self.total else 0.0


@dataclass(frozen=True)
class Density:
    """The rows of a run, in order of its steps."""

    rows: tuple[DensityRow, ...] = ()  #: One per input and step

    def __bool__(self) -> bool:
        """Tell whether anything was counted."""
        return bool(self.rows)

    def means(self) -> Iterator[tuple[DensityRow, float]]:
        """Yield, for each input, its last row and its density over all steps, from 0 to 1."""
        inputs: dict[tuple[str, str, int], list[DensityRow]] = {}
        for row in self.rows:
            inputs.setdefault((row.kind, row.name, row.pad_index), []).append(row)
        for rows in inputs.values():
            total = sum(row.total for row in rows)
            yield rows[-1], sum(row.valid for row in rows) / total if total else 0.0

    def table(self) -> pd.DataFrame:
        """Every row, under the headings that ORTModule's table had until 1.17; density from 0 to 1."""
        import pandas as pd

        columns = (
            "STEP",
            "INPUT TYPE",
            "INPUT NAME",
            "PAD IDX",
            "DENSITY",
            "VALID TOKENS",
            "TOTAL TOKENS",
            "VALID TOKENS/BATCH",
        )
        rows = [
            (
                row.step,
                row.kind,
                row.name,
                row.pad_index,
                row.density,
                row.valid,
                row.total,
                list(row.valid_per_sample) or None,
            )
            for row in self.rows
        ]
        return pd.DataFrame(rows, columns=list(columns))

    def to_list(self) -> list[dict[str, Any]]:
        """Return its rows as plain JSON types."""
        return [asdict(row) for row in self.rows]


THRESHOLD: Final = 0.9
"""Density from which on ORT's sparsity optimizers leave a batch as it is
(`onnxruntime/training/ortmodule/_runtime_inspector.py`)."""

Reach = Literal["acts", "off", "no CUDA", "not a sub-module", "dense", "absent", "another engine", "unknown"]
"""Whether a sparsity optimizer does anything here, and if not, why."""


@dataclass(frozen=True)
class SwitchEffect:
    """What a switch does to the step: runs with it and without it, in turns."""

    switch: str  #: Name of the switch
    #: Step time with it over that without, and the 95 % bootstrap interval; nan where it was not measured.
    time_ratio: float
    time_low: float  #: See `time_ratio`
    time_high: float  #: See `time_ratio`
    verdict: str  #: What the interval allows to say
    memory_ratio: float  #: Peak memory with it over that without
    loss_difference: float | None  #: Largest relative difference of the losses; None where losses are missing
    flops_with: int  #: FLOPs of the step, from the shapes that its nodes ran with
    flops_without: int  #: See `flops_with`
    rounds: int  #: Runs of each
    steps: int  #: Steps of each run
    failure: str = ""  #: Why it was not measured; empty if it was

    @property
    def flops_share(self) -> float:
        """What part of the step's FLOPs it saves, from 0 to 1."""
        return 1 - self.flops_with / self.flops_without if self.flops_without else 0.0


@dataclass(frozen=True, repr=False)
class DensityReport(Shown, JsonRecord, noun="record of densities", layout=1):
    """What was counted of a model's inputs, and what may be made of it."""

    density: Density  #: The rows
    source: str  #: Where they come from, in words: "run 3", "the run that goes on", "2 batches"
    labels: Reach = "unknown"  #: Whether ORT's label and embedding sparsity act on them here
    tokens: Reach = "unknown"  #: See `labels`
    effects: tuple[SwitchEffect, ...] = ()  #: What the switches do, as far as that was measured

    @property
    def rows(self) -> tuple[DensityRow, ...]:
        """What was counted, input by input and step by step."""
        return self.density.rows

    def of(self, kind: str) -> Iterator[DensityRow]:
        """Yield the rows of a kind, "EMBED" or "LABEL"."""
        return (row for row in self.rows if row.kind == kind)

    def padded_to_longest(self, name: str) -> float | None:
        """Return what part of an input's tokens would be left if each batch were padded to its own longest sample.

        Parameters
        ----------
        name
            Name of the input; its padding has to stand at one end of each sample.

        Returns
        -------
        float or None
            From 0 to 1, over all steps; None where samples were not counted one by one.
        """
        rows = [row for row in self.of(EMBED) if row.name == name and row.valid_per_sample]
        total = sum(row.total for row in rows)
        return (
            sum(len(row.valid_per_sample) * max(row.valid_per_sample) for row in rows) / total
            if total
            else None
        )

    @property
    def all_ignored(self) -> tuple[DensityRow, ...]:
        """Labels of steps in which none counts: their loss is no number."""
        return tuple(row for row in self.of(LABEL) if row.total and not row.valid)

    def table(self) -> pd.DataFrame:
        """Every row, under the headings that ORTModule's table had until 1.17; density from 0 to 1."""
        return self.density.table()

    def _fields(self) -> dict[str, Any]:
        return {**asdict(self), "density": self.density.to_list()}

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> DensityReport:
        fields["density"] = {"rows": fields["density"]}
        return record_files.rebuilt(cls, fields)
