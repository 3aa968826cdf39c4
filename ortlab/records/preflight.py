"""The record of a pre-flight: what was found, what can be wrapped, and what to do next."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


class Level(Enum):
    """What a finding means for training on ONNX Runtime."""

    OBSTACLE = "obstacle"
    """Nothing can be built with it."""

    WRONG = "wrong"
    """A graph can be built, and would not do what the model does."""

    NOTE = "note"
    """It works; it costs something, or is worth knowing."""


class Place(NamedTuple):
    """Where something stands in a model."""

    module: str = ""  #: Path as `named_modules` gives it; "" for the model itself
    module_class: str = ""  #: Class of that module
    where: str = ""  #: File and line of the code, as "file:line"; "" if no line is known


_NOWHERE: Final = Place()


class Kind(Enum):
    """What can be found."""

    FORWARD = "forward fails"
    NO_RULE = "no exporter rule"
    NO_GRADIENT = "no gradient"
    BRANCH = "branch on data"
    NUMBER = "number made of data"
    RANDOM = "random number of Python"
    ATTRIBUTE = "attribute changed by the forward"
    GLOBAL = "global variable changed by the forward"
    OUTPUT = "output"
    INPUT = "input"
    WRITE = "write to memory"
    LAYOUT = "layout"
    CHECKPOINT = "gradient checkpointing"
    DTYPE = "dtype"
    DEVICE = "device"
    HOOK = "hook"
    BUFFER = "buffer changed by the forward"
    BUILD = "build fails"
    BY_TORCH = "run by PyTorch"
    FUNCTION = "autograd Function"
    MODE = "eval mode"
    NOT_TRAINED = "nothing to train"
    VALUES = "weights"


_LEVELS: Final = {
    Kind.BRANCH: Level.WRONG,
    Kind.NUMBER: Level.WRONG,
    Kind.ATTRIBUTE: Level.WRONG,
    Kind.GLOBAL: Level.WRONG,
    Kind.HOOK: Level.WRONG,
    Kind.BY_TORCH: Level.NOTE,
    Kind.FUNCTION: Level.NOTE,
    Kind.MODE: Level.NOTE,
    Kind.NOT_TRAINED: Level.NOTE,
    Kind.VALUES: Level.NOTE,
}


@dataclass(frozen=True)
class Finding:
    """One thing that was found, and where."""

    kind: Kind  #: What sort of thing
    what: str  #: What it is, one sentence
    place: Place = _NOWHERE  #: Module and line of source
    fix: str = ""  #: What can be done about it, one sentence
    times: int = 1  #: How often it happens in one forward there
    level: Level = Level.OBSTACLE  #: What it means; by default that of its kind

    @classmethod
    def of(cls, kind: Kind, what: str, place: Place = _NOWHERE, fix: str = "") -> Finding:
        """Make a finding of the level of its kind."""
        return cls(kind, what, place, fix, 1, _LEVELS.get(kind, Level.OBSTACLE))

    @property
    def stops(self) -> bool:
        """Whether the module that it is in cannot train on ONNX Runtime as it is."""
        return self.level is not Level.NOTE


class Findings:
    """Findings in the order in which they were made; the same one at the same place is counted."""

    def __init__(self) -> None:
        self._found: dict[tuple[Kind, str, Place], Finding] = {}

    def add(self, finding: Finding) -> None:
        """Add a finding, or count it up."""
        key = (finding.kind, finding.what, finding.place)
        known = self._found.get(key)
        times = finding.times if known is None else known.times + finding.times
        self._found[key] = Finding(
            finding.kind, finding.what, finding.place, finding.fix, times, finding.level
        )

    def merge(self, findings: tuple[Finding, ...]) -> None:
        """Add those that are new; what is known was seen again, and does not happen more often for that."""
        for one in findings:
            if (one.kind, one.what, one.place) not in self._found:
                self.add(one)

    @property
    def all(self) -> tuple[Finding, ...]:
        """All of them."""
        return tuple(self._found.values())


@dataclass(frozen=True)
class Checked:
    """A module that was tested on its own."""

    path: str  #: As `named_modules` gives it
    module_class: str  #: Its class
    parameters: int  #: Numbers in its trainable parameters
    #: Whether it was exported, its gradient graph built and a session created, with nothing wrong in it.
    trains: bool
    reason: str = ""  #: Why not; empty if it does


@dataclass(frozen=True, repr=False)
class Preflight(Shown):
    """What stands between a model and ONNX Runtime; `ortlab.preflight` makes it."""

    model: str  #: Class of the model
    name: str  #: What the user calls it
    training: bool  #: Whether it was in training mode
    built: bool  #: Whether the whole model was exported, its gradient graph built and a session created
    findings: tuple[Finding, ...]  #: What was found, the worst first
    #: The largest sub-modules that train on ONNX Runtime, where the model as a whole does not.
    parts: tuple[Checked, ...]
    checked: tuple[Checked, ...]  #: All sub-modules that were tested
    parameters: int  #: Numbers in the model's trainable parameters
    parts_parameters: int  #: Numbers in those of `parts`, each parameter once
    seconds: float  #: Wall time of all of it
    export_seconds: float  #: Of it, the export of the whole model; not a number if that failed
    device: str  #: Where the model is

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
