"""The magics about graphs and kernels: a graph, the difference of two, what Triton runs, a profile, FLOPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics, magics_class

from ortlab.errors import ArgumentError
from ortlab.graphs.viewer.document import embed_graph
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.command import LAB, PART, STEPS, Line, flag, line, takes, whole

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.graphs.diff import GraphDiff
    from ortlab.graphs.flops import Flops, FlopSavings
    from ortlab.graphs.stages import Graph, GraphSet
    from ortlab.graphs.triton_kernels import TritonKernels
    from ortlab.graphs.viewer.document import EmbeddedGraph
    from ortlab.lab.lab import Lab
    from ortlab.memory.trace import Trace
    from ortlab.notebook.widgets.graph_view import GraphView


@magics_class
class GraphMagics(Magics):
    """Magics over `Lab.graph`, `Lab.graph_diff`, `Lab.triton_kernels`, `Lab.profile` and `Lab.flops`."""

    shell: InteractiveShell

    @line(
        takes("stage", "STAGE", nargs="?", default="execution"),
        flag("--changes"),
        PART,
        takes("--mode", "MODE"),
        flag("--profile"),
        takes("--save", "PATH", read=arguments.path),
        flag("--view"),
        flag("--embed"),
        takes("--around", "NODE", default=""),
        LAB,
    )
    def ort_graph(self, args: Line) -> Graph | GraphDiff | GraphSet | GraphView | EmbeddedGraph:
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
        lab = args.lab
        if args.changes:
            if args.has("save", "profile", "embed", "mode") or args.around or args.stage == "all":
                raise ArgumentError(
                    "--changes compares two graphs: it goes with STAGE, --part and --view only.",
                    fix="%ort_graph --changes",
                )
            return _changes_shown(lab.graph_diff(stage=args.stage, part=args.part), in_view=args.view)
        if args.stage == "all":
            if args.has("save", "profile", "view", "embed"):
                raise ArgumentError(
                    "`all` goes with none of --save, --profile, --view and --embed.",
                    fix="Name one stage: %ort_graph execution --profile",
                )
            return lab.graphs(args.part, mode=args.mode)
        graph = lab.graph(args.stage, args.part, mode=args.mode, profile=args.profile)
        if graph.stage == "execution" and graph.mode == "training":
            graph = graph.with_activations(lab.activations(args.part))
        if args.has("save"):
            path = graph.save(args.save)
            print(f"Saved to {path}")  # noqa: T201 - the graph is returned, so this is the only place to say it
        return _shown(lab, graph, args)

    @line(
        takes("what", "STAGE|option=value", nargs="*"),
        takes("--baseline", "option=value", nargs="+", default=[]),
        takes("--stage", "STAGE"),
        PART,
        flag("--view"),
        LAB,
    )
    def ort_graph_diff(self, args: Line) -> GraphDiff | GraphView:
        """Show what is different between two graphs: two stages of the build, or one stage with other switches.

        ::

            %ort_graph_diff STAGE STAGE [--part PART] [--view] [--lab NAME]
            %ort_graph_diff option=value ... [--baseline option=value ...] [--stage STAGE] [--part PART] [--view]
                      [--lab NAME]

        Arguments:

        - ``STAGE STAGE``: two of ``exported``, ``processed``, ``optimized``, ``gradient``, ``execution``.
        - ``option=value ...``: switches, as ``%ort_set`` takes them; the lab keeps its own. Or ``$name`` of a dict.
        - ``--baseline option=value ...``: what they are compared with; the lab as it is set if not given.
        - ``--stage STAGE``: which graph is compared, ``execution`` if not given.
        - ``--part PART``: path of the part to look at, where several parts of the model are wrapped.
        - ``--view``: draw both graphs node by node, what is different marked, in a view that is searched and clicked.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        What is not built yet is built: the last step runs once from its start, in PyTorch. Afterwards, also when it
        fails or is interrupted, weights, optimizer, random state, switches and sessions are as they were.

        Example::

            %ort_graph_diff memory_level=1

        The same in Python::

            difference = lab.graph_diff(memory_level=1)
        """
        lab = args.lab
        stages = [word for word in args.what if "=" not in word and not word.startswith("$")]
        if stages or not args.what:
            if len(args.what) != 2 or len(stages) != 2 or args.has("stage", "baseline"):  # noqa: PLR2004
                raise ArgumentError(
                    "%ort_graph_diff compares two stages, or sets of switches.",
                    fix="%ort_graph_diff gradient execution, or %ort_graph_diff memory_level=1 --stage execution",
                )
            return _changes_shown(lab.graph_diff(*stages, part=args.part), in_view=args.view)
        sides = [
            arguments.configurations([words], args.variables) for words in (args.baseline, args.what) if words
        ]
        if any(len(side) != 1 for side in sides):
            raise ArgumentError(
                "Each side of a comparison is one set of switches.",
                fix="%ort_graph_diff memory_level=1 --baseline memory_level=2",
            )
        before, after = (sides[0][0], sides[1][0]) if args.baseline else ({}, sides[0][0])
        difference = lab.graph_diff(before, after, stage=args.stage or "", part=args.part)
        return _changes_shown(difference, in_view=args.view)

    @line(whole("number", "N", nargs="?"), takes("--from", "FOLDER", dest="folder", read=arguments.path), LAB)
    def ort_triton_kernels(self, args: Line) -> TritonKernels | GraphView:
        """List the sub-graphs that Triton runs, or draw one of them beside the code that was generated for it.

        ::

            %ort_triton_kernels [N] [--from FOLDER] [--lab NAME]

        Arguments:

        - ``N``: number of a sub-graph in the list, or ``$name``; the list itself if not given.
        - ``--from FOLDER``: where ONNX Runtime wrote them, here or on another machine; a path, quoted if it has spaces,
          or ``$name``. ``triton_debug`` below the present folder if not given.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        They are written while kernels are generated with ``triton=true triton_debug=true``, which needs an NVIDIA GPU
        and Triton; to look at them needs neither.

        Example::

            %ort_triton_kernels
            %ort_triton_kernels 2

        The same in Python::

            kernels = lab.triton_kernels()
            view = ortlab.show_graph(kernels.kernel(2))
        """
        folders = args.given("folder")
        kernels = args.lab.triton_kernels(**folders)
        if not args.has("number"):
            return kernels
        from ortlab.notebook.widgets.graph_display import show_graph

        return show_graph(kernels.kernel(args.number))

    @line(STEPS, takes("--baseline", choices=("eager",)), PART, LAB)
    def ort_profile(self, args: Line) -> Trace:
        """Run the last step again while ONNX Runtime's profiler watches: time and results of every kernel.

        ::

            %ort_profile [-n STEPS] [--baseline eager] [--part PART] [--lab NAME]

        Arguments:

        - ``-n STEPS``: how many steps, 3 if not given; each kernel's time is the shortest of them; a number or
          ``$name``.
        - ``--baseline eager``: time each module in PyTorch as well, and show where ONNX Runtime takes longer.
        - ``--part PART``: path of the part to profile; needed where several parts of the model are wrapped.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Weights, optimizer, random state and runs are afterwards as they were before.

        Example::

            %ort_profile

        The same in Python::

            trace = lab.profile()
        """
        return args.lab.profile(**args.given("n", "baseline"), part=args.part)

    @line(
        takes("--baseline", "option=value", nargs="+", action="extend", default=[], read=arguments.changes),
        PART,
        LAB,
    )
    def ort_flops(self, args: Line) -> Flops | FlopSavings:
        """Count the FLOPs of the last step, or what a switch saves of them.

        ::

            %ort_flops [--baseline option=value ...] [--part PART] [--lab NAME]

        Arguments:

        - ``--baseline option=value ...``: compare the step as the lab is set with one with these options.
        - ``--part PART``: path of the part, where several parts of the model are wrapped.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        The last step is run again while ORT's profiler watches; afterwards the lab is as it was.

        Example::

            %ort_flops --baseline label_sparse_optimizer=False

        The same in Python::

            lab.flops()
            lab.flops(baseline={"label_sparse_optimizer": False})
        """
        found: Flops | FlopSavings = args.lab.flops(**args.given("baseline"), part=args.part)
        return found


def _changes_shown(difference: GraphDiff, *, in_view: bool) -> GraphDiff | GraphView:
    """Return a difference as it is, or in a view that is searched and clicked."""
    if not in_view:
        return difference
    from ortlab.notebook.widgets.graph_display import show_graph

    return show_graph(difference)


def _shown(lab: Lab, graph: Graph, args: Line) -> Graph | GraphView | EmbeddedGraph:
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
