"""A training manager whose backward PyTorch computes in part, and which nodes of its graph: where it is quicker.

ONNX Runtime's own gradient of softmax takes two to five times as long as PyTorch's on the CPU, and its products of
matrices take longer where an operand is transposed, as for the gradient of every weight. So these nodes of the backward
become ``ATen`` nodes that call `ortlab.engine.operators.torch_kernels`. The forward stays as it is:
what can be recomputed to save memory is decided by the operators that ONNX Runtime finds there.

Two sums go into the memory of their first operand: that of a gradient with one from outside (``loss`` and ``logits``
are both outputs; usually nothing comes for the logits), and that of a weight's gradient with the one that an embedding
of the same weight has in a few rows. The gradient of softmax goes into the memory of the gradient that it is made of.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

from onnx import TensorProto, helper, numpy_helper

from ortlab.engine.operators.exact_choice import choose_exact
from ortlab.engine.operators.quick_choice import choose_quick
from ortlab.engine.operators.sums_of_products import sum_products
from ortlab.engine.operators.torch_kernels import OutputBuffers, keep_heap
from ortlab.engine.passes.graph_edits import (
    ATEN,
    SIZES,
    GraphFacts,
    aten_operator,
    attributes_of,
    kernel_call,
    needed_nodes,
    put_calls,
)
from ortlab.engine.passes.joined_products import join_products
from ortlab.engine.passes.training_graph import (
    GraphInfo,
    add_in_threads,
    add_one_by_one,
    drop_empty_sums,
    drop_expansions,
    hand_over,
    leave_short_sums,
    mend_layer_gradients,
)
from ortlab.engine.threads import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from ortlab.options.options import Options

# A call into Python takes some 30 microseconds, which a small layer does not save.
SMALLEST_WEIGHT: Final = 2**16
"""Entries of a matrix from which on PyTorch computes the products with it."""
LEAST_WORK: Final = 2**25
"""Multiplications of a product, in the first batch, from which on PyTorch computes it, however small the matrix."""

_MATRIX: Final = 2
_PRODUCTS: Final = frozenset({"Gemm", "MatMul", "FusedMatMul"})
_CHOOSING: Final = frozenset(
    {"Compress", "NonZero", "Unique", "masked_select", "nonzero", "unique_dim", "_unique2"}
)
"""Operators of ONNX and torch whose results are as many as there are entries of a kind."""
_MASKED: Final = frozenset({"DropoutGrad", "Where"})
"""What may stand between a product and the gradient of a softmax; its result has memory of its own as well."""


class TorchBackward:
    """Mixed into ORTModule's training manager: the choice of kernels after the gradient graph is built."""

    options: Options
    _execution_agent: Any
    _graph_info: Any

    def _build_graph(self, config: Any) -> None:
        super()._build_graph(config)  # type: ignore[misc]
        models = self._onnx_models  # type: ignore[attr-defined]
        mend_layer_gradients(models.optimized_model)
        if self._device.type == "cpu":  # type: ignore[attr-defined]
            join_products(models.optimized_model)
            add_one_by_one(models.optimized_model)
            leave_short_sums(models.optimized_model)
            drop_empty_sums(models.optimized_model)
            drop_expansions(models.optimized_model)
            if self.options.aten_backward:
                free_outputs = choose_kernels(models.optimized_model)
                choose_exact(models.optimized_model)
                choose_quick(models.optimized_model)
                sum_products(models.optimized_model)
                self._graph_info = _with_free_outputs(self._graph_info, free_outputs)
            add_in_threads(models.optimized_model)
        info = self._graph_transition_manager._post_export_processed_model_info  # type: ignore[attr-defined]
        hand_over(models.optimized_model, info._post_export_processed_model)
        saved = self._debug_options.save_onnx_models  # type: ignore[attr-defined]
        if saved.save:  # ORTModule has saved the graph as it was
            models.save_optimized_model(saved.path, saved.name_prefix, self._export_mode)  # type: ignore[attr-defined]

    def _create_execution_agent(self) -> None:
        super()._create_execution_agent()  # type: ignore[misc]
        if self.options.cpu_memory_arena and self._device.type == "cpu":  # type: ignore[attr-defined]
            keep_heap()
            self._execution_agent = _BufferedAgent(self._execution_agent)


def _with_free_outputs(info: Any, free_outputs: list[int]) -> GraphInfo:
    """Return ORT's facts about a gradient graph, without the outputs whose missing gradient need not be zeros."""
    # ``_ORTModuleFunction.backward`` makes a tensor of zeros for each output that no gradient comes for, if the graph
    # has to see its shape; for the logits of a language model these are more bytes than for everything else together.
    indices = info.output_grad_indices_require_full_shape
    needed = [index for index in indices if index not in free_outputs]
    return GraphInfo(info, output_grad_indices_require_full_shape=needed)


