"""The order in which nodes are computed; those of one module put together, as functions that netron opens."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ortlab.errors import BuildError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto


_GRAPHS: Final = (5, 10)
"""`AttributeProto.GRAPH` and `GRAPHS`, without the import of onnx."""


def reads(node: NodeProto) -> set[str]:
    """Return the names of the values that a node reads, those that the graphs in its attributes read included."""
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        if attribute.type in _GRAPHS:
            for graph in (attribute.g, *attribute.graphs):
                for inner in graph.node:
                    names |= reads(inner)
    return names


def predecessors(nodes: Sequence[NodeProto]) -> list[list[int]]:
    """Return, for each node, which nodes make what it reads."""
    producers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
    return [
        sorted({producers[name] for name in reads(node) if name in producers} - {at})
        for at, node in enumerate(nodes)
    ]


def in_order(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Return the nodes with each after those that make what it reads, otherwise in their own order."""
    # ONNX asks for that; the graphs that ORT writes with recompute plans hold recomputed nodes at their end.
    before = predecessors(nodes)
    state = [0] * len(nodes)  # 0 not seen, 1 waits for others, 2 done
    done: list[NodeProto] = []
    for first in range(len(nodes)):
        waiting = [first]
        while waiting:
            at = waiting[-1]
            if state[at] == 0:
                state[at] = 1
                for needed in reversed(before[at]):
                    if state[needed] == 1:
                        raise BuildError(
                            "The graph cannot be drawn.",
                            why=f"The node {nodes[needed].name[:200]} needs what is made of its own result.",
                            fix="Read it from the file that ORT wrote, or export the model again.",
                        )
                    if state[needed] == 0:
                        waiting.append(needed)
            else:
                waiting.pop()
                if state[at] == 1:
                    state[at] = 2
                    done.append(nodes[at])
    return done


def in_backward(nodes: Sequence[NodeProto]) -> list[bool]:
    """Return for each node whether it is of backward: by its name, or because it needs what `YieldOp` hands over."""
    # Recomputed nodes are part of backward: they run there.
    late: list[bool] = []
    for node, needed in zip(nodes, predecessors(nodes), strict=True):
        named = (
            "_Grad/" in node.name
            or node.name.startswith("AccumulateGrad")
            or node.name.endswith("_recompute")
        )
        late.append(named or any(late[at] or nodes[at].op_type == "YieldOp" for at in needed))
    return late


def runs(
    before: Sequence[Sequence[int]], places: Sequence[Hashable], first: Sequence[bool]
) -> list[list[int]]:
    """Part nodes into runs of one place, so that the runs depend on each other without circles.

    Of the nodes that could come next, one of the present place is taken; where there is none, the earliest. `before`
    holds for each node what it depends on, in an order in which the nodes can be computed. Nodes that are `first` go
    before all others as long as one of them can: a forward is not parted by what a backward could compute early.
    """
    waiting = _Waiting(before, places, first)
    parted: list[list[int]] = []
    while (at := waiting.earliest()) is not None:
        run: list[int] = []
        while at is not None:
            run.append(at)
            at = waiting.next_in(places[run[0]])
        parted.append(run)
    return parted


class _Waiting:
    """The nodes that could come next, in all and by place."""

    def __init__(
        self, before: Sequence[Sequence[int]], places: Sequence[Hashable], first: Sequence[bool]
    ) -> None:
        self._places = places
        self._first = first
        self._missing = [len(needed) for needed in before]
        self._after: list[list[int]] = [[] for _ in before]
        self._taken = [False] * len(before)
        self._ready: dict[Hashable, list[int]] = {}
        self._everywhere: list[tuple[bool, int]] = []
        for at, needed in enumerate(before):
            for other in needed:
                self._after[other].append(at)
        for at, missing in enumerate(self._missing):
            if not missing:
                self._offer(at)

    def earliest(self) -> int | None:
        """Take the first of all; None if none is left."""
        while self._everywhere:
            _, at = heapq.heappop(self._everywhere)
            if not self._taken[at]:
                return self._take(at)
        return None

    def next_in(self, place: Hashable) -> int | None:
        """Take the first of a place; None if none of it could come next."""
        here = self._ready[place]
        while here:
            at = heapq.heappop(here)
            if not self._taken[at]:
                return self._take(at)
        return None

    def _take(self, at: int) -> int:
        self._taken[at] = True
        for follower in self._after[at]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._offer(follower)
        return at

    def _offer(self, at: int) -> None:
        heapq.heappush(self._ready.setdefault(self._places[at], []), at)
        heapq.heappush(self._everywhere, (not self._first[at], at))


