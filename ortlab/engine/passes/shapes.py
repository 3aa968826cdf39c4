"""Symbolic shape inference that goes on where the one of onnxruntime 1.19.2 stops.

``onnxruntime/tools/symbolic_shape_infer.py`` gives up on a whole model with a bare AssertionError when it cannot
express one shape (``nn.TransformerEncoder``, relative positions, windows of a size that is computed). A shape that is
not known costs an optimisation at most: ONNX Runtime infers shapes again when it loads the graph, and its gradients
compute at run time what was not known. So the shape is left open and the inference goes on.

Besides: shapes in numbers for one batch (`with_sizes`), and a graph that is told none.
"""

from __future__ import annotations

import logging
import math
import re
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from ortlab.engine.operators.aten_executor import Operator
from ortlab.engine.operators.chunked_loss import KERNEL
from ortlab.engine.operators.gradients import call_text
from ortlab.engine.operators.torch_calls import CallableCall, TorchCall, crossing_type, is_elementwise, parsed
from ortlab.engine.passes.graph_edits import aten_operator
from ortlab.engine.patching import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


Results: TypeAlias = "list[tuple[torch.dtype, list[int | str | None]] | None]"
"""Dtype and shape of each result of a call; a size is None if it is not known, a result if it is undefined."""

_PRIMES: Final = (
    (31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97),
    (211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283),
)
"""Two sets of sizes, so that a size which is the same with both is a constant."""


