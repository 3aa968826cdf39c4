"""PyTorch's operators for ONNX Runtime's ``ATen`` node, called through two C function pointers.

ORTModule sends operators that ORT lacks back to PyTorch: the graph has a node ``org.pytorch.aten::ATen`` with
the operator's name, and its kernel (``onnxruntime/contrib_ops/cpu/aten_ops/aten_op.cc``) calls two functions
whose addresses were given to ``register_aten_op_executor``. 1.19.2 expects them from a C++ extension of torch
(``torch_cpp_extensions/cpu/aten_op_executor/aten_op_executor.cc``) that takes a minute to compile and that
today's torch no longer accepts. The two signatures are plain C::

    bool is_tensor_argument(const char* name, const char* overload, size_t index, bool is_input);
    void execute(const char* name, const char* overload, size_t n_inputs, DLManagedTensor** inputs,
                 size_t n_outputs, DLManagedTensor** outputs);

so :mod:`ctypes` can make them on every platform. ``inputs`` has one pointer for each argument of the
operator's schema, scalars and lists as tensors, null for "not given"; ownership comes with the pointer. A
null output is an undefined tensor. ctypes takes the GIL, so ORT may call from any of its threads.

Beyond the C++ extension, whose source says "will add more type support if needed", this one accepts
``Scalar`` arguments (softplus, add, threshold: an assertion there), lists of tensors, and ``double``
scalars.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import torch

from ortlab.engine.border import (
    give_pointer,
    keep_error,
    take_pointer,
    unreadable_pointer,
)
from ortlab.engine.operators import compiled_calls
from ortlab.engine.operators.torch_calls import CallableCall, argument_type, is_torch_call
from ortlab.engine.operators.torch_kernels import KERNELS
from ortlab.engine.passes.graph_edits import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_NOTHING: Final = nullcontext()

# ORT's DLPack has no boolean (see `dlpack`), and a uint8 mask is an error in torch or, worse, an index.
_BOOLEAN_TENSORS: Final = frozenset({"mask", "condition", "attn_mask", "src_mask", "padding_mask"})

# How the element kinds of a TorchScript schema become Python values; ScalarType, Layout and MemoryFormat
# are IntType.
_FROM_NUMBER: Final[dict[str, Callable[[Any], Any]]] = {
    "IntType": int,
    "SymIntType": int,
    "FloatType": float,
    "BoolType": bool,
    "NumberType": lambda number: number,
}


@dataclass(frozen=True)
class Argument:
    """One argument of an operator: what its tensor from ORT has to become."""

    name: str
    kind: str  # of the value, or of the list's elements: "TensorType", "IntType", "FloatType" ...
    is_list: bool
    keyword_only: bool
    default: Any  # stands for "not given"; None without a default, which for a tensor means an undefined one

    def values(self, tensors: Sequence[Tensor | None]) -> Any:
        """Make the argument's value of what ORT passed: a tensor or None; for a list of tensors, any number of them."""
        if self.is_list and self.kind == "TensorType":
            # torch has no undefined tensor inside `Tensor[]`, only inside `Tensor?[]`; None is right for both.
            given = any(tensor is not None for tensor in tensors)
            return [self._tensor(tensor) for tensor in tensors] if given else self.default
        return self.value(*tensors)

    def value(self, tensor: Tensor | None) -> Any:
        """Make the value of an argument that is one input; see `values`."""
        if tensor is None:
            return self.default
        if self.kind == "TensorType":
            return self._tensor(tensor)
        convert = _FROM_NUMBER.get(self.kind)
        if convert is None:
            raise TypeError(f"argument '{self.name}' is a {self.kind}, which ONNX Runtime cannot pass")
        if not self.is_list:
            return convert(tensor.item())
        numbers = (tensor if tensor.dim() == 1 else tensor.reshape(-1)).tolist()
        return numbers if convert is int and tensor.dtype is torch.int64 else list(map(convert, numbers))

    def _tensor(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is not None and tensor.dtype is torch.uint8 and self.name in _BOOLEAN_TENSORS:
            return tensor.view(torch.bool)
        return tensor


@dataclass(frozen=True)
class Operator:
    """An operator of PyTorch with its schema, ready to be called with ORT's tensors."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Argument, ...]
    returns: tuple[str, ...]
    in_place: bool = False  # whether the output is the memory of an input, which nothing else reads

    @cached_property
    def _is_plain(self) -> bool:
        """Whether each argument is one input, in its place, as for most operators: these are called at once."""
        return not any(
            argument.keyword_only or (argument.is_list and argument.kind == "TensorType")
            for argument in self.arguments
        )

    @staticmethod
    @cache
    def find(name: str, overload: str) -> Operator:
        """Look an operator up, once; `name` may lack its namespace, since the exporter leaves ``aten::`` out."""
        namespace, _, base = name.rpartition("::")
        if namespace == NAMESPACE:
            kernel = KERNELS[base]
            call, schema = kernel.call, kernel.schema
            in_place = any(returned.alias_info for returned in schema.returns)
        else:
            call = getattr(getattr(getattr(torch.ops, namespace or "aten"), base), overload or "default")
            name = f"{namespace or 'aten'}::{base}" + (f".{overload}" if overload else "")
            schema, in_place = call._schema, False  # type: ignore[attr-defined] # an OpOverload
        return Operator(
            name=name,
            call=call,
            arguments=tuple(map(_argument, schema.arguments)),
            returns=tuple(returned.type.kind() for returned in schema.returns),
            in_place=in_place,
        )

    def is_tensor(self, index: int, *, is_input: bool) -> bool:
        """Say whether an input or output is a tensor, or else a value that ORT keeps on the CPU."""
        if is_input:
            # A list of tensors takes what is left over, see `execute`; an index past the schema belongs to one.
            return self.arguments[min(index, len(self.arguments) - 1)].kind == "TensorType"
        return self.returns[index] == "TensorType"

    def execute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Call the operator with one tensor for each argument of its schema."""
        # Surplus tensors belong to its one argument that is a list of tensors (``index``, ``cat``), since an ONNX node
        # has flat inputs. Missing ones are the last arguments, which are not given: ONNX leaves trailing optional
        # inputs out. An output is None where the tensor is undefined. Unless the operator works in place, no output
        # shares memory with an input or with another output, because ORT may overwrite any buffer whose last reader has
        # run.
        if self._is_plain and len(tensors) <= len(self.arguments):
            given = zip_longest(self.arguments, tensors)
            return self._called([argument.value(tensor) for argument, tensor in given], {}, tensors)
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        position, surplus = 0, max(len(tensors) - len(self.arguments), 0)
        for argument in self.arguments:
            width = 1
            if surplus and argument.is_list and argument.kind == "TensorType":
                width, surplus = 1 + surplus, 0
            value = argument.values(tensors[position : position + width] or (None,))
            position += width
            if argument.keyword_only:
                keywords[argument.name] = value
            else:
                positional.append(value)
        if surplus:
            raise TypeError(f"takes {len(self.arguments)} inputs, but ONNX Runtime passed {len(tensors)}")
        return self._called(positional, keywords, tensors)

    def _called(
        self, positional: list[Any], keywords: dict[str, Any], tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            result = self.call(*positional, **keywords)
        outputs = result if isinstance(result, tuple | list) else (result,)
        if self.in_place:
            return tuple(outputs)
        taken = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor is not None]
        return tuple(None if output is None else _own(_as_tensor(output), taken) for output in outputs)


def _argument(argument: Any) -> Argument:
    """Read an argument of a TorchScript schema."""
    kind, _, is_list = argument_type(argument)
    return Argument(
        name=argument.name,
        kind=kind,
        is_list=is_list,
        keyword_only=argument.kwarg_only,
        default=argument.default_value if argument.has_default_value() else None,
    )


def _own(output: Tensor, taken: list[tuple[int, int]]) -> Tensor:
    """Copy a dense output that lies in memory that is taken, by address and bytes; its own is added."""
    # What ONNX Runtime passes and what it is given is dense, so that addresses suffice: asking for each tensor's
    # storage takes ten times as long, and that for every tensor of every call.
    place = output.data_ptr()
    if any(start <= place < start + size for start, size in taken):
        return output.clone(memory_format=torch.contiguous_format)
    taken.append((place, output.nbytes))
    return output


def _as_tensor(output: Tensor | float) -> Tensor:
    """Pack a number that an operator returned (``aten::sym_size``) as ORT expects it: as a tensor."""
    return output if isinstance(output, torch.Tensor) else torch.tensor(output)


@cache
def _find(name: bytes, overload: bytes) -> Operator | CallableCall:
    called, text = name.decode(), overload.decode()
    if is_torch_call(text):
        call = CallableCall.find(called, text)
        compiled_calls.describe(call, text)
        return call
    operator = Operator.find(called, text)
    if operator.name.startswith("aten::"):  # what another library computes may do more than that
        compiled_calls.describe_operator(called, text, operator.call, _BOOLEAN_TENSORS)
    return operator


def _is_tensor_argument(name: bytes, overload: bytes, index: int, is_input: bool) -> bool:  # noqa: FBT001
    try:
        return _find(name, overload).is_tensor(index, is_input=is_input)
    except BaseException as error:  # noqa: BLE001 - nothing may be raised into C; it is kept instead
        keep_error(name.decode(), error)
        return False


def _execute(name: bytes, overload: bytes, n_inputs: int, inputs: Any, n_outputs: int, outputs: Any) -> None:
    try:
        # Take every pointer before anything can fail: they are ours now, and dying tensors give them back.
        tensors = [take_pointer(inputs[i]) if inputs[i] else None for i in range(n_inputs)]
        results = _find(name, overload).execute(tensors)
        for i, result in zip(range(n_outputs), results, strict=True):
            outputs[i] = None if result is None else give_pointer(result)
    except BaseException as error:  # noqa: BLE001 - as above
        keep_error(name.decode(), error)
        # A null output would mean "undefined", and the graph would go on with wrong numbers.
        for i in range(n_outputs):
            outputs[i] = unreadable_pointer()


_pointers = ctypes.POINTER(ctypes.c_void_p)
# ORT keeps the addresses for ever, so the callbacks must live as long as the process: they are module globals.
is_tensor_callback: Final = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_bool
)(_is_tensor_argument)
execute_callback: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, _pointers, ctypes.c_size_t, _pointers
)(_execute)


def is_tensor_argument_address() -> int:
    """Return the address of ``is_tensor_argument``; the name is that of the C++ extension's function."""
    return ctypes.cast(is_tensor_callback, ctypes.c_void_p).value or 0


def execute_aten_operator_address() -> int:
    """Return the address of ``execute``, or of what calls it (`compiled_calls`); the C++ extension has this name."""
    in_python = ctypes.cast(execute_callback, ctypes.c_void_p).value or 0
    return compiled_calls.connect(in_python) or in_python
