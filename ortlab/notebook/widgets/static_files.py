"""Scripts and style sheets that run in the browser, as each widget that needs one sends it there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ortlab.errors import InstallError

STATIC: Final = Path(__file__).parent / "static"
"""Folder of the scripts and style sheets."""

_COMMENT: Final = re.compile(r"^\s*//.*$", re.MULTILINE)
_AROUND: Final = re.compile(r"\s*([{};,])\s*")
_EMPTY: Final = re.compile(r"\n\s*")


def compact(name: str) -> str:
    """Read a file of `STATIC` without its indentation and the comments that have a line of their own.

    Every widget carries its script with it, so a notebook that is saved with its widgets holds it once for each. Raises
    InstallError if the installation lacks the file.
    """
    try:
        return compacted((STATIC / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise InstallError(
            f"ortlab's file {name} for the browser cannot be read.",
            why=f"The installation is damaged: {error}",
            fix="Install it again: pip install --force-reinstall --no-deps ortlab",
        ) from error


def compacted(text: str) -> str:
    """Remove the indentation of a script or style sheet, and the comments that have a line of their own."""
    return _EMPTY.sub("\n", _COMMENT.sub("", text)).strip()


def compacted_style(text: str) -> str:
    """Remove the white space of a style sheet that means nothing."""
    return _AROUND.sub(r"\1", compacted(text))
