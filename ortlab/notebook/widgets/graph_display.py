"""The open views of graphs, in cells and in the panel: one for each lab and stage, and what a table marks in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import traitlets

from ortlab import units
from ortlab.errors import BuildError, OptionError, OrtlabError
from ortlab.graphs.diff import GraphDiff
from ortlab.graphs.stages import STAGES, Graph
from ortlab.graphs.triton_kernels import TritonKernel
from ortlab.lab.following import observe, recompute_places
from ortlab.memory.recompute import COPY, EVERYWHERE
from ortlab.notebook.widgets import controls
from ortlab.notebook.widgets.browser import Part, packed
from ortlab.notebook.widgets.controls import close_tree
from ortlab.notebook.widgets.graph_view import DUE, HEIGHT, HOPS, GraphSource, GraphView
from ortlab.options.configuration import engine_kind
from ortlab.render import html
from ortlab.render.graph_map import graph_map
from ortlab.render.page import Mark, Note, Page
from ortlab.render.profile_pages import code_title

if TYPE_CHECKING:
    from ortlab.analyses.graphs import Mode
    from ortlab.lab.lab import Lab
    from ortlab.memory.recompute import RecomputePlace, RecomputePlaces
    from ortlab.notebook.widgets.controls import ErrorBox, Looks
    from ortlab.options.options import Options
    from ortlab.records.runs import Run


_of_labs: WeakKeyDictionary[Lab, dict[tuple[str, str | None, str | None], ref[GraphView]]] = (
    WeakKeyDictionary()
)
_known_places: WeakKeyDictionary[Lab, RecomputePlaces] = WeakKeyDictionary()
_of_graphs: WeakValueDictionary[tuple[str, ...], GraphView] = WeakValueDictionary()

_BUILDS: Final = {"export", "graph", "session"}


def is_due(lab: Lab) -> bool:
    """Tell whether the next step of a lab builds another graph than the one that there is."""
    return lab.engine == "ort" and lab.rebuild().stage in _BUILDS


def is_changed(lab: Lab) -> bool:
    """Tell whether it is another graph than the one of the last step, and does not only have to be built again."""
    return is_due(lab) and bool(lab.rebuild().changed)


def is_built(lab: Lab) -> bool:
    """Tell whether ONNX Runtime has run a lab as it is set now, so that to read its graph builds nothing."""
    return lab.engine == "ort" and bool(lab.status.executed_by) and not is_due(lab)


class _Switches:
    """For which switches a graph was read, where no step had run with them: other ones than the last step's."""

    def __init__(self) -> None:
        self.ahead: Options | None = None

    def are_read(self, lab: Lab) -> None:
        """Remember the lab's, where its graph has just been read ahead of a step."""
        self.ahead = lab.options if is_changed(lab) else None

    def are_others(self, lab: Lab) -> bool:
        """Tell whether the lab is set otherwise than when its graph was read."""
        return is_changed(lab) if self.ahead is None else lab.options != self.ahead


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
    switches = _Switches()

    def read(wanted: str) -> Graph:
        living = lab_ref()
        if living is None:
            raise BuildError("The lab of this view is gone.", fix="Wrap the model again.")
        graph = living.graph(wanted, part, mode=mode)
        switches.are_read(living)
        return graph

    key = stage, part, mode
    views = _of_labs.setdefault(source, {})
    known = views[key]() if key in views else None
    if known is not None and not known.closed:
        known.show(stage, **how)
        return known
    view = GraphView(GraphSource(STAGES, read), stage, **how, height=height)
    view.ends_with(observe(source, _follower(lab_ref, ref(view), switches)))
    views[key] = ref(view)
    return view


def highlight(lab: Lab, nodes: Iterable[str]) -> None:
    """Mark nodes, and the copies that recompute them, in the open views of a lab; no names take all marks off."""
    # Views that do not have a node leave it out: an earlier stage has other nodes than the execution graph.
    wanted = list(nodes)
    for view in open_views(lab):
        present = set(view.names)
        shown = [one for name in wanted for one in (name, name + COPY, name + COPY + COPY) if one in present]
        view.highlight(shown)
        view.select(shown)


def highlight_plans(lab: Lab, plans: Iterable[str]) -> None:
    """Mark the nodes that recompute plans would run again, in the open views of a lab."""
    # Where there is no view, ORT is not asked; where nothing is built, there is nothing to mark.
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


