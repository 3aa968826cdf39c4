"""One explorer of the stash for each lab, and how a record that was read from the lab finds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize, ref

from ortlab.widgets.graph_display import highlight
from ortlab.widgets.stash_explorer import StashExplorer

if TYPE_CHECKING:
    from ortlab.lab import Lab
    from ortlab.memory.stash import Stash

_explorers: WeakKeyDictionary[Lab, ref[StashExplorer]] = WeakKeyDictionary()

_sources: dict[int, tuple[ref[Lab], str | None]] = {}
"""By identity of a record: the lab and the part that it was read from, as long as the record lives."""


def stash_explorer(lab: Lab) -> StashExplorer:
    """Return the explorer of a lab's stash, and make it at the first call; `show` fills it.

    Running a cell again shows the same explorer, and leaves no second one behind.

    Parameters
    ----------
    lab
        The lab.
    """
    shown = _explorers.get(lab)
    known = shown() if shown is not None else None
    if known is None or known.closed:
        known = StashExplorer(framed=True)
        _explorers[lab] = ref(known)
    return known


def remember(stash: Stash, lab: Lab, part: str | None = None) -> Stash:
    """Note which lab a record was read from, so that it is shown in the explorer of that lab; return the record."""
    _sources[id(stash)] = ref(lab), part
    finalize(stash, _sources.pop, id(stash), None)
    return stash


def bundle_of(stash: Stash) -> dict[str, Any]:
    """Return what shows a record in its lab's explorer, beside its text and HTML; nothing if it has no lab."""
    source = _sources.get(id(stash))
    lab = source[0]() if source is not None else None
    if source is None or lab is None or not stash.rows:
        return {}
    part = source[1]
    explorer = stash_explorer(lab)
    of_lab = ref(lab)

    def with_plans() -> Stash:
        living = of_lab()
        return stash if living is None else living.stash(part, plans=True)

    def point(nodes: Sequence[str]) -> None:
        living = of_lab()
        if living is not None:
            highlight(living, nodes)

    explorer.pointed = point
    explorer.show(stash, with_plans)
    bundle = explorer._repr_mimebundle_()
    return {name: form for name, form in bundle.items() if name.endswith("+json")}
