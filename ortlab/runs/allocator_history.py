"""The taking of a snapshot: a step is run while torch's CUDA allocator writes its history down."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from ortlab.errors import StepError
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.process_memory import CudaGauge
from ortlab.runs.step_memory import Measuring

_AFTER_FORWARD = "pre_backward"
"""The border at which what is kept for backward is there, and nothing else of the forward."""


class History(Protocol):
    """The history of a device's allocator."""

    def start(self) -> None:
        """Forget what was before, and write each allocation down with its Python stack."""

    def read(self) -> dict[str, Any]:
        """Return blocks and history, in the format of `torch.cuda.memory._snapshot`."""

    def stop(self) -> None:
        """Write nothing down any more."""


class CudaHistory:
    """The history of torch's CUDA allocator; it ends a recording of the user's own."""

    def start(self) -> None:
        """Forget what was before, and write each allocation down with its Python stack."""
        self.stop()  # which empties the history; the argument that does so is not in torch 2.4
        torch.cuda.memory._record_memory_history("all", context="all", stacks="python")  # noqa: SLF001

    def read(self) -> dict[str, Any]:
        """Return blocks and history of all devices."""
        torch.cuda.synchronize()
        found: dict[str, Any] = torch.cuda.memory._snapshot()  # noqa: SLF001
        return found

    def stop(self) -> None:
        """Write nothing down any more."""
        torch.cuda.memory._record_memory_history(None)  # noqa: SLF001


class Taken(NamedTuple):
    """Two of torch's snapshots of one step, of which the second goes on where the first ended.

    `held_after_forward` and `held_after_step` say, by address, what the tensors are that PyTorch held then.
    """

    after_forward: dict[str, Any]
    after_step: dict[str, Any]
    held_after_forward: dict[int, str]
    held_after_step: dict[int, str]


class Snapshotting(Measuring):
    """Runs a step and takes snapshots of it; while it does, the lab sends each forward through `forward`."""

    def __init__(self, *facts: Any, history: History) -> None:
        super().__init__(*facts)
        self._gauge = CudaGauge(self._device)
        self._history = history
        self._inputs: dict[int, str] = {}
        self._first: tuple[dict[str, Any], dict[int, str]] | None = None

    def take(self) -> Taken:
        """Run the step, after those that warm up, and take the snapshots.

        Raises StepError where the step does not call the model, has no backward, or builds something each time, and
        where PyTorch executed what ORT was asked for.
        """
        with self._prepared(), interrupts_kept():
            self._warm_up()
            gc.collect()
            self._progress("Taking a snapshot of the memory of a step", 0.5)
            self._border = self._look
            self._history.start()
            try:
                self._step()
                self._check()
                last = self._history.read()
            finally:
                self._history.stop()
        assert self._first is not None  # noqa: S101 - `_check` has looked
        return Taken(self._first[0], last, self._first[1], self._held())

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one forward of the module."""
        self._inputs = held_inputs(args, kwargs)
        return super().forward(args, kwargs)

    def _look(self, border: str) -> None:
        if border == _AFTER_FORWARD and self._first is None:
            self._first = self._history.read(), {**self._inputs, **self._held()}

    def _check(self) -> None:
        if self._built:
            raise StepError(
                "No snapshot was taken: something was built in the step.",
                why="A build takes memory of its own. The batch was of another kind than the ones before.",
                fix="Use batches of one kind; lab.messages says what was built, and why.",
            )
        if self._first is None:
            raise StepError(
                "No snapshot was taken: the step has no backward.",
                why="It shows what is kept from the forward for the backward.",
                fix="Call loss.backward() in the step, with the model in training mode.",
            )

    def _held(self) -> dict[int, str]:
        return held_tensors(self._module, self._optimizers)


def held_tensors(module: torch.nn.Module, optimizers: Iterable[Any]) -> dict[int, str]:
    """Return by address what a model's tensors are: parameters, gradients, buffers, and the `state` of optimizers."""
    found: dict[int, str] = {}
    names = {}
    for name, parameter in module.named_parameters():
        names[parameter] = name
        _add(found, parameter, f"parameter {name}")
        _add(found, parameter.grad, f"gradient of {name}")
    for name, tensor in module.named_buffers():
        _add(found, tensor, f"buffer {name}")
    for one in optimizers:
        for owner, state in one.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                _add(found, value, f"{key} of {names.get(owner, 'another parameter')}")
    return found


def held_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, str]:
    """Return by address what the tensors in a call of a model are: "input input_ids", "input 0"."""
    found: dict[int, str] = {}
    for name, value in (*enumerate(args), *kwargs.items()):
        for path, leaf in tree_flatten_with_path(value)[0]:
            _add(found, leaf, f"input {name}{keystr(path)}")
    return found


def _add(found: dict[int, str], tensor: Any, name: str) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
        address = tensor.untyped_storage().data_ptr()
        if address:
            found.setdefault(address, name)
