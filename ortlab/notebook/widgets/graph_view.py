"""A graph in a cell that answers: what is selected there Python knows, and what Python selects is shown there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import traitlets

from ortlab.errors import OptionError, OrtlabError
from ortlab.graphs.nodes import node_names
from ortlab.graphs.viewer.document import SANDBOX, drawn
from ortlab.notebook.widgets.browser import Part, Script, compact, compacted_style, living
from ortlab.notebook.widgets.controls import Layout, close_tree
from ortlab.notebook.widgets.frame import PANEL, SavedForm, forms
from ortlab.render import graph_picture, html
from ortlab.render.graph_map import graph_map
from ortlab.render.page import Code
from ortlab.render.pages import compose

if TYPE_CHECKING:
    from ortlab.graphs.stages import Graph
    from ortlab.graphs.viewer.document import Document
    from ortlab.render.page import Page


HOPS: Final = 2
"""How far the neighbourhood of a node reaches, unless another number is asked for."""

GROUPS: Final = {"auto": "grouped if it is large", "module": "grouped by module", "none": "every node"}
"""How a whole graph is drawn: what `group` takes, and its words in the browser."""


@dataclass(frozen=True)
class GraphSource:
    """Graphs to choose from: the stages of a build, the two sides of a difference, or a single one."""

    titles: Mapping[str, str]  # words, by the name that `read` takes
    read: Callable[[str], Graph]
    # Returns the first marks of the nodes, as `GraphView.highlight` takes them; None keeps marks between graphs.
    colours: Callable[[str], Mapping[str, str]] | None = None
    code: str = ""  # Python code that stands beside each graph
    about_code: str = ""  # one line


@dataclass(frozen=True)
class Wanted:
    """What shall be shown; the fields are `GraphView`'s parameters."""

    stage: str
    around: str
    hops: int
    group: str


SIGNS: Final = {
    "added": "+",
    "removed": "\N{MINUS SIGN}",
    "moved": "\N{UP DOWN ARROW}",
    "changed": "~",
    "fused": "\N{CIRCLED PLUS}",
}
"""Signs of the marks that have a word, as `viewer/static/page.js` writes them."""

MARKED: Final = "#d6336c"
"""Colour of the nodes that `highlight` marks."""

HEIGHT: Final = 560

PATIENCE_MS: Final = 60_000
"""How long a page may take to be drawn, reading and painting included, from when it is first seen."""


