"""What one node of a graph tells: its name, its operator, its pass of a step, its module and line; and one value."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final, Literal

from ortlab.memory.recompute import COPY, HELD
from ortlab.memory.saved_activations import layer_of

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, ValueInfoProto

    from ortlab.graphs.stages import Graph


INSIDE: Final = "_original_module"
"""What ORTModule's own module calls the user's."""

CALL: Final = "#"
"""What stands in a scope before the number of the call, from the second on: "cell#2"."""

ELSEWHERE: Final = "."
"""What a scope begins with that is a whole path, of a module that the names around it do not lead to."""

_GRADIENT: Final = "_Grad/"
_ENDING: Final = r"(?:/\w+(?:Replacement|Fusion)\w*/)+(?:_token_\d+)?$"
_COPIED: Final = re.compile(rf"(?:{COPY})+(?={_ENDING}|$)")
_REPLACED: Final = re.compile(_ENDING)


@dataclass(frozen=True)
class Value:
    """An input or output of a graph."""

    name: str  #: Its name in the graph
    dtype: str  #: ONNX element type, lower case - "float", "int64", ...
    shape: tuple[int | str, ...]  #: Sizes; a symbolic size is a string


def value_of(info: ValueInfoProto) -> Value:
    """Return name, type and shape of a value as ONNX states them."""
    import onnx

    tensor = info.type.tensor_type
    shape = tuple(size.dim_param or size.dim_value for size in tensor.shape.dim)
    return Value(info.name, onnx.TensorProto.DataType.Name(tensor.elem_type).lower(), shape)


def node_names(graph: GraphProto) -> list[str]:
    """Return a name for each node, in order: its own; for a nameless one that of its first result."""
    # ONNX does not ask for names to be unique. Those that repeat are numbered, as in "Add", "Add (2)".
    taken: set[str] = set()
    names = []
    for node in graph.node:
        own = node.name or next(filter(None, node.output), node.op_type)
        name, number = own, 1
        while name in taken:
            number += 1
            name = f"{own} ({number})"
        taken.add(name)
        names.append(name)
    return names


_ONNX: Final = frozenset({"", "ai.onnx"})
"""How graphs write the domain of ONNX's own operators."""

_STAND_INS: Final = {
    "ortlab::dropout": "Dropout",
    "ortlab::dropout_to_repeat": "Dropout",
    "ortlab::dropout_repeated": "Dropout",
    "ortlab::dropout_backward": "com.microsoft.DropoutGrad",
}
"""Calls that compute the same bits as an operator of ONNX Runtime, in its place: they have its name in every view."""


def operator_of(node: NodeProto) -> str:
    """Return the operator of a node, with its domain unless it is ONNX's."""
    node = without_stand_in(node)
    return str(node.op_type) if node.domain in _ONNX else f"{node.domain}.{node.op_type}"


def executed_operator(node: NodeProto) -> str:
    """Return the operator that runs for a node: of an ``ATen`` node torch's, else its own; see `operator_of`."""
    node = without_stand_in(node)
    return _called(node) or operator_of(node)


def operator_in_namespace(node: NodeProto) -> str:
    """Return the operator that runs for a node; one of torch's with its namespace: "aten::gelu"."""
    called = _called(without_stand_in(node))
    return f"aten::{called}" if called and "::" not in called else called or operator_of(node)


def without_stand_in(node: NodeProto) -> NodeProto:
    """Return the node of ONNX Runtime's operator that a call stands in for; any other node as it is."""
    operator = _STAND_INS.get(_called(node))
    if operator is None:
        return node
    from onnx import helper

    domain, _, kind = operator.rpartition(".")
    # Without what ORT's has not: a number, and a seed that is handed on.
    inputs, outputs = (node.input[:3], node.output[:2]) if kind == "Dropout" else (node.input, node.output)
    return helper.make_node(kind, inputs, outputs, name=node.name, domain=domain)


