"""What was said while models were built and run, and which warnings nobody has to act on."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab.errors import OptionError
from ortlab.options.log_levels import SEVERITIES
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

EXPORTER: Final = "exporter"
ORTMODULE: Final = "ORTModule"
RUNTIME: Final = "ONNX Runtime"
ORTLAB: Final = "ortlab"
SOURCES: Final = (EXPORTER, ORTMODULE, RUNTIME, ORTLAB)
"""torch's exporter with the model's own code while it is traced, ORTModule's Python code, ORT's C++ code, and ours."""

STAGES: Final = ("export", "graph", "session", "step")
"""What was being done."""


@dataclass(frozen=True)
class Known:
    """One harmless warning."""

    source: str  # as in `Message`
    begins: str  # regular expression of how it begins
    reason: str  # why it is harmless, one sentence


_CHECKED: Final = (  # `ortlab.engine.tracing.guards`
    "ortlab checks in every step that the value is the one that the graph was made with, and stops the step if not."
)

_SIZED: Final = (
    "An export that uses a size as a number is for that size; a batch of another size is exported anew."
)

KNOWN: Final[tuple[Known, ...]] = (
    Known(
        RUNTIME,
        r"Removing initializer '.*'\. It is not used by any node and should be removed from the model\.$",
        "ONNX Runtime drops a constant that its own optimizers no longer need; results and time stay the same.",
    ),
    Known(
        RUNTIME,
        r"No transformer layer boundary nodes found",
        "A memory level then chooses among all nodes instead of layer by layer; lab.plan() lists what it recomputes.",
    ),
    Known(
        EXPORTER,
        r"Converting a tensor to a (Python (boolean|float|index|integer|list|number)|NumPy array) might cause",
        _CHECKED,
    ),
    Known(EXPORTER, r"torch\.(tensor|as_tensor|from_numpy) results are registered as constants", _CHECKED),
    Known(EXPORTER, r"(Iterating over a tensor|Using len to get tensor shape) might cause", _SIZED),
    Known(
        EXPORTER,
        r"Constant folding - .*Constant folding not applied\.",
        "torch leaves the operator in the graph, and ONNX Runtime computes it or folds it itself.",
    ),
    Known(
        EXPORTER,
        r"PyTorch computes inside the graph: ",
        "ONNX Runtime calls PyTorch for these operators and their gradients: the step stays one graph.",
    ),
    Known(
        EXPORTER,
        r"ONNX Preprocess - Removing mutation from node aten::\w+ on block input: '",
        "What a forward writes to arguments, buffers and parameters stands there after it, as in PyTorch.",
    ),
    Known(
        RUNTIME,
        r"Error merging shape info for output\..* Falling back to lenient merge\.$",
        "ONNX Runtime had worked out another shape; a step has the shapes that its results really have.",
    ),
)
"""Every warning that is known to be harmless."""


def reason_harmless(source: str, text: str) -> str:
    """Return why nobody has to act on a message; empty for one that is not known."""
    for one in KNOWN:
        if one.source == source and re.match(one.begins, text, re.DOTALL):
            return one.reason
    return ""


_NAMES: Final = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
"""Names in a text, which are quoted."""

_LONG: Final = 2000
"""Characters from which on a message is a graph or a table."""

KEPT: Final = 100_000
"""Messages that a lab keeps: the latest. They take about half a kilobyte each."""


@dataclass(frozen=True)
class Message:
    """One message."""

    level: str  #: "VERBOSE", "INFO", "WARNING", "ERROR" or "FATAL"
    #: "exporter" (torch and the model's own code while it is traced), "ORTModule" or "ONNX Runtime".
    source: str
    text: str  #: What was said, without time stamp and colours; a graph or a table has many lines
    stage: str = ""  #: What was being done: "export", "graph", "session" or "step"
    #: Number of the run it belongs to; None outside runs, as in a plain call of the model.
    run: int | None = None
    when: str = ""  #: When it was said, ISO 8601, UTC
    #: Where in ONNX Runtime's source it was said, for those who know it; empty for other sources.
    place: str = ""
    #: Why nobody has to act on it, where that is known: such a warning has the level INFO (see `KNOWN`).
    harmless: str = ""

    @property
    def shape(self) -> str:
        """The text without the names in it: what messages of one kind have in common; that of a graph is the graph."""
        return _NAMES.sub("'…'", self.text) if len(self.text) < _LONG else self.text


class Messages(Shown, Sequence[Message]):
    """Messages in the order in which they were said; `of` chooses some, `table` makes a data frame.

    Parameters
    ----------
    messages
        The records.
    file
        Where ONNX Runtime's C++ code writes while it builds and, at DEVINFO and VERBOSE, while it runs. If the process
        is killed in there, the last lines are in that file.
    forgotten
        How many earlier ones were dropped, because a lab keeps `KEPT` of them.
    """

    def __init__(
        self, messages: Iterable[Message] = (), file: Path | None = None, forgotten: int = 0
    ) -> None:
        self._messages = tuple(messages)
        self.file = file
        self.forgotten = forgotten

    def __len__(self) -> int:
        """Count the messages."""
        return len(self._messages)

    def __getitem__(self, index: Any) -> Any:
        """Return the message (or messages) at a position, as a tuple does."""
        return self._messages[index]

    def __iter__(self) -> Iterator[Message]:
        """Iterate in order."""
        return iter(self._messages)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many there are of each level, the worst first; levels without any are left out."""
        found = Counter(message.level for message in self._messages)
        return {level: found[level] for level in reversed(SEVERITIES) if found[level]}

    @property
    def kinds(self) -> tuple[tuple[Message, ...], ...]:
        """The messages, those of one kind together: same run, level, source, stage and `Message.shape`."""
        found: dict[object, list[Message]] = {}
        for one in self._messages:
            found.setdefault((one.run, one.level, one.source, one.stage, one.shape), []).append(one)
        return tuple(map(tuple, found.values()))

    @property
    def runs(self) -> tuple[int | None, ...]:
        """Numbers of the runs that messages belong to, None for those outside runs; the newest first."""
        return tuple(dict.fromkeys(message.run for message in reversed(self._messages)))

    def of(
        self,
        *,
        run: int | None = None,
        level: str = "",
        source: str = "",
        stage: str = "",
        text: str = "",
    ) -> Messages:
        """Choose messages; each condition that is given has to hold.

        Parameters
        ----------
        run
            Number of a run; 0 for those outside runs.
        level
            This level and worse ones: "VERBOSE", "INFO", "WARNING", "ERROR" or "FATAL".
        source
            "exporter", "ORTModule", "ONNX Runtime" or "ortlab"; case and spaces do not matter.
        stage
            "export", "graph", "session" or "step".
        text
            What the text must contain; case does not matter.

        Raises
        ------
        OptionError
            If there is no such level, source or stage.
        """
        least = SEVERITIES.index(_known(level, SEVERITIES, "level")) if level else 0
        wanted_source, wanted_stage = _known(source, SOURCES, "source"), _known(stage, STAGES, "stage")
        wanted_text = text.casefold()
        chosen = (
            one
            for one in self._messages
            if (run is None or one.run == (run or None))
            and SEVERITIES.index(one.level) >= least
            and wanted_source in {"", one.source}
            and wanted_stage in {"", one.stage}
            and wanted_text in one.text.casefold()
        )
        return Messages(chosen, self.file, self.forgotten)

    def table(self) -> pd.DataFrame:
        """One row per message: when, run, stage, level, source, text, place."""
        import pandas as pd

        names = ("when", "run", "stage", "level", "source", "text", "place")
        frame = pd.DataFrame(
            [[getattr(one, name) for name in names] for one in self._messages], columns=list(names)
        )
        return frame.astype({"run": "Int64"}).assign(when=pd.to_datetime(frame["when"], utc=True))


