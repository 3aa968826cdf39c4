"""Records in files: written as JSON, and read with an error that says what is wrong with a file or its layout."""

from __future__ import annotations

import builtins
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from functools import cache
from itertools import repeat
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from ortlab.errors import LedgerError
from ortlab.options.option_files import text_of

if TYPE_CHECKING:
    from typing_extensions import Self

_Content = TypeVar("_Content", bound="list[Any] | dict[str, Any]")
_Record = TypeVar("_Record")


class JsonRecord:
    """A record that goes to a JSON file and comes back.

    Parameters
    ----------
    noun
        What users call it, as in "budget".
    layout
        Number of the layout that it has as plain JSON types; no other is read.
    """

    _noun: ClassVar[str]
    _layout: ClassVar[int]

    def __init_subclass__(cls, *, noun: str, layout: int) -> None:
        """Keep what the class is called, and its layout."""
        super().__init_subclass__()
        cls._noun, cls._layout = noun, layout

    def _fields(self) -> dict[str, Any]:
        """Return its fields as plain JSON types."""
        return _plain_fields(self)

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Self:
        """Make the record of what `_fields` returned; `from_dict` explains what is raised where a field is missing."""
        return rebuilt(cls, fields)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, readable by `from_dict`."""
        return {"record": self._noun, "schema": self._layout, **self._fields()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild it from `to_dict`.

        Raises
        ------
        LedgerError
            If the record was written by another layout, or a field is missing or unknown.
        """
        with explained(f"This {cls._noun}"):
            return checked(cls._of_fields(without_layout(record, cls._layout, f"This {cls._noun}")))

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, and return the path."""
        return write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises
        ------
        LedgerError
            If the file cannot be read, or holds something else.
        """
        content = read(
            path,
            dict,
            file=f"The file {path} of a {cls._noun}",
            other=f"The file {path} is not a {cls._noun}.",
            fix=f"Give a file that {cls.__name__}.save wrote.",
        )
        return shown(cls.from_dict(content), f"The file {path} of a {cls._noun}")


def plain(value: Any) -> Any:
    """Return plain JSON types: a record by its own `to_dict`, any other data class by its fields."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _plain_fields(record: Any) -> dict[str, Any]:
    names = [one.name for one in fields_of(record)] if is_dataclass(record) else vars(record)
    return {name: plain(getattr(record, name)) for name in names}


def rebuilt(kind: type[_Record], found: Mapping[str, Any]) -> _Record:
    """Make a record of its fields as plain JSON types; what they hold is rebuilt as the record declares it."""
    kinds = _kinds(cast("Any", kind))
    return kind(**{name: _value(kinds[name], value) for name, value in found.items()})


def _value(kind: Any, value: Any) -> Any:
    """Rebuild a value of a declared kind; one of another kind stays as it is, for `checked` to refuse."""
    origin, inner = get_origin(kind), get_args(kind)
    if value is None:
        return None
    if origin in {UnionType, Union}:  # of X | None the X; of a switch's value a tuple of names
        tuples = [one for one in inner if get_origin(one) is tuple]
        several = [one for one in inner if one is not NoneType]
        return _value(several[0] if len(several) == 1 else next(iter(tuples), Any), value)
    if origin in {tuple, list, Sequence} and isinstance(value, list | tuple):
        every = inner if origin is tuple and inner[-1] is not Ellipsis else repeat(inner[0], len(value))
        made = [_value(one, held) for one, held in zip(every, value, strict=True)]
        return made if origin is list else tuple(made)
    if origin in {dict, Mapping} and isinstance(value, Mapping):
        return {
            inner[0](name) if inner[0] is int else name: _value(inner[1], one) for name, one in value.items()
        }
    if hasattr(kind, "from_dict"):
        return kind.from_dict(value)
    return rebuilt(cast("type[Any]", kind), value) if is_dataclass(kind) else value


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Let what a damaged record raises, while it is made of JSON, be a LedgerError; `what` names it: "This budget"."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise LedgerError(
            f"{what} cannot be read.", why=f"A field is missing, unknown or of another kind: {error}."
        ) from error


# ---- what a file may hold ---------------------------------------------------------------------------------------


def checked(record: _Record) -> _Record:
    """Return a record that was made of JSON; raise TypeError where a field holds something of another kind."""
    _check(record)
    return record


def shown(record: _Record, file: str) -> _Record:
    """Return a record that was read; raise LedgerError where its values are such that it cannot be shown."""
    # Each field may be of its kind, and yet a part be named that is not there. That is said where the file is read, not
    # in the cell where the record is looked at. `file` names it, as in "The file runs.json".
    try:
        _ = repr(record), str(record)
    except Exception as error:
        raise LedgerError(
            f"{file} holds values that do not belong together.",
            why=f"{type(error).__name__}: {error}.",
            fix="Give a file as it was saved.",
        ) from error
    return record


def _check(record: object) -> None:
    fields = vars(record) if hasattr(record, "__dict__") else {}
    for name, kind in _kinds(cast("Any", type(record))).items():
        value = fields.get(name, fields.get(f"_{name}", _ABSENT))
        if value is not _ABSENT and not _is_of(kind, value):
            raise TypeError(f"{name} is {str(value)[:_LONGEST]!r}")


_ABSENT: Final = object()
_LONGEST: Final = 60


@cache
def _kinds(of: type[Any]) -> dict[str, Any]:
    """Return the declared kind of each field of a class; a name that is known to type checkers only is anything."""
    declared = of if is_dataclass(of) else of.__init__
    hints = get_type_hints(declared, localns=_Names(vars(sys.modules[of.__module__])))
    return {
        name: kind for name, kind in hints.items() if name != "return" and get_origin(kind) is not ClassVar
    }


class _Anything:
    """What a name stands for that only type checkers know."""

    def __class_getitem__(cls, _: object) -> type[_Anything]:
        return cls


class _Names(dict[str, Any]):
    """The names of a module, and `_Anything` for those that it lacks."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return _Anything


