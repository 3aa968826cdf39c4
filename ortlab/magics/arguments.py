"""What stands behind a magic: words, `option=value` pairs and names of variables; nothing is evaluated."""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from ortlab.errors import ArgumentError
from ortlab.options import declaration, switches

# A run of quoted texts, brackets and plain characters: `path="my runs"/a` and `plan=['a', 'b']` are one word.
_WORD = re.compile(r"""(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[\[(][^\])]*[\])]|[^\s"'])+""")
_QUOTED = re.compile(r""""((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'""")
_PAIR = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<value>.*)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Reads the line of one magic; what it cannot read raises, where argparse would end the kernel.

    Parameters
    ----------
    magic
        Name of the magic with its percent signs.
    """

    def __init__(self, magic: str) -> None:
        # Python 3.14 colours usage lines, which a notebook's UsageError would show as escape codes.
        colour: dict[str, Any] = {"color": False} if sys.version_info >= (3, 14) else {}
        super().__init__(prog=magic.lstrip("%"), add_help=False, allow_abbrev=False, **colour)
        self._magic = magic
        self.add_argument("-h", "--help", action="store_true", dest="help")

    def add_lab(self) -> None:
        """Accept `--lab NAME`, for a magic that acts on a lab."""
        self.add_argument("--lab", metavar="NAME")

    def add_changes(self) -> None:
        """Accept `option=value` pairs."""
        self.add_argument("changes", nargs="*", metavar="option=value")

    def read(self, line: str) -> argparse.Namespace:
        """Parse the line of a magic.

        Raises
        ------
        ArgumentError
            If a quotation does not end, an argument is unknown, or one is missing.
        """
        found = words(line)
        if {"-h", "--help"} & set(found):  # before argparse complains that something is missing
            return argparse.Namespace(help=True)
        return self.parse_intermixed_args(found)

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        usage = " ".join(self.format_usage().split()).removeprefix(f"usage: {self.prog}")
        raise ArgumentError(
            f"{self._magic}: {message}.",
            why=f"Its form is {self._magic}{usage}.",
            fix=f"{self._magic}? shows what each argument means.",
        )


def words(line: str) -> list[str]:
    """Split a line at spaces outside quotes and brackets.

    Quotes that enclose a whole word are stripped; those inside `option="..."` are left for `changes`.

    Raises
    ------
    ArgumentError
        If a quotation does not end.
    """
    if _WORD.sub("", line).strip():
        raise ArgumentError(f"A quotation does not end: {line.strip()}", fix="Close it with the same quote.")
    return [word if _PAIR.fullmatch(word) else unquoted(word) for word in _WORD.findall(line)]


def unquoted(word: str) -> str:
    """Strip quotes and the backslashes that protect quotes: `"a b"/c` becomes `a b/c`."""
    return _QUOTED.sub(lambda m: re.sub(r"""\\(["'\\])""", r"\1", m[1] if m[1] is not None else m[2]), word)


def changes(pairs: Iterable[str], variables: Mapping[str, object]) -> dict[str, Any]:
    """Read `option=value` pairs; the options themselves turn text into their types.

    A value is plain text (`1`, `True`, `INFO`, `Gelu+:1:-1`), a quoted text, a bracketed list of literals, or
    `$name` for the value of one variable. A bare word is never looked up: a variable `INFO` changes nothing.

    Parameters
    ----------
    pairs
        Words of the form `option=value`.
    variables
        The user's namespace.

    Returns
    -------
    dict
        Values by option name; `engine` may be among them.

    Raises
    ------
    ArgumentError
        If a word is not a pair, an option is given twice, or a variable does not exist.
    OptionError
        If there is no such option.
    """
    known = {one.name for one in switches()} | {"engine"}
    read: dict[str, Any] = {}
    for pair in pairs:
        parts = _PAIR.fullmatch(pair)
        if not parts:
            raise ArgumentError(f"{pair!r} is not option=value.", fix="%ort_options lists the options.")
        name = parts["name"]
        if name in read:
            raise ArgumentError(f"{name} is given twice.", fix="Leave one of the two out.")
        if name not in known:
            declaration(name)  # raises, and suggests the near name
        read[name] = value(parts["value"], variables)
    return read


def value(text: str, variables: Mapping[str, object]) -> object:
    """Read one value: `$name`, a bracketed list of literals, a quoted text, or plain text.

    Raises
    ------
    ArgumentError
        If the variable does not exist, or the list holds something other than literals.
    """
    if text.startswith("$"):
        return variable(text[1:], variables)
    if text[:1] in {"[", "("}:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ArgumentError(
                f"{text} is not a list of literals.",
                why="A magic evaluates no expressions.",
                fix="Quote its texts, as in ['a', 'b'], or put it into a variable and write $name.",
            ) from None
    return unquoted(text)


def path(text: str, variables: Mapping[str, object]) -> str:
    """Read the path of a file, written out or as `$name`.

    Raises
    ------
    ArgumentError
        If the variable does not exist or holds something else.
    """
    found = variable(text[1:], variables) if text.startswith("$") else text
    if not isinstance(found, (str, os.PathLike)):
        raise ArgumentError(f"{text} holds a {type(found).__name__}, not the path of a file.")
    return os.fspath(found)


def number(text: str, variables: Mapping[str, object], what: str) -> int:
    """Read a whole number, written out or as `$name`.

    Raises
    ------
    ArgumentError
        If it is not one; `what` names the argument.
    """
    found = value(text, variables)
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    if isinstance(found, str) and re.fullmatch(r"[+-]?\d+", found):
        return int(found)
    raise ArgumentError(f"{what} takes a whole number, not {found!r}.", fix=f"Write for example {what} 20.")


def variable(path: str, variables: Mapping[str, object], fitting: Iterable[str] | None = None) -> Any:
    """Look up a variable, or an attribute of one (`trainer.model`); expressions are refused.

    Parameters
    ----------
    path
        A name, or names joined by dots.
    variables
        The user's namespace.
    fitting
        Names of the variables that would fit; any may if not given.

    Raises
    ------
    ArgumentError
        If it is not a name, or there is no such variable or attribute.
    """
    names = path.split(".")
    if not all(name.isidentifier() for name in names):
        raise ArgumentError(
            f"{path!r} is not the name of a variable.",
            why="A magic evaluates no expressions.",
            fix="Assign it to a variable first, or make the plain Python call that the magic's help shows.",
        )
    if names[0] not in variables:
        close = _suggestion(names[0], variables, fitting)
        raise ArgumentError(f"There is no variable {names[0]!r}.", fix=close)
    found = variables[names[0]]
    for done, name in enumerate(names[1:], start=1):
        if not hasattr(found, name):
            raise ArgumentError(f"{'.'.join(names[:done])} has no attribute {name!r}.")
        found = getattr(found, name)
    return found


def _suggestion(name: str, variables: Mapping[str, object], fitting: Iterable[str] | None) -> str:
    offered = [key for key in (variables if fitting is None else fitting) if not key.startswith("_")]
    # Of the few that fit, any may be meant; of all variables, only those with a like name.
    close = difflib.get_close_matches(name, offered, cutoff=0.5) or ([] if fitting is None else offered[:3])
    return f"Did you mean {' or '.join(close)}?" if close else ""
