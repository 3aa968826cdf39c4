"""What is drawn of a graph: all of it if the browser can place it, otherwise groups, a part, or fewer edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ortlab.graphs.viewer.cutting import without_long_edges
from ortlab.graphs.viewer.grouping import Group, grouped
from ortlab.graphs.viewer.neighbourhood import neighbourhood
from ortlab.graphs.viewer.order import in_backward
from ortlab.graphs.viewer.preflight import (
    PLACED_AT_ALL,
    PLACED_AT_ONCE,
    PLACED_GROUPED,
    PLACED_WITH_PATIENCE,
    cost,
)
from ortlab.graphs.viewer.scopes import modules_of

if TYPE_CHECKING:
    from onnx import ModelProto

    from ortlab.graphs.stages import Graph

GROUPINGS: Final = ("auto", "module", "none")


@dataclass(frozen=True)
class Reduction:
    """What is drawn.

    Attributes
    ----------
    model
        The graph as it is drawn.
    groups
        The groups in it.
    words
        What was reduced; empty if nothing was.
    refused
        Why nothing can be drawn; empty if something can.
    """

    model: ModelProto = field(repr=False)
    groups: tuple[Group, ...] = field(default=(), repr=False)
    words: str = ""
    refused: str = ""


def reduced(graph: Graph, model: ModelProto, *, around: str, hops: int, group: str) -> Reduction:
    """Reduce a graph until the browser can place it.

    Parameters
    ----------
    graph
        The graph, for the modules of its nodes.
    model
        Its lean copy.
    around, hops, group
        As in `document`.

    Raises
    ------
    OptionError
        If there is no node `around`, or `hops` is negative.
    """
    said = []
    count = len(model.graph.node)
    groups: tuple[Group, ...] = ()
    if around:
        model, reached = neighbourhood(model, around, hops)
        inside = len(model.graph.node)
        away = f"{reached} hop{'' if reached == 1 else 's'}"
        said.append(f"{inside:,} of {count:,} nodes are drawn: those within {away} of {around[:80]}")
        if reached < hops:
            said.append(f"{hops} hops would be too many nodes")
    before = cost(model.graph.node)
    if group == "module" or (group == "auto" and not before.within(PLACED_AT_ONCE)):
        nodes = model.graph.node
        model, found = grouped(model, modules_of(graph), in_backward(nodes))
        groups = tuple(found)
        inside = sum(len(each.nodes) for each in groups)
        said.append(
            f"{len(groups):,} groups by module hold {inside:,} of the {before.nodes:,} nodes; "
            "ƒ in the head of a group opens it"
        )
    limits = PLACED_GROUPED if groups else PLACED_WITH_PATIENCE
    after = cost(model.graph.node)
    if after.nodes <= PLACED_AT_ALL[0] and after.span > limits[1]:
        model, cut = without_long_edges(model, limits[1])
        said.append(f"{cut:,} long edges are cut: their readers name what they read")
        after = cost(model.graph.node)
    words = ". ".join(said) + "." if said else ""
    if not after.within(PLACED_AT_ALL):
        how = 'Draw it grouped, group="module", or a part of it, around="the name of a node".'
        why = (
            f"{after.nodes:,} nodes with edges over {after.span:,} places are more than a browser can place."
        )
        return Reduction(model, words=words, refused=f"{why} {how}")
    return Reduction(model, groups, words)
