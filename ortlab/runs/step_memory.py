"""The memory of a step: steps are run, and levels and peaks are read at the borders of their phases.

`with_step_memory` does that where the steps of a run have ended, and puts everything back.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ortlab.engine.patching import only_new_garbage
from ortlab.errors import OrtlabError, StepError
from ortlab.memory.measured import PHASE_NAMES, Known, MemoryMeasurement, PhasePeak, StepMemory
from ortlab.records.runs import EXECUTED_BY_FALLBACK, NOT_MEASURED, Initialization
from ortlab.runs.experiment import Snapshot, iterator_of, leaving_no_trace, not_called
from ortlab.runs.interrupts import interrupts_kept
from ortlab.runs.process_memory import Gaps, Gauge, device_of, gauge_of, resident_bytes
from ortlab.runs.stopwatch import Stopwatch, synchronizer

if TYPE_CHECKING:
    from ortlab.options.configuration import Configuration
    from ortlab.options.options import Options
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment
    from ortlab.runs.recording import Engine

_REST: Final = PHASE_NAMES[-1]

_WARM_UP_AT_MOST: Final = 8
"""Steps that may pass before the measured ones; more mean that every step builds something or moves its memory."""

_EXTRA_AT_MOST: Final = 6
"""Steps that a run may be longer for its step memory; two are the rule."""

_SETTLED: Final = 256 * 1024
"""Bytes of new gaps that a step may leave in the heap, since what falls into them is missing from a peak, and of
pages of files (code above all) that may come or go in it, since they are in a peak and are no memory of the step."""

_AGAIN_AT_MOST: Final = 3
"""Times that a step is measured in which more pages of files came or went."""


class Measuring:
    """Runs the steps of an experiment and measures them; meanwhile the lab sends each forward through `forward`."""

    # The module stands at the experiment's start. `options` are the switches that the record names.

    def __init__(
        self,
        module: torch.nn.Module,
        engine: Engine,
        experiment: Experiment,
        options: Options,
        on_optimizer: Callable[[Any], None],
        progress: Callable[[str, float], None],
    ) -> None:
        self._module = module
        self._engine = engine
        self._experiment = experiment
        self._options = options
        self._progress = progress
        self._device = device_of(module)
        self._gauge: Gauge = gauge_of(self._device)
        self._gaps: Gaps | None = None
        self._on_optimizer = on_optimizer
        self._optimizers = [
            thing for thing in experiment.start.stateful if isinstance(thing, torch.optim.Optimizer)
        ]
        self._stopwatch = Stopwatch(
            synchronize=synchronizer(self._device), on_optimizer=self._meet, module=module
        )
        self._built = False
        self._executed_by = ""
        self._filled = 0
        self._files = 0
        self._border: Callable[[str], None] = lambda _: None

    def run(self) -> MemoryMeasurement:
        """Run the steps, those that warm up included."""
        with self._prepared(), interrupts_kept():
            warm_up = self._warm_up()
            steps = tuple(self._measured(number) for number in range(1, self._experiment.count + 1))
        return MemoryMeasurement(
            steps=steps,
            engine=self._engine.name,
            options=self._options.to_dict(),
            kind=self._gauge.kind,
            device=str(self._device),
            warm_up=warm_up,
        )

    def settled_step(self) -> StepMemory:
        """Run as few steps as it takes for one that settles, from where everything stands, and return that one."""
        # The gaps of the heap are filled while each step is read, so that the first step in which there were none to
        # fill and no pages of files came or went is the measurement. `run` fills them in steps of their own.
        self._stopwatch.on_phase = self._reach
        with (
            only_new_garbage(),
            self._gauge.ready() as self._gaps,
            self._stopwatch.watching(),
            interrupts_kept() as raise_lost,
        ):
            for number in range(1, _EXTRA_AT_MOST + 1):
                raise_lost()
                self._progress(f"Step memory: step {number}", 1.0)
                swapped = resident_bytes("VmSwap")
                step = self._read_step(filling=True)
                if abs(resident_bytes("VmSwap") - swapped) > _SETTLED:
                    raise StepError(
                        "The memory of a step cannot be told on a machine that swaps.",
                        why="A part of the process moved to disk in the step, or back.",
                        fix="Close other programs, or take a smaller batch.",
                    )
                # A first step may make a session, and gradients that stay.
                if number > 1 and not self._built and self._filled <= _SETTLED and self._files <= _SETTLED:
                    break
        self._check_built("every step builds something anew")
        return step

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one forward of the module."""
        with self._stopwatch.forward():
            outputs = self._engine.forward(args, kwargs)
        self._executed_by = self._engine.executed_by
        if self._executed_by == EXECUTED_BY_FALLBACK:
            raise StepError(
                "PyTorch executed the model, not ONNX Runtime, so this is no memory of ONNX Runtime.",
                why=self._engine.fallback_reason,
                fix='Correct that, or measure PyTorch: lab.memory(engine="eager").',
            )
        return outputs

    def built(self, done: Initialization) -> None:  # noqa: ARG002 - as `Recording.built`
        """Note that the step had to wait for a build, which takes memory of its own."""
        self._built = True

    # ---- steps ------------------------------------------------------------------------------------------------

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Let steps in the block start as the experiment's did, and report their borders."""
        self._experiment.start.seed(self._engine.name)
        self._engine.start_over()
        self._stopwatch.on_phase = self._reach
        gc.collect()
        with only_new_garbage(), self._gauge.ready() as self._gaps, self._stopwatch.watching():
            yield

    def _warm_up(self) -> int:
        """Run steps until nothing is built and the heap has no new gaps; return how many."""
        for number in range(1, _WARM_UP_AT_MOST + 1):
            self._progress(f"Warming up: step {number}", 0.0)
            self._filled = 0
            self._border = self._fill
            gc.collect()
            self._fill()
            self._step()
            self._fill()
            # A first step makes gradients and moments that stay, and so do the buffers of a build.
            if number > 1 and not self._built and self._filled <= _SETTLED:
                return number
        if self._built:
            raise StepError(
                "The memory of a step cannot be told: every step builds something anew.",
                why=f"A build takes memory of its own, and {_WARM_UP_AT_MOST} steps in a row had one.",
                fix="Use batches of one kind; lab.messages says what was built, and why.",
            )
        return _WARM_UP_AT_MOST

    def _measured(self, number: int) -> StepMemory:
        count = self._experiment.count
        self._progress(f"Measuring memory: step {number} of {count}", (number - 1) / count)
        for _ in range(_AGAIN_AT_MOST):
            step = self._read_step(filling=False)
            self._check_built("something was built in it")
            if self._files <= _SETTLED:
                break
        return step

    def _read_step(self, *, filling: bool) -> StepMemory:
        """Run a step and read levels and peaks at its borders; `filling` fills the gaps of the heap there, too."""
        gc.collect()
        self._filled = 0
        if filling:
            self._fill()
        reading = _Reading(self._gauge, self._known, self._fill if filling else lambda: None)
        self._border = reading.reach
        files = self._gauge.files()
        self._step()
        self._files = abs(self._gauge.files() - files)
        return reading.step()

    def _check_built(self, what: str) -> None:
        if self._built:
            raise StepError(
                f"The memory of a step cannot be told: {what}.",
                why="A build takes memory of its own. The batch was of another kind than the ones before.",
                fix="Use batches of one kind; lab.messages says what was built, and why.",
            )

    def _step(self) -> None:
        self._built = False
        self._stopwatch.start_step()
        self._experiment.step()
        if not self._stopwatch.forward_calls:
            raise not_called("There is nothing whose memory could be measured.")

    def _reach(self, border: str) -> None:
        self._border(border)

    def _fill(self, _: str = "") -> None:
        if self._gaps is not None:
            self._filled += self._gaps.fill()

    # ---- tensors ----------------------------------------------------------------------------------------------

    def _meet(self, optimizer: Any) -> None:
        self._on_optimizer(optimizer)
        if all(optimizer is not known for known in self._optimizers):
            self._optimizers.append(optimizer)

    def _known(self) -> Known:
        return known_bytes(self._module, self._optimizers, self._device)


