"""Records in files: written as JSON, and read with an error that says what is wrong with a file or its layout."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from ortlab.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

_Content = TypeVar("_Content", bound="list[Any] | dict[str, Any]")
_Record = TypeVar("_Record")


class JsonRecord(ABC):
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

    @abstractmethod
    def _fields(self) -> dict[str, Any]:
        """Return plain JSON types."""

    @classmethod
    @abstractmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Self:
        """Make the record of what `_fields` returned; `from_dict` explains what is raised where a field is missing."""

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
        fields = without_layout(record, cls._layout, f"This {cls._noun}")
        try:
            return cls._of_fields(fields)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise LedgerError(
                f"This {cls._noun} cannot be read.", why=f"A field is missing or unknown: {error}."
            ) from error

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
        return cls.from_dict(content)


def rebuilt(kind: type[_Record], fields: Mapping[str, Any]) -> _Record:
    """Make a data class of its fields as plain JSON types; data classes and tuples in them are rebuilt as well.

    Raises KeyError for a field that it does not have, and TypeError where one is missing.
    """
    types = get_type_hints(kind)
    return kind(**{name: _value(types[name], value) for name, value in fields.items()})


def _value(kind: Any, value: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType and len(inner) == 2 and NoneType in inner:  # noqa: PLR2004 - X | None
        return None if value is None else _value(next(one for one in inner if one is not NoneType), value)
    if origin is tuple:
        return tuple(_value(inner[0], one) for one in value)
    if is_dataclass(kind):
        reads = getattr(kind, "from_dict", None)
        return reads(value) if reads else rebuilt(cast("type[Any]", kind), value)
    return value


def write(path: str | Path, content: object) -> Path:
    """Write plain JSON types to a file, and return its path."""
    target = Path(path)
    target.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return target


def read(
    path: str | Path, kind: type[_Content] | tuple[type, ...], *, file: str, other: str, fix: str
) -> _Content:
    """Read a file that `write` wrote, whose content is a `dict`, a `list` or either of them.

    `file` names it in an error, as in "The sweep file runs.json"; `other` and `fix` are what an error says of other
    content. Raises LedgerError where the file cannot be read, is no JSON, or has other content.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LedgerError(f"{file} cannot be read.", why=str(error)) from error
    if not isinstance(content, kind):
        raise LedgerError(other, fix=fix)
    return cast("_Content", content)


def without_layout(
    record: Mapping[str, Any], layout: int, what: str, fix: str = "Read it with the ortlab that wrote it."
) -> dict[str, Any]:
    """Return a record's fields, once its layout (field "schema") is known to be the present one.

    `what` names the record in an error, as in "This budget". Raises LedgerError where the layout is another.
    """
    fields = dict(record)
    fields.pop("record", None)  # for `ortlab.load`, which does not know what a file holds
    found = fields.pop("schema", None)
    if found != layout:
        raise LedgerError(f"{what} has layout {found!r}, and this ortlab reads layout {layout}.", fix=fix)
    return fields
