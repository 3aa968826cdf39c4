"""PyTorch and ONNX Runtime held against each other: both run the last step of a lab from the same start."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ortlab.runs.experiment import check_count
from ortlab.runs.interrupts import interrupts_kept, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ortlab.engine.capture import Edit
    from ortlab.parity.observation import Observation
    from ortlab.parity.record import Parity
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

_STEPS: Final = 2
"""The first step shows what the engines compute, the second what they make of what was updated."""


@interrupts_kept()
def parity(
    bench: Bench,
    n: int = _STEPS,
    *,
    dropout: bool = False,
    seeds: bool = True,
    progress: bool = True,
) -> Parity:
    """Run the last step on PyTorch and on ONNX Runtime from the same start, and compare every tensor.

    What modules take and return, the gradients of it, the parameters' gradients and the updated parameters are held
    against each other. PyTorch runs three times: once more as it is, and once with everything that a module returns
    moved by some units of rounding; ONNX Runtime runs twice, and once without anything taken out of it. So it is
    known at each place what repetition and rounding explain. If the runs part behind tensors that the compute
    optimizer has cut, ONNX Runtime runs once more with it off, to look for the module among them.

    Parameters
    ----------
    n
        How many steps.
    dropout
        Whether dropout stays as it is; otherwise it lets everything pass, wherever it is called. The two engines
        draw different masks.
    seeds
        Whether PyTorch runs twice more with dropout as it is, once with another seed.
    progress
        Whether to show a progress bar on a terminal.

    Returns
    -------
    Parity
        Every tensor with its facts on both sides, the first divergences, and the checklist. The ledger, the
        options, the weights and the optimizer are as they were before, also after a failure or an interrupt.

    Raises
    ------
    StepError
        If no step has run yet, one is running, or the runs got different batches.
    BuildError, ExecutionError
        If ONNX Runtime cannot build or run the step; PyTorch does not step in.
    Exception
        Whatever the step raises.

    Examples
    --------
    >>> found = lab.parity(n=2)
    >>> found.first
    """
    try:
        return compared(bench, n, dropout=dropout, seeds=seeds, progress=progress)
    except KeyboardInterrupt as interrupt:
        say(
            interrupt,
            "Stopped the comparison; nothing is kept, and the lab is as it was before. Ask again.",
        )
        raise


def compared(
    bench: Bench, steps: int, *, dropout: bool, seeds: bool, progress: bool, edit: Edit | None = None
) -> Parity:
    """Compare as `parity` does; `edit` changes ONNX Runtime's gradient graph, for experiments with faults."""
    bench.check_usable("compare engines")
    check_count(steps)
    experiment = bench.last_experiment().times(steps)
    from ortlab.engine.building import built_apart
    from ortlab.parity.running import compare_engines

    @contextmanager
    def apart(**changes: object) -> Iterator[Callable[[], None]]:
        with ExitStack() as stack:
            engines = bench.engines(None).values()
            freeing = [stack.enter_context(built_apart(engine, **changes)) for engine in engines]

            def free_sessions() -> None:
                for free in freeing:
                    free()

            yield free_sessions

    def trial(engine: str, observation: Observation | None = None, *, seed: int | None = None) -> Run:
        return _observed(bench, experiment, engine, observation, seed)

    with (
        bench.as_before(experiment),
        interrupts_kept() as raise_lost,
        bench.progress.task(show=progress) as bar,
    ):

        def tell(text: str, fraction: float) -> None:
            raise_lost()
            bar.report(text, fraction)

        return compare_engines(
            bench.module,
            trial,
            apart,
            name=bench.name,
            steps=steps,
            dropout=dropout,
            ask_seeds=seeds,
            cuts=bench.options.compute_optimizer,
            progress=tell,
            edit=edit,
        )


def _observed(
    bench: Bench, experiment: Experiment, engine: str, observation: Observation | None, seed: int | None
) -> Run:
    """Go back to the start and run the steps; what is built apart keeps the options that it was given."""
    import torch

    if bench.engine.name != engine:
        bench.engine = bench.choose(engine)
    experiment.start.put_back()
    if seed is not None:
        torch.manual_seed(seed)
    step = experiment.step if observation is None else observation.stepping(experiment.step)
    bench.recording = recording = bench.recorder(replace(experiment, step=step))
    try:
        return recording.run(0, bench.options.replace(print_memory_stats=False), show=False)
    finally:
        bench.recording = None
