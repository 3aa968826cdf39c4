"""The magics that set an experiment up: pre-flight, wrap, unwrap, set, options, doctor."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, magics_class

from ortlab.errors import ArgumentError
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.command import CHANGES, LAB, Line, flag, line, takes
from ortlab.options.catalogue import OptionList
from ortlab.options.options import Options
from ortlab.ranks.rank_process import place

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from torch import nn

    from ortlab.lab.lab import Lab
    from ortlab.records.checks import Recipe, Report
    from ortlab.records.preflight import Preflight


@magics_class
class SetupMagics(Magics):
    """Magics over `ortlab.preflight`, `ortlab.wrap`, `Lab.unwrap`, `Lab.set`, the options and `ortlab.doctor`."""

    shell: InteractiveShell

    @line(takes("model", "MODEL"), takes("batch", "BATCH"), CHANGES)
    def ort_preflight(self, args: Line) -> Preflight:
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
        import ortlab

        model = self._module(args.model)
        batch = arguments.variable(args.batch, args.variables)
        return self._in_cells(ortlab.preflight(model, batch, name=args.model, **args.changes))

    def _module(self, name: str) -> nn.Module:
        """Look a variable up that should hold a module; where there is none of the name, suggest those that do."""
        from torch import nn

        variables = self.shell.user_ns
        modules = [key for key, held in variables.items() if isinstance(held, nn.Module)]
        found: nn.Module = arguments.variable(name, variables, fitting=modules)
        return found

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

    @line(
        takes("model", "MODEL"),
        takes("--only", "PART", nargs="+", action="extend"),
        takes("--engine", "ort|eager|compile"),
        flag("--no-panel"),
        takes("--recipe", "NAME"),
        takes("changes", "option=value", nargs="*"),
    )
    def ort_wrap(self, args: Line) -> Lab | Recipe:
        """Run a model on ONNX Runtime from now on, and show its panel.

        ::

            %ort_wrap MODEL [--only PART ...] [--engine ort|eager|compile] [--no-panel] [option=value ...]
            %ort_wrap MODEL --recipe fused_adam|deepspeed|apex|all

        Arguments:

        - ``MODEL``: variable that holds a ``torch.nn.Module``, or an attribute of one (``trainer.model``). It
          stays the same object: optimizers made before or after keep working.
        - ``--only PART ...``: sub-modules that ONNX Runtime shall run, while PyTorch runs the rest: paths as
          ``model.named_modules()`` gives them, patterns (``encoder.layer.*``), or ``$name`` for a variable that holds
          paths or a sub-module. The whole model if not given.
        - ``--engine``: who executes it: ``ort`` (ONNX Runtime, if not given), ``eager`` (PyTorch as it is) or
          ``compile`` (``torch.compile``).
        - ``--no-panel``: do not show the panel. On a rank of ``%ort_cluster`` it is not shown in any case.
        - ``--recipe NAME``: wrap nothing, but write a cell that does, with the optimizer that goes with it:
          ``fused_adam``, ``deepspeed`` (ZeRO and FP16_Optimizer), ``apex`` (O2 and FP16_Optimizer), or ``all``
          (FusedAdam, ZeRO and FP16_Optimizer). An Adam or AdamW over the model's parameters keeps its name and
          its numbers.
        - ``option=value``: options to start with; ``%ort_options`` lists all; values are as in ``%ort_set``.

        Example::

            lab = %ort_wrap model memory_level=1

        The same in Python::

            lab = ortlab.wrap(model, memory_level=1)
            lab

        Only two parts of the model::

            lab = %ort_wrap model --only encoder decoder.layers.3
            lab = ortlab.wrap(model, only=["encoder", "decoder.layers.3"])

        A cell with FusedAdam in the place of the optimizer that is there::

            %ort_wrap model --recipe fused_adam
            print(ortlab.recipe("fused_adam", model="model", optimizer="optimizer", like=optimizer).code)
        """
        import ortlab
        from ortlab.lab.following import note_shown
        from ortlab.notebook.widgets import display

        module = self._module(args.model)
        if args.recipe is not None:
            return self._write_recipe(module, args)
        only, more = arguments.parts(args.only, args.variables)
        changes = arguments.changes([*args.changes, *more], args.variables)
        if args.engine is not None and "engine" in changes:
            raise ArgumentError("The engine is given twice.", fix="Leave --engine or engine= out.")
        if args.engine is not None:
            changes["engine"] = args.engine
        lab = ortlab.wrap(module, only=only, name=args.model, **changes)
        # A rank's widgets would have no page to stand on: its notebook is that of another process.
        if not args.no_panel and place() is None:
            try:
                display.show(lab)
            except BaseException:
                lab.unwrap()  # the caller has no lab to do it with
                raise
        else:
            note_shown(lab)  # as the value of the cell, it is shown as one line
        return lab

    def _write_recipe(self, module: object, args: Line) -> Recipe:
        from torch import nn, optim

        import ortlab
        from ortlab.runs.wrapping import is_wrapped

        if args.has("changes", "only", "engine"):
            raise ArgumentError(
                "--recipe goes with no option.",
                fix="Write the options into the cell: ortlab.wrap(model, memory_level=1).",
            )
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"{args.model} is a {type(module).__name__}, not a torch.nn.Module.")
        own = {id(parameter) for parameter in module.parameters()}
        optimizers = {
            name: held
            for name, held in args.variables.items()
            if isinstance(held, optim.Optimizer)
            and not name.startswith("_")
            and any(id(one) in own for group in held.param_groups for one in group["params"])
        }
        name, like = next(iter(optimizers.items()), ("optimizer", None))
        made = ortlab.recipe(
            args.recipe, model=args.model, optimizer=name, like=like, wrapped=is_wrapped(module)
        )
        self.shell.set_next_input(made.code)
        return made

    @line(LAB)
    def ort_unwrap(self, args: Line) -> nn.Module:
        """Give the model back to PyTorch; its weights stay as they are.

        ::

            %ort_unwrap [--lab NAME]

        Arguments:

        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        The lab keeps its runs, so they can still be compared and saved.

        Example::

            %ort_unwrap

        The same in Python::

            model = lab.unwrap()
        """
        return args.lab.unwrap()

    @line(CHANGES, LAB)
    def ort_set(self, args: Line) -> Lab:
        """Change options, or the engine; what has to be rebuilt is rebuilt at the next step.

        ::

            %ort_set option=value ... [engine=ort|eager|compile] [--lab NAME]

        Arguments:

        - ``option=value``: ``%ort_options`` lists the options. A value is a word (``1``, ``on``, ``INFO``), a
          quoted text (``"my graphs"``), a list of literals (``['Gelu+:1:-1']``), or ``$name`` for the value
          of a variable. Expressions are not evaluated, and a bare word is never taken for a variable.
        - ``engine=...``: who executes the next steps: ONNX Runtime, PyTorch, or ``torch.compile``.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        If one value is refused, nothing is changed.

        Example::

            %ort_set memory_level=1 log_level=INFO

        The same in Python::

            lab.set(memory_level=1, log_level="INFO")
        """
        changes = args.changes
        if not changes:
            raise ArgumentError("%ort_set needs an option=value.", fix="%ort_options lists the options.")
        return args.lab.set(**changes)

    @line(takes("names", "OPTION", nargs="*"), LAB)
    def ort_options(self, args: Line) -> OptionList:
        """List the options: what each does, its value now, and why it cannot act here, if so.

        ::

            %ort_options [OPTION ...] [--lab NAME]

        Arguments:

        - ``OPTION ...``: names of options; all if not given.
        - ``--lab NAME``: variable of the lab whose values are shown; the one wrapped last if not given, the
          defaults if nothing is wrapped.

        Example::

            %ort_options memory_level memory_plan

        The same in Python::

            from ortlab.options.catalogue import OptionList
            OptionList(lab.options, ("memory_level", "memory_plan"), lab.have)
        """
        from ortlab.lab.lab import latest

        if not args.has("lab") and latest() is None:
            return OptionList(Options(), tuple(args.names))
        return OptionList(args.lab.options, tuple(args.names), args.lab.have)

    @line()
    def ort_doctor(self, _args: Line) -> Report:
        """Examine the installation: what is there, whether it can train, and which command repairs what cannot.

        ::

            %ort_doctor

        A tiny model is trained in a fresh process, which takes some seconds.

        Example::

            %ort_doctor

        The same in Python::

            report = ortlab.doctor()
        """
        import ortlab

        return ortlab.doctor()
