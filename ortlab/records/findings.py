"""One thing that a pre-flight found, and the kinds there are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple


class Level(Enum):
    """What a finding means for training on ONNX Runtime."""

    OBSTACLE = "obstacle"
    """Nothing can be built with it."""

    WRONG = "wrong"
    """A graph can be built, and would not do what the model does."""

    NOTE = "note"
    """It works; it costs something, or is worth knowing."""


class Place(NamedTuple):
    """Where something stands in a model.

    Attributes
    ----------
    module
        Path as `named_modules` gives it; "" for the model itself.
    module_class
        Class of that module.
    where
        File and line of the code, as "file:line"; "" if no line is known.
    """

    module: str = ""
    module_class: str = ""
    where: str = ""


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
    Kind.RANDOM: Level.WRONG,
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
    """One thing that was found, and where.

    Attributes
    ----------
    kind
        What sort of thing.
    what
        What it is, one sentence.
    place
        Module and line of source.
    fix
        What can be done about it, one sentence.
    times
        How often it happens in one forward there.
    level
        What it means; by default that of its kind.
    """

    kind: Kind
    what: str
    place: Place = _NOWHERE
    fix: str = ""
    times: int = 1
    level: Level = Level.OBSTACLE

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
