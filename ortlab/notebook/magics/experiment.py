"""The magics that run an experiment and look at it: step, rerun, compare, plan, graph."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from ortlab.errors import ArgumentError, BuildError, StepError, WrapError
from ortlab.graphs.viewer.embedded import embed_graph
from ortlab.memory.plan import MemoryPlan
from ortlab.memory.saved_plans import SavedPlans, read_saved
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.chosen_lab import chosen_lab
from ortlab.notebook.magics.command import command
from ortlab.notebook.magics.graphs import changes_shown
from ortlab.notebook.magics.step_cell import StepCell

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.graphs.diff import GraphDiff
    from ortlab.graphs.graph_set import GraphSet
    from ortlab.graphs.stages import Graph
    from ortlab.graphs.viewer.embedded import EmbeddedGraph
    from ortlab.lab.lab import Lab
    from ortlab.memory.trace import Trace
    from ortlab.notebook.widgets.graph_view import GraphView
    from ortlab.records.comparison import Comparison
    from ortlab.records.runs import Run

_STEP = Parser("%%ort_step")
_STEP.add_argument("-n", default="1", metavar="STEPS")
_STEP.add_argument("--optimizer", metavar="NAME")
_STEP.add_argument("--no-memory", action="store_true")
_STEP.add_lab()

_RERUN = Parser("%ort_rerun")
_RERUN.add_argument("-n", metavar="STEPS")
_RERUN.add_argument("--no-memory", action="store_true")
_RERUN.add_changes()
_RERUN.add_lab()

_COMPARE = Parser("%ort_compare")
_COMPARE.add_argument("words", nargs="*", metavar="RUN|option=value,value")
_COMPARE.add_argument("--baseline", metavar="RUN")
_COMPARE.add_argument("--rerun", action="store_true")
_COMPARE.add_argument("-n", metavar="STEPS")
_COMPARE.add_argument("--rounds", metavar="ROUNDS")
_COMPARE.add_lab()

_PLAN = Parser("%ort_plan")
_PLAN.add_argument("--part", metavar="PART")
_PLAN.add_argument("--at", nargs="+", default=[], metavar="SIZE=N")
_PLAN.add_argument("--costs", action="store_true")
_PLAN.add_argument("--measure", metavar="PLANS")
_PLAN.add_argument("--level", choices=("1", "2"), metavar="LEVEL")
_PLAN.add_argument("--from", dest="source", metavar="FILE")
_PLAN.add_argument("--write", metavar="PATH")
_PLAN.add_argument("--dialect", choices=("2022", "2023", "2024"), metavar="YEAR")
_PLAN.add_lab()

_PROFILE = Parser("%ort_profile")
_PROFILE.add_argument("-n", metavar="STEPS")
_PROFILE.add_argument("--part", metavar="PART")
_PROFILE.add_lab()

_GRAPH = Parser("%ort_graph")
_GRAPH.add_argument("stage", nargs="?", default="execution", metavar="STAGE")
_GRAPH.add_argument("--changes", action="store_true")
_GRAPH.add_argument("--part", metavar="PART")
_GRAPH.add_argument("--mode", metavar="MODE")
_GRAPH.add_argument("--profile", action="store_true")
_GRAPH.add_argument("--save", metavar="PATH")
_GRAPH.add_argument("--view", action="store_true")
_GRAPH.add_argument("--embed", action="store_true")
_GRAPH.add_argument("--around", metavar="NODE", default="")
_GRAPH.add_lab()


def _shown(lab: Lab, graph: Graph, args: argparse.Namespace) -> Graph | GraphView | EmbeddedGraph:
    """Return a graph in the form that is asked for."""
    if args.view and args.embed:
        raise ArgumentError("--view and --embed are two forms of one thing.", fix="Take one of them.")
    if args.around and not (args.view or args.embed):
        raise ArgumentError("--around says what is drawn.", fix="Add --view or --embed.")
    if args.embed:
        return embed_graph(graph, around=args.around)
    if args.view:
        from ortlab.notebook.widgets.graph_display import show_graph

        return show_graph(lab, args.stage, args.part, mode=args.mode, around=args.around)
    return graph


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
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        steps = arguments.number(args.n, variables, "-n")
        optimizer = arguments.variable(args.optimizer, variables) if args.optimizer else None
        step = StepCell(self.shell, line, cell)
        watch = [*step.objects(), *([] if optimizer is None else [optimizer])]
        memory = False if args.no_memory else None
        return lab.step(step, n=steps, watch=watch, source=step.source, memory=memory)

    @line_magic
    @no_var_expand
    @command(_RERUN)
    def ort_rerun(self, args: argparse.Namespace) -> Run:
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
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        steps = None if args.n is None else arguments.number(args.n, variables, "-n")
        changes = arguments.changes(args.changes, variables)
        return lab.rerun(steps, memory=False if args.no_memory else None, **changes)

    @line_magic
    @no_var_expand
    @command(_COMPARE)
    def ort_compare(self, args: argparse.Namespace) -> Comparison:
        """Hold configurations against a baseline: time with an interval and a verdict, step memory, loss.

        ::

            %ort_compare option=value,value ... [-n STEPS] [--rounds ROUNDS] [--lab NAME]
            %ort_compare [RUN ...] [--baseline RUN] [--lab NAME]
            %ort_compare [RUN ...] --rerun [--baseline RUN] [-n STEPS] [--rounds ROUNDS] [--lab NAME]

        Arguments:

        - ``option=value,value``: what to try, each value by itself, beside the lab as it is set; ``engine`` may be
          among them. The last step is run from its start in turns, so that a drift of the machine meets all alike.
        - ``RUN ...``: numbers of runs, as their tables show them, which are held against each other as they were made;
          all runs but those of sweeps if not given.
        - ``--rerun``: run the configurations of these runs again, in turns.
        - ``--baseline RUN``: number of the run that the others are held against; the first if not given.
        - ``-n STEPS``: steps of each turn, as many as the last step had if not given, at most 8; a number or ``$name``.
        - ``--rounds ROUNDS``: turns of each, 6 if not given.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Example::

            %ort_compare engine=eager memory_level=1,2

        The same in Python::

            comparison = lab.compare(engine="eager", memory_level=[1, 2])
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        pairs = [word for word in args.words if "=" in word]
        how: dict[str, Any] = {
            name: arguments.number(text, variables, option)
            for name, text, option in (
                ("n", args.n, "-n"),
                ("rounds", args.rounds, "--rounds"),
                ("baseline", args.baseline, "--baseline"),
            )
            if text is not None
        }
        if args.rerun:
            how["rerun"] = True
        numbers = [
            arguments.number(text, variables, "%ort_compare") for text in args.words if text not in pairs
        ]
        if pairs:
            grid = arguments.grid(pairs, variables)
            assert isinstance(grid, dict)  # noqa: S101 - pairs make one
            points = [{name: value} for name, values in grid.items() for value in values]
            return lab.compare(*numbers, *points, **how)
        return lab.compare(*numbers, **how)

    @line_magic
    @no_var_expand
    @command(_PLAN)
    def ort_plan(self, args: argparse.Namespace) -> MemoryPlan | SavedPlans:
        """Show what each recompute plan would save; read and write plans of this release and of old ones.

        ::

            %ort_plan [--part PART] [--at SIZE=N ...] [--level LEVEL] [--write PATH [--dialect YEAR]] [--lab NAME]
            %ort_plan --costs [--measure PLANS] [--lab NAME]
            %ort_plan --from FILE [--part PART] [--write PATH [--dialect YEAR]] [--lab NAME]

        Arguments:

        - ``--part PART``: path of the part to look at, where only parts of the model are wrapped; all together if not
          given.
        - ``--at SIZE=N ...``: evaluate for another batch, without building anything: ``batch=16``, ``sequence=512``,
          ``label_density=0.15``, or a symbol by its name.
        - ``--costs``: profile the last step, and predict what each plan takes off its peak and adds to its time.
        - ``--measure PLANS``: run so many plans as well, those with the most bytes for each ms; a number or ``$name``.
        - ``--level LEVEL``: the plans that memory level 1 or 2 stands for.
        - ``--from FILE``: read plans from a configuration or an old log instead, whichever release wrote it, and say
          which of them this model has. A path, quoted if it has spaces, or ``$name`` for a variable that holds the
          path or the text itself.
        - ``--write PATH``: file to write the plans to that are switched on, here or in ``--from``; a path or
          ``$name``.
        - ``--dialect YEAR``: how: ``2024`` (a JSON list, which 1.19.2 reads, and what is taken if not given),
          ``2023`` (``Gelu+:1:-1,...``) or ``2022`` (``Gelu:1,...``).
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Savings are ORT's predictions for the shapes of the first batch, in bytes. Switch a plan on with
        ``%ort_set memory_plan=...``, or all of a kind with ``%ort_set memory_level=1``.

        Example::

            %ort_plan
            %ort_plan --at batch=32
            %ort_plan --costs --measure 3
            %ort_plan --from train_2023.log
            %ort_plan --write plans.json

        The same in Python::

            plan = lab.plan()
            plan.at(batch=32)
            lab.plan(costs=True, measure=3)
            ortlab.memory.read_saved("train_2023.log").against(plan)
            plan.save("plans.json")
        """
        variables = self.shell.user_ns
        if args.dialect and not args.write:
            raise ArgumentError(
                "--dialect says how --write writes.", fix="Add --write PATH, or leave it out."
            )
        if args.source and args.at:
            raise ArgumentError(
                "--at and --from do not go together.",
                why="The figures of a log are for the batch of its own run.",
                fix="Leave one of the two out.",
            )
        found = self._saved_plans(args) if args.source else self._plan(args)
        if isinstance(found, MemoryPlan) and args.at:
            found = found.at(**arguments.sizes(args.at, variables))
        if args.write:
            path = found.save(arguments.path(args.write, variables), dialect=args.dialect or "2024")
            print(f"Saved to {path}")  # noqa: T201 - the plan is returned, so this is the only place to say it
        return found

    def _plan(self, args: argparse.Namespace) -> MemoryPlan:
        """Read the plans, with their costs if the line asks for them."""
        lab = chosen_lab(args.lab, self.shell.user_ns)
        if args.measure and not args.costs:
            raise ArgumentError("--measure belongs to --costs.", fix="%ort_plan --costs --measure 3")
        if args.costs and (args.part or args.level):
            raise ArgumentError("--costs goes with neither --part nor --level.", fix="%ort_plan --costs")
        if args.costs:
            measure = arguments.number(args.measure, self.shell.user_ns, "--measure") if args.measure else 0
            return lab.plan(costs=True, measure=measure)
        return lab.plan(args.part, level=int(args.level) if args.level else None)

    def _saved_plans(self, args: argparse.Namespace) -> SavedPlans:
        """Read saved plans, and compare them with the model if one has been built."""
        from ortlab.lab.lab import latest  # not before a magic is used: it loads torch

        variables = self.shell.user_ns
        saved = read_saved(arguments.path(args.source, variables))
        lab = latest() if args.lab is None else chosen_lab(args.lab, variables)
        if lab is None:
            return saved
        try:
            return saved.against(lab.plan(args.part))
        except (BuildError, StepError, WrapError) as error:
            print(f"Not held against the model: {error.what}")  # noqa: T201 - as above
            return saved

    @line_magic
    @no_var_expand
    @command(_PROFILE)
    def ort_profile(self, args: argparse.Namespace) -> Trace:
        """Run the last step again while ONNX Runtime's profiler watches: time and results of every kernel.

        ::

            %ort_profile [-n STEPS] [--part PART] [--lab NAME]

        Arguments:

        - ``-n STEPS``: how many steps, 3 if not given; each kernel's time is the shortest of them; a number or
          ``$name``.
        - ``--part PART``: path of the part to profile; needed where several parts of the model are wrapped.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Weights, optimizer, random state and runs are afterwards as they were before.

        Example::

            %ort_profile

        The same in Python::

            trace = lab.profile()
        """
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        if args.n is None:
            return lab.profile(part=args.part)
        return lab.profile(arguments.number(args.n, variables, "-n"), part=args.part)

    @line_magic
    @no_var_expand
    @command(_GRAPH)
    def ort_graph(self, args: argparse.Namespace) -> Graph | GraphDiff | GraphSet | GraphView | EmbeddedGraph:
        """Show an ONNX graph of the present switches: its operators, where they come from, what it keeps for backward.

        ::

            %ort_graph --changes [STAGE] [--part PART] [--view] [--lab NAME]
            %ort_graph [STAGE] [--part PART] [--mode MODE] [--profile] [--save PATH] [--view] [--embed]
                       [--around NODE] [--lab NAME]

        Arguments:

        - ``--changes``: say and draw what the present switches change in the graph, against those of the first run, or
          against the defaults where they are the same.
        - ``STAGE``: ``exported`` (from PyTorch), ``processed``, ``optimized`` (before the gradient is added),
          ``gradient``, or ``execution`` (what runs), which is taken if not given; ``all`` for a table of the five.
        - ``--part PART``: path of the part whose graph it is; needed where several parts of the model are wrapped.
        - ``--mode MODE``: ``training`` or ``inference``; training if not given, or inference if no training step has
          run.
        - ``--profile``: profile the last step first, so that operators have their times, forward, backward and
          recomputed; for the execution graph only.
        - ``--save PATH``: file to write the graph to; a path, quoted if it has spaces, or ``$name``.
        - ``--view``: draw it node by node in a view that is searched and clicked; ``_.selected`` then holds the names
          of the selected nodes. A saved notebook keeps the tables and a still picture.
        - ``--embed``: draw it in the same way and keep the drawing in the notebook, where it can be browsed without a
          kernel; that adds some 250 kB.
        - ``--around NODE``: with one of these, draw only what is near a node; its name, quoted if it has spaces.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Example::

            %ort_graph --changes
            %ort_graph optimized --save "my graphs/optimized.onnx"
            %ort_graph --profile
            %ort_graph all
            %ort_graph execution --view

        The same in Python::

            lab.graph_diff()  # --changes
            graph = lab.graph("optimized")
            graph.save("my graphs/optimized.onnx")
            lab.graph("execution", activations=True, profile=True)
            lab.graphs()
            view = ortlab.show_graph(lab, "execution")
            ortlab.embed_graph(lab.graph("execution"))
        """
        lab = chosen_lab(args.lab, self.shell.user_ns)
        if args.changes:
            if args.save or args.profile or args.embed or args.mode or args.around or args.stage == "all":
                raise ArgumentError(
                    "--changes compares two graphs: it goes with STAGE, --part and --view only.",
                    fix="%ort_graph --changes",
                )
            return changes_shown(lab.graph_diff(stage=args.stage, part=args.part), in_view=args.view)
        if args.stage == "all":
            if args.save or args.profile or args.view or args.embed:
                raise ArgumentError(
                    "`all` goes with none of --save, --profile, --view and --embed.",
                    fix="Name one stage: %ort_graph execution --profile",
                )
            return lab.graphs(args.part, mode=args.mode)
        graph = lab.graph(args.stage, args.part, mode=args.mode, profile=args.profile)
        if graph.stage == "execution" and graph.mode == "training":
            graph = graph.with_activations(lab.activations(args.part))
        if args.save:
            path = graph.save(arguments.path(args.save, self.shell.user_ns))
            print(f"Saved to {path}")  # noqa: T201 - the graph is returned, so this is the only place to say it
        return _shown(lab, graph, args)
