"""Subscribers that see a model's activations and gradients, on any engine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlab.errors import LedgerError, OptionError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ortlab.runs.bench import Bench


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
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in numbers) or (
        last is not None and last <= first
    ):
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
