"""The MemoryAlleviation summary of 2022: which activations a first recompute feature would not keep, read and written.

It was the ancestor of today's plans: a strategy per operator type, in ORTMODULE_ENABLE_MEMORY_ALLEVIATION.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_TITLE: Final = "MemoryAlleviation Summary:"
_TYPE: Final = re.compile(r"(?<![\w-])([A-Za-z]\w*)-([012])(?=,|\s*$)")
_SUBGRAPH: Final = re.compile(r"Subgraph: (?P<operators>\S.*?) \+\s+(?P<status>Recompute|Disabled)")
_PATTERN: Final = re.compile(r"(?P<shape>\S.* x)\s+(?P<places>\d+)\s*$")
_HEADING: Final = re.compile(r"^(?P<before>.*?)Shape\s+Frequency\s*$")
_PREFIX: Final = re.compile(r"^.*[:\]>|]\s+")
_RULE: Final = "=" * 33
_DASHES: Final = "-" * 32


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


def read(text: str) -> tuple[Alleviation, ...]:
    """Read every summary of a log; the lines may have prefixes such as "worker-0: "."""
    return tuple(_read_one(part) for part in text.split(_TITLE)[1:])


def _read_one(text: str) -> Alleviation:
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


def write(summary: Alleviation, prefix: str = "") -> str:
    """Write a summary as ORT did in 2022, with tabs as spaces and without a line break at its end.

    Each line begins with `prefix`, such as "worker-0: ".
    """
    types = ", ".join(f"{operator}-{strategy}" for operator, strategy in summary.types)
    lines = [_TITLE, "\tType config:", f"\t\t{types}", f"\t{_RULE}"]
    for subgraph in summary.subgraphs:
        operators = "".join(f"{operator} + " for operator in subgraph.operators).rstrip()
        lines += [
            f"\tSubgraph: {operators}\t{'Recompute' if subgraph.on else 'Disabled'}",
            "\t\tShape\tFrequency",
            *(f"\t\t{' x '.join(kept.shape)} x \t{kept.places}" for kept in subgraph.patterns),
            f"\t{_DASHES}",
        ]
    return "\n".join((prefix + line).expandtabs(8) for line in [*lines, f"\t{_RULE}"])
