"""The page of a difference of graphs: sentences, both graphs with what changed marked in them, and every difference."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ortlab import units
from ortlab.graphs.diff_words import rows
from ortlab.render import graph_picture
from ortlab.render.page import Block, Cell, Column, Drawing, Folded, Mark, Note, Page, Table, row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ortlab.graphs.diff import GraphDiff
    from ortlab.graphs.stages import Graph

DIFFERENCES_SHOWN: Final = 60
"""Differences that a page lists, in the order of the sentences."""

_COLUMNS: Final = (
    Column("difference"),
    Column("operators", meaning="what the nodes compute, before and after"),
    Column("module", meaning="where in the model the nodes come from; empty where that is not known"),
    Column("before", meaning="names of the nodes in the first graph"),
    Column("after", meaning="names of the nodes in the second graph"),
    Column("more"),
)
_MARKS: Final = {"removed": Mark.BAD, "added": Mark.GOOD, "changed": Mark.WARN}


def graph_diff_page(diff: GraphDiff) -> Page:
    """Say what is different between two graphs, in sentences, as a picture, and one by one."""
    title = f"Difference of graphs: {diff.before.name} -> {diff.after.name}"
    if diff.is_empty:
        same = f"No difference: both compute the same, in {units.count(len(diff.matched))} matched nodes."
        todo = (
            "Set a switch, then ask again: lab.set(memory_level=1).graph_diff(), or %ort_graph --changes. "
            "Or name one: lab.graph_diff(memory_level=1)."
        )
        return Page(title, (Note(same, Mark.GOOD), Note(todo, Mark.QUIET)))
    blocks: list[Block] = [
        Note("\n".join(diff.sentences)),
        Note(
            f"{units.count(diff.before.nodes)} nodes before, {units.count(diff.after.nodes)} after; "
            f"{units.count(len(diff.matched))} of them are in both."
            + (_constants(diff) if diff.before.constant_nodes != diff.after.constant_nodes else ""),
            Mark.QUIET,
        ),
        *_pictures(diff),
        *(Note(note, Mark.QUIET) for note in dict.fromkeys(graph.note for graph in diff.graphs) if note),
        Folded("One by one", blocks=(_table(diff),), is_open=True),
    ]
    return Page(title, tuple(blocks))


def _constants(diff: GraphDiff) -> str:
    return (
        f" Constants are no nodes here: {units.count(diff.before.constant_nodes)} Constant nodes and "
        f"{units.count(diff.before.constants)} stored constants before, "
        f"{units.count(diff.after.constant_nodes)} and {units.count(diff.after.constants)} after."
    )


def _pictures(diff: GraphDiff) -> list[Block]:
    """Draw the graphs by module, with what is different marked; the first only if it has more than changes."""
    if not diff.graphs:
        return []
    before, after = diff.colours()
    sides = [(diff.graphs[1], after, "After", diff.after.name)] if after else []
    if set(before.values()) - {"changed"}:
        sides.insert(0, (diff.graphs[0], before, "Before", diff.before.name))
    blocks: list[Block] = []
    for graph, colours, when, name in sides:
        counts = Counter(colours.values())
        kinds = ", ".join(f"{units.count(number)} {kind}" for kind, number in counts.most_common())
        said = f"{when}, {name}: nodes by module, and how many of them are {kinds}."
        blocks += [
            Note(f"{when}, {name}: {kinds}.", Mark.QUIET),
            Drawing(said, _drawing(graph, colours)),
        ]
    return blocks


def _drawing(graph: Graph, colours: Mapping[str, str]) -> Callable[[], str]:
    return lambda: graph_picture.picture(graph, marks=colours)


def _table(diff: GraphDiff) -> Table:
    found = list(rows(diff))
    shown = [
        row(
            Cell(one.difference, _MARKS.get(one.difference.rpartition(" ")[2], Mark.PLAIN)),
            one.operators,
            one.module,
            one.before,
            one.after,
            one.more,
        )
        for one in found[:DIFFERENCES_SHOWN]
    ]
    hidden = len(found) - len(shown)
    return Table(
        f"{units.count(len(found))} differences",
        _COLUMNS,
        tuple(shown),
        f"{units.count(hidden)} more: diff.table() has them all." if hidden else "",
        sorts=True,
    )
