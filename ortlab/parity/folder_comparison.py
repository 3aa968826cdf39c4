"""Subscribers that see activations and gradients on any engine; and runs compared by the folders that they wrote."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ortlab import units
from ortlab.errors import LedgerError, OptionError
from ortlab.parity.parity import (
    DIFFERS,
    INSPECTED,
    OUTPUT,
    OUTPUT_GRADIENT,
    Distance,
    Divergence,
    Parity,
    Site,
    TensorPair,
)
from ortlab.parity.upstream_folders import (
    FORWARD,
    Activation,
    ActivationFolder,
    ActivationStep,
    listed,
    output_of,
    read_folder,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from ortlab.runs.bench import Bench


UNITS: Final = 2.0**8
"""Units of rounding of the type up to which two tensors agree; of float32, 3e-5 of the largest entry."""

_EPSILON: Final = {"torch.float64": 2.0**-52, "torch.float16": 2.0**-10, "torch.bfloat16": 2.0**-7}
_FLOAT32: Final = 2.0**-23


def compare_folders(
    reference: str | Path | ActivationFolder,
    candidate: str | Path | ActivationFolder,
    *,
    tolerance: float | None = None,
) -> Parity:
    """Compare two runs tensor by tensor from what `StatisticsSubscriber` wrote of them, here or on a cluster.

    The files hold minimum, maximum, mean, counts and the first 128 entries of each tensor, so that is what is compared:
    tensors that differ elsewhere only, and by little, may pass. Standard deviations are left out, since those of 1.19.2
    are wrong. Tensors are aligned by upstream's names, whatever order they were written in.

    Parameters
    ----------
    reference, candidate
        Folders of the two runs, PyTorch's first: `output_dir` of the subscribers, or `merge_pt` and `merge_ort`.
    tolerance
        Difference, relative to the largest entry, up to which two tensors agree; by default 256 units of rounding of
        their type: 3e-5 for float32.

    Returns
    -------
    Parity
        The record, with the first divergence forward and backward. What is missing, cut short or of another type stands
        in `notes`.

    Raises
    ------
    LedgerError
        If a folder cannot be read, or both have no step, or no tensor, in common.
    OptionError
        If the tolerance is no number from 0 on.

    Examples
    --------
    >>> ortlab.parity.compare_folders("pt_out", "ort_out").first
    """
    if tolerance is not None and not units.is_tolerance(tolerance):
        raise OptionError(
            f"The tolerance must be a number from 0 on, not {tolerance!r}.", fix="tolerance=1e-4"
        )
    ours, theirs = (
        one if isinstance(one, ActivationFolder) else read_folder(one) for one in (candidate, reference)
    )
    numbers = sorted({one.number for one in theirs.steps} & {one.number for one in ours.steps})
    if not numbers:
        raise LedgerError(
            "The two runs have no step in common.",
            why=f"{theirs.path} has {_steps(theirs)}, {ours.path} has {_steps(ours)}.",
            fix="Record the same steps: start_step and end_step of both subscribers.",
        )
    pairs: list[TensorPair] = []
    both = 0
    for number in numbers:
        left, right = theirs.step(number), ours.step(number)
        assert left is not None  # noqa: S101 - the number is of both
        assert right is not None  # noqa: S101 - as above
        made = _pairs(left, right, tolerance)
        both += sum(one.reference is not None and one.candidate is not None for one in made)
        pairs += made
    if not both:
        raise LedgerError(
            "The two runs have no tensor in common, so they are of two models.",
            why=f"{theirs.path} has {_examples(theirs)}; {ours.path} has {_examples(ours)}.",
            fix="Give two runs of one model; subscribe before or after wrapping, to the same module.",
        )
    return Parity(
        _model(theirs),
        theirs.path,
        ours.path,
        len(numbers),
        tuple(pairs),
        forward=_divergence("forward", pairs, OUTPUT),
        backward=_divergence("backward", pairs, OUTPUT_GRADIENT),
        notes=_notes(theirs, ours, numbers, pairs),
    )


# ---- pairs -------------------------------------------------------------------------------------------------------


def _pairs(left: ActivationStep, right: ActivationStep, tolerance: float | None) -> list[TensorPair]:
    made = [
        _pair(left.number, one, right.find(one.name, one.direction), tolerance) for one in left.activations
    ]
    for one in right.activations:
        if left.find(one.name, one.direction) is None:
            note = "only here: the reference has no such file"
            made.append(TensorPair(_site(left.number, one), None, one.statistics, note=note))
    return made


def _pair(step: int, one: Activation, other: Activation | None, tolerance: float | None) -> TensorPair:
    site = _site(step, one)
    if other is None:
        note = "no such file: ONNX Runtime may have left out what nothing needs, or the folder is not whole"
        return TensorPair(site, one.statistics, None, note=note)
    left, right = one.statistics, other.statistics
    if left.shape != right.shape:
        note = f"shapes differ: {list(left.shape)} and {list(right.shape)}"
        return TensorPair(site, left, right, note=note)
    epsilon = max(_EPSILON.get(facts.dtype, _FLOAT32) for facts in (left, right))
    limit = UNITS * epsilon if tolerance is None else float(tolerance)
    note = f"types differ: {left.dtype} and {right.dtype}" if left.dtype != right.dtype else ""
    return TensorPair(site, left, right, _distance(one, other), 0.0, limit, note)


def _site(step: int, one: Activation) -> Site:
    module, output = output_of(one.name)
    kind = OUTPUT if one.direction == FORWARD else OUTPUT_GRADIENT
    if output is None:
        return Site(step + 1, "", 0, INSPECTED, f"{one.name} ({one.direction})")
    return Site(step + 1, module, one.calls, kind, str(output))


def _distance(one: Activation, other: Activation) -> Distance:
    """Return the largest difference that the files tell, relative to the largest entry of the reference."""
    left, right = one.statistics, other.statistics
    if (left.nan, left.inf) != (right.nan, right.inf):
        return Distance(math.inf, math.inf)
    pairs = [(left.minimum, right.minimum), (left.maximum, right.maximum), (left.mean, right.mean)]
    apart = [_apart(a, b) for a, b in pairs]
    # An entry that is printed with its last place one off may be equal.
    printed = max(one.resolution, other.resolution) * 1.01
    entries = [_apart(a, b) for a, b in zip(left.sample, right.sample, strict=False)]
    largest = max([*apart, *(entry for entry in entries if entry > printed)], default=0.0)
    if largest == 0:
        return Distance(0.0, 0.0)
    finite = [abs(value) for value in (left.minimum, left.maximum, *left.sample) if math.isfinite(value)]
    scale = max(finite, default=0.0)
    return Distance(largest / scale if scale else math.inf, largest)


def _apart(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf


def _divergence(phase: str, pairs: Sequence[TensorPair], kind: str) -> Divergence | None:
    for pair in pairs:
        site = pair.site
        inspected = site.kind == INSPECTED and site.name.endswith(f"({phase})")
        if (site.kind == kind or inspected) and pair.verdict == DIFFERS:
            what = "output" if phase == "forward" else "gradient"
            reason = f"its {what} is the first, in the order of the reference, that differs"
            module = site.module or site.name
            return Divergence(phase, module, module.rpartition("_")[0] or module, "", pair, reason)
    return None


# ---- what to know ------------------------------------------------------------------------------------------------


def _notes(
    theirs: ActivationFolder, ours: ActivationFolder, numbers: list[int], pairs: Sequence[TensorPair]
) -> tuple[str, ...]:
    notes = [
        f"Step 1 is the folder step_0; compared are {listed([f'step_{number}' for number in numbers])}.",
        "Compared are minimum, maximum, mean, counts and the first 128 entries: the files hold no more.",
    ]
    if {one.number for one in theirs.steps} != {one.number for one in ours.steps}:
        notes.append(
            f"Runs of different length: {theirs.path} has {_steps(theirs)}, {ours.path} {_steps(ours)}."
        )
    for folder in (theirs, ours):
        notes += [f"{folder.path}: {problem}" for problem in folder.all_problems]
    for word, absent in (("the candidate", "candidate"), ("the reference", "reference")):
        missing = sum(getattr(pair, absent) is None for pair in pairs)
        if missing:
            notes.append(f"{missing} of {len(pairs)} tensors are missing in {word}.")
    types = sorted({pair.note for pair in pairs if pair.note.startswith("types differ")})
    if types:
        notes.append(
            f"The runs computed in different types, so rounding is that of the coarser: {'; '.join(types)}."
        )
    notes += _strange(theirs, numbers) + _strange(ours, numbers)
    held = [(folder, one) for folder in (theirs, ours) for step in folder.steps for one in step.activations]
    repeated = sorted({one.name for _, one in held if one.calls > 1})
    if repeated:
        notes.append(
            f"Called several times in a step, of which upstream keeps the last only: {listed(repeated)}."
        )
    wrong = dict.fromkeys(folder.path for folder, one in held if one.std_is_impossible)
    if wrong:
        notes.append(
            f"The standard deviations in {' and '.join(wrong)} are impossible: 1.19.2 computes them wrongly. They are "
            "not compared."
        )
    return tuple(notes)


def _strange(folder: ActivationFolder, numbers: list[int]) -> list[str]:
    """Say where a run has its first nan or infinity."""
    for step in folder.steps:
        for one in step.activations:
            if step.number in numbers and (one.statistics.nan or one.statistics.inf):
                what = f"{one.statistics.nan} nan and {one.statistics.inf} infinite"
                where = f"{one.name} ({one.direction}) of step_{step.number}"
                return [f"{folder.path}: the first entries that are no numbers are in {where}: {what}."]
    return []


def _model(folder: ActivationFolder) -> str:
    """Return the class of the model, whose depth is 1 and whose number is 0."""
    for step in folder.steps:
        for one in step.activations:
            if one.depth == 1:
                return one.module
    return "model"


def _steps(folder: ActivationFolder) -> str:
    first, last = folder.steps[0].number, folder.steps[-1].number
    return f"step_{first} only" if first == last else f"step_{first} to step_{last}"


def _examples(folder: ActivationFolder) -> str:
    names = list(dict.fromkeys(one.name for step in folder.steps for one in step.activations))
    return listed(names) if names else "no tensor"


class Subscription:
    """Subscribers that see a model until `close`, or until the end of a with block.

    Parameters
    ----------
    context
        What subscribes, and ends it.
    subscribers
        The subscribers.
    """

    def __init__(self, context: AbstractContextManager[None], subscribers: Sequence[Any]) -> None:
        self.subscribers = tuple(subscribers)
        self._context: AbstractContextManager[None] | None = context
        context.__enter__()

    @property
    def is_open(self) -> bool:
        """Whether they still see the model."""
        return self._context is not None

    def close(self) -> None:
        """End it; the model has its hooks and attributes of before. Again, it does nothing."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)

    def __enter__(self) -> Self:
        """Return itself: it is subscribed already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()

    def __repr__(self) -> str:
        """Show who is subscribed, and whether it is over."""
        names = ", ".join(type(one).__name__ for one in self.subscribers)
        return f"Subscription({names}, {'closed' if self._context is None else 'open'})"


def StatisticsSubscriber(  # noqa: N802 - upstream's name for what it makes
    output_dir: str | Path,
    *,
    start_step: int | None = None,
    end_step: int | None = None,
    override_output_dir: bool = False,
) -> Any:
    """Make ORTModule's subscriber of that name: it writes the statistics of each activation and gradient to a folder.

    A step is a call of the model; they count from 0, from the subscription on. The standard deviation is right, where
    1.19.2 writes a wrong one. `compare_folders` reads the folders of two runs.

    Parameters
    ----------
    output_dir
        Where a folder for each step is made.
    start_step, end_step
        The first step that is written, and the first that is written no more; None for all.
    override_output_dir
        Whether a folder that is there already is deleted.

    Returns
    -------
    StatisticsSubscriber
        Upstream's object, for `Lab.subscribe`.

    Raises
    ------
    LedgerError
        If the folder exists and may not be deleted.
    OptionError
        If the steps are no range.

    Examples
    --------
    >>> with lab.subscribe(ortlab.parity.StatisticsSubscriber("ort_out", start_step=10, end_step=12)):
    ...     lab.step(train, n=12)
    """
    first, last = 0 if start_step is None else start_step, end_step
    numbers = [one for one in (first, last) if one is not None]
    if not all(units.is_whole(one, 0) for one in numbers) or (last is not None and last <= first):
        raise OptionError(
            f"Steps from {start_step!r} to {end_step!r} (exclusive) are no range.",
            fix="Whole numbers from 0 on, as in start_step=10, end_step=12.",
        )
    folder = Path(output_dir)
    if folder.exists() and not override_output_dir:
        raise LedgerError(
            f"{folder} exists already.",
            fix="Give another folder, or override_output_dir=True to delete it first.",
        )
    if folder.is_dir():
        if any(not one.name.startswith(("step_", ".")) for one in folder.iterdir()):
            raise LedgerError(
                f"{folder} holds other things than steps, so it is not deleted.",
                fix="Give a folder that a StatisticsSubscriber has written, or another one.",
            )
        shutil.rmtree(folder)
    from ortlab.engine.subscriptions import hooks

    return hooks().StatisticsSubscriber(str(folder), start_step=start_step, end_step=end_step)


def subscribe(bench: Bench, *subscribers: Any) -> Subscription:
    """Let subscribers see the model's activations and gradients from the next call on, on any engine.

    The next call exports the model anew, with an operator behind each output that calls Python; when the
    subscription ends, the export of before is used again.

    Parameters
    ----------
    *subscribers
        Objects of `ortlab.parity.TensorSubscriber`, or of upstream's `SubscriberBase`: what
        `ortlab.parity.StatisticsSubscriber` makes for one. Of other subclasses of `SubscriberBase`, what runs in
        hooks happens on ONNX Runtime in the export only.

    Returns
    -------
    Subscription
        End it with `close()`, or use it in a with block.

    Raises
    ------
    OptionError
        If there is none, or one is no subscriber.
    StepError
        If a step is running.

    Examples
    --------
    >>> class Largest(ortlab.parity.TensorSubscriber):
    ...     def activation(self, name, tensor, step):
    ...         print(step, name, float(tensor.abs().max()))
    >>> with lab.subscribe(Largest()):
    ...     lab.step(train, n=2)
    """
    from ortlab.engine.subscriptions import is_subscriber, subscribed

    bench.check_usable("take subscribers")
    wrong = [one for one in subscribers if not is_subscriber(one)]
    if wrong or not subscribers:
        what = f"{wrong[0]!r} is no subscriber." if wrong else "There is no subscriber."
        raise OptionError(
            what, fix="Derive it from ortlab.parity.TensorSubscriber, and pass an object of it."
        )
    subscription = Subscription(subscribed(bench.module, subscribers), subscribers)
    bench.subscriptions.add(subscription)
    return subscription
