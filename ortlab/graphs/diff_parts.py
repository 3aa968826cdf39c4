"""What a difference of graphs is made of: its nodes, and what was done to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["added", "removed", "moved", "changed", "fused"]
"""What a node is shown as, in a table and in a graph."""


@dataclass(frozen=True)
class DiffNode:
    """A node of one of the two graphs.

    Attributes
    ----------
    name
        As `ortlab.graphs.node_names` gives it.
    operator
        What it computes: "Gelu", "com.microsoft.BiasGelu", "aten::gelu".
    module, layer
        Paths of the module and of the layer that it comes from; empty where they are not known, or outside the layers.
    backward
        Whether it runs in the backward.
    """

    name: str
    operator: str
    module: str = ""
    layer: str = ""
    backward: bool = False


@dataclass(frozen=True)
class Rewrite:
    """Nodes whose results are made by others.

    Attributes
    ----------
    before, after
        The nodes that made them, and those that do now.
    """

    before: tuple[DiffNode, ...]
    after: tuple[DiffNode, ...]

    @property
    def is_fusion(self) -> bool:
        """Whether one node does what several did."""
        return len(self.before) > 1 and len(self.after) == 1

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Rewrite:
        """Rebuild it from plain JSON types."""
        return cls(nodes_of(record["before"]), nodes_of(record["after"]))


@dataclass(frozen=True)
class Move:
    """A node that does the same elsewhere.

    Attributes
    ----------
    before, after
        The node, where it was and where it is; more than one where the nodes that it has passed read several values.
    past
        The nodes that it passed, as they are called in the first graph.
    up
        Whether it now comes before the nodes that it followed; otherwise it follows those that it came before.
    """

    before: tuple[DiffNode, ...]
    after: tuple[DiffNode, ...]
    past: tuple[DiffNode, ...]
    up: bool

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Move:
        """Rebuild it from plain JSON types."""
        return cls(
            nodes_of(record["before"]),
            nodes_of(record["after"]),
            nodes_of(record["past"]),
            bool(record["up"]),
        )


@dataclass(frozen=True)
class Change:
    """One thing that is different about a node that is in both graphs.

    Attributes
    ----------
    before, after
        The node in both graphs.
    what
        "dtype" or "shape" of a result, "input 1", "constant 1" (an input that holds other numbers), or the name of an
        attribute.
    old, new
        What it was and is, in words; "none" where it was or is not there.
    """

    before: DiffNode
    after: DiffNode
    what: str
    old: str
    new: str

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Change:
        """Rebuild it from plain JSON types."""
        return cls(
            DiffNode(**record["before"]),
            DiffNode(**record["after"]),
            record["what"],
            record["old"],
            record["new"],
        )


@dataclass(frozen=True)
class Side:
    """One of the two graphs.

    Attributes
    ----------
    name
        What it is called: "execution", or the switches that it was built with.
    digest
        Of the graph; see `Graph.digest`.
    nodes
        How many nodes it has.
    constant_nodes, constants
        How many of them are ``Constant`` nodes, and how many constants are stored in the graph.
    inputs, outputs
        Names of those that the other graph does not have.
    """

    name: str
    digest: str
    nodes: int
    constant_nodes: int
    constants: int
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Side:
        """Rebuild it from plain JSON types."""
        lists = {name: tuple(record[name]) for name in ("inputs", "outputs")}
        return cls(**{**record, **lists})


def nodes_of(records: Iterable[Mapping[str, Any]]) -> tuple[DiffNode, ...]:
    """Rebuild nodes from plain JSON types."""
    return tuple(DiffNode(**one) for one in records)