class GraphView(Part):
    """A graph drawn by netron in a sandboxed frame, without a server: click a node, and `selected` holds its name.

    `ortlab.show_graph` makes one. With `around`, only the nodes within `hops` edges of that node, in both directions,
    are drawn. `group` "auto" groups by module where the whole would be too large to be placed, "module" always, "none"
    never. `height` is in pixels. Raises OptionError for an unknown node, and for a number or word that cannot
    be chosen, and BuildError where there is no graph of the stage.
    """

    # Names as `ortlab.graphs.node_names` gives them; `view.observe(f, "selected")` follows changes by mouse, too.
    selected = traitlets.List(traitlets.Unicode()).tag(sync=True)
    marks = traitlets.Dict().tag(sync=True)
    sought = traitlets.Dict().tag(sync=True)
    shown = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        source: GraphSource,
        stage: str,
        *,
        around: str = "",
        hops: int = HOPS,
        group: str = "auto",
        height: int = HEIGHT,
    ) -> None:
        self.closed = False
        self._end: Callable[[], None] = lambda: None
        self._source = source
        self._height = height
        self._number = self._drawn = 0
        self._problem = self._stale = self._failure = ""
        self._wanted = Wanted(stage, around, hops, group)
        self.graph, self._document = self._made(self._wanted)
        style = html.STYLE + compact("graph_view.css") + (html.CODE_STYLE if source.code else "")
        super().__init__("graph_view.js", Script({"graph_view.js": compacted_style(style)}), layout=Layout())
        self.add_class(PANEL)
        self.marks = dict(source.colours(stage)) if source.colours else {}
        self._saved = SavedForm(self, self.page, dated=False)
        self.on_msg(self._told)
        self._show()

    # ---- what is shown ----------------------------------------------------------------------------------------

    @property
    def stage(self) -> str:
        """The stage that is shown; set it to show another."""
        return self._wanted.stage

    @stage.setter
    def stage(self, stage: str) -> None:
        if stage not in self._source.titles:
            known = ", ".join(self._source.titles)
            raise OptionError(f"There is no stage {stage!r} here.", fix=f"Stages: {known}.")
        self._draw(replace(self._wanted, stage=stage, around=""))

    @property
    def reduced(self) -> str:
        """What was left out or grouped so that the browser can place the graph, in words; empty if all is drawn."""
        return self._document.reduced

    @property
    def problem(self) -> str:
        """What went wrong last, in words; empty if nothing did."""
        return self._problem

    def show(self, stage: str, *, around: str = "", hops: int = HOPS, group: str = "auto") -> None:
        """Read the graph again, and show what a new view with these parameters would show."""
        self._draw(Wanted(stage, around, hops, group))

    def around(self, name: str = "", hops: int = HOPS) -> None:
        """Draw the neighbourhood of a node only, and select the node; without a name, that of the first selected node.

        It reaches `hops` edges in both directions. Raises OptionError if there is no such node, or none is selected.
        """
        name = name or next(iter(self.selected), "")
        if not name:
            raise OptionError("No node is selected.", fix="Click a node, or name one: view.around(name).")
        self._draw(replace(self._wanted, around=name, hops=hops))
        self.select([name])

    def whole(self, group: str = "") -> None:
        """Draw the whole graph again; `group` is "auto", "module" or "none", and as before if it is left out."""
        self._draw(replace(self._wanted, around="", group=group or self._wanted.group))

    def refresh(self) -> None:
        """Read the graph again: it is another one after a rebuild."""
        self._draw(self._wanted)

    def select(self, names: Sequence[str]) -> None:
        """Select nodes and scroll to them; a group is opened if all of them are in it. No names select nothing.

        Raises OptionError if the graph has no node of such a name.
        """
        self._check(names)
        self.selected = list(dict.fromkeys(names))

    def highlight(self, names: Sequence[str] | Mapping[str, str] = ()) -> None:
        """Mark nodes with a colour, and take the marks off all others; no names mark nothing.

        A mapping has for each name "added", "removed", "moved", "changed", "fused" or a colour as "#1a7f37". Raises
        OptionError if the graph has no node of such a name.
        """
        self._check(names)
        self.marks = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, MARKED)
        self._show()

    def search(self, words: str) -> None:
        """Write into the search box of the view: it lists the nodes whose name or operator has all these words."""
        self.sought = {"text": words, "number": self.sought.get("number", 0) + 1}

    @property
    def names(self) -> list[str]:
        """Names of the nodes of the graph, in order."""
        return node_names(self.graph.model.graph)

    def follow(self, stale: str | None = None) -> None:
        """Say in the view why the graph is the lab's no more; without words, read it and look, and say so if not.

        `refresh` shows the present one.
        """
        if stale is None:
            try:
                changed = self._source.read(self.stage).digest != self.graph.digest
            except OrtlabError as error:
                stale = f"There is no such graph any more. {error}"
            else:
                stale = _BUILT if changed else ""
        if stale != self._stale:
            self._stale = stale
            self._show()

    # ---- what the browser wants -------------------------------------------------------------------------------

    def _told(self, _widget: object, message: Any, _buffers: object) -> None:
        acts: dict[str, Callable[..., None]] = {
            "document": self._send_document,
            "stage": lambda stage: setattr(self, "stage", stage),
            "around": self.around,
            "whole": self.whole,
            "refresh": self.refresh,
            "failed": self._failed,
        }
        act = acts[message["do"]]
        with self._watching():
            act(*message["with"])

    def _send_document(self) -> None:
        """Send the page: not as a trait, since a notebook that is saved with its widgets would hold it."""
        self.send({"number": self._number, "html": self._document.html})

    def _failed(self, number: int, reason: str) -> None:
        if number == self._number:
            self._failure = f"The browser could not draw it. {reason}"
            self._show()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Show what goes wrong inside: nothing above the handler of a browser message would show an exception."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - shown, whatever it is
            ours = isinstance(error, OrtlabError)
            self._problem = str(error) if ours else f"{type(error).__name__}: {error}"
            self._show()

    # ---- what is drawn ----------------------------------------------------------------------------------------

    def _made(self, wanted: Wanted) -> tuple[Graph, Document]:
        graph = self._source.read(wanted.stage)
        return graph, drawn(graph, around=wanted.around, hops=wanted.hops, group=wanted.group)

    def _draw(self, wanted: Wanted) -> None:
        """Show something else; if that fails everything stays as it is."""
        self.graph, self._document = self._made(wanted)
        self._wanted = wanted
        self._problem = self._stale = self._failure = ""
        self._number += 1
        present = set(self.names)
        self.selected = [name for name in self.selected if name in present]
        marks = self._source.colours(wanted.stage) if self._source.colours else self.marks
        self.marks = {name: kind for name, kind in marks.items() if name in present}
        self._show()
        self._saved.renew()

    def _show(self) -> None:
        why = self._failure or self._document.refused
        self._drawn += 1
        self.shown = {
            "drawn": self._drawn,
            "number": self._number,
            "title": graph_picture.description(self.graph),
            "stages": [[name, f"{name}: {title}"] for name, title in self._source.titles.items()],
            "stage": self.stage,
            "groups": [list(pair) for pair in GROUPS.items()],
            "group": self._wanted.group,
            "around": self._wanted.around,
            "reduced": self.reduced,
            "marked": counted(self.marks.values()),
            "why": f"{why} {_INSTEAD}" if why else "",
            "still": graph_picture.picture(graph_map(self.graph, marks=self.marks), self.stage)
            if why
            else "",
            "problem": self._problem,
            "stale": self._stale,
            "sandbox": SANDBOX,
            "height": self._height,
            "code": self._code(),
            "patience": PATIENCE_MS,
        }

    def _code(self) -> list[str] | None:
        """Return title and coloured text of the code that stands beside the graph."""
        source = self._source
        return [source.about_code, html.highlighted(source.code)] if source.code else None

    def _check(self, names: Sequence[str] | Mapping[str, str]) -> None:
        if isinstance(names, str):
            raise OptionError("Names of nodes come as a list.", fix=f"view.select([{names[:200]!r}])")
        present = set(self.names)
        missing = [name for name in names if name not in present]
        if missing:
            others = f", nor {len(missing) - 1:,} others" if len(missing) > 1 else ""
            raise OptionError(
                f"The {self.stage} graph has no node {missing[0][:200]!r}{others}.",
                fix="view.names lists the nodes.",
            )

    # ---- other forms and the end ------------------------------------------------------------------------------

    def page(self) -> Page:
        """Say what is in the graph, with a still picture: for front ends without widgets and without a kernel."""
        page = compose(self.graph)
        if not self._source.code:
            return page
        beside = Code(self._source.about_code, self._source.code)
        return replace(page, blocks=(*page.blocks, beside))

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle, metadata = super()._repr_mimebundle_(**kwargs) or ({}, {})
        return {**bundle, **forms(self.page())}, metadata

    def _ipython_display_(self) -> None:
        bundle, _ = super()._repr_mimebundle_() or ({}, {})
        self._saved.display(living(bundle))

    def __repr__(self) -> str:
        return f"GraphView({self.graph.stage!r}, {self.graph.mode!r}, nodes={self.graph.node_count})"

    def ends_with(self, end: Callable[[], None]) -> None:
        """Have `close` call a function, which ends what the view follows."""
        self._end = end

    def close(self) -> None:
        """End the view: it goes from kernel and browser."""
        self.closed = True
        self._end()
        close_tree(self)


DUE: Final = "The switches have changed: the next step builds another graph than this."

_BUILT: Final = "The lab has built another graph since. Refresh shows that."

_INSTEAD: Final = "Here are its modules instead; the neighbourhood of a node can always be drawn."


def counted(marks: Iterable[str]) -> str:
    """Say how many nodes have marks of a known kind, and by which sign they are known."""
    counts = Counter(kind for kind in marks if kind in SIGNS)
    return ", ".join(f"{SIGNS[kind]} {count:,} {kind}" for kind, count in counts.most_common())
