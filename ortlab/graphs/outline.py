"""A graph by modules: how many nodes of which operators each has, forward and backward, and what flows between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ortlab.graphs.nodes import layer_of, node_names, operator_of, phases

if TYPE_CHECKING:
    from onnx import NodeProto

    from ortlab.graphs.stages import Graph

Side = Literal["forward", "backward"]

ROWS: Final = 22
"""Modules that an outline tells apart at most, unless more are asked for."""

ITSELF: Final = "the model itself"
"""Title of the nodes that are in the model's own forward."""

NOT_KNOWN: Final = "module not known"
"""Title of the nodes of which nobody knows the module."""

_FEW_LAYERS: Final = 4
_OPERATOR_NUMBER: Final = re.compile(r"(_\d+)?(_Grad)?$")
_LAST: Final = "\uffff"  # sorts behind every path


@dataclass(frozen=True)
class Module:
    """The nodes of one module, or of several that are put together."""

    title: str  # its path; for several what they have in common
    forward: tuple[str, ...]  # names of its nodes, as `node_names` gives them, in the order of the graph
    backward: tuple[str, ...]
    forward_operators: Mapping[str, int]  # their count by operator, most frequent first
    backward_operators: Mapping[str, int]
    recomputed: int = 0  # how many of the backward's nodes compute again what the forward had


@dataclass(frozen=True)
class Flow:
    """Values that go from one module to another, or from the forward of a module to its backward."""

    source: int  # place of the module in `Outline.modules`, as is `target`
    target: int
    sides: tuple[Side, Side]  # of the source, of the target
    values: int  # how many

    @property
    def is_kept(self) -> bool:
        """Whether the values go from the forward to the backward."""
        return self.sides == ("forward", "backward")


@dataclass(frozen=True)
class Kept:
    """What the forward of a module keeps for the backward."""

    count: int  # of values that the backward reads, or of the buffers that hold them
    bytes: int = 0  # of the buffers of known size; 0 for values
    unknown: int = 0  # how many buffers have no known size
    # Whether buffers are counted: the graph's saved activations were read. Several values can be views of one buffer.
    are_buffers: bool = False


@dataclass(frozen=True)
class Outline:
    """A graph by modules."""

    modules: tuple[Module, ...]  # in the order of the forward
    flows: tuple[Flow, ...]  # between modules, and from the forward of each to the backward
    kept: Mapping[int, Kept]  # by place of a module: what it keeps for the backward

    @property
    def has_backward(self) -> bool:
        """Whether there is a backward at all."""
        return any(module.backward for module in self.modules)

    @property
    def nodes(self) -> int:
        """Number of nodes in the modules: all but the one between forward and backward."""
        return sum(len(module.forward) + len(module.backward) for module in self.modules)


def outline(graph: Graph, *, rows: int = ROWS) -> Outline:
    """Put the nodes of a graph together by module, and tell at most `rows` modules apart.

    Deep modules are put into their parents until they fit. Of a long list of layers, the first and the last are told
    apart from those between.
    """
    nodes, names = list(graph.model.graph.node), node_names(graph.model.graph)
    paths = _paths(graph, nodes, names)
    runs_in = phases(graph.model.graph)
    sides: list[Side | None] = ["backward" if phase == "recomputed" else phase for phase in runs_in]
    inner = [place for place, side in enumerate(sides) if side is not None]
    titles = _titles([paths[place] for place in inner], rows)
    order = _order(inner, sides, [titles[paths[place]] for place in inner])
    row_of = {place: order[titles[paths[place]]] for place in inner}
    members: list[tuple[list[int], list[int]]] = [([], []) for _ in order]
    for place in inner:
        members[row_of[place]][sides[place] == "backward"].append(place)
    modules = tuple(
        _module(title, (ahead, back), nodes, names, sum(runs_in[place] == "recomputed" for place in back))
        for title, (ahead, back) in zip(order, members, strict=True)
    )
    return Outline(modules, _flows(nodes, sides, row_of), _kept(graph, nodes, names, sides, row_of))


# ---- which modules are told apart ------------------------------------------------------------------------------


def _paths(graph: Graph, nodes: Sequence[NodeProto], names: Sequence[str]) -> list[str]:
    """Return the module of each node; of one whose module nobody knows a name that no module has."""
    origins = graph.origins
    paths = [origins[name].module if origins[name].is_known else _LAST for name in names]
    if graph.traced.modules:
        return paths
    # In a graph from a file every scope passes for a module, also those that ORT's rewriting has put behind the name
    # of an operator: "encoder/MatMul_Grad/Gemm_1", "encoder/Concat/ConcatReplacement/".
    import onnx

    operators = {node.op_type for node in nodes} | {schema.name for schema in onnx.defs.get_all_schemas()}
    return [_before(path, operators) for path in paths]


def _before(path: str, operators: set[str]) -> str:
    parts = path.split(".")
    ends = (at for at, part in enumerate(parts) if _OPERATOR_NUMBER.sub("", part) in operators)
    return ".".join(parts[: next(ends, len(parts))])


def _titles(paths: Iterable[str], rows: int) -> dict[str, str]:
    """Return the row of each path: as deep as fits."""
    every = set(paths)
    depth = max((len(parts_of(path)) for path in every), default=1)
    for folded in (False, True):
        depths = range(depth, 0, -1)
        best = next((at for at in depths if len(set(_at(every, at, folded=folded).values())) <= rows), 0)
        # A list of layers in one row says little; one that is folded shows what a layer is made of.
        if best > 1 or (best and depth == 1):
            unfolded = _at(every, best, folded=folded)
            if folded or not any(layer_of(path) and not layer_of(row) for path, row in unfolded.items()):
                return unfolded
    return _few(_at(every, best or 1, folded=True), rows)


