"""ipywidgets' own controls, without what the browser's defaults say anyway: a saved notebook holds each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, cast

import ipywidgets as widgets

if TYPE_CHECKING:
    from ipywidgets.widgets.widget_style import Style

_NAMES: Final = ("_model_module", "_model_module_version", "_model_name")
"""What a browser needs to make a control at all."""


class Lean(widgets.Widget):
    """Sends its state without the values that are defaults; `ipywidgets.embed` leaves the same out of a page.

    A panel has more than a hundred controls, and most of the fifteen values of each are never set.
    """

    def get_state(
        self,
        key: str | Iterable[str] | None = None,
        drop_defaults: bool = False,  # noqa: FBT001, FBT002 - as ipywidgets has it
    ) -> dict[str, Any]:
        """Return the whole state without defaults; a part that is asked for by name as it is."""
        if key is not None or drop_defaults:
            return dict(super().get_state(key, drop_defaults))
        return {**super().get_state(_NAMES), **super().get_state(drop_defaults=True)}


def without_defaults(kind: type[Style]) -> type[Style]:
    """Return a class of styles that sends no defaults."""
    return cast("type[Style]", type(kind.__name__, (Lean, kind), {}))


class Layout(Lean, widgets.Layout):
    """A layout."""


def hidden() -> Layout:
    """Make the layout of a part that `show` shows later."""
    return Layout(display="none")


def show(part: widgets.DOMWidget, *, on: bool = True) -> None:
    """Show a part that has a layout of its own, or hide it."""
    part.layout.display = None if on else "none"


class Column(Lean, widgets.VBox):
    """Parts below each other."""


class Row(Lean, widgets.HBox):
    """Parts beside each other."""


class Box(Lean, widgets.Box):
    """Parts as a style sheet puts them."""


class Html(Lean, widgets.HTML):
    """HTML."""


class Button(Lean, widgets.Button):
    """A button."""


class ToggleButton(Lean, widgets.ToggleButton):
    """A button that stays pressed."""


class ToggleButtons(Lean, widgets.ToggleButtons):
    """Buttons of which one is pressed."""


class Checkbox(Lean, widgets.Checkbox):
    """A box to tick."""


class Dropdown(Lean, widgets.Dropdown):
    """A choice."""


class SelectMultiple(Lean, widgets.SelectMultiple):
    """A choice of several."""


class IntText(Lean, widgets.IntText):
    """A whole number."""


class Text(Lean, widgets.Text):
    """A line of text."""


class FloatProgress(Lean, widgets.FloatProgress):
    """A bar of progress."""