class MessageLog:
    """The messages of one lab while it lives; what is added gets the present stage, run and time."""

    # `run` is the number of the run under way, None outside runs; `stage` is what is being done.

    def __init__(self) -> None:
        self.run: int | None = None
        self.stage = "step"
        self.file: Path | None = None
        self._messages: deque[Message] = deque(maxlen=KEPT)
        self._added = 0
        self._noted: list[list[Message]] = []
        self._mute = False

    def add(self, level: str, source: str, text: str, when: datetime | None = None, place: str = "") -> None:
        """Append a message; `when` is now if it is not given. A warning that is known to be harmless is none."""
        time = (when or datetime.now(timezone.utc)).astimezone(timezone.utc)
        stamp = time.isoformat(timespec="milliseconds")
        harmless = reason_harmless(source, text) if level in {"WARNING", "INFO"} else ""
        level = "INFO" if harmless else level
        self._append(Message(level, source, text, self.stage, self.run, stamp, place, harmless))

    def _append(self, message: Message) -> None:
        if self._mute:
            return
        self._messages.append(message)
        self._added += 1
        for noted in self._noted:
            noted.append(message)

    @property
    def messages(self) -> Messages:
        """All that is kept, as it is now."""
        kept = tuple(self._messages)
        return Messages(kept, self.file, self._added - len(kept))

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Keep nothing that is said in the block: it repeats what was said of the same graph."""
        before, self._mute = self._mute, True
        try:
            yield
        finally:
            self._mute = before

    @contextmanager
    def noting(self) -> Iterator[list[Message]]:
        """Note what is added in the block, in the list that is given."""
        added: list[Message] = []
        self._noted.append(added)
        try:
            yield added
        finally:
            self._noted = [one for one in self._noted if one is not added]

    def repeat(self, messages: Iterable[Message]) -> None:
        """Add what was said when an export or a graph was made that another lab has made, and this one uses."""
        known = {(one.when, one.text) for one in self._messages}
        for one in messages:
            if (one.when, one.text) not in known:
                self._append(dataclasses.replace(one, run=self.run))

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Give what is said in the block this stage."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    @contextmanager
    def during_run(self, number: int) -> Iterator[None]:
        """Give what is said in the block this run; if it fails, the number goes to another run, so it is taken back."""
        self.run = number
        try:
            yield
        except BaseException:
            for position, one in enumerate(tuple(self._messages)):
                if one.run == number:
                    self._messages[position] = dataclasses.replace(one, run=None)
            raise
        finally:
            self.run = None


def _known(word: str, words: Sequence[str], what: str) -> str:
    """Find the word that was meant, whatever its case and spaces."""
    if not word:
        return ""
    plain = {"".join(one.split()).casefold(): one for one in words}
    try:
        return plain["".join(str(word).split()).casefold()]
    except KeyError:
        raise OptionError(
            f"There is no {what} {word!r} of messages.", fix=f"It is one of: {', '.join(words)}."
        ) from None
