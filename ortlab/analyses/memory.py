"""The memory of a step, phase by phase: the last step is run again from its start, and everything is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ortlab.analyses.activations import activations
from ortlab.runs.experiment import Experiment, check_count, leaving_no_trace
from ortlab.runs.step_memory import Measuring, without_arena

if TYPE_CHECKING:
    from ortlab.memory.measured import MemoryMeasurement
    from ortlab.runs.bench import Bench


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

        def include(optimizer: Any) -> None:
            experiment.start.include(optimizer)
            before.include(optimizer)

        bench.configure(without_arena(bench, wished))
        if now is None:
            experiment.start.put_back()
        bench.recording = measuring = Measuring(
            bench.module, bench.engine, experiment, wished.options, include, bench.progress.report
        )
        return _with_named_activations(bench, measuring.run())


def _with_named_activations(bench: Bench, measured: MemoryMeasurement) -> MemoryMeasurement:
    """Add what the graph that has just run is known to keep."""
    if measured.engine != "ort" or measured.step.phase("backward") is None:
        return measured
    kept = activations(bench, progress=False)
    return measured if kept.unknown else replace(measured, named_activations_bytes=kept.total_bytes)
