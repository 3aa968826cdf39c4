"""Records that are shown in a widget, too, where there are widgets; a saved notebook keeps their text and HTML."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ortlab.memory.stash import Stash
from ortlab.ranks.ranks import Ranks

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def register(shell: InteractiveShell) -> None:
    """Let a notebook show a stash in its explorer, and ranks in a table that can be sorted."""
    if shell.display_formatter is not None:
        for kind, bundle in _BUNDLES.items():
            shell.display_formatter.mimebundle_formatter.for_type(kind, bundle)


def unregister(shell: InteractiveShell) -> None:
    """Take out what `register` put in; a formatter that someone else has set since stays."""
    if shell.display_formatter is None:
        return
    formatter = shell.display_formatter.mimebundle_formatter
    for kind, bundle in _BUNDLES.items():
        if formatter.type_printers.get(kind) is bundle:
            formatter.pop(kind)


def _stash_bundle(stash: Stash, **_: Any) -> dict[str, Any]:
    from ortlab.widgets.stash_display import bundle_of

    return bundle_of(stash)


def _ranks_bundle(ranks: Ranks, **_: Any) -> dict[str, Any]:
    from ortlab.widgets.ranks_part import bundle_of

    return bundle_of(ranks)


_BUNDLES: Final[dict[type, Callable[..., Any]]] = {Stash: _stash_bundle, Ranks: _ranks_bundle}
