"""What the browser draws with a script of ours: the script is carried once for all parts of a panel that run it."""

from __future__ import annotations

import json
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets

from ortlab.graphs.viewer.bundle import pack
from ortlab.notebook.widgets.lean import Lean
from ortlab.notebook.widgets.static_files import compact


def packed(value: object, _widget: object = None) -> str:
    """Write plain JSON types as gzip in base64, as `static/part.js` reads them; "" for nothing."""
    return pack(json.dumps(value).encode()) if value else ""


class Script(Lean):
    """A file of `static/`, and the style that goes with it, packed."""

    source = traitlets.Unicode().tag(sync=True)

    def __init__(self, name: str, css: str = "") -> None:
        super().__init__(source=packed({"code": compact(name), "css": css}))


class Part(anywidget.AnyWidget):  # type: ignore[misc]
    """A widget whose module for the browser only fetches its script."""

    # Text and not a path: anywidget would watch the file, and for that keep alive every widget that was ever made.
    _esm = compact("part.js")
    script = traitlets.Instance(Script).tag(sync=True, **widgets.widget_serialization)

    def __init__(self, script: Script, **traits: Any) -> None:
        super().__init__(script=script, **traits)
