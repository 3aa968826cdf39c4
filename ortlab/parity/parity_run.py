"""PyTorch and ONNX Runtime run the last step of a lab from one start: PyTorch three times, ONNX Runtime three times.

Where ONNX Runtime's compute optimizer hides where the runs part, it runs a fourth time, to look for that without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from ortlab import units
from ortlab.errors import BuildError, ExecutionError, StepError
from ortlab.parity.observation import Observation
from ortlab.parity.parity import OUTPUT, Parity, Site, TensorPair
from ortlab.parity.parity_search import Locating, Runs, checklist
from ortlab.parity.tensor_comparison import (
    Compared,
    Jitter,
    Reference,
    WithoutDropout,
    deterministic,
    limits,
    pairs,
    stored,
)
from ortlab.runs.experiment import check_count
from ortlab.runs.interrupts import interrupts_kept, say

if TYPE_CHECKING:
    from ortlab.engine.capture import Capture, Edit
    from ortlab.engine.tracing.taps import Mark
    from ortlab.records.runs import Run
    from ortlab.runs.bench import Bench
    from ortlab.runs.experiment import Experiment

_OTHER_SEED: Final = 20011

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
    with (
        bench.as_before(experiment),
        interrupts_kept() as raise_lost,
        bench.progress.task(show=progress) as bar,
    ):

        def tell(text: str, fraction: float) -> None:
            raise_lost()
            bar.report(text, fraction)

        return _compared(bench, experiment, dropout=dropout, ask_seeds=seeds, edit=edit, progress=tell)


@contextmanager
def _apart(bench: Bench, **changes: object) -> Iterator[Callable[[], None]]:
    """Let ONNX Runtime build anew in the block, with other options if there are some, and forget that at its end."""
    # Yields what frees the sessions only.
    from ortlab.engine.kept_builds import built_apart

    with ExitStack() as stack:
        engines = bench.engines(None).values()
        freeing = [stack.enter_context(built_apart(engine, **changes)) for engine in engines]

        def free_sessions() -> None:
            for free in freeing:
                free()

        yield free_sessions


def _observed(
    bench: Bench,
    experiment: Experiment,
    engine: str,
    observation: Observation | None = None,
    *,
    seed: int | None = None,
) -> Run:
    """Go back to the start and run the steps; what is built apart keeps the options that it was given."""
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


def _compared(
    bench: Bench,
    experiment: Experiment,
    *,
    dropout: bool,
    ask_seeds: bool,
    edit: Edit | None,
    progress: Callable[[str, float], None],
) -> Parity:
    module, steps, cuts = bench.module, experiment.count, bench.options.compute_optimizer
    trial = partial(_observed, bench, experiment)
    count = 8 if ask_seeds else 6

    def tell(number: int, text: str) -> None:
        progress(f"{text} (run {number} of {count})", (number - 1) / count)

    with ExitStack() as stack:
        stack.enter_context(deterministic())
        without = WithoutDropout()
        eager_store = stack.enter_context(stored())
        ort_store = stack.enter_context(stored())
        with nullcontext() if dropout else without:
            reference = Reference(eager_store)
            watched = Observation(module, reference.take)
            tell(1, "PyTorch")
            eager = _watched_run(trial, "eager", watched)
            again, rounded = Compared(eager_store), Compared(eager_store)
            tell(2, "PyTorch again")
            _same_data(eager, _watched_run(trial, "eager", Observation(module, again.take)))
            tell(3, "PyTorch with other rounding")
            _same_data(
                eager, _watched_run(trial, "eager", Observation(module, rounded.take, change=Jitter()))
            )
            ort, ort_again = Compared(eager_store, ort_store, facts=True), Compared(ort_store)
            plain = Compared(ort_store)
            with _apart(bench):
                tell(4, "ONNX Runtime")
                found, capture = _captured_run(trial, module, ort, edit)
                _same_data(eager, found)
            with _apart(bench) as free_sessions:  # exported again, as a trace may draw other random numbers
                tell(5, "ONNX Runtime again")
                with _receiving(capture, module, ort_again) as observation:
                    trial("ort", observation)
                tell(6, "ONNX Runtime without capture")
                free_sessions()
                with _editing(edit) if edit else nullcontext():
                    unseen = trial("ort", _Ends(module, plain.take))
            _check_lengths(eager, found)
            bounds = limits(reference, rounded, (again, ort_again), watched.structure.own_use)
            compared = pairs(reference, ort, bounds, _by_site(capture.missing, steps))
            locating = Locating(compared, watched.structure, _describe(module))
            if cuts and locating.is_hidden:
                progress("ONNX Runtime with the compute optimizer off (one run more)", (count - 1) / count)
                whole = Compared(eager_store)
                try:
                    with _apart(bench, compute_optimizer=False):
                        _same_data(eager, _captured_run(trial, module, whole, edit)[0])
                    locating.look_at(whole)
                except (BuildError, ExecutionError) as error:
                    locating.give_up(error)
        runs = Runs(
            eager=eager,
            ort=found,
            drops=without.found,
            draws=watched.drew,
            again=again,
            ort_again=ort_again,
            plain=plain,
            plain_losses=tuple(unseen.losses),
            seeds=_seeds(trial, tell) if ask_seeds else (),
        )
        forward, backward, update = locating.divergences
        return Parity(
            model=bench.name,
            reference="eager",
            candidate="ort",
            steps=steps,
            pairs=compared,
            losses=tuple(zip(eager.losses, found.losses, strict=True)),
            forward=forward,
            backward=backward,
            update=update,
            checks=checklist(runs, bounds, dropout=dropout, steps=steps),
            notes=(*locating.notes, *_notes(compared, eager)),
            written_bytes=eager_store.number_of_bytes // steps,
        )


class _Ends(Observation):
    """Watches only what the steps leave behind: the parameters."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Put no hooks anywhere."""
        yield


