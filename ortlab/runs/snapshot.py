"""A point in training to go back to, bit for bit: weights, buffers, gradients, optimizers, random state."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ortlab.engine.random_state import RandomState
from ortlab.runs.interrupts import undisturbed


@dataclass(frozen=True)
class _Tensor:
    tensor: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor | None

    @classmethod
    def read(cls, tensor: torch.Tensor) -> _Tensor:
        grad = tensor.grad.detach().clone() if tensor.grad is not None else None
        return cls(tensor, tensor.detach().clone(), grad)

    def put_back(self) -> None:
        self.tensor.copy_(self.value)
        self.tensor.grad = None if self.grad is None else self.grad.clone()


class Snapshot:
    """Everything that decides how the next steps go, as far as Python can reach it.

    What cannot be reached is an iterator that a step draws its batches from: it goes on where it stands, and the
    runs' data digests then differ. Besides the module's parameters, gradients, buffers and training flags, the states
    of the objects in `stateful` are kept: optimizers, schedulers, gradient scalers, other modules.
    """

    def __init__(self, module: torch.nn.Module, stateful: Iterable[Any] = ()) -> None:
        self._module = module
        self._tensors = [_Tensor.read(tensor) for tensor in (*module.parameters(), *module.buffers())]
        self._flags = [(part, part.training) for part in module.modules()]
        self._states: dict[int, tuple[Any, Any]] = {}
        self._random = RandomState.read()
        for thing in stateful:
            self.include(thing)
        self._at_first = tuple(self._states.values())

    @cached_property
    def digest(self) -> str:
        """Digest of weights, buffers, the states that were given, and random state; equal digests, equal starts."""
        return self._digest()

    def include(self, thing: Any) -> None:
        """Keep the state of one more object, as it is now, unless it is kept already."""
        if id(thing) not in self._states and thing is not self._module:
            self._states[id(thing)] = (thing, copy.deepcopy(thing.state_dict()))

    @property
    def stateful(self) -> list[Any]:
        """The objects besides the module that are kept."""
        return [thing for thing, _ in self._states.values()]

    def put_back(self) -> None:
        """Make everything what it was, in place: parameters and optimizers stay the objects they are.

        Ctrl-C is raised afterwards: half of the weights would be those of another step.
        """
        with undisturbed():
            with torch.no_grad():
                for tensor in self._tensors:
                    tensor.put_back()
            for part, flag in self._flags:
                part.training = flag
            for thing, state in self._states.values():
                thing.load_state_dict(copy.deepcopy(state))
            self._random.put_back()

    @property
    def number_of_bytes(self) -> int:
        """The bytes that the copies of tensors take."""
        held = [tensor for one in self._tensors for tensor in (one.value, one.grad) if tensor is not None]
        held += [
            one for one in tree_leaves([state for _, state in self._states.values()]) if torch.is_tensor(one)
        ]
        return sum(tensor.nbytes for tensor in held if not tensor.is_meta)

    @property
    def ort_seed(self) -> int:
        """A seed for ORT's generator that follows from torch's random state: the same start, the same dropout."""
        digest = hashlib.blake2b(_bytes(self._random.torch_cpu), digest_size=4).digest()
        return 2 + int.from_bytes(digest, "little") % (2**31 - 2)

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for tensor in self._tensors:
            digest.update(_bytes(tensor.value))
        for _, state in self._at_first:
            for leaf in _leaves(state):
                digest.update(leaf)
        digest.update(_bytes(self._random.torch_cpu))
        return digest.hexdigest()


class DataDigest:
    """A digest of the tensors that a model was given, in order; equal digests, equal data."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def update(self, *values: Any) -> None:
        """Add the tensors, numbers and texts in nested containers."""
        for leaf in _leaves(values):
            self._digest.update(leaf)

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._digest.hexdigest()


def is_stateful(thing: object) -> bool:
    """Say whether an object can be kept in a snapshot: it has `state_dict()` and `load_state_dict()`."""
    if isinstance(thing, type):
        return False
    load: Callable[..., Any] | None = getattr(thing, "load_state_dict", None)
    return callable(load) and callable(getattr(thing, "state_dict", None))


def _leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield str((value.dtype, tuple(value.shape))).encode()
        yield _bytes(value)
    elif isinstance(value, dict) or hasattr(value, "items"):
        for key, item in value.items():
            yield str(key).encode()
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield repr(value).encode()


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.is_meta:
        return b""  # there are no values
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
