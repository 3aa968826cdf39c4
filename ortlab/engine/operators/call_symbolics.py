"""Export an operator as a call that torch executes: by its schema, whatever the operator is.

The traced graph has lost which overload was called and which arguments were numbers (torch's exporter turns them into
tensors, ``torch.onnx.utils._optimize_graph``), but it knows what is constant and the dtype and rank of every result.
"""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from ortlab.engine.operators.symbolic_words import int64_vector
from ortlab.engine.operators.torch_calls import (
    BOOLEAN,
    COMPLEX,
    NUMBER,
    NUMBERS,
    TENSOR,
    TENSORS,
    VALUE,
    TorchCall,
)

# These change buffers that they are given, and their schemas do not say so.
_WRITING: Final = frozenset(
    """_batch_norm_impl_index batch_norm cudnn_batch_norm instance_norm miopen_batch_norm
    native_batch_norm""".split()  # noqa: SIM905
)
_DTYPES: Final = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Bool": "bool",
    "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
_OF_NUMBERS: Final = frozenset({"IntType", "SymIntType", "FloatType", "BoolType", "NumberType"})
_PYTHON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("IntType", "SymIntType", "BoolType"), (bool, int)),
    **dict.fromkeys(("FloatType", "NumberType"), (bool, int, float)),
    **dict.fromkeys(("StringType", "DeviceObjType"), (str,)),
}

_READING_MEMORY: Final = frozenset({"set", "resize"})
"""Operators that change how a tensor lies in memory; `as_strided` is looked at by its symbolic function."""


_OPERATORS_THAT_WRITE: Final = frozenset({"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"})


class NotACallError(Exception):
    """The operator cannot be called from the graph; the message says why."""


def leave_to_torch(g: Any, node: Any, inputs: Any, *, trained: bool) -> Any:
    """Emit a node of the traced graph as a `TorchCall`; return what stands for its outputs."""
    namespace, _, name = node.kind().partition("::")
    if namespace == "aten":
        name = _without_writing(name)
    if name in _WRITING:
        raise NotACallError("it changes buffers that it is given")
    if name in _READING_MEMORY:
        raise NotACallError("it reads memory by its layout, which values in a graph do not keep")
    values = list(zip(node.inputs(), inputs, strict=True))
    overload, arguments, taken = _overload(g, getattr(getattr(torch.ops, namespace), name), values)
    if not taken:
        arguments, taken = _with_an_input(g, arguments)
    outputs = list(node.outputs())
    results = tuple(map(_result, outputs))
    random = trained and is_random(overload)
    call = TorchCall(overload._overloadname, arguments, results, random)
    kept = name if namespace == "aten" else f"{namespace}::{name}"
    made = g.op(
        "org.pytorch.aten::ATen",
        *taken,
        operator_s=kept,
        overload_name_s=call.text,
        outputs=len(outputs) + random,
    )
    made = [made] if len(outputs) + random == 1 else list(made)
    if random:
        made.pop().setType(_tensor_type(outputs[0], torch.uint8, 1))
    emitted = [_typed(g, value, output) for value, output in zip(made, outputs, strict=True)]
    return emitted[0] if len(emitted) == 1 else emitted


def _without_writing(name: str) -> str:
    """Return the name of the operator that computes what one of torch's own writes: `add` of `add_`."""
    return name.replace("__i", "__", 1) if name in _OPERATORS_THAT_WRITE else re.sub(r"(?<!_)_$", "", name)


def expanded_by_torch(g: Any, source: Any, like: Any) -> Any:
    """Emit ``source.expand_as(like)`` as a call for the operator in work, whose result has the type of `like`."""
    output = g.original_node.output()
    kind = _tensor(output)
    call = TorchCall("default", ((kind,), (kind,)), (_result(output),))
    made = g.op("org.pytorch.aten::ATen", source, like, operator_s="expand_as", overload_name_s=call.text)
    return _typed(g, made, output)


def is_random(overload: Any) -> bool:
    """Say whether an overload draws numbers from torch's generators."""
    return torch.Tag.nondeterministic_seeded in overload.tags


