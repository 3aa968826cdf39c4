"""How records and labs show themselves in a cell: a page as text and HTML, and a widget where one can live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython import get_ipython
from IPython.display import display

from ortlab.lab.following import note_shown, was_shown
from ortlab.memory.saved_activations import SavedActivations
from ortlab.ranks.ledgers import Ranks
from ortlab.render import html, text

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.render.page import Page


def bundle(record: object, page: Page) -> dict[str, Any]:
    """Return a record's forms by MIME type, without those that the running front end never shows."""
    forms: dict[str, Any] = {"text/plain": text.render(page)}
    # A terminal shows text only, and drawing the figures of a page takes longer than all its words.
    if _shows_html():
        forms["text/html"] = html.render(page)
    return {**forms, **_view_of(record)} if in_kernel() else forms


def _view_of(record: object) -> dict[str, Any]:
    """Return a widget that shows the record, as its MIME bundle; nothing where it has none."""
    if isinstance(record, SavedActivations):
        from ortlab.notebook.widgets import activations_explorer

        return activations_explorer.bundle_of(record)
    if isinstance(record, Ranks):
        from ortlab.notebook.widgets import ranks_part

        return ranks_part.bundle_of(record)
    return {}


def in_kernel() -> bool:
    """Tell whether a kernel runs this process: a widget of any other has no browser to live in."""
    return hasattr(get_ipython(), "kernel")


def _shows_html() -> bool:
    shell = get_ipython()
    if shell is None or shell.display_formatter is None:
        return True  # somebody asks by hand
    return "text/html" in shell.display_formatter.active_types


def show_panel(lab: Lab) -> None:
    """Show the panel of a lab, or raise NotImplementedError so that IPython shows the other forms."""
    if was_shown(lab) or not in_kernel():
        raise NotImplementedError
    show(lab)


def as_line(lab: Lab) -> dict[str, Any]:
    """Return the one line that a lab is in a cell which has shown it already; nothing in others."""
    return {"text/plain": repr(lab)} if was_shown(lab) else {}


def show(lab: Lab) -> None:
    """Show a lab now: its panel, or its page where no widget can live. Its cell does not show it a second time."""
    if in_kernel():
        from ortlab.notebook.widgets.panel import panel

        # Not by `display`, which would print an error and go on.
        panel(lab)._ipython_display_()
    else:
        display(lab)
    note_shown(lab)
