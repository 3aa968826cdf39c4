"""The times of a step, node by node: it runs again in a session that ORT's profiler watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from ortlab.analyses.builds import engine_of, on_ort
from ortlab.errors import ExecutionError, OptionError, OrtlabError
from ortlab.options.configuration import Configuration
from ortlab.records.runs import EXECUTED_BY_ORT, EXECUTED_BY_PARTS
from ortlab.runs.experiment import check_count, leaving_no_trace
from ortlab.runs.interrupts import interrupts_kept

if TYPE_CHECKING:
    from ortlab.engine.ort import OrtEngine
    from ortlab.engine.profiling import Profile
    from ortlab.memory.trace import Trace
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

_STEPS: Final = 3
"""The first profiled step is slower: its memory is new."""


def profile(
    bench: Bench,
    n: int = _STEPS,
    *,
    part: str | None = None,
    baseline: Literal["eager"] | None = None,
    memory_efficient_order: bool = False,
    progress: bool = True,
) -> Trace:
    """Run the last step again while ORT's profiler watches, and go back to where the lab was.

    The step runs on ONNX Runtime with the present switches, whichever engine the lab is set to. With a baseline it runs
    in PyTorch, too, and the times of both engines stand beside each other, module by module.

    Parameters
    ----------
    n
        How often; each kernel's time is the shortest of them.
    part
        Path of the part to profile, where several parts of the model are wrapped.
    baseline
        "eager": time each module in PyTorch as well. A module's time is its own, without its children's, and the
        shortest of `n` steps.
    memory_efficient_order
        Whether nodes run in the order that ORT gives to sessions with recompute plans, though there may be none.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    Trace
        Every node that ran, in its order, with time and size of its results; `by_module` has them module by module.

    Raises
    ------
    OptionError
        If it is not clear which part is meant, or the baseline is another than "eager".
    ExecutionError
        If PyTorch executed a step, as a fallback, or the step does not train.
    StepError
        If no step has run yet, or one is running.
    Exception
        Whatever the step raises. Weights and optimizer are then as they were before this call.
    """
    if baseline not in (None, "eager"):
        raise OptionError(
            f"A profile cannot be held against {baseline!r}.",
            why="Only PyTorch's own modules are timed beside it.",
            fix='Use baseline="eager".',
        )
    with profiled_step(bench, n, part, memory_efficient_order, progress=progress) as (seen, engine):
        in_order = memory_efficient_order or engine.execution.orders_for_memory
        path = next(iter(bench.engines(part)))
        order = "memory efficient" if in_order else "default"
        trace = seen.trace(engine.execution.plans, order, bench.module, path)
    if baseline is None:
        return trace
    times = eager_times(bench, n, progress=progress)
    inside = {one: ms for one, ms in times.items() if not path or one == path or one.startswith(f"{path}.")}
    return replace(trace, eager=inside)


def eager_times(bench: Bench, steps: int, *, progress: bool) -> dict[str, float]:
    """Run the last step in PyTorch, and return the ms of each module by its path: the shortest of the steps.

    The bench is then as it was. Raises StepError if no step has run yet, and whatever the step raises.
    """
    from ortlab.analyses.module_clock import ModuleClock

    experiment = bench.last_experiment()
    found: list[dict[str, float]] = []

    @contextmanager
    def timing() -> Iterator[None]:
        with ModuleClock(bench.module).running() as times:
            yield
        found.append(times)

    with bench.as_before(experiment):
        bench.configure(Configuration("eager", bench.options))
        repeat(bench, experiment, steps + 1, "Profiling PyTorch", progress=progress, timing=timing)
    timed = found[1:]  # the first one's memory is new, which takes time
    return {path: min(one.get(path, 0.0) for one in timed) for one in timed for path in one}


def spent_on(bench: Bench, configuration: Configuration, *, progress: bool) -> str:
    """Profile the last step under a configuration, and say what most of its time goes to; "" where that fails.

    The lab is then as it was.
    """
    from ortlab import units

    try:
        with bench.as_before(bench.last_experiment()):
            bench.configure(configuration)
            shares = profile(bench, progress=progress).slowest()
    except OrtlabError:
        return ""
    return ", ".join(f"{name} ({units.rounded_percent(share)})" for name, share in shares.items())


@contextmanager
def profiled_step(
    bench: Bench,
    steps: int,
    part: str | None = None,
    memory_efficient_order: bool = False,  # noqa: FBT001, FBT002 - as `profile`
    *,
    progress: bool = True,
) -> Iterator[tuple[Profile, OrtEngine]]:
    """Yield what was seen of the last step while ORT's profiler watched; then go back to where the lab was."""
    bench.check_usable("profile a step")
    check_count(steps)
    experiment = bench.last_experiment()
    engine = engine_of(bench, part, "a session")
    from ortlab.engine.profiling import profiled

    with bench.as_before(experiment), on_ort(bench):
        if engine.pending_stage():
            repeat(bench, experiment, 1, "Building", progress=progress)
        for _ in range(2):  # the first one takes another export where the model has changed since
            execution = engine.execution
            with profiled(execution, memory_efficient_order=memory_efficient_order) as seen:
                timing = partial(seen.timing, "step")
                repeat(bench, experiment, steps, "Profiling", progress=progress, timing=timing)
            if engine.execution is execution:
                break
        yield seen, engine


def repeat(
    bench: Bench,
    experiment: Experiment,
    count: int,
    what: str,
    *,
    progress: bool,
    timing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Run steps on the engine that is set, from the start of an experiment, and record nothing.

    PyTorch does not step in for ONNX Runtime. Each runs inside a context that `timing` makes.
    """
    experiment.start.put_back()
    with (
        leaving_no_trace(experiment.step),
        interrupts_kept() as raise_lost,
        bench.progress.task(count, what=what, show=progress) as bar,
    ):
        for number in range(1, count + 1):
            raise_lost()
            with timing():
                experiment.step()
            if bench.engine.name == "ort" and bench.executed_by not in (EXECUTED_BY_ORT, EXECUTED_BY_PARTS):
                raise ExecutionError(
                    "ONNX Runtime did not execute the step that was to be profiled.",
                    why=bench.status.reason or "PyTorch did.",
                    fix="Correct that, or wrap a part of the model only.",
                )
            bar.begin(f"{what}: step {number} of {count}", number)
