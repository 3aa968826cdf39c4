"""How many threads ONNX Runtime's kernels get: as many as PyTorch has, but one where a step's nodes have little to do.

ORT 1.19.2 gives a product another thread for each 65,536 multiplications (``mlasi.h``), which one computes in
microseconds. To wake it takes longer, and PyTorch's own threads, which wait for work behind each of its kernels,
have the cores. The numbers are those of all threads but for the last digit.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

import torch

from ortlab.engine.passes.graph_edits import GraphFacts, aten_operator, attributes_of, has_inner_graphs
from ortlab.memory.symbolic_sizes import shape_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import onnx

LITTLE: Final = 80e6
"""Multiplications of a forward, about a millisecond of one thread, up to which that thread does them."""

_AN_ENTRY: Final = 40
"""Multiplications of a product that take as long as an entry of a result that is computed one by one."""

LONG: Final = 16e6
"""Multiplications of a node that is computed entry by entry from which on threads are woken for it alone."""

_HEAD: Final = 64
"""Products that are added up for an entry, where no shape tells: the width of a head of attention."""

_PRODUCTS: Final = frozenset({"MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Conv"})
_FREE: Final = frozenset(
    """Constant ConstantOfShape Flatten Identity Range Reshape Shape Size Squeeze Unsqueeze""".split()  # noqa: SIM905
)


def threads_for(forward: onnx.ModelProto, sizes: Mapping[str, int]) -> int:
    """Return how many threads shall run an exported graph, for these sizes of its input's dimensions."""
    threads = torch.get_num_threads()
    if threads == 1 or has_inner_graphs(forward.graph):  # nobody knows how often a Loop turns
        return threads
    work = Work(GraphFacts(forward), forward.graph, sizes)
    return 1 if work.multiplications < LITTLE and work.longest < LONG else threads


class Work:
    """An estimate of what a graph computes; it is rough where shape inference has found no shape."""

    def __init__(self, facts: GraphFacts, graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
        self._facts = facts
        self._sizes = sizes
        self._entries: dict[str, float] = {}  # of results whose shape is not known
        self.longest = 0.0  # multiplications of the longest node that is computed entry by entry
        self.multiplications = sum(map(self._of, graph.node))

    def _shape(self, name: str) -> tuple[int, ...] | None:
        stated = self._facts.shapes.get(name)
        return None if stated is None else shape_at(stated, self._sizes)

    def count(self, name: str) -> float:
        """Return the number of entries of a value, 0 where nothing is known of it."""
        shape = self._shape(name)
        return self._entries.get(name, 0.0) if shape is None else float(prod(shape))

    def _of(self, node: onnx.NodeProto) -> float:
        """Return the multiplications of a node, and note how many entries its results have."""
        if not node.output:  # as a YieldOp for whose outputs no gradient comes
            return 0.0
        inner = self._inner(node) if node.op_type in _PRODUCTS else 0.0
        count = self.count(node.output[0]) or self._guessed(node)
        for name in node.output:
            self._entries[name] = count
        if node.op_type in _FREE or node.op_type == "ATen":  # PyTorch computes these
            return 0.0
        if not inner:
            self.longest = max(self.longest, count * _AN_ENTRY)
        return count * (inner or _AN_ENTRY)

    def _inner(self, node: onnx.NodeProto) -> float:
        """Return how many products are added up for an entry of a result."""
        shape = self._shape(node.input[1])
        if shape is None or len(shape) < 2:  # noqa: PLR2004 - a matrix
            return _HEAD
        if node.op_type == "Conv":
            return float(prod(shape[1:]))
        return float(shape[-1 if attributes_of(node).get("transB") else -2])

    def _guessed(self, node: onnx.NodeProto) -> float:
        """Return how many entries a result has whose shape is not known, by those of what it is made of."""
        attributes = attributes_of(node)
        counts = [self.count(name) for name in node.input]
        shape = self._shape(node.input[1]) if len(node.input) > 1 else None
        count = max(counts, default=0.0)
        if node.op_type in _PRODUCTS and shape is not None and len(shape) > 1:
            before, after = shape[-2:][:: -1 if attributes.get("transB") else 1]
            if node.op_type == "Conv":
                before, after = shape[1] * attributes.get("group", 1), shape[0]
            count = counts[0] / max(before, 1) * after
        elif node.op_type == "Gather" or aten_operator(node) == "embedding":
            count = counts[1] * prod((self._shape(node.input[0]) or [])[1:])
        elif node.op_type == "Split":
            count = counts[0] / len(node.output)
        elif node.op_type == "Concat":
            count = sum(counts)
        return count / float(prod(attributes.get("strides", [1])))
