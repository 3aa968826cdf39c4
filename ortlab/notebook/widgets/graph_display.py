"""The open views of graphs, in cells and in the panel: one for each lab and stage, and what a table marks in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from ortlab.errors import BuildError, OptionError, OrtlabError
from ortlab.graphs.diff import GraphDiff
from ortlab.graphs.stages import STAGES, Graph
from ortlab.graphs.triton_kernels import TritonKernel
from ortlab.lab.following import observe, recompute_places
from ortlab.memory.recompute import COPY, EVERYWHERE
from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.graph_view import HEIGHT, HOPS, GraphSource, GraphView
from ortlab.render import html
from ortlab.render.kernel_pages import code_title
from ortlab.render.page import Mark, Note, Page

if TYPE_CHECKING:
    from ortlab.analyses.graphs import Mode
    from ortlab.lab.lab import Lab
    from ortlab.memory.recompute import RecomputePlace, RecomputePlaces
    from ortlab.notebook.widgets.controls import ErrorBox, Looks


_of_labs: WeakKeyDictionary[Lab, dict[tuple[str, str | None, str | None], ref[GraphView]]] = (
    WeakKeyDictionary()
)
_known_places: WeakKeyDictionary[Lab, RecomputePlaces] = WeakKeyDictionary()
_of_graphs: WeakValueDictionary[tuple[str, ...], GraphView] = WeakValueDictionary()

_BUILDS: Final = {"export", "graph", "session"}


def show_graph(
    source: Lab | Graph | GraphDiff | TritonKernel,
    stage: str = "",
    part: str | None = None,
    *,
    mode: Mode | None = None,
    around: str = "",
    hops: int = HOPS,
    group: str = "auto",
    height: int = HEIGHT,
) -> GraphView:
    """Show a graph in the cell, drawn by netron: click a node, and Python knows; select in Python, and the cell shows.

    Everything that is drawn comes through the kernel's own connection: no port, no server, no network. A saved
    notebook keeps the summary and a still picture; `ortlab.embed_graph` makes a view that lives on in it.

    Parameters
    ----------
    source
        A lab; or one graph, of `lab.graph(...)` or `ortlab.open_graph(...)`; or a difference, of `lab.graph_diff(...)`,
        whose two graphs are shown with what was added, removed, moved, changed and fused marked in them; or a sub-graph
        that Triton runs, of `lab.triton_kernels()`, with the code that was generated for it beside it.
    stage
        As for `lab.graph`, "execution" if it is left out; the view lets choose among them. Of a difference "before" or
        "after", which is shown first: by default what came after, if it has marks. Of a sub-graph that Triton runs
        "original" or "processed". Of no meaning for one graph.
    part, mode
        As for `lab.graph`.
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
    GraphView
        Running a cell again returns the same view of the same lab, refreshed.

    Raises
    ------
    OptionError
        If there is no such stage, part or node.
    BuildError
        If nothing has been built yet for the present options, a difference has no graphs since it was read from a
        file, or a file of a sub-graph is gone.

    Examples
    --------
    >>> view = ortlab.show_graph(lab, "execution")
    >>> view.select(["/encoder/layer.0/attention/MatMul"])
    >>> view.selected
    ['/encoder/layer.0/attention/MatMul']
    >>> ortlab.show_graph(lab.graph_diff(memory_level=1))
    >>> ortlab.show_graph(lab.triton_kernels().kernel(1))
    """
    how: dict[str, Any] = {"around": around, "hops": hops, "group": group}
    if isinstance(source, Graph):
        return _of_graph(source, how, height)
    if isinstance(source, GraphDiff):
        return _of_diff(source, stage, how, height)
    if isinstance(source, TritonKernel):
        return _of_kernel(source, stage, how, height)
    stage = stage or "execution"
    lab_ref = ref(source)

    def read(wanted: str) -> Graph:
        living = lab_ref()
        if living is None:
            raise BuildError("The lab of this view is gone.", fix="Wrap the model again.")
        return living.graph(wanted, part, mode=mode)

    key = stage, part, mode
    views = _of_labs.setdefault(source, {})
    known = views[key]() if key in views else None
    if known is not None and not known.closed:
        known.show(stage, **how)
        return known
    view = GraphView(GraphSource(STAGES, read), stage, **how, height=height)
    view.ends_with(observe(source, _follower(lab_ref, ref(view))))
    views[key] = ref(view)
    return view


def highlight(lab: Lab, nodes: Iterable[str]) -> None:
    """Mark nodes, and the copies that recompute them, in the open views of a lab; no names take all marks off.

    Views that do not have a node leave it out: an earlier stage has other nodes than the execution graph.
    """
    wanted = list(nodes)
    for view in open_views(lab):
        present = set(view.names)
        shown = [one for name in wanted for one in (name, name + COPY) if one in present]
        view.highlight(shown)
        view.select(shown)


def highlight_plans(lab: Lab, plans: Iterable[str]) -> None:
    """Mark the nodes that recompute plans would run again, in the open views of a lab.

    Where there is no view, ORT is not asked; where nothing is built, there is nothing to mark.
    """
    if not open_views(lab):
        return
    places = _places(lab)
    if places is None:  # the view itself says that there is no such graph any more
        highlight(lab, ())
        return
    chosen = [part for config in plans for part in config.split(",")]
    highlight(
        lab, dict.fromkeys(name for plan in chosen for place in _acting(places, plan) for name in place.nodes)
    )


def _places(lab: Lab) -> RecomputePlaces | None:
    """Return where plans act; while a rebuild is due, where they acted in the build before, which the views show."""
    if not lab.status.pending_stage:  # a tick shall not wait for a graph to be built
        with suppress(OrtlabError):
            _known_places[lab] = recompute_places(lab)
    return _known_places.get(lab)


def _acting(places: RecomputePlaces, plan: str) -> Sequence[RecomputePlace]:
    count = int(plan.split(":")[2])
    found = places.of(plan)
    return found if count == EVERYWHERE else found[:count]


def open_views(lab: Lab) -> list[GraphView]:
    """Return the views of a lab that are open, the oldest first."""
    found = [view() for view in _of_labs.get(lab, {}).values()]
    return [view for view in found if view is not None and not view.closed]


def _of_graph(graph: Graph, how: dict[str, Any], height: int) -> GraphView:
    alone = GraphSource({graph.stage: STAGES.get(graph.stage, "")}, lambda _: graph)
    return _kept((graph.stage, graph.digest), alone, graph.stage, how, height)


def _of_diff(diff: GraphDiff, side: str, how: dict[str, Any], height: int) -> GraphView:
    if not diff.graphs:
        raise BuildError(
            "This difference has no graphs to show.",
            why="It was read from a file, which holds the differences only.",
            fix="Compare again: lab.graph_diff(...).",
        )
    titles = {"before": diff.before.name, "after": diff.after.name}
    before, after = diff.colours()
    side = side or ("before" if before and not after else "after")
    if side not in titles:
        raise OptionError(f"A difference has no side {side!r}.", fix='Choose "before" or "after".')
    key = "difference", *(part for one in (diff.before, diff.after) for part in (one.name, one.digest))
    graphs = dict(zip(titles, diff.graphs, strict=True))
    colours = {"before": before, "after": after}
    return _kept(key, GraphSource(titles, graphs.__getitem__, colours.__getitem__), side, how, height)


def _of_kernel(kernel: TritonKernel, form: str, how: dict[str, Any], height: int) -> GraphView:
    form = form or next(iter(kernel.forms), "original")
    kernel.graph(form)  # says what is wrong before anything is shown
    files = (*kernel.graphs.values(), *kernel.sources)
    key = "triton", form, *(f"{one}{one.stat().st_mtime_ns}" for one in files)
    source = GraphSource(kernel.forms, kernel.graph, code=kernel.source, about_code=code_title(kernel))
    return _kept(key, source, form, how, height)


def _kept(
    key: tuple[str, ...], source: GraphSource, stage: str, how: dict[str, Any], height: int
) -> GraphView:
    """Return the open view of a key, refreshed; make it where there is none."""
    known = _of_graphs.get(key)
    if known is not None and not known.closed:
        known.show(stage, **how)
        return known
    view = _of_graphs[key] = GraphView(source, stage, **how, height=height)
    return view


def _follower(lab: ref[Lab], view: ref[GraphView]) -> Callable[[str], None]:
    def follow(event: str) -> None:
        kind = event.partition(":")[0]
        living, shown = lab(), view()
        if kind in {"options", "runs"} and living is not None and shown is not None and not shown.closed:
            shown.follow(rebuild_is_due=living.engine == "ort" and living.rebuild().stage in _BUILDS)

    return follow


_PART_HEIGHT: Final = 400
"""Of the view in a panel, in pixels: with its tools it fits the page of a tab."""

_NO_GRAPH: Final = "There is no graph yet. Run a step first: %%ort_step -n 20, or lab.step(fn, n=20)."


class GraphPart(controls.Column):
    """The graph that runs, drawn from the first `opened` on; `ortlab.show_graph(lab)` shows it in a cell of its own."""

    def __init__(self, lab: Lab, errors: ErrorBox, looks: Looks) -> None:
        self._lab = lab
        self._errors = errors
        self.view: GraphView | None = None
        self._made: GraphView | None = None
        self._nothing = looks.html(_said(_NO_GRAPH))
        super().__init__([self._nothing], layout=looks.layout)

    def opened(self) -> None:
        """Draw the graph, unless it is there already or nothing has run."""
        status = self._lab.status
        if self.view is not None or not (status.can_repeat or status.executed_by):
            return
        self._nothing.value = _said("Drawing the graph.")
        with self._errors.watching():
            known = open_views(self._lab)
            self.view = show_graph(self._lab, height=_PART_HEIGHT)
            self._made = None if self.view in known else self.view
            self.set_trait("children", (self.view,))
        if self._nothing in self.children:
            self._nothing.value = _said("The graph could not be drawn; what went wrong stands above.")
        else:
            self._nothing.close()

    def let_go(self) -> None:
        """Close the view if the panel has made it; one that was there before stays."""
        if self.view is not None:  # closed with the panel, it would go from other cells, too
            self.set_trait("children", ())
        if self._made is not None:
            self._made.close()


def _said(words: str) -> str:
    return html.fragment(Page("", (Note(words, Mark.QUIET),)))
