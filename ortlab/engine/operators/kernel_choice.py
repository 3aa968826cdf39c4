"""Which nodes of a gradient graph PyTorch computes: those for which it has the faster kernel on the CPU.

ONNX Runtime's own gradients of LayerNorm, Gelu and softmax take two to five times as long as PyTorch's, and its
products of matrices take longer where an operand is transposed, as for the gradient of every weight. So these nodes of
the backward become ``ATen`` nodes that call `ortlab.engine.operators.torch_kernels`. The forward stays as it is: what
can be recomputed to save memory is decided by the operators that ONNX Runtime finds there.

Two sums go into the memory of their first operand: that of a gradient with one from outside (``loss`` and ``logits``
are both outputs; usually nothing comes for the logits), and that of a weight's gradient with the one that an embedding
of the same weight has in a few rows.
"""

from __future__ import annotations

from typing import Any, Final

import onnx
from onnx import TensorProto, helper, numpy_helper

from ortlab.engine.passes.graph_edits import (
    ATEN,
    GraphFacts,
    aten_operator,
    copied,
    declare_aten,
    kernel_call,
)

# A call into Python takes some 30 microseconds, which a small layer does not save.
SMALLEST_WEIGHT: Final = 2**16
"""Entries of a matrix from which on PyTorch computes the products with it."""
SMALLEST_WIDTH: Final = 256
"""Entries of the last dimension from which on PyTorch computes the gradient of a normalisation or an activation."""

_MATRIX: Final = 2
_PRODUCTS: Final = frozenset({"Gemm", "MatMul", "FusedMatMul"})


def choose_kernels(model: onnx.ModelProto) -> list[int]:
    """Let PyTorch compute what it computes faster in the backward of a gradient graph, on the CPU.

    The graph is changed in place; one without a YieldOp stays as it is. Returns the numbers of the module's outputs for
    which "no gradient" may be given as a scalar, instead of as zeros in the output's shape.
    """
    choice = _Choice(model)
    choice.make()
    return choice.free_outputs


