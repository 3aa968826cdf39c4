"""In which node's turn the memory of a kept activation can have been allocated.

An activation has memory of its own, from its node on, unless its operator works in place: ORT then lets it write into
the buffer of an input that nobody reads any more (`MayInplace`; ``allocation_planner.cc``, `FindReusableInput`), also
where buffers are otherwise not reused, as in ORTModule's sessions. Which operators may do so is not told, so that every
one may that could: an activation's memory is from some node between the first of such a chain and its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import onnx

from ortlab.engine.kept_values import ForwardOfGraph

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ortlab.engine.execution import Execution

_NEVER_IN_PLACE: Final = frozenset(
    {
        "Concat",
        "ConcatTraining",
        "Conv",
        "FusedMatMul",
        "Gather",
        "GatherElements",
        "Gemm",
        "MatMul",
        "Shape",
        "Split",
        "Transpose",
    }
)
"""Operators whose results cannot be written over what they are still read from."""


def earliest_places(execution: Execution, values: Iterable[str]) -> dict[str, int]:
    """Return for each kept value the place of the first node in whose turn its memory can have been allocated.

    Places count from 0 in the order of execution. `values` are names of results that fill a buffer
    (`SavedActivation.value`); those that the forward does not make are left out.
    """
    graph = onnx.load_model_from_string(execution.serialized_graph("execution"))
    places = _Places(ForwardOfGraph(graph))
    return {value: found for value in values if (found := places.earliest(value)) is not None}


class _Places:
    def __init__(self, forward: ForwardOfGraph) -> None:
        self._forward = forward
        self._last_read: dict[str, int] = {}
        for place, node in enumerate(forward.nodes):
            for name in node.input:
                self._last_read[forward.root(name)] = place
        outliving = {one.root for one in forward.kept()}
        self._dies = {root: place for root, place in self._last_read.items() if root not in outliving}

    def earliest(self, value: str) -> int | None:
        """Follow the chain of nodes that can have worked in place."""
        if value not in self._forward.made:
            return None
        earliest = place = self._forward.made[value][0]
        waiting, seen = [(value, place)], {value}
        while waiting:
            value, place = waiting.pop()
            earliest = min(earliest, place)
            node = self._forward.nodes[place]
            if node.op_type in _NEVER_IN_PLACE:
                continue
            for name in node.input:
                root = self._forward.root(name)
                if root in self._forward.made and root not in seen and self._dies.get(root) == place:
                    seen.add(root)
                    waiting.append((root, self._forward.made[root][0]))
        return earliest