def _at(paths: set[str], depth: int, *, folded: bool) -> dict[str, str]:
    between = _between(paths) if folded else {}
    return {path: between.get(layer_of(path)) or _cut(path, depth) for path in paths}


def _between(paths: set[str]) -> dict[str, str]:
    """Return one title for the layers of a long list that are neither the first nor the last."""
    lists: dict[str, set[int]] = {}
    for layer in {layer_of(path) for path in paths if path != _LAST} - {""}:
        container, _, number = layer.rpartition(".")
        lists.setdefault(container, set()).add(int(number))
    titles: dict[str, str] = {}
    for container, numbers in lists.items():
        if len(numbers) > _FEW_LAYERS:
            between = sorted(numbers)[1:-1]
            stem = f"{container}." if container else ""
            title = f"{stem}{between[0]} to {between[-1]}"
            titles |= {f"{stem}{number}": title for number in between}
    return titles


def _few(titles: dict[str, str], rows: int) -> dict[str, str]:
    """Put the titles that are too many into one row; the first by name stay."""
    every = sorted(set(titles.values()))
    if len(every) <= rows:
        return titles
    rest = set(every[rows - 1 :]) - {_LAST}
    return {path: f"{len(rest)} more modules" if title in rest else title for path, title in titles.items()}


def parts_of(path: str) -> list[str]:
    """Split a path; a number goes with the name before it."""
    parts: list[str] = []
    for name in path.split("."):
        if name[:1].isdigit() and parts:
            parts[-1] += f".{name}"
        else:
            parts.append(name)
    return parts


def _cut(path: str, depth: int) -> str:
    return ".".join(parts_of(path)[:depth])


# ---- what is in them -------------------------------------------------------------------------------------------


def _order(inner: Sequence[int], sides: Sequence[Side | None], titles: Sequence[str]) -> dict[str, int]:
    """Give each row its place: where the middle of its forward stands, as small nodes of a module may run early."""
    places: dict[str, list[int]] = {}
    backward: dict[str, list[int]] = {}
    for place, title in zip(inner, titles, strict=True):
        (places if sides[place] == "forward" else backward).setdefault(title, []).append(place)
    middle = {title: at[len(at) // 2] for title, at in places.items()}
    late = {title: -at[len(at) // 2] for title, at in backward.items() if title not in middle}
    behind = max(middle.values(), default=0) + 1
    keys = middle | {title: behind + at - min(late.values()) for title, at in late.items()}
    ordered = sorted(keys, key=lambda title: (title == _LAST, keys[title], title))
    return {title: row for row, title in enumerate(ordered)}


def _module(
    title: str,
    members: tuple[list[int], list[int]],
    nodes: Sequence[NodeProto],
    names: Sequence[str],
    recomputed: int,
) -> Module:
    operators = [Counter(operator_of(nodes[place]) for place in one) for one in members]
    ordered = [dict(sorted(one.items(), key=lambda item: (-item[1], item[0]))) for one in operators]
    ahead, back = (tuple(names[place] for place in one) for one in members)
    words = {"": ITSELF, _LAST: NOT_KNOWN}.get(title, title)
    return Module(words, ahead, back, ordered[0], ordered[1], recomputed)


def _flows(
    nodes: Sequence[NodeProto], sides: Sequence[Side | None], row_of: Mapping[int, int]
) -> tuple[Flow, ...]:
    maker = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    constant = {place for place, node in enumerate(nodes) if _is_constant(node)}
    crossing: dict[tuple[int, int, Side, Side], set[str]] = {}
    for place, node in enumerate(nodes):
        side = sides[place]
        for name in node.input:
            source = maker.get(name)
            came = sides[source] if source is not None else None
            if source is None or side is None or came is None or source in constant:
                continue
            if row_of[source] != row_of[place] or came != side:
                crossing.setdefault((row_of[source], row_of[place], came, side), set()).add(name)
    return tuple(Flow(*key[:2], key[2:], len(values)) for key, values in sorted(crossing.items()))


def _kept(
    graph: Graph,
    nodes: Sequence[NodeProto],
    names: Sequence[str],
    sides: Sequence[Side | None],
    row_of: Mapping[int, int],
) -> dict[int, Kept]:
    """Return what each row keeps: buffers and bytes where the saved activations have been read, else values."""
    if graph.activations is not None:
        place_of = {name: place for place, name in enumerate(names)}
        found: dict[int, list[int | None]] = {}
        for one in graph.activations.rows:
            if place_of.get(one.node) in row_of:
                found.setdefault(row_of[place_of[one.node]], []).append(one.bytes)
        return {
            row: Kept(len(sizes), sum(size or 0 for size in sizes), sizes.count(None), are_buffers=True)
            for row, sizes in found.items()
        }
    read = {name for place, node in enumerate(nodes) if sides[place] == "backward" for name in node.input}
    values = Counter(
        row_of[place]
        for place, node in enumerate(nodes)
        if sides[place] == "forward" and not _is_constant(node)
        for name in node.output
        if name in read
    )
    return {row: Kept(count) for row, count in values.items()}


def _is_constant(node: NodeProto) -> bool:
    return node.op_type == "Constant" and not node.domain