class _BufferedAgent:
    """A training agent in whose runs PyTorch's kernels keep the memory of their outputs."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._buffers = OutputBuffers()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def run_forward(self, feeds: Any, fetches: Any, state: Any, cache: Any = None) -> None:
        with self._buffers.in_use():
            self._agent.run_forward(feeds, fetches, state, cache)

    def run_backward(self, feeds: Any, fetches: Any, state: Any) -> None:
        with self._buffers.in_use():
            self._agent.run_backward(feeds, fetches, state)


# --- the choice of kernels ----------------------------------------------------------------------------------------


def choose_kernels(model: onnx.ModelProto) -> list[int]:
    """Let PyTorch compute what it computes faster in the backward of a gradient graph, on the CPU."""
    # The graph is changed in place; one without a YieldOp stays as it is. Returns the numbers of the module's outputs
    # for which "no gradient" may be given as a scalar, instead of as zeros in the output's shape.
    choice = _FasterChoice(model)
    choice.make()
    return choice.free_outputs


class _FasterChoice:
    """The choice of the nodes that take the place of others in a graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._facts = GraphFacts(model)
        self._producers: dict[str, onnx.NodeProto] = dict(self._facts.producers)
        self._outputs = {value.name for value in model.graph.output}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        # ORT's Gemm refuses to add up no rows, as those of an expert that no word is sent to.
        self._rows_may_be_none = any(map(_counts_entries, model.graph.node))
        self._work = Work(self._facts, model.graph, SIZES.get())
        self._instead: dict[str, onnx.NodeProto] = {}
        self._yielded: list[str] = []
        self.free_outputs: list[int] = []

    def make(self) -> None:
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
        put_calls(self._model, needed_nodes(nodes, self._outputs))

    def _choose(self, node: onnx.NodeProto) -> None:
        attributes = attributes_of(node)
        if self._facts.element_types.get(node.output[0]) != TensorProto.FLOAT:
            return
        if node.op_type in _PRODUCTS:
            self._product(node, attributes)
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
        elif not transposed[0] and self._is_large(self._facts.shapes.get(b), a, int(transposed[1])):
            producer = self._producers.get(b)
            turned = transposed[1]
            if producer is not None and _turns_a_matrix(producer):
                b, turned = producer.input[0], not turned
            self._call("matmul_transposed" if turned else "matmul", [a, b], node)

    def _product_of_rows(self, node: onnx.NodeProto, a: str, b: str) -> None:
        shape = self._facts.shapes.get(node.output[0])
        if shape is None or not (self._is_large(shape, a, 0) or self._rows_may_be_none):
            return
        rows = [self._before_flattening(name, width) for name, width in zip((a, b), shape, strict=True)]
        reader = self._facts.only_reader(node.output[0])
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
        if producer is not None and producer.op_type == "Where" and self._facts.only_reader(grad) is node:
            # Attention puts 0 in the place of what is not a number; ORT's Where takes one number at a time.
            mask, zero, unmasked = producer.input
            if self._is_zero(zero) and self._facts.shapes.get(unmasked) == self._facts.shapes.get(grad):
                grad, masked = unmasked, [mask]
        producer = self._producers.get(grad)
        owned = self._makes_memory(grad) or (producer is not None and producer.op_type in _MASKED)
        over = owned and self._facts.only_reader(grad) is not None
        self._call(
            "softmax_backward_over" if over else "softmax_backward", [grad, probabilities, *masked], node
        )

    def _sum(self, node: onnx.NodeProto) -> None:
        rotation = self._rotation(*node.input) or self._rotation(*node.input[::-1])
        if rotation:
            self._call("rotary_backward", rotation, node)
            return
        for total, other in (node.input, node.input[::-1]):
            if self._facts.only_reader(total) is not node or self._facts.only_reader(other) is not node:
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

    def _rotation(self, straight: str, turned: str) -> list[str]:
        """Return a gradient, the cosines and the sines where a sum of two values is the gradient of a rotary embedding.

        That is ``x * cos + concat(-x2, x1) * sin`` of the halves of x, in one pass over memory less for each half.
        """
        product, concat = self._maker(straight, "Mul"), self._maker(turned, "Concat")
        second = (
            None if concat is None or len(concat.input) != _MATRIX else self._maker(concat.input[1], "Neg")
        )
        if product is None or concat is None or second is None:
            return []
        split = self._producers.get(concat.input[0])
        halves = [self._facts.shapes.get(name, (None,))[-1] for name in (concat.input[0], second.input[0])]
        if split is None or split.op_type not in {"Split", "SplitTraining"} or None in halves:
            return []
        source = self._maker(split.input[0], "Mul")
        last = {-1, self._facts.ranks.get(turned, 0) - 1}
        axes = {attributes_of(one).get("axis", 0) for one in (split, concat)}
        parts = [second.input[0], concat.input[0]]
        if source is None or list(split.output) != parts or halves[0] != halves[1] or not axes <= last:
            return []
        for grad, cosines in (product.input, product.input[::-1]):
            for other, sines in (source.input, source.input[::-1]):
                same = self._plain(grad) == self._plain(other)
                if same and self._facts.shapes.get(grad, 0) == self._facts.shapes.get(turned, 1):
                    return [grad, cosines, sines]
        return []

    # ---- what it asks -----------------------------------------------------------------------------------------

    def _call(self, kernel: str, inputs: list[str], node: onnx.NodeProto) -> None:
        """Put a call of a kernel in the place of a node."""
        new = kernel_call(kernel, inputs, list(node.output), node)
        self._instead[node.output[0]] = new
        for name in node.output:
            self._producers[name] = new

    def _plain(self, name: str) -> str:
        """Follow a value back through Identities."""
        while (producer := self._producers.get(name)) is not None and producer.op_type == "Identity":
            name = producer.input[0]
        return name

    def _maker(self, name: str, operator: str) -> onnx.NodeProto | None:
        """Return the node behind Identities that makes a value, which nothing else reads, if it is of this kind."""
        producer = self._producers.get(self._source(name))
        alone = self._facts.only_reader(name) is not None
        return producer if alone and producer is not None and producer.op_type == operator else None

    def _width(self, name: str) -> int:
        size = (self._facts.shapes.get(name) or (0,))[-1]
        return size if isinstance(size, int) else 0

    def _is_large(self, shape: tuple[int | str | None, ...] | None, other: str, axis: int) -> bool:
        """Say whether the product of `other` and a matrix is worth the call; the axis is as long as `other` is wide."""
        sizes = [size for size in shape or () if isinstance(size, int)]
        if shape is None or len(sizes) != len(shape) or len(shape) != _MATRIX:
            return False
        rows = self._work.count(other) / max(sizes[axis], 1)
        return prod(sizes) >= SMALLEST_WEIGHT or prod(sizes) * rows >= LEAST_WORK

    def _before_flattening(self, name: str, width: int | str | None) -> str:
        """Return the input of the Reshape that makes a matrix, if its last dimension is `width`; else the matrix."""
        producer = self._producers.get(name)
        if producer is None or producer.op_type != "Reshape" or self._width(producer.input[0]) != width:
            return name
        return str(producer.input[0])

    def _source(self, name: str) -> str:
        """Follow a value back through Identities, as far as nothing else reads it."""
        while (producer := self._producers.get(name)) is not None and producer.op_type == "Identity":
            if self._facts.only_reader(producer.input[0]) is None:
                break
            name = producer.input[0]
        return name

    def _memory(self, name: str) -> tuple[str, ...]:
        """Return what owns the memory of a value that one node reads, and the shape to read it in; else nothing."""
        # The output of a Reshape does not own the memory that it is in: ORT frees that with the Reshape's input.
        if self._makes_memory(name) or self._is_squeezed_sum(name):
            return (name,)
        producer = self._producers.get(name)
        if producer is None or producer.op_type != "Reshape":
            return ()
        data, shape = producer.input
        sizes = self._producers.get(shape)
        if sizes is None or sizes.op_type != "Shape" or self._facts.only_reader(data) is None:
            return ()
        return (data, shape) if self._makes_memory(data) else ()

    def _makes_memory(self, name: str) -> bool:
        producer = self._producers.get(name)
        return producer is not None and (producer.op_type in _PRODUCTS or producer.domain == ATEN)

    def _is_squeezed_sum(self, name: str) -> bool:
        """Say whether a value is a sum without the axes that it is over, and let the sum itself leave them out."""
        squeeze = self._producers.get(name)
        if squeeze is None or squeeze.op_type != "Squeeze":
            return False
        total = self._producers.get(squeeze.input[0])
        if total is None or total.op_type != "ReduceSum" or self._facts.only_reader(total.output[0]) is None:
            return False
        axes = self._numbers(total.input[1:])
        if (
            not axes
            or axes != self._numbers(squeeze.input[1:])
            or not attributes_of(total).get("keepdims", 1)
        ):
            return False
        new = helper.make_node("ReduceSum", list(total.input), [name], name=total.name, keepdims=0)
        self._instead[name] = self._producers[name] = new
        return True

    def _numbers(self, names: Sequence[str]) -> list[int]:
        """Return the integers of a constant that may be named; none where there is none."""
        tensors = [self._constants.get(name) for name in names]
        for index, name in enumerate(names):
            producer = self._producers.get(name)
            if producer is not None and producer.op_type == "Constant":
                tensors[index] = attributes_of(producer).get("value")
        return [int(one) for tensor in tensors if tensor for one in numpy_helper.to_array(tensor).reshape(-1)]

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
            tensor = attributes_of(producer).get("value")
        return tensor is not None and not numpy_helper.to_array(tensor).any()


def _counts_entries(node: onnx.NodeProto) -> bool:
    """Say whether a result of a node has as many rows as there are entries of a kind, which may be none."""
    operator = aten_operator(node).removeprefix("aten::") or node.op_type
    return operator in _CHOOSING or (operator == "where" and len(node.input) == 1)


def _turns_a_matrix(node: onnx.NodeProto) -> bool:
    return node.op_type == "Transpose" and attributes_of(node).get("perm") == [1, 0]
