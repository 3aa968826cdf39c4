"""What was changed between two graphs whose nodes are aligned: put in, taken out, fused, moved, repeated, changed.

Nodes are numbers here, as in `Wiring`; `ortlab.graphs.diff` makes the record of them.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, TypeAlias

from ortlab.graphs.alignment import is_copy

if TYPE_CHECKING:
    from ortlab.graphs.alignment import Alignment
    from ortlab.graphs.nodes import Value
    from ortlab.graphs.wiring import Wiring

_Places: TypeAlias = dict[tuple[str, int, str], list[int]]
_Rewritten: TypeAlias = list[tuple[tuple[int, ...], tuple[int, ...]]]
_Elsewhere: TypeAlias = "Callable[[str], str | None]"
"""Returns the name that a value has in the other graph; None if it has none."""

_NAMELESS: Final = re.compile(r"unk_|\?|\.\.\.|output-|.*/|.+_o\d+__d\d+$")
"""Sizes that the exporter or shape inference has named after the node that they are of: nobody knows them."""


@dataclass(frozen=True)
class Changed:
    """What is different about a node that is in both graphs."""

    before: int
    after: int
    what: str
    old: str
    new: str


class Changes:
    """The differences of two aligned graphs."""

    def __init__(self, alignment: Alignment) -> None:
        self._both = alignment
        before, after = alignment.before, alignment.after
        old = [number for number in before.order if number not in alignment.forth]
        new = [number for number in after.order if number not in alignment.back]
        # Copies of nodes that run again in backward.
        self.repeated_before = [number for number in old if is_copy(before.nodes[number])]
        self.repeated = [number for number in new if is_copy(after.nodes[number])]
        old = [number for number in old if not is_copy(before.nodes[number])]
        new = [number for number in new if not is_copy(after.nodes[number])]
        self.moved = list(moves(alignment, old, new))
        gone = {number for one in self.moved for number in one.before}
        come = {number for one in self.moved for number in one.after}
        old = [number for number in old if number not in gone]
        new = [number for number in new if number not in come]
        self.rewritten, self.removed, self.added = _regions(alignment, old, new)
        self._elsewhere = (
            gone | set(old) | set(self.repeated_before) | {one for move in self.moved for one in move.past},
            come | set(new) | set(self.repeated),
        )
        self.changed = list(self._all_changes())

    def _all_changes(self) -> Iterator[Changed]:
        before, after = self._both.before, self._both.after
        sizes = Sizes(before.types, after.types)
        for left in before.order:
            right = self._both.forth.get(left)
            if right is None:
                continue
            one, other = before.nodes[left], after.nodes[right]
            held, holds = dict(one.attributes), dict(other.attributes)
            for name in sorted(held.keys() | holds.keys()):
                if held.get(name) != holds.get(name):
                    yield Changed(left, right, name, held.get(name, "none"), holds.get(name, "none"))
            for first, second in zip(one.outputs, other.outputs, strict=False):
                for what, was, now in sizes.differences(first, second):
                    yield Changed(left, right, what, was, now)
            yield from self._rewired(left, right)

    def _rewired(self, left: int, right: int) -> Iterator[Changed]:
        """Yield inputs that are other values, where no other change says why."""
        before, after = self._both.before, self._both.after
        if left in self._elsewhere[0] or right in self._elsewhere[1]:
            return
        pairs = zip_longest(before.nodes[left].inputs, after.nodes[right].inputs, fillvalue="")
        for place, (one, other) in enumerate(pairs):
            if self._both.matched_values.same(one, other):
                continue
            makers = before.made.get(one), after.made.get(other)
            if (makers[0] and makers[0][0] in self._elsewhere[0]) or (
                makers[1] and makers[1][0] in self._elsewhere[1]
            ):
                continue
            what = "constant" if one in before.constants and other in after.constants else "input"
            words = before.words(one) or "none", after.words(other) or "none"
            if what == "constant" and words[0] == words[1]:
                words = f"{before.constant_type(one)} {words[0]}", f"{after.constant_type(other)} {words[1]}"
            yield Changed(left, right, f"{what} {place}", *words)


class Sizes:
    """Types and shapes of two graphs."""

    # ORT names a size that two inputs share after either of them, in one process after this and in another after that;
    # and names that shape inference makes up mean nothing. A name is another size only if the other graph does not have
    # it, while the name that it takes the place of is still there.

    def __init__(self, before: Mapping[str, Value], after: Mapping[str, Value]) -> None:
        self._values = before, after
        self._names = tuple(
            {size for value in graph.values() for size in value.shape if isinstance(size, str)}
            for graph in self._values
        )

    def differences(self, left: str, right: str) -> Iterator[tuple[str, str, str]]:
        """Yield what is different about a value of the first graph and one of the second: "dtype", "shape"."""
        one, other = self._values[0].get(left), self._values[1].get(right)
        if one is None or other is None:
            return
        if one.dtype != other.dtype and one.dtype and other.dtype:
            yield "dtype", one.dtype, other.dtype
        if self._is_other(one.shape, other.shape):
            yield "shape", shape_words(one.shape), shape_words(other.shape)

    def _is_other(self, left: tuple[int | str, ...], right: tuple[int | str, ...]) -> bool:
        if ("...",) in (left, right):
            return False
        if len(left) != len(right):
            return True
        return any(self._differs(one, other) for one, other in zip(left, right, strict=True))

    def _differs(self, one: int | str, other: int | str) -> bool:
        if one == other or _is_nameless(one) or _is_nameless(other):
            return False
        if isinstance(one, str) and isinstance(other, str):
            return (other not in self._names[0]) != (one not in self._names[1])
        return True


def shape_words(shape: tuple[int | str, ...]) -> str:
    """Write a shape: "2 x 5 x 8"; "scalar" for one without sizes."""
    return " x ".join(map(str, shape)) or "scalar"


def _is_nameless(size: int | str) -> bool:
    return isinstance(size, str) and (not size or _NAMELESS.match(size) is not None)


def _regions(both: Alignment, old: list[int], new: list[int]) -> tuple[_Rewritten, list[int], list[int]]:
    """Part the nodes that are in one graph only into rewritten ones, removed ones and added ones."""
    # Rewritten are nodes of the first graph together with those of the second that do their work: a node that makes a
    # value of the other graph stands for the nodes there that led to it, back to values that are in both graphs; nodes
    # are also together that hand on a value that the other graph does not have. `old` and `new` are the nodes of the
    # first and of the second graph that are not in the other.
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
    return (
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


_REACH: Final = 300
"""Values that are looked at for where a node came from; ORT moves no node past more."""

_TYPE: Final = "to"
"""The attribute of a Cast that makes it another operation: one to another type is not the same, moved."""


@dataclass(frozen=True)
class Moved:
    """A node that stands elsewhere: `before` in the one graph, `after` in the other, `past` in the first."""

    # It moved up where it now comes before the nodes that it followed. It is there several times where the nodes that
    # it has passed read several values.

    before: tuple[int, ...]
    after: tuple[int, ...]
    past: tuple[int, ...]
    up: bool


def moves(both: Alignment, old: list[int], new: list[int]) -> Iterator[Moved]:
    """Find nodes that moved up, to read what stood before the nodes that they followed, or that moved down."""
    # `old` and `new` are the nodes of the first and of the second graph that are not in the other.
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
    places = _places(way, new)
    targets = {number: _passed(way, number, places) for number in old}
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
        if right in _passed(way, left, _places(way, [right])):
            yield left, [right], _between(way, left, [right])


def _is_of_both(way: _Direction, name: str, held: str) -> bool:
    """Tell whether two values are made by nodes that are in both graphs: what new nodes make, tells of no move."""
    makers = way.graph.made.get(name), way.other.made.get(held)
    return bool(makers[0] and makers[1] and makers[0][0] in way.pairs and makers[1][0] in way.back)


def _places(way: _Direction, numbers: Iterable[int]) -> _Places:
    """Return nodes of the other graph by operator, input, and what they read there, as it is called in this one."""
    places: _Places = defaultdict(list)
    for number in numbers:
        node = way.other.nodes[number]
        for slot, name in enumerate(node.inputs):
            earlier = way.earlier(name) if name else None
            if earlier is not None:
                places[node.operator, slot, earlier].append(number)
    return places


def _passed(way: _Direction, number: int, places: _Places) -> dict[int, list[int]]:
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
