"""Convolutions, normalisations, pooling for onnxruntime 1.19.2: where its gradients are wrong, torch's own operators.

Most of these are faults that nobody is told of: the build succeeds, the loss is right, and gradients or running
statistics are not. All of them concern training alone; a graph for inference is exported as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Final

import torch
from torch.onnx import TensorProtoDataType

from ortlab.engine.exporter import symbolic_module
from ortlab.engine.operators.symbolic_words import (
    LeftToTorch,
    aten,
    boolean,
    constant,
    filled,
    int64,
    is_none,
    is_training_export,
    none,
    onnx_type,
    rank,
    sizes_between,
)
from ortlab.errors import BuildError

Symbolic = Callable[..., Any]
"""A symbolic function: takes the graph and the operator's arguments, returns the value it emits."""

_GELU: Final = 20
"""The opset in which ONNX got an operator for it."""

_MATRIX: Final = 2  # dimensions
_MASK: Final = 3  # position among the arguments of aten::scaled_dot_product_attention
_TRANSPOSED: Final = 3  # positions in the arguments of aten::_convolution after input, weight and bias
_GROUPS: Final = 5
_SHAPE_ARGUMENTS: Final = 6
_SCALE: Final = 5  # positions in the arguments of aten::scaled_dot_product_attention after the query
_SHARED: Final = 6


