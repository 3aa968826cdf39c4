"""A graph as rows that open: modules and their operators, forward and backward of each in one row, kept values between.

Everything that is written is words of here; `static/graph_map.js` puts them into rows, and lets rows open and close.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.graphs.nodes import executed_operator, exported_name, joined, node_names, operators_before, phases
from ortlab.graphs.summary import phases_run
from ortlab.memory.symbolic_sizes import shape_at

if TYPE_CHECKING:
    from onnx import NodeProto

    from ortlab.graphs.diff import GraphDiff
    from ortlab.graphs.stages import Graph
    from ortlab.memory.saved_activations import SavedActivation

KINDS: Final = (
    ("products", re.compile(r"MatMul|Gemm|Conv|Einsum|Attention|LSTM|GRU|RNN|addmm|mm$", re.IGNORECASE)),
    ("norms, softmax", re.compile(r"norm|softmax(?!.*loss)", re.IGNORECASE)),
    ("activations", re.compile(r"elu|Tanh|Sigmoid|Erf|Dropout|Swish|softplus", re.IGNORECASE)),
    ("loss, sums", re.compile(r"Reduce|Loss|CrossEntropy|AccumulateGrad|ArgMax|CumSum|Pool")),
    ("shapes, copies", re.compile(
        r"Reshape|Transpose|queeze|Concat|Slice|Gather|Expand|Shape|Split|Identity|Constant|Flatten|Pad|Tile|Cast"
        r"|PassThrough|Scatter|Range|OneHot|index"
    )),
)  # fmt: skip
"""Kinds of operators that have a colour, with what their names have; the first that fits, else `OTHER`."""

OTHER: Final = "arithmetic, other"

OWN: Final = "its own operators"
"""Title of what a module does beside calling other modules."""

ITSELF: Final = "the model itself"
"""Title of the nodes that are in the model's own forward."""

NOT_KNOWN: Final = "module not known"
"""Title of the nodes of which nobody knows the module."""

MARKS: Final = ("added", "recomputed", "moved", "changed", "fused", "removed")
"""What a node can be in a difference, in the order of the colours."""

_SHADES: Final = "0072b2 e69f00 009e73 cc79a7 999999 56b4e9", "009e73 e69f00 cc79a7 56b4e9 0072b2 d55e00"
"""Okabe and Ito's colours and a grey: of the kinds, and of the marks."""

COLOURS: Final = {
    **{str(number): f"#{shade}" for number, shade in enumerate(_SHADES[0].split())},
    **{mark: f"#{shade}" for mark, shade in zip(MARKS, _SHADES[1].split(), strict=True)},
}
"""Colour of each kind, by its number as text, and of each mark."""

MANY_LAYERS: Final = 16
"""Layers of one list up to which each has a row of its own."""

_NODES_NAMED: Final = 6
_READERS_NAMED: Final = 8
_OPERATORS_NAMED: Final = 8
_TITLE: Final = 80


@dataclass
class _Row:
    """A module, some modules together, or an operation: a node of the forward with those of the backward for it."""

    title: str
    depth: int
    parent: int
    path: str = ""  # of the module; of an operation that of its module
    nodes: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    is_operation: bool = False
    kept: list[int] = field(default_factory=list)  # places in the list of what is kept: made here
    read: list[int] = field(default_factory=list)  # read here last