class _Reading:
    """Levels and peaks at the borders of one step."""

    def __init__(self, gauge: Gauge, known: Callable[[], Known], fill: Callable[[], None]) -> None:
        self._gauge = gauge
        self._known = known
        self._fill = fill
        self._phases: dict[str, tuple[PhasePeak, Known]] = {}
        self._phase = _REST
        self._known_before = self._known_at_start = known()
        self._gradients = 0
        gauge.read()
        self._before = self._start = gauge.read().now

    def reach(self, border: str) -> None:
        """End a phase at a border such as "pre_forward" or "post_backward", and begin the next."""
        level = self._gauge.read()
        found = PhasePeak(self._phase, self._before, max(level.peak, level.now), level.now)
        known = self._phases.get(self._phase)
        if known is None or found.peak_bytes > known[0].peak_bytes:
            self._phases[self._phase] = (found, self._known_before)
        side, _, name = border.partition("_")
        self._phase = name if side == "pre" else _REST
        self._known_before = self._known()
        self._gradients = max(self._gradients, self._known_before.gradients)
        self._fill()
        self._before = self._gauge.read().now

    def step(self) -> StepMemory:
        """End the step."""
        self.reach("post_step")
        found = [self._phases[name] for name in PHASE_NAMES if name in self._phases]
        return StepMemory(
            start_bytes=self._start,
            peak_bytes=max(phase.peak_bytes for phase, _ in found),
            phases=tuple(phase for phase, _ in found),
            known_at_start=self._known_at_start,
            known_before=tuple(known for _, known in found),
            gradient_bytes=self._gradients,
            cuda=self._gauge.details(),
        )


