"""What all magics have in common: a line is declared and read, `-h` shows help, errors show what a user can correct."""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_magic, no_var_expand

from ortlab.errors import ArgumentError, OrtlabError, is_users
from ortlab.notebook.magics import arguments
from ortlab.runs.interrupts import interrupts_kept, say

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ortlab.lab.lab import Lab

Magic: TypeAlias = Callable[..., Any]
Reader: TypeAlias = Callable[[Any, Mapping[str, object]], Any]
"""Makes a value of a word of the line, or of several, and the user's variables."""

_AMOUNT = re.compile(r"^-(?=\.?[0-9])")


# ---- what stands behind a magic -------------------------------------------------------------------------------


class Argument(NamedTuple):
    """One argument of a magic, as it is declared."""

    name: str
    read: Reader | None  # None leaves the word as it is
    how: dict[str, Any]  # what argparse takes


def takes(name: str, metavar: str | None = None, *, read: Reader | None = None, **how: Any) -> Argument:
    """Declare an argument; `how` is as argparse has it."""
    return Argument(name, read, how if metavar is None else {"metavar": metavar, **how})


def whole(name: str, metavar: str, **how: Any) -> Argument:
    """Declare an argument that is a whole number, written out or as `$name`."""
    what = name if name.startswith("-") else metavar
    return takes(name, metavar, read=lambda word, held: arguments.number(word, held, what), **how)


def flag(name: str, **how: Any) -> Argument:
    """Declare an option without a value: False if it is not given."""
    return takes(name, action="store_true", **how)


def no(name: str) -> Argument:
    """Declare `--no-NAME`: NAME is True if it is not given."""
    return takes(f"--no-{name}", action="store_false", dest=name)


LAB: Final = takes("--lab", "NAME")
CHANGES: Final = takes("changes", "option=value", nargs="*", read=arguments.changes)
STEPS: Final = whole("-n", "STEPS")
ROUNDS: Final = whole("--rounds", "ROUNDS")
PART: Final = takes("--part", "PART")
RESUME: Final = flag("--resume")
# Where it is not given, None lets the lab decide.
NO_MEMORY: Final = takes("--no-memory", dest="memory", action="store_const", const=False)


class Parser(argparse.ArgumentParser):
    """Reads the line of one magic; what it cannot read raises ArgumentError, where argparse would end the kernel."""

    # With `minus`, words such as "-30%" are amounts, and not unknown options.

    def __init__(self, magic: str, *declared: Argument, minus: bool = False) -> None:
        # Python 3.14 colours usage lines, which a notebook's UsageError would show as escape codes.
        colour: dict[str, Any] = {"color": False} if sys.version_info >= (3, 14) else {}
        super().__init__(prog=magic.lstrip("%"), add_help=False, allow_abbrev=False, **colour)
        self.magic = magic
        self._minus = minus
        self.add_argument("-h", "--help", action="store_true", dest="help")
        self.readers = {}
        for one in declared:
            argument = self.add_argument(one.name, **one.how)
            if argument.nargs == argparse.ZERO_OR_MORE:
                argument.required = False  # argparse names it among what is missing beside another
            self.readers[argument.dest] = one.read

    def read(self, line: str) -> argparse.Namespace:
        """Parse the line of a magic; an ArgumentError says what is wrong with it and what its form is."""
        found = arguments.words(line)
        if found and found[-1].endswith("\\"):
            raise ArgumentError(
                "The line ends with a backslash.",
                why=f"The arguments of {self.magic} stand in its own line, and no line follows that could be one of"
                " them.",
                fix="Write the arguments in one line; a long value fits into a variable: $name.",
            )
        if {"-h", "--help"} & set(found):  # before argparse complains that something is missing
            return argparse.Namespace(help=True)
        if self._minus:
            # argparse takes any word with a hyphen in front for an option, but not one with a minus sign.
            found = [_AMOUNT.sub("\u2212", word) for word in found]
        return self.parse_intermixed_args(found)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        usage = " ".join(self.format_usage().split()).removeprefix(f"usage: {self.prog}")
        raise ArgumentError(
            f"{self.magic}: {message}.",
            why=f"Its form is {self.magic}{usage}.",
            fix=f"{self.magic}? shows what each argument means.",
        )


class Line:
    """The arguments of a magic by name; each is read when it is asked for, so that nothing is looked up in vain."""

    # One that the line does not name is what its declaration says, None as a rule.

    def __init__(
        self, found: argparse.Namespace, readers: Mapping[str, Reader | None], variables: dict[str, object]
    ) -> None:
        self._found = found
        self._readers = readers
        self.variables = variables

    def __getattr__(self, name: str) -> Any:
        word, read = getattr(self._found, name), self._readers[name]
        return read(word, self.variables) if read and isinstance(word, (str, list)) else word

    @property
    def lab(self) -> Lab:
        """The lab in the variable that `--lab` names; without, the lab wrapped last, by magic or in Python."""
        return chosen_lab(self._found.lab, self.variables)

    def has(self, *names: str) -> bool:
        """Tell whether the line gives one of these arguments."""
        return any(getattr(self._found, name) not in (None, False, []) for name in names)

    def given(self, *names: str) -> dict[str, Any]:
        """Return those of these arguments that the line gives, by name."""
        return {name: getattr(self, name) for name in names if self.has(name)}


