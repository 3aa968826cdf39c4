"""The magics that run the step and look at what it did: step, rerun, messages, parity, density."""

from __future__ import annotations

import ast
import inspect
import re
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

from IPython.core.magic import Magics, magics_class
from IPython.display import display

from ortlab.errors import ArgumentError
from ortlab.lab.following import observe
from ortlab.notebook.magics import arguments
from ortlab.notebook.magics.command import (
    CHANGES,
    LAB,
    NO_MEMORY,
    STEPS,
    Line,
    cell,
    flag,
    line,
    no,
    takes,
    whole,
)
from ortlab.records.density import Density, DensityReport

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from ortlab.lab.lab import Lab
    from ortlab.parity.parity import Parity
    from ortlab.records.messages import Messages
    from ortlab.records.runs import Run


LOSS = "loss"
"""Variable in which a step cell leaves its loss."""

_IDENTIFIER = re.compile(r"[^\W\d]\w*")


class StepCell:
    """One training step, written as a cell; calling it runs the cell once."""

    # The cell is compiled once, runs where every other cell runs, and leaves its variables there. A traceback points at
    # the cell's own lines, because the source is registered with IPython as that of a cell is; `line`, the rest of the
    # magic's own line, keeps its place for that.

    def __init__(self, shell: InteractiveShell, line: str, cell: str) -> None:
        self.source = cell
        self._globals: dict[str, Any] = shell.user_global_ns
        self._variables: dict[str, Any] = shell.user_ns
        self.code = _compile(shell, f"%%ort_step {line}".rstrip(), cell)

    @property
    def namespace(self) -> dict[str, Any]:
        """The variables that the cell reads and writes."""
        return self._variables

    def __call__(self) -> object:
        """Run the cell once and return the `loss` it assigned, or None if it assigned none."""
        __tracebackhide__ = True
        before = self._variables.get(LOSS)
        exec(self.code, self._globals, self._variables)  # noqa: S102 - it is the user's own cell
        after = self._variables.get(LOSS)
        return None if after is before else after

    @contextmanager
    def variables_kept(self) -> Iterator[None]:
        """Restore the variables of the namespace after the block, and delete those that it made."""
        before = dict(self._variables)
        try:
            yield
        finally:
            for name in self._variables.keys() - before.keys():
                del self._variables[name]
            self._variables.update(before)

    def objects(self) -> list[object]:
        """Return the variables that the cell mentions, or a function it mentions; optimizers are among them."""
        # They are in the order of the names in the code, each once.
        found: dict[str, object] = {}
        _collect(self.code, self._variables, found)
        return list(found.values())


def _compile(shell: InteractiveShell, magic: str, cell: str) -> CodeType:
    if cell.lstrip().startswith("%%"):
        inner = cell.split(maxsplit=1)[0]
        raise ArgumentError(
            f"{inner} cannot stand inside %%ort_step.",
            why="A cell magic runs its cell in its own way, so ortlab could not see the step fail.",
            fix=f"Remove the line {inner}; the run that %%ort_step returns holds times, memory and losses.",
        )
    # The magic's line stays as a comment: the step's line 2 is the notebook cell's line 2.
    source = f"# {magic}\n{shell.transform_cell(cell)}"
    name = shell.compile.cache(source, shell.execution_count, raw_code=f"{magic}\n{cell}")
    tree = shell.transform_ast(shell.compile.ast_parse(source, name))
    with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
        code: CodeType = shell.compile(tree, name, "exec")
    if code.co_flags & inspect.CO_COROUTINE:
        raise ArgumentError(
            "A training step cannot await.",
            why="ortlab runs the step many times in one go, while the notebook's event loop stands still.",
            fix="Await the data in a cell before, and let the step use the result.",
        )
    return code


def _collect(code: CodeType, variables: Mapping[str, object], found: dict[str, object]) -> None:
    for name in _names(code):
        if name not in variables or name in found:
            continue
        held = found[name] = variables[name]
        if isinstance(held, FunctionType) and held.__globals__ is variables:
            _collect(held.__code__, variables, found)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code mentions, also in functions, comprehensions and magics inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and "get_ipython" in code.co_names:
            # `%time optimizer.step()` has become a call with the statement as text.
            yield from _IDENTIFIER.findall(constant)


_REDRAW_SECONDS: Final = 0.25
"""Shortest time between two drawings while a run goes on: each is a message to the browser."""


