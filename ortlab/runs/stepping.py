"""Steps of the user's: run and written down, run again from their start, or those of somebody else's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ortlab.errors import StepError
from ortlab.options.catalogue import check_names
from ortlab.runs.bench import NOT_BEGUN
from ortlab.runs.experiment import Experiment, Snapshot, check_weights
from ortlab.runs.interrupts import answered, interrupts_kept, say
from ortlab.runs.recording import LoopRecording

if TYPE_CHECKING:
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench

_RECORDED: Final = "A recorded training takes no steps of its own; lab.memory(fn) measures one."


@interrupts_kept()
def step(
    bench: Bench,
    fn: Callable[[], object],
    n: int = 1,
    *,
    watch: Iterable[object] = (),
    source: str = "",
    memory: bool | None = None,
    progress: bool = True,
) -> Run:
    """Run a training step n times, time it, and add the run to the ledger.

    Weights, buffers, gradients, optimizers, schedulers and random state are kept as they are now, as the start
    that `rerun` and `restore` go back to.

    Parameters
    ----------
    fn
        One training step: forward, backward, optimizer. If it returns the loss, that is recorded; otherwise the
        tensor that `backward()` was called on is.
    n
        How many steps.
    watch
        More objects to keep with the start: optimizers, schedulers and other things with `state_dict()` that
        the step changes. Those that `fn` names itself, as globals or closure variables, are found.
    source
        The step's source, for the record of what a rerun repeats.
    memory
        Whether to measure the run's step memory (`Run.step_memory_bytes`). On a GPU it is read in passing. On a CPU
        `fn` is called a few more times after the n steps, two as a rule; then weights, optimizer and random state
        are put back to where the n steps ended. By default yes, unless `fn` is seen to draw from an iterator: what
        is drawn is gone. `Run.no_step_memory` says why a run has no figure.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    Run
        The record, also in `lab.runs`.

    Raises
    ------
    StepError
        If the step does not call the model or, in training mode, calls no `backward()`; if the weights are not
        finite, or nothing can be trained.
    Exception
        Whatever `fn` raises. The lab is then as it was before the call, weights and optimizer included.
    """
    bench.check_usable("run a step")
    with answered(NOT_BEGUN):
        check_weights(bench.module)
        begun = Experiment.begin(bench.module, fn, n, watch, source)
    return bench.run(begun, progress=progress, memory=memory)


def record(bench: Bench, train: Callable[[], object]) -> Run:
    """Let a loop of somebody else train the model, and write each step of its optimizer into the ledger as a run.

    A step goes from its first forward in training mode to the end of the optimizer's step: accumulated batches are
    one step, and evaluation, logging and saving are in none. Its loss is the sum of what `backward()` was called
    on, with a gradient scaler the scaled one. On a CPU the run has no step memory, which takes steps of its own.

    Parameters
    ----------
    train
        What trains, such as a Trainer's `train`; it is called once, without arguments. What it has changed stays,
        also after a failure.

    Returns
    -------
    Run
        The record, also in `lab.runs`. If the training fails or is interrupted after a step, the run with the steps
        that were made is in the ledger, and the exception goes on.

    Raises
    ------
    StepError
        If the loop did not train this model.
    Exception
        Whatever `train` raises.

    Examples
    --------
    >>> run = lab.record(trainer.train)
    """
    bench.check_usable("record a training")
    if not callable(train):
        raise StepError(
            f"A training must be something to call, not a {type(train).__name__}.",
            fix="Pass the function, do not call it: lab.record(trainer.train).",
        )
    experiment = Experiment(train, 1, Snapshot(bench.module))
    recording = LoopRecording(
        bench.module, bench.engine, bench.takeover.original_forward, experiment, bench.progress
    )
    run = bench.run_apart(experiment, recording)
    if run.step_memory_bytes is None:
        run = replace(run, no_step_memory=_RECORDED)
    bench.keep(run)
    if isinstance(recording.failure, KeyboardInterrupt):
        kept = f"its {len(run.steps):,} steps so far are run {run.number}, and what it has changed stays"
        say(recording.failure, f"Stopped the training; {kept}.")
    if recording.failure is not None:
        raise recording.failure
    return run


@interrupts_kept()
def rerun(
    bench: Bench,
    /,
    n: int | None = None,
    *,
    memory: bool | None = None,
    progress: bool = True,
    **changes: object,
) -> Run:
    """Go back to the start of the last step call and do it again.

    Parameters
    ----------
    n
        How many steps; by default as many as before.
    memory
        Whether to measure the run's step memory, as for `step`.
    progress
        Whether to show a progress bar on a terminal.
    **changes
        Options, and `engine`, for this call only, as `set` takes them; afterwards the lab has its own again, also
        if the call fails or is interrupted. `set` itself changes what every later call runs with.

    Raises
    ------
    StepError
        If no step has run yet.
    OptionError
        If a change is refused; nothing has run then.
    Exception
        Whatever the step raises. Weights and optimizer are then as they were before this call.

    Examples
    --------
    >>> lab.rerun(memory_level=1)
    >>> lab.rerun(engine="eager")
    """
    bench.check_usable("rerun")
    again = bench.last_experiment().times(n)
    check_names(changes, rerun)
    wished = bench.configuration.tried(changes, bench.have)
    with answered(NOT_BEGUN):
        before = Snapshot(bench.module, again.start.stateful)
    # A click in the panel may set an engine while the run is shown: that stays.
    with bench.configured_as_before() if changes else nullcontext():
        if changes:
            bench.configure(wished)
        return bench.run(again, progress=progress, memory=memory, before=before)
