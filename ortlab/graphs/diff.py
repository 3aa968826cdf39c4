"""What is different between two graphs: two stages of a build, or one stage built with other switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from ortlab.records import record_files
from ortlab.records.record_files import JsonRecord
from ortlab.shown import Shown

if TYPE_CHECKING:
    import pandas as pd

    from ortlab.graphs.stages import Graph
    from ortlab.graphs.wiring import Wiring

Kind = Literal["added", "removed", "moved", "changed", "fused"]
"""What a node is shown as, in a table and in a graph."""


@dataclass(frozen=True)
class DiffNode:
    """A node of one of the two graphs."""

    name: str  #: As `ortlab.graphs.node_names` gives it
    operator: str  #: What it computes - "Gelu", "com.microsoft.BiasGelu", "aten::gelu"
    #: Paths of the module and of the layer that it comes from; empty where they are not known, or outside the layers.
    module: str = ""
    layer: str = ""
    backward: bool = False  #: Whether it runs in the backward


@dataclass(frozen=True)
class Rewrite:
    """Nodes whose results are made by others."""

    #: The nodes that made them, and those that do now.
    before: tuple[DiffNode, ...]
    after: tuple[DiffNode, ...]

    @property
    def is_fusion(self) -> bool:
        """Whether one node does what several did."""
        return len(self.before) > 1 and len(self.after) == 1


@dataclass(frozen=True)
class Move:
    """A node that does the same elsewhere."""

    #: The node, where it was and where it is; more than one where the nodes that it has passed read several values.
    before: tuple[DiffNode, ...]
    after: tuple[DiffNode, ...]
    past: tuple[DiffNode, ...]  #: The nodes that it passed, as they are called in the first graph
    #: Whether it now comes before the nodes that it followed; otherwise it follows those that it came before.
    up: bool


@dataclass(frozen=True)
class Change:
    """One thing that is different about a node that is in both graphs."""

    #: The node in both graphs.
    before: DiffNode
    after: DiffNode
    #: "dtype" or "shape" of a result, "input 1", "constant 1" (an input that holds other numbers), or the name of an
    #: attribute.
    what: str
    #: What it was and is, in words; "none" where it was or is not there.
    old: str
    new: str


@dataclass(frozen=True)
class Side:
    """One of the two graphs."""

    name: str  #: What it is called - "execution", or the switches that it was built with
    digest: str  #: Of the graph; see `Graph.digest`
    nodes: int  #: How many nodes it has
    #: How many of them are ``Constant`` nodes, and how many constants are stored in the graph.
    constant_nodes: int
    constants: int
    #: Names of those that the other graph does not have.
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


_BETWEEN: Final = "com.microsoft.YieldOp"
"""The node that hands the forward's results to PyTorch; what depends on it is backward."""


@dataclass(frozen=True, repr=False)
class GraphDiff(Shown, JsonRecord, noun="difference of graphs", layout=1):
    """The differences of two graphs."""

    before: Side  #: The graphs
    after: Side  #: See `before`
    #: Names of the nodes that are in both, in `before` and in `after`, in the order of the first.
    matched: tuple[tuple[str, str], ...] = ()
    #: Nodes that are in one graph only, and for which nothing stands in the other.
    added: tuple[DiffNode, ...] = ()
    removed: tuple[DiffNode, ...] = ()  #: See `added`
    #: Copies of nodes that run again in the backward, in `after` only and in `before` only.
    recomputed: tuple[DiffNode, ...] = ()
    recomputed_before: tuple[DiffNode, ...] = ()  #: See `recomputed`
    rewritten: tuple[Rewrite, ...] = ()  #: Nodes whose results others make; see `fused`
    moved: tuple[Move, ...] = ()  #: Nodes that do the same elsewhere
    changed: tuple[Change, ...] = ()  #: What is different about nodes that are in both
    #: The two graphs themselves, so that they can be drawn; none in a difference that was read from JSON.
    graphs: tuple[Graph, ...] = field(default=(), repr=False, compare=False)

    @property
    def fused(self) -> tuple[Rewrite, ...]:
        """Those of `rewritten` in which one node does what several did."""
        return tuple(one for one in self.rewritten if one.is_fusion)

    @property
    def is_empty(self) -> bool:
        """Whether the graphs compute the same in the same way; names may differ."""
        return not self.sentences

    @property
    def sentences(self) -> tuple[str, ...]:
        """The differences in words, those that say most first; none if there are none."""
        from ortlab.graphs.diff_words import sentences

        return sentences(self)

    def colours(self) -> tuple[dict[str, Kind], dict[str, Kind]]:
        """Return what the nodes of `before` and of `after` are shown as, by name; those that are the same are left out.

        A copy that runs again in backward is "added"; what other nodes do now, and those nodes, are "fused".
        """
        before: dict[str, Kind] = {one.before.name: "changed" for one in self.changed}
        after: dict[str, Kind] = {one.after.name: "changed" for one in self.changed}
        for move in self.moved:
            before.update({node.name: "moved" for node in move.before})
            after.update({node.name: "moved" for node in move.after})
        for rewrite in self.rewritten:
            before.update({node.name: "fused" for node in rewrite.before})
            after.update({node.name: "fused" for node in rewrite.after})
        before.update({node.name: "removed" for node in (*self.removed, *self.recomputed_before)})
        after.update({node.name: "added" for node in (*self.added, *self.recomputed)})
        return before, after

    def table(self) -> pd.DataFrame:
        """One row for each difference: what was done, the nodes before and after, operators, module, and more."""
        import pandas as pd

        from ortlab.graphs.diff_words import Row, rows

        return pd.DataFrame(list(rows(self)), columns=Row._fields)

    def _fields(self) -> dict[str, Any]:
        before, after = self.colours()
        found = record_files.plain({name: one for name, one in vars(self).items() if name != "graphs"})
        return {**found, "sentences": list(self.sentences), "colours": {"before": before, "after": after}}

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> GraphDiff:
        made = {"sentences", "colours"}  # of the others, for who reads the file without ortlab
        return record_files.rebuilt(cls, {name: one for name, one in fields.items() if name not in made})


