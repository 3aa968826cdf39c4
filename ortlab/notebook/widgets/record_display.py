"""The forms in which a record shows itself: its page as text and HTML, and a widget where one can live."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ortlab.memory.saved_activations import SavedActivations
from ortlab.ranks.ledgers import Ranks
from ortlab.render import html, text

if TYPE_CHECKING:
    from ortlab.render.page import Page


def bundle(record: object, page: Page) -> dict[str, Any]:
    """Return a record's forms by MIME type, without those that the running front end never shows."""
    forms: dict[str, Any] = {"text/plain": text.render(page)}
    # A terminal shows text only, and drawing the figures of a page takes longer than all its words.
    if _shows_html():
        forms["text/html"] = html.render(page)
    return {**forms, **view_of(record)}


def view_of(record: object) -> dict[str, Any]:
    """Return a widget that shows the record in a kernel, as its MIME bundle; nothing where it has none."""
    make = _VIEWS.get(type(record))
    return make(record) if make is not None and in_kernel() else {}


def in_kernel() -> bool:
    """Tell whether a kernel runs this process: a widget of any other has no browser to live in."""
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def _shows_html() -> bool:
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None or shell.display_formatter is None:
        return True  # somebody asks by hand
    return "text/html" in shell.display_formatter.active_types


def _activations(activations: SavedActivations) -> dict[str, Any]:
    from ortlab.notebook.widgets.activations_display import bundle_of

    return bundle_of(activations)


def _ranks(ranks: Ranks) -> dict[str, Any]:
    from ortlab.notebook.widgets.ranks_part import bundle_of

    return bundle_of(ranks)


_VIEWS: Final[dict[type, Callable[[Any], dict[str, Any]]]] = {SavedActivations: _activations, Ranks: _ranks}
