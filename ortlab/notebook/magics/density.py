"""The magics about data and arithmetic: the density of a model's inputs, FLOPs, and the balance between processes."""

from __future__ import annotations

import argparse
import time
import weakref
from typing import TYPE_CHECKING, Final

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand
from IPython.display import display

from ortlab.errors import ArgumentError
from ortlab.lab.following import observe
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.chosen_lab import chosen_lab
from ortlab.notebook.magics.command import command
from ortlab.records.density import Density
from ortlab.records.density_report import DensityReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from ortlab.graphs.flop_savings import FlopSavings
    from ortlab.graphs.flops import Flops
    from ortlab.lab.lab import Lab
    from ortlab.ranks.balancing import Balance

_REDRAW_SECONDS: Final = 0.25
"""Shortest time between two drawings while a run goes on: each is a message to the browser."""

_DENSITY = Parser("%ort_density")
_DENSITY.add_argument("batches", nargs="*", metavar="BATCH")
_DENSITY.add_argument("--measure", metavar="ROUNDS")
_DENSITY.add_lab()

_FLOPS = Parser("%ort_flops")
_FLOPS.add_argument("--against", nargs="+", action="extend", default=[], metavar="option=value")
_FLOPS.add_argument("--part", metavar="PART")
_FLOPS.add_lab()

_BALANCE = Parser("%ort_balance")
_BALANCE.add_argument("lengths", metavar="LENGTHS")
_BALANCE.add_argument("--ranks", metavar="RANKS", default="2")
_BALANCE.add_argument("--batch", metavar="SIZE", required=True)
_BALANCE.add_argument("--epochs", metavar="EPOCHS", default="1")
_BALANCE.add_argument("--drop-last", action="store_true")
_BALANCE.add_argument("--step", metavar="NAME")


@magics_class
class DensityMagics(Magics):
    """The magics over `Lab.density`, `Lab.flops` and `ortlab.ranks.balancing.balance`."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_DENSITY)
    def ort_density(self, args: argparse.Namespace) -> DensityReport | None:
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
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        if args.batches in (["on"], ["off"]):
            if args.measure is not None:
                raise ArgumentError(f"{args.batches[0]} and --measure exclude each other.")
            lab.set(print_input_density=args.batches == ["on"])
            (follow if args.batches == ["on"] else unfollow)(lab)
            return None
        measure = 0 if args.measure is None else arguments.number(args.measure, variables, "--measure")
        return lab.density(*(arguments.variable(name, variables) for name in args.batches), measure=measure)

    @line_magic
    @no_var_expand
    @command(_FLOPS)
    def ort_flops(self, args: argparse.Namespace) -> Flops | FlopSavings:
        """Count the FLOPs of the last step, or what a switch saves of them.

        ::

            %ort_flops [--against option=value ...] [--part PART] [--lab NAME]

        Arguments:

        - ``--against option=value ...``: hold the step as the lab is set against one with these options.
        - ``--part PART``: path of the part, where several parts of the model are wrapped.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        The last step is run again while ORT's profiler watches; afterwards the lab is as it was.

        Example::

            %ort_flops --against label_sparse_optimizer=False

        The same in Python::

            lab.flops()
            lab.flops(against={"label_sparse_optimizer": False})
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        if args.against:
            return lab.flops(against=arguments.changes(args.against, variables), part=args.part)
        return lab.flops(part=args.part)

    @line_magic
    @no_var_expand
    @command(_BALANCE)
    def ort_balance(self, args: argparse.Namespace) -> Balance:
        """Deal samples out to processes, as they come and balanced by length, and compare.

        ::

            %ort_balance LENGTHS --batch SIZE [--ranks RANKS] [--epochs EPOCHS] [--drop-last] [--step NAME]

        Arguments:

        - ``LENGTHS``: variable with the samples, or their lengths.
        - ``--batch SIZE``: samples of a batch of one process.
        - ``--ranks RANKS``: processes that train together, 2 if not given.
        - ``--epochs EPOCHS``: 1 if not given.
        - ``--drop-last``: leave out what does not make a step for all ranks.
        - ``--step NAME``: variable with a function that a process calls with its rank to get its step, a function of
          the indices of a batch. The processes are started, the epochs run and timed, and the processes ended.

        Example::

            %ort_balance lengths --ranks 2 --batch 8 --step make_step

        The same in Python::

            from ortlab.ranks import Cluster
            from ortlab.ranks.balancing import balance, measured

            record = balance(lengths, 8, ranks=2)
            with Cluster(2) as cluster:
                record = measured(record, cluster, make_step)
        """
        from ortlab.ranks import Cluster
        from ortlab.ranks.balancing import balance, measured

        variables = self.shell.user_ns
        ranks = arguments.number(args.ranks, variables, "--ranks")
        samples = arguments.variable(args.lengths, variables)
        record = balance(
            samples,
            arguments.number(args.batch, variables, "--batch"),
            ranks=ranks,
            epochs=arguments.number(args.epochs, variables, "--epochs"),
            drop_last=args.drop_last,
        )
        if args.step is None:
            return record
        make_step = arguments.variable(args.step, variables)
        with Cluster(ranks) as cluster:
            return measured(record, cluster, make_step)


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
