"""How records show themselves in a notebook: formatters of the running IPython, put in and taken out again.

Records do not know IPython, so they have no `_repr_html_`; without `%load_ext ortlab` they show their repr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ortlab.render import html, pages, text

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def register(shell: InteractiveShell) -> None:
    """Let `shell` show every record that has a page as a table, in HTML and in plain text."""
    formatters = _formatters(shell)
    for kind in pages.record_types():
        for mime, ours in _OURS.items():
            formatters[mime].for_type(kind, ours)


def unregister(shell: InteractiveShell) -> None:
    """Take out what `register` put in; formatters that someone else has set since stay."""
    formatters = _formatters(shell)
    for kind in pages.record_types():
        for mime, ours in _OURS.items():
            if formatters[mime].type_printers.get(kind) is ours:
                formatters[mime].pop(kind)


def _formatters(shell: InteractiveShell) -> dict[str, Any]:
    if shell.display_formatter is None:
        raise RuntimeError("this IPython shell has no display formatter")
    formatters: dict[str, Any] = shell.display_formatter.formatters
    return formatters


def _pretty(record: object, printer: Any, _cycle: bool) -> None:  # noqa: FBT001 - the signature that IPython calls
    # A record inside a list keeps its repr: a table in the middle of a line cannot be read.
    printer.text(text.render(record) if len(printer.stack) == 1 else repr(record))


_OURS: dict[str, Callable[..., Any]] = {"text/html": html.render, "text/plain": _pretty}
