"""Source code as HTML, its words coloured by pygments as JupyterLab colours a cell."""

from __future__ import annotations

from typing import Final

STYLE: Final = """\
.ortlab pre.ortlab-code { font: 12px/1.45 var(--jp-code-font-family, monospace); margin: 0 0 8px; padding: 8px;
  overflow: auto; max-height: 40em; border: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .35));
  background: none; color: inherit; white-space: pre; tab-size: 4; }
.ortlab-code .k, .ortlab-code .kn, .ortlab-code .kc, .ortlab-code .ow {
  color: var(--jp-mirror-editor-keyword-color, #2e8540); font-weight: 600; }
.ortlab-code .nf, .ortlab-code .nd, .ortlab-code .nb { color: var(--jp-mirror-editor-def-color, #3b82f6); }
.ortlab-code .mi, .ortlab-code .mf { color: var(--jp-mirror-editor-number-color, #2e8540); }
.ortlab-code .s1, .ortlab-code .s2, .ortlab-code .sd { color: var(--jp-mirror-editor-string-color, #c2410c); }
.ortlab-code .c1 { color: var(--jp-mirror-editor-comment-color, #767676); font-style: italic; }
.ortlab-code .o { color: var(--jp-mirror-editor-operator-color, #9333ea); }
"""
"""Goes with `highlighted`; the colours of JupyterLab's theme where there is one, others that both grounds bear."""


def highlighted(source: str) -> str:
    """Write Python code as one HTML element; everything in it is escaped."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    inner = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return f'<pre class="ortlab-code" tabindex="0">{inner}</pre>'