class _Choice:
    """The choice of the nodes that take the place of others in a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._facts = GraphFacts(model)
        self._producers: dict[str, onnx.NodeProto] = dict(self._facts.producers)
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._outputs = {value.name for value in model.graph.output}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._instead: dict[str, onnx.NodeProto] = {}
        self._yielded: list[str] = []
        self.free_outputs: list[int] = []

    def make(self) -> None:
        """Choose, and put the chosen nodes in."""
        graph = self._model.graph
        backward: set[str] = set()
        for node in graph.node:
            if node.op_type == "YieldOp":
                self._yielded = list(node.output)
            elif backward.isdisjoint(node.input):
                continue
            else:
                self._choose(node)
            backward.update(node.output)
        if not self._instead:
            return
        nodes = [self._instead.get(node.output[0], node) for node in graph.node]
        nodes = [copied(node) for node in self._needed(nodes)]
        del graph.node[:]
        graph.node.extend(nodes)
        declare_aten(self._model)

    def _needed(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Drop the nodes that nothing reads any more; `nodes` are in topological order."""
        read, needed = set(self._outputs), []
        for node in reversed(nodes):
            if node.op_type == "YieldOp" or not read.isdisjoint(node.output):
                read.update(node.input)
                needed.append(node)
        return needed[::-1]

    def _choose(self, node: onnx.NodeProto) -> None:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if self._facts.element_types.get(node.output[0]) != TensorProto.FLOAT:
            return
        if node.op_type in _PRODUCTS:
            self._product(node, attributes)
        elif node.op_type == "LayerNormalizationGrad" and self._width(node.input[1]) >= SMALLEST_WIDTH:
            self._call("layer_norm_backward", list(node.input), node)
        elif node.op_type == "GeluGrad" and self._width(node.input[1]) >= SMALLEST_WIDTH:
            self._call("gelu_backward", list(node.input), node)
        elif node.op_type == "SoftmaxGrad_13":
            self._softmax(node, attributes)
        elif node.op_type == "Sum" and len(node.input) == _MATRIX:
            self._sum(node)

    # ---- the kinds of nodes -----------------------------------------------------------------------------------

    def _product(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> None:
        plain = attributes.get("alpha", 1) == 1 and not any(
            attributes.get(name) for name in ("transBatchA", "transBatchB")
        )
        if not plain or any(node.input[2:]):
            return
        a, b = node.input[:2]
        transposed = bool(attributes.get("transA")), bool(attributes.get("transB"))
        if transposed == (True, False) and node.op_type == "Gemm":
            self._product_of_rows(node, a, b)
        elif not transposed[0] and self._is_large(self._facts.shapes.get(b)):
            producer = self._producers.get(b)
            turned = transposed[1]
            if producer is not None and _turns_a_matrix(producer):
                b, turned = producer.input[0], not turned
            self._call("matmul_transposed" if turned else "matmul", [a, b], node)

    def _product_of_rows(self, node: onnx.NodeProto, a: str, b: str) -> None:
        shape = self._facts.shapes.get(node.output[0])
        if shape is None or not self._is_large(shape):
            return
        rows = [self._before_flattening(name, width) for name, width in zip((a, b), shape, strict=True)]
        reader = self._only_reader(node.output[0])
        if reader is not None and _turns_a_matrix(reader):
            rows, node = rows[::-1], reader
        self._call("matmul_of_rows", rows, node)

    def _softmax(self, node: onnx.NodeProto, attributes: dict[str, Any]) -> None:
        grad, probabilities = node.input
        rank = self._facts.ranks.get(probabilities, 0)
        if attributes.get("axis", -1) not in {-1, rank - 1} or rank == 0:
            return
        producer = self._producers.get(grad)
        masked = []
        if producer is not None and producer.op_type == "Where" and self._only_reader(grad) is node:
            # Attention puts 0 in the place of what is not a number; ORT's Where takes one number at a time.
            mask, zero, unmasked = producer.input
            if self._is_zero(zero) and self._facts.shapes.get(unmasked) == self._facts.shapes.get(grad):
                grad, masked = unmasked, [mask]
        self._call("softmax_backward", [grad, probabilities, *masked], node)

    def _sum(self, node: onnx.NodeProto) -> None:
        for total, other in (node.input, node.input[::-1]):
            if self._only_reader(total) is not node or self._only_reader(other) is not node:
                continue
            source = self._source(other)
            if source in self._yielded and self._facts.ranks.get(total, 0) > 0:
                memory = self._memory(total)
                if memory:
                    self._call("add_output_gradient", [memory[0], source, *memory[1:]], node)
                    self.free_outputs.append(self._yielded.index(source))
                return
            producer = self._producers.get(other)
            if producer is not None and self._is_dense_embedding(producer) and self._makes_memory(total):
                grad, indices, _, padding, *_ = producer.input
                self._call("add_embedding_gradient", [total, grad, indices, padding], node)
                return

    # ---- what it asks -----------------------------------------------------------------------------------------

    def _call(self, kernel: str, inputs: list[str], node: onnx.NodeProto) -> None:
        """Put a call of a kernel in the place of a node."""
        new = kernel_call(kernel, inputs, list(node.output), node)
        self._instead[node.output[0]] = new
        for name in node.output:
            self._producers[name] = new

    def _width(self, name: str) -> int:
        size = (self._facts.shapes.get(name) or (0,))[-1]
        return size if isinstance(size, int) else 0

    def _is_large(self, shape: tuple[int | str | None, ...] | None) -> bool:
        if shape is None or len(shape) != _MATRIX:
            return False
        rows, columns = shape
        return isinstance(rows, int) and isinstance(columns, int) and rows * columns >= SMALLEST_WEIGHT

    def _only_reader(self, name: str) -> onnx.NodeProto | None:
        readers = self._readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self._outputs else None

    def _before_flattening(self, name: str, width: int | str | None) -> str:
        """Return the input of the Reshape that makes a matrix, if its last dimension is `width`; else the matrix."""
        producer = self._producers.get(name)
        if producer is None or producer.op_type != "Reshape" or self._width(producer.input[0]) != width:
            return name
        return str(producer.input[0])

    def _source(self, name: str) -> str:
        """Follow a value back through Identities, as far as nothing else reads it."""
        while (producer := self._producers.get(name)) is not None and producer.op_type == "Identity":
            if self._only_reader(producer.input[0]) is None:
                break
            name = producer.input[0]
        return name

    def _memory(self, name: str) -> tuple[str, ...]:
        """Return what owns the memory of a value that one node reads, and the shape to read it in; else nothing.

        The output of a Reshape does not own the memory that it is in: ORT frees that with the Reshape's input.
        """
        if self._makes_memory(name):
            return (name,)
        producer = self._producers.get(name)
        if producer is None or producer.op_type != "Reshape":
            return ()
        data, shape = producer.input
        sizes = self._producers.get(shape)
        if sizes is None or sizes.op_type != "Shape" or self._only_reader(data) is None:
            return ()
        return (data, shape) if self._makes_memory(data) else ()

    def _makes_memory(self, name: str) -> bool:
        producer = self._producers.get(name)
        return producer is not None and (producer.op_type in _PRODUCTS or producer.domain == ATEN)

    def _is_dense_embedding(self, node: onnx.NodeProto) -> bool:
        if aten_operator(node).removeprefix("aten::") != "embedding_backward":
            return False
        _, _, _, _, scaled, is_sparse = node.input
        return self._is_zero(scaled) and self._is_zero(is_sparse)

    def _is_zero(self, name: str) -> bool:
        """Say whether a value is a constant that holds nothing but zeros or False."""
        producer = self._producers.get(name)
        tensor = self._constants.get(name)
        if producer is not None and producer.op_type == "Constant":
            tensor = next(
                (attribute.t for attribute in producer.attribute if attribute.name == "value"), None
            )
        return tensor is not None and not numpy_helper.to_array(tensor).any()


def _turns_a_matrix(node: onnx.NodeProto) -> bool:
    permutation = [list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"]
    return node.op_type == "Transpose" and permutation == [[1, 0]]
