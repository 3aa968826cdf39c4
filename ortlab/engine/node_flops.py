"""What each node of a profiled step calculates, by the shapes that ORT's profiler has seen it run with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from onnx import helper

from ortlab.engine.inspection.places import Places
from ortlab.graphs.flop_formulas import Shape, flops
from ortlab.graphs.flops import NodeFlops
from ortlab.graphs.nodes import executed_operator, layer_of, node_names
from ortlab.memory.recompute import COPY

if TYPE_CHECKING:
    from collections.abc import Iterable

    import onnx
    import torch

    from ortlab.engine.profiling import Profile


def node_flops(profile: Profile, model: torch.nn.Module, part: str = "") -> tuple[NodeFlops, ...]:
    """Count the FLOPs of the step that was profiled last, node by node.

    `model` is the whole model, which modules are named in; `part` is the path of the wrapped part that was executed,
    empty for the whole model. Raises ExecutionError if no step has run to its end meanwhile.
    """
    origins = _Origins(Places(model, part))
    graph = profile.graph
    names = {_result(node): name for name, node in zip(node_names(graph), graph.node, strict=True)}
    found = []
    for node, event, backward, ms in profile.kernels():
        operator = executed_operator(node)
        inputs, outputs = (_shapes(event["args"][key]) for key in ("input_type_shape", "output_type_shape"))
        attributes = {
            one.name: helper.get_attribute_value(one) for one in node.attribute if not one.HasField("g")
        }
        reads = origins.of_value(next(iter(node.input), ""))
        module = origins.of(node)
        found.append(
            NodeFlops(
                name=names[_result(node)],
                operator=operator,
                module=module,
                layer=layer_of(module),
                backward=backward,
                inputs=inputs,
                outputs=outputs,
                flops=flops(operator, inputs, outputs, attributes),
                elements=sum(map(prod, outputs)),
                ms=ms,
                recomputed=node.name.endswith(COPY),
                reads=reads,
            )
        )
    return tuple(found)


class _Origins:
    """Finds the module of each node; nodes have to be asked for in the order in which they ran.

    Nodes are named after their module, and so are those of their gradients. Those that ORT puts in without such a name
    take the module of what they read.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._of_value: dict[str, str] = {}

    def of_value(self, name: str) -> str:
        """Return the path of the module that made a value; empty for what no node has made."""
        return self._of_value.get(name, "")

    def of(self, node: onnx.NodeProto) -> str:
        """Return the path of a node's module; empty for the model itself."""
        named = next((name for name in (node.name, *node.output) if "/" in name), "")
        if named:
            module = self._places.of_name(named[named.index("/") :]).module
        else:
            module = next((self._of_value[name] for name in node.input if name in self._of_value), "")
        self._of_value.update(dict.fromkeys(filter(None, node.output), module))
        return module


def _result(node: onnx.NodeProto) -> str:
    """Return the name of a node's first result, which no other node makes."""
    return next(filter(None, node.output), "")


def _shapes(described: Sequence[Mapping[str, Iterable[Any]]]) -> tuple[Shape, ...]:
    return tuple(tuple(int(size) for size in shape) for one in described for shape in one.values())
