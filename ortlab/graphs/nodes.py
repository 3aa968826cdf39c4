"""What one node of a graph tells: its name, its operator, the module in its name, its pass of a step; and one value."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ortlab.memory.recompute import COPY, HELD

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto, ValueInfoProto

INSIDE: Final = "_original_module"
"""What ORTModule's own module calls the user's."""

_GRADIENT: Final = "_Grad/"
_REPLACED: Final = re.compile(r"(?:/\w+(?:Replacement|Fusion)\w*/)+(?:_token_\d+)?$")


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
    """Return a name for each node, in order: its own; for a nameless one that of its first result.

    ONNX does not ask for names to be unique. Those that repeat are numbered, as in "Add", "Add (2)".
    """
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


def operator_of(node: NodeProto) -> str:
    """Return the operator of a node, with its domain unless it is ONNX's."""
    return f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)


def executed_operator(node: NodeProto) -> str:
    """Return the operator that runs for a node: of an ``ATen`` node torch's, else its own; see `operator_of`."""
    if node.op_type == "ATen":
        return next((one.s.decode() for one in node.attribute if one.name == "operator"), "ATen")
    return operator_of(node)


def exported_name(name: str) -> str:
    """Return the name of the exported node that a node stands for: its own without what ORT puts behind it.

    ORT does so where it replaces a node by another, where it computes its gradient, and where it recomputes it:
    "/fc/Concat/ConcatReplacement/", "/fc/Gemm_Grad/MatMul_0", "/fc/Gelu_recompute".
    """
    return _REPLACED.sub("", name.removesuffix(COPY).partition(_GRADIENT)[0]).removesuffix(COPY)


def scopes_in(name: str) -> list[str]:
    """Return the scopes in the name of a node or a result: "layers.0", "fc" of "/_original_module/layers.0/fc/MatMul".

    Empty for a node outside all modules but the exported one.
    """
    return [part for part in exported_name(name).split("/")[:-1] if part and part != INSIDE]


def path_in(names: Iterable[str], modules: Collection[str] | None, traced: str = "") -> str:
    """Follow scopes from the traced module downwards, as far as they lead to modules, and return the path of the last.

    The outermost scope comes first. A child of a `Sequential` has the name of its parent as a prefix: "head/head.0".
    `modules` holds the paths of the modules that there are; None where that is not known, and every scope is taken for
    one. `traced` is the path of the module that was exported; empty for the model itself.
    """
    path = traced
    for name in names:
        name = name.removeprefix(f"{INSIDE}.")  # noqa: PLW2901 - a child of a `Sequential` that is wrapped itself
        parent = path.rpartition(".")[2]
        own = name.removeprefix(f"{parent}.")
        if modules is None:
            path = joined(path, own)
            continue
        inner = next((one for one in (joined(path, name), joined(path, own)) if one in modules), None)
        if inner is None:
            break
        path = inner
    return path


def joined(path: str, name: str) -> str:
    """Return the path of what is called `name` in the module at `path`."""
    return f"{path}.{name}" if path else name


def layer_of(path: str) -> str:
    """Return the path of the layer that a module is in: the first of its parents that is one of a numbered list.

    Empty for a module that is in none.
    """
    names = path.split(".")
    for count, name in enumerate(names, start=1):
        if name.isdigit():
            return ".".join(names[:count])
    return ""


Phase = Literal["forward", "backward", "recomputed"]

PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "recomputed")

YIELD: Final = "YieldOp"
"""The node between forward and backward: it hands the outputs to PyTorch, and takes their gradients."""


def phases(graph: GraphProto) -> list[Phase | None]:
    """Return the pass of each node, in order; None for the border itself.

    ORT lists what the outputs need before the border, and what needs a gradient from PyTorch behind it; a session saves
    its graph in the order in which it executes it. Copies of nodes that are recomputed may stand anywhere, and so may
    what hands kept values to them.
    """
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
    """Return the name of the node that a copy repeats; empty for one that is no copy.

    An optimiser may have put a copy and its original together with their neighbours, and named both after that:
    "/fc/MatMul_recompute/MatmulTransposeFusion/".
    """
    return node.name.replace(COPY, "", 1) if is_copy(node) else ""


def is_holder(node: NodeProto) -> bool:
    """Say whether a node hands a value of the forward to copies in the backward, as it is."""
    return len(node.output) == 1 and node.output[0].endswith(HELD)
