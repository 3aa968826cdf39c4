"""How a record shows itself: a line as its repr, its page as its str, and text and HTML wherever a notebook is read.

The one mechanism for all records, with `%load_ext ortlab` and without. A record is plain data and knows nobody who
draws it, so everything is imported when it is shown, not when this module is loaded: a process that only measures
loads no page and no widget, and no import runs in a circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ortlab.units import fold, printable

if TYPE_CHECKING:
    from ortlab.render.page import Page

REPR_LENGTH: Final = 300
"""Characters that a repr has at most: in lists, tracebacks and debuggers a page would be in the way."""


class Shown:
    """The base of every record that has a page (`ortlab.render.pages`) and a headline (`ortlab.render.headlines`)."""

    def __repr__(self) -> str:
        """Say in one line what it is, and the figure that it is for."""
        return fold(f"{type(self).__name__}({printable(self._headline())})", REPR_LENGTH)

    def __str__(self) -> str:
        """Write its page as plain text."""
        from ortlab.render import text

        return text.render(self._page())

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        """Return its page in every form that the front end shows; IPython itself leaves out what it was told to."""
        from ortlab.notebook.widgets.display import bundle

        return bundle(self, self._page())

    def _headline(self) -> str:
        from ortlab.render.headlines import headline

        return headline(self)

    def _page(self) -> Page:
        from ortlab.render.pages import compose

        return compose(self)


class ShownAsPanel(Shown):
    """The base of `Lab`: a notebook shows its panel, everything else its page."""

    def _ipython_display_(self) -> None:
        """Show the panel; IPython asks for `_repr_mimebundle_` where this is not implemented."""
        from ortlab.notebook.widgets.display import show_panel

        show_panel(self)  # type: ignore[arg-type]  # the only subclass is Lab, which this module cannot name

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        from ortlab.notebook.widgets.display import as_line

        return as_line(self) or super()._repr_mimebundle_()  # type: ignore[arg-type]

    def _page(self) -> Page:
        from ortlab.render.lab_pages import lab_page

        return lab_page(self)  # type: ignore[arg-type]
