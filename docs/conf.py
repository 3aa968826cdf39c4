"""Sphinx configuration; tables of options and figures are made from the code and stored results at each build."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parent
GENERATED = HERE / "_generated"
sys.path[:0] = [str(ROOT), str(HERE)]

import module_pages  # noqa: E402
import reference_pages  # noqa: E402
import switch_pages  # noqa: E402

import ortlab  # noqa: E402 - the checkout's, not an installed one
from ortlab.options import log_levels  # noqa: E402
from ortlab.options.switches import Group  # noqa: E402
from ortlab.records.messages import KNOWN  # noqa: E402

project = "ortlab"
copyright = "the ortlab maintainers"  # noqa: A001 - Sphinx's own name for it
author = "The ortlab maintainers"
version = release = ortlab.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = [
    "_build",
    "jupyter_execute",
    "_model.md",
    "_steps.md",
    "examples.ipynb",
    "_generated/*.md",
]  # the last are included
# Records of several kinds have a time_ratio; a word in a list of attributes links to none of them.
suppress_warnings = ["ref.python"]
html_theme = "furo"  # follows the reader's light or dark setting
html_title = f"ortlab {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_theme_options = {
    "sidebar_hide_name": False,
    "navigation_with_keys": True,
    # The records in the notebooks take JupyterLab's colours; a page without JupyterLab gets those for a white ground.
    "dark_css_variables": {
        "jp-success-color0": "#7cc98a",
        "jp-warn-color0": "#f0a35e",
        "jp-error-color1": "#ff8a80",
        "jp-ui-font-color2": "var(--color-foreground-secondary)",
    },
}
# What scrolls has to be reached by the keyboard.
FOCUS = """addEventListener("load", () => document.querySelectorAll("pre").forEach((block) => {
  if (block.scrollWidth > block.clientWidth) block.tabIndex = 0;
}));"""
html_js_files = [(None, {"body": FOCUS})]

# Notebooks are shown with their stored outputs, which the test suite compares with a fresh execution.
nb_execution_mode = "off"
# Widgets in a stored notebook have their HTML form beside them; no script is fetched from elsewhere.
nb_mime_priority_overrides = [
    ("html", "text/html", 0),
    ("html", "application/vnd.jupyter.widget-view+json", None),
]
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_render_text_lexer = "none"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = False
napoleon_numpy_docstring = True
napoleon_use_ivar = True  # attributes of a record are described in its docstring, and documented once
# Docstrings use single backticks for names, as NumPy's do.
default_role = "literal"


def generate(_: Sphinx) -> None:
    """Write the pages that are made from the code."""
    (GENERATED / "switches").mkdir(parents=True, exist_ok=True)
    for group in Group:
        (GENERATED / "switches" / f"{group.value}.md").write_text(switch_pages.page(group), encoding="utf-8")
    (GENERATED / "switches.md").write_text(switch_pages.index(), encoding="utf-8")
    (GENERATED / "measured.md").write_text(switch_pages.in_larger_models(), encoding="utf-8")
    levels = log_levels.table().reset_index()
    (GENERATED / "log_levels.md").write_text(table(levels.columns, levels.to_numpy()), encoding="utf-8")
    known = [(one.source, f"`{one.begins}`", one.reason) for one in KNOWN]
    heads = ("who", "begins with", "why nobody has to act")
    (GENERATED / "known_messages.md").write_text(table(heads, known), encoding="utf-8")
    reference_pages.write(GENERATED)
    module_pages.write(GENERATED)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(notebook, GENERATED)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table in Markdown."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in cells] for cells in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def exchange(old: str, new: str) -> Callable[..., None]:
    """Exchange a sign in what is said of attributes: what stands before a colon in it, napoleon takes for a type."""

    def act(_app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
        if what in {"attribute", "property", "data"}:
            lines[:] = [line.replace(old, new) for line in lines]

    return act


def forget_what_has_no_source(app: Sphinx) -> list[Any]:
    """Keep what is written in C off the list of sources, which would link to a page that there is not."""
    modules: dict[str, Any] = getattr(app.env, "_viewcode_modules", {})
    for name in [name for name, source in modules.items() if not source]:
        del modules[name]
    return []


def say_level(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _doctree: object) -> None:
    """Give the captions of contents the level that Sphinx leaves out of a heading, for who hears the page."""
    for part in ("furo_navigation_tree", "body"):
        context[part] = (context.get(part) or "").replace('role="heading">', 'role="heading" aria-level="2">')


def setup(app: Sphinx) -> None:
    """Let each build start with `generate`, and no words be taken for types."""
    app.connect("builder-inited", generate)
    app.connect("html-collect-pages", forget_what_has_no_source, priority=400)  # viewcode's is 500
    app.connect("html-page-context", say_level, priority=600)  # furo's is 500
    app.connect("autodoc-process-docstring", exchange(":", "\0"), priority=400)  # napoleon's is 500
    app.connect("autodoc-process-docstring", exchange("\0", ":"), priority=600)