SMALLEST: Final = 2
LARGEST: Final = 400
"""Nodes in one group; longer runs of one module are cut."""

READABLE: Final = 90
READABLE_SHARE: Final = 25
"""A grouped graph has at most `READABLE` nodes, or one for every `READABLE_SHARE` of its nodes if that is more,
unless every depth of modules has more."""

Place = tuple[bool, tuple[str, ...]]
"""Whether it is in backward, and the names of the modules, the outermost first."""


@dataclass(frozen=True)
class Group:
    """A run of nodes of one module."""

    name: str  # of the node that stands for it: the module's path, after "∇" for backward
    title: str  # its heading: the end of the path; netron shows what follows the last dot
    backward: bool
    function: str  # the one with its nodes; groups that compute the same share one
    nodes: tuple[str, ...]  # names of its nodes, in the order of the function
    # Names of what its nodes read and write, in the order in which they first occur.
    values: tuple[str, ...] = field(repr=False)


def grouped(
    model: ModelProto, modules: Mapping[str, str], backward: Sequence[bool]
) -> tuple[ModelProto, list[Group]]:
    """Return a copy of a graph with a node for each group, and the groups."""
    # The depth of modules is the greatest at which at most `READABLE` nodes, or a twenty-fifth of all, are drawn. The
    # graph is a lean one, whose nodes are in an order in which they can be computed. `modules` gives the path of the
    # module by name of the node; nodes that are missing stand with the node whose result they read. `backward` says for
    # each node whether it is part of backward.
    nodes = model.graph.node
    before = predecessors(nodes)
    paths = _paths(nodes, before, modules)
    forward = [not late for late in backward]
    readable = max(READABLE, len(nodes) // READABLE_SHARE)
    best: list[list[int]] | None = None
    places: list[Place] = []
    for depth in range(1, max((len(path) for path in paths), default=0) + 1):
        tried: list[Place] = [(late, path[:depth]) for late, path in zip(backward, paths, strict=True)]
        parted = [part for run in runs(before, tried, forward) for part in _parts(run)]
        drawn = sum(1 if len(run) >= SMALLEST else len(run) for run in parted)
        if best is not None and drawn > readable:
            break
        best, places = parted, tried
    if best is None:
        best, places = [list(part) for part in _parts(list(range(len(nodes))))], [(False, ())] * len(nodes)
    return _with_functions(model, best, places)


def _paths(
    nodes: Sequence[NodeProto], before: Sequence[Sequence[int]], modules: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Return the modules of each node; a node of no known module takes those of what it reads, or of its reader."""
    known = [modules.get(node.name) for node in nodes]
    for at, needed in enumerate(before):
        if known[at] is None:
            known[at] = next((known[other] for other in reversed(needed) if known[other] is not None), None)
    for at in range(len(nodes) - 1, -1, -1):
        for other in before[at]:
            if known[other] is None:
                known[other] = known[at]
    return [module_names(path or "") for path in known]


def module_names(path: str) -> tuple[str, ...]:
    """Return the names on a module's path; the number of a layer stays with its list: ("encoder", "layer.3")."""
    names: list[str] = []
    for part in filter(None, path.split(".")):
        if part.isdigit() and names:
            names[-1] += f".{part}"
        else:
            names.append(part)
    return tuple(names)


def _parts(run: Sequence[int]) -> Iterator[list[int]]:
    count = -(-len(run) // LARGEST)
    for part in range(count):
        yield list(run[part * len(run) // count : (part + 1) * len(run) // count])


def _with_functions(
    model: ModelProto, parted: Sequence[list[int]], places: Sequence[Place]
) -> tuple[ModelProto, list[Group]]:
    import onnx

    nodes = list(model.graph.node)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    wanted = _read_elsewhere(model, parted)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.node[:]
    made.opset_import.add(domain=DOMAIN, version=1)
    functions: dict[bytes, str] = {}
    taken = dict.fromkeys((node.name for node in nodes), 1)
    groups = []
    for run, read in zip(parted, wanted, strict=True):
        inside = [nodes[at] for at in run]
        if len(run) < SMALLEST:
            made.graph.node.extend(inside)
            continue
        late, path = places[run[0]]
        body = Body(inside, weights, read)
        signature = body.signature
        if signature not in functions:
            functions[signature] = f"{'.'.join(path) or 'model'} {len(functions)}"
            body.add_to(made, functions[signature])
        function = functions[signature]
        name, number = _unused(("∇ " if late else "") + (".".join(path) or "model"), taken)
        made.graph.node.append(
            onnx.helper.make_node(function, body.inputs, body.outputs, name=name, domain=DOMAIN)
        )
        title = ("∇ " if late else "") + ("/".join(path[-2:]).replace(".", " ") or "model") + number
        groups.append(
            Group(name, title, late, function, tuple(node.name for node in inside), tuple(body.values))
        )
    return made, groups


def _read_elsewhere(model: ModelProto, parted: Sequence[list[int]]) -> list[set[str]]:
    """Return for each run which of the values that it makes are read by others, or are results."""
    nodes = model.graph.node
    run_of = {at: which for which, run in enumerate(parted) for at in run}
    maker = {name: run_of[at] for at, node in enumerate(nodes) for name in node.output if name}
    wanted: list[set[str]] = [set() for _ in parted]
    for at, node in enumerate(nodes):
        for name in reads(node):
            if name in maker and maker[name] != run_of[at]:
                wanted[maker[name]].add(name)
    for value in model.graph.output:
        if value.name in maker:
            wanted[maker[value.name]].add(value.name)
    return wanted


def _unused(name: str, taken: dict[str, int]) -> tuple[str, str]:
    """Return a name that no other node has, and the number that it needed."""
    count = taken[name] = taken.get(name, 0) + 1
    number = "" if count == 1 else f" ({count})"
    return name + number, number


DOMAIN: Final = "ortlab.module"
"""Domain of the operators that stand for groups."""


class Body:
    """The nodes of a group: what goes in, what comes out, and what tells it from other bodies."""

    # The nodes come in an order in which they can be computed; `wanted` is what is read outside of the group. Functions
    # have no initializers, so that `weights` become nodes in the body, one for each use: netron draws a constant in the
    # node that uses it only if there is one such node.

    def __init__(
        self, nodes: Sequence[NodeProto], weights: Mapping[str, TensorProto], wanted: set[str]
    ) -> None:
        import onnx

        self.nodes: list[NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        for node in nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            self.nodes.append(copy)
            for at, name in enumerate(node.input):
                if name in weights:
                    copy.input[at] = self._own_name(name)
                    self.constants[copy.input[at]] = weights[name]
        own = {name for node in nodes for name in node.output if name}
        read = dict.fromkeys(
            name
            for node in self.nodes
            for name in [*node.input, *sorted(reads(node) - set(node.input))]
            if name and name not in own
        )
        self.inputs = [name for name in read if name not in self.constants and name not in weights]
        self.outputs = [name for node in nodes for name in node.output if name in wanted]
        self.values = list(dict.fromkeys([*read, *(name for node in nodes for name in node.output if name)]))

    @property
    def signature(self) -> bytes:
        """The same for bodies that compute the same under other names."""
        number = {name: str(at) for at, name in enumerate(self.values)}
        digest = hashlib.sha256()
        for node in self.nodes:
            ends = ("|".join(number.get(name, "") for name in names) for names in (node.input, node.output))
            digest.update("\n".join([node.domain, node.op_type, *ends]).encode())
            for attribute in sorted(node.attribute, key=lambda one: str(one.name)):
                digest.update(attribute.SerializeToString(deterministic=True))
        for name, tensor in self.constants.items():
            unnamed = type(tensor)()
            unnamed.CopyFrom(tensor)
            unnamed.ClearField("name")
            digest.update(number[name].encode() + unnamed.SerializeToString(deterministic=True))
        digest.update("|".join(number[name] for name in [*self.inputs, *self.outputs]).encode())
        return digest.digest()

    def add_to(self, model: ModelProto, name: str) -> None:
        """Write it into a model as a function."""
        import onnx

        function = model.functions.add(name=name, domain=DOMAIN)
        function.input.extend(self.inputs)
        function.output.extend(self.outputs)
        function.opset_import.extend(model.opset_import)
        for constant, tensor in self.constants.items():
            node = function.node.add(op_type="Constant", output=[constant])
            node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
        function.node.extend(self.nodes)

    def _own_name(self, name: str) -> str:
        count = 1
        own = name
        while own in self.constants:
            count += 1
            own = f"{name} ({count})"
        return own
