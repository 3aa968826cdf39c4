"""The panel's part about graphs: folded, and built when it is first opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.notebook.widgets import lean
from ortlab.notebook.widgets.fold import Fold
from ortlab.notebook.widgets.graph_display import open_views, show_graph

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab
    from ortlab.notebook.widgets.base import ErrorBox, Looks
    from ortlab.notebook.widgets.graph_view import GraphView


class GraphPart(Fold):
    """The graph that runs, drawn; `ortlab.show_graph(lab)` shows the same view in a cell of its own."""

    def __init__(self, lab: Lab, errors: ErrorBox, looks: Looks) -> None:
        self._lab = lab
        self._errors = errors
        self._made: GraphView | None = None
        self._place = lean.Column(layout=looks.layout)
        super().__init__("Graph", self._place, self._build, looks)

    def _build(self) -> None:
        if self._place.children:
            return
        with self._errors.watching():
            known = open_views(self._lab)
            view = show_graph(self._lab)
            self._made = None if view in known else view
            self._place.children = (view,)
        if not self._place.children:
            self.heading.value = False

    def let_go(self) -> None:
        """Close the view if the panel has made it; one that was there before stays."""
        self._place.children = ()
        if self._made is not None:
            self._made.close()
