"""A graph that is shown with its page in it: in a saved notebook and in exported HTML it lives without a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ortlab.errors import InstallError
from ortlab.graphs.viewer.document import Document, document
from ortlab.shown import Shown

if TYPE_CHECKING:
    from ortlab.graphs.stages import Graph

MOST_CHARACTERS: Final = 3_000_000
"""Size of a page that is put into a notebook; a larger one would make that slow to save and to open."""

HEIGHT: Final = 560


@dataclass(frozen=True, repr=False)
class EmbeddedGraph(Shown):
    """A graph and its page, or the reason why there is none."""

    graph: Graph
    document: Document
    height: int = HEIGHT  # of the frame, in pixels

    @property
    def refused(self) -> str:
        """Why the page is not shown, in words; empty if it is."""
        size = len(self.document.html)
        if size > MOST_CHARACTERS:
            return (
                f"The page would add {size / 1e6:.1f} MB to the notebook, and {MOST_CHARACTERS / 1e6:.0f} are the "
                "limit. Name a node to show what is around it, or take show_graph, whose page is not saved."
            )
        return self.document.refused


def embed_graph(
    graph: Graph, *, around: str = "", hops: int = 2, group: str = "auto", height: int = HEIGHT
) -> EmbeddedGraph:
    """Return a graph as a page that stays alive in a saved notebook and in exported HTML, without a kernel.

    It adds some 300 kB and the graph itself to the notebook, constants of up to 256 bytes included, weights not.

    Parameters
    ----------
    graph
        Of `lab.graph(...)` or `ortlab.open_graph(...)`.
    around
        Name of a node: only its neighbourhood is drawn.
    hops
        How many edges the neighbourhood reaches, in both directions.
    group
        "auto" groups by module where the whole would be too large to be placed, "module" always, "none" never.
    height
        Of the frame, in pixels.

    Returns
    -------
    EmbeddedGraph
        Where the page cannot be made, summary and still picture stand alone, and why.

    Raises
    ------
    OptionError
        If there is no node `around`, or `group` is another word.

    Examples
    --------
    >>> ortlab.embed_graph(lab.graph("execution"))
    """
    return EmbeddedGraph(graph, drawn(graph, around=around, hops=hops, group=group), height)


def drawn(graph: Graph, *, around: str, hops: int, group: str) -> Document:
    """Make the page of a graph; where netron is missing or broken, that is the reason why there is none."""
    try:
        return document(graph, around=around, hops=hops, group=group)
    except InstallError as error:
        return Document("", graph.node_count, 0, refused=str(error))
