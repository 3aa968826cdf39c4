"""Which value of one graph is which of another, told by the nodes that are matched."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ortlab.graphs.wiring import Wiring


class MatchedValues:
    """The values of two graphs that are the same.

    Parameters
    ----------
    before, after
        The graphs.
    nodes
        By number of a node of `before`: that of the same node in `after`.
    inputs
        By name of an input of `before`: that of the same input of `after`.
    names_trusted
        Whether a name means the same in both graphs.

    Attributes
    ----------
    forth
        By name of a value of `before`: its name in `after`.
    back
        The other way round.
    """

    def __init__(
        self,
        before: Wiring,
        after: Wiring,
        nodes: Mapping[int, int],
        inputs: Mapping[str, str],
        *,
        names_trusted: bool,
    ) -> None:
        self._before, self._after, self._nodes = before, after, nodes
        self._of_both = nodes.keys(), set(nodes.values())
        self.forth: dict[str, str] = {}
        self.back: dict[str, str] = {}
        self._add(chain(inputs.items(), self._results()))
        if names_trusted:  # a fused node makes the result of the last one that went into it
            self._add((name, name) for name in before.made if name in after.made)
        if len(before.outputs) == len(after.outputs):
            self._add(zip(before.outputs, after.outputs, strict=True))
        self._add(pair for pair, _ in Counter(self._read_alike()).most_common())

    def _add(self, pairs: Iterable[tuple[str, str]]) -> None:
        for one, other in pairs:
            if one and other and one not in self.forth and other not in self.back:
                self.forth[one], self.back[other] = other, one

    def _results(self) -> Iterator[tuple[str, str]]:
        for left, right in self._nodes.items():
            yield from zip(self._before.nodes[left].outputs, self._after.nodes[right].outputs, strict=False)

    def _read_alike(self) -> Iterator[tuple[str, str]]:
        for left, right in self._nodes.items():
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
        """Return the outputs of each graph that the other does not have.

        One that another node makes now is not among them: what became of the first node says it.
        """
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
        of_both = makers[0][0] in self._of_both[0] and makers[1][0] in self._of_both[1]
        return of_both and self.forth.get(left) != right
