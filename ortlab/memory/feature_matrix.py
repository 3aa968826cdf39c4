"""The feature matrix that ORTModule prints when it starts: what is on, and which recompute plans there are."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

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

_NOTES: Final = """\
Note 1: use comma to enable multiple plans at the same time.
  export ORTMODULE_MEMORY_OPT_CONFIG=<plan1 config>,<plan2 config>,...
Note 2: saving is calculated based on the 1st batch symbolic dim values:"""
_STARS: Final = "*" * 72


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


def read(text: str) -> FeatureMatrix:
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


def write(matrix: FeatureMatrix) -> str:
    """Write the matrix as release 1.17 printed it, without a line break at its end."""
    lines = [f"ORTModule is enabled with following features ON/OFF for [{matrix.mode}] mode:", ""]
    for feature in matrix.features:
        lines.append(_row(feature.name, feature.about, on=feature.on, part=feature.part))
        if feature.name == "Memory Optimizer" and matrix.plans:
            heading = f"{'Config':<60}{'Freq':<8}{'Saving(B)':<16}Saving Symbolic(Bytes)"
            lines.append(f"{'':38}{heading}")
            lines += [_plan_row(number, plan) for number, plan in enumerate(matrix.plans, start=1)]
    if matrix.start_up:
        spent = matrix.start_up
        lines += [
            "",
            f"Total ORT initialization overhead is {spent.total:.2f}s where export takes {spent.export:.2f}s.",
            (
                f"Other overhead details:  graph builder init takes {spent.builder:.2f}s, runtime detection takes "
                f"{spent.detection:.2f}s, graph building takes {spent.graph:.2f}s, session creation takes "
                f"{spent.session:.2f}s"
            ),
        ]
    if matrix.versions:
        lines += ["", f"Versions: {matrix.versions}"]
    if matrix.symbols:
        lines += ["", _NOTES, *(f"  {name}={size}," for name, size in matrix.symbols)]
    return "\n".join([*lines, "", _STARS])


def _row(name: str, about: str, *, on: bool, part: bool) -> str:
    title = f"   - {name:<19}" if part else f"  {name:<22}"
    return f"{title}:   {'ON' if on else 'OFF':<6}:   {about}"


def _plan_row(number: int, plan: LoggedPlan) -> str:
    about = f"{plan.config:<60}{plan.places:<8}{plan.saving_bytes:<16,}{plan.saving_symbolic}"
    return _row(f"Plan {number}", about, on=plan.on, part=True)
