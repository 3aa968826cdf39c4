"""What a lab does to let subscribers see its model, and to write what ORTModule's own subscriber writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortlab.errors import LedgerError, OptionError
from ortlab.parity.subscribers import Subscription

if TYPE_CHECKING:
    import torch


class SubscribingLab(ABC):
    """The base of `Lab` that takes subscribers; the abstract part is the lab's."""

    module: torch.nn.Module

    def subscribe(self, *subscribers: Any) -> Subscription:
        """Let subscribers see the model's activations and gradients from the next call on, on any engine.

        The next call exports the model anew, with an operator behind each output that calls Python; when the
        subscription ends, the export of before is used again.

        Parameters
        ----------
        *subscribers
            Objects of `ortlab.TensorSubscriber`, or of upstream's `SubscriberBase`: `StatisticsSubscriber` for one. Of
            other subclasses of `SubscriberBase`, what runs in hooks happens on ONNX Runtime in the export only.

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
        >>> class Largest(ortlab.TensorSubscriber):
        ...     def activation(self, name, tensor, step):
        ...         print(step, name, float(tensor.abs().max()))
        >>> with lab.subscribe(Largest()):
        ...     lab.step(train, n=2)
        """
        from ortlab.engine.subscriptions import is_subscriber, subscribed

        self._check_usable("take subscribers")
        wrong = [one for one in subscribers if not is_subscriber(one)]
        if wrong or not subscribers:
            what = f"{wrong[0]!r} is no subscriber." if wrong else "There is no subscriber."
            raise OptionError(what, fix="Derive it from ortlab.TensorSubscriber, and pass an object of it.")
        return Subscription(subscribed(self.module, subscribers), subscribers)

    def write_activations(
        self,
        output_dir: str | Path,
        *,
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
    ) -> Subscription:
        """Write the statistics of every activation and gradient into a folder, as ORTModule's `StatisticsSubscriber`.

        A step is a call of the model; they count from 0, from this call on. The standard deviation is right, where
        1.19.2 writes a wrong one (row T12). `ortlab.compare_folders` reads the folders of two runs.

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
        Subscription
            End it with `close()`, or use it in a with block.

        Raises
        ------
        LedgerError
            If the folder exists and may not be deleted.
        OptionError
            If the steps are no range.
        StepError
            If a step is running.

        Examples
        --------
        >>> with lab.write_activations("ort_out", start_step=10, end_step=12):
        ...     lab.step(train, n=12)
        """
        from ortlab.engine.subscriptions import hooks

        self._check_usable("write activations")
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
            import shutil

            if any(not one.name.startswith(("step_", ".")) for one in folder.iterdir()):
                raise LedgerError(
                    f"{folder} holds other things than steps, so it is not deleted.",
                    fix="Give a folder that a StatisticsSubscriber has written, or another one.",
                )
            shutil.rmtree(folder)
        writer = hooks().StatisticsSubscriber(str(folder), start_step=start_step, end_step=end_step)
        return self.subscribe(writer)

    @abstractmethod
    def _check_usable(self, what: str) -> None: ...
