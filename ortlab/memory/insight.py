"""MemoryInsight: ORT's table of what is kept for backward and of the ways to recompute it.

Two releases write it: 1.17 with shapes as products (`[batch x 32 x ]`) and a hint how to enable an option, 1.19 with
one expression (`[((batch)*(32))]`) and no hint.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final

STRATEGIES: Final = {"Recompute": 1, "RecomputeWithCompromise": 2}
"""ORT's words for the strategies of `<cluster>:<strategy>:<count>`."""

_TITLE = re.compile(r"MemoryInsight Summary - (?P<applied>.*\S)")
_LINE = re.compile(r"\|(?P<left>\d{1,9}\s*|\s{3,20}|\t|Freq\s*|[_\s]{5,})\|(?P<right>.*)\|\s*$")
_OPTION = re.compile(r">>Option (?P<number>\d+)\s*: (?P<kind>\w+) subgraph (?P<cluster>\S+)")
_ENABLED = re.compile(r"Enabled, requested count=(?P<requested>-?\d+), actual applied count=(?P<applied>\d+)")
_REUSED = re.compile(r"Output (\d+)\((\d+)\)")
_OUTPUT = re.compile(
    r"- Output (?P<number>\d+)\s*: \[(?P<shape>.+)\], byte/elem: (?P<bytes>\d+), (?P<percent>\d+)% saved"
)

_ROW: Final = "For each row options"


@dataclass(frozen=True)
class SavedOutput:
    """One output that is kept for backward in each place of a row."""

    output: int  #: Which output of the cluster's last node
    shape: str  #: As printed - a product "a x b x ", or one expression over symbolic dimensions
    element_bytes: int  #: Bytes of an element
    saved_percent: int  #: How much of it the option saves, in per cent - 100, or less for a compromise

    @property
    def elements(self) -> str:
        """Number of elements as an expression over symbolic dimensions."""
        sizes = [size.strip() for size in f"{self.shape} ".split(" x ") if size.strip()]
        return "*".join(f"({size})" for size in sizes)

    @property
    def saving(self) -> str:
        """Bytes that the option saves in one place, as an expression over symbolic dimensions."""
        return f"({self.elements})*{self.element_bytes}*{self.saved_percent}/100"


@dataclass(frozen=True)
class Option:
    """One way to recompute what a row keeps."""

    cluster: str  #: The operators that are recomputed together - "BiasGelu+"
    strategy: int  #: 1 recompute, 2 recompute with compromise
    #: How many places the user asked for, -1 for all; None where the option is disabled.
    requested: int | None = None
    applied: int | None = None  #: In how many places ORT recomputes; None where the option is disabled
    #: Output to the number of places in which its buffer is another's, reused - recomputing saves nothing there.
    reused: tuple[tuple[int, int], ...] = ()
    outputs: tuple[SavedOutput, ...] = ()  #: What is not kept any more

    @property
    def config(self) -> str:
        """What `Options.memory_plan` takes, for all places."""
        return f"{self.cluster}:{self.strategy}:-1"


@dataclass(frozen=True)
class Row:
    """A cluster of saved activations, and the options for it, of which one at most can be enabled."""

    places: int  #: How often the cluster occurs in the graph
    options: tuple[Option, ...] = ()  #: The ways to recompute it


@dataclass(frozen=True)
class MemoryInsight:
    """The whole table."""

    applied: str = ""  #: What its title says the user has configured
    rows: tuple[Row, ...] = ()  #: The clusters
    #: Whether the text went on to the table's last line; a log that was cut off did not.
    complete: bool = field(default=True, compare=False)

    def savings(self) -> dict[str, tuple[str, int]]:
        """Add up what each plan saves, over all its places and all outputs of each.

        `get_serialized_ortmodule_memory_stat` of 1.19.2 counts one output in each place, whichever a hash table
        holds first: for a LayerNormalization that is the normalised tensor in one place and the mean, which is
        hundreds of times smaller, in the next, and others in the next process. Its text lists them all.

        Returns
        -------
        dict
            Configuration of a plan ("LayerNormalization+:1:-1") to the sum in bytes, an expression over symbols, and
            the number of places.
        """
        terms: dict[str, list[str]] = {}
        found: Counter[str] = Counter()
        for row in self.rows:
            for option in row.options:
                found[option.config] += row.places
                sizes = terms.setdefault(option.config, [])
                sizes += [f"{row.places}*{activations.saving}" for activations in option.outputs]
        return {config: (" + ".join(sizes), found[config]) for config, sizes in terms.items() if sizes}

    def exclusive(self) -> dict[str, tuple[str, ...]]:
        """Return, for each plan, the others that share a row with it: of those, one at most can be enabled."""
        found: dict[str, dict[str, None]] = {}
        for row in self.rows:
            configs = [option.config for option in row.options]
            for config in configs:
                others = found.setdefault(config, {})
                others.update(dict.fromkeys(other for other in configs if other != config))
        return {config: tuple(sorted(others)) for config, others in found.items()}

    def applied_counts(self) -> dict[str, int]:
        """Return in how many places each enabled plan is applied, by the plan without its count: "Gelu+:1"."""
        found: Counter[str] = Counter()
        for row in self.rows:
            for option in row.options:
                if option.applied is not None:
                    found[f"{option.cluster}:{option.strategy}"] += option.applied
        return dict(found)


def read(text: str) -> MemoryInsight:
    """Read the table from a log or from ORT's own report; without rows if the text holds no such table.

    There may be other lines before, between and after, and prefixes such as "worker-0: ".
    """
    applied, complete = "", False
    rows: list[Row] = []
    for line in text.splitlines():
        if title := _TITLE.search(line):
            applied = title["applied"]
        elif rows and line.rstrip().endswith("=" * 20):
            complete = True
            break
        elif cells := _LINE.search(line):
            _read_line(cells["left"].strip(), cells["right"], rows)
    return MemoryInsight(applied, tuple(rows), complete or not (applied or rows))


def _read_line(left: str, right: str, rows: list[Row]) -> None:
    if left.isdigit() and right.strip().startswith(_ROW):
        rows.append(Row(int(left)))
    if not rows:
        return
    row = rows[-1]
    if found := _OPTION.search(right):
        if found["kind"] in STRATEGIES:
            option = Option(found["cluster"], STRATEGIES[found["kind"]])
            rows[-1] = Row(row.places, (*row.options, option))
        return
    if not row.options:
        return
    option = row.options[-1]
    if "Status " in right:
        enabled = _ENABLED.search(right)
        requested, applied = map(int, enabled.groups()) if enabled else (None, None)
        option = replace(option, requested=requested, applied=applied)
    elif "ReuseFreq" in right:
        reused = tuple((int(output), int(count)) for output, count in _REUSED.findall(right))
        option = replace(option, reused=reused)
    elif kept := _OUTPUT.search(right):
        sizes = int(kept["bytes"]), int(kept["percent"])
        saved = SavedOutput(int(kept["number"]), kept["shape"], *sizes)
        option = replace(option, outputs=(*option.outputs, saved))
    rows[-1] = Row(row.places, (*row.options[:-1], option))
