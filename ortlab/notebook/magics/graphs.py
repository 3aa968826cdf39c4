"""The magics about differences of graphs, and about what Triton runs of them."""

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

    from ortlab.graphs.diff import GraphDiff
    from ortlab.graphs.triton_kernels import TritonKernels
    from ortlab.notebook.widgets.graph_view import GraphView

_DIFF = Parser("%ort_graph_diff")
_DIFF.add_argument("what", nargs="*", metavar="STAGE|option=value")
_DIFF.add_argument("--against", nargs="+", default=[], metavar="option=value")
_DIFF.add_argument("--stage", metavar="STAGE")
_DIFF.add_argument("--part", metavar="PART")
_DIFF.add_argument("--view", action="store_true")
_DIFF.add_lab()

_TRITON = Parser("%ort_triton_kernels")
_TRITON.add_argument("number", nargs="?", metavar="N")
_TRITON.add_argument("--from", dest="folder", metavar="FOLDER")
_TRITON.add_lab()


@magics_class
class GraphMagics(Magics):
    """Magics over `Lab.graph_diff` and `Lab.triton_kernels`."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_DIFF)
    def ort_graph_diff(self, args: argparse.Namespace) -> GraphDiff | GraphView:
        """Show what is different between two graphs: two stages of the build, or one stage with other switches.

        ::

            %ort_graph_diff STAGE STAGE [--part PART] [--view] [--lab NAME]
            %ort_graph_diff option=value ... [--against option=value ...] [--stage STAGE] [--part PART] [--view]
                      [--lab NAME]

        Arguments:

        - ``STAGE STAGE``: two of ``exported``, ``processed``, ``optimized``, ``gradient``, ``execution``.
        - ``option=value ...``: switches, as ``%ort_set`` takes them; the lab keeps its own. Or ``$name`` of a dict.
        - ``--against option=value ...``: what they are compared with; the lab as it is set if not given.
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
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        stages = [word for word in args.what if "=" not in word and not word.startswith("$")]
        if stages or not args.what:
            if len(args.what) != 2 or len(stages) != 2 or args.stage or args.against:  # noqa: PLR2004
                raise ArgumentError(
                    "%ort_graph_diff compares two stages, or sets of switches.",
                    fix="%ort_graph_diff gradient execution, or %ort_graph_diff memory_level=1 --stage execution",
                )
            return changes_shown(lab.graph_diff(*stages, part=args.part), in_view=args.view)
        sides = [arguments.configurations([words], variables) for words in (args.against, args.what) if words]
        if any(len(side) != 1 for side in sides):
            raise ArgumentError(
                "Each side of a comparison is one set of switches.",
                fix="%ort_graph_diff memory_level=1 --against memory_level=2",
            )
        before, after = (sides[0][0], sides[1][0]) if args.against else ({}, sides[0][0])
        return changes_shown(
            lab.graph_diff(before, after, stage=args.stage or "", part=args.part), in_view=args.view
        )

    @line_magic
    @no_var_expand
    @command(_TRITON)
    def ort_triton_kernels(self, args: argparse.Namespace) -> TritonKernels | GraphView:
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
        variables = self.shell.user_ns
        folders = () if args.folder is None else (arguments.path(args.folder, variables),)
        kernels = chosen_lab(args.lab, variables).triton_kernels(*folders)
        if args.number is None:
            return kernels
        from ortlab.notebook.widgets.graph_display import show_graph

        return show_graph(kernels.kernel(arguments.number(args.number, variables, "N")))


def changes_shown(difference: GraphDiff, *, in_view: bool) -> GraphDiff | GraphView:
    """Return a difference as it is, or in a view that is searched and clicked."""
    if not in_view:
        return difference
    from ortlab.notebook.widgets.graph_display import show_graph

    return show_graph(difference)