def _follower(lab: ref[Lab], view: ref[GraphView], switches: _Switches) -> Callable[[str], None]:
    def follow(event: str) -> None:
        kind = event.partition(":")[0]
        living, shown = lab(), view()
        if kind in {"options", "runs"} and living is not None and shown is not None and not shown.closed:
            if switches.are_others(living):
                shown.follow(DUE)
            elif switches.ahead is not None and is_due(living):  # what was read last is shown
                shown.follow("")
            elif not is_due(living):  # else to read the graph would build it
                shown.follow()

    return follow


_PART_HEIGHT: Final = 380
"""Of netron's view in a panel, in pixels: with its tools it fits the page of a tab."""

_NO_GRAPH: Final = "There is no graph yet. Run a step first: %%ort_step -n 20, or lab.step(fn, n=20)."

_READING: Final = "Reading the graph."

_RUNS: Final = 30
"""Runs that can be compared: the first, and the latest."""


class GraphMap(Part):
    """A graph by modules, as rows that open; see `render/graph_map.py` for what they say."""

    # The rows go to the browser as a message, and not as a trait, which a saved notebook would hold.

    shown = traitlets.Dict().tag(sync=True)  # `number` of the rows, and what stands above them

    def __init__(self, looks: Looks, acts: Mapping[str, Callable[..., None]], errors: ErrorBox) -> None:
        self._acts = {"map": self._send_rows, **acts}
        self._errors = errors
        self._told: dict[str, Any] = {}
        super().__init__("graph_map.js", looks.script("graph_map.js", ""), layout=looks.layout)
        self.on_msg(self._asked)

    def show(self, drawing: Mapping[str, Any], *, colour: str = "", same: bool = False) -> None:
        """Draw what `graph_map` returned; `same` keeps open what is open, where it is the same graph again."""
        number = self._told.get("number", -1) + 1
        self._told = {"number": number, "map": packed(drawing), "colour": colour, "same": same}
        self.say(number=number)

    def say(self, **words: object) -> None:
        """Change what stands above the rows."""
        self.shown = {**self.shown, **words}

    def _asked(self, _widget: object, message: Any, _buffers: object) -> None:
        if "do" in message:
            with self._errors.watching():
                self._acts[message["do"]](*message["with"])

    def _send_rows(self) -> None:
        self.send(self._told)

    def __repr__(self) -> str:
        return "GraphMap()"


