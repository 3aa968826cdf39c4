"""What the browser does for the panel by itself: names, the focus, and a word when the kernel has gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anywidget
import traitlets

from ortlab.widgets.static_files import compact

if TYPE_CHECKING:
    from ortlab.widgets.base import Looks


class Attendant(anywidget.AnyWidget):  # type: ignore[misc]
    """Stands in a panel and looks after its elements, in the browser only; see `static/attendant.js`.

    Parameters
    ----------
    name
        What a screen reader calls the panel.
    looks
        Layout and styles that the parts of the panel share.

    Attributes
    ----------
    name
        The same; the browser reads it.
    """

    # Text and not a path: see RecordTable.
    _esm = compact("attendant.js")
    name = traitlets.Unicode().tag(sync=True)

    def __init__(self, name: str, looks: Looks) -> None:
        super().__init__(name=name, layout=looks.layout)

    def __repr__(self) -> str:
        """Say what it is, without an address that would change from run to run."""
        return f"Attendant({self.name!r})"