def _called(node: NodeProto) -> str:
    """Return the operator that an ``ATen`` node calls, "" for other nodes."""
    if node.op_type != "ATen":
        return ""
    return next((one.s.decode() for one in node.attribute if one.name == "operator"), "ATen")


def exported_name(name: str) -> str:
    """Return the name of the exported node that a node stands for: its own without what ORT puts behind it."""
    # ORT does so where it replaces a node by another, where it computes its gradient, and where it recomputes it:
    # "/fc/Concat/ConcatReplacement/", "/fc/Gemm_Grad/MatMul_0", "/fc/Gelu_recompute".
    return _COPIED.sub("", _REPLACED.sub("", _COPIED.sub("", name).partition(_GRADIENT)[0]))


def scopes_in(name: str) -> list[str]:
    """Return the scopes in the name of a node or result: "layers.0", "fc" of "/_original_module/layers.0/fc/MatMul"."""
    # Empty for a node outside all modules but the exported one.
    return [part for part in exported_name(name).split("/")[:-1] if part and part != INSIDE]


def path_in(names: Iterable[str], modules: Collection[str] | None, traced: str = "") -> str:
    """Follow scopes down from the traced module, as far as they lead to modules, and return the last one's path."""
    # The outermost scope comes first. A child of a `Sequential` has the scope of its parent as a prefix: "head/head.0".
    # `modules` holds the paths of the modules that there are; None where that is not known, and every scope is taken
    # for one. `traced` is the path of the module that was exported; empty for the model itself.
    path, outer = traced, INSIDE
    for scope in names:
        name = scope.partition(CALL)[0]
        own, outer = name.removeprefix(f"{outer}."), name
        if name.startswith(ELSEWHERE):
            outer = name.removeprefix(ELSEWHERE)
            path = joined(traced, outer)
            continue
        if modules is None:
            path = joined(path, own)
            continue
        inner = next((one for one in (joined(path, name), joined(path, own)) if one in modules), None)
        if inner is None:
            # A forward may call a part of a part, as OPT's calls `self.model.decoder`: the part is in no name.
            deeper = [one for one in modules if one.startswith(joined(path, "")) and one.endswith(f".{name}")]
            if len(deeper) != 1:
                break
            inner = deeper[0]
        path = inner
    return path


_NUMBERED: Final = re.compile(r"(_\d+)?(_Grad)?$")


def operators_before(path: str, operators: Collection[str]) -> str:
    """Return the part of a path that stands before the first operator's name, of those of ONNX and these others."""
    # In a graph from a file every scope passes for a module, also those that ORT's rewriting has put behind the name of
    # an operator: "encoder/MatMul_Grad/Gemm_1", "encoder/Concat/ConcatReplacement/".
    known = _onnx_operators()
    parts = path.split(".")
    names = [_NUMBERED.sub("", part) for part in parts]
    ends = (at for at, name in enumerate(names) if name in operators or name in known)
    return ".".join(parts[: next(ends, len(parts))])


@cache
def _onnx_operators() -> frozenset[str]:
    import onnx

    return frozenset(schema.name for schema in onnx.defs.get_all_schemas())


def joined(path: str, name: str) -> str:
    """Return the path of what is called `name` in the module at `path`."""
    return f"{path}.{name}" if path else name


Phase = Literal["forward", "backward", "recomputed"]

PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "recomputed")

YIELD: Final = "YieldOp"
"""The node between forward and backward: it hands the outputs to PyTorch, and takes their gradients."""


def phases(graph: GraphProto) -> list[Phase | None]:
    """Return the pass of each node, in order; None for the border itself."""
    # ORT lists what the outputs need before the border, and what needs a gradient from PyTorch behind it; a session
    # saves its graph in the order in which it executes it. Copies of nodes that are recomputed may stand anywhere, and
    # so may what hands kept values to them.
    side: Phase = "forward"
    found: list[Phase | None] = []
    for node in graph.node:
        if node.op_type == YIELD and side == "forward":
            found.append(None)
            side = "backward"
        else:
            found.append("recomputed" if is_copy(node) else "backward" if is_holder(node) else side)
    return found


