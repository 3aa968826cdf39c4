"""Density: how much of a batch is worth computing, the rest being padding or labels that are ignored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pandas as pd

EMBED: Final = "EMBED"
LABEL: Final = "LABEL"


@dataclass(frozen=True)
class DensityRow:
    """One input in one step.

    Attributes
    ----------
    step
        Number of the step in its run, from 1.
    kind
        "EMBED": tokens that an embedding with a padding index looks up. "LABEL": targets of a cross entropy.
    name
        Name of the input.
    pad_index
        The token that is padding, or the label that is ignored.
    valid
        How many are something else.
    total
        How many there are.
    valid_per_sample
        Valid tokens of each sample of the batch; empty for labels, as in ORTModule's own table.
    """

    step: int
    kind: str
    name: str
    pad_index: int
    valid: int
    total: int
    valid_per_sample: tuple[int, ...] = ()

    @property
    def density(self) -> float:
        """The valid part, from 0 to 1; 0 for an empty input."""
        return self.valid / self.total if self.total else 0.0


@dataclass(frozen=True)
class Density:
    """The rows of a run, in order of its steps.

    Attributes
    ----------
    rows
        One per input and step.
    """

    rows: tuple[DensityRow, ...] = ()

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
        """Return plain JSON types, readable by `from_list`."""
        return [asdict(row) for row in self.rows]

    @classmethod
    def from_list(cls, records: Iterable[dict[str, Any]]) -> Density:
        """Read what `to_list` wrote."""
        return cls(
            tuple(
                DensityRow(**{**record, "valid_per_sample": tuple(record["valid_per_sample"])})
                for record in records
            )
        )
