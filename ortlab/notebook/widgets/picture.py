"""A figure in the panel, with buttons that save it as a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import traitlets

from ortlab.notebook.widgets.part import Part, packed
from ortlab.render import plots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ortlab.notebook.widgets.base import Looks


class Picture(Part):
    """A figure as inline SVG in the colours of the theme; nothing until `show`.

    Parameters
    ----------
    file
        Name of the saved file, without its suffix.
    looks
        Layout and styles that the parts of the panel share.

    Attributes
    ----------
    svg
        What is shown; empty for nothing.
    file
        Name of the saved file, without its suffix.
    """

    svg = traitlets.Unicode().tag(sync=True, to_json=packed)
    file = traitlets.Unicode().tag(sync=True)

    def __init__(self, file: str, looks: Looks) -> None:
        super().__init__(looks.script("picture.js"), file=file, layout=looks.layout)

    def show(self, figure: Figure, description: str) -> None:
        """Show a figure of `ortlab.render.plots`; `description` is for readers who do not see it."""
        self.svg = plots.inline(figure, description)

    def __repr__(self) -> str:
        """Say what it is, without an address that would change from run to run."""
        return f"Picture({self.file!r})"
