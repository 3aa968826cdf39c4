"""What a step's memory is made of: what the graph keeps for backward, the peaks by phase, and a GPU's snapshot."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from ortlab.analyses.builds import builds
from ortlab.errors import BuildError, StepError
from ortlab.memory.device_snapshot import KeptBuffer, kept_buffers, named_snapshot
from ortlab.memory.saved_activations import ActivationsSource, SavedActivations, merged
from ortlab.options.catalogue import check_names
from ortlab.runs.experiment import Experiment, Snapshot, check_count, leaving_no_trace
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.process_memory import CudaGauge
from ortlab.runs.step_memory import Measuring, without_arena

if TYPE_CHECKING:
    from ortlab.engine.execution import Execution
    from ortlab.memory.device_snapshot import MemorySnapshot
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.runs.bench import Bench


def activations(
    bench: Bench,
    part: str | None = None,
    *,
    plans: bool = False,
    sizes: Mapping[str, int] | None = None,
    progress: bool = True,
) -> SavedActivations:
    """Read what the graph of the present switches keeps for its backward, with their memory plans applied.

    If it is not built yet, it is built from the last step, beside what the lab has; see `SavedActivations.note`.

    Parameters
    ----------
    part
        Path of a wrapped part of the model; None for the whole model, or for all its parts together.
    plans
        Whether to say which recompute plans remove each activation, and what each keeps instead. Each plan that
        ORT offers is applied alone, in a session that never runs: some tenths of a second each for a small model.
        What was found is kept.
    sizes
        Bytes by name of a result, as a profiled step has seen them (`Trace.sizes`): for what the graph alone does
        not tell.
    progress
        Whether to show a progress bar on a terminal while plans are looked at.

    Returns
    -------
    SavedActivations
        The activations, the largest first. Bytes are worked out from shapes, for the sizes of the batch that the
        graph was built with; `SavedActivations.at` evaluates them for others.

    Raises
    ------
    OptionError
        If there is no such part.
    BuildError
        If no step has run in this lab yet, or ONNX Runtime cannot build the training graph.

    Examples
    --------
    >>> lab.activations().by("operator")[0]
    ActivationGroup(name='Gelu', count=12, bytes=100663296, unknown=0)
    """
    with builds(bench, part) as found:
        by_part = {
            path: _activations(bench, execution, path, plans=plans, sizes=sizes or {}, progress=progress)
            for path, execution in found.executions.items()
        }
    if len(by_part) == 1 and not found.missing:
        kept = next(iter(by_part.values()))
    else:
        kept = merged(by_part, missing=found.missing)
    return replace(kept, note=found.note, source=ActivationsSource(bench.lab, part))


def _activations(
    bench: Bench, execution: Execution, path: str, *, plans: bool, sizes: Mapping[str, int], progress: bool
) -> SavedActivations:
    from ortlab.engine.saved_activations import read_activations, with_plans

    kept = read_activations(execution, bench.module, part=path, sizes=sizes)
    if not plans:
        return kept
    configs = sorted(execution.memory_report().savings)
    with bench.progress.task(show=progress) as bar:
        return with_plans(kept, execution, bench.module, configs, part=path, tell=bar.report)


def read_kept(bench: Bench, execution: Execution, path: str) -> SavedActivations:
    """Read what the graph of a build keeps for its backward."""
    return _activations(bench, execution, path, plans=False, sizes={}, progress=False)


def memory(
    bench: Bench,
    /,
    fn: Callable[[], object] | None = None,
    *,
    n: int = 2,
    watch: Iterable[object] = (),
    **changes: object,
) -> MemoryMeasurement:
    """Measure what a step needs: its peak, the peak of each phase, and what the peak is made of.

    The last step is run again from its start: some steps to warm up, then those that are measured. The steps and
    their times do not count, so nothing comes into the ledger. Afterwards, also after a failure or an interrupt,
    weights, gradients, optimizers, random state, engine and options are as they were before the call.

    On a CPU, ONNX Runtime's arena is off meanwhile, which takes a session of its own, kept beside the usual one;
    glibc maps large buffers, so that the resident set follows them; steps are slower.

    Parameters
    ----------
    fn
        A step to measure instead of the last one; it starts where everything stands now.
    n
        How many steps are measured.
    watch
        With `fn`: more objects to put back, as for `step`.
    **changes
        Options to measure with, and `engine`, as for `set`. Nothing is changed in the lab.

    Returns
    -------
    MemoryMeasurement
        The record; it is kept nowhere else.

    Raises
    ------
    StepError
        If no step has run yet, a step is running, the step does not call the model, PyTorch executed what ONNX
        Runtime was asked for, or memory cannot be told on this system; the error says why.
    OptionError
        If a change is none that `set` would take.
    Exception
        Whatever the step raises.

    Examples
    --------
    >>> lab.memory().rise_bytes - lab.memory(memory_plan=("Gelu+:1:-1",)).rise_bytes
    17825792
    """
    bench.check_usable("measure memory")
    check_names(changes, memory)
    check_count(n)
    if fn is None:
        experiment, now = bench.last_experiment().times(n), None
    else:
        experiment = Experiment.begin(bench.module, fn, n, watch, "")
        now = experiment.start
    wished = bench.configuration.tried(changes, bench.have)
    with (
        bench.as_before(experiment, now) as before,
        bench.ort.beside(),
        bench.progress.task(),
        leaving_no_trace(experiment.step),
    ):
        include = partial(_include, experiment.start, before)
        bench.configure(without_arena(bench, wished))
        if now is None:
            experiment.start.put_back()
        bench.recording = measuring = Measuring(
            bench.module, bench.engine, experiment, wished.options, include, bench.progress.report
        )
        return _with_named_activations(bench, measuring.run())


def _include(start: Snapshot, before: Snapshot, optimizer: Any) -> None:
    start.include(optimizer)
    before.include(optimizer)


def _with_named_activations(bench: Bench, measured: MemoryMeasurement) -> MemoryMeasurement:
    """Add what the graph that has just run is known to keep."""
    if measured.engine != "ort" or measured.step.phase("backward") is None:
        return measured
    kept = activations(bench, progress=False)
    return measured if kept.unknown else replace(measured, named_activations_bytes=kept.total_bytes)


def memory_snapshot(bench: Bench, /, **changes: object) -> MemorySnapshot:
    """Run the last step again while torch's CUDA allocator writes its history down, and name what is in its blocks.

    The steps do not count, so nothing comes into the ledger. Afterwards, also after a failure or an interrupt,
    weights, gradients, optimizers, random state, engine and options are as they were before the call. A recording
    of the allocator's history that the caller has begun ends.

    Parameters
    ----------
    **changes
        Options to run with, and `engine`, as for `set`. Nothing is changed in the lab.

    Returns
    -------
    MemorySnapshot
        The blocks in use when the forward had ended, and what is in each, as far as it can be told; `save` writes
        the file that torch's memory viewer opens, with the history of the whole step and the names in it.

    Raises
    ------
    StepError
        If the model is not on an NVIDIA GPU, ONNX Runtime keeps a pool of its own there, no step has run yet, a
        step is running, or the step has no backward.
    OptionError
        If a change is none that `set` would take.
    Exception
        Whatever the step raises.

    Examples
    --------
    >>> snapshot = lab.memory_snapshot()
    >>> snapshot.save("step.pickle")  # open it at https://pytorch.org/memory_viz
    """
    bench.check_usable("take a memory snapshot")
    device = _gpu_of(bench.module)
    experiment = bench.last_experiment().times(1)
    wished = bench.configuration.tried(changes, bench.have)
    with bench.as_before(experiment) as before, ExitStack() as stack:
        stack.callback(bench.progress.report, "", 1.0)
        include = partial(_include, experiment.start, before)
        bench.configure(without_arena(bench, wished))
        experiment.start.put_back()
        bench.recording = snapshotting = Snapshotting(
            bench.module,
            bench.engine,
            experiment,
            wished.options,
            include,
            bench.progress.report,
            history=CudaHistory(),
        )
        taken = snapshotting.take()
        if wished.engine != "ort":
            return named_snapshot(taken, device, wished)
        kept = activations(bench, progress=False)
        return named_snapshot(taken, device, wished, _kept_buffers(bench, kept), len(kept.unknown))


def _kept_buffers(bench: Bench, kept: SavedActivations) -> list[KeptBuffer]:
    """Say of each kept activation whose size is known when its memory can have been allocated."""
    from ortlab.engine.saved_activations import earliest_places

    earliest: dict[tuple[str, str], int] = {}
    for path, engine in bench.engines(None).items():
        try:
            execution = engine.execution
        except BuildError:  # a part that was not called
            continue
        values = [row.value for row in kept.rows if row.part == path]
        places = earliest_places(execution, values)
        earliest |= {(path, value): place for value, place in places.items()}
    return kept_buffers(kept, earliest)


def _gpu_of(module: torch.nn.Module) -> torch.device:
    """Return the GPU that a model is on; raises StepError if it is on none."""
    device = next((tensor.device for tensor in module.parameters()), None)
    if device is not None and device.type == "cuda":
        return device
    raise StepError(
        "A memory snapshot needs an NVIDIA GPU.",
        why=f"It is the history of torch's CUDA allocator, and the model is on {device or 'no device'}.",
        fix="Move model and batch to 'cuda'. On a CPU %ort_memory measures a step, and %ort_activations names what it "
        "keeps for backward.",
    )


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
    """Two of torch's snapshots of one step, of which the second goes on where the first ended."""

    # `held_after_forward` and `held_after_step` say, by address, what the tensors are that PyTorch held then.

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
        """Run the step, after those that warm up, and take the snapshots."""
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
