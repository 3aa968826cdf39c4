"""The body of a `%%ort_step` cell as a function that runs one training step in the user's namespace."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from ortlab.errors import ArgumentError

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LOSS = "loss"
"""Variable in which a step cell leaves its loss."""

_IDENTIFIER = re.compile(r"[^\W\d]\w*")


class StepCell:
    """One training step, written as a cell; calling it runs the cell once.

    The cell is compiled once, runs where every other cell runs, and leaves its variables there. A traceback points at
    the cell's own lines, because the source is registered with IPython as that of a cell is; `line`, the rest of the
    magic's own line, keeps its place for that. Raises ArgumentError if the cell awaits or is a cell magic itself.
    """

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
        """Return the variables that the cell mentions, or a function it mentions; optimizers are among them.

        They are in the order of the names in the code, each once.
        """
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