def has_no_kernels(value: Any) -> bool:
    """Say whether a traced value is of a dtype that ONNX Runtime's CPU provider has few kernels for, or none."""
    # For bfloat16 it has Cast alone. For float16 it casts to float32 and back around each node, which rounds elsewhere
    # than PyTorch does, and some gradients have no kernel. For float64 it lacks convolutions, layer normalisations and
    # products of matrices in the backward; scalars of that dtype are mostly Python's numbers, and stay.
    kind = value.type()
    if kind.kind() != "TensorType" or not (kind.device() is None or kind.device().type == "cpu"):
        return False
    return kind.scalarType() in {"BFloat16", "Half"} or (kind.scalarType() == "Double" and bool(kind.dim()))


def is_complex(value: Any) -> bool:
    """Say whether a traced value is a tensor of complex numbers."""
    return value.type().kind() == "TensorType" and str(value.type().scalarType()).startswith("Complex")


# --- results -----------------------------------------------------------------------------------------------------


def _result(output: Any) -> tuple[str, int]:
    kind = output.type()
    if kind.kind() != "TensorType" or kind.scalarType() not in _DTYPES or kind.dim() is None:
        raise NotACallError(f"it returns a {kind.str()}")
    return _DTYPES[kind.scalarType()], kind.dim()


def _typed(g: Any, value: Any, output: Any) -> Any:
    """Give a result its type; a boolean one arrives as bytes."""
    from torch.onnx import TensorProtoDataType

    scalar, rank = output.type().scalarType(), output.type().dim()
    if scalar == "Bool":
        value.setType(_tensor_type(output, torch.uint8, rank))
        return g.op("Cast", value, to_i=TensorProtoDataType.BOOL)
    if is_complex(output):
        real = torch.float32 if scalar == "ComplexFloat" else torch.float64
        return value.setType(_tensor_type(output, real, rank + 1))
    return value.setType(_tensor_type(output, getattr(torch, _DTYPES[scalar]), rank))


def _tensor_type(output: Any, dtype: torch.dtype, rank: int) -> Any:
    return output.type().with_dtype(dtype).with_sizes([None] * rank)


# --- arguments ---------------------------------------------------------------------------------------------------


def _overload(g: Any, packet: Any, values: list[tuple[Any, Any]]) -> tuple[Any, tuple[Any, ...], list[Any]]:
    """Find the overload that was called: the one that takes the most of the constants as numbers."""
    found: list[tuple[int, Any, tuple[Any, ...], list[Any]]] = []
    why = "no overload takes these arguments"
    for name in packet.overloads():
        overload = getattr(packet, name)
        schema = overload._schema
        if len(schema.arguments) != len(values):
            continue
        if schema.is_mutable:
            why = "it changes a tensor that it is given"
            continue
        if any(one.type.kind() in _OF_NUMBERS for one in schema.returns):
            why = "it returns a number of Python's"
            continue
        try:
            read = [
                _argument(g, argument.type, *value)
                for argument, value in zip(schema.arguments, values, strict=True)
            ]
        except NotACallError as error:
            why = str(error)
            continue
        entries = tuple(entry for entry, _ in read)
        # A tensor of unknown rank is a number only where no overload takes it as a tensor: not the `int` of mul.
        numbers = sum(
            -1 if entry[0] == NUMBER and traced.type().dim() is None else entry[0] in {VALUE, NUMBER, NUMBERS}
            for entry, (traced, _) in zip(entries, values, strict=True)
        )
        found.append((numbers, overload, entries, [value for _, taken in read for value in taken]))
    if not found:
        raise NotACallError(why)
    _, overload, entries, taken = max(found, key=lambda one: one[0])
    return overload, entries, taken


