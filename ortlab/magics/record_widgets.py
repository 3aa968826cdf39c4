"""Records that are shown in a widget, too, where there are widgets; a saved notebook keeps their text and HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ortlab.memory.stash import Stash

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def register(shell: InteractiveShell) -> None:
    """Let a notebook show a stash that `%ort_stash` has returned in its explorer."""
    if shell.display_formatter is not None:
        shell.display_formatter.mimebundle_formatter.for_type(Stash, _bundle)


def unregister(shell: InteractiveShell) -> None:
    """Take out what `register` put in; a formatter that someone else has set since stays."""
    if shell.display_formatter is None:
        return
    formatter = shell.display_formatter.mimebundle_formatter
    if formatter.type_printers.get(Stash) is _bundle:
        formatter.pop(Stash)


def _bundle(stash: Stash, **_: Any) -> dict[str, Any]:
    from ortlab.widgets.stash_display import bundle_of

    return bundle_of(stash)
