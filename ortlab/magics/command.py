"""What every magic has in common: its line is parsed, `-h` shows help, our errors have no traceback."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from ortlab.errors import OrtlabError

if TYPE_CHECKING:
    from ortlab.magics.arguments import Parser

Magic = Callable[..., Any]


def command(parser: Parser) -> Callable[[Magic], Magic]:
    """Make a magic of a method that takes parsed arguments (and, for a cell magic, the line and the cell).

    An `OrtlabError` is re-raised as exactly `UsageError`: IPython shows that without the frames inside ortlab,
    which say no more than the message, and would show a subclass with them. Any other error passes unchanged:
    it is the user's, or a fault of ours that needs its traceback.

    Parameters
    ----------
    parser
        What the line may hold.
    """

    def decorate(method: Callable[..., Any]) -> Magic:
        @functools.wraps(method)
        def magic(self: object, line: str, cell: str | None = None) -> Any:
            __tracebackhide__ = True
            try:
                arguments: argparse.Namespace = parser.read(line)
                if arguments.help:
                    print(inspect.getdoc(method))  # noqa: T201 - help that was asked for
                    return None
                return method(self, arguments) if cell is None else method(self, arguments, line, cell)
            except OrtlabError as error:
                raise UsageError(str(error)) from error

        return magic

    return decorate