def _with_an_input(g: Any, entries: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """Make an input of a constant, such as the size of a random tensor: ONNX Runtime's ATen node must have one."""
    for index, entry in enumerate(entries):
        constant = entry[1] if entry[0] == VALUE else None
        several = isinstance(constant, tuple)
        numbers = constant if isinstance(constant, tuple) else (constant,)
        if numbers and all(type(one) is int for one in numbers):
            kind = NUMBERS if several else NUMBER
            value = g.op("Constant", value_t=torch.tensor(numbers if several else constant))
            return (*entries[:index], (kind,), *entries[index + 1 :]), [value]
    raise NotACallError("it takes nothing that could be an input")


def _argument(g: Any, declared: Any, traced: Any, value: Any) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the entry of one argument and the inputs that it takes."""
    optional = declared.kind() == "OptionalType"
    declared = declared.getElementType() if optional else declared
    if traced.type().kind() == "NoneType":
        if not optional:
            raise NotACallError("an argument that it needs is not given")
        return (VALUE, None), []
    if declared.kind() == "ListType":
        return _list(g, declared.getElementType(), traced, value)
    if declared.kind() == "TensorType":
        return (_tensor(traced),), [value]
    constant = _constant(traced)
    if constant is not None:
        return (VALUE, _as(declared.kind(), constant)), []
    if (
        declared.kind() in _OF_NUMBERS
        and traced.type().kind() == "TensorType"
        and traced.type().dim() in {None, 0}
        and not is_complex(traced)
    ):
        return (NUMBER,), [value]
    raise NotACallError(f"it takes a {declared.str()} that is not constant")


def _list(g: Any, element: Any, traced: Any, value: Any) -> tuple[tuple[Any, ...], list[Any]]:
    optional = element.kind() == "OptionalType"
    element = element.getElementType() if optional else element
    if element.kind() == "TensorType":
        if traced.node().kind() != "prim::ListConstruct":
            raise NotACallError("it takes a list of tensors that the graph does not show")
        parts = list(zip(traced.node().inputs(), value.node().inputs(), strict=True))
        kinds = tuple(None if one.type().kind() == "NoneType" else _tensor(one) for one, _ in parts)
        return (TENSORS, kinds), [
            new for (_, new), kind in zip(parts, kinds, strict=True) if kind is not None
        ]
    if traced.node().kind() == "prim::Constant" and traced.type().kind() == "ListType":
        numbers = getattr(traced.node(), traced.node().kindOf("value"))("value")
        return (VALUE, tuple(_as(element.kind(), one) for one in numbers)), []
    if traced.node().kind() == "prim::ListConstruct":
        entries = [_constant(one) for one in traced.node().inputs()]
        if None not in entries:
            return (VALUE, tuple(_as(element.kind(), one) for one in entries)), []
        if element.kind() in {"IntType", "SymIntType"}:
            return (NUMBERS,), [int64_vector(g, value)]
    constant = _constant(traced)
    if constant is not None and element.kind() in _OF_NUMBERS:  # `int[1]` takes a number as well
        return (VALUE, (_as(element.kind(), constant),)), []
    raise NotACallError(f"it takes a list of {element.str()} that is not constant")


def _tensor(traced: Any) -> str:
    if traced.type().kind() != "TensorType":
        raise NotACallError(f"it takes a {traced.type().str()}")
    if traced.type().scalarType() == "Bool":
        return BOOLEAN
    return COMPLEX if is_complex(traced) else TENSOR


def _constant(traced: Any) -> Any:
    """Return the value of a constant that is a number or a text; None for everything else."""
    node = traced.node()
    if node.kind() != "prim::Constant" or "value" not in node.attributeNames():
        return None
    constant = getattr(node, node.kindOf("value"))("value")
    if isinstance(constant, torch.Tensor):
        return constant.item() if constant.dim() == 0 and not constant.is_complex() else None
    return constant if isinstance(constant, (bool, int, float, str)) else None


def _as(kind: str, constant: float | str) -> bool | float | str:
    """Convert a constant to the kind that the schema asks for; raise NotACallError where it is of another kind."""
    if not isinstance(constant, _PYTHON_TYPES.get(kind, ())):
        raise NotACallError(f"it takes a {kind.removesuffix('Type').lower()}")
    if kind == "FloatType" and not isinstance(constant, str):
        return float(constant)
    return bool(constant) if kind == "BoolType" else constant
