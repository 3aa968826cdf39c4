"""A heading that opens and closes what stands below it, in the browser alone: it opens while the kernel works, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ipywidgets.widgets.widget_bool import ToggleButtonStyle

from ortlab.notebook.widgets import lean

if TYPE_CHECKING:
    import ipywidgets as widgets

    from ortlab.notebook.widgets.base import Looks
    from ortlab.notebook.widgets.lean import Layout


class Fold(lean.Column):
    """A part of the panel under a heading; the style sheet shows it while the heading is pressed.

    `on_open` is called each time it is opened, and draws what is expensive. A fold that is not always shown needs a
    layout of its own.
    """

    def __init__(
        self,
        title: str,
        body: widgets.Widget,
        on_open: Callable[[], None],
        looks: Looks,
        *,
        is_open: bool = False,
        layout: Layout | None = None,
    ) -> None:
        self._on_open = on_open
        self.heading = lean.ToggleButton(
            value=is_open, description=title, layout=looks.layout, style=looks.style(ToggleButtonStyle)
        )
        super().__init__([self.heading, body], layout=layout or looks.layout)
        self.add_class("ortlab-fold")
        self.heading.observe(self._turned, "value")

    @property
    def is_open(self) -> bool:
        """Whether the body is shown."""
        return bool(self.heading.value)

    def unfold(self) -> None:
        """Open it; its body is drawn anew if it is open already."""
        if self.is_open:
            self._on_open()
        else:
            self.heading.value = True

    def _turned(self, change: Any) -> None:
        if change["new"]:
            self._on_open()
