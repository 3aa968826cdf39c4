"""The magic that finds the switches responsible."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from ortlab.errors import ArgumentError
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.chosen_lab import chosen_lab
from ortlab.notebook.magics.command import command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.studies.bisection import Bisection

_BISECT = Parser("%ort_bisect")
_BISECT.add_argument("metric", nargs="?", metavar="METRIC")
_BISECT.add_changes()
_BISECT.add_argument("-n", metavar="STEPS")
_BISECT.add_argument("--rounds", metavar="ROUNDS")
_BISECT.add_argument("--tolerance", metavar="TOLERANCE")
_BISECT.add_argument("--resume", action="store_true")
_BISECT.add_lab()


@magics_class
class BisectMagics(Magics):
    """The magic over `Lab.bisect`."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_BISECT)
    def ort_bisect(self, args: argparse.Namespace) -> Bisection:
        """Find the smallest set of switches that causes a change of numbers, time or memory, or a failure.

        ::

            %ort_bisect [METRIC] [option=value ...] [-n STEPS] [--rounds ROUNDS] [--tolerance TOLERANCE] [--lab NAME]
            %ort_bisect [METRIC] --resume [--lab NAME]

        Arguments:

        - ``METRIC``: ``loss``, which is taken if not given; ``parity``, the distance to PyTorch; ``step_ms``;
          ``peak_bytes``; or ``$name`` of a function that takes a run and returns a number.
        - ``option=value ...``: what may be responsible, as ``%ort_set`` takes it; the baseline is then the lab as it is
          set. Without, the switches that the lab has not at their defaults, and the defaults are the baseline.
        - ``-n STEPS``: steps of each run, as many as the last step had if not given; a number or ``$name``.
        - ``--rounds ROUNDS``: pairs of runs in which a set is timed, 4 if not given; up to three times as many where
          the noise hides the answer.
        - ``--tolerance TOLERANCE``: a change up to this is none; a number or ``$name``.
        - ``--resume``: go on with the bisection that was interrupted last.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        One culprit among n switches takes some log2(n) runs. Afterwards, or when it is interrupted, the lab is as it
        was before.

        Example::

            %ort_bisect step_ms aten_backward=false intra_op_spinning=true memory_level=1

        The same in Python::

            lab.bisect("step_ms", changes={"aten_backward": False, "intra_op_spinning": True, "memory_level": 1})
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        how: dict[str, Any] = {}
        words = list(args.changes)
        metric: Any = args.metric or "loss"
        if "=" in metric:  # there is no metric on the line, and what argparse takes for it is a change
            metric, words = "loss", [metric, *words]
        if metric.startswith("$"):
            metric = arguments.variable(metric[1:], variables)
        if words:
            how["changes"] = arguments.changes(words, variables)
        if args.n is not None:
            how["n"] = arguments.number(args.n, variables, "-n")
        if args.rounds is not None:
            how["rounds"] = arguments.number(args.rounds, variables, "--rounds")
        if args.tolerance is not None:
            how["tolerance"] = _tolerance(args.tolerance, arguments.value(args.tolerance, variables))
        if args.resume:
            unfinished = [bisection for bisection in lab.bisections if bisection.outcome == "unfinished"]
            if not unfinished:
                raise ArgumentError(
                    "There is no bisection to resume.",
                    why="None of this lab was interrupted.",
                    fix="%ort_bisect loss memory_level=1 aten_backward=false",
                )
            how["resume"] = unfinished[-1]
        return lab.bisect(metric, **how)


def _tolerance(text: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type] # what is no number raises
    except (TypeError, ValueError):
        raise ArgumentError(f"--tolerance takes a number, not {text!r}.", fix="--tolerance 1e-5") from None
