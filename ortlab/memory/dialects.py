"""Three ways in which recompute plans have been written down since 2022, the logs that go with them, and plain words.

- 2022: `Dropout:0,Gelu:1`, operator and strategy; logged as a MemoryAlleviation summary.
- 2023: `BiasGelu+:1:-1,Cast+:2:-1`, cluster, strategy and count; logged as a feature matrix and a MemoryInsight table.
- 2024: a JSON file with a list of the same plans, which 1.19.2 wants; logged as the same two.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ortlab.errors import OptionError
from ortlab.memory import insight

if TYPE_CHECKING:
    from ortlab.memory.insight import MemoryInsight

_ONE_OPERATOR: Final = re.compile(r"(?P<operator>\w+)\+:(?P<strategy>[01]):-1")


def write_json(plans: Iterable[str]) -> str:
    """Write plans as 1.19.2 wants them in the file that ORTMODULE_MEMORY_OPT_CONFIG names."""
    return json.dumps(list(plans))


def write_inline(plans: Iterable[str]) -> str:
    """Write plans as releases of 2023 wanted them in ORTMODULE_MEMORY_OPT_CONFIG itself."""
    return ",".join(plans)


def write_alleviation(plans: Iterable[str]) -> str:
    """Write plans as ORTMODULE_ENABLE_MEMORY_ALLEVIATION wanted them in 2022.

    Raises OptionError where a plan is more than one operator, recomputed wherever it occurs: that dialect could say no
    more.
    """
    entries = []
    for plan in plans:
        one = _ONE_OPERATOR.fullmatch(plan)
        if one is None:
            raise OptionError(
                f"{plan} cannot be written as in 2022.",
                why="That dialect has one operator, strategies 0 and 1, and no count.",
                fix="Write it inline or as JSON.",
            )
        entries.append(f"{one['operator']}:{one['strategy']}")
    return ",".join(entries)


_WRITERS: Final = {"2022": write_alleviation, "2023": write_inline, "2024": write_json}


def write(plans: Iterable[str], dialect: str = "2024") -> str:
    """Write plans, as configurations, in the dialect of "2022", "2023" or "2024".

    Raises OptionError where there is no such dialect, or it cannot say what a plan says.
    """
    if dialect not in _WRITERS:
        raise OptionError(
            f"There is no dialect {dialect!r}.",
            why="They are named after the year: 2022 (Gelu:1), 2023 (Gelu+:1:-1) and 2024 (a JSON list).",
            fix="1.19.2 reads 2024.",
        )
    return _WRITERS[dialect](plans)


def save(path: str | os.PathLike[str], plans: Iterable[str], dialect: str = "2024") -> Path:
    """Write plans to a file; raise OptionError as `write` does, or where the file cannot be written."""
    text, file = write(plans, dialect), Path(path)
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{file!s} cannot be written.", why=f"{error}.", fix="Choose another path."
        ) from error
    return file


# ---- the summary of 2022 --------------------------------------------------------------------------------------------

_TITLE: Final = "MemoryAlleviation Summary:"
_TYPE: Final = re.compile(r"(?<![\w-])([A-Za-z]\w*)-([012])(?=,|\s*$)")
_SUBGRAPH: Final = re.compile(r"Subgraph: (?P<operators>\S.*?) \+\s+(?P<status>Recompute|Disabled)")
_PATTERN: Final = re.compile(r"(?P<shape>\S.* x)\s+(?P<places>\d+)\s*$")
_HEADING: Final = re.compile(r"^(?P<before>.*?)Shape\s+Frequency\s*$")
_PREFIX: Final = re.compile(r"^.*[:\]>|]\s+")
_RULE: Final = "=" * 33


@dataclass(frozen=True)
class Pattern:
    """A shape that is kept."""

    shape: tuple[str, ...]  #: Its sizes, which may be expressions over symbolic dimensions
    places: int  #: How often it is kept ("Frequency")


@dataclass(frozen=True)
class Subgraph:
    """Operators that are recomputed together."""

    operators: tuple[str, ...]  #: Their types, in order
    on: bool  #: Whether they are recomputed
    patterns: tuple[Pattern, ...] = ()  #: What need not be kept then

    @property
    def config(self) -> str:
        """The plan of today that does the same."""
        return "".join(f"{operator}+" for operator in self.operators) + ":1:-1"


@dataclass(frozen=True)
class Alleviation:
    """One summary."""

    #: Operator type to the strategy that the user had asked for - 0 off, 1 recompute.
    types: tuple[tuple[str, int], ...] = ()
    subgraphs: tuple[Subgraph, ...] = ()  #: What could be recomputed
    #: Whether the text went on to the summary's last line; a log that was cut off did not.
    complete: bool = True


def read_summaries(text: str) -> tuple[Alleviation, ...]:
    """Read every summary of a log; the lines may have prefixes such as "worker-0: "."""
    return tuple(_read_summary(part) for part in text.split(_TITLE)[1:])


def _read_summary(text: str) -> Alleviation:
    types: tuple[tuple[str, int], ...] = ()
    subgraphs: list[Subgraph] = []
    rules, column = 0, -1
    for raw in text.splitlines():
        line = raw.expandtabs(8)
        if _RULE in line:
            rules += 1
            if rules == 2:  # noqa: PLR2004 - above the first subgraph, and below the last
                break
        elif found := _SUBGRAPH.search(line):
            operators = tuple(found["operators"].split(" + "))
            subgraphs.append(Subgraph(operators, found["status"] == "Recompute"))
        elif not rules and (asked := _TYPE.findall(line)):
            types = tuple((operator, int(strategy)) for operator, strategy in asked)
        elif found := _HEADING.match(line):
            column = len(found["before"])
        elif subgraphs and (found := _PATTERN.search(_without_prefix(line, column))):
            words = [word.strip() for word in found["shape"].removesuffix(" x").split(" x ")]
            last = subgraphs[-1]
            pattern = Pattern(tuple(words), int(found["places"]))
            subgraphs[-1] = Subgraph(last.operators, last.on, (*last.patterns, pattern))
    return Alleviation(types, tuple(subgraphs), rules > 1)


def _without_prefix(line: str, column: int) -> str:
    """Leave out what a log has put before a shape, which stands under its heading, or where the prefix ends."""
    if column >= 0 and line[column : column + 1].strip() and not line[max(column - 1, 0) : column].strip():
        return line[column:]
    return _PREFIX.sub("", line, count=1)


# ---- the feature matrix ---------------------------------------------------------------------------------------------

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_MODE: Final = re.compile(r"features ON/OFF for \[(?P<mode>\w+)\] mode")
_FEATURE: Final = re.compile(
    r"(?P<part> - )?(?P<name>\w+(?:[ /]\w+)*)\s*:\s+(?P<on>ON|OFF)\s+:\s+(?P<about>.*\S)"
)
_PLAN: Final = re.compile(
    r"(?P<config>\S+:[012]:(?:-1|\d+))\s+(?P<places>\d+)\s+(?P<bytes>[\d,]+)\s+(?P<formula>.*\S)"
)
_TOTAL: Final = re.compile(
    r"initialization overhead is (?P<total>[\d.]+)s where export takes (?P<export>[\d.]+)s"
)
_OTHER: Final = re.compile(
    r"graph builder init takes (?P<builder>[\d.]+)s, runtime detection takes (?P<detection>[\d.]+)s, "
    r"graph building takes (?P<graph>[\d.]+)s, session creation takes (?P<session>[\d.]+)s"
)
_VERSIONS: Final = re.compile(r"Versions: (?P<all>.*\S)")
_SYMBOL: Final = re.compile(r"(\w+)=(\d+),")

_START: Final = "features ON/OFF for ["
_END: Final = re.compile(r"\*{20}")


@dataclass(frozen=True)
class Feature:
    """A row that is no plan: "Compute Optimizer", on, and what it says about it."""

    name: str  #: The feature
    on: bool  #: Whether it is on
    about: str  #: The text beside it
    #: Whether it is a part of the feature above, as "FLOPReduction" of "Compute Optimizer".
    part: bool = False


@dataclass(frozen=True)
class LoggedPlan:
    """A row of the plan table."""

    config: str  #: `<cluster>:<strategy>:<count>`, or several, with commas
    on: bool  #: Whether the plan was applied
    places: int  #: How often its cluster occurs ("Freq")
    saving_bytes: int  #: What ORT predicted that it saves for the first batch, in bytes; not measured
    saving_symbolic: str  #: The same over symbolic dimensions


@dataclass(frozen=True)
class StartUp:
    """Seconds that the parts of the start took."""

    total: float  #: All of it
    #: The export; the graph builder's making; the detection of the first batch's properties; the gradient graph; the
    #: session.
    export: float
    builder: float
    detection: float
    graph: float
    session: float


@dataclass(frozen=True)
class FeatureMatrix:
    """What ORTModule said when it started, of release 1.17 or 1.19."""

    mode: str = ""  #: "training" or "inference"
    features: tuple[Feature, ...] = ()  #: The rows, in order
    plans: tuple[LoggedPlan, ...] = ()  #: The recompute plans, in order
    symbols: tuple[tuple[str, int], ...] = ()  #: Symbolic dimension to its size in the first batch
    start_up: StartUp | None = None  #: Seconds; None if the log does not say
    versions: str = ""  #: The line of versions, as printed
    #: Whether the text went on to the line of stars that ends it; a log that was cut off did not.
    complete: bool = field(default=True, compare=False)


def read_matrix(text: str) -> FeatureMatrix:
    """Read the matrix from a log with other lines, prefixes and colours; without features if the text holds none."""
    text = _COLOURS.sub("", text)
    features: list[Feature] = []
    plans: list[LoggedPlan] = []
    _, found, body = text.partition(_START)
    body, _, _ = body.partition(_START)  # one for each mode, or for each process
    for line in body.splitlines() if found else ():
        feature = _FEATURE.search(line)
        if feature is None:
            continue
        on, about = feature["on"] == "ON", feature["about"]
        plan = _PLAN.fullmatch(about) if feature["part"] else None
        if plan:
            size = int(plan["bytes"].replace(",", ""))
            plans.append(LoggedPlan(plan["config"], on, int(plan["places"]), size, plan["formula"]))
        else:
            features.append(Feature(feature["name"], on, about, part=feature["part"] is not None))
    mode, versions = _MODE.search(text), _VERSIONS.search(body)
    return FeatureMatrix(
        mode["mode"] if mode else "",
        tuple(features),
        tuple(plans),
        _symbols(body),
        _start_up(body),
        versions["all"] if versions else "",
        complete=not found or _END.search(body) is not None,
    )


def _symbols(text: str) -> tuple[tuple[str, int], ...]:
    _, found, rest = text.partition("1st batch symbolic dim values:")
    if not found:
        return ()
    values, _, _ = rest.partition("***")
    return tuple((name, int(size)) for name, size in _SYMBOL.findall(values))


def _start_up(text: str) -> StartUp | None:
    total, other = _TOTAL.search(text), _OTHER.search(text)
    if total is None or other is None:
        return None
    return StartUp(*(float(seconds) for seconds in (*total.groups(), *other.groups())))


# ---- a whole log ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """What a log says about recomputation; false where it has no table of plans."""

    alleviations: tuple[Alleviation, ...]  #: The summaries of 2022
    matrix: FeatureMatrix  #: The feature matrix, without features if there is none
    insight: MemoryInsight  #: The MemoryInsight table, without rows if there is none
    tables: str = field(default="", compare=False)  #: Their lines, as they stand in the log

    def __bool__(self) -> bool:
        """Tell whether there is any table, whole or cut off."""
        return bool(self.alleviations or self.matrix.features or self.insight.rows)

    @property
    def complete(self) -> bool:
        """Whether no table was cut off before its end."""
        return (
            self.matrix.complete and self.insight.complete and all(one.complete for one in self.alleviations)
        )


_RULES: Final = r"(?:.*?(?<!=)={33,}){2}"
_TABLE: Final = re.compile(
    rf"^[^\n]*(?:(?:MemoryAlleviation|MemoryInsight) Summary(?:{_RULES}|.*)"
    r"|features ON/OFF for \[(?:.*?\*{20,}|.*))[^\n]*",
    re.DOTALL | re.MULTILINE,
)
"""A table from its title on, to its end or to that of a log that was cut off."""


def read_log(text: str) -> Log:
    """Read an old log, whichever release wrote it."""
    tables = "\n\n".join(one.group() for one in _TABLE.finditer(text))
    log = Log(read_summaries(text), read_matrix(text), insight.read(text), tables)
    if log.complete or text.endswith("\n") or "\n" not in text:
        return log
    return read_log(text[: text.rindex("\n") + 1])  # the line in which it was cut may hold half a number


# ---- plain words ----------------------------------------------------------------------------------------------------

_WORDS: Final = {
    "Gelu": "GELU",
    "FastGelu": "GELU",
    "QuickGelu": "SiLU or quick GELU",
    "BiasGelu": "GELU and its bias",
    "Relu": "ReLU",
    "Dropout": "dropout",
    "BitmaskDropout": "dropout",
    "BiasDropout": "dropout and a bias",
    "LayerNormalization": "layer normalisation",
    "SimplifiedLayerNormalization": "RMS normalisation",
    "SkipLayerNormalization": "layer normalisation",
    "Softmax": "softmax",
    "BiasSoftmax": "softmax and its bias",
    "BiasSoftmaxDropout": "softmax and dropout",
    "MatMul": "matmul",
    "FusedMatMul": "matmul",
    "Gemm": "matmul",
    "Add": "addition",
    "Sub": "subtraction",
    "Mul": "multiplication",
    "Div": "division",
    "Pow": "power",
    "Sqrt": "square root",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Erf": "error function",
    "Neg": "negation",
    "Cast": "cast",
    "Where": "where",
    "Gather": "gather",
    "Concat": "concat",
    "Slice": "slice",
    "Split": "split",
    "Expand": "expand",
    "Tile": "tile",
    "Reshape": "reshape",
    "Transpose": "transpose",
    "Squeeze": "reshape",
    "Unsqueeze": "reshape",
}
"""Operators in words; others keep ORT's name."""


def operators(cluster: str) -> list[str]:
    """Split a cluster, or several with commas, into its operators: "Where+Dropout+" holds two."""
    return [name for name in re.split(r"[+,]", cluster) if name]


def sentence(cluster: str, strategy: int, frequency: int, layers: int | None = None) -> str:
    """Say what a plan does in `frequency` places, which are in `layers` layers of the model.

    Strategy 1 recomputes, 2 recomputes with compromise. `layers` is None where that is not known.
    """
    words: list[str] = []
    for name in operators(cluster):
        word = _WORDS.get(name, name)
        if word not in words[-1:]:
            words.append(word)
    what = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)
    where = _counted(frequency, "place")
    if layers:
        where = (
            _counted(layers, "layer") if layers == frequency else f"{where} of {_counted(layers, 'layer')}"
        )
    partly = "; that saves a part of it" if strategy > 1 else ""
    return f"Recompute {what} in {where} instead of keeping it{partly}."


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
