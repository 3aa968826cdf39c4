"""Products of matrices: which operators they are, and which of a backward had better wait for another.

An attention has two products of one gradient: with what its softmax has made, and for it. The second is as large as all
scores. Behind the first it need not be there while the backward makes again what the softmax has made, which takes two
buffers of that size as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

PRODUCTS: Final = frozenset(
    """Conv ConvTranspose Einsum FusedConv FusedGemm FusedMatMul Gemm MatMul
    addmm attention bmm convolution gemm grouped_linear linear matmul matmul_transposed""".split()  # noqa: SIM905
)
"""The operators that do most of a model's arithmetic, of ONNX and of torch."""

_GRADIENTS_OF_SOFTMAX: Final = frozenset(
    {"com.microsoft.SoftmaxGrad_13", "ortlab::softmax_backward", "ortlab::softmax_backward_over"}
)

_MASKING: Final = frozenset({"Where", "com.microsoft.BitmaskDropoutGrad", "com.microsoft.DropoutGrad"})
"""What may stand between the gradient of a softmax and the product that makes what it reads."""


def is_product(operator: str) -> bool:
    """Tell whether an operator is a product of matrices or a convolution."""
    return operator.rpartition(":")[2].rpartition(".")[2] in PRODUCTS


class Reading(Protocol):
    """A node, by what it reads and makes."""

    @property
    def operator(self) -> str:
        """The operator that runs, as `executed_operator` names it."""

    @property
    def inputs(self) -> Sequence[str]:
        """Names of values."""

    @property
    def outputs(self) -> Sequence[str]:
        """Names of values."""


def late_products(nodes: Sequence[Reading], again: Collection[str]) -> dict[int, tuple[int, str]]:
    """Return which of the nodes of a backward wait: by number, that of the other, and the gradient that both read.

    `again` are values that the backward makes again.
    """
    maker = {name: number for number, node in enumerate(nodes) for name in node.outputs if name}
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(number)
    found = {}
    for node in nodes:
        if node.operator in _GRADIENTS_OF_SOFTMAX and node.inputs[1] in again:
            late = _product_behind(node.inputs[0], nodes, maker)
            for name in nodes[late].inputs if late is not None else ():
                for other in readers[name] if name in maker else ():
                    rest = {one for one in nodes[other].inputs if one != name}
                    # Of the gradient and of what is there without the late one, so that neither waits for the other.
                    apart = other != late and maker.keys().isdisjoint(rest)
                    if late is not None and apart and is_product(nodes[other].operator):
                        found[late] = other, name
    return found


def _product_behind(name: str, nodes: Sequence[Reading], maker: Mapping[str, int]) -> int | None:
    """Return the number of the product that makes a value, from which masks may be taken off."""
    waiting = [name]
    while waiting:
        number = maker.get(waiting.pop())
        if number is not None and is_product(nodes[number].operator):
            return number
        if number is not None and nodes[number].operator in _MASKING:
            waiting += nodes[number].inputs
    return None


def in_late_order(nodes: Sequence[Reading], late: Mapping[int, tuple[int, str]]) -> list[int]:
    """Return the numbers of nodes in an order in which those that wait for others, and their readers, come behind."""
    order, held, done = list[int](), list[int](), set[int]()
    missing = set[str]()
    for number, node in enumerate(nodes):
        waits = number in late and late[number][0] not in done
        if waits or not missing.isdisjoint(node.inputs):
            held.append(number)
            missing.update(node.outputs)
            continue
        order.append(number)
        done.add(number)
        if held and all(one not in late or late[one][0] in done for one in held):
            order += held
            done.update(held)
            held.clear()
            missing.clear()
    return [*order, *held]