def called(
    node: onnx.NodeProto, operand: Callable[[int, bool], torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    """Return what the call of torch in a node returns; raises what the operator raises that needs values."""
    # `operand` makes the input of a place: a tensor without memory, or one with values where the second argument is
    # False.
    text = call_text(node)
    overload = next((one.s.decode() for one in node.attribute if one.name == "overload_name"), "")
    found = CallableCall.find if text else Operator.find
    call = found(aten_operator(node), text or overload)
    operands = [
        operand(place, call.is_tensor(place, is_input=True)) if name else None
        for place, name in enumerate(node.input)
    ]
    with torch.random.fork_rng([]):  # what draws numbers without a tensor to fill draws them on the CPU
        return call.results(operands) if isinstance(call, CallableCall) else call.execute(operands)


def symbolic_results(
    node: onnx.NodeProto,
    types: Sequence[int],
    shapes: Sequence[Sequence[int | str] | None],
    values: Sequence[np.ndarray[Any, Any] | None],
) -> Results | None:
    """Return dtype and shape of each result of a call of torch; None if torch cannot tell them without more values."""
    # The operands are told by their ONNX element types, their shapes, and their values where these are constants. A
    # size of a result is None if it is neither a constant nor a size of an operand.
    # Each is a size of its own, even "Min(512, length)" beside "length": evaluated, it would be a constant for some.
    texts = sorted({size for shape in shapes for size in shape or () if isinstance(size, str)})
    if len(texts) > len(_PRIMES[0]):
        return None

    def results(sizes: dict[str, int]) -> Sequence[torch.Tensor | None]:
        def operand(place: int, is_tensor: bool) -> torch.Tensor:  # noqa: FBT001 - as `called` calls it
            if not is_tensor:
                return torch.from_numpy(np.array(values[place]))
            shape = shapes[place]
            if shape is None:
                raise ValueError(node.input[place])
            return without_memory(
                [sizes[size] if isinstance(size, str) else size for size in shape], types[place]
            )

        return called(node, operand)

    try:
        one, other = (results(dict(zip(texts, primes, strict=False))) for primes in _PRIMES)
    except Exception:  # noqa: BLE001 - whatever an operator cannot do without values, its sizes stay unknown
        return None
    met = {(small, large): text for text, small, large in zip(texts, *_PRIMES, strict=False)}
    return [
        None
        if a is None or b is None
        else (a.dtype, [m if m == n else met.get((m, n)) for m, n in zip(a.shape, b.shape, strict=True)])
        for a, b in zip(one, other, strict=True)
    ]


def without_memory(shape: Sequence[int], element_type: int) -> torch.Tensor:
    """Return a tensor of this shape and ONNX element type that has no memory."""
    return torch.empty(shape, dtype=_dtypes()[element_type], device="meta")


def onnx_element_type(dtype: torch.dtype) -> int:
    """Return ONNX's number for a dtype."""
    return next(number for number, known in _dtypes().items() if known is dtype)


@cache
def _dtypes() -> dict[int, torch.dtype]:
    numbers: dict[int, torch.dtype] = {TensorProto.BFLOAT16: torch.bfloat16}
    for name in ("FLOAT", "DOUBLE", "FLOAT16", "INT64", "INT32", "INT16", "INT8", "UINT8", "BOOL"):
        number = TensorProto.DataType.Value(name)
        numbers[number] = torch.from_numpy(np.empty(0, helper.tensor_dtype_to_np_dtype(number))).dtype
    return numbers


_log = logging.getLogger(__name__)

_CUT: Final = re.compile(r"Min\((?P<limit>\d+), (?P<size>\w+)\)")
"""A dimension that a slice has cut to that of an input, as sympy writes it."""

_BROADCASTING: Final = frozenset({"Add", "Sub", "Mul", "Div"})


_RESIZING: Final = (
    *(f"upsample_nearest{rank}d" for rank in (1, 2, 3)),
    *("upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d"),
)

# ATen operators of `ortlab.engine.operators.symbolics` whose first output has the shape of their first input.
_SAME_SHAPE: Final = ("softplus", "native_batch_norm", "ortlab::instance_norm")


def install() -> None:
    """Let ORTModule use the inference of this module, also where it would use none. Again, it changes nothing."""
    from onnxruntime.training.ortmodule import _graph_transition_manager as transitions

    replace(transitions.GraphTransitionManager, "_post_export_process", _infer_and_forget)
    if transitions.SymbolicShapeInference.__module__ != __name__:
        transitions.SymbolicShapeInference = _tolerant(transitions.SymbolicShapeInference)


def _tolerant(base: Any) -> Any:  # noqa: C901 - one class, of small methods
    """Derive the class from ORT's, which is importable only once ORT is."""
    from onnxruntime.tools.symbolic_shape_infer import is_literal

    class TolerantShapeInference(base):  # type: ignore[misc] # base is Any: onnxruntime has no stubs
        """ORT's symbolic shape inference, with each operator's failure kept to that operator."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.complete_open = False
            self.dispatcher_["Flatten"] = partial(_infer_flattened, self)
            for name in _SAME_SHAPE:
                self.aten_op_dispatcher_[name] = partial(_infer_same_shape, self)
            for name in _RESIZING:
                self.aten_op_dispatcher_[name] = partial(_infer_resized, self)
            self.aten_op_dispatcher_["ortlab::grouped_linear"] = partial(_infer_grouped_linear, self)
            self.aten_op_dispatcher_["ortlab::cross_entropy"] = partial(_infer_cross_entropy, self)
            self.aten_op_dispatcher_[f"ortlab::{KERNEL}"] = partial(_infer_chunked_cross_entropy, self)
            for kind in ("lstm", "gru", "rnn"):
                self.aten_op_dispatcher_[f"ortlab::{kind}_layer"] = partial(_infer_recurrent, self)
            for table in (self.dispatcher_, self.aten_op_dispatcher_):
                for operator, infer in table.items():
                    table[operator] = partial(_infer_or_leave_open, self, infer)

        def _check_merged_dims(self, dims: Any, allow_broadcast: bool = True) -> None:  # noqa: FBT001, FBT002 - ORT's
            try:
                super()._check_merged_dims(dims, allow_broadcast)
            except AssertionError:
                _log.debug("These dimensions may differ: %s", dims)

        def _add_suggested_merge(self, symbols: Any, apply: bool = False) -> None:  # noqa: FBT001, FBT002 - ORT's
            """Take two dimensions that meet for equal only if both are dimensions of inputs."""
            # ORT's own does it for any two ("auto merge has the risk of incorrectly merge symbols while one of them
            # being 1", it says). ``x * adaptive_avg_pool2d(x, 1)`` then gets wrong gradients, and reads beyond its
            # buffers. Of two dimensions, this method keeps the one that comes first among the inputs; ORT's own leaves
            # that to the order of a set of strings, and so to the process.
            if not all(is_literal(one) or str(one) in self.input_symbols_ for one in symbols):
                return
            met = {self.suggested_merge_.get(one, one) for one in symbols}
            if any(is_literal(one) for one in met):
                super()._add_suggested_merge(symbols, apply)
                return
            order = [
                size.dim_param for one in self.out_mp_.graph.input for size in one.type.tensor_type.shape.dim
            ]
            kept = min(met, key=order.index)
            met.discard(kept)
            self.suggested_merge_ |= dict.fromkeys(met, kept)
            self.suggested_merge_ |= {
                key: kept for key, value in self.suggested_merge_.items() if value in met
            }
            if apply and self.auto_merge_:
                self._apply_suggested_merge()

        def _broadcast_shapes(self, shape1: Any, shape2: Any) -> Any:
            return super()._broadcast_shapes(_uncut(shape1, shape2), _uncut(shape2, shape1))

        @staticmethod
        def infer_shapes(in_mp: onnx.ModelProto, **kwargs: Any) -> onnx.ModelProto:
            """Infer what can be inferred; ORT's own writes a file to the working directory and raises."""
            return _infer_shapes(
                TolerantShapeInference(**({"int_max": 2**31 - 1, "verbose": 0} | kwargs)), in_mp
            )

    return TolerantShapeInference


def _infer_shapes(inference: Any, model: onnx.ModelProto) -> onnx.ModelProto:
    inference._preprocess(model)
    table = inference.aten_op_dispatcher_
    for operator in set(map(aten_operator, model.graph.node)) - {""}:
        table[operator] = partial(_infer_call, inference, table.get(operator))
    for inference.complete_open in (False, True):
        inference.run_, finished, merged = True, False, None
        inference.auto_merge_ &= not inference.complete_open
        try:
            # What was inferred before two dimensions were taken for equal still has both: infer it again.
            while inference.suggested_merge_ != merged:
                merged = dict(inference.suggested_merge_)
                finished = inference._infer_impl()
        except Exception as error:  # noqa: BLE001 - asserts, sympy's errors, None for a shape: all mean "not known"
            _log.debug("Symbolic shape inference stopped early: %r", error)
        if finished:
            break
    inference._update_output_from_vi()
    inferred: onnx.ModelProto = inference.out_mp_
    known = [value for value in inferred.graph.value_info if value.type.tensor_type.elem_type]
    named = {value.name for value in known}
    # ORT can find every other type itself, but that of an ATen node it has to be told.
    known += [value for value in model.graph.value_info if value.name not in named]
    kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in known]
    del inferred.graph.value_info[:]
    inferred.graph.value_info.extend(kept)
    return inferred


def _infer_or_leave_open(inference: Any, infer: Callable[[Any], None], node: onnx.NodeProto) -> None:
    try:
        infer(node)
        if inference.complete_open:
            for index, name in enumerate(node.output):
                if name:
                    _name_open_dimensions(inference, node, index)
    except Exception as error:  # noqa: BLE001 - as above
        _log.debug("The shape of %s (%s) is left open: %r", node.name, node.op_type, error)
        for index, name in enumerate(node.output):
            if not name:
                continue
            tensor = inference.known_vi_[name].type.tensor_type
            if not tensor.elem_type:
                tensor.elem_type = _element_type(inference, node.input[0])
            _name_open_dimensions(inference, node, index)


def _name_open_dimensions(inference: Any, node: onnx.NodeProto, index: int) -> None:
    """Give each dimension that is not known a symbol of its own; ORT's inference stops at one without."""
    tensor = inference.known_vi_[node.output[index]].type.tensor_type
    for axis, size in enumerate(tensor.shape.dim if tensor.HasField("shape") else ()):
        if not size.HasField("dim_value") and (not size.dim_param or size.dim_param.startswith("unk__")):
            met = _met_uncut(inference, node, len(tensor.shape.dim) - axis)
            size.dim_param = met or str(inference._new_symbolic_dim_from_output(node, index, axis))


def _met_uncut(inference: Any, node: onnx.NodeProto, place: int) -> str:
    """Return the dimension that both operands of an addition or the like have at a place; "" if there is none."""
    # `place` counts from the end, from 1.
    if node.op_type not in _BROADCASTING or node.domain:
        return ""
    left, right = (inference._try_get_shape(node, operand) for operand in range(2))
    if left is None or right is None:
        return ""
    sizes = {str(one[-place]) for one in (_uncut(left, right), _uncut(right, left)) if len(one) >= place} - {
        "1"
    }
    return sizes.pop() if len(sizes) == 1 else ""


def _uncut(shape: Sequence[Any], beside: Sequence[Any]) -> list[Any]:
    """Replace each dimension of `shape` that is cut to the dimension of `beside` that it meets by the latter."""
    # A buffer of 512 positions, cut to the length of a batch, has "Min(512, length)" of them beside "length": where the
    # two meet they are equal, or the batch is too long for the model.
    sizes = list(shape)
    for place in range(1, min(len(shape), len(beside)) + 1):
        cut = _CUT.fullmatch(str(shape[-place]))
        if cut and cut["size"] == str(beside[-place]) and int(cut["limit"]) > 1:
            sizes[-place] = beside[-place]
    return sizes


def _infer_call(inference: Any, infer: Callable[[Any], None] | None, node: onnx.NodeProto) -> None:
    """Give the results of a call of torch the types and shapes that torch tells for its operands."""
    # Where torch cannot tell without values it is left to `infer`; the dimensions of a `TorchCall` get names then.
    places = range(len(node.input))
    named = [bool(name) for name in node.input]
    results = symbolic_results(
        node,
        [_element_type(inference, name) if name in inference.known_vi_ else 0 for name in node.input],
        [inference._try_get_shape(node, place) if named[place] else None for place in places],
        [inference._try_get_value(node, place) if named[place] else None for place in places],
    )
    text = call_text(node)
    is_boolean = results is not None and any(one is not None and one[0] is torch.bool for one in results)
    if not text and (results is None or is_boolean):
        (infer or partial(_guess_rank, inference))(node)
        return
    if results is None:
        results = _untold(inference, node, parsed(text))
    for index, (name, result) in enumerate(zip(node.output, results, strict=False)):
        if result is None or not name:
            continue
        dtype, sizes = result
        shape = [
            str(inference._new_symbolic_dim_from_output(node, index, axis)) if size is None else size
            for axis, size in enumerate(sizes)
        ]
        value = helper.make_tensor_value_info(name, onnx_element_type(dtype), shape)
        inference.known_vi_[name].CopyFrom(value)


def _guess_rank(inference: Any, node: onnx.NodeProto) -> None:
    """Give each result the type and the rank of the first operand, as ORT does for what it does not know."""
    rank, element_type = inference._get_shape_rank(node, 0), _element_type(inference, node.input[0])
    for index, name in enumerate(node.output):
        if name:
            shape = inference._new_symbolic_shape(rank, node, index)
            value = helper.make_tensor_value_info(name, element_type, [str(size) for size in shape])
            inference.known_vi_[name].CopyFrom(value)


def _untold(inference: Any, node: onnx.NodeProto, call: TorchCall) -> Results:
    """Return the dtypes of a call's results, and the shape of its operand if it works on each element."""
    same = inference._get_shape(node, 0) if is_elementwise(aten_operator(node), call) else []
    types = [crossing_type(*result) for result in call.results]
    types += [("uint8", 1)] * (len(node.output) - len(types))  # the state of the generator
    return [
        (getattr(torch, dtype), same if same and len(same) == rank else [None] * rank)
        for dtype, rank in types
    ]


def _infer_recurrent(inference: Any, node: onnx.NodeProto) -> None:
    """Give the outputs of a layer of `ortlab.engine.operators.recurrent` their shapes."""
    # They are the states of the sequence, the last one, an LSTM's last cell, and what the backward reads: a GRU's four
    # gates, or the bytes of oneDNN's workspace, of which only oneDNN knows how many there are.
    length, batch, _ = inference._get_shape(node, 0)
    hidden = inference._get_shape(node, 2)[1]
    shapes: list[list[Any]] = [[length, batch, hidden], *[[batch, hidden]] * (len(node.output) - 1)]
    types = [onnx.TensorProto.FLOAT] * len(node.output)
    if "lstm" in aten_operator(node):
        shapes[-1] = [str(inference._new_symbolic_dim_from_output(node, len(node.output) - 1, 0))]
        types[-1] = onnx.TensorProto.UINT8
    elif "gru" in aten_operator(node):
        shapes[-1] = [length, batch, 4 * hidden]
    for name, shape, element_type in zip(node.output, shapes, types, strict=True):
        inference.known_vi_[name].CopyFrom(helper.make_tensor_value_info(name, element_type, shape))


def _infer_same_shape(inference: Any, node: onnx.NodeProto) -> None:
    """Give the first output the shape of the first input; further outputs are statistics, a vector each."""
    inference._propagate_shape_and_type(node)
    for index, name in enumerate(node.output[1:], start=1):
        length = str(inference._new_symbolic_dim_from_output(node, index, 0))
        vector = helper.make_tensor_value_info(name, _element_type(inference, node.input[0]), [length])
        inference.known_vi_[name].CopyFrom(vector)


def _infer_flattened(inference: Any, node: onnx.NodeProto) -> None:
    """Give a matrix its sizes, also where one is a product of sizes of the batch, which ORT's own leaves open."""
    from onnxruntime.tools.symbolic_shape_infer import get_shape_from_sympy_shape

    before = inference._get_sympy_shape(node, 0)
    axis = next((one.i for one in node.attribute if one.name == "axis"), 1)
    axis = axis + len(before) if axis < 0 else axis
    sizes = [math.prod(before[:axis]), math.prod(before[axis:])]
    inference._update_computed_dims(sizes)
    shape = get_shape_from_sympy_shape(sizes)
    value = helper.make_tensor_value_info(node.output[0], _element_type(inference, node.input[0]), shape)
    inference.known_vi_[node.output[0]].CopyFrom(value)


def _infer_resized(inference: Any, node: onnx.NodeProto) -> None:
    """Give images their new size; ORT's own fails at one that follows from a batch, and stops at a later node."""
    from onnxruntime.tools.symbolic_shape_infer import is_literal

    before, size = inference._get_shape(node, 0), inference._try_get_value(node, 1)
    if size is None or len(size) != len(before) - 2:
        size = [str(inference._new_symbolic_dim_from_output(node, 0, axis)) for axis in range(2, len(before))]
    inference._update_computed_dims(size)
    shape = [int(one) if is_literal(one) else str(one) for one in (*before[:2], *size)]
    value = helper.make_tensor_value_info(node.output[0], _element_type(inference, node.input[0]), shape)
    inference.known_vi_[node.output[0]].CopyFrom(value)


def _infer_grouped_linear(inference: Any, node: onnx.NodeProto) -> None:
    """Give each row as many entries as a matrix has rows; how many of them belong to each matrix, values tell."""
    shape = [inference._get_shape(node, 0)[0], inference._get_shape(node, 1)[1]]
    value = helper.make_tensor_value_info(node.output[0], _element_type(inference, node.input[0]), shape)
    inference.known_vi_[node.output[0]].CopyFrom(value)


def _infer_cross_entropy(inference: Any, node: onnx.NodeProto) -> None:
    """Give the loss its shape - a scalar, or one per row -, then the log probabilities and the sum of the weights."""
    element_type = _element_type(inference, node.input[0])
    logits = inference._get_shape(node, 0)
    reduction = inference._get_value(node, 3)
    shapes: tuple[list[Any], ...] = ([] if reduction else logits[:1], logits, [])
    for name, shape in zip(node.output, shapes, strict=False):
        inference.known_vi_[name].CopyFrom(helper.make_tensor_value_info(name, element_type, shape))


def _infer_chunked_cross_entropy(inference: Any, node: onnx.NodeProto) -> None:
    """Give the loss no dimension, and each gradient the shape of what it is of, or none of its elements."""
    hidden = _element_type(inference, node.input[0])
    wanted = [int(one) for one in inference._get_value(node, 5)][-3:]
    facts: list[tuple[int, Any]] = [(onnx.TensorProto.FLOAT, [])]
    for place, is_wanted in enumerate(wanted):
        kind = _element_type(inference, node.input[place]) if node.input[place] else hidden
        facts.append((kind, inference._get_shape(node, place) if is_wanted else [0]))
    for name, (element_type, shape) in zip(node.output, facts, strict=True):
        inference.known_vi_[name].CopyFrom(helper.make_tensor_value_info(name, element_type, shape))


def _element_type(inference: Any, name: str) -> int:
    return int(inference.known_vi_[name].type.tensor_type.elem_type)


# --- shapes in numbers, and none ----------------------------------------------------------------------------------


def with_sizes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    """Copy an exported model with numbers in its shapes where `sizes`, the values of its symbols, determine them."""
    # So a graph can be built for one batch shape. 1.19.2 hands the sizes to its graph builder, which counts no inputs
    # and refuses them: ORTModule lists the inputs among the initializers
    # (``_graph_execution_manager._initialize_graph_builder``), and the builder (``ortmodule_graph_builder.cc``,
    # ``SetConcreteInputShapes``) expects one shape for each input that is not there.
    import sympy

    fixed = type(model)()
    fixed.CopyFrom(model)
    known: dict[str, int | None] = dict(sizes)
    symbols = {name: sympy.Symbol(name, integer=True) for name in sizes}
    values = {symbols[name]: value for name, value in sizes.items()}

    def evaluated(text: str) -> int | None:
        if text not in known:
            try:
                number = sympy.sympify(text, locals=symbols).subs(values)
            except (sympy.SympifyError, TypeError, ValueError):
                number = None
            known[text] = int(number) if number is not None and number.is_Integer else None
        return known[text]

    for value in (*fixed.graph.input, *fixed.graph.value_info, *fixed.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                number = evaluated(dimension.dim_param)
                if number is not None:
                    dimension.dim_value = number
    return fixed


def _infer_and_forget(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._post_export_process``, so that its switch decides only what ORT is told."""
    # Where ``symbolic_shape_inference`` is off, 1.19.2 skips its inference, and with it all that ortlab does to an
    # export at that place: the graph passes that give Dropout its mode and mask and Where its right gradient, the stops
    # of gradients, and the types of ATen nodes, which ONNX Runtime has to be told. So shapes are inferred whatever the
    # switch says, and taken out again at the end.

    def post_export_process(*args: Any, run_symbolic_shape_infer: bool, **kwargs: Any) -> Any:
        info = original(*args, run_symbolic_shape_infer=True, **kwargs)
        if not run_symbolic_shape_infer:
            forget_shapes(info._post_export_processed_model)
        return info

    return post_export_process


def forget_shapes(model: onnx.ModelProto) -> None:
    """Drop the shapes of all values between the inputs and the outputs; their types stay."""
    for value in model.graph.value_info:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