def convolution(onnx_convolution: Symbolic) -> Symbolic:
    """Return the symbolic function of ``aten::_convolution``: ONNX's Conv where its gradient is right, else torch's."""
    # On the CPU, ConvGrad of 1.19.2 with more than one group writes outside its buffers
    # (``orttraining/training_ops/cpu/nn/conv_grad.cc``): gradients of *neighbouring* layers come out wrong, and larger
    # models abort in the allocator. ConvTransposeGrad has no CPU kernel at all.

    def symbolic(g: Any, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
        transposed, groups = constant(args[_TRANSPOSED], "i"), constant(args[_GROUPS], "i")
        if not transposed and groups == 1:
            return onnx_convolution(g, x, weight, bias, *args)
        if is_none(bias):  # the gradient is the same for both kinds of layers then
            channels = sizes_between(g, weight, 1, 2) if transposed else sizes_between(g, weight, 0, 1)
            if transposed and groups > 1:
                channels = g.op("Mul", channels, int64(g, [groups]))
            bias = filled(g, channels, 0, like=weight)
        return aten(g, "convolution", x, weight, bias, *args[:_SHAPE_ARGUMENTS])

    return symbolic


def convolution_mode(convolution: Symbolic) -> Symbolic:
    """Return the symbolic function of ``aten::_convolution_mode``: padding "same" or "valid", written in numbers."""
    # Torch exports "same" as Conv with ``auto_pad``. ConvGrad of 1.19.2 ignores that attribute and reads beyond the
    # input: gradients of 1e19 were seen. An odd total is padded at the end, as torch does.

    def symbolic(g: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, *args: Any) -> Any:
        dilation, groups = args
        kernel = symbolic_module("symbolic_helper")._get_tensor_sizes(weight)
        if kernel is None or None in kernel[2:]:
            raise BuildError(
                "The padding of a convolution cannot be exported.",
                why=f'It is "{constant(padding, "s")}", and the size of the kernel is computed in the model.',
                fix="Give the padding in numbers.",
            )
        axes = len(kernel) - 2
        totals = [0] * axes
        if constant(padding, "s") == "same":
            steps = constant(dilation, "is")
            steps = steps * axes if len(steps) == 1 else steps
            totals = [step * (size - 1) for step, size in zip(steps, kernel[2:], strict=True)]
        if any(total % 2 for total in totals):
            at_the_end = [0] * (axes + 4) + [total % 2 for total in totals]
            x = g.op("Pad", x, int64(g, at_the_end), mode_s="constant")
        false, zeros = boolean(g, value=False), int64(g, [0] * axes)
        halves = int64(g, [total // 2 for total in totals])
        flags = (false, false, false, false)  # benchmark, deterministic, cudnn_enabled, allow_tf32
        return convolution(g, x, weight, bias, stride, halves, dilation, false, zeros, groups, *flags)

    return symbolic


def batch_norm(g: Any, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """Leave ``aten::batch_norm`` to torch."""
    # In 1.19.2, a layer that trains gets the biased variance in ``running_var`` where torch has the unbiased one, and a
    # layer in eval mode inside a model that trains normalises with the statistics of the batch and overwrites its own
    # (BatchNormInternal, ``orttraining/training_ops/cpu/nn/batch_norm_internal.cc``).
    running_mean, running_var, training, momentum, eps, _ = args
    if is_none(weight):
        weight, bias = _neutral(g, x)
    return _native_batch_norm(g, x, weight, bias, running_mean, running_var, training, momentum, eps)


def instance_norm(g: Any, x: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """Emit ``aten::instance_norm``: in a graph with a gradient as a call of PyTorch's kernels."""
    # ONNX Runtime 1.19.2 has no gradient for ONNX's InstanceNormalization, and torch's own form needs the numbers of
    # channels and samples where the layer has no weight or keeps running statistics.
    running_mean, running_var, of_input, momentum, eps, _ = args
    keeps, of_input = not is_none(running_mean), bool(constant(of_input, "i"))
    if is_none(weight):
        weight, bias = _neutral(g, x)
    if keeps and not of_input:  # as in eval(): normalised like a batch
        if is_training_export():
            arguments = (running_mean, running_var, boolean(g, value=False), momentum, eps)
            return _native_batch_norm(g, x, weight, bias, *arguments)
        epsilon = {"epsilon_f": constant(eps, "f")}
        return g.op("BatchNormalization", x, weight, bias, running_mean, running_var, **epsilon).setType(
            x.type()
        )
    if not keeps and not is_training_export():
        return g.op("InstanceNormalization", x, weight, bias, epsilon_f=constant(eps, "f")).setType(x.type())
    given = (x, weight, bias, running_mean, running_var, momentum, eps)
    return aten(g, "ortlab::instance_norm", *given, outputs=3)[0].setType(x.type())


def embedding(aten_embedding: Symbolic) -> Symbolic:
    """Return the symbolic function of ``F.embedding``: its gradient is dense, as a graph has no sparse tensors."""

    def symbolic(g: Any, weight: Any, indices: Any, padding: Any, scaled: Any, sparse: Any) -> Any:
        if constant(sparse, "i"):
            sparse = boolean(g, value=False)
        return aten_embedding(g, weight, indices, padding, scaled, sparse)

    return symbolic


def group_norm(aten_group_norm: Symbolic) -> Symbolic:
    """Return the symbolic function of ``aten::group_norm``: as ORT exports it, also for no weights and no rows."""
    # ``_custom_op_symbolic_registry.group_norm`` leaves a layer without weights to torch, which emits
    # InstanceNormalization. It divides by the number of rows to get that of places: of no rows, as an expert may have,
    # that ends the process.

    def symbolic(g: Any, x: Any, groups: Any, weight: Any, bias: Any, eps: Any, *args: Any) -> Any:
        if is_none(weight):
            weight, bias = _neutral(g, x)
        dimensions = x.type().dim()
        if dimensions is None:
            return aten_group_norm(g, x, groups, weight, bias, eps, *args)
        shape = g.op("Shape", x)
        rows, channels, *sides = (
            g.op("Gather", shape, int64(g, axis), axis_i=0) for axis in range(dimensions)
        )
        places = reduce(partial(g.op, "Mul"), sides) if sides else int64(g, 1)
        given = (x, weight, bias, rows, channels, places, groups, g.op("Cast", eps, to_i=1))
        return aten(g, "native_group_norm", *given, outputs=3)[0].setType(x.type())

    return symbolic


def layer_norm(onnx_layer_norm: Symbolic) -> Symbolic:
    """Return the symbolic function of ``F.layer_norm``: ORT's operator, with the weight and the bias that it needs."""
    # Without a bias, LayerNormalizationGrad of 1.19.2 ends the process; without a weight its graph is invalid.

    def symbolic(g: Any, x: Any, normalized_shape: Any, weight: Any, bias: Any, *args: Any) -> Any:
        sizes = int64(g, constant(normalized_shape, "is"))
        weight = filled(g, sizes, 1, like=x) if is_none(weight) else weight
        bias = filled(g, sizes, 0, like=x) if is_none(bias) else bias
        return onnx_layer_norm(g, x, normalized_shape, weight, bias, *args)

    return symbolic


def rms_norm(g: Any, x: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """Emit ``F.rms_norm`` over the last axis in the form that becomes one operator (`rms_norms.join_rms_norms`)."""
    if len(constant(normalized_shape, "is")) > 1 or x.type().scalarType() != "Float":
        raise LeftToTorch("ONNX Runtime's operator is of one axis and float32")
    epsilon = torch.finfo(torch.float32).eps if is_none(eps) else constant(eps, "f")
    mean = g.op("ReduceMean", g.op("Mul", x, x), axes_i=[-1], keepdims_i=1)
    root = g.op("Sqrt", g.op("Add", mean, g.op("Constant", value_t=torch.tensor(epsilon))))
    scaled = g.op("Div", x, root)
    return (scaled if is_none(weight) else g.op("Mul", scaled, weight)).setType(x.type())


def gelu(g: Any, x: Any, approximate: Any) -> Any:
    """Emit ``F.gelu`` as ORT's operator where one trains it, else as torch does."""
    # ORT's fusions do not know the ten operators as which torch exports the approximation with a tanh (FastGeluFusion),
    # nor an exact Gelu whose result the model returns (GeluFusion): its gradient then takes six times as long.
    rough = constant(approximate, "s") == "tanh"
    if x.type().scalarType() == "Float" and is_training_export():
        return g.op(f"com.microsoft::{'FastGelu' if rough else 'Gelu'}", x).setType(x.type())
    opset = symbolic_module("symbolic_helper").GLOBALS.export_onnx_opset_version
    return symbolic_module(f"symbolic_opset{_GELU if opset >= _GELU else 9}").gelu(g, x, approximate)


def grouped_linear(g: Any, x: Any, experts: Any, offsets: Any = None, *rest: Any) -> Any:
    """Emit ``F.grouped_mm`` of rows with transposed matrices, as a mixture of experts calls it, as one kernel."""
    # As a call of torch's operator it needs the matrices of all experts turned in memory, and their gradients turned
    # back, in each step. In PyTorch a transpose is a view.
    turned = experts.node()
    device = g.original_node.inputsAt(0).type().device()
    fits = (
        turned.kind() == "onnx::Transpose"
        and getattr(turned, "is")("perm") == [0, 2, 1]
        and rank(x) == _MATRIX
        and not is_none(offsets)
        and all(map(is_none, rest))
        and x.type().scalarType() == "Float"
        and str(device) == "cpu"
    )
    if not fits:
        raise LeftToTorch("ONNX has no product of groups")
    product = aten(g, "ortlab::grouped_linear", x, turned.inputsAt(0), offsets)
    return product.setType(g.original_node.output().type().with_sizes([None] * _MATRIX))


def broadcast_tensors(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``torch.broadcast_tensors``, which copies no tensors of one shape."""
    # The losses of torch.nn.functional call it first, nearly always with two of one shape. Where a size is 1, it may be
    # another one in a later batch.

    def symbolic(g: Any, tensors: Any) -> Any:
        listed = [one.type().sizes() for one in next(g.original_node.inputs()).node().inputs()]
        alike = (
            bool(listed)
            and None not in listed
            and all(sizes == listed[0] and 1 not in sizes for sizes in listed)
        )
        return tensors if alike else plain(g, tensors)

    return symbolic


def attention(plain: Symbolic) -> Symbolic:
    """Return the symbolic function of ``F.scaled_dot_product_attention``: torch's own, with what that cannot use."""
    # That of torch 2.4 (``symbolic_opset14``) reads a constant scale as a Python number and fails to use it; here the
    # scale is a value of the graph. None knows heads that share keys and values (``enable_gqa``); here they are
    # repeated. Where a mask lets a position see nothing, torch's makes 0 of what is not a number in the probabilities:
    # a pass over them forward and one backward, a copy of them that is kept, and gradients that are not numbers.

    def symbolic(g: Any, query: Any, key: Any, value: Any, *args: Any) -> Any:
        arguments = [query, key, value, *args]
        mask: Any = arguments[_MASK] if len(arguments) > _MASK else None
        sees = None
        if not is_none(mask) and mask.type().scalarType() == "Bool":
            arguments[_MASK], sees = _masking(g, mask, query)
        if len(arguments) > _SCALE + 1 and not is_none(scale := arguments[_SCALE + 1]):
            arguments[_SCALE + 1] = g.op("Cast", scale, to_i=onnx_type(query))
        shared = arguments[_SHARED + 1 :]
        if shared and not is_none(shared[0]) and constant(shared[0], "i"):
            arguments[1:3] = [for_each_head(g, one, query) for one in (key, value)]
        attended = plain(g, *arguments[: _SHARED + 1])
        return attended if sees is None else g.op("Mul", attended, sees)

    return symbolic


def _masking(g: Any, mask: Any, query: Any) -> tuple[Any, Any]:
    """Emit what a boolean mask adds to scores, and 1 for each position that sees something, 0 for the others.

    What is added is finite, so that probabilities are numbers where a position sees nothing; its result is made 0.
    """
    # Scores are lost in half of the lowest number, and the sum stays above the lowest. Memory plans recompute the
    # probabilities from the mask as long as nothing but a Where stands in between. The maximum is one of float32, since
    # neither the CPU nor a GPU has a kernel for it in bfloat16.
    sees = g.op("ReduceMax", g.op("Cast", mask, to_i=TensorProtoDataType.FLOAT), axes_i=[-1], keepdims_i=1)
    if (kind := onnx_type(query)) != TensorProtoDataType.FLOAT:
        sees = g.op("Cast", sees, to_i=kind)
    dtype = {"Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16}.get(
        query.type().scalarType(), torch.float32
    )
    lowest = torch.finfo(dtype).min / 2
    zero, never = (g.op("Constant", value_t=torch.tensor(one, dtype=dtype)) for one in (0.0, lowest))
    return g.op("Where", mask, zero, never).setType(mask.type().with_dtype(dtype)), sees


def for_each_head(g: Any, shared: Any, query: Any) -> Any:
    """Emit keys or values, shape (batch, heads, length, width), repeated for the heads of the query that share each."""
    heads = sizes_between(g, query, 1, 2)
    times = g.op("Div", heads, sizes_between(g, shared, 1, 2))
    one = int64(g, [1])
    times = g.op("Concat", one, one, times, one, one, axis_i=0)
    repeated = g.op("Expand", g.op("Unsqueeze", shared, int64(g, [2])), times)
    shape = g.op("Concat", int64(g, [0]), heads, int64(g, [-1]), sizes_between(g, shared, 3, 4), axis_i=0)
    return g.op("Reshape", repeated, shape).setType(shared.type().with_sizes([None] * 4))


def _neutral(g: Any, x: Any) -> tuple[Any, Any]:
    """Emit the weight and the bias of a normalisation that has none: a one and a zero per channel."""
    channels = sizes_between(g, x, 1, 2)
    return filled(g, channels, 1, like=x), filled(g, channels, 0, like=x)


def _native_batch_norm(g: Any, x: Any, *args: Any) -> Any:
    output = aten(g, "native_batch_norm", x, *args, outputs=3)[0]
    output.setType(x.type())
    return output


# --- pooling ------------------------------------------------------------------------------------------------------
# On the CPU, MaxPoolGrad of 1.19.2 (``orttraining/training_ops/cpu/nn/pool_gradient_op.cc``) ends the process for one
# and three dimensions, and AveragePoolGrad returns a gradient of another shape than the input. ORTModule leaves the
# two-dimensional ones to torch (``_custom_op_symbolic_registry.max_pool2d`` ...); here the others follow, those of one
# dimension as two-dimensional ones along an axis of size one.


def max_pool1d(
    g: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any
) -> Any:
    """Emit ``F.max_pool1d``."""
    windows = (*_windows(g, kernel_size, stride, padding), int64(g, [1, *constant(dilation, "is")]))
    wide = _insert_axis(g, x)
    return _remove_axis(g, aten(g, "max_pool2d_with_indices", wide, *windows, ceil_mode, outputs=2)[0])


def max_pool3d(g: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, *args: Any) -> Any:
    """Leave ``F.max_pool3d`` to torch."""
    stride = stride if constant(stride, "is") else kernel_size
    return aten(g, "max_pool3d_with_indices", x, kernel_size, stride, padding, *args, outputs=2)[0]


def avg_pool1d(g: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, *args: Any) -> Any:
    """Emit ``F.avg_pool1d``."""
    windows = _windows(g, kernel_size, stride, padding)
    return _remove_axis(g, aten(g, "avg_pool2d", _insert_axis(g, x), *windows, *args, none(g)))


def avg_pool3d(g: Any, x: Any, kernel_size: Any, stride: Any, *args: Any) -> Any:
    """Leave ``F.avg_pool3d`` to torch."""
    stride = stride if constant(stride, "is") else kernel_size
    return aten(g, "avg_pool3d", x, kernel_size, stride, *args)


def adaptive_avg_pool1d(g: Any, x: Any, output_size: Any) -> Any:
    """Emit ``F.adaptive_avg_pool1d``."""
    size = int64(g, [1, *constant(output_size, "is")])
    return _remove_axis(g, aten(g, "_adaptive_avg_pool2d", _insert_axis(g, x), size))


def adaptive_avg_pool3d(g: Any, x: Any, output_size: Any) -> Any:
    """Leave ``F.adaptive_avg_pool3d`` to torch."""
    return aten(g, "_adaptive_avg_pool3d", x, output_size)


def _windows(g: Any, kernel_size: Any, stride: Any, padding: Any) -> tuple[Any, Any, Any]:
    """Emit kernel size, stride and padding of two axes, of which a one-dimensional pooling lacks the first."""
    kernel = constant(kernel_size, "is")
    steps = constant(stride, "is") or kernel
    return int64(g, [1, *kernel]), int64(g, [1, *steps]), int64(g, [0, *constant(padding, "is")])


def _insert_axis(g: Any, x: Any) -> Any:
    """Emit (batch, channels, length) as (batch, channels, 1, length)."""
    return g.op("Unsqueeze", x, int64(g, [-2]))


def _remove_axis(g: Any, x: Any) -> Any:
    return g.op("Squeeze", x, int64(g, [-2]))
