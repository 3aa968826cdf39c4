"""Run the forward and backward of a ``torch.autograd.Function`` for ONNX Runtime.

ORTModule exports a custom Function as the node ``PythonOp``; its gradient is ``PythonOpGrad``. Their
kernels call a "runner" with the Function's ``apply`` or ``backward`` and the tensors as DLPack capsules.
1.19.2 has the runners in a C++ extension
(``torch_cpp_extensions/cpu/torch_interop_utils/custom_function_{fw,bw}.cc``), which calls ``apply`` and
then takes the autograd graph that this made apart again. Here forward is called directly, with a
:class:`~ortlab.engine.functions.context.FunctionContext`: no graph is made, nothing of torch's C++ is
needed, and the memory of inputs that were not saved is free as soon as forward returns.

What a Function may rely on is what PyTorch promises, with these rules for memory that belongs to ORT:

- ORT reuses buffers, so saved inputs are copied, and outputs that share memory with anything else are, too,
  unless the Function's ``alias_input`` planned it (``tensor_reuse_map``).
- A Function may write into its inputs (``mark_dirty``), but ORT and other nodes may still read them. Which
  inputs a kernel writes to is learnt in its first call, which gets copies of all; later calls get copies of
  those.

How ORT's C++ call becomes a :class:`FunctionCall` is the business of :mod:`ortlab.engine.functions.abi`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.dlpack import from_dlpack

from ortlab.engine.border import give_capsule, storage_address, storages, unshared
from ortlab.engine.functions import context as function_context
from ortlab.engine.functions.context import FunctionContext


@dataclass(frozen=True)
class FunctionCall:
    """One call of a runner, in Python's terms."""

    name: str  # in the graph
    # ``apply`` of the Function, or its plain ``forward`` where `safe` is False, or its ``backward``.
    callback: Callable[..., Any]
    kernel: bytes  # identifies the node and its session (``kernel_invoke_id``)
    requires_grad: tuple[bool, ...]  # one for each argument
    is_tensor: tuple[bool, ...]
    # Capsules for tensors (None for a missing gradient), other objects as they are. The first of a backward is the
    # context that forward returned.
    arguments: tuple[Any, ...]
    # For each result the input whose buffer ORT planned for it, or -1. In a forward result 0 is the context, and
    # inputs are counted among the tensors; in a backward they are counted with the context as 0.
    reuse: tuple[int, ...]
    training: bool  # whether backward will follow
    # Whether ORT's buffers have to be protected. ``safe_run_mode=0`` is for Functions of ORT's own (parameter
    # retrieval, ZeRO) that know what they do.
    safe: bool


# Per kernel, the positions of the tensors that it writes to. Sessions come and go, and nobody says when a
# kernel is gone; forgetting costs a kernel one copy of its inputs, so the record is emptied now and
# then.
_written: Final[dict[bytes, frozenset[int]]] = {}
_REMEMBERED_KERNELS: Final = 4096


boolean_arguments: Final[dict[str, frozenset[int]]] = {}
"""The positions of boolean tensors, which ORT's DLPack passes as ``uint8``, among the arguments of a Function.

By the Function's name in the graph; `ortlab.engine.functions.export` fills it.
"""


class _Borrowed:
    """The tensors that ORT lends for one call: what the Function sees of them, and what it did to them."""

    def __init__(self, call: FunctionCall) -> None:
        self._call = call
        self._known = _written.get(call.kernel) if call.safe else frozenset()
        self.lent: list[Tensor] = []
        self.seen: list[Tensor] = []
        self._versions: list[int] = []

    def borrow(self, capsule: object, *, requires_grad: bool, boolean: bool = False) -> Tensor:
        """Return the tensor to call the Function with."""
        tensor = from_dlpack(capsule)
        if boolean:
            tensor = tensor.view(torch.bool)
        seen = tensor.clone() if self._known is None or len(self.lent) in self._known else tensor
        if seen.is_floating_point() or seen.is_complex():
            seen.requires_grad_(requires_grad)
        self.lent.append(tensor)
        self.seen.append(seen)
        self._versions.append(seen._version)
        return seen

    def check_writes(self) -> None:
        """Learn which tensors a kernel's first call writes to; raise RuntimeError if a later call writes to others."""
        if not self._call.safe:
            return
        written = frozenset(
            position
            for position, (tensor, version) in enumerate(zip(self.seen, self._versions, strict=True))
            if tensor._version != version
        )
        if self._known is None:
            if len(_written) >= _REMEMBERED_KERNELS:
                _written.clear()
            _written[self._call.kernel] = written
        elif written - self._known:
            raise RuntimeError(
                f"it wrote into tensor argument {min(written - self._known)}, but not in its first call; "
                "ONNX Runtime needs to know from the start which inputs are overwritten"
            )

    def place(self, output: Tensor, position: int) -> Tensor:
        """Put an output into the buffer of the input that ORT planned for it."""
        lent, seen = self.lent[position], self.seen[position]
        if storage_address(output) not in {storage_address(lent), storage_address(seen)}:
            raise RuntimeError(
                f"its alias_input says that an output reuses tensor input {position}, "
                "but the output has memory of its own"
            )
        if storage_address(output) != storage_address(lent):
            lent.copy_(output)
        return lent


