"""Nodes that stand elsewhere in another graph and do the same there: up or down past others."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ortlab.graphs.alignment import Alignment

_REACH: Final = 300
"""Values that are looked at for where a node came from; ORT moves no node past more."""

_TYPE: Final = "to"
"""The attribute of a Cast that makes it another operation: one to another type is not the same, moved."""


@dataclass(frozen=True)
class Moved:
    """A node that stands elsewhere: `before` in the one graph, `after` in the other, `past` in the first.

    It moved up where it now comes before the nodes that it followed. It is there several times where the nodes that it
    has passed read several values.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    past: tuple[int, ...]
    up: bool


def moves(both: Alignment, old: list[int], new: list[int]) -> Iterator[Moved]:
    """Find nodes that moved up, to read what stood before the nodes that they followed, or that moved down.

    `old` and `new` are the nodes of the first and of the second graph that are not in the other.
    """
    told: set[int] = set()
    come: set[int] = set()
    for up in (True, False):
        for one, others, past in _moves_up(_Direction(both, up), old if up else new, new if up else old):
            if up:
                found = Moved((one,), tuple(others), tuple(past), up)
            else:
                found = Moved(tuple(others), (one,), tuple(both.back[number] for number in past), up)
            # Of two nodes of which one has passed the other, the first that is found has moved.
            if past and told.isdisjoint((*found.before, *found.past)) and come.isdisjoint(found.after):
                told.update((*found.before, *found.past))
                come.update(found.after)
                yield found


class _Direction:
    """Two aligned graphs, looked at from either side: down in one direction is up in the other."""

    def __init__(self, both: Alignment, forth: bool) -> None:  # noqa: FBT001
        self.graph = both.before if forth else both.after
        self.other = both.after if forth else both.before
        self.pairs = both.forth if forth else both.back
        self.back = both.back if forth else both.forth
        self.value = both.value if forth else both.earlier
        self.earlier = both.earlier if forth else both.value


def _moves_up(way: _Direction, old: list[int], new: list[int]) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield nodes with those that do the same further up in the other graph, and the nodes that they passed."""
    places: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for number in new:
        _note(way, number, places)
    targets: dict[int, dict[int, list[int]]] = {}
    for number in old:
        targets[number] = _passed(way, number, places)
    taken: dict[int, tuple[int, int]] = {}
    for number, found in targets.items():
        for other, past in found.items():
            if other not in taken or len(past) < taken[other][0]:
                taken[other] = len(past), number
    for number, found in targets.items():
        mine = [other for other in found if taken[other][1] == number]
        if mine:
            yield number, mine, _between(way, number, mine)
    yield from _matched_moves(way)


def _matched_moves(way: _Direction) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yield matched nodes that have moved up."""
    for left, right in way.pairs.items():
        one, other = way.graph.nodes[left], way.other.nodes[right]
        if len(one.inputs) != len(other.inputs) or not any(
            way.value(name) != held and _is_of_both(way, name, held)
            for name, held in zip(one.inputs, other.inputs, strict=True)
        ):
            continue
        places: dict[tuple[str, int, str], list[int]] = defaultdict(list)
        _note(way, right, places)
        if right in _passed(way, left, places):
            yield left, [right], _between(way, left, [right])


def _is_of_both(way: _Direction, name: str, held: str) -> bool:
    """Tell whether two values are made by nodes that are in both graphs: what new nodes make, tells of no move."""
    makers = way.graph.made.get(name), way.other.made.get(held)
    return bool(makers[0] and makers[1] and makers[0][0] in way.pairs and makers[1][0] in way.back)


def _note(way: _Direction, number: int, places: dict[tuple[str, int, str], list[int]]) -> None:
    node = way.other.nodes[number]
    for slot, name in enumerate(node.inputs):
        earlier = way.earlier(name) if name else None
        if earlier is not None:
            places[node.operator, slot, earlier].append(number)


def _passed(
    way: _Direction, number: int, places: dict[tuple[str, int, str], list[int]]
) -> dict[int, list[int]]:
    """Return what does the same further up in the other graph, with the nodes between there and here."""
    node = way.graph.nodes[number]
    found: dict[int, list[int]] = {}
    for slot, start in enumerate(node.inputs):
        if start not in way.graph.made:
            continue
        came: dict[str, tuple[str, int] | None] = {start: None}
        waiting = deque([start])
        while waiting and len(came) < _REACH:
            value = waiting.popleft()
            for other in places.get((node.operator, slot, value), ()) if value != start else ():
                path = _path(came, value)
                if (
                    other not in found
                    and _same_work(way, number, other, slot)
                    and _leads(way, other, path[-1])
                ):
                    found[other] = path
            maker = way.graph.made.get(value)
            for name in way.graph.nodes[maker[0]].inputs if maker else ():
                if name and name not in came and maker:
                    came[name] = value, maker[0]
                    waiting.append(name)
    return found


def _path(came: dict[str, tuple[str, int] | None], value: str) -> list[int]:
    """Return the nodes from where the search began up to a value."""
    path = []
    step = came[value]
    while step is not None:
        value, maker = step
        path.append(maker)
        step = came[value]
    return path[::-1]


def _between(way: _Direction, number: int, others: list[int]) -> list[int]:
    """Return the nodes that were before one and are behind what does the same in the other graph."""
    ends = {way.earlier(name) for other in others for name in way.other.nodes[other].inputs}
    above: dict[int, None] = {}
    values = deque(way.graph.nodes[number].inputs)
    while values and len(above) < _REACH:
        value = values.popleft()
        maker = way.graph.made.get(value) if value not in ends else None
        if maker and maker[0] not in above:
            above[maker[0]] = None
            values.extend(way.graph.nodes[maker[0]].inputs)
    below: set[int] = set()
    nodes = deque(others)
    while nodes:
        for reader in way.other.behind(nodes.popleft()):
            if reader not in below and (reader not in way.back or way.back[reader] in above):
                below.add(reader)
                nodes.append(reader)
    return [one for one in reversed(above) if way.pairs.get(one) in below]


def _same_work(way: _Direction, number: int, other: int, slot: int) -> bool:
    """Tell whether two nodes of one operator do the same to what they read at one place."""
    one, two = way.graph.nodes[number], way.other.nodes[other]
    if len(one.inputs) != len(two.inputs) or dict(one.attributes).get(_TYPE) != dict(two.attributes).get(
        _TYPE
    ):
        return False
    return all(
        place == slot
        or way.value(name) == held
        or (name in way.graph.constants and held in way.other.constants)
        for place, (name, held) in enumerate(zip(one.inputs, two.inputs, strict=True))
    )


def _leads(way: _Direction, number: int, passed: int) -> bool:
    """Tell whether a node of the other graph leads to the one that it has passed, with at most new nodes between."""
    partner = way.pairs.get(passed)
    waiting, seen = [number], {number}
    while waiting and partner is not None:
        for reader in way.other.behind(waiting.pop()):
            if reader == partner:
                return True
            if reader not in seen and reader not in way.back:
                seen.add(reader)
                waiting.append(reader)
    return False
