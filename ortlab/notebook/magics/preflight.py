"""The magic that looks at a model before it is wrapped."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.command import command

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.records.preflight import Preflight

_PREFLIGHT = Parser("%ort_preflight")
_PREFLIGHT.add_argument("model", metavar="MODEL")
_PREFLIGHT.add_argument("batch", metavar="BATCH")
_PREFLIGHT.add_changes()


@magics_class
class PreflightMagics(Magics):
    """The magic over `ortlab.preflight`."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_PREFLIGHT)
    def ort_preflight(self, args: argparse.Namespace) -> Preflight:
        """Say what stands between a model and ONNX Runtime, before a training step.

        ::

            %ort_preflight MODEL BATCH [option=value ...]

        Arguments:

        - ``MODEL``: variable that holds a ``torch.nn.Module``, wrapped or not.
        - ``BATCH``: variable with what it is called with: a mapping for ``model(**batch)``, a tuple for
          ``model(*batch)``, a tensor for ``model(batch)``.
        - ``option=value``: options to build it with; values are as in ``%ort_set``.

        The model is built as its first step would build it, but nothing is run on ONNX Runtime, and the model stays
        as it is. If it cannot be built whole, the largest sub-modules that can are found.

        Example::

            report = %ort_preflight model batch

        The same in Python::

            report = ortlab.preflight(model, batch)
        """
        from torch import nn

        import ortlab

        variables = self.shell.user_ns
        modules = [key for key, held in variables.items() if isinstance(held, nn.Module)]
        model = arguments.variable(args.model, variables, fitting=modules)
        batch = arguments.variable(args.batch, variables)
        changes = arguments.changes(args.changes, variables)
        return self._in_cells(ortlab.preflight(model, batch, name=args.model, **changes))

    def _in_cells(self, report: Preflight) -> Preflight:
        """Name the cells in which the user's code stands, where Python knows only a file for each."""
        findings = []
        for one in report.findings:
            file, _, line = one.place.where.rpartition(":")
            label = self.shell.compile.format_code_name(file) if file else None
            if label is not None:
                cell = re.sub(r"\s+", " ", " ".join(label))
                one = replace(one, place=one.place._replace(where=f"{cell}:{line}"))  # noqa: PLW2901
            findings.append(one)
        return replace(report, findings=tuple(findings))
