"""The panel's messages: by run, filtered by run, level, source and text, a page at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ortlab.notebook.widgets import controls
from ortlab.options.log_levels import SEVERITIES
from ortlab.records.messages import SOURCES, Messages
from ortlab.render import html
from ortlab.render.lab_pages import counts_text, messages_page, run_fold, run_title
from ortlab.render.page import Folded, Mark, Note, Page

if TYPE_CHECKING:
    from ortlab.notebook.widgets.controls import Looks

PAGE: Final = 200
"""Kinds of messages on one page of a chosen run: ten thousand at once would stop the browser."""

_ALL: Final = "all"


class MessageList(controls.Column):
    """Messages by run, the newest run first; a run that is chosen is shown whole, page by page."""

    # They are drawn, and the filters are made, from the first `opened` on: most panels are closed before anybody looks.

    def __init__(self, read: Callable[[], Messages], looks: Looks) -> None:
        self._read = read
        self._looks = looks
        self._first = 0
        self._drawing = False
        self.is_open = False
        super().__init__(layout=looks.layout)

    def opened(self) -> None:
        """Make the filters, if they are not there yet, and show the messages."""
        if not self.is_open:
            self.is_open = True
            self._build()
        self.show()

    def _build(self) -> None:
        """Make the filters; a panel whose messages nobody looks at has none."""
        looks = self._looks
        shared = {"layout": looks.layout}
        self.run = controls.Dropdown(options=[(_ALL, _ALL)], value=_ALL, description="Run", **shared)
        self.level = controls.Dropdown(
            options=[(_ALL, ""), *((f"{name} and worse", name) for name in SEVERITIES[1:])],
            description="Level",
            **shared,
        )
        self.source = controls.Dropdown(
            options=[(_ALL, ""), *zip(SOURCES, SOURCES, strict=True)], description="Source", **shared
        )
        self.words = controls.Text(
            placeholder="any text", description="Contains", continuous_update=False, **shared
        )
        self.earlier = looks.button("Earlier", "The page before this one")
        self.later = looks.button("Later", "The page after this one")
        # What a plain call of the model says comes without an event, so the list has to be read again.
        self.refresh = looks.button("Refresh", "Read the messages again")
        self._list = looks.html()
        self._list.add_class("ortlab-messages")
        filters = looks.row(self.run, self.level, self.source, self.words, self.refresh)
        filters.add_class("ortlab-filters")
        self._pages = controls.Box([self.earlier, self.later], layout=controls.hidden())
        self._pages.add_class("ortlab-row")
        self.children = (filters, self._list, self._pages)
        for control in (self.run, self.level, self.source, self.words):
            control.observe(self._filtered, "value")
        self.earlier.on_click(lambda _: self._turn(-PAGE))
        self.later.on_click(lambda _: self._turn(PAGE))
        self.refresh.on_click(lambda _: self.show())

    def show(self) -> None:
        """Show the messages as they are now; nothing before they were opened."""
        if not self.is_open:
            return
        messages = self._read()
        self._drawing = True
        try:
            chosen = self.run.value
            runs = [(run_title(run), run or 0) for run in messages.runs]
            options = [(_ALL, _ALL), *runs]
            if tuple(self.run.options) != tuple(options):
                self.run.options = options
                self.run.value = chosen if chosen in [value for _, value in options] else _ALL
        finally:
            self._drawing = False
        kept = messages.of(level=self.level.value, source=self.source.value, text=self.words.value)
        page = self._all_runs(messages, kept) if self.run.value == _ALL else self._one_run(kept)
        self._list.value = html.fragment(page)

    def _all_runs(self, messages: Messages, kept: Messages) -> Page:
        controls.show(self._pages, on=False)
        if len(messages) and not len(kept):
            return Page("", (Note(f"No message fits; there are {counts_text(messages)}.", Mark.QUIET),))
        return Page("", messages_page(kept).blocks)

    def _one_run(self, kept: Messages) -> Page:
        number = self.run.value
        kept = kept.of(run=number)
        kinds = len(kept.kinds)
        self._first = min(self._first, max(0, (kinds - 1) // PAGE * PAGE))
        controls.show(self._pages, on=kinds > PAGE)
        self.earlier.disabled = self._first == 0
        self.later.disabled = self._first + PAGE >= kinds
        fold = run_fold(kept, number or None, self._first, PAGE)
        return Page("", (Folded(fold.title, blocks=fold.blocks, is_open=True),))

    def _filtered(self, _change: Any) -> None:
        if not self._drawing:
            self._first = 0
            self.show()

    def _turn(self, by: int) -> None:
        self._first = max(0, self._first + by)
        self.show()
