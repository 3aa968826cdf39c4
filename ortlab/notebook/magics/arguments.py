"""What stands behind a magic: words, `option=value` pairs, names of variables, a comment; nothing is evaluated."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ortlab.errors import ArgumentError, OptionError, did_you_mean
from ortlab.options.options import switches

_QUOTED = re.compile(r""""((?:\\.|[^"\\])*)"|'((?:\\.|[^'\\])*)'""")
_PAIR = re.compile(r"(?P<name>[^\W\d]\w*)=(?P<value>.*)", re.DOTALL)


def words(line: str) -> list[str]:
    """Split a line at spaces outside quotes and brackets; a word that begins with `#` begins a comment."""
    # `path="my runs"/a`, `plan=['a', 'b']` and `a#b` are one word each. Quotes that enclose a whole word are stripped;
    # those inside `option="..."` are left for `changes`.
    found = [""]
    for character, outside in _scanned(line):
        if outside and character == "#" and not found[-1]:
            break
        if outside and character.isspace():
            found.append("")
        else:
            found[-1] += character
    return [word if _PAIR.fullmatch(word) else unquoted(word) for word in found if word]


def _scanned(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each character, and whether it stands outside quotes and brackets."""
    quote, escaped, depth = "", False, 0
    for character in text:
        outside = not quote and depth == 0
        if quote:
            closes = character == quote and not escaped
            escaped = character == "\\" and not escaped
            quote = "" if closes else quote
        elif character in "\"'":
            quote, outside = character, False
        elif character in "[(":
            depth, outside = depth + 1, False
        elif character in "])" and depth:
            depth -= 1
        yield character, outside
    if quote:
        raise ArgumentError(
            f"A quotation does not end: {text.strip()}", fix=f"Close it with the same quote: {quote}"
        )
    if depth:
        raise ArgumentError(
            f"A bracket is not closed: {text.strip()}",
            fix="Close it; where it is a part of a text, quote the text.",
        )


def unquoted(word: str) -> str:
    """Strip quotes and the backslashes that protect quotes: `"a b"/c` becomes `a b/c`."""
    return _QUOTED.sub(lambda m: re.sub(r"""\\(["'\\])""", r"\1", m[1] if m[1] is not None else m[2]), word)


def changes(pairs: Iterable[str], variables: Mapping[str, object]) -> dict[str, Any]:
    """Read `option=value` pairs; the options themselves turn text into their types. `engine` may be among them."""
    # A value is plain text (`1`, `True`, `INFO`, `Gelu+:1:-1`), a quoted text, a bracketed list of literals, or `$name`
    # for the value of one variable. A bare word is never looked up: a variable `INFO` changes nothing.
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
            lists = "%ort_options lists the options, and -h behind the magic shows what else it takes."
            meant = did_you_mean(name, known, cutoff=0.5)
            raise OptionError(f"There is no option {name!r}.", fix=f"{meant} {lists}".strip())
        read[name] = value(parts["value"], variables)
    return read


def parts(
    words_: Sequence[str] | None, variables: Mapping[str, object]
) -> tuple[list[Any] | None, list[str]]:
    """Read what follows `--only`: paths with spaces or commas between them, or `$name` for what a variable holds."""
    # Returns what `ortlab.wrap` takes, None if there is no `--only`, and the `option=value` pairs that came after the
    # paths.
    if words_ is None:
        return None, []
    pairs = [word for word in words_ if _PAIR.fullmatch(word)]
    only: list[Any] = []
    for word in words_:
        for path in word.split(",") if word not in pairs else ():
            if path.startswith("$"):
                held = variable(path[1:], variables)
                only += held if isinstance(held, (list, tuple)) else [held]
            elif path:
                only.append(path)
    return only, pairs


def grid(words_: Sequence[str], variables: Mapping[str, object]) -> object:
    """Read the grid of a sweep: `option=value,value` pairs, or one `$name` that holds a grid or a list of points."""
    if len(words_) == 1 and words_[0].startswith("$"):
        return variable(words_[0][1:], variables)
    read: dict[str, object] = {}
    for word in words_:
        parts = _PAIR.fullmatch(word)
        if not parts:
            raise ArgumentError(
                f"{word!r} is not option=value,value.",
                why="A line holds pairs, or one $name of a grid or a list of points.",
                fix="%ort_options lists the options.",
            )
        name = parts["name"]
        if name in read:
            raise ArgumentError(f"{name} is given twice.", fix="Write all its values after one equals sign.")
        read[name] = values(parts["value"], variables)
    return read


def configurations(groups: Sequence[Sequence[str]], variables: Mapping[str, object]) -> list[Any]:
    """Read configurations: each group is `option=value` pairs, or one `$name` of a dict or a list of dicts."""
    found: list[Any] = []
    for group in groups:
        if len(group) == 1 and group[0].startswith("$"):
            held = variable(group[0][1:], variables)
            found += held if isinstance(held, (list, tuple)) else [held]
        else:
            found.append(changes(group, variables))
    return found


def values(text: str, variables: Mapping[str, object]) -> list[object]:
    """Read values with commas between them; commas inside quotes and brackets do not separate."""
    # A `$name` that holds a list stands for all its values, and so does one bracketed list of things that are not all
    # texts: `[0, 1, 2]`, `[['Gelu+:1:-1'], []]`. A bracketed list of texts is one value of an option that holds
    # several: `memory_plan=[],['Gelu+:1:-1']`.
    parts = _split(text)
    if not all(parts):
        where = f"in {text!r}" if text else "behind an equals sign"
        raise ArgumentError(
            f"A value is missing {where}.",
            fix="Write for example memory_level=0,1,2, or recompute=[] for none.",
        )
    found = [value(part, variables) for part in parts]
    if len(found) == 1 and isinstance(found[0], (list, tuple, range)):
        only = list(found[0])
        if parts[0].startswith("$") or (only and not all(isinstance(item, str) for item in only)):
            return only
    return found


def _split(text: str) -> list[str]:
    """Split at commas outside quotes and brackets."""
    parts = [""]
    for character, outside in _scanned(text):
        if outside and character == ",":
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def value(text: str, variables: Mapping[str, object]) -> object:
    """Read one value: `$name`, a bracketed list of literals, a quoted text, or plain text."""
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


def plan_sets(words_: Iterable[str], variables: Mapping[str, object]) -> list[object]:
    """Read sets of plans: `Gelu+:1:-1`, several with commas between them, or `$name` of a set or a list of sets."""
    # A list of sets is a list; a tuple, as in `lab.options.memory_plan`, is one set.
    found: list[object] = []
    for word in words_:
        if not word.startswith("$"):
            found.append(tuple(word.split(",")))
            continue
        held = variable(word[1:], variables)
        found += held if isinstance(held, list) else [held]
    return found


def path(text: str, variables: Mapping[str, object]) -> str:
    """Read the path of a file, written out or as `$name`."""
    found = variable(text[1:], variables) if text.startswith("$") else text
    if not isinstance(found, (str, os.PathLike)):
        raise ArgumentError(f"{text} holds a {type(found).__name__}, not the path of a file.")
    return os.fspath(found)


def amount(words_: Sequence[str], variables: Mapping[str, object]) -> Any:
    """Join the words of an amount of memory, "400 MiB"; `$name` is what a variable holds, nothing is None."""
    text = " ".join(words_)
    return variable(text[1:], variables) if text.startswith("$") else text or None


def sizes(pairs: Iterable[str], variables: Mapping[str, object]) -> dict[str, Any]:
    """Read `name=number` pairs, such as `batch=16` or `label_density=0.15`; a number may be `$name`."""
    read: dict[str, Any] = {}
    for pair in pairs:
        parts = _PAIR.fullmatch(pair)
        if not parts or parts["name"] in read:
            raise ArgumentError(
                f"{pair!r} is no size, or given twice.", fix="Write for example batch=16 sequence=512."
            )
        found = value(parts["value"], variables)
        if isinstance(found, str) and re.fullmatch(r"[+-]?\d+(\.\d+)?", found):
            found = float(found) if "." in found else int(found)
        read[parts["name"]] = found
    return read


def number(text: str, variables: Mapping[str, object], what: str) -> int:
    """Read a whole number, written out or as `$name`; `what` names the argument in the error."""
    found = value(text, variables)
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    if isinstance(found, str) and re.fullmatch(r"[+-]?\d+", found):
        return int(found)
    raise ArgumentError(f"{what} takes a whole number, not {found!r}; for example {what} 20.")


def numbers(text: str, variables: Mapping[str, object], what: str) -> list[int]:
    """Read whole numbers with commas between them, or `$name` of a list of them; `what` is as for `number`."""
    found = values(text, variables)
    return [one if isinstance(one, int) else number(str(one), variables, what) for one in found]


def variable(path: str, variables: Mapping[str, object], fitting: Iterable[str] | None = None) -> Any:
    """Look up a variable, or an attribute of one (`trainer.model`); expressions are refused."""
    names = path.split(".")
    if not all(name.isidentifier() for name in names):
        raise ArgumentError(
            f"{path!r} is not the name of a variable.",
            why="A magic evaluates no expressions.",
            fix="Assign it to a variable first, or make the plain Python call that the magic's help shows.",
        )
    if names[0] not in variables:
        close = _suggestion(names[0], variables, fitting)
        fix = close or f"Run a cell that defines it before: {names[0]} = ..."
        raise ArgumentError(f"There is no variable {names[0]!r}.", fix=fix)
    found = variables[names[0]]
    for done, name in enumerate(names[1:], start=1):
        if not hasattr(found, name):
            owner = ".".join(names[:done])
            close = did_you_mean(name, dir(found)) or f"dir({owner}) lists those that it has."
            raise ArgumentError(f"{owner} has no attribute {name!r}.", fix=close)
        found = getattr(found, name)
    return found


def _suggestion(name: str, variables: Mapping[str, object], fitting: Iterable[str] | None) -> str:
    offered = [key for key in (variables if fitting is None else fitting) if not key.startswith("_")]
    # Of the few that fit, any may be meant; of all variables, only those with a like name.
    if meant := did_you_mean(name, offered, most=3, cutoff=0.5):
        return meant
    return f"Did you mean {' or '.join(map(repr, offered[:3]))}?" if fitting is not None and offered else ""
