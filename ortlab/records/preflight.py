"""The record of a pre-flight: what was found, what can be wrapped, and what to do next."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ortlab.records.findings import Finding, Kind, Level
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Checked:
    """A module that was tested on its own.

    Attributes
    ----------
    path
        As `named_modules` gives it.
    module_class
        Its class.
    parameters
        Numbers in its trainable parameters.
    trains
        Whether it was exported, its gradient graph built and a session created, with nothing wrong in it.
    reason
        Why not; empty if it does.
    """

    path: str
    module_class: str
    parameters: int
    trains: bool
    reason: str = ""


@dataclass(frozen=True, repr=False)
class Preflight(Shown):
    """What stands between a model and ONNX Runtime; `ortlab.preflight` makes it.

    Attributes
    ----------
    model
        Class of the model.
    name
        What the user calls it.
    training
        Whether it was in training mode.
    built
        Whether the whole model was exported, its gradient graph built and a session created.
    findings
        What was found, the worst first.
    parts
        The largest sub-modules that train on ONNX Runtime, where the model as a whole does not.
    checked
        All sub-modules that were tested.
    parameters
        Numbers in the model's trainable parameters.
    parts_parameters
        Numbers in those of `parts`, each parameter once.
    seconds
        Wall time of all of it.
    export_seconds
        Of it, the export of the whole model; not a number if that failed.
    device
        Where the model is.
    """

    model: str
    name: str
    training: bool
    built: bool
    findings: tuple[Finding, ...]
    parts: tuple[Checked, ...]
    checked: tuple[Checked, ...]
    parameters: int
    parts_parameters: int
    seconds: float
    export_seconds: float
    device: str

    def of(self, level: Level) -> tuple[Finding, ...]:
        """Return the findings of one level."""
        return tuple(one for one in self.findings if one.level is level)

    @property
    def ok(self) -> bool:
        """Whether the whole model trains on ONNX Runtime as it is, as far as building it shows."""
        return (
            self.built
            and self.training
            and self.parameters > 0
            and not any(one.stops for one in self.findings)
        )

    @property
    def fails_in_pytorch(self) -> bool:
        """Whether the forward fails without ONNX Runtime, too."""
        return any(one.kind in {Kind.FORWARD, Kind.INPUT} and one.stops for one in self.findings)

    @property
    def only(self) -> list[str]:
        """What `ortlab.wrap(model, only=...)` takes: the paths of `parts`."""
        return [part.path for part in self.parts]

    @property
    def share(self) -> float:
        """The fraction of the model's trainable parameters that is in `parts`, 0 to 1."""
        return self.parts_parameters / self.parameters if self.parameters else 0.0

    def table(self) -> pd.DataFrame:
        """Return one row a finding: level, kind, what, module, module_class, where, times, fix."""
        import pandas as pd

        columns = ["level", "kind", "what", "module", "module_class", "where", "times", "fix"]
        rows = [
            (one.level.value, one.kind.value, one.what, *one.place, one.times, one.fix)
            for one in self.findings
        ]
        return pd.DataFrame(rows, columns=columns)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON can hold it."""
        plain = asdict(self)
        plain["findings"] = [
            {**asdict(one), "kind": one.kind.value, "level": one.level.value, "place": one.place._asdict()}
            for one in self.findings
        ]
        plain["export_seconds"] = None if self.export_seconds != self.export_seconds else self.export_seconds
        return {**plain, "ok": self.ok, "only": self.only}
