"""What the browser does for the panel by itself: names, the focus, and a word when it waits or the kernel has gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traitlets

from ortlab.notebook.widgets.part import Part
from ortlab.notebook.widgets.style import SHEET

if TYPE_CHECKING:
    from ortlab.notebook.widgets.base import Looks


class Attendant(Part):
    """Stands in a panel, brings its style, and looks after its elements; see `static/attendant.js`.

    A screen reader calls the panel by `name`.
    """

    name = traitlets.Unicode().tag(sync=True)

    def __init__(self, name: str, looks: Looks) -> None:
        super().__init__(looks.script("attendant.js", SHEET), name=name, layout=looks.layout)
        self.on_msg(self._asked)

    def _asked(self, _widget: object, message: Any, _buffers: object) -> None:
        """Answer the browser: everything that it sent before is done now."""
        self.send({"answered": message["asked"]})

    def __repr__(self) -> str:
        """Say what it is, without an address that would change from run to run."""
        return f"Attendant({self.name!r})"