def is_copy(node: NodeProto) -> bool:
    """Say whether ORT's memory optimizer has put a node in, to compute in the backward what the forward had."""
    return any(name.endswith(COPY) for name in node.output)


def repeats(node: NodeProto) -> str:
    """Return the name of the node that a copy repeats; empty for one that is no copy."""
    # An optimizer may have put a copy and its original together with their neighbours, and named both after that:
    # "/fc/MatMul_recompute/MatmulTransposeFusion/".
    return _COPIED.sub("", node.name) if is_copy(node) else ""


def is_holder(node: NodeProto) -> bool:
    """Say whether a node hands a value of the forward to copies in the backward, as it is."""
    return len(node.output) == 1 and node.output[0].endswith(HELD)


How = Literal["recorded", "inferred", "not known"]

HOW: Final[tuple[How, ...]] = ("recorded", "inferred", "not known")
"""How an origin is known: the exporter wrote it into the node's own name; it is concluded, by one rule only, from the
names of what the node makes or of its neighbours; or neither."""


@dataclass(frozen=True)
class Origin:
    """Where a node comes from."""

    # Path of the module that it is computed in, as in `model.named_modules()`; empty for the model's own forward, and
    # where it is not known (see `how`).
    module: str
    # "file:line". The line that the export recorded for the node, or for the one that ORT's is named after; where it
    # recorded none, the line where the forward of its module begins. Empty where neither is known, as for a module of
    # torch's.
    source: str
    layer: str  # path of the layer that the module is in, "encoder.layer.3"; empty outside the layers
    how: How
    line_recorded: bool = False  # whether `source` was recorded, and is not just where the module begins

    @property
    def is_known(self) -> bool:
        """Whether the module is known."""
        return self.how != "not known"


UNKNOWN: Final = Origin("", "", "", "not known")
"""The origin of a node of which nothing tells where it comes from."""


def origins(graph: Graph) -> dict[str, Origin]:
    """Return where each node of a graph comes from, by name as `node_names` gives it, in the order of the graph."""
    # The names in a file lead to modules, too, but nobody there knows which of them exist: every scope of a name is
    # taken for a module.
    return _Origins(graph).all()