def known_bytes(module: torch.nn.Module, optimizers: Iterable[Any], device: torch.device) -> Known:
    """Add up the bytes of a model's tensors and its optimizers' states on a device, each storage once."""
    seen: set[int] = set()

    def size(tensors: Iterable[Any]) -> int:
        total = 0
        for tensor in tensors:
            for storage in _storages(tensor, device):
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
        return total

    return Known(
        parameters=size(module.parameters()),
        buffers=size(module.buffers()),
        gradients=size(tensor.grad for tensor in module.parameters()),
        optimizer=size(leaf for one in optimizers for leaf in tree_leaves(dict(one.state))),
    )


def _storages(tensor: Any, device: torch.device) -> Iterator[torch.UntypedStorage]:
    if not isinstance(tensor, torch.Tensor) or tensor.device != device:
        return
    if tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()  # noqa: SLF001 - the public ones refuse what is not coalesced
        yield tensor._values().untyped_storage()  # noqa: SLF001
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


# ---- the step memory of a run ---------------------------------------------------------------------------------------

_SEVERAL_PROCESSES: Final = (
    "Several processes train together, and each step would have to be measured in all of them at once."
)


def with_step_memory(bench: Bench, run: Run, experiment: Experiment, memory: bool | Run | None) -> Run:  # noqa: FBT001
    """Take a few more steps where a run has ended, measure one, and put everything back to that end."""
    # Whatever the steps raise is a reason why the run has no figure, and never the end of the run. An interrupt goes
    # on, once everything is put back. `memory` is as for `Bench.run`.
    if run.step_memory_bytes is not None:
        return run
    if memory is not None and not isinstance(memory, bool):
        return replace(run, step_memory_bytes=memory.step_memory_bytes, no_step_memory=memory.no_step_memory)
    if reason := _why_unmeasured(bench, run, experiment, memory):
        return replace(run, no_step_memory=reason)
    after = Snapshot(bench.module, experiment.start.stateful)
    wanted = bench.configuration
    try:
        with (
            # A second bar would leave a second empty output in the cell: the panel alone says what goes on. All
            # steps are done by now, so that the bar of a sweep must not fall back.
            bench.progress.task(1, done=1, what="Measuring step memory", show=False),
            bench.ort.beside(),
            leaving_no_trace(experiment.step),
            bench.log.muted(),
        ):
            bench.ort.options = without_arena(bench, wanted).options
            bench.recording = measuring = Measuring(
                bench.module,
                bench.engine,
                experiment,
                wanted.options,
                after.include,
                bench.progress.report,
            )
            return replace(run, step_memory_bytes=measuring.settled_step().rise_bytes)
    except Exception as error:  # noqa: BLE001 - whatever the step raises, the run has been made
        return replace(run, no_step_memory=_why(error))
    finally:
        bench.recording = None
        after.put_back()
        after.seed(bench.engine.name)


def without_arena(bench: Bench, configuration: Configuration) -> Configuration:
    """Return what is run to measure memory: on a CPU, ORT's arena would hide what a step gives back."""
    if configuration.engine != "ort":
        return configuration
    if device_of(bench.module).type == "cpu":
        return configuration.changed({"cpu_memory_arena": False}, bench.have)
    if not configuration.options.external_gpu_allocator:
        raise StepError(
            "The GPU memory of ONNX Runtime cannot be told.",
            why="It keeps a pool of its own, because external_gpu_allocator is off.",
            fix="Switch it on: lab.set(external_gpu_allocator=True).",
        )
    return configuration


def shares_steps() -> bool:
    """Say whether other processes take part in each step: they would wait for steps that only some take."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _why_unmeasured(bench: Bench, run: Run, experiment: Experiment, memory: bool | None) -> str:  # noqa: FBT001
    """Say why no steps are to be taken to measure the memory of a run; empty where they may be."""
    if memory is False:
        return NOT_MEASURED
    if memory is None:
        if (drawn := iterator_of(experiment.step)) is not None:
            return (
                f"The step draws from a {type(drawn).__name__}, and measuring takes steps of its own, which would "
                "draw from it, too; memory=True does it all the same."
            )
        if any(one.is_open for one in bench.subscriptions):
            return "A subscriber sees every step, those of a measurement, too; memory=True measures anyway."
    if run.fell_back:
        return "PyTorch executed steps that ONNX Runtime was asked for."
    return _SEVERAL_PROCESSES if shares_steps() else ""


def _why(error: Exception) -> str:
    """Say in one sentence why the steps that measure memory failed."""
    if isinstance(error, OrtlabError):
        return error.why or error.what
    said = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return f"A step after the last one raised {words.rstrip('.')}."
