"""Normalisations by the root of the mean square, as Llama, T5 and their like write them out, as one operator each.

Written out, such a normalisation is five to seven nodes, and its gradient some fifteen, each of which reads and writes
all of a layer's activations; the backward keeps its input, the normalised input and the result. ONNX Runtime has an
operator for it, ``SimplifiedLayerNormalization``, with a gradient that needs the input and a number for each row, and
memory plans can recompute it; where there is no weight it gets ones. Its own optimizer (``SimplifiedLayerNormFusion``
of 1.19.2) finds T5's form, but none with a cast to the same type behind, as Llama's has, and it takes a single weight
for one of each entry, which then fails when it runs.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import onnx
from onnx import TensorProto, helper

from ortlab.engine.passes.graph_edits import GraphAdditions, GraphFacts, attributes_of, copied, nodes_of

OPERATOR: Final = "SimplifiedLayerNormalization"


def join_rms_norms(model: onnx.ModelProto) -> bool:
    """Make one operator of each normalisation by the root of the mean square; say whether the model changed."""
    if any(one.HasField("g") for node in model.graph.node for one in node.attribute):
        return False  # inner graphs read by names, too
    search, additions = _Search(model), GraphAdditions(model)
    found = [one for node in nodes_of(model, "ReduceMean") if (one := search.norm_of(node)) is not None]
    dropped = set[str]()
    for one in found:
        last = one.nodes[-1]
        if not search.fits(one):
            last.input[:] = [
                name if name == one.weight else additions.apart(last, name, f"{last.output[0]}_apart")
                for name in last.input
            ]
            continue
        dropped.update(node.output[0] for node in one.nodes[:-1])
        weight = one.weight or _ones(additions, last, one.source)
        last.op_type = OPERATOR
        last.input[:] = [one.source, weight]
        last.output.append(f"{last.output[0]}_rstd")
        del last.attribute[:]
        last.attribute.extend(
            [helper.make_attribute("axis", -1), helper.make_attribute("epsilon", one.epsilon)]
        )
    additions.apply()
    if dropped:
        nodes = [copied(node) for node in model.graph.node if dropped.isdisjoint(node.output)]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return bool(found)


def _ones(additions: GraphAdditions, before: onnx.NodeProto, source: str) -> str:
    """Add as many ones as a row of a value has entries in front of a node; return their name."""
    name = f"{before.output[0]}_ones"
    shape = additions.node(before, "Shape", [source], f"{name}_shape")
    last = additions.vector(before, f"{name}_last", [-1])
    width = additions.node(before, "Gather", [shape, last], f"{name}_width")
    one = helper.make_tensor(f"{name}_value", TensorProto.FLOAT, [1], [1.0])
    return additions.node(before, "ConstantOfShape", [width], name, value=one)


class _Norm(NamedTuple):
    """A normalisation: what it reads, and its nodes, of which the last makes the result."""

    source: str
    weight: str  # "" if it has none, or one that is not for each entry of a row
    epsilon: float
    nodes: list[onnx.NodeProto]


class _Search:
    """Looks for normalisations in a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._facts = GraphFacts(model)

    def norm_of(self, mean: onnx.NodeProto) -> _Norm | None:
        """Return the normalisation that takes this mean, None if there is none: w * (x / sqrt(mean(x ** 2) + e)).

        It may have no weight. One that does not fit is returned where ONNX Runtime would take it for one that does.
        """
        facts, attributes = self._facts, attributes_of(mean)
        square = facts.producers.get(mean.input[0])
        if square is None or not attributes.get("keepdims", 1):
            return None
        source = self._squared(square)
        # From opset 18 on the axes are an input.
        axes = attributes.get("axes", [facts.scalar(name) for name in mean.input[1:]])
        if axes not in ([-1], [facts.ranks.get(source, 0) - 1]):
            return None
        nodes = [square, mean]
        added = self._next(nodes, "Add")
        epsilon = None if added is None else self._scalar_beside(added, mean.output[0])
        scaled = self._scaled(nodes, source)
        if epsilon is None or scaled is None:
            return None
        bare = _Norm(source, "", epsilon, list(nodes))
        result = self._next(nodes, "Mul")
        if result is None:
            return bare if self.fits(bare) else None
        weight = result.input[1 if self._plain(result.input[0]) == scaled.output[0] else 0]
        whole = _Norm(source, weight, epsilon, nodes)
        return bare if self.fits(bare) and not self.fits(whole) else whole

    def _scaled(self, nodes: list[onnx.NodeProto], source: str) -> onnx.NodeProto | None:
        """Return the node that divides by the root of the last node's result, or multiplies with one by it."""
        root, scaled = self._next(nodes, "Sqrt"), self._next(nodes, "Div", "Reciprocal")
        if root is None or scaled is None:
            return None
        if scaled.op_type == "Reciprocal" or self._plain(scaled.input[0]) != source:
            is_one = scaled.op_type == "Reciprocal" or self._facts.scalar(scaled.input[0]) == 1
            scaled = self._next(nodes, "Mul") if is_one else None
        return scaled if scaled is not None and source in map(self._plain, scaled.input) else None

    def fits(self, norm: _Norm) -> bool:
        """Say whether the operator computes this: float32, one weight, or 1, for each entry of a row."""
        facts = self._facts
        types = {facts.element_types.get(name) for name in (norm.source, norm.weight or norm.source)}
        width = (facts.shapes.get(norm.source) or (None,))[-1]
        fits = not norm.weight or facts.shapes.get(norm.weight) == (width,)
        return types == {TensorProto.FLOAT} and fits

    def _squared(self, node: onnx.NodeProto) -> str:
        """Return the value that a node squares, "" if it does something else or others read the square."""
        first = self._plain(node.input[0])
        is_square = (node.op_type == "Pow" and self._facts.scalar(node.input[1]) == 2) or (  # noqa: PLR2004
            node.op_type == "Mul" and first == self._plain(node.input[1])
        )
        return first if is_square and self._facts.only_reader(node.output[0]) is not None else ""

    def _next(self, nodes: list[onnx.NodeProto], *operators: str) -> onnx.NodeProto | None:
        """Return the only node that reads the result of the last one, through needless casts, and add it, and these."""
        passed: list[onnx.NodeProto] = []
        node = nodes[-1]
        while (reader := self._facts.only_reader(node.output[0])) is not None:
            if reader.op_type in operators and not reader.domain:
                nodes += [*passed, reader]
                return reader
            if not self._is_needless(reader):
                break
            passed.append(reader)
            node = reader
        return None

    def _plain(self, name: str) -> str:
        """Follow a value back through casts to the type that it has."""
        while (node := self._facts.producers.get(name)) is not None and self._is_needless(node):
            name = node.input[0]
        return name

    def _is_needless(self, node: onnx.NodeProto) -> bool:
        types = self._facts.element_types
        is_cast = node.op_type == "Cast" and attributes_of(node)["to"] == types.get(node.input[0])
        return node.op_type == "Identity" or is_cast

    def _scalar_beside(self, node: onnx.NodeProto, name: str) -> Any:
        """Return the constant that a node adds to a value, None if it is none."""
        return self._facts.scalar(next((one for one in node.input if self._plain(one) != name), ""))