@dataclass
class _Level:
    """What is in a module: its own nodes by the exported node that they are of, forward and backward, and modules."""

    own: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    inner: dict[str, _Level] = field(default_factory=dict)

    @cached_property
    def start(self) -> int:
        """Where its forward begins, for the order of rows: the median of its nodes, as small ones may run early."""
        sides: list[tuple[list[int], list[int]]] = []
        waiting = [self]
        while waiting:
            one = waiting.pop()
            sides += one.own.values()
            waiting += one.inner.values()
        starts = [min(ahead) for ahead, _ in sides if ahead] or [min(back) for _, back in sides]
        return sorted(starts)[len(starts) // 2]


@dataclass(frozen=True)
class _Kept:
    maker: int
    reader: int
    row: SavedActivation | None  # None where nobody has read the saved activations
    readers: tuple[int, ...]


def graph_map(
    graph: Graph, difference: GraphDiff | None = None, *, marks: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what a map of a graph shows, in plain JSON types: rows in order, what is kept, and a legend."""
    # Bytes are there where the saved activations were read, times where a step was profiled. With a difference, which
    # is of this graph to another before, what is only in the other comes as well, marked as removed. Or `marks` has one
    # of `MARKS` for names of nodes.
    return _Map(graph, difference, marks or {}).told()


class _Map:
    """Puts the nodes of a graph into rows."""

    def __init__(self, graph: Graph, difference: GraphDiff | None, marks: Mapping[str, str]) -> None:
        self._graph = graph
        self._difference = difference
        self._nodes: list[NodeProto] = list(graph.model.graph.node)
        self._names = node_names(graph.model.graph)
        self._origins = list(graph.origins.values())
        self._phases = phases_run(graph)
        self._marks = [mark if (mark := marks.get(name, "")) in MARKS else "" for name in self._names]
        if difference is not None:
            self._mark(difference)
        self._ms = self._times()
        self._kept = self._what_is_kept()
        self._rows: list[_Row] = []
        self._row_of: dict[int, int] = {}  # of each node, the operation's
        self._build()

    # ---- what is known of the nodes ---------------------------------------------------------------------------

    def _mark(self, difference: GraphDiff) -> None:
        """Mark the nodes of the second graph, and take over those that only the first has."""
        before, after = difference.colours()
        copies = {one.name for one in difference.recomputed}
        self._marks = ["recomputed" if name in copies else str(after.get(name, "")) for name in self._names]
        if not difference.graphs:
            return
        first = difference.graphs[0]
        gone = [
            (node, name, phase)
            for node, name, phase in zip(
                first.model.graph.node, node_names(first.model.graph), phases(first.model.graph), strict=True
            )
            if before.get(name) in {"removed", "fused"} and phase is not None
        ]
        for node, name, phase in gone:
            self._nodes.append(node)
            self._names.append(name)
            self._phases.append(phase)
            self._origins.append(first.origins[name])
            self._marks.append("removed")

    def _times(self) -> list[float | None]:
        if self._graph.trace is None:
            return [None] * len(self._nodes)
        took = {name: node.ms for node in self._graph.trace.nodes for name in node.outputs if name}
        return [next((took[name] for name in node.output if name in took), 0.0) for node in self._nodes]

    def _what_is_kept(self) -> list[_Kept]:
        place = {name: at for at, name in enumerate(self._names) if self._marks[at] != "removed"}
        if self._graph.activations is not None:
            found = []
            for row in self._graph.activations.rows:
                by = tuple(sorted(place[name] for name in row.kept_by if name in place))
                if row.node in place and by:
                    found.append(_Kept(place[row.node], by[-1], row, by))
            return found
        readers_of: dict[str, list[int]] = {}
        for at, node in enumerate(self._nodes):
            if self._phases[at] in {"backward", "recomputed"} and self._marks[at] != "removed":
                for name in node.input:
                    readers_of.setdefault(name, []).append(at)
        return [
            _Kept(at, readers[-1], None, tuple(readers))
            for at, node in enumerate(self._nodes)
            if self._phases[at] == "forward" and self._marks[at] != "removed" and node.op_type != "Constant"
            for name in node.output
            if (readers := readers_of.get(name))
        ]

    # ---- rows -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Make a tree of the modules, each with its operations, in the order in which their forward runs."""
        root = _Level()
        operators = {node.op_type for node in self._nodes}
        for at, phase in enumerate(self._phases):
            if phase is None:
                continue
            origin = self._origins[at]
            module = (
                origin.module if self._graph.traced.modules else operators_before(origin.module, operators)
            )
            path = parts_of(module) if module else [] if origin.is_known else [NOT_KNOWN]
            level = root
            for part in path:
                level = level.inner.setdefault(part, _Level())
            sides = level.own.setdefault(exported_name(self._names[at]), ([], []))
            sides[phase != "forward"].append(at)
        self._inside(root, -1, 0, "")
        for number, kept in enumerate(self._kept):
            self._rows[self._row_of[kept.maker]].kept.append(number)
            self._rows[self._row_of[kept.reader]].read.append(number)
        for row in reversed(self._rows):  # children stand behind their parents
            if row.parent >= 0:
                above = self._rows[row.parent]
                for side in (0, 1):
                    above.nodes[side].extend(row.nodes[side])
                above.kept.extend(row.kept)
                above.read.extend(row.read)

    def _inside(self, level: _Level, at: int, depth: int, path: str) -> None:
        """Write what is in a module, as it runs; its own operations open together where it has modules, too."""
        if at >= 0 and not level.inner:
            self._operations(level.own, at, depth, path)
            return
        parts: list[tuple[bool, int, Callable[[], None]]] = []
        if level.own:
            own = _Level(own=level.own)
            title = ITSELF if at < 0 else OWN
            parts.append((False, own.start, partial(self._module, own, title, at, depth, path)))
        alone, lists = _grouped(level.inner)
        for name, below in alone:
            inner = path if name == NOT_KNOWN else joined(path, name)
            write = partial(self._module, below, name, at, depth, inner)
            parts.append((name == NOT_KNOWN, below.start, write))
        for title, layers in lists:
            parts.append((False, layers[0][1].start, partial(self._layers, layers, title, at, depth, path)))
        for part in sorted(parts, key=lambda part: part[:2]):
            part[2]()

    def _module(self, level: _Level, title: str, parent: int, depth: int, path: str) -> None:
        while len(level.inner) == 1 and not level.own:  # a module that only holds another
            name, level = next(iter(level.inner.items()))
            title, path = f"{title}.{name}", f"{path}.{name}"
        self._inside(level, self._add(_Row(title, depth, parent, path)), depth + 1, path)

    def _layers(
        self, layers: Sequence[tuple[str, _Level]], title: str, parent: int, depth: int, path: str
    ) -> None:
        at = self._add(_Row(title, depth, parent, path))
        for name, level in layers:
            self._module(level, name, at, depth + 1, joined(path, name))

    def _operations(
        self, own: Mapping[str, tuple[list[int], list[int]]], parent: int, depth: int, path: str
    ) -> None:
        for key, sides in sorted(own.items(), key=lambda item: min(item[1][0] or item[1][1])):
            lead = (sides[0] or sides[1])[0]
            number = re.search(r"_(\d+)$", key)
            title = _operator(self._nodes[lead]) + (f" #{number[1]}" if number else "")
            at = self._add(_Row(title, depth, parent, path, is_operation=True))
            self._rows[at].nodes[0].extend(sides[0])
            self._rows[at].nodes[1].extend(sides[1])
            for node in (*sides[0], *sides[1]):
                self._row_of[node] = at

    def _add(self, row: _Row) -> int:
        self._rows.append(row)
        return len(self._rows) - 1

    # ---- what is told -----------------------------------------------------------------------------------------

    def told(self) -> dict[str, Any]:
        known = self._graph.activations is not None
        total = sum(kept.row.bytes or 0 for kept in self._kept if kept.row is not None)
        rows = [self._told(row) for row in self._rows]
        used = sorted({kind for row in rows for side in (row["f"], row["b"]) for kind in side["k"]})
        present = Counter(filter(None, self._marks))
        copies = self._phases.count("recomputed")
        summary = [
            units.many(sum(phase is not None for phase in self._phases) - present["removed"], "node"),
            f"{units.many(len(self._kept), 'buffer' if known else 'value')} kept for backward"
            + (f", {units.size(total)}" if known else ""),
            f"{units.count(copies)} recomputed" if copies else "",
        ]
        return {
            "rows": rows,
            "kept": [
                [
                    self._row_of[kept.maker],
                    self._row_of[kept.reader],
                    (kept.row.bytes or 0) if kept.row else 0,
                ]
                for kept in self._kept
            ],
            "own": OWN,
            "sized": known,
            "planned": known and any(kept.row.plans is not None for kept in self._kept if kept.row),
            "timed": self._graph.trace is not None,
            "backward": "backward" in self._phases,
            "compared": self._difference is not None,
            "colours": COLOURS,
            "kinds": {key: (*(name for name, _ in KINDS), OTHER)[int(key)] for key in used},
            "marks": {mark: units.count(present[mark]) for mark in MARKS if present[mark]},
            "summary": ", ".join(filter(None, summary)),
        }

    def _told(self, row: _Row) -> dict[str, Any]:
        kept = sum(self._bytes(number) for number in row.kept)
        read = sum(self._bytes(number) for number in row.read)
        told: dict[str, Any] = {
            "t": units.fold(units.printable(row.title), _TITLE),
            "d": row.depth,
            "p": row.parent,
            "f": self._side(row.nodes[0], kept, row.kept),
            "b": self._side(row.nodes[1], read, row.read),
            "facts": self._operation_facts(row) if row.is_operation else self._module_facts(row),
        }
        if row.is_operation:
            told["n"] = [
                self._names[at] for at in (*row.nodes[0], *row.nodes[1]) if self._marks[at] != "removed"
            ]
        return told

    def _side(self, nodes: Sequence[int], held: int, kept: Sequence[int]) -> dict[str, Any]:
        """Say what one side of a row has: how many nodes of each kind and mark, its time and its bytes, with words."""
        here = [at for at in nodes if self._marks[at] != "removed"]
        kinds = Counter(_kind(self._nodes[at]) for at in here)
        marks = Counter(self._marks[at] for at in nodes if self._marks[at])
        ms = sum(self._ms[at] or 0.0 for at in here)
        sized = self._graph.activations is not None
        return {
            "k": {str(kind): count for kind, count in sorted(kinds.items())},
            "m": dict(marks),
            "r": sum(self._phases[at] == "recomputed" for at in here),
            "ms": round(ms, 5),
            "rms": round(sum(self._ms[at] or 0.0 for at in here if self._phases[at] == "recomputed"), 5),
            "by": held if sized else len(kept),
            "w": {
                "operator": units.count(len(here)) if here else "",
                "time": units.duration(ms) if here and self._graph.trace is not None else "",
                "bytes": (units.size(held) if sized else units.count(len(kept))) if kept else "",
                "difference": " ".join(
                    f"{_SIGNS[mark]}{units.count(marks[mark])}" for mark in MARKS if marks[mark]
                ),
            },
        }

    def _bytes(self, number: int) -> int:
        row = self._kept[number].row
        return (row.bytes or 0) if row is not None else 0

    def _module_facts(self, row: _Row) -> list[list[str]]:
        facts = [["module", units.printable(row.path) or ITSELF]]
        sources = Counter(
            self._origins[at].source for at in row.nodes[0] if self._origins[at].module == row.path
        )
        place = self._graph.traced.modules.get(row.path, "") or next(iter(sources), "")
        if place:
            facts.append(["source", _place(place)])
        for side, name in enumerate(("forward", "backward")):
            here = [at for at in row.nodes[side] if self._marks[at] != "removed"]
            if here:
                facts.append([name, self._amount(here)])
        operators = Counter(_operator(self._nodes[at]) for at in row.nodes[0])
        if operators:
            facts.append(["operators", _listed(operators)])
        facts.append(["keeps", self._kept_words(row.kept)])
        copies = Counter(
            _operator(self._nodes[at]) for at in row.nodes[1] if self._phases[at] == "recomputed"
        )
        if copies:
            facts.append(["recomputes", _listed(copies)])
        return [*facts, *self._plan_facts(row), *self._difference_facts(row)]

    def _operation_facts(self, row: _Row) -> list[list[str]]:
        nodes = [*row.nodes[0], *row.nodes[1]]
        origin = self._origins[nodes[0]]
        facts = [["operator", _operator(self._nodes[nodes[0]])]]
        facts.append(["module", units.printable(origin.module) or ITSELF if origin.is_known else NOT_KNOWN])
        if origin.source:
            facts.append(["source", _place(origin.source)])
        for number in row.kept:
            kept = self._kept[number]
            if kept.row is None:
                facts.append(["keeps", "a value; its size is not known"])
                continue
            facts.append(
                ["keeps", f"{units.size(kept.row.bytes)} ({self._shape(kept.row)}, {kept.row.dtype})"]
            )
        for side, name in enumerate(("forward", "backward")):
            here = [at for at in row.nodes[side] if self._marks[at] != "removed"]
            if here:
                facts.append([name, self._amount(here)])
        facts += self._plan_facts(row)
        readers = [at for number in row.kept for at in self._kept[number].readers]
        if readers:
            facts.append(["read by", self._reader_words(readers)])
        if any(self._phases[at] == "recomputed" for at in row.nodes[1]):
            facts.append(["recomputed", "yes: run again in the backward instead of kept"])
        facts += self._difference_facts(row)
        shown = "\n".join(units.fold(units.printable(self._names[at])) for at in nodes[:_NODES_NAMED])
        more = len(nodes) - _NODES_NAMED
        facts.append(["nodes", f"{shown}\nand {units.count(more)} more" if more > 0 else shown])
        return facts

    def _shape(self, row: SavedActivation) -> str:
        """Write the sizes of a buffer: those of the last batch, or as they are where they have no value."""
        if row.shape is None:
            return "shape not known"
        kept = self._graph.activations
        sizes = shape_at(row.shape, kept.symbols) if kept is not None else None
        return (
            units.printable(" x ".join(map(str, sizes if sizes is not None else row.shape))) or "one number"
        )

    def _reader_words(self, readers: Sequence[int]) -> str:
        """Name the operators and modules that read something, each once."""
        words = []
        for at in dict.fromkeys(readers):
            origin = self._origins[at]
            words.append(f"{_operator(self._nodes[at])} in {units.printable(origin.module) or ITSELF}")
        counted = Counter(words)
        shown = [word for word, _ in counted.most_common(_READERS_NAMED)]
        more = len(counted) - len(shown)
        return "\n".join(shown) + (f"\nand {units.count(more)} more" if more else "")

    def _plan_facts(self, row: _Row) -> list[list[str]]:
        found: dict[str, int] = {}
        looked = False
        for number in row.kept:
            kept = self._kept[number].row
            if kept is not None and kept.plans is not None:
                looked = True
                for plan in kept.plans:
                    found[plan] = found.get(plan, 0) + (kept.bytes or 0)
        if not looked:
            return []
        best = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:4]
        words = "\n".join(f"{plan}: {units.size(size)}" for plan, size in best)
        return [["plans that remove it", words or "none"]]

    def _difference_facts(self, row: _Row) -> list[list[str]]:
        marks = Counter(self._marks[at] for side in row.nodes for at in side if self._marks[at])
        words = ", ".join(f"{units.count(marks[mark])} {mark}" for mark in MARKS if marks[mark])
        return [["what changed", words or "nothing"]] if self._difference is not None else []

    def _amount(self, nodes: Sequence[int]) -> str:
        words = units.many(len(nodes), "node")
        if self._graph.trace is None:
            return words
        return f"{words}, {units.duration(sum(self._ms[at] or 0.0 for at in nodes))}"

    def _kept_words(self, numbers: Sequence[int]) -> str:
        if not numbers:
            return "nothing for the backward"
        if self._graph.activations is None:
            return units.many(len(numbers), "value")
        rows = [self._kept[number].row for number in numbers]
        unknown = sum(row is None or row.bytes is None for row in rows)
        total = units.size(sum(map(self._bytes, numbers)))
        return f"{total} in {units.many(len(numbers), 'buffer')}" + (
            f", {units.count(unknown)} of unknown size" if unknown else ""
        )


_SIGNS: Final = {
    "added": "+",
    "recomputed": "↻",
    "moved": "↕",
    "changed": "~",
    "fused": "⊕",
    "removed": "\N{MINUS SIGN}",
}


def _operator(node: NodeProto) -> str:
    return executed_operator(node).rpartition(".")[2]


def _place(source: str) -> str:
    """Write file and line without what comes before the package."""
    return units.printable(source.replace("\\", "/").rpartition("/site-packages/")[2])


def _kind(node: NodeProto) -> int:
    name = _operator(node)
    return next((number for number, (_, named) in enumerate(KINDS) if named.search(name)), len(KINDS))


def _listed(counts: Counter[str]) -> str:
    shown = counts.most_common(_OPERATORS_NAMED)
    more = len(counts) - len(shown)
    words = ", ".join(f"{units.count(count)} {name}" if count > 1 else name for name, count in shown)
    return f"{words} and {units.count(more)} more" if more else words


def parts_of(path: str) -> list[str]:
    """Split a path; a number goes with the name before it."""
    parts: list[str] = []
    for name in path.split("."):
        if name[:1].isdigit() and parts:
            parts[-1] += f".{name}"
        else:
            parts.append(name)
    return parts


def _number(name: str) -> tuple[str, int] | None:
    stem, _, last = name.rpartition(".")
    return (stem, int(last)) if last.isdigit() else None


def _grouped(
    modules: Mapping[str, _Level],
) -> tuple[list[tuple[str, _Level]], list[tuple[str, list[tuple[str, _Level]]]]]:
    """Put the layers of a long list that are neither the first nor the last together, under a title of their own."""
    # Returns the modules that stand alone, and the lists with their titles.
    found: dict[str, list[tuple[int, str]]] = {}
    for name in modules:
        if (numbered := _number(name)) is not None:
            found.setdefault(numbered[0], []).append((numbered[1], name))
    lists: list[tuple[str, list[tuple[str, _Level]]]] = []
    between: set[str] = set()
    for stem, members in found.items():
        if len(members) > MANY_LAYERS:
            inner = sorted(members)[1:-1]
            between |= {name for _, name in inner}
            title = f"{stem}.{inner[0][0]} to {inner[-1][0]}".removeprefix(".")
            lists.append((title, [(name, modules[name]) for _, name in inner]))
    return [(name, below) for name, below in modules.items() if name not in between], lists
