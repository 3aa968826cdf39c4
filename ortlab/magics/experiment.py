"""The magics that run an experiment and look at it: step, rerun, compare, plan, graph."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from ortlab.magics import arguments
from ortlab.magics.arguments import Parser
from ortlab.magics.chosen_lab import chosen_lab
from ortlab.magics.command import command
from ortlab.magics.step_cell import StepCell

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.comparison import Comparison
    from ortlab.graphs.stages import Graph
    from ortlab.memory.plan import MemoryPlan
    from ortlab.runs import Run

_STEP = Parser("%%ort_step")
_STEP.add_argument("-n", default="1", metavar="STEPS")
_STEP.add_argument("--optimizer", metavar="NAME")
_STEP.add_lab()

_RERUN = Parser("%ort_rerun")
_RERUN.add_argument("-n", metavar="STEPS")
_RERUN.add_changes()
_RERUN.add_lab()

_COMPARE = Parser("%ort_compare")
_COMPARE.add_argument("numbers", nargs="*", metavar="RUN")
_COMPARE.add_argument("--baseline", metavar="RUN")
_COMPARE.add_lab()

_PLAN = Parser("%ort_plan")
_PLAN.add_lab()

_GRAPH = Parser("%ort_graph")
_GRAPH.add_argument("stage", nargs="?", default="execution", metavar="STAGE")
_GRAPH.add_argument("--save", metavar="PATH")
_GRAPH.add_lab()


@magics_class
class ExperimentMagics(Magics):
    """Magics over `Lab.step`, `Lab.rerun`, `Lab.compare`, `Lab.plan` and `Lab.graph`."""

    shell: InteractiveShell

    @cell_magic
    @no_var_expand
    @command(_STEP)
    def ort_step(self, args: argparse.Namespace, line: str, cell: str) -> Run:
        """Run the cell, which is one training step, N times; time it and record it as a run.

        ::

            %%ort_step [-n STEPS] [--optimizer NAME] [--lab NAME]
            (the step)

        Arguments:

        - ``-n STEPS``: how many times, 1 if not given; a number or ``$name``.
        - ``--optimizer NAME``: variable of the optimizer to time and restore. Optimizers that the cell, or a
          function it calls, mentions are found without.
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
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        steps = arguments.number(args.n, variables, "-n")
        optimizer = arguments.variable(args.optimizer, variables) if args.optimizer else None
        step = StepCell(self.shell, line, cell)
        watch = [*step.objects(), *([] if optimizer is None else [optimizer])]
        return lab.step(step, n=steps, watch=watch, source=step.source)

    @line_magic
    @no_var_expand
    @command(_RERUN)
    def ort_rerun(self, args: argparse.Namespace) -> Run:
        """Go back to the start of the last step and do the same steps with the present options.

        ::

            %ort_rerun [-n STEPS] [option=value ...] [--lab NAME]

        Arguments:

        - ``-n STEPS``: how many steps, as many as before if not given; a number or ``$name``.
        - ``option=value``: options to set first; ``engine=ort``, ``engine=eager`` or ``engine=compile``
          chooses who executes. ``%ort_options`` lists all; values as in ``%ort_set``.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Weights, buffers, optimizer state and random state are restored bit for bit first. If the rerun fails
        or is interrupted, they and the options are as they were before it.

        Example::

            %ort_rerun memory_level=1

        The same in Python::

            run = lab.set(memory_level=1).rerun()
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        steps = None if args.n is None else arguments.number(args.n, variables, "-n")
        changes = arguments.changes(args.changes, variables)
        before: dict[str, Any] = {"engine": lab.engine, **lab.options.to_dict()}
        lab.set(**changes)
        try:
            return lab.rerun(steps)
        except BaseException:
            lab.set(**before)
            raise

    @line_magic
    @no_var_expand
    @command(_COMPARE)
    def ort_compare(self, args: argparse.Namespace) -> Comparison:
        """Hold runs against a baseline: time with a confidence interval, peak memory, loss.

        ::

            %ort_compare [RUN ...] [--baseline RUN] [--lab NAME]

        Arguments:

        - ``RUN ...``: numbers of the runs, as their tables show them; all runs if not given.
        - ``--baseline RUN``: number of the run that the others are held against; the first if not given.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Example::

            %ort_compare 1 3 --baseline 1

        The same in Python::

            comparison = lab.compare(1, 3, baseline=1)
        """
        variables = self.shell.user_ns
        numbers = [arguments.number(text, variables, "%ort_compare") for text in args.numbers]
        baseline = None if args.baseline is None else arguments.number(args.baseline, variables, "--baseline")
        return chosen_lab(args.lab, variables).compare(*numbers, baseline=baseline)

    @line_magic
    @no_var_expand
    @command(_PLAN)
    def ort_plan(self, args: argparse.Namespace) -> MemoryPlan:
        """Show what is kept for the backward pass, and what each recompute plan would save of it.

        ::

            %ort_plan [--lab NAME]

        Arguments:

        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Savings are ORT's predictions for the shapes of the first batch, in bytes. Switch a plan on with
        ``%ort_set memory_plan=...``, or all of a kind with ``%ort_set memory_level=1``.

        Example::

            %ort_plan

        The same in Python::

            plan = lab.plan()
        """
        return chosen_lab(args.lab, self.shell.user_ns).plan()

    @line_magic
    @no_var_expand
    @command(_GRAPH)
    def ort_graph(self, args: argparse.Namespace) -> Graph:
        """Show an ONNX graph of the last build: its operators, inputs and outputs; save it if asked to.

        ::

            %ort_graph [STAGE] [--save PATH] [--lab NAME]

        Arguments:

        - ``STAGE``: ``exported`` (from PyTorch), ``processed``, ``optimized`` (before the gradient is added),
          ``gradient``, or ``execution`` (what runs), which is taken if not given.
        - ``--save PATH``: file to write the graph to; a path, quoted if it has spaces, or ``$name``.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Example::

            %ort_graph optimized --save "my graphs/optimized.onnx"

        The same in Python::

            graph = lab.graph("optimized")
            graph.save("my graphs/optimized.onnx")
        """
        graph = chosen_lab(args.lab, self.shell.user_ns).graph(args.stage)
        if args.save:
            path = graph.save(arguments.path(args.save, self.shell.user_ns))
            print(f"Saved to {path}")  # noqa: T201 - the graph is returned, so this is the only place to say it
        return graph
