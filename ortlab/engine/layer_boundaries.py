"""Where one transformer layer ends and the next begins.

1.19.2 looks for a layer normalisation whose input an addition reads as well, with a softmax in between
(``transformer_specific.cc``, ``FindLayerBoundaryLayerNormNodes``): so it finds the layers of GPT-2, which normalises
first, and none in BERT, which normalises last, nor in Llama, whose normalisation is exported as several operators. It
then recomputes the whole forward in one piece, which all lives at once when backward begins, and saves nothing.

Here a layer is known by its residual: the value that goes into an attention and is added to what comes out of it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import onnx

_ATTENTION: Final = frozenset({"Softmax", "BiasSoftmax", "BiasSoftmaxDropout"})
_NORMS: Final = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})
_ON_THE_WAY: Final = _NORMS | {"Dropout", "BitmaskDropout", "Cast"}
"""What may stand between the end of a layer and the value that goes into the next one."""


def boundaries(graph: onnx.GraphProto, stashed: Collection[str]) -> frozenset[str]:
    """Return the values that transformer layers hand to each other, among those that backward needs (`stashed`).

    They are enough to recompute a layer from: one for each attention whose residual is found. Where a layer
    normalisation comes last, it is the normalisation's input, so that its result is recomputed, too. `graph` is a
    training graph, as it is executed.
    """
    forward = _forward(graph)
    producers = {output: node for node in forward for output in node.output if output}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in forward:
        for value in node.input:
            readers.setdefault(value, []).append(node)
    order = {id(node): number for number, node in enumerate(forward)}
    found = set[str]()
    for node in forward:
        if node.op_type in _ATTENTION:
            residual = _residual(node, producers, readers, order)
            found.update(_worth_keeping(residual, producers, stashed))
    return frozenset(found)


def _forward(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return the nodes before the one that hands the outputs to PyTorch, in their order."""
    nodes = list(graph.node)
    end = next((number for number, node in enumerate(nodes) if node.op_type == "YieldOp"), len(nodes))
    return nodes[:end]


def _residual(
    attention: onnx.NodeProto,
    producers: Mapping[str, onnx.NodeProto],
    readers: Mapping[str, list[onnx.NodeProto]],
    order: Mapping[int, int],
) -> str:
    """Return the value that an attention is made of and that is added to its result; empty if there is none."""
    above = _ancestors(attention, producers)
    waiting = deque(node for value in attention.output for node in readers.get(value, ()))
    below = set(attention.output)
    additions = []
    seen = set[int]()
    while waiting:
        node = waiting.popleft()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.op_type == "Add" and any(value in above for value in node.input):
            additions.append(node)
            continue
        below.update(node.output)
        waiting.extend(reader for value in node.output for reader in readers.get(value, ()))
    if not additions:
        return ""
    first = min(additions, key=lambda node: order[id(node)])
    return next((value for value in first.input if value in above and value in producers), "")


def _ancestors(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto]) -> frozenset[str]:
    found = set[str]()
    waiting = [value for value in node.input if value]
    while waiting:
        value = waiting.pop()
        if value in found:
            continue
        found.add(value)
        if value in producers:
            waiting.extend(one for one in producers[value].input if one)
    return frozenset(found)


def _worth_keeping(
    residual: str, producers: Mapping[str, onnx.NodeProto], stashed: Collection[str]
) -> list[str]:
    """Return the saved value that the residual is cheaply made of, or the residual, or nothing."""
    chosen = [residual] if residual in stashed else []
    value = residual
    while value in producers and producers[value].op_type in _ON_THE_WAY:
        normalises = producers[value].op_type in _NORMS
        value = producers[value].input[0]
        if normalises:
            return [value] if value in stashed else chosen
    return chosen
