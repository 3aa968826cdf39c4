"""The magic that holds the numbers of PyTorch and of ONNX Runtime against each other."""

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

    from ortlab.parity.parity import Parity

_PARITY = Parser("%ort_parity")
_PARITY.add_argument("-n", metavar="STEPS")
_PARITY.add_argument("--dropout", action="store_true")
_PARITY.add_argument("--no-seeds", action="store_true")
_PARITY.add_lab()


@magics_class
class NumberMagics(Magics):
    """The magic over `Lab.parity`."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_PARITY)
    def ort_parity(self, args: argparse.Namespace) -> Parity:
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
        variables = self.shell.user_ns
        lab = chosen_lab(args.lab, variables)
        steps = 2 if args.n is None else arguments.number(args.n, variables, "-n")
        return lab.parity(steps, dropout=args.dropout, seeds=not args.no_seeds)
