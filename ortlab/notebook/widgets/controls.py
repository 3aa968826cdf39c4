"""What the parts of a panel are made of: ipywidgets' controls without defaults, shared looks, a fold, an error box."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
from ipywidgets.widgets.widget_bool import ToggleButtonStyle
from ipywidgets.widgets.widget_string import HTMLStyle

from ortlab.errors import OrtlabError
from ortlab.notebook.widgets.browser import Lean, Script, without_defaults

if TYPE_CHECKING:
    from ipywidgets.widgets.widget_style import Style


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

    def rename(self, options: Sequence[tuple[str, object]]) -> None:
        """Give the same values other names, and tell the browser nothing of which is pressed."""
        # ipywidgets presses the first one then. In the browser another may be pressed already, which a busy kernel does
        # not know yet.
        self._initializing_traits_ = True
        try:
            self.options = options
        finally:
            self._initializing_traits_ = False


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


_CODE = re.compile(r"`([^`]+)`")


class Looks:
    """One layout, one style of each kind and one copy of each script, for all parts of a panel."""

    # Each additional one is a message to the browser, and hundreds of bytes in a notebook that is saved with its
    # widgets. `together` has the files of `static/`, with their styles, that one script carries: packed together they
    # are smaller.

    def __init__(self, together: Mapping[str, str] | None = None) -> None:
        self.layout = Layout()  # many parts share it, so nobody sets anything in it
        self._styles: dict[type[Style], Style] = {}
        script = Script(together) if together else None
        self._scripts: dict[str, Script] = dict.fromkeys(together, script) if together and script else {}

    def script(self, name: str, css: str = "") -> Script:
        """Return a file of `static/` that parts of the panel run."""
        if name not in self._scripts:
            self._scripts[name] = Script({name: css})
        return self._scripts[name]

    @property
    def shared(self) -> list[widgets.Widget]:
        """The widgets that parts share."""
        return [self.layout, *self._styles.values(), *dict.fromkeys(self._scripts.values())]

    def close(self) -> None:
        """Close what is shared, after the parts."""
        for one in self.shared:
            one.close()

    def style(self, kind: type[Style]) -> Style:
        """Return the style of a kind of control."""
        if kind not in self._styles:
            self._styles[kind] = without_defaults(kind)()
        return self._styles[kind]

    def html(self, value: str = "") -> Html:
        """Make a part that shows HTML."""
        return Html(value, layout=self.layout, style=self.style(HTMLStyle))

    def button(self, label: str, tooltip: str) -> Button:
        """Make a button."""
        style = self.style(widgets.ButtonStyle)
        return Button(description=label, tooltip=tooltip, layout=self.layout, style=style)

    def row(self, *parts: widgets.Widget) -> Box:
        """Put parts beside each other; they wrap in a narrow cell."""
        box = Box(parts, layout=self.layout)
        box.add_class("ortlab-row")
        return box


class ErrorBox(Row):
    """A message under the panel that stays until it is dismissed or the next attempt succeeds."""

    def __init__(self, looks: Looks) -> None:
        self._message = looks.html()
        self._dismiss = looks.button("Dismiss", "Remove this message")
        self._dismiss.on_click(lambda _: self.clear())
        super().__init__([self._message, self._dismiss], layout=hidden())
        self.add_class("ortlab-error")
        self.clear()

    @property
    def text(self) -> str:
        """The message as HTML; empty if there is none."""
        return str(self._message.value)

    @property
    def reason(self) -> str:
        """What went wrong, in one sentence of plain text; empty if nothing did."""
        return self._reason

    def clear(self) -> None:
        """Remove the message."""
        self._reason = ""
        self._message.value = ""
        show(self, on=False)

    def show(self, error: BaseException) -> None:
        """Show an error: what, why and next of ours; type, message and folded traceback of any other."""
        self._reason = error.what if isinstance(error, OrtlabError) else type(error).__name__
        self._message.value = f'<div class="ortlab" role="alert">{_lines(error)}</div>'
        show(self)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show what goes wrong inside, and clear the box if nothing does."""
        # Nothing above a widget's callback would show an exception, so every error ends here. Interrupts too: the
        # kernel's message loop would only log them.
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - shown, whatever it is
            self.show(error)
        else:
            self.clear()


def close_tree(widget: widgets.Widget, looks: Looks | None = None) -> None:
    """Close a widget with its children, layouts, styles and scripts, which ipywidgets leaves open."""
    # What `looks` holds stays, since other parts that live on share it.
    for child in getattr(widget, "children", ()):
        close_tree(child, looks)
    for name in ("layout", "style", "script"):
        part = getattr(widget, name, None)
        if isinstance(part, widgets.Widget) and (looks is None or part not in looks.shared):
            part.close()
    # The base class's close, because a subclass may call this function from its own.
    widgets.Widget.close(widget)


def prose(text: str) -> str:
    """Escape a text for HTML and set what stands between backticks as code."""
    return _CODE.sub(r"<code>\1</code>", escape(text))


def _lines(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "<p><strong>Interrupted.</strong></p><p>The lab is as it was before the call.</p>"
    if isinstance(error, OrtlabError):
        parts = [f'<p class="ortlab-bad">{prose(error.what)}</p>']
        if error.why:
            parts.append(f"<p><strong>Why:</strong> {_broken(error.why)}</p>")
        if error.fix:
            parts.append(f"<p><strong>Next:</strong> {_broken(error.fix)}</p>")
        return "".join(parts)
    folded = escape("".join(traceback.format_exception(error)))
    return (
        f'<p class="ortlab-bad">{escape(type(error).__name__)}: {_broken(str(error))}</p>'
        f"<details><summary>Traceback</summary><pre>{folded}</pre></details>"
    )


def _broken(text: str) -> str:
    return prose(text).replace("\n", "<br>")


class Fold(Column):
    """A part of the panel under a heading; the style sheet shows it while the heading is pressed."""

    # `on_open` is called each time it is opened, and draws what is expensive. A fold that is not always shown needs a
    # layout of its own.

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
        self.heading = ToggleButton(
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