class _Origins:
    """Finds the origins of the nodes of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._traced = graph.traced
        self._part = graph.part
        self._nodes = list(graph.model.graph.node)
        self._names = node_names(graph.model.graph)
        self._found: list[Origin | None] = [None] * len(self._nodes)
        self._maker = {
            result: place for place, node in enumerate(self._nodes) for result in node.output if result
        }
        self._readers: dict[str, list[int]] = {}
        for place, node in enumerate(self._nodes):
            for value in node.input:
                self._readers.setdefault(value, []).append(place)

    def all(self) -> dict[str, Origin]:
        """Go through the rules, from the surest to the last."""
        for place, node in enumerate(self._nodes):
            if node.op_type != YIELD:
                self._found[place] = self._recorded(self._names[place]) or self._by_results(node)
        self._by_inlined_functions()
        self._by_forward_nodes()
        # A chain of nodes between two of one module takes as many rounds as it has nodes.
        while True:
            known = list(self._found)
            for place, node in enumerate(self._nodes):
                if known[place] is None and node.op_type != YIELD:
                    self._found[place] = self._by_neighbours(node, known)
            if self._found == known:
                break
        return {name: one or UNKNOWN for name, one in zip(self._names, self._found, strict=True)}

    def _recorded(self, name: str) -> Origin | None:
        if not name.startswith("/"):
            return None
        path = self._path(name)
        # ORTModule's own nodes, around the model, have no path in the model; nor may what another tool has named.
        if self._traced.modules and (INSIDE not in name or (scopes_in(name) and path == self._part)):
            return None
        return self._origin(path, "recorded", self._traced.lines.get(exported_name(name), ""))

    def _by_results(self, node: NodeProto) -> Origin | None:
        """Go by the names of its results: a fused node gives its result the name that the last of the fused gave it."""
        # The gradient of a value is made where the value is read, which may be in another module than where it is made.
        if any(_GRADIENT_OF.search(name) for name in node.output) and not node.name.startswith(_SUMS):
            return None
        return self._common({self._path(name) for name in node.output if name.startswith("/")})

    def _by_inlined_functions(self) -> None:
        """Go by what the gradient of an operator reads: ORT inlines the functions of some without names."""
        # All nodes of such a function are of the node whose gradient it is, if only one of that operator reads the
        # same.
        groups: dict[tuple[str, str], list[int]] = {}
        for place, node in enumerate(self._nodes):
            for result in (*node.output, *node.input):
                met = _INLINED.match(result)
                if met and self._found[place] is None:
                    groups.setdefault((met[0], met["operator"]), []).append(place)
                    break
        for (_, operator), places in groups.items():
            read = {value for place in places for value in self._nodes[place].input}
            nodes = [
                place
                for value in read
                for place in self._readers.get(value, ())
                if self._nodes[place].op_type == operator
                and self._found[place] is not None
                and read.issuperset(self._nodes[place].input)
            ]
            paths = {one.module for place in nodes if (one := self._found[place]) is not None}
            for place in places:
                self._found[place] = self._common(paths)

    def _by_forward_nodes(self) -> None:
        """Go by the forward node that a node is named after: the gradient of a fused one has no path in its name."""
        known = dict(zip(self._names, self._found, strict=True))
        for place, name in enumerate(self._names):
            of = known.get(exported_name(name))
            if self._found[place] is None and of is not None:
                self._found[place] = self._common({of.module})

    def _by_neighbours(self, node: NodeProto, known: list[Origin | None]) -> Origin | None:
        """Go by what is around it: what stands between nodes of one module is of that module."""
        # So is a constant that only one module reads. A parameter that it reads must be of the same module, or nothing
        # is said: the weight of an embedding may be read by the head, too.
        makers = {self._maker[value] for value in node.input if value in self._maker}
        readers = {place for value in node.output if value for place in self._readers.get(value, ())}
        owned = {
            name for name in node.input if name in self._traced.parameters or name in self._traced.buffers
        }
        around = [known[place] for place in (*makers, *readers)]
        if not readers or not (makers or owned or not node.input) or None in around:
            return None
        paths = {one.module for one in around if one is not None}
        return self._common(paths | {self._owner(name) for name in owned})

    def _owner(self, name: str) -> str:
        """Return the path of the module that has a parameter or buffer."""
        path = name.removeprefix(f"{INSIDE}.").rpartition(".")[0]
        return joined(self._part, path) if path else self._part

    def _path(self, name: str) -> str:
        return path_in(scopes_in(name), self._traced.modules or None, self._part)

    def _common(self, paths: set[str]) -> Origin | None:
        return self._origin(next(iter(paths)), "inferred") if len(paths) == 1 else None

    def _origin(self, path: str, how: How, line: str = "") -> Origin:
        return Origin(path, line or self._traced.modules.get(path, ""), layer_of(path), how, bool(line))


_GRADIENT_OF: Final = re.compile(r"_grad(?:_\d+)?$")
"""How the name of a gradient ends: "x_grad", and "x_grad_0" of one that several are summed to."""

_SUMS: Final = "AccumulateGrad_"
"""How the node is named that sums the gradients of a value; it belongs where the value is made."""

_INLINED: Final = re.compile(r"_inlfunc_(?P<operator>[A-Za-z]+)Grad(?:_token_\d+)?(?=_)")
"""How the values inside an inlined function are named: "_inlfunc_DivGrad_token_5_shape_A"."""
