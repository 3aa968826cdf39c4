"""Subscribers that see a model's activations and gradients, on any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.errors import OptionError
from ortlab.parity.subscribers import Subscription

if TYPE_CHECKING:
    from ortlab.runs.bench import Bench


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
