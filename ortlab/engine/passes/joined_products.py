"""The gradient of a weight that is used again and again, as of a cell in a loop: one product instead of many.

ONNX Runtime multiplies for each use, and adds the products. Where a batch has few rows, each product takes as long as
to write and to add it, since every entry is a sum of a few terms. The rows of all uses, one below the other, give the
same sum in one product. They are copied for it, and kept up to there, so no more of them are taken than a few gradients
of the weight have entries. PyTorch multiplies and adds as ONNX Runtime does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from onnx import helper

from ortlab.engine.operators.exact_choice import normalises_batches
from ortlab.engine.passes.graph_edits import SIZES, GraphFacts, attributes_of, copied, has_inner_graphs
from ortlab.engine.threads import Work

if TYPE_CHECKING:
    import onnx

_FEW: Final = 0.5
"""Entries of both operands, as a part of the product's, up to which a product takes no longer than its sum."""
_MOST: Final = 4.0
"""Entries of all operands that are joined, as a multiple of the product's."""


class _Product(NamedTuple):
    """A node that multiplies the rows of two matrices, and the entries of both as a part of the product's."""

    node: onnx.NodeProto
    share: float


def join_products(model: onnx.ModelProto) -> None:
    """Make one of small products of rows that are added, in a gradient graph that is changed in place."""
    # Batch normalisations make much of each digit, and these would not be PyTorch's.
    graph = model.graph
    if has_inner_graphs(graph) or normalises_batches(graph):
        return
    facts = GraphFacts(model)
    work = Work(facts, graph, SIZES.get())
    types = {value.name: value for value in graph.value_info}
    instead: dict[str, list[onnx.NodeProto]] = {}  # of a Sum, by its output
    joined: set[str] = set()
    for node in graph.node:
        if node.op_type != "Sum" or node.domain:
            continue
        products = list(_small_products(node, facts, work))
        groups = [group for group in _groups(products) if len(group) > 1]
        if not groups:
            continue
        gone = {one.node.output[0] for group in groups for one in group}
        parts = [name for name in node.input if name not in gone]
        made = []
        for number, group in enumerate(groups):
            alone = len(groups) == 1 and not parts
            result = node.output[0] if alone else f"{node.output[0]}_joined_{number}"
            made += _at_once([one.node for one in group], result)
            parts.append(result)
            typed = types.get(group[0].node.output[0])
            if typed is not None and result not in types:
                graph.value_info.add().CopyFrom(typed)
                graph.value_info[-1].name = result
        if len(parts) > 1:
            made.append(helper.make_node("Sum", parts, list(node.output), name=node.name))
        instead[node.output[0]] = made
        joined |= gone
    if instead:
        nodes = [
            copied(one)
            for node in graph.node
            if joined.isdisjoint(node.output)
            for one in instead.get(node.output[0] if node.output else "", [node])
        ]
        del graph.node[:]
        graph.node.extend(nodes)


def _small_products(node: onnx.NodeProto, facts: GraphFacts, work: Work) -> Iterator[_Product]:
    """Yield those of the terms of a sum that are products of few rows, in the order in which they are computed."""
    for name in node.input:
        product = facts.producers.get(name)
        if product is None or facts.only_reader(name) is not node or not _multiplies_rows(product):
            continue
        entries = work.count(name)
        operands = [work.count(operand) for operand in product.input[:2]]
        if entries and all(operands) and sum(operands) <= _FEW * entries:
            yield _Product(product, sum(operands) / entries)


def _multiplies_rows(node: onnx.NodeProto) -> bool:
    """Say whether a node is a Gemm of the transpose of a matrix and another matrix, without a third."""
    attributes = attributes_of(node)
    turned = attributes.get("transA", 0), attributes.get("transB", 0)
    return (
        node.op_type == "Gemm"
        and turned == (1, 0)
        and attributes.get("alpha", 1) == 1
        and not any(node.input[2:])
    )


def _groups(products: Iterable[_Product]) -> list[list[_Product]]:
    """Part products so that the operands of each group have no more entries than `_MOST` allows."""
    groups: list[list[_Product]] = [[]]
    for one in products:
        if sum(other.share for other in groups[-1]) + one.share > _MOST:
            groups.append([])
        groups[-1].append(one)
    return groups


def _at_once(products: list[onnx.NodeProto], result: str) -> list[onnx.NodeProto]:
    """Return the product of the operands of several, one below the other, with names that tell the module."""
    # The exporter puts a number behind the module's name in all calls but the first.
    name = min((product.name for product in products), key=len)
    operands = []
    made = []
    for side in range(2):
        operands.append(f"{result}_rows_{side}")
        rows = [product.input[side] for product in products]
        made.append(helper.make_node("Concat", rows, operands[-1:], name=f"{name}_rows_{side}", axis=0))
    return [*made, helper.make_node("Gemm", operands, [result], name=f"{name}_joined", transA=1)]
