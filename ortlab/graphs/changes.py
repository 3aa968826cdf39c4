"""What was changed between two graphs whose nodes are aligned: put in, taken out, fused, moved, repeated, changed.

Nodes are numbers here, as in `Wiring`; `ortlab.graphs.diff` makes the record of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from ortlab.graphs.alignment import is_copy
from ortlab.graphs.graph_sizes import Sizes
from ortlab.graphs.moves import moves
from ortlab.graphs.regions import regions

if TYPE_CHECKING:
    from ortlab.graphs.alignment import Alignment


@dataclass(frozen=True)
class Changed:
    """What is different about a node that is in both graphs."""

    before: int
    after: int
    what: str
    old: str
    new: str


class Changes:
    """The differences of two aligned graphs.

    Attributes
    ----------
    repeated, repeated_before
        Copies of nodes that run again in backward, in `after` only and in `before` only.
    moved
        Nodes that do the same elsewhere.
    rewritten
        Nodes of `before`, and those of `after` that make their results instead.
    removed, added
        The other nodes that are in one graph only.
    changed
        What is different about nodes that are in both.
    """

    def __init__(self, alignment: Alignment) -> None:
        self._both = alignment
        before, after = alignment.before, alignment.after
        old = [number for number in before.order if number not in alignment.forth]
        new = [number for number in after.order if number not in alignment.back]
        self.repeated_before = [number for number in old if is_copy(before.nodes[number])]
        self.repeated = [number for number in new if is_copy(after.nodes[number])]
        old = [number for number in old if not is_copy(before.nodes[number])]
        new = [number for number in new if not is_copy(after.nodes[number])]
        self.moved = list(moves(alignment, old, new))
        gone = {number for one in self.moved for number in one.before}
        come = {number for one in self.moved for number in one.after}
        old = [number for number in old if number not in gone]
        new = [number for number in new if number not in come]
        found = regions(alignment, old, new)
        self.rewritten, self.removed, self.added = found.rewritten, found.removed, found.added
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