def _watched_run(trial: Callable[..., Run], engine: str, observation: Observation) -> Run:
    with observation.watching():
        return trial(engine, observation)


def _captured_run(
    trial: Callable[..., Run], module: torch.nn.Module, compared: Compared, edit: Edit | None
) -> tuple[Run, Capture]:
    capture = _capture(edit)
    with _receiving(capture, module, compared) as observation:
        return trial("ort", observation), capture


@contextmanager
def _receiving(capture: Capture, module: torch.nn.Module, compared: Compared) -> Iterator[Observation]:
    observation = Observation(module, compared.take, capture)
    capture.receive = observation.captured
    with observation.watching(), capture.active():
        yield observation


@contextmanager
def _editing(edit: Edit) -> Iterator[None]:
    """Let sessions be made of graphs that are changed, and hand nothing over."""
    with _capture(edit, hands_over=False).active():
        yield


def _capture(edit: Edit | None, *, hands_over: bool = True) -> Capture:
    from ortlab.engine.capture import Capture  # brings onnxruntime along, which a lab imports apart

    return Capture(lambda _mark, _tensor: None, edit, hands_over=hands_over)


def _by_site(missing: Mapping[Mark, str], steps: int) -> dict[Site, str]:
    """Return why tensors, and their gradients, are missing in each step."""
    return {
        Site(step, mark.module, mark.call, kind, mark.name): words
        for mark, words in missing.items()
        for step in range(1, steps + 1)
        for kind in (mark.kind, f"{mark.kind} gradient")
    }


def _seeds(
    trial: Callable[..., Run], tell: Callable[[int, str], None]
) -> tuple[tuple[float | None, ...], ...]:
    tell(7, "PyTorch with its dropout")
    first = trial("eager")
    tell(8, "PyTorch with another seed")
    return tuple(first.losses), tuple(trial("eager", seed=_OTHER_SEED).losses)


def _same_data(first: Run, other: Run) -> None:
    if first.data_digest != other.data_digest:
        raise StepError(
            "The runs did not get the same data.",
            why="Each call of the step draws its batch from an iterator, or makes a new one, and a run cannot go back.",
            fix="Compare with a step that uses batches made before: batch = next(iterator), then lab.step(fn) on it.",
        )


def _check_lengths(eager: Run, ort: Run) -> None:
    if len(eager.losses) != len(ort.losses):
        raise StepError(
            f"PyTorch made {len(eager.losses)} steps, ONNX Runtime {len(ort.losses)}.",
            fix="Compare runs of the same number of steps.",
        )


def _describe(module: torch.nn.Module) -> Callable[[str], tuple[str, str]]:
    from ortlab.engine.inspection.places import forward_line  # as in `_capture`

    parts = dict(module.named_modules())

    def describe(path: str) -> tuple[str, str]:
        part = parts.get(path)
        return ("", "") if part is None else (type(part).__name__, forward_line(part))

    return describe


def _notes(compared: Sequence[TensorPair], eager: Run) -> tuple[str, ...]:
    notes = []
    for pair in compared:
        if pair.site.kind == OUTPUT and pair.reference and pair.reference.nan:
            where = pair.site.module or "the model"
            notes.append(
                f"Step {pair.site.step}: PyTorch itself makes nan first in {where} "
                f"({pair.reference.nan} of {pair.reference.size} numbers); nan at the same places counts as equal. "
                "Look for its cause there, with PyTorch alone: what follows it says little."
            )
            break
    bad = [
        number
        for number, loss in enumerate(eager.losses, start=1)
        if loss is not None and not math.isfinite(loss)
    ]
    if bad:
        notes.append(
            f"PyTorch's own loss is not finite in step {bad[0]}. Compare a step before it: steps={max(1, bad[0] - 1)}."
            if bad[0] > 1
            else "PyTorch's own loss is not finite in step 1. Go back to weights with which it is: lab.restore()."
        )
    unseen = len([one for one in compared if one.distance is None])
    if unseen:
        notes.append(
            f"{units.count(unseen)} of {units.count(len(compared))} tensors are not compared; each says why in "
            "lab.parity().table()."
        )
    return tuple(notes)
