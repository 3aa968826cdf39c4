"""Pooling for onnxruntime 1.19.2, whose gradients crash or are wrong outside of two dimensions.

On the CPU, MaxPoolGrad of 1.19.2 (``orttraining/training_ops/cpu/nn/pool_gradient_op.cc``) ends the process for one
and three dimensions, and AveragePoolGrad returns a gradient of another shape than the input. ORTModule leaves the
two-dimensional ones to torch (``_custom_op_symbolic_registry.max_pool2d`` ...); here the others follow, while a
model trains.
"""

from __future__ import annotations

from typing import Any, Final

from ortlab.engine.operators.symbolic_words import aten, constant, int64, none

NONE_OF_THE_AXES: Final = 1
"""Kernel size and stride along the axis that a one-dimensional pooling does not have."""


def max_pool1d(g: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, *args: Any) -> Any:
    """Emit ``F.max_pool1d`` as torch's two-dimensional one along an axis of size one."""
    dilation, ceil_mode = args
    kernel = constant(kernel_size, "is")
    shape_arguments = (
        int64(g, [NONE_OF_THE_AXES, *kernel]),
        int64(g, [NONE_OF_THE_AXES, *(constant(stride, "is") or kernel)]),
        int64(g, [0, *constant(padding, "is")]),
        int64(g, [NONE_OF_THE_AXES, *constant(dilation, "is")]),
    )
    flat = _insert_axis(g, x)
    return _remove_axis(
        g, aten(g, "max_pool2d_with_indices", flat, *shape_arguments, ceil_mode, outputs=2)[0]
    )


def max_pool3d(g: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, *args: Any) -> Any:
    """Leave ``F.max_pool3d`` to torch."""
    stride = stride if constant(stride, "is") else kernel_size
    return aten(g, "max_pool3d_with_indices", x, kernel_size, stride, padding, *args, outputs=2)[0]


def avg_pool1d(g: Any, x: Any, kernel_size: Any, stride: Any, padding: Any, *args: Any) -> Any:
    """Emit ``F.avg_pool1d`` as torch's two-dimensional one along an axis of size one."""
    ceil_mode, count_include_pad = args
    kernel = constant(kernel_size, "is")
    shape_arguments = (
        int64(g, [NONE_OF_THE_AXES, *kernel]),
        int64(g, [NONE_OF_THE_AXES, *(constant(stride, "is") or kernel)]),
        int64(g, [0, *constant(padding, "is")]),
    )
    flat = _insert_axis(g, x)
    return _remove_axis(
        g, aten(g, "avg_pool2d", flat, *shape_arguments, ceil_mode, count_include_pad, none(g))
    )


def avg_pool3d(g: Any, x: Any, kernel_size: Any, stride: Any, *args: Any) -> Any:
    """Leave ``F.avg_pool3d`` to torch."""
    stride = stride if constant(stride, "is") else kernel_size
    return aten(g, "avg_pool3d", x, kernel_size, stride, *args)


def adaptive_avg_pool1d(g: Any, x: Any, output_size: Any) -> Any:
    """Emit ``F.adaptive_avg_pool1d`` as torch's two-dimensional one along an axis of size one."""
    size = int64(g, [NONE_OF_THE_AXES, *constant(output_size, "is")])
    return _remove_axis(g, aten(g, "_adaptive_avg_pool2d", _insert_axis(g, x), size))


def adaptive_avg_pool3d(g: Any, x: Any, output_size: Any) -> Any:
    """Leave ``F.adaptive_avg_pool3d`` to torch."""
    return aten(g, "_adaptive_avg_pool3d", x, output_size)


def _insert_axis(g: Any, x: Any) -> Any:
    """Emit (batch, channels, length) as (batch, channels, 1, length)."""
    return g.op("Unsqueeze", x, int64(g, [-2]))


def _remove_axis(g: Any, x: Any) -> Any:
    return g.op("Squeeze", x, int64(g, [-2]))
