"""The chart of runs in the panel: a point for each, drawn as SVG by `static/scatter.js`; a click opens the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import traitlets

from ortlab.notebook.widgets.browser import Part, packed
from ortlab.render.run_scatter import scatter

if TYPE_CHECKING:
    from ortlab.notebook.widgets.controls import Looks
    from ortlab.records.runs import Run


class Scatter(Part):
    """Runs by time and step memory; `choose` gets the number of the run that is clicked."""

    drawing = traitlets.Dict().tag(sync=True, to_json=packed)

    def __init__(self, choose: Callable[[str], None], looks: Looks) -> None:
        self._choose = choose
        super().__init__("scatter.js", looks.script("scatter.js"), layout=looks.layout)
        self.on_msg(self._told)

    def show(self, runs: Sequence[Run], chosen: int | None) -> None:
        """Draw runs, in the order of the ledger; the details of `chosen` are shown."""
        drawing = scatter(runs) if runs else {}
        self.drawing = {**drawing, "chosen": str(chosen or "")} if drawing else {}

    def _told(self, _widget: object, message: Any, _buffers: object) -> None:
        self._choose(str(message["choose"]))

    def __repr__(self) -> str:
        return "Scatter()"
