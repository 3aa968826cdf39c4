"""The magic that sweeps over a grid of options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from ortlab.errors import ArgumentError
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.chosen_lab import chosen_lab
from ortlab.notebook.magics.command import command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.studies.sweep import Sweep

_SWEEP = Parser("%ort_sweep")
_SWEEP.add_argument("grid", nargs="*", metavar="option=value,value")
_SWEEP.add_argument("-n", metavar="STEPS")
_SWEEP.add_argument("--rounds", metavar="ROUNDS")
_SWEEP.add_argument("--resume", action="store_true")
_SWEEP.add_lab()


@magics_class
class SweepMagics(Magics):
    """The magic over `Lab.sweep`."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_SWEEP)
    def ort_sweep(self, args: argparse.Namespace) -> Sweep:
        """Try every combination of some options from the start of the last step, and compare them.

        ::

            %ort_sweep option=value,value ... [engine=ort,eager,compile] [-n STEPS] [--rounds ROUNDS] [--lab NAME]
            %ort_sweep $GRID [-n STEPS] [--rounds ROUNDS] [--lab NAME]
            %ort_sweep --resume [--lab NAME]

        Arguments:

        - ``option=value,value``: the values to try; what is not named stays as the lab is set. Values are as in
          ``%ort_set``; ``$name`` stands for the values in a list. An option that holds a list takes several lists:
          ``memory_plan=[],['Gelu+:1:-1']``.
        - ``$GRID``: variable with a dict of such lists, or with a list of points (dicts).
        - ``-n STEPS``: steps of each run, as many as the last step had if not given; a number or ``$name``.
        - ``--rounds ROUNDS``: runs of each point, 1 if not given; every other round goes backwards, so that a drift of
          the machine favours no point.
        - ``--resume``: make the runs that are missing of the sweep that was interrupted last.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Every run starts from the same weights, optimizer and random state. A point that fails is recorded with the
        reason, and the sweep goes on. Afterwards, or when it is interrupted, the lab is as it was before.

        Example::

            %ort_sweep memory_level=0,1,2 engine=ort,eager -n 20 --rounds 2

        The same in Python::

            sweep = lab.sweep({"memory_level": [0, 1, 2], "engine": ["ort", "eager"]}, n=20, rounds=2)
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        if args.resume:
            if args.grid or args.n is not None or args.rounds is not None:
                raise ArgumentError(
                    "A sweep that is resumed has its points, steps and rounds already.",
                    fix="%ort_sweep --resume",
                )
            unfinished = [sweep for sweep in lab.sweeps if not sweep.complete]
            if not unfinished:
                raise ArgumentError(
                    "There is no sweep to resume.",
                    why="None of this lab was interrupted.",
                    fix="%ort_sweep memory_level=0,1,2",
                )
            return lab.sweep(resume=unfinished[-1])
        if not args.grid:
            raise ArgumentError(
                "%ort_sweep needs options with the values to try.", fix="%ort_sweep memory_level=0,1,2"
            )
        steps = None if args.n is None else arguments.number(args.n, variables, "-n")
        rounds = 1 if args.rounds is None else arguments.number(args.rounds, variables, "--rounds")
        return lab.sweep(arguments.grid(args.grid, variables), n=steps, rounds=rounds)
