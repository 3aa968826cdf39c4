"""Records in files: written as JSON, and read with an error that says what is wrong with a file or its layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ortlab.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Mapping

_Content = TypeVar("_Content", bound="list[Any] | dict[str, Any]")


def write(path: str | Path, content: object) -> Path:
    """Write plain JSON types to a file, and return its path."""
    target = Path(path)
    target.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return target


def read(path: str | Path, kind: type[_Content], *, file: str, other: str, fix: str) -> _Content:
    """Read a file that `write` wrote.

    Parameters
    ----------
    path
        The file.
    kind
        `dict` or `list`: what its content is.
    file
        What to call the file, as in "The sweep file runs.json".
    other
        What to say of a file with other content.
    fix
        What to do then.

    Raises
    ------
    LedgerError
        If the file cannot be read, is no JSON, or has other content.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LedgerError(f"{file} cannot be read.", why=str(error)) from error
    if not isinstance(content, kind):
        raise LedgerError(other, fix=fix)
    return content


def without_layout(
    record: Mapping[str, Any], layout: int, what: str, fix: str = "Read it with the ortlab that wrote it."
) -> dict[str, Any]:
    """Return a record's fields, once its layout is known to be the present one.

    Parameters
    ----------
    record
        What `to_dict` returned; its field "schema" is the number of its layout.
    layout
        The layout that can be read.
    what
        What to call the record, as in "This budget".
    fix
        What to do about another layout.

    Raises
    ------
    LedgerError
        If it has another layout.
    """
    fields = dict(record)
    found = fields.pop("schema", None)
    if found != layout:
        raise LedgerError(f"{what} has layout {found!r}, and this ortlab reads layout {layout}.", fix=fix)
    return fields
