"""The forms of a graph beside its tables: the still picture, the tree of modules, and the frame that can be browsed."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

from ortlab.graphs.viewer.document import SANDBOX
from ortlab.render import graph_picture
from ortlab.render.page import Block, Drawing, Folded, Frame, Mark, Note, Page

if TYPE_CHECKING:
    from ortlab.graphs.onnx_files import FileGraph
    from ortlab.graphs.stages import Graph
    from ortlab.graphs.viewer.document import EmbeddedGraph


def with_picture(graph: Graph, summary: Page) -> Page:
    """Put the still picture into the page of a graph, behind its first sentence, and the tree of modules at the end."""
    picture = Drawing(graph_picture.description(graph), lambda: graph_picture.picture(graph))
    first, *others = summary.blocks or (Note(""),)
    tree = Folded("Modules and their operators", graph_picture.tree(graph))
    return replace(summary, blocks=(first, picture, *others, tree))


def file_page(graph: FileGraph, summary: Page) -> Page:
    """Put what was not read of a file before the rest of its page."""
    notes = tuple(Note(one, Mark.QUIET) for one in graph.notes)
    return replace(summary, blocks=(*notes, *summary.blocks))


def embedded_page(shown: EmbeddedGraph, summary: Page) -> Page:
    """Put the frame under the summary, or say why there is none."""
    return replace(summary, blocks=(*summary.blocks, *_view(shown)))


def frame(shown: EmbeddedGraph) -> str:
    """Write the frame: sandboxed, with the whole page in it."""
    return (
        f'<iframe title="{escape(graph_picture.description(shown.graph))}" sandbox="{SANDBOX}" loading="lazy" '
        f'style="width: 100%; height: {shown.height}px; border: 1px solid #8888; box-sizing: border-box" '
        f'srcdoc="{escape(shown.document.html)}"></iframe>'
    )


def _view(shown: EmbeddedGraph) -> tuple[Block, ...]:
    if shown.refused:
        return (Note(f"The graph cannot be browsed here. {shown.refused}", Mark.WARN),)
    reduced = shown.document.reduced
    words = (Note(reduced, Mark.QUIET),) if reduced else ()
    said = "the graph node by node, which can be browsed in the HTML of the notebook"
    return (*words, Frame(said, lambda: frame(shown)))
