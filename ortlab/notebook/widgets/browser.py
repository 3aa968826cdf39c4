"""What goes to the browser, kept small, since a notebook that is saved with its widgets holds all of it.

States leave out what the browser's defaults say anyway; a script is carried once for all parts of a panel that run it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import anywidget
import ipywidgets as widgets
import traitlets

from ortlab.errors import InstallError
from ortlab.graphs.viewer.bundle import pack

if TYPE_CHECKING:
    from ipywidgets.widgets.widget_style import Style


STATIC: Final = Path(__file__).parent / "static"
"""Folder of the scripts and style sheets."""

_COMMENT: Final = re.compile(r"(?:^\s*|(?<=[;{,(]) +)//.*$", re.MULTILINE)
_AROUND: Final = re.compile(r"\s*([{};,])\s*")
_EMPTY: Final = re.compile(r"\n\s*")


def compact(name: str) -> str:
    """Read a file of `STATIC` without its indentation and its comments."""
    # Every widget carries its script with it, so a notebook that is saved with its widgets holds it once for each.
    try:
        return compacted((STATIC / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise InstallError(
            f"ortlab's file {name} for the browser cannot be read.",
            why=f"The installation is damaged: {error}",
            fix="Install it again: pip install --force-reinstall --no-deps ortlab",
        ) from error


def compacted(text: str) -> str:
    """Remove the indentation of a script or style sheet, and comments: of a line, or behind one of ``; { , (``."""
    return _EMPTY.sub("\n", _COMMENT.sub("", text)).strip()


def compacted_style(text: str) -> str:
    """Remove the white space of a style sheet that means nothing."""
    return _AROUND.sub(r"\1", compacted(text))


_NAMES: Final = ("_model_module", "_model_module_version", "_model_name")
"""What a browser needs to make a control at all."""


def _short_id() -> str:
    """Return an identifier for a widget: ipywidgets' own of 32 letters stands four times in what is saved of each."""
    return secrets.token_hex(5)


class Lean(widgets.Widget):
    """Sends its state without the values that are defaults; `ipywidgets.embed` leaves the same out of a page."""

    # A panel has more than a hundred controls, and most of the fifteen values of each are never set.

    def __init__(self, *args: Any, **traits: Any) -> None:
        super().__init__(*args, **{"model_id": _short_id(), **traits})

    def get_state(
        self,
        key: str | Iterable[str] | None = None,
        drop_defaults: bool = False,  # noqa: FBT001, FBT002 - as ipywidgets has it
    ) -> dict[str, Any]:
        """Return the whole state without defaults; a part that is asked for by name as it is."""
        if key is not None or drop_defaults:
            return dict(super().get_state(key, drop_defaults))
        return _told({**super().get_state(_NAMES), **super().get_state(drop_defaults=True)})


def _told(state: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is empty by default, and what only ipywidgets' own views use."""
    return {name: value for name, value in state.items() if value or name not in _EMPTY_BY_DEFAULT}


_EMPTY_BY_DEFAULT: Final = ("_dom_classes", "_view_count", "tabbable", "tooltip")


def without_defaults(kind: type[Style]) -> type[Style]:
    """Return a class of styles that sends no defaults."""
    return cast("type[Style]", type(kind.__name__, (Lean, kind), {}))


def packed(value: object, _widget: object = None) -> str:
    """Write plain JSON types as gzip in base64, as `static/part.js` reads them; "" for nothing."""
    return pack(json.dumps(value).encode()) if value else ""


class Script(Lean):
    """Files of `static/`, by name with the style that goes with each, packed together."""

    source = traitlets.Unicode().tag(sync=True)
    start = traitlets.Unicode().tag(sync=True)  # what unpacks it

    def __init__(self, files: Mapping[str, str]) -> None:
        code = {name: compact(name) for name in files}
        super().__init__(source=packed({"code": code, "css": dict(files)}), start=compact("part.js"))


class Part(anywidget.AnyWidget):  # type: ignore[misc]
    """A widget whose module for the browser only fetches the file of a script that it `runs`."""

    # Text and not a path: anywidget would watch the file, and for that keep alive every widget that was ever made.
    # Each part carries it, so it only starts what its script has for all: "IPY_MODEL_" and an id refer to that widget.
    _esm = (
        "export default()=>{const h={};return{async render(c){const s=await c.model.widget_manager.get_model("
        'c.model.get("script").slice(10));return(await(s.begun??=import(URL.createObjectURL(new Blob([s.get("start")],'
        '{type:"text/javascript"}))))).render(c,s,h)}}}'
    )
    script = traitlets.Instance(Script).tag(sync=True, **widgets.widget_serialization)
    runs = traitlets.Unicode().tag(sync=True)
    own = traitlets.Unicode().tag(sync=True)  # its identifier, by which its script finds it in the browser

    # Each part has a repr of its own, without an address that would change from run to run.
    def __init__(self, runs: str, script: Script, **traits: Any) -> None:
        own = _short_id()
        super().__init__(runs=runs, script=script, model_id=own, own=own, **traits)

    def get_state(
        self,
        key: str | Iterable[str] | None = None,
        drop_defaults: bool = False,  # noqa: FBT001, FBT002 - as ipywidgets has it
    ) -> dict[str, Any]:
        """Return the whole state without what is empty; a part that is asked for by name as it is."""
        state = dict(super().get_state(key, drop_defaults))
        if key is not None:
            return state
        state.pop("_anywidget_id", None)  # names the style of a widget, and none has one
        return _told(state)


def living(bundle: dict[str, Any]) -> dict[str, Any]:
    """Keep of a widget's MIME bundle what shows the widget itself."""
    return {name: form for name, form in bundle.items() if name.endswith("+json")}
