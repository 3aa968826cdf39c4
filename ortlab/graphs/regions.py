"""Which new nodes of a graph do the work of which old ones: regions between values that both graphs have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from ortlab.graphs.alignment import Alignment
    from ortlab.graphs.wiring import Wiring

_Elsewhere: TypeAlias = "Callable[[str], str | None]"
"""Returns the name that a value has in the other graph; None if it has none."""


@dataclass(frozen=True)
class Regions:
    """The nodes that are in one of two graphs only, by what became of them.

    Attributes
    ----------
    rewritten
        Nodes of the first graph, and those of the second that make their results instead.
    removed, added
        The others.
    """

    rewritten: list[tuple[tuple[int, ...], tuple[int, ...]]]
    removed: list[int]
    added: list[int]


def regions(both: Alignment, old: list[int], new: list[int]) -> Regions:
    """Put together what belongs together: nodes of the second graph and those of the first whose work they do.

    A node that makes a value of the other graph stands for the nodes there that led to it, back to values that are in
    both graphs; nodes are also together that hand on a value that the other graph does not have.

    Parameters
    ----------
    both
        The graphs.
    old, new
        Nodes of the first and of the second graph that are not in the other.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    rows = {number: row for row, number in enumerate(old)}
    columns = {number: row for row, number in enumerate(new, start=len(old))}
    edges = [
        *((columns[right], rows[left]) for right, left in _work(both, rows, new)),
        *_handed_on(both.before, rows, both.value),
        *_handed_on(both.after, columns, both.earlier),
    ]
    count = len(old) + len(new)
    ends = tuple([edge[end] for edge in edges] for end in (0, 1))
    _, labels = connected_components(
        coo_array(([1] * len(edges), ends), shape=(count, count)), directed=False
    )
    members: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for place, label in enumerate(labels):
        if place < len(old):
            members[label][0].append(old[place])
        else:
            members[label][1].append(new[place - len(old)])
    return Regions(
        [(tuple(ours), tuple(theirs)) for ours, theirs in members.values() if ours and theirs],
        [number for ours, theirs in members.values() if not theirs for number in ours],
        [number for ours, theirs in members.values() if not ours for number in theirs],
    )


def _work(both: Alignment, old: Mapping[int, int], new: list[int]) -> Iterator[tuple[int, int]]:
    """Yield new nodes with the old ones that led to what they make."""
    for right in new:
        for name in both.after.nodes[right].outputs:
            earlier = both.earlier(name) if name else None
            for left in _leading_to(both.before, earlier, old, both.value) if earlier else ():
                yield right, left


def _handed_on(graph: Wiring, among: Mapping[int, int], elsewhere: _Elsewhere) -> Iterator[tuple[int, int]]:
    """Yield the places of nodes, of which the second makes what the first reads, and the other graph does not have."""
    for number, place in among.items():
        for name in graph.nodes[number].inputs:
            maker = graph.made.get(name)
            if maker and maker[0] in among and elsewhere(name) is None:
                yield place, among[maker[0]]


def _leading_to(graph: Wiring, value: str, among: Mapping[int, int], elsewhere: _Elsewhere) -> Iterator[int]:
    """Yield the nodes among some that lead to a value, back to values that are in the other graph, too."""
    waiting, seen = [value], set()
    while waiting:
        maker = graph.made.get(waiting.pop())
        if maker is None or maker[0] not in among or maker[0] in seen:
            continue
        seen.add(maker[0])
        yield maker[0]
        waiting += [name for name in graph.nodes[maker[0]].inputs if name and elsewhere(name) is None]
