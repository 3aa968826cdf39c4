"""The magics that run the step and look at what it did: step, rerun, messages, parity, density."""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Final

from IPython.core.magic import Magics, magics_class
from IPython.display import display

from ortlab.errors import ArgumentError
from ortlab.lab.following import observe
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.command import (
    CHANGES,
    LAB,
    NO_MEMORY,
    STEPS,
    Line,
    cell,
    flag,
    line,
    no,
    takes,
    whole,
)
from ortlab.notebook.magics.step_cell import StepCell
from ortlab.records.density import Density, DensityReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from ortlab.lab.lab import Lab
    from ortlab.parity.parity import Parity
    from ortlab.records.messages import Messages
    from ortlab.records.runs import Run

_REDRAW_SECONDS: Final = 0.25
"""Shortest time between two drawings while a run goes on: each is a message to the browser."""


@magics_class
class ExperimentMagics(Magics):
    """Magics over `Lab.step`, `Lab.rerun`, `Lab.messages`, `Lab.parity` and `Lab.density`."""

    shell: InteractiveShell

    @cell(
        "ort_step",
        whole("-n", "STEPS", default="1"),
        takes("--optimizer", "NAME", read=arguments.variable),
        NO_MEMORY,
        LAB,
    )
    def ort_step(self, args: Line, line: str, cell: str) -> Run:
        """Run the cell, which is one training step, N times; time it and record it as a run.

        ::

            %%ort_step [-n STEPS] [--optimizer NAME] [--no-memory] [--lab NAME]
            (the step)

        Arguments:

        - ``-n STEPS``: how many times, 1 if not given; a number or ``$name``.
        - ``--optimizer NAME``: variable of the optimizer to time and restore. Optimizers that the cell, or a
          function it calls, mentions are found without.
        - ``--no-memory``: do not measure step memory. On a CPU that runs the cell a few more times, two as a rule, and
          puts weights, optimizer, random state and the cell's variables back to where the N steps ended.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        The loss is what the cell assigns to ``loss``, or what it calls ``backward()`` on. Variables of the
        cell stay, as in any other cell. If the cell raises or is interrupted, weights, optimizer, random state
        and runs are as they were before it.

        Example::

            %%ort_step -n 20
            loss = model(**batch).loss
            loss.backward(); optimizer.step(); optimizer.zero_grad()

        The same in Python::

            def step():
                loss = model(**batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                return loss

            run = lab.step(step, n=20)
        """
        lab = args.lab
        steps, optimizer = args.n, args.optimizer
        step = StepCell(self.shell, line, cell)
        watch = [*step.objects(), *([] if optimizer is None else [optimizer])]
        return lab.step(step, n=steps, watch=watch, source=step.source, memory=args.memory)

    @line(STEPS, NO_MEMORY, CHANGES, LAB)
    def ort_rerun(self, args: Line) -> Run:
        """Go back to the start of the last step and do the same steps again, with other options if you name some.

        ::

            %ort_rerun [-n STEPS] [option=value ...] [--no-memory] [--lab NAME]

        Arguments:

        - ``-n STEPS``: how many steps, as many as before if not given; a number or ``$name``.
        - ``option=value``: options for these steps only; ``engine=ort``, ``engine=eager`` or ``engine=compile``
          chooses who executes. ``%ort_options`` lists all; values as in ``%ort_set``, which is the magic that changes
          what later steps run with.
        - ``--no-memory``: do not measure step memory.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Weights, buffers, optimizer state and random state are restored bit for bit first. If the rerun fails
        or is interrupted, they are as they were before it. The options are so in any case.

        Example::

            %ort_rerun memory_level=1

        The same in Python::

            run = lab.rerun(memory_level=1)
        """
        return args.lab.rerun(args.n, memory=args.memory, **args.changes)

    @line(
        whole("--run", "RUN"),
        takes("--level", "LEVEL", default=""),
        takes("--source", "SOURCE", default=""),
        takes("--stage", "STAGE", default=""),
        takes("--text", "TEXT", default=""),
        LAB,
    )
    def ort_messages(self, args: Line) -> Messages:
        """Show what torch's exporter, ORTModule and ONNX Runtime have said, by run.

        ::

            %ort_messages [--run RUN] [--level LEVEL] [--source SOURCE] [--stage STAGE] [--text TEXT] [--lab NAME]

        Arguments:

        - ``--run RUN``: number of a run; 0 for what was said outside runs; a number or ``$name``.
        - ``--level LEVEL``: this level and worse ones: ``VERBOSE``, ``INFO``, ``WARNING``, ``ERROR``, ``FATAL``.
        - ``--source SOURCE``: ``exporter``, ``ORTModule`` or ``"ONNX Runtime"``.
        - ``--stage STAGE``: ``export``, ``graph``, ``session`` or ``step``.
        - ``--text TEXT``: what a message must contain; case does not matter.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        How much they say is the option ``log_level``: ``%ort_set log_level=DEVINFO``.

        Example::

            %ort_messages --run 2 --level WARNING

        The same in Python::

            lab.messages.of(run=2, level="WARNING")
            lab.messages.table()        # as a data frame
        """
        return args.lab.messages.of(
            run=args.run, level=args.level, source=args.source, stage=args.stage, text=args.text
        )

    @line(STEPS, flag("--dropout"), no("seeds"), LAB)
    def ort_parity(self, args: Line) -> Parity:
        """Run the last step on PyTorch and on ONNX Runtime, and show where their numbers part first.

        ::

            %ort_parity [-n STEPS] [--dropout] [--no-seeds] [--lab NAME]

        Arguments:

        - ``-n STEPS``: steps of each run, 2 if not given; a number or ``$name``.
        - ``--dropout``: leave dropout as it is; the engines draw different masks. Without, it lets everything pass.
        - ``--no-seeds``: do not ask what another seed changes, which takes two more runs of PyTorch.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Every run starts from the same weights, optimizer and random state. What each module takes and returns, the
        gradients of that, the parameters' gradients and the updated parameters are compared with what repetition and
        rounding explain. Afterwards, or when it is interrupted, the lab is as it was before.

        Example::

            %ort_parity -n 3

        The same in Python::

            lab.parity(n=3)
        """
        return args.lab.parity(**args.given("n"), dropout=args.dropout, seeds=args.seeds)

    @line(takes("batches", "BATCH", nargs="*"), whole("--measure", "ROUNDS"), LAB)
    def ort_density(self, args: Line) -> DensityReport | None:
        """Say how much of the model's inputs is padding or ignored, and what to do about it.

        ::

            %ort_density [--measure ROUNDS] [--lab NAME]
            %ort_density BATCH ... [--lab NAME]
            %ort_density on|off [--lab NAME]

        Arguments:

        - ``BATCH``: variables with batches to count; without, what the last run has counted.
        - ``on``: count each step from now on, and show the table here while steps run; ``off`` ends that.
        - ``--measure ROUNDS``: run the last step with and without the sparsity switches, in turns.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Example::

            %ort_density batch

        The same in Python::

            lab.density(batch)
            lab.set(print_input_density=True)  # on
            lab.density(measure=3)
        """
        lab = args.lab
        if args.batches in (["on"], ["off"]):
            if args.has("measure"):
                raise ArgumentError(f"{args.batches[0]} and --measure exclude each other.")
            lab.set(print_input_density=args.batches == ["on"])
            (follow if args.batches == ["on"] else unfollow)(lab)
            return None
        measure = args.measure or 0
        return lab.density(
            *(arguments.variable(name, args.variables) for name in args.batches), measure=measure
        )


