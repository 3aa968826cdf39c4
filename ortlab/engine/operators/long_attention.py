"""Attention over long sequences as one call of PyTorch's fused kernel, which never holds all scores at once.

Written out, as torch's exporter and many models have it, attention makes scores of every position for every other one,
for each head: 4 heads of 4,096 positions take 256 MiB, more than once, and time to read and write. The fused kernel
keeps a number a position, makes the scores again in the backward, and leaves out those behind a causal mask, which are
half of them. For short sequences the pieces are quicker, and memory plans can recompute them; so only attention of
`LONG` positions and more is taken, or of `LONG_CAUSAL` where the graph itself says that a position sees none behind it.
They are counted for the batch that a graph is built for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from ortlab.engine.operators.torch_kernels import kernel
from ortlab.engine.passes.graph_edits import (
    GraphFacts,
    Shape,
    attributes_of,
    has_inner_graphs,
    kernel_call,
    needed_nodes,
    nodes_of,
    put_calls,
)
from ortlab.memory.symbolic_sizes import shape_at

if TYPE_CHECKING:
    from collections.abc import Mapping

LONG: Final = 1024
"""Positions from which on the fused kernel takes no longer than the pieces, causal or not."""

LONG_CAUSAL: Final = 256
"""The same where each position sees those before it only: the kernel leaves out half, the pieces nothing."""

_NEVER: Final = -1e30
"""What is added to a score, or less, leaves nothing of the score in float32."""

_RANK: Final = 4  # batch, heads, positions, features
_MASKS: Final = (2, _RANK)

# --- kernels ---------------------------------------------------------------------------------------------------------


@kernel(
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int is_causal=0) "
    "-> (Tensor, Tensor, Tensor)"
)
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, is_causal: int = 0
) -> Any:
    """Return softmax(scale * query @ key.T + mask) @ value, the logarithm of each row's sum, and the mask to keep.

    Of a causal mask an empty vector is kept, and an empty matrix where there is none. Query, key and value have the
    shape (batch, heads, positions, features). With `is_causal` there is no mask, and each position sees those up to it.
    """
    causal = bool(is_causal) or (mask is not None and _is_causal(mask))
    kept = mask.clone() if mask is not None and not causal else query.new_empty((0,) if causal else (0, 0))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    output, sums = flash(query, key, value, 0.0, causal, attn_mask=None if causal else mask, scale=scale)
    blind = _blind(kept)
    return output if blind is None else output.masked_fill(blind, torch.nan), sums, kept


@kernel(
    "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor sums, Tensor kept, float scale) "
    "-> (Tensor, Tensor, Tensor)"
)
def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    kept: Tensor,
    scale: float,
) -> Any:
    """Return the gradients of query, key and value, from what `attention` has returned."""
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    causal, mask = kept.dim() == 1, kept if kept.numel() else None
    given = grad, query, key, value, output, sums
    of_query, of_key, of_value = backward(*given, 0.0, causal, attn_mask=mask, scale=scale)
    blind = _blind(kept)
    if blind is None:
        return of_query, of_key, of_value
    reached = blind.any(-2, keepdim=True)
    return of_query.masked_fill(blind, torch.nan), *(
        one.masked_fill(reached, torch.nan) for one in (of_key, of_value)
    )


def _blind(mask: Tensor) -> Tensor | None:
    """Return which rows of a mask see nothing at all, None if each sees something."""
    # The softmax of such a row is not a number, where torch's kernel makes it 0.
    if mask.numel() == 0:
        return None
    blind = mask.amax(-1, keepdim=True) == -torch.inf
    return blind if blind.any() else None


def _is_causal(mask: Tensor) -> bool:
    """Say whether a mask adds 0 up to each row's own position, and hides all behind it."""
    rows, columns = mask.shape[-2:]
    never = float(mask.flatten()[columns - 1])
    if rows != columns or rows == 1 or not never <= _NEVER:
        return False
    causal = mask.new_full((rows, columns), never).triu_(1)
    return all(torch.equal(one, causal) for one in mask.reshape(-1, rows, columns))


# --- the graph -------------------------------------------------------------------------------------------------------


