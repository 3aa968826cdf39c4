"""The magics that set an experiment up: wrap, unwrap, set, options, doctor."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from ortlab.errors import ArgumentError
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.arguments import Parser
from ortlab.notebook.magics.chosen_lab import chosen_lab
from ortlab.notebook.magics.command import command
from ortlab.options.catalogue import OptionList
from ortlab.options.options import Options
from ortlab.ranks.rank_process import place

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from torch import nn

    from ortlab.lab.lab import Lab
    from ortlab.records.checks import Report
    from ortlab.records.recipe import Recipe

_WRAP = Parser("%ort_wrap")
_WRAP.add_argument("model", metavar="MODEL")
_WRAP.add_argument("--only", nargs="+", action="extend", metavar="PART")
_WRAP.add_argument("--engine", metavar="ort|eager|compile")
_WRAP.add_argument("--no-panel", action="store_true")
_WRAP.add_argument("--recipe", metavar="NAME")
_WRAP.add_changes()

_UNWRAP = Parser("%ort_unwrap")
_UNWRAP.add_lab()

_SET = Parser("%ort_set")
_SET.add_changes()
_SET.add_lab()

_OPTIONS = Parser("%ort_options")
_OPTIONS.add_argument("names", nargs="*", metavar="OPTION")
_OPTIONS.add_lab()

_DOCTOR = Parser("%ort_doctor")


@magics_class
class SetupMagics(Magics):
    """Magics over `ortlab.wrap`, `Lab.unwrap`, `Lab.set`, `ortlab.options.options` and `ortlab.doctor`."""

    shell: InteractiveShell

    @line_magic
    @no_var_expand
    @command(_WRAP)
    def ort_wrap(self, args: argparse.Namespace) -> Lab | Recipe:
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
        from torch import nn

        import ortlab
        from ortlab.notebook.widgets import lab_display

        variables = self.shell.user_ns
        modules = [key for key, held in variables.items() if isinstance(held, nn.Module)]
        module = arguments.variable(args.model, variables, fitting=modules)
        if args.recipe is not None:
            return self._write_recipe(module, args)
        only, more = arguments.parts(args.only, variables)
        changes = arguments.changes([*args.changes, *more], variables)
        if args.engine is not None and "engine" in changes:
            raise ArgumentError("The engine is given twice.", fix="Leave --engine or engine= out.")
        if args.engine is not None:
            changes["engine"] = args.engine
        lab = ortlab.wrap(module, only=only, name=args.model, **changes)
        # A rank's widgets would have no page to stand on: its notebook is that of another process.
        if not args.no_panel and place() is None:
            try:
                lab_display.show(lab)
            except BaseException:
                lab.unwrap()  # the caller has no lab to do it with
                raise
        else:
            lab_display.note_shown(lab)  # as the value of the cell, it is shown as one line
        return lab

    def _write_recipe(self, module: object, args: argparse.Namespace) -> Recipe:
        from torch import nn, optim

        import ortlab
        from ortlab.runs.wrapping import is_wrapped

        if args.changes or args.only or args.engine is not None:
            raise ArgumentError(
                "--recipe goes with no option.",
                fix="Write the options into the cell: ortlab.wrap(model, memory_level=1).",
            )
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"{args.model} is a {type(module).__name__}, not a torch.nn.Module.")
        own = {id(parameter) for parameter in module.parameters()}
        optimizers = {
            name: held
            for name, held in self.shell.user_ns.items()
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

    @line_magic
    @no_var_expand
    @command(_UNWRAP)
    def ort_unwrap(self, args: argparse.Namespace) -> nn.Module:
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
        return chosen_lab(args.lab, self.shell.user_ns).unwrap()

    @line_magic
    @no_var_expand
    @command(_SET)
    def ort_set(self, args: argparse.Namespace) -> Lab:
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
        changes = arguments.changes(args.changes, self.shell.user_ns)
        if not changes:
            raise ArgumentError("%ort_set needs an option=value.", fix="%ort_options lists the options.")
        return chosen_lab(args.lab, self.shell.user_ns).set(**changes)

    @line_magic
    @no_var_expand
    @command(_OPTIONS)
    def ort_options(self, args: argparse.Namespace) -> OptionList:
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

        if args.lab is None and latest() is None:
            return OptionList(Options(), tuple(args.names))
        lab = chosen_lab(args.lab, self.shell.user_ns)
        return OptionList(lab.options, tuple(args.names), lab.have)

    @line_magic
    @no_var_expand
    @command(_DOCTOR)
    def ort_doctor(self, _args: argparse.Namespace) -> Report:
        """Examine the installation: what is there, whether it can train, and which command mends what cannot.

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