def follow(lab: Lab) -> None:
    """Show what a lab counts in the output of this cell, at most four times a second, and once after each run."""
    if lab not in _followed:
        _followed[lab] = _Redrawing(lab)
        observe(lab, _followed[lab])
    _followed[lab].handle = display(DensityReport(Density(), "no step so far"), display_id=True)


def unfollow(lab: Lab) -> None:
    """Stop redrawing the table, which stays as it is; do nothing if there is none."""
    if lab in _followed:
        _followed[lab].handle = None


class _Redrawing:
    """Draws what the steps of a lab have counted, at its events; the lab keeps this object, which holds it weakly."""

    def __init__(self, lab: Lab) -> None:
        self.handle: DisplayHandle | None = None
        self._lab = weakref.ref(lab)
        self._drawn_at = 0.0

    def __call__(self, event: str) -> None:
        """Redraw where a step or a run has ended."""
        lab, handle = self._lab(), self.handle
        if lab is None or handle is None or not lab.options.print_input_density:
            return
        now = time.monotonic()
        is_step = event.startswith("progress:Step ") and now - self._drawn_at >= _REDRAW_SECONDS
        if event == "runs" or is_step:
            self._drawn_at = now
            handle.update(lab.density())


_followed: Final[weakref.WeakKeyDictionary[Lab, _Redrawing]] = weakref.WeakKeyDictionary()