def with_long_attentions(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """Return an exported graph whose long attentions are calls, for these sizes; the graph itself if it has none."""
    softmaxes = nodes_of(model, "Softmax")
    if not softmaxes or has_inner_graphs(model.graph):
        return model
    search = _Search(model, sizes)
    found = [one for node in softmaxes if (one := search.attention_of(node)) is not None]
    if not found:
        return model
    by_last = {one.last.output[0]: one for one in found}
    nodes: list[onnx.NodeProto] = []
    told: list[onnx.ValueInfoProto] = []
    for node in model.graph.node:
        one = by_last.get(node.output[0])
        if one is None:
            nodes.append(node)
            continue
        call = _call(one)
        kept = (0,) if one.is_causal else None if one.inputs[3] else (0, 0)
        shapes = {**one.shapes, call.output[1]: one.rows, call.output[2]: kept}
        told += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()
        ]
        nodes += [*one.added, call]
    # The pieces go; what nothing has read before, such as a call that only does something, stays.
    outputs = {value.name for value in model.graph.output}
    before, after = (
        {node.output[0] for node in needed_nodes(some, outputs)} for some in (model.graph.node, nodes)
    )
    left = [node for node in nodes if node.output[0] in after or node.output[0] not in before]
    made = onnx.ModelProto()
    made.CopyFrom(model)
    put_calls(made, left)
    made.graph.value_info.extend(told)
    return made


class _Attention(NamedTuple):
    """An attention: what it reads, the nodes that make that, and the last of its own nodes."""

    inputs: list[str]  # query, key, value and mask, "" if there is none
    is_causal: bool
    scale: float
    rows: Shape  # batch, heads, positions
    added: list[onnx.NodeProto]
    shapes: dict[str, Shape | None]  # of what they make
    last: onnx.NodeProto


def _call(one: _Attention) -> onnx.NodeProto:
    output = one.last.output[0]
    numbers: dict[str, np.ndarray] = {
        "scale": np.array(one.scale, np.float32),
        "is_causal": np.array(one.is_causal, np.int64),
    }
    for name, number in numbers.items():
        value = numpy_helper.from_array(number, f"{output}_{name}_value")
        one.added.append(helper.make_node("Constant", [], [f"{output}_{name}"], value=value))
    given = [*one.inputs, *(f"{output}_{name}" for name in numbers)]
    return kernel_call("attention", given, [output, f"{output}_sums", f"{output}_kept"], one.last)


