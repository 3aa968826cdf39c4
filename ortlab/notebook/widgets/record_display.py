"""The forms in which a record shows itself: its page as text and HTML, and a widget where one can live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

from ortlab.memory.saved_activations import SavedActivations
from ortlab.notebook.widgets.activations_explorer import ActivationsExplorer
from ortlab.notebook.widgets.graph_display import highlight
from ortlab.ranks.ranks import Ranks
from ortlab.render import html, text

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.render.page import Page

_explorers: WeakKeyDictionary[Lab, list[ref[ActivationsExplorer]]] = WeakKeyDictionary()


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

    return bundle_of(activations)


def _ranks(ranks: Ranks) -> dict[str, Any]:
    from ortlab.notebook.widgets.ranks_part import bundle_of

    return bundle_of(ranks)


_VIEWS: Final[dict[type, Callable[[Any], dict[str, Any]]]] = {SavedActivations: _activations, Ranks: _ranks}


def activations_explorer(lab: Lab, activations: SavedActivations) -> ActivationsExplorer:
    """Return the explorer that shows saved activations of a lab, filled.

    Running a cell again, which reads the same, shows the same explorer and leaves no second one behind. What differs,
    by the batch, the part or the plans, gets an explorer of its own: the cell above still shows what it was asked for.
    """
    living = [one for one in (known() for known in _explorers.get(lab, ())) if one and not one.closed]
    explorer = next((one for one in living if one.as_read == activations), None)
    if explorer is None:
        explorer = ActivationsExplorer(framed=True)
        living.append(explorer)
    _explorers[lab] = [ref(one) for one in living]
    of_lab, part = ref(lab), activations.source.part

    def with_plans() -> SavedActivations:
        there = of_lab()
        return activations if there is None else there.activations(part, plans=True)

    def point(nodes: Sequence[str]) -> None:
        there = of_lab()
        if there is not None:
            highlight(there, nodes)

    explorer.pointed = point
    explorer.show(activations, with_plans)
    return explorer


def bundle_of(activations: SavedActivations) -> dict[str, Any]:
    """Return the MIME bundle of an explorer of saved activations; empty if its lab is gone, or nothing is kept."""
    lab = activations.source.lab
    if lab is None or not activations.rows:
        return {}
    bundle = activations_explorer(lab, activations)._repr_mimebundle_()
    return {name: form for name, form in bundle.items() if name.endswith("+json")}
