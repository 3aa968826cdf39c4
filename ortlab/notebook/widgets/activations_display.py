"""The explorer of saved activations in a cell: one for each thing that was read, so that no cell changes another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from ortlab.notebook.widgets.activations_explorer import ActivationsExplorer
from ortlab.notebook.widgets.graph_display import highlight

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.memory.saved_activations import SavedActivations

_explorers: WeakKeyDictionary[Lab, list[ref[ActivationsExplorer]]] = WeakKeyDictionary()


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
