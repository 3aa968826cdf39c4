"""Which node of one graph is which of another: by what it computes, by its name, and by what is around it.

Names alone do not tell: exports of two processes number theirs differently, and ORT's optimizers name what they put in.
What a node computes is told by a digest of everything before it down to the graph's inputs and constants, and what is
done with its results by one of everything behind it, as in the colour refinement of Weisfeiler and Lehman. A change in
the middle of a graph changes the digests of all that is behind it or before it; what they leave open is matched
outwards from what is matched already. Each step takes time in proportion to the edges of the graphs.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from ortlab.memory.recompute import COPY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ortlab.graphs.wiring import WiredNode, Wiring

Key = Callable[[int], Hashable]

_TRUST: Final = 0.5
"""Share of the nodes matched for what they compute that must bear the same name, for names to be trusted."""

_PART: Final = re.compile(r"_grad_\d+$")

_ROUNDS: Final = 8
"""How often what is left is looked at again, as long as anything is found."""


class Alignment:
    """The nodes of two graphs that are the same."""

    def __init__(self, before: Wiring, after: Wiring) -> None:
        self.before, self.after = before, after
        self.forth: dict[int, int] = {}  # by number of a node of `before`: that of the same node in `after`
        self.back: dict[int, int] = {}  # the other way round
        self._ids: dict[Hashable, int] = {}
        self._inputs = _same_inputs(before, after)
        up = self._computed(before), self._computed(after)
        down = self._used(before), self._used(after)
        both = [list(zip(up[side], down[side], strict=True)) for side in (0, 1)]
        self._match(both[0].__getitem__, both[1].__getitem__, several=True)
        self.names_trusted = self._names_hold()
        self._match(up[0].__getitem__, up[1].__getitem__, several=True)
        if self.names_trusted:
            for name in (_result, lambda node: node.name):
                self._match(_by(before, name), _by(after, name))
        self._match(down[0].__getitem__, down[1].__getitem__)
        self._match(self._parameters(before), self._parameters(after))
        for _ in range(_ROUNDS):
            known = len(self.forth)
            self._spread()
            for wide in (True, False):
                self._match(self._around(before, wide), self._around(after, wide))
            if len(self.forth) == known:
                break
        self.matched_values = MatchedValues(self, self._inputs)

    def value(self, name: str) -> str | None:
        """Return the name in `after` of a value of `before`; None if it has none there."""
        return self.matched_values.forth.get(name)

    def earlier(self, name: str) -> str | None:
        """Return the name in `before` of a value of `after`; None if it has none there."""
        return self.matched_values.back.get(name)

    # ---- digests ----------------------------------------------------------------------------------------------

    def _id(self, key: Hashable) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _source(self, graph: Wiring, name: str) -> Hashable:
        """Return what identifies a value that no node makes."""
        if name in graph.constants:
            return graph.constants[name]
        return self._inputs.get(name, name) if graph is self.before else name

    def _computed(self, graph: Wiring) -> list[int]:
        """Give each node a number, the same for nodes that compute the same, in both graphs."""
        found = [0] * len(graph.nodes)
        for number in graph.order:
            node, inputs = graph.nodes[number], []
            for name in node.inputs:
                place = graph.made.get(name)
                inputs.append((found[place[0]], place[1]) if place else (-1, self._source(graph, name)))
            found[number] = self._id((node.operator, node.attributes, len(node.outputs), tuple(inputs)))
        return found

    def _used(self, graph: Wiring) -> list[int]:
        """Give each node a number, the same for nodes with whose results the same is done, in both graphs."""
        found = [0] * len(graph.nodes)
        outputs = {name: place for place, name in enumerate(graph.outputs)}
        for number in reversed(graph.order):
            node = graph.nodes[number]
            uses = [
                (slot, found[reader], place)
                for slot, name in enumerate(node.outputs)
                for reader, place in graph.readers.get(name, ())
            ]
            ends = [(slot, outputs[name]) for slot, name in enumerate(node.outputs) if name in outputs]
            sources = tuple("" if name in graph.made else self._source(graph, name) for name in node.inputs)
            key = node.operator, node.attributes, sources, tuple(sorted(uses)), tuple(ends)
            found[number] = self._id(("used", key))
        return found

    def _parameters(self, graph: Wiring) -> Key:
        """Return what tells nodes by the inputs of the graph that they read: its parameters are named alike."""

        def key(number: int) -> Hashable:
            node = graph.nodes[number]
            read = tuple(self._source(graph, name) if name in graph.inputs else None for name in node.inputs)
            return (node.operator, read) if any(read) else None

        return key

    def _around(self, graph: Wiring, wide: bool) -> Key:  # noqa: FBT001
        """Return what tells nodes by what is next to them: matched nodes by themselves, others by their operator."""
        left = graph is self.before
        matched = self.forth if left else self.back

        def label(number: int) -> Hashable:
            if number not in matched:
                return graph.nodes[number].operator
            return number if left else matched[number]

        def key(number: int) -> Hashable:
            node = graph.nodes[number]
            inputs = tuple(
                (label(graph.made[name][0]), graph.made[name][1])
                if name in graph.made
                else self._source(graph, name)
                for name in node.inputs
            )
            uses = sorted(
                (slot, str(label(reader)), place)
                for slot, name in enumerate(node.outputs)
                for reader, place in graph.readers.get(name, ())
            )
            return node.operator, node.attributes, inputs, tuple(uses) if wide else ()

        return key

    # ---- matching ---------------------------------------------------------------------------------------------

    def _pair(self, left: int, right: int) -> None:
        self.forth[left], self.back[right] = right, left

    def _match(self, left: Key, right: Key, *, several: bool = False) -> None:
        """Pair nodes of the same operator with the same key; a node whose key is None stays out."""
        # With `several`, nodes that share a key are paired, too: those with equal names first, then in their order, as
        # is right for nodes that compute the same.
        groups: dict[Hashable, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        sides = (self.before, self.forth, left, 0), (self.after, self.back, right, 1)
        for graph, matched, key, side in sides:
            for number in graph.order:
                if number not in matched and (found := key(number)) is not None:
                    groups[graph.nodes[number].operator, found][side].append(number)
        for ours, theirs in groups.values():
            if len(ours) == len(theirs) == 1:
                self._pair(ours[0], theirs[0])
            elif several and ours and theirs:
                self._pair_group(ours, theirs)

    def _pair_group(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Pair nodes that compute the same, those with equal names first; a copy comes behind what it repeats."""
        named = {self.after.nodes[number].name: number for number in theirs}
        for number in ours:
            other = named.get(self.before.nodes[number].name)
            if other is not None and other not in self.back:
                self._pair(number, other)
        left = [number for number in ours if number not in self.forth]
        right = [number for number in theirs if number not in self.back]
        left.sort(key=lambda number: is_copy(self.before.nodes[number]))
        right.sort(key=lambda number: is_copy(self.after.nodes[number]))
        for one, other in zip(left, right, strict=False):
            if is_copy(self.before.nodes[one]) == is_copy(self.after.nodes[other]):
                self._pair(one, other)

    def _names_hold(self) -> bool:
        """Tell whether names mean the same in both graphs."""
        same = sum(
            self.before.nodes[left].outputs[:1] == self.after.nodes[right].outputs[:1]
            for left, right in self.forth.items()
        )
        return same >= _TRUST * len(self.forth)

    def _spread(self) -> None:
        """Match outwards from matched nodes: what makes the same input, and the only reader of its kind of a result."""
        waiting = list(self.forth.items())
        while waiting:
            left, right = waiting.pop()
            for one, other in (*self._makers(left, right), *self._only_readers(left, right)):
                if one not in self.forth and other not in self.back and self._alike(one, other):
                    self._pair(one, other)
                    waiting.append((one, other))

    def _alike(self, left: int, right: int) -> bool:
        one, other = self.before.nodes[left], self.after.nodes[right]
        return (
            one.operator == other.operator
            and len(one.inputs) == len(other.inputs)
            and is_copy(one) == is_copy(other)
        )

    def _makers(self, left: int, right: int) -> Iterable[tuple[int, int]]:
        pairs = zip(self.before.nodes[left].inputs, self.after.nodes[right].inputs, strict=False)
        for one, other in pairs:
            ours, theirs = self.before.made.get(one), self.after.made.get(other)
            if ours and theirs and ours[1] == theirs[1]:
                yield ours[0], theirs[0]

    def _only_readers(self, left: int, right: int) -> Iterable[tuple[int, int]]:
        for one, other in zip(self.before.nodes[left].outputs, self.after.nodes[right].outputs, strict=False):
            ours = _kinds(self.before, one, self.forth)
            theirs = _kinds(self.after, other, self.back)
            for kind in ours.keys() & theirs.keys():
                if len(ours[kind]) == len(theirs[kind]) == 1:
                    yield ours[kind][0], theirs[kind][0]