def _is_of(kind: Any, value: object) -> bool:  # noqa: C901, PLR0911 - one kind of declaration after another
    """Say whether a value is of a kind; data classes in it are checked field by field."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in {UnionType, Union}:
        return any(_is_of(one, value) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        return isinstance(value, tuple | list) and len(value) == len(inner) and all(map(_is_of, inner, value))
    wanted = origin or kind
    if not _is_usual(value):
        return False
    if wanted is float:
        return isinstance(value, float | int)
    if wanted in {_Anything, Any} or not isinstance(wanted, type):
        return True
    if wanted is tuple:  # which JSON knows as a list
        wanted = (tuple, list)
    if not isinstance(value, wanted):
        return False
    if isinstance(value, Mapping):
        return len(inner) != 2 or all(  # noqa: PLR2004 - keys, values
            _is_of(inner[0], key) and _is_of(inner[1], one) for key, one in value.items()
        )
    if inner and isinstance(value, list | tuple):
        return all(_is_of(inner[0], one) for one in value)
    if is_dataclass(value):
        _check(value)
    return True


def _is_usual(value: object) -> bool:
    """Tell whether a number fits into 64 bits, and a text into a file: what computes and draws with them insists."""
    if isinstance(value, int):
        return -_LARGEST <= value < _LARGEST
    return not isinstance(value, str) or value.isascii() or not _HALF.search(value)


_LARGEST: Final = 2**63
_HALF: Final = re.compile("[\ud800-\udfff]")
"""One half of a pair that stands for a character in UTF-16; JSON can write it alone, UTF-8 cannot."""


def write(path: str | Path, content: object) -> Path:
    """Write plain JSON types to a file, and return its path."""
    target = Path(path)
    target.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return target


def read(
    path: str | Path, kind: type[_Content] | tuple[type, ...], *, file: str, other: str, fix: str
) -> _Content:
    """Read a file that `write` wrote, whose content is a `dict`, a `list` or either of them."""
    try:
        content = json.loads(text_of(Path(path)))
    except (OSError, ValueError) as error:
        raise LedgerError(f"{file} cannot be read.", why=str(error)) from error
    except RecursionError as error:
        raise LedgerError(f"{file} cannot be read.", why="It is nested too deeply.", fix=fix) from error
    if not isinstance(content, kind):
        raise LedgerError(other, fix=fix)
    return cast("_Content", content)


def without_layout(
    record: Mapping[str, Any], layout: int, what: str, fix: str = "Read it with the ortlab that wrote it."
) -> dict[str, Any]:
    """Return a record's fields, once its layout (field "schema") is known to be the present one."""
    if not isinstance(record, Mapping):
        raise TypeError(f"it is {str(record)[:_LONGEST]!r}")
    fields = dict(record)
    fields.pop("record", None)  # for `ortlab.load`, which does not know what a file holds
    found = fields.pop("schema", None)
    if found != layout:
        raise LedgerError(f"{what} has layout {found!r}, and this ortlab reads layout {layout}.", fix=fix)
    return fields
