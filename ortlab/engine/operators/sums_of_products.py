"""Sums of products in one pass over memory: the gradient of a factor that was broadcast, as a scale or a gate is.

ONNX Runtime multiplies what comes back by the other factor, keeps the product, and sums it over the axes along which
the factor was repeated. The product is as large as the result of the multiplication, and nobody else reads it.
`sums_of_products.h` sums without making it, as exactly as PyTorch, but in another order. So small products are made,
whose sums then have PyTorch's digits, and so are all where batches are normalised, which makes much of each digit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ortlab.engine.operators.exact_choice import normalises_batches
from ortlab.engine.operators.torch_kernels import broadcast, empty, kernel, over
from ortlab.engine.passes.graph_edits import (
    NAMESPACE,
    SIZES,
    GraphFacts,
    aten_operator,
    has_inner_graphs,
    kernel_call,
    needed_nodes,
    put_calls,
)
from ortlab.engine.threads import Work

if TYPE_CHECKING:
    import onnx

FEWEST: Final = 2**16
"""Entries of a product from which on it is not made, in the first batch."""
_MOST_FACTORS: Final = 3


@kernel("(int[] flags, int[]? axes, Tensor[] factors) -> Tensor")
def sum_of_products(flags: list[int], axes: list[int] | None, factors: list[Tensor]) -> Tensor:
    """Multiply, and sum over some axes, or all; `flags` are ONNX's keepdims and noop_with_empty_axes."""
    product = factors[0]
    for factor in factors[1:]:
        shape = broadcast(product.shape, factor.shape)
        product = torch.mul(product, factor, out=empty(shape, product))
    return over(torch.sum, product, flags, axes)


def sum_products(model: onnx.ModelProto) -> None:
    """Let sums in the backward of a gradient graph, changed in place, take the factors of what they sum."""
    graph = model.graph
    if has_inner_graphs(graph) or normalises_batches(graph):  # an inner graph may read a product
        return
    facts = GraphFacts(model)
    work = Work(facts, graph, SIZES.get())
    backward: set[str] = set()
    made: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        if node.op_type == "YieldOp" or not backward.isdisjoint(node.input):
            backward.update(node.output)
        if aten_operator(node) != f"{NAMESPACE}::sum_over" or node.input[0] not in backward:
            continue
        factors = _factors(facts, node.input[0])
        if factors and max(map(work.count, factors)) >= FEWEST:
            flags, axes = [*node.input[1:], ""][:2]
            made[node.output[0]] = kernel_call(
                "sum_of_products", [flags, axes, *factors], list(node.output), node
            )
    if made:
        nodes = [made.get(node.output[0], node) if node.output else node for node in graph.node]
        put_calls(model, needed_nodes(nodes, {value.name for value in graph.output}))


def _factors(facts: GraphFacts, name: str) -> list[str]:
    """Return what a product that one node reads is made of, in the order of multiplication; else nothing."""
    made = facts.producers.get(name)
    if made is None or made.op_type != "Mul" or made.domain or facts.only_reader(name) is None:
        return []
    a, b = made.input
    for first, other in ((a, b), (b, a)):
        inner = _factors(facts, first)
        if len(inner) == _MOST_FACTORS - 1:
            return [*inner, other]
    return [a, b]
