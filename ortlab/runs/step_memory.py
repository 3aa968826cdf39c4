"""The step memory of a run: where its steps have ended, a few more are taken and measured, and all is put back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from ortlab.errors import OrtlabError, StepError
from ortlab.records.runs import NOT_MEASURED
from ortlab.runs.experiment import iterator_of, leaving_no_trace
from ortlab.runs.measuring import Measuring
from ortlab.runs.snapshot import Snapshot

if TYPE_CHECKING:
    from ortlab.options.configuration import Configuration
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

_SEVERAL_PROCESSES: Final = (
    "Several processes train together, and each step would have to be measured in all of them at once."
)


def with_step_memory(bench: Bench, run: Run, experiment: Experiment, memory: bool | Run | None) -> Run:  # noqa: FBT001
    """Take a few more steps where a run has ended, measure one, and put everything back to that end.

    Whatever the steps raise is a reason why the run has no figure, and never the end of the run. An interrupt goes on,
    once everything is put back. `memory` is as for `Bench.run`.
    """
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
        _seed_again(bench, after)


def without_arena(bench: Bench, configuration: Configuration) -> Configuration:
    """Return what is run to measure memory: on a CPU, ORT's arena would hide what a step gives back.

    Raises StepError where ONNX Runtime keeps a pool of its own on a GPU.
    """
    device = next((tensor.device.type for tensor in bench.module.parameters()), "cpu")
    if configuration.engine != "ort":
        return configuration
    if device == "cpu":
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


def _seed_again(bench: Bench, at: Snapshot) -> None:
    """Let ORT's generator, whose state cannot be read, go on from a seed that follows from torch's state."""
    if bench.engine.name == "ort":
        from ortlab.engine.sessions import seed

        seed(at.ort_seed)


def _why(error: Exception) -> str:
    """Say in one sentence why the steps that measure memory failed."""
    if isinstance(error, OrtlabError):
        return error.why or error.what
    said = str(error).strip().splitlines()
    words = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return f"A step after the last one raised {words.rstrip('.')}."
