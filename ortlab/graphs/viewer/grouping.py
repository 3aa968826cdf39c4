"""Nodes put together by the module that they are computed in, as functions that netron opens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ortlab.graphs.viewer.order import predecessors, reads, runs

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto, TensorProto

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
    """Return a copy of a graph with a node for each group, and the groups.

    The depth of modules is the greatest at which at most `READABLE` nodes, or a twenty-fifth of all, are drawn. The
    graph is a lean one, whose nodes are in an order in which they can be computed. `modules` gives the path of the
    module by name of the node; nodes that are missing stand with the node whose result they read. `backward` says for
    each node whether it is part of backward.
    """
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
    """The nodes of a group: what goes in, what comes out, and what tells it from other bodies.

    The nodes come in an order in which they can be computed; `wanted` is what is read outside of the group. Functions
    have no initializers, so that `weights` become nodes in the body, one for each use: netron draws a constant in the
    node that uses it only if there is one such node.
    """

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