class GraphPart(controls.Column):
    """The graph that runs, by modules from the first `opened` on, and node by node when that is asked for."""

    # `ortlab.show_graph(lab)` shows the nodes in a cell of its own.

    def __init__(self, lab: Lab, errors: ErrorBox, looks: Looks) -> None:
        self._lab = lab
        self._errors = errors
        self.graph: Graph | None = None  # what the map shows
        self._switches = _Switches()
        self.difference: GraphDiff | None = None
        self.part: str | None = None  # path of the part whose graph it is, where several are wrapped
        self.view: GraphView | None = None  # None until every node was asked for
        self._made: GraphView | None = None
        self._looks = looks
        self._nothing = looks.html(_said(_NO_GRAPH))
        self.map: GraphMap | None = None
        back = looks.button("Back to the modules", "Show the graph by modules again")
        back.on_click(lambda _: self._show_map())
        self._back = looks.row(back)
        self._about: list[str] = []  # what the difference is, in words
        super().__init__([self._nothing], layout=looks.layout)

    def opened(self) -> None:
        """Read the graph, unless it is shown already or nothing has run."""
        if not self._has_run():
            return
        if self.map is None:
            self._nothing.value = _said(_READING)
        with self._errors.watching():
            self._read()
        if self.map is None:
            self._nothing.value = _said("The graph could not be read; what went wrong stands above.")

    def follow(self) -> None:
        """Say whether the map is still the lab's; before there is one, ask for no step that has run meanwhile."""
        if self.map is not None:
            parts = {"parts": [[one, one] for one in self._parts()], "part": self.part} if self.part else {}
            stale = DUE if self._switches.are_others(self._lab) else ""
            self.map.say(stale=stale, runs=self._runs(), pair=self._pair(), **parts)
        elif self._nothing.value == _said(_NO_GRAPH) and self._has_run():
            self._nothing.value = _said(_READING)

    def _has_run(self) -> bool:
        status = self._lab.status
        return status.can_repeat or bool(status.executed_by)

    def _read(self) -> None:
        if self.graph is not None and is_changed(self._lab) and self._switches.are_others(self._lab):
            self.follow()
            return
        parts = self._parts()
        if self.part not in parts:
            self.part = parts[0] if len(parts) > 1 else None
        graph = self._lab.graph(part=self.part)
        self._switches.are_read(self._lab)
        if self.graph is None or self.difference is not None or graph.digest != self.graph.digest:
            if graph.mode == "training":
                graph = graph.with_activations(self._lab.activations(self.part, progress=False))
            self.difference = None
            self._draw(graph, colour="operator")
        self.follow()

    def _draw(self, graph: Graph, *, colour: str = "", same: bool = False) -> None:
        self.graph = graph
        if self.map is None:
            acts: dict[str, Callable[..., None]] = {
                "part": self.choose_part,
                "time": self.time,
                "plans": self.find_plans,
                "compare": self.compare,
                "nodes": self.every_node,
            }
            self.map = GraphMap(self._looks, acts, self._errors)
            self._nothing.close()
            self._show_map()
        about = self._about if self.difference is not None else []
        drawing = {**graph_map(graph, self.difference), "about": about}
        self.map.show(drawing, colour=colour, same=same)

    def _show_map(self) -> None:
        self.set_trait("children", (self.map,))

    # ---- what the browser asks for ----------------------------------------------------------------------------

    def choose_part(self, path: str) -> None:
        """Show the graph of another part of the model."""
        self.part, self.graph = path, None
        self._read()

    def time(self) -> None:
        """Profile the last step, and colour by time."""
        self._read()
        graph = self._lab.graph(part=self.part, activations=True, profile=True)
        self.difference = None
        self._draw(graph, colour="time", same=True)

    def find_plans(self) -> None:
        """Ask which recompute plans remove each kept value."""
        if self.graph is None:
            return
        self._draw(self.graph.with_activations(self._lab.activations(self.part, plans=True)), same=True)

    def compare(self, first: str, second: str) -> None:
        """Show what is different between the graphs of two runs."""
        runs = self._lab.runs
        difference = self._lab.graph_diff(runs.run(int(first)), runs.run(int(second)), part=self.part)
        self.difference = difference
        before, after = (one.activations for one in difference.graphs)
        kept = []
        if before is not None and after is not None:
            sizes = [units.size(one.total_bytes - one.returned_bytes) for one in (before, after)]
            kept = [f"Kept for backward: {sizes[0]} before, {sizes[1]} after."]
        names = f"From {difference.before.name} to {difference.after.name}"
        self._about = [names, *(difference.sentences or ("The graphs are the same.",)), *kept]
        self._draw(difference.graphs[1], colour="difference")
        self.follow()

    def every_node(self, around: str = "") -> None:
        """Draw every node with netron; with a name, the nodes around that one."""
        known = open_views(self._lab)
        self.view = show_graph(self._lab, part=self.part, height=_PART_HEIGHT)
        if self.view not in known:
            self._made = self.view
        if around in self.view.names:
            self.view.around(around)
        self.set_trait("children", (self._back, self.view))

    def _parts(self) -> list[str]:
        """List the wrapped parts that were called; none where all of the model is wrapped."""
        return [part.path for part in self._lab.status.coverage.parts if part.calls]

    def _runs(self) -> list[list[str]]:
        """List the runs that ONNX Runtime executed, by number and name."""
        found = [
            [str(run.number), _run_words(run)]
            for run in self._lab.runs
            if engine_kind(run.engine) == "ort" and not run.fell_back and not run.sweep
        ]
        return [*found[:1], *found[1:][-_RUNS + 1 :]]

    def _pair(self) -> list[str]:
        """Return the first run and the last one, which are compared unless others are chosen."""
        runs = self._runs()
        return [runs[0][0], runs[-1][0]] if runs else []

    def let_go(self) -> None:
        """Close what the panel has made; a view that was there before stays."""
        if self.view is not None:  # closed with the panel, it would go from other cells, too
            self.set_trait("children", ())
        if self._made is not None:
            self._made.close()
        for part in (self.map, self._back):
            if part is not None:
                close_tree(part, self._looks)


def _run_words(run: Run) -> str:
    """Name a run of ONNX Runtime by what is switched."""
    switched = run.title.partition(" ort")[2].strip(" ()")
    return units.fold(f"#{run.number} {switched or 'defaults'}", _RUN_TITLE)


_RUN_TITLE: Final = 60


def _said(words: str) -> str:
    return html.fragment(Page("", (Note(words, Mark.QUIET),)))