def chosen_lab(name: str | None, variables: Mapping[str, object]) -> Lab:
    """Return the lab in a variable; for None the lab wrapped last."""
    from ortlab.lab.lab import Lab, latest

    if name is None:
        lab = latest()
        if lab is None:
            raise ArgumentError("No model is wrapped yet.", fix="%ort_wrap model")
        return lab
    labs = [key for key, held in variables.items() if isinstance(held, Lab) and not key.startswith("_")]
    found = arguments.variable(name, variables, fitting=labs)
    if not isinstance(found, Lab):
        raise ArgumentError(
            f"{name!r} is a {type(found).__name__}, not a lab.",
            fix=" or ".join(f"--lab {lab}" for lab in labs) or "lab = %ort_wrap model",
        )
    return found


# ---- the magics themselves ------------------------------------------------------------------------------------


class InShell(Protocol):
    """What has a shell: an instance of IPython's `Magics`."""

    shell: InteractiveShell


def line(*declared: Argument, minus: bool = False) -> Callable[[Magic], Magic]:
    """Make a line magic of a method, by its name; the method takes a `Line`."""

    def decorate(method: Magic) -> Magic:
        parser = Parser(f"%{method.__name__}", *declared, minus=minus)
        magic: Magic = line_magic(no_var_expand(_command(parser, method)))
        return magic

    return decorate


def cell(name: str, *declared: Argument) -> Callable[[Magic], Magic]:
    """Make a cell magic of a method; the method takes a `Line`, the line as it is written, and the cell."""

    def decorate(method: Magic) -> Magic:
        magic = no_var_expand(_command(Parser(f"%%{name}", *declared), method))
        found: Magic = cell_magic(name)(magic)  # type: ignore[arg-type] # it has no way to say what a name returns
        return found

    return decorate


def _command(parser: Parser, method: Magic) -> Magic:
    """Make a magic of a method and of what reads its line."""
    # An `OrtlabError` is re-raised as exactly `UsageError`: IPython shows that without the frames inside ortlab, which
    # say no more than the message, and would show a subclass with them. Where the user's own code caused it, the
    # message ends with the line. Ctrl-C passes with one line that says what is kept, and no traceback. Any other error
    # passes, its traceback cut down to what the user's cell did.

    @functools.wraps(method)
    def magic(self: InShell, line: str, cell: str | None = None) -> Any:
        __tracebackhide__ = True  # IPython leaves this frame out
        try:
            found = parser.read(line)
            if found.help:
                print(inspect.getdoc(method))  # noqa: T201 - help that was asked for
                return None
            args = Line(found, parser.readers, self.shell.user_ns)
            with interrupts_kept(errors=False):
                return method(self, args) if cell is None else method(self, args, line, cell)
        except OrtlabError as error:
            where = place(error, self.shell)
            raise UsageError(f"{error}\nWhere: {where}" if where else str(error)) from error
        except KeyboardInterrupt as interrupt:
            # One line, where a traceback would show what happened to run.
            default = f"Stopped {parser.magic}; nothing is kept, and all is as it was before."
            raise say(interrupt, str(interrupt) or default)  # noqa: B904 - it is the same one
        except Exception as error:  # noqa: BLE001 - its traceback is cut
            # Not "from" anything: that would hide what the user's code was handling when it raised.
            raise error.with_traceback(since_cell(error.__traceback__, self.shell))  # noqa: B904

    return magic


# ---- which part of a traceback is the user's ------------------------------------------------------------------


def since_cell(frames: TracebackType | None, shell: InteractiveShell) -> TracebackType | None:
    """Cut a traceback down to what a cell's code did: from the first frame in the user's namespace on."""
    found = frames
    while found is not None:
        if found.tb_frame.f_globals is shell.user_global_ns:
            return found
        found = found.tb_next
    return frames


def place(error: BaseException, shell: InteractiveShell) -> str:
    """Say in which line of the user's code the causes of an error arose, or what called them; "" if in none."""
    causes = list(_causes(error))
    for one in (*causes, error) if causes else ():
        for frame in reversed(traceback.extract_tb(one.__traceback__)):
            if is_users(frame.filename):
                label, name = shell.compile.format_code_name(frame.filename) or ("File", frame.filename)
                return f"{label} {name}, line {frame.lineno}, in {frame.name}: {frame.line}"
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes, the first one first: it is nearest to the user's code."""
    cause = error.__cause__ or error.__context__
    if cause is not None:
        yield from _causes(cause)
        yield cause