def is_copy(node: WiredNode) -> bool:
    """Tell whether a node repeats another one in backward, as ORT's memory optimizer names it."""
    return node.name.endswith(COPY) or any(name.endswith(COPY) for name in node.outputs)


def _result(node: WiredNode) -> str:
    """Return the name of what a node makes; "" for a part of a gradient, whose number is that of its turn."""
    name = next(iter(node.outputs), "")
    return "" if _PART.search(name) else name


def _by(graph: Wiring, told: Callable[[WiredNode], Hashable]) -> Key:
    def key(number: int) -> Hashable:
        return told(graph.nodes[number]) or None

    return key


def _kinds(graph: Wiring, value: str, matched: dict[int, int]) -> dict[tuple[str, int], list[int]]:
    """Return the readers of a value that are not matched, by operator and input."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, slot in graph.readers.get(value, ()) if value else ():
        if number not in matched:
            found[graph.nodes[number].operator, slot].append(number)
    return found


def _same_inputs(before: Wiring, after: Wiring) -> dict[str, str]:
    """Pair the inputs of the graphs: by name, and the others of one type and number of dimensions in their order."""
    pairs = {name: name for name in before.inputs if name in after.inputs}
    rest: dict[Hashable, list[str]] = defaultdict(list)
    for name, value in after.inputs.items():
        if name not in pairs:
            rest[value.dtype, len(value.shape)].append(name)
    for name, value in before.inputs.items():
        others = rest[value.dtype, len(value.shape)]
        if name not in pairs and others:
            pairs[name] = others.pop(0)
    return pairs


class MatchedValues:
    """The values of two graphs that are the same; `inputs` gives for each input of the first that of the second."""

    def __init__(self, both: Alignment, inputs: Mapping[str, str]) -> None:
        before, after = both.before, both.after
        self._both, self._before, self._after = both, before, after
        self.forth: dict[str, str] = {}  # by name of a value of `before`: its name in `after`
        self.back: dict[str, str] = {}  # the other way round
        self._add(chain(inputs.items(), self._results()))
        if both.names_trusted:  # a fused node makes the result of the last one that went into it
            self._add((name, name) for name in before.made if name in after.made)
        if len(before.outputs) == len(after.outputs):
            self._add(zip(before.outputs, after.outputs, strict=True))
        self._add(pair for pair, _ in Counter(self._read_alike()).most_common())

    def _add(self, pairs: Iterable[tuple[str, str]]) -> None:
        for one, other in pairs:
            if one and other and one not in self.forth and other not in self.back:
                self.forth[one], self.back[other] = other, one

    def _results(self) -> Iterator[tuple[str, str]]:
        for left, right in self._both.forth.items():
            yield from zip(self._before.nodes[left].outputs, self._after.nodes[right].outputs, strict=False)

    def _read_alike(self) -> Iterator[tuple[str, str]]:
        for left, right in self._both.forth.items():
            pairs = zip(self._before.nodes[left].inputs, self._after.nodes[right].inputs, strict=False)
            yield from (
                pair for pair in pairs if pair[0] in self._before.made and pair[1] in self._after.made
            )

    def same(self, left: str, right: str) -> bool:
        """Tell whether a value of `before` and one of `after` are the same, constants by what they hold."""
        held = self._before.constants.get(left), self._after.constants.get(right)
        if held != (None, None):
            return held[0] == held[1]
        return self.forth.get(left) == right if left else not right

    def other_outputs(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the outputs of each graph that the other does not have."""
        # One that another node makes now is not among them: what became of the first node says it.
        ours, theirs = list(self._before.outputs), list(self._after.outputs)
        pairs = {name: name for name in ours if name in self._after.outputs}
        if len(ours) == len(theirs):
            pairs = dict(zip(ours, theirs, strict=True)) | pairs
        pairs |= {
            name: other
            for name in ours
            if name not in pairs and (other := self.forth.get(name, "")) in self._after.outputs
        }
        kept = {one: other for one, other in pairs.items() if not self._is_another(one, other)}
        return (
            tuple(name for name in ours if name not in kept),
            tuple(name for name in theirs if name not in kept.values()),
        )

    def _is_another(self, left: str, right: str) -> bool:
        """Tell whether two outputs are different results of nodes that are in both graphs."""
        makers = self._before.made.get(left), self._after.made.get(right)
        if not (makers[0] and makers[1]):
            return not self.same(left, right)
        of_both = makers[0][0] in self._both.forth and makers[1][0] in self._both.back
        return of_both and self.forth.get(left) != right