def diff(before: Graph, after: Graph, *, names: tuple[str, str] | None = None) -> GraphDiff:
    """Find what is different between two graphs.

    Nodes are matched by what they compute, by name, and by what is around them, in time in proportion to the size of
    the graphs. Names of values and nodes may differ, and so may the names of sizes; the order of the nodes in the file
    does not count, nor do names and addresses that belong to a process.

    Parameters
    ----------
    before, after
        The graphs.
    names
        What to call them; by default their stages and modes.

    Returns
    -------
    GraphDiff
        The record; its `is_empty` tells whether they are the same.
    """
    from ortlab.graphs.alignment import Alignment
    from ortlab.graphs.changes import Changes
    from ortlab.graphs.wiring import Wiring

    one, other = Wiring(before.model), Wiring(after.model)
    aligned = Alignment(one, other)
    found = Changes(aligned)
    old, new = _nodes_of(before, one), _nodes_of(after, other)
    called = names or _names(before, after)
    gone, come = aligned.matched_values.other_outputs()
    return GraphDiff(
        _side(before, one, called[0], aligned.value, gone),
        _side(after, other, called[1], aligned.earlier, come),
        matched=tuple((old[left].name, new[aligned.forth[left]].name) for left in sorted(aligned.forth)),
        added=_chosen(new, found.added),
        removed=_chosen(old, found.removed),
        recomputed=_chosen(new, found.repeated),
        recomputed_before=_chosen(old, found.repeated_before),
        rewritten=tuple(
            Rewrite(_chosen(old, ours), _chosen(new, theirs)) for ours, theirs in found.rewritten
        ),
        moved=tuple(
            Move(_chosen(old, move.before), _chosen(new, move.after), _chosen(old, move.past), move.up)
            for move in found.moved
        ),
        changed=tuple(
            Change(old[one.before], new[one.after], one.what, one.old, one.new) for one in found.changed
        ),
        graphs=(before, after),
    )


def _names(before: Graph, after: Graph) -> tuple[str, str]:
    if before.stage != after.stage:
        return before.stage, after.stage
    if before.mode != after.mode:
        return f"{before.stage} for {before.mode}", f"{after.stage} for {after.mode}"
    return "one", "the other"


def _chosen(nodes: list[DiffNode], numbers: Iterable[int]) -> tuple[DiffNode, ...]:
    return tuple(nodes[number] for number in numbers)


def _nodes_of(graph: Graph, wiring: Wiring) -> list[DiffNode]:
    behind = [node.number for node in wiring.nodes if node.operator == _BETWEEN]
    backward = set(behind)
    for number in behind:  # it grows meanwhile
        for reader in wiring.behind(number):
            if reader not in backward:
                backward.add(reader)
                behind.append(reader)
    found = []
    for node in wiring.nodes:
        origin = graph.origins[node.name]
        late = node.number in backward and node.operator != _BETWEEN
        found.append(DiffNode(node.name, node.operator, origin.module, origin.layer, late))
    return found


def _side(
    graph: Graph, wiring: Wiring, name: str, other: Callable[[str], str | None], outputs: tuple[str, ...]
) -> Side:
    return Side(
        name,
        graph.digest,
        graph.node_count,
        wiring.constant_nodes,
        graph.initializer_count,
        tuple(value for value in wiring.inputs if other(value) is None),
        outputs,
    )