@magics_class
class ExperimentMagics(Magics):
    """Magics over `Lab.step`, `Lab.rerun`, `Lab.messages`, `Lab.parity` and `Lab.density`."""

    shell: InteractiveShell

    @cell(
        "ort_step",
        whole("-n", "STEPS", default="1"),
        takes("--optimizer", "NAME", read=arguments.variable),
        NO_MEMORY,
        LAB,
    )
    def ort_step(self, args: Line, line: str, cell: str) -> Run:
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
        lab = args.lab
        steps, optimizer = args.n, args.optimizer
        step = StepCell(self.shell, line, cell)
        watch = [*step.objects(), *([] if optimizer is None else [optimizer])]
        return lab.step(step, n=steps, watch=watch, source=step.source, memory=args.memory)

    @line(STEPS, NO_MEMORY, CHANGES, LAB)
    def ort_rerun(self, args: Line) -> Run:
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
        return args.lab.rerun(args.n, memory=args.memory, **args.changes)

    @line(
        whole("--run", "RUN"),
        takes("--level", "LEVEL", default=""),
        takes("--source", "SOURCE", default=""),
        takes("--stage", "STAGE", default=""),
        takes("--text", "TEXT", default=""),
        LAB,
    )
    def ort_messages(self, args: Line) -> Messages:
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
        return args.lab.messages.of(
            run=args.run, level=args.level, source=args.source, stage=args.stage, text=args.text
        )

    @line(STEPS, flag("--dropout"), no("seeds"), LAB)
    def ort_parity(self, args: Line) -> Parity:
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
        return args.lab.parity(**args.given("n"), dropout=args.dropout, seeds=args.seeds)

    @line(takes("batches", "BATCH", nargs="*"), whole("--measure", "ROUNDS"), LAB)
    def ort_density(self, args: Line) -> DensityReport | None:
        """Say how much of the model's inputs is padding or ignored, and what to do about it.

        ::

            %ort_density [--measure ROUNDS] [--lab NAME]
            %ort_density BATCH ... [--lab NAME]
            %ort_density on|off [--lab NAME]

        Arguments:

        - ``BATCH``: variables with batches to count; without, what the last run has counted.
        - ``on``: count each step from now on, and show the table here while steps run; ``off`` ends that.
        - ``--measure ROUNDS``: run the last step with and without the sparsity switches, in turns.
        - ``--lab NAME``: variable of the lab; the one wrapped last if not given.

        Example::

            %ort_density batch

        The same in Python::

            lab.density(batch)
            lab.set(print_input_density=True)  # on
            lab.density(measure=3)
        """
        lab = args.lab
        if args.batches in (["on"], ["off"]):
            if args.has("measure"):
                raise ArgumentError(f"{args.batches[0]} and --measure exclude each other.")
            lab.set(print_input_density=args.batches == ["on"])
            (follow if args.batches == ["on"] else unfollow)(lab)
            return None
        measure = args.measure or 0
        return lab.density(
            *(arguments.variable(name, args.variables) for name in args.batches), measure=measure
        )


def follow(lab: Lab) -> None:
    """Show what a lab counts in the output of this cell, at most four times a second, and once after each run."""
    if lab not in _followed:
        _followed[lab] = _Redrawing(lab)
        observe(lab, _followed[lab])
    _followed[lab].handle = display(DensityReport(Density(), "no step so far"), display_id=True)


def unfollow(lab: Lab) -> None:
    """Stop redrawing the table, which stays as it is; do nothing if there is none."""
    if lab in _followed:
        _followed[lab].handle = None


class _Redrawing:
    """Draws what the steps of a lab have counted, at its events; the lab keeps this object, which holds it weakly."""

    def __init__(self, lab: Lab) -> None:
        self.handle: DisplayHandle | None = None
        self._lab = weakref.ref(lab)
        self._drawn_at = 0.0

    def __call__(self, event: str) -> None:
        """Redraw where a step or a run has ended."""
        lab, handle = self._lab(), self.handle
        if lab is None or handle is None or not lab.options.print_input_density:
            return
        now = time.monotonic()
        is_step = event.startswith("progress:Step ") and now - self._drawn_at >= _REDRAW_SECONDS
        if event == "runs" or is_step:
            self._drawn_at = now
            handle.update(lab.density())


_followed: Final[weakref.WeakKeyDictionary[Lab, _Redrawing]] = weakref.WeakKeyDictionary()
