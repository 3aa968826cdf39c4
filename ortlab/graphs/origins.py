"""Where in the model the nodes of a graph come from: the module by its path, and the line of source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ortlab.graphs.nodes import INSIDE, YIELD, exported_name, joined, layer_of, node_names, path_in, scopes_in

if TYPE_CHECKING:
    from onnx import NodeProto

    from ortlab.graphs.stages import Graph

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
    """Return where each node of a graph comes from, by name as `node_names` gives it, in the order of the graph.

    The names in a file lead to modules, too, but nobody there knows which of them exist: every scope of a name is taken
    for a module.
    """
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
        """Go by the names of its results: a fused node gives its result the name that the last of the fused gave it.

        The gradient of a value is made where the value is read, which may be in another module than where it is made.
        """
        if any(_GRADIENT.search(name) for name in node.output) and not node.name.startswith(_SUMS):
            return None
        return self._common({self._path(name) for name in node.output if name.startswith("/")})

    def _by_inlined_functions(self) -> None:
        """Go by what the gradient of an operator reads: ORT builds some from functions, and inlines them without names.

        All nodes of such a function are of the node whose gradient it is, if only one of that operator reads the same.
        """
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
        """Go by what is around it: what stands between nodes of one module is of that module.

        So is a constant that only one module reads. A parameter that it reads must be of the same module, or nothing is
        said: the weight of an embedding may be read by the head, too.
        """
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


_GRADIENT: Final = re.compile(r"_grad(?:_\d+)?$")
"""How the name of a gradient ends: "x_grad", and "x_grad_0" of one that several are summed to."""

_SUMS: Final = "AccumulateGrad_"
"""How the node is named that sums the gradients of a value; it belongs where the value is made."""

_INLINED: Final = re.compile(r"_inlfunc_(?P<operator>[A-Za-z]+)Grad(?:_token_\d+)?(?=_)")
"""How the values inside an inlined function are named: "_inlfunc_DivGrad_token_5_shape_A"."""
