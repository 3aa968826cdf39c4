"""The magic that shows what was said while a model was built and run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.chosen_lab import chosen_lab
from ortlab.notebook.magics.command import command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.records.messages import Messages

_LOG = Parser("%ort_messages")
_LOG.add_argument("--run", metavar="RUN")
_LOG.add_argument("--level", default="", metavar="LEVEL")
_LOG.add_argument("--source", default="", metavar="SOURCE")
_LOG.add_argument("--stage", default="", metavar="STAGE")
_LOG.add_argument("--text", default="", metavar="TEXT")
_LOG.add_lab()


@magics_class
class LogMagics(Magics):
    """The magic over `Lab.messages`."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_LOG)
    def ort_messages(self, args: argparse.Namespace) -> Messages:
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
        variables = self.shell.user_ns
        run = None if args.run is None else arguments.number(args.run, variables, "--run")
        lab = chosen_lab(args.lab, variables)
        return lab.messages.of(
            run=run, level=args.level, source=args.source, stage=args.stage, text=args.text
        )