def run_forward(call: FunctionCall) -> list[object]:
    """Run a Function's forward for ORT's ``PythonOp`` kernel, and return the context and the outputs."""
    # The context is None if no backward can follow; each output is a capsule, or None where forward returned None. The
    # caller must not keep them: ORT checks that it holds the only reference to each capsule.
    borrowed, booleans = _Borrowed(call), boolean_arguments.get(call.name, frozenset())
    arguments = [
        borrowed.borrow(argument, requires_grad=needs and call.training, boolean=position in booleans)
        if is_tensor
        else argument
        for position, (argument, is_tensor, needs) in enumerate(
            zip(call.arguments, call.is_tensor, call.requires_grad, strict=True)
        )
    ]
    needs_grad = tuple(call.training and needs for needs in call.requires_grad)
    context = FunctionContext(arguments, needs_grad)
    with torch.no_grad():
        outputs = _call_forward(call, context, arguments)
        borrowed.check_writes()
        if len(outputs) != len(call.reuse) - 1:
            raise RuntimeError(
                f"forward returned {len(outputs)} values, but {len(call.reuse) - 1} when it was exported"
            )
        lent = storages(borrowed.lent) if call.safe else set()
        # Without backward nothing has to outlive this call.
        if call.training:
            context.keep(outputs, lent)
        shared = lent | context.storages() if call.safe and any(needs_grad) else lent
        # In one list, which the caller empties: a debugger that is in this stack keeps what frames have held.
        results: list[object] = [None]
        results += [
            _give(output, borrowed, shared, reuse)
            for output, reuse in zip(outputs, call.reuse[1:], strict=True)
        ]
    # In safe mode ORT takes None for "no backward can follow", otherwise it insists on a context.
    if not call.training or (call.safe and not any(needs_grad)):
        return results
    if call.safe:
        function_context.hold(context)
    results[0] = context
    return results


def run_backward(call: FunctionCall) -> list[object]:
    """Run a Function's backward, free its context, and return a capsule per gradient."""
    # There is one for each argument of forward, None where it needs no gradient. As in PyTorch, a gradient that
    # backward left out although it is needed is zero, and each has the shape and dtype of its input.
    context: FunctionContext = call.arguments[0]
    borrowed = _Borrowed(call)
    try:
        # ORT knows nothing of mark_non_differentiable and computes gradients for such outputs all the same.
        capsules = [
            capsule if context.is_differentiable(index) else None
            for index, capsule in enumerate(call.arguments[1:])
        ]
        gradients = [
            context.missing_gradient(index)
            if capsule is None
            else borrowed.borrow(capsule, requires_grad=False)
            for index, capsule in enumerate(capsules)
        ]
        with torch.no_grad():
            # PyTorch does not call backward at all if no gradient arrives.
            arrived = any(capsule is not None for capsule in capsules)
            result = call.callback(context, *gradients) if arrived else (None,) * len(call.reuse)
            borrowed.check_writes()
            results = _match_inputs(
                context, result if isinstance(result, tuple) else (result,), len(call.reuse)
            )
            shared = storages(borrowed.lent) if call.safe else set()
            # `reuse` counts the context as input 0, and a buffer can be reused only if its gradient was
            # there.
            present = [index for index, capsule in enumerate(capsules, start=1) if capsule is not None]
            places = [present.index(reuse) if reuse in present else -1 for reuse in call.reuse]
            return [
                _give(gradient, borrowed, shared, place)
                for gradient, place in zip(results, places, strict=True)
            ]
    finally:
        function_context.release(context)


def _call_forward(call: FunctionCall, context: FunctionContext, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Call forward in whichever of the two styles the Function is written."""
    function = getattr(call.callback, "__self__", None) if call.safe else None
    if function is None:
        result = call.callback(context, *arguments)
    elif function.setup_context is Function.setup_context:
        result = function.forward(context, *arguments)
    else:
        result = function.forward(*arguments)
        function.setup_context(context, tuple(arguments), result)
    outputs = result if isinstance(result, tuple) else (result,)
    for output in outputs:
        if output is not None and not isinstance(output, Tensor):
            raise TypeError(
                f"forward returned a {type(output).__name__}; an ONNX graph passes only tensors and None on"
            )
    return outputs


def _give(output: Tensor | None, borrowed: _Borrowed, shared: set[int], place: int) -> object:
    """Hand a result to ORT: in the buffer that ORT planned for it, or else in memory that nobody else has."""
    if output is None:
        return None
    return give_capsule(borrowed.place(output, place) if place >= 0 else unshared(output, shared))


def _match_inputs(context: FunctionContext, gradients: Sequence[Any], count: int) -> list[Tensor | None]:
    """Apply the rules of PyTorch's engine to gradients (``PyNode::apply``, ``validate_outputs``)."""
    if any(gradient is not None for gradient in gradients[count:]) or len(gradients) < count:
        raise RuntimeError(f"backward returned {len(gradients)} gradients, expected {count}")
    matched: list[Tensor | None] = []
    for index, gradient in enumerate(gradients[:count]):
        expected = context.input_type(index)
        if expected is None or not context.needs_input_grad[index]:
            matched.append(None)
        elif gradient is None:
            matched.append(expected.zeros())
        else:
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            # sum_to_size raises if the shapes do not fit, with both of them in its message.
            matched.append(dense.sum_to_size(expected.shape).to(expected.dtype))
    return matched
