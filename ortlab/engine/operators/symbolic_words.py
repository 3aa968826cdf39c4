"""The vocabulary of symbolic functions: read the arguments of a traced operator, emit nodes for it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final

from ortlab.engine.exporter import symbolic_module

_OPSET: Final = 17
"""What ORTModule 1.19.2 exports; torch has one symbolic from there down to where it changed."""

TO_THE_END: Final = 2**63 - 1
"""The end of a Slice that goes to the end of its axis."""


class LeftToTorch(Exception):  # noqa: N818 - no error: it ends where the operator is translated
    """Raised by a symbolic function whose operator is to be left to torch; the message says why."""


def constant(value: Any, kind: str) -> Any:
    """Read a constant argument; `kind` is "i", "f", "s" or "is" (a list of integers), as torch names them."""
    return symbolic_module("symbolic_helper")._get_const(value, kind, "argument")


def is_none(value: Any) -> bool:
    """Say whether an optional argument was left out."""
    return value is None or bool(symbolic_module("symbolic_helper")._is_none(value))


def rank(value: Any) -> int | None:
    """Return the number of dimensions of a traced tensor, None where it is not known."""
    number: int | None = symbolic_module("symbolic_helper")._get_tensor_rank(value)
    return number


def is_training_export() -> bool:
    """Say whether the graph under export will get a gradient; a graph for inference stays plain ONNX."""
    from torch.onnx import TrainingMode

    settings = importlib.import_module("torch.onnx._globals").GLOBALS
    return bool(settings.training_mode == TrainingMode.TRAINING)


def onnx_type(value: Any) -> Any:
    """Return ONNX's number for the dtype of a traced tensor of floats."""
    from torch.onnx import TensorProtoDataType as Dtype

    codes = {"Double": Dtype.DOUBLE, "Half": Dtype.FLOAT16, "BFloat16": Dtype.BFLOAT16}
    return codes.get(value.type().scalarType(), Dtype.FLOAT)


def cast_like(g: Any, value: Any, traced: Any, target: Any) -> Any:
    """Emit a value, traced as `traced`, in the dtype of a traced tensor of floats; others stay as they are."""
    here, there = traced.type().scalarType(), target.type().scalarType()
    if here == there or there not in {"Float", "Double", "Half", "BFloat16"} or "Complex" in str(here):
        return value
    return g.op("Cast", value, to_i=onnx_type(target))


def plain_symbolic(name: str) -> Any:
    """Return torch's own symbolic function of an ATen operator."""
    for opset in range(9, _OPSET + 1):  # they register themselves when they are imported
        symbolic_module(f"symbolic_opset{opset}")
    registry = symbolic_module("registration").registry
    return registry.get_function_group(f"aten::{name}").get(_OPSET)


def while_training(trained: Any, plain: Any) -> Any:
    """Return a symbolic function that is `trained` in a graph that gets a gradient, and `plain` in another one."""

    def symbolic(g: Any, *args: Any) -> Any:
        return (trained if is_training_export() else plain)(g, *args)

    return symbolic


def none(g: Any) -> Any:
    """Emit the None of an optional argument."""
    import torch

    value = g.op("prim::Constant")
    value.setType(torch._C.OptionalType.ofTensor())
    return value


def aten(g: Any, operator: str, *args: Any, outputs: int = 1) -> Any:
    """Emit a node that torch executes: `operator`, without its namespace ``aten::``, for its default overload."""
    return g.op("org.pytorch.aten::ATen", *args, operator_s=operator, outputs=outputs)


def int64(g: Any, values: int | Sequence[int]) -> Any:
    """Emit a constant of dtype int64, a scalar or a vector."""
    import torch

    return g.op("Constant", value_t=torch.tensor(values, dtype=torch.int64))


def boolean(g: Any, *, value: bool) -> Any:
    """Emit a constant scalar of dtype bool."""
    import torch

    return g.op("Constant", value_t=torch.tensor(value))


def int64_vector(g: Any, sizes: Any) -> Any:
    """Emit a list of sizes, constant or computed, as one vector of dtype int64."""
    helper = symbolic_module("symbolic_helper")
    numbers = helper._maybe_get_const(sizes, "is")
    if isinstance(numbers, (list, tuple)):
        return int64(g, list(numbers))
    if helper._is_packed_list(sizes):
        entries = [g.op("Reshape", size, int64(g, [1])) for size in helper._unpack_list(sizes)]
        return g.op("Concat", *entries, axis_i=0)
    return sizes


def sizes_between(g: Any, x: Any, start: int, end: int) -> Any:
    """Emit the sizes of the axes ``start:end`` of a tensor, a vector of dtype int64."""
    return g.op("Slice", g.op("Shape", x), int64(g, [start]), int64(g, [end]))


def filled(g: Any, shape: Any, value: float, *, like: Any) -> Any:
    """Emit a tensor of a computed shape, full of one number, of the dtype of `like`."""
    import torch

    dtypes = {"Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16}
    dtype = dtypes.get(like.type().scalarType(), torch.float32)
    return g.op("ConstantOfShape", shape, value_t=torch.tensor([value], dtype=dtype))
