"""What every magic has in common: its line is parsed, `-h` shows help, errors show what the user can mend."""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from IPython.core.error import UsageError

from ortlab.errors import OrtlabError
from ortlab.notebook.magics import user_frames
from ortlab.runs.interrupts import interrupts_kept, say

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.notebook.magics.arguments import Parser

Magic = Callable[..., Any]


class InShell(Protocol):
    """What has a shell: an instance of IPython's `Magics`."""

    shell: InteractiveShell


def command(parser: Parser) -> Callable[[Magic], Magic]:
    """Make a magic of a method that takes parsed arguments (and, for a cell magic, the line and the cell).

    An `OrtlabError` is re-raised as exactly `UsageError`: IPython shows that without the frames inside ortlab, which
    say no more than the message, and would show a subclass with them. Where the user's own code caused it, the message
    ends with the line. Ctrl-C passes with one line that says what is kept, and no traceback. Any other error passes,
    its traceback cut down to what the user's cell did.
    """

    def decorate(method: Callable[..., Any]) -> Magic:
        @functools.wraps(method)
        def magic(self: InShell, line: str, cell: str | None = None) -> Any:
            __tracebackhide__ = True  # IPython leaves this frame out
            try:
                arguments: argparse.Namespace = parser.read(line)
                if arguments.help:
                    print(inspect.getdoc(method))  # noqa: T201 - help that was asked for
                    return None
                with interrupts_kept(errors=False):
                    return method(self, arguments) if cell is None else method(self, arguments, line, cell)
            except OrtlabError as error:
                place = user_frames.place(error, self.shell)
                raise UsageError(f"{error}\nWhere: {place}" if place else str(error)) from error
            except (
                KeyboardInterrupt
            ) as interrupt:  # one line, where a traceback would show what happened to run
                default = f"Stopped {parser.magic}; nothing is kept, and all is as it was before."
                raise say(interrupt, str(interrupt) or default)  # noqa: B904 - it is the same one
            except Exception as error:  # noqa: BLE001 - its traceback is cut
                # Not "from" anything: that would hide what the user's code was handling when it raised.
                raise error.with_traceback(user_frames.since_cell(error.__traceback__, self.shell))  # noqa: B904

        return magic

    return decorate