class _Search:
    """Looks for attention that is written out: softmax(scale * query @ key.T + mask) @ value."""

    def __init__(self, model: onnx.ModelProto, sizes: Mapping[str, int]) -> None:
        self._facts = GraphFacts(model)
        self._sizes = sizes

    def attention_of(self, softmax: onnx.NodeProto) -> _Attention | None:
        """Return the attention that a softmax belongs to; None if it is short, or none that torch's kernel computes."""
        facts = self._facts
        last, probabilities = self._reader(softmax.output[0])
        is_mixing = last is not None and last.op_type == "MatMul" and last.input[0] == probabilities
        if last is None or not is_mixing:
            return None
        added: list[onnx.NodeProto] = []
        mask, scores = "", self._before_causal_mask(softmax.input[0])
        is_causal = bool(scores)
        if not self._is_long(softmax, LONG_CAUSAL if is_causal else LONG):
            return None
        if not is_causal:
            mask, scores = self._mask(softmax.input[0], last, added)
        scale, scores = self._scale(scores)
        product = self._made_by(scores, "MatMul")
        if product is None:
            return None
        (by_query, query), (by_key, turned) = map(self._scale, product.input)
        scale, value = scale * by_query * by_key, last.input[1]
        if not self._are_alike(query, turned, value):
            return None
        shapes = {one.output[0]: facts.shapes.get(one.input[0]) for one in added if one.op_type == "Where"}
        before = len(added)
        key = self._turned(turned, last, added)
        batch, heads, features, positions = facts.shapes[turned]
        shapes |= {node.output[0]: (batch, heads, positions, features) for node in added[before:]}
        if len({name in facts.differentiable for name in (query, turned, value)}) > 1:
            return None
        given = [query, key, value, mask]
        return _Attention(given, is_causal, scale, facts.shapes[query][:3], added, shapes, last)

    def _is_long(self, softmax: onnx.NodeProto, least: int) -> bool:
        shape = shape_at(self._facts.shapes.get(softmax.output[0], ()), self._sizes) or ()
        along = attributes_of(softmax).get("axis", -1) % _RANK
        return len(shape) == _RANK and along == _RANK - 1 and min(shape[-2:]) >= least

    def _are_alike(self, query: str, turned_key: str, value: str) -> bool:
        """Say whether all are of float32, with the same batch, heads and features: torch's kernel broadcasts none."""
        facts, names = self._facts, (query, turned_key, value)
        shapes = [facts.shapes.get(name, ()) for name in names]
        if any(len(shape) != _RANK for shape in shapes):
            return False
        types = {facts.element_types.get(name) for name in names}
        features = {shapes[0][3], shapes[1][2], shapes[2][3]}
        return types == {TensorProto.FLOAT} and len({shape[:2] for shape in shapes}) == len(features) == 1

    def _before_causal_mask(self, scores: str) -> str:
        """Return the scores before a mask that shows each position those up to it; "" if there is no such mask."""
        facts, node = self._facts, self._made_by(scores, "Add", "Where")
        before, chosen = "", node
        if node is not None and node.op_type == "Add":
            before, mask = node.input
            chosen = self._producer(mask, "Where")
        if chosen is None:
            return ""
        condition, filled, shown = chosen.input
        if before and facts.scalar(shown) != 0:
            return ""
        never = facts.scalar(filled)
        hides = never is not None and never <= _NEVER and self._is_behind(condition, scores)
        return (before or shown) if hides else ""

    def _is_behind(self, condition: str, scores: str) -> bool:
        """Say whether a condition holds where the key of a score is behind its query: ones(n, n).tril() == 0."""
        facts = self._facts
        positions = facts.shapes.get(scores, ())[-2:]
        is_square = len(set(positions)) == 1 and facts.shapes.get(condition, ())[-2:] == positions
        while (cast := self._producer(condition, "Cast", "Identity")) is not None:  # what is true stays true
            condition = cast.input[0]
        equal = self._producer(condition, "Equal")
        lower = None if equal is None else self._producer(equal.input[0], "Trilu")
        if not is_square or equal is None or lower is None or facts.scalar(equal.input[1]) != 0:
            return False
        diagonals = [facts.scalar(name) for name in lower.input[1:] if name]
        is_lower = attributes_of(lower).get("upper", 1) == 0 and not any(one != 0 for one in diagonals)
        return is_lower and self._are_ones(lower.input[0])

    def _are_ones(self, name: str) -> bool:
        node = self._producer(name, "ConstantOfShape", "Expand")
        if node is None or node.op_type == "Expand":
            return node is not None and self._facts.scalar(node.input[0]) == 1
        value = attributes_of(node).get("value")
        return value is not None and bool((numpy_helper.to_array(value) == 1).all())

    def _producer(self, name: str, *operators: str) -> onnx.NodeProto | None:
        """Return the node that makes a value, if it is one of these."""
        node = self._facts.producers.get(name)
        return node if node is not None and node.op_type in operators else None

    def _mask(self, scores: str, last: onnx.NodeProto, added: list[onnx.NodeProto]) -> tuple[str, str]:
        """Return what is added to the scores as a mask, "" if nothing is, and the scores before."""
        facts, node = self._facts, self._made_by(scores, "Add", "Where")
        if node is None:
            return "", scores
        if node.op_type == "Add":
            for mask, before in (node.input, node.input[::-1]):
                fits = facts.ranks.get(mask) in _MASKS and facts.element_types.get(mask) == TensorProto.FLOAT
                if (
                    fits
                    and mask not in facts.differentiable
                    and self._made_by(before, "MatMul", "Mul", "Div")
                ):
                    return mask, before
            return "", ""
        condition, *branches = node.input
        for hides, (filled, before) in enumerate((branches, branches[::-1])):
            never = facts.scalar(filled)
            if never is not None and never <= _NEVER and facts.ranks.get(condition) in _MASKS:
                zero = f"{last.output[0]}_zero"
                value = numpy_helper.from_array(np.array(0, np.float32), f"{zero}_value")
                added.append(helper.make_node("Constant", [], [zero], value=value))
                mask = f"{last.output[0]}_mask"
                chosen = [zero, filled] if hides else [filled, zero]
                added.append(helper.make_node("Where", [condition, *chosen], [mask], name=f"{mask}_Where"))
                return mask, before
        return "", ""

    def _scale(self, name: str) -> tuple[float, str]:
        """Return the numbers that a value was multiplied with, as one, and the value before."""
        scale = 1.0
        while (node := self._made_by(name, "Mul", "Div")) is not None:
            before, by = node.input
            number = self._number(by)
            if number is None and node.op_type == "Mul":
                number, before = self._number(before), by
            if number is None or (not number and node.op_type == "Div"):
                break
            scale, name = scale * number if node.op_type == "Mul" else scale / number, before
        return scale, name

    def _number(self, name: str) -> float | None:
        """Return the only entry of a value that constants and fixed sizes make; None if it is made otherwise."""
        known, node = self._facts.scalar(name), self._facts.producers.get(name)
        if known is not None or node is None:
            return known
        if node.op_type == "Slice":
            return self._size(node)
        is_to_float = node.op_type == "Cast" and attributes_of(node).get("to") == TensorProto.FLOAT
        if node.op_type == "Identity" or is_to_float:
            return self._number(node.input[0])
        if node.op_type == "Sqrt":
            number = self._number(node.input[0])
            return None if number is None or number < 0 else number**0.5
        if node.op_type == "Div":
            above, below = map(self._number, node.input)
            return None if above is None or not below else above / below
        return None

    def _size(self, node: onnx.NodeProto) -> float | None:
        """Return the only size that a slice of a shape has, if it is the same for each batch."""
        shape = self._producer(node.input[0], "Shape")
        first, last = (self._facts.scalar(name) for name in node.input[1:3])
        if shape is None or first is None or last is None:
            return None
        sizes = self._facts.shapes.get(shape.input[0], ())[int(first) : int(last)]
        return float(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], int) else None

    def _turned(self, name: str, last: onnx.NodeProto, added: list[onnx.NodeProto]) -> str:
        """Return the key, of which a value is the transpose."""
        made = self._facts.producers.get(name)
        if made is not None and made.op_type in {"Mul", "Div"} and self._facts.ranks.get(made.input[1]) == 0:
            inputs = [self._turned(made.input[0], last, added), made.input[1]]
            return self._add(made.op_type, inputs, last, added)
        source, axes = name, [0, 1, 2, 3]
        if made is not None and made.op_type == "Transpose":
            source, axes = made.input[0], list(attributes_of(made)["perm"])
        axes[2:] = axes[3], axes[2]
        if axes == sorted(axes):
            return source
        return self._add("Transpose", [source], last, added, perm=axes)

    @staticmethod
    def _add(
        operator: str, inputs: list[str], last: onnx.NodeProto, added: list[onnx.NodeProto], **attributes: Any
    ) -> str:
        """Add a node that makes a key; return its name."""
        output = f"{last.output[0]}_key{len(added)}"
        added.append(helper.make_node(operator, inputs, [output], name=f"{output}_{operator}", **attributes))
        return output

    def _made_by(self, name: str, *operators: str) -> onnx.NodeProto | None:
        """Return the node that makes a value, if it is one of these and nobody else reads the value."""
        node = self._facts.producers.get(name)
        while node is not None and self._facts.only_reader(name) is not None:
            if not self._hands_on(node):
                return node if node.op_type in operators else None
            node = self._facts.producers.get(name := node.input[0])
        return None

    def _reader(self, name: str) -> tuple[onnx.NodeProto | None, str]:
        """Return the only node that reads a value, None if there is another, and the name by which it does."""
        while (node := self._facts.only_reader(name)) is not None and self._hands_on(node):
            name = node.output[0]
        return node, name

    def _hands_on(self, node: onnx.NodeProto) -> bool:
        """Say whether a node returns what it is given, as a dropout that drops nothing does."""
        if node.op_type != "Dropout":
            return node.op_type == "Identity"
        drops_nothing = 0 in map(self._facts.scalar, node.input[1:])
        return drops_nothing and not any(self._facts.readers.get(mask) for mask in node.output[1:])
