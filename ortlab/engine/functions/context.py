"""The ``ctx`` of an ``autograd.Function`` that ONNX Runtime runs, and how long what it saved is kept.

In PyTorch the ``ctx`` is a node of the autograd graph and lives as long as a tensor that needs it. Inside
an ORT graph there is no such tensor: ORT's kernel ``PythonOp`` keeps the ``ctx`` in a pool of its own
(``RegisterContext`` in ``orttraining/core/framework/torch/custom_function_register.cc``) and forgets it
when ``PythonOpGrad`` has run. If backward never runs - a validation loss in training mode, an exception
between the passes - 1.19.2 keeps it, and all that it saved, until the process ends ("a known existing
issue", ``torch_interop_utils/ctx_pool.h``).

Here the ``ctx`` is a plain Python object, and each belongs to the forward pass of ORTModule that made it
(:func:`contexts_made`). Whatever ends first empties it: its backward, or the death of that pass's autograd
graph, which is when PyTorch would have freed it, too. What stays in ORT's pool is the empty object.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_map_only

from ortlab.engine.border import storage_address


@dataclass(frozen=True)
class TensorType:
    """What is needed to make a gradient of zeros, or to check one: shape, dtype and device."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: object) -> TensorType | None:
        """Describe a tensor; None for anything else."""
        return cls(value.shape, value.dtype, value.device) if isinstance(value, Tensor) else None

    def zeros(self) -> Tensor:
        """Return the gradient that PyTorch puts in the place of a missing one."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class FunctionContext(FunctionCtx):
    """The ``ctx`` of one call of a Function."""

    # ``save_for_backward``, ``mark_dirty``, ``mark_non_differentiable`` and ``set_materialize_grads`` are torch's own
    # (:class:`torch.autograd.function.FunctionCtx` stores their arguments in attributes); the attributes that PyTorch's
    # C++ adds are added here. `inputs` are all arguments of the Function, tensors and others, with one flag each in
    # `needs_input_grad`.

    serial: int = -1  # among the contexts that wait for their backward

    def __init__(self, inputs: Sequence[object], needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.materialize_grads = True
        self.to_save: tuple[Tensor, ...] = ()
        self._inputs = tuple(TensorType.of(value) for value in inputs)
        self._outputs: tuple[TensorType | None, ...] = ()
        self._differentiable: tuple[bool, ...] = ()
        self._released = False

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors given to ``save_for_backward``; RuntimeError if freed, as in PyTorch after a backward."""
        if self._released:
            raise RuntimeError("the saved tensors of this call have been freed: its backward has run already")
        return self.to_save

    def keep(self, outputs: Sequence[object], borrowed: set[int]) -> None:
        """Make what was saved independent of ORT's buffers, which are reused once the kernel has returned."""
        # Whatever the ``ctx`` holds at the storage addresses `borrowed`, which ORT lent for this call, is copied, also
        # a view of an input or an attribute of ``ctx``; 1.19.2's C++ copies only inputs that were themselves given to
        # ``save_for_backward``. Backward's gradients get the types of `outputs`, which forward returned.
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            if storage_address(tensor) not in borrowed:
                return tensor
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return copies[id(tensor)]

        for name, value in self._kept().items():
            setattr(self, name, tree_map_only(Tensor, own, value))
        self._outputs = tuple(TensorType.of(output) for output in outputs)
        excluded = {id(tensor) for tensor in getattr(self, "non_differentiable", ())}
        self._differentiable = tuple(id(output) not in excluded for output in outputs)

    def _kept(self) -> dict[str, Any]:
        """Return what the Function put on the ``ctx``: saved tensors and attributes of its own."""
        return {name: value for name, value in vars(self).items() if name not in _OWN_ATTRIBUTES}

    def storages(self) -> set[int]:
        """Return the storage addresses of all tensors that the ``ctx`` holds."""
        found: set[int] = set()
        for value in self._kept().values():
            tree_map_only(Tensor, lambda tensor: found.add(storage_address(tensor)), value)
        return found - {0}

    def input_type(self, index: int) -> TensorType | None:
        """Return the type of an argument; None for one that is no tensor."""
        return self._inputs[index]

    def is_differentiable(self, index: int) -> bool:
        """Say whether a gradient may flow into an output: not after ``mark_non_differentiable``."""
        return self._differentiable[index]

    def missing_gradient(self, index: int) -> Tensor | None:
        """Return what backward gets for an output without a gradient: zeros, or None if it asked for that."""
        output = self._outputs[index]
        return output.zeros() if self.materialize_grads and output is not None else None

    def release(self) -> None:
        """Free everything that was saved, and every attribute that the Function set."""
        vars(self).clear()
        self._released = True


# Attributes of every context that hold no tensors.
_OWN_ATTRIBUTES: Final = frozenset(vars(FunctionContext((), ()))) - {"to_save"}

# The contexts that wait for their backward, by serial number: an address could belong to another object by
# then.
_waiting: Final[dict[int, FunctionContext]] = {}
_serials: Final = itertools.count()
# ORT runs the kernels of a session on the thread that called it (ORTModule's sessions execute sequentially).
_passes: Final = threading.local()


def hold(context: FunctionContext) -> None:
    """Keep a context until its backward, or until the forward pass that is under way on this thread has died."""
    # A forward that runs in no pass of ORTModule's (a recomputation inside a backward) has only its backward.
    serial = next(_serials)
    _waiting[serial] = context
    context.serial = serial
    stack = getattr(_passes, "stack", [])
    if stack:
        stack[-1].append(serial)


def release(context: FunctionContext) -> None:
    """Free what a context saved: its backward has run."""
    _waiting.pop(context.serial, None)
    context.release()


def release_all() -> None:
    """Free what every waiting context saved; for the end of the process."""
    release_serials(list(_waiting))


def waiting() -> int:
    """Return how many contexts wait for their backward."""
    return len(_waiting)


def release_serials(serials: Sequence[int]) -> None:
    """Free what the contexts of these numbers saved, those that still wait."""
    for serial in serials:
        context = _waiting.pop(serial, None)
        if context is not None:
            context.release()


@contextmanager
def contexts_made() -> Iterator[list[int]]:
    """Collect the serial numbers of contexts that forwards on this thread make in the ``with``; an error frees them."""
    if not hasattr(_passes, "stack"):
        _passes.stack = []
    serials: list[int] = []
    _passes.stack.append(serials)
    try:
        yield serials
    except BaseException:
        release_serials(serials)
        raise
    finally:
        _passes.stack.pop()
