"""Records as self-contained HTML: tables, no network, light and dark themes, and no script but that which sorts."""

from __future__ import annotations

import base64
import html
from typing import Final

from ortlab import units
from ortlab.render.page import Block, Cell, Code, Column, Drawing, Folded, Frame, Mark, Note, Page, Table
from ortlab.render.pages import compose


def escape(text: str) -> str:
    r"""Write text as HTML, with control characters as Python writes them: a null byte would end the page."""
    plain = "".join(
        one if one.isprintable() or one in "\n\t\N{NO-BREAK SPACE}" else repr(one)[1:-1] for one in text
    )
    return html.escape(plain)


STYLE = """\
.ortlab { color: var(--jp-ui-font-color1, inherit);
  font: 13px/1.5 var(--jp-ui-font-family, system-ui, sans-serif); max-width: 100%; }
.ortlab h4 { font-size: 14px; font-weight: 600; margin: 8px 0 4px; }
.ortlab .ortlab-scroll { overflow-x: auto; margin: 0 0 8px; }
.ortlab table.ortlab-table { border-collapse: collapse; margin: 0; font-size: 12px;
  font-variant-numeric: tabular-nums; width: auto; border: 0; }
.ortlab table.ortlab-table caption { caption-side: top; text-align: left; padding: 2px 0; color: inherit;
  font-weight: 600; white-space: nowrap; }
.ortlab table.ortlab-table tr { background: none; }
.ortlab table.ortlab-table th, .ortlab table.ortlab-table td { text-align: left; vertical-align: baseline;
  padding: 3px 12px 3px 0; max-width: 36em; white-space: normal; overflow-wrap: break-word; background: none;
  border: 0; border-bottom: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .35)); }
.ortlab table.ortlab-table thead th { font-weight: 600; white-space: nowrap; overflow-wrap: normal; }
.ortlab table.ortlab-table thead th[title] { text-decoration: underline dotted; text-underline-offset: 3px;
  cursor: help; }
.ortlab table.ortlab-table tbody th { font-weight: 500; }
.ortlab table.ortlab-table tbody th > span { display: inline-block; width: max-content; max-width: 28em;
  overflow-wrap: anywhere; }
.ortlab table.ortlab-table .ortlab-number { text-align: right; white-space: nowrap; }
.ortlab table.ortlab-table .ortlab-short { white-space: nowrap; }
.ortlab p { margin: 2px 0 6px; }
.ortlab .ortlab-good { color: var(--jp-success-color0, color-mix(in srgb, #2e8540 60%, currentcolor)); }
.ortlab .ortlab-warn { color: var(--jp-warn-color0, color-mix(in srgb, #b35c00 60%, currentcolor)); }
.ortlab .ortlab-bad {
  color: var(--jp-error-color1, color-mix(in srgb, #d32f2f 60%, currentcolor)); font-weight: 600; }
.ortlab .ortlab-quiet { color: var(--jp-ui-font-color2, color-mix(in srgb, currentcolor 70%, transparent)); }
.ortlab details pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24em; overflow: auto;
  font-size: 12px; }
"""
"""Style sheet of every page; all rules stand under the class `ortlab`.

Where JupyterLab's colours are absent, ours are mixed with the colour of the text, which is light on a dark ground.
"""

_SHORT = 24
"""Characters up to which a cell is not broken into lines."""

_CELL_LIMIT = 400
"""Characters of a cell that are shown; a longer one loses its middle."""


def render(record: object) -> str:
    """Write a record (or a `Page`) as self-contained HTML.

    Parameters
    ----------
    record
        A `Run`, `Ledger`, `Comparison`, `MemoryPlan`, `Graph`, `Options`, `Status` or doctor's report.

    Raises
    ------
    TypeError
        If there is no page for a record of this type.
    """
    return f"<style>\n{STYLE}</style>\n{fragment(record)}"


def fragment(record: object) -> str:
    """Write a record (or a `Page`) without its style sheet, for a host that holds `STYLE` already."""
    page = record if isinstance(record, Page) else compose(record)
    title = f"<h4>{escape(page.title)}</h4>\n" if page.title else ""
    return f'<div class="ortlab">\n{title}{"".join(_block(block) for block in page.blocks)}</div>'


def table(content: Table) -> str:
    """Write one table: caption, column headings, and the first cell of each row as its heading."""
    classes = f"ortlab-table {SORTS}" if content.sorts else "ortlab-table"
    parts = [f'<div class="ortlab-scroll"><table class="{classes}">']
    if content.caption:
        parts.append(f"<caption>{escape(content.caption)}</caption>")
    if any(column.name for column in content.columns):
        parts.append(f"<thead><tr>{''.join(_head(column) for column in content.columns)}</tr></thead>")
    parts.append("<tbody>")
    for cells in content.rows:
        inner = "".join(
            _cell(cell, column, heading=position == 0)
            for position, (cell, column) in enumerate(zip(cells, content.columns, strict=True))
        )
        parts.append(f"<tr>{inner}</tr>")
    parts.append("</tbody></table>")
    if content.left_out:
        parts.append(f'<p class="ortlab-quiet">{escape(content.left_out)}</p>')
    parts.append("</div>\n")
    if content.sorts:
        parts.append(SORT_SCRIPT)
    return "\n".join(parts)


def image(svg: str, said: str) -> str:
    """Write an SVG as an image that carries it."""
    # JupyterLab takes ``<svg>`` elements out of the HTML of a notebook that is not trusted, and leaves the words in
    # them as a line of digits; so do GitHub and others. They keep images.
    carried = base64.b64encode(svg.encode()).decode()
    return (
        f'<img alt="{escape(said)}" src="data:image/svg+xml;base64,{carried}" '
        'style="max-width: 100%; height: auto">'
    )


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return table(block)
    if isinstance(block, Note):
        lines = "<br>".join(escape(line) for line in block.text.splitlines())
        return f"<p{_classes(block.mark)}>{lines}</p>\n"
    if isinstance(block, Code):
        shown = f"<style>{CODE_STYLE}</style>{highlighted(block.source)}"
        return f"<p><strong>{escape(block.caption)}</strong></p>\n{shown}\n"
    if isinstance(block, Drawing):
        return f'<div class="ortlab-scroll">{image(block.svg(), block.description)}</div>\n'
    if isinstance(block, Frame):
        return f'<div class="ortlab-scroll">{block.html()}</div>\n'
    return _folded(block)


def _folded(block: Folded) -> str:
    is_open = " open" if block.is_open else ""
    text = f"<pre>{escape(block.text)}</pre>" if block.text else ""
    inner = "".join(_block(one) for one in block.blocks)
    return f"<details{is_open}><summary>{escape(block.title)}</summary>{text}{inner}</details>\n"


def _head(column: Column) -> str:
    title = f' title="{escape(column.meaning)}"' if column.meaning else ""
    return f'<th scope="col"{_classes(number=column.numeric)}{title}>{escape(column.name)}</th>'


def _cell(cell: Cell, column: Column, *, heading: bool) -> str:
    classes = _classes(cell.mark, number=column.numeric, short=not heading and len(cell.text) <= _SHORT)
    text = escape(cell.text if column.whole else units.fold(cell.text, _CELL_LIMIT))
    if cell.more:
        text = f"<details><summary>{text}</summary><pre>{escape(cell.more)}</pre></details>"
    # A name breaks between its words and keeps its width: without the span, a narrow page breaks it in a word.
    return f'<th scope="row"{classes}><span>{text}</span></th>' if heading else f"<td{classes}>{text}</td>"


def _classes(mark: Mark = Mark.PLAIN, *, number: bool = False, short: bool = False) -> str:
    names = [] if mark is Mark.PLAIN else [f"ortlab-{mark.value}"]
    if number:
        names.append("ortlab-number")
    elif short:
        names.append("ortlab-short")
    return f' class="{" ".join(names)}"' if names else ""


# ---- code, and tables that are sorted -------------------------------------------------------------------------------


CODE_STYLE: Final = """\
.ortlab pre.ortlab-code { font: 12px/1.45 var(--jp-code-font-family, monospace); margin: 0 0 8px; padding: 8px;
  overflow: auto; max-height: 40em; border: 1px solid var(--jp-border-color2, rgba(128, 128, 128, .35));
  background: none; color: inherit; white-space: pre; tab-size: 4; }
.ortlab-code .k, .ortlab-code .kn, .ortlab-code .kc, .ortlab-code .ow {
  color: var(--jp-mirror-editor-keyword-color, color-mix(in srgb, #2e8540 60%, currentcolor)); font-weight: 600; }
.ortlab-code .nf, .ortlab-code .nd, .ortlab-code .nb {
  color: var(--jp-mirror-editor-def-color, color-mix(in srgb, #3b82f6 60%, currentcolor)); }
.ortlab-code .mi, .ortlab-code .mf {
  color: var(--jp-mirror-editor-number-color, color-mix(in srgb, #2e8540 60%, currentcolor)); }
.ortlab-code .s1, .ortlab-code .s2, .ortlab-code .sd {
  color: var(--jp-mirror-editor-string-color, color-mix(in srgb, #c2410c 60%, currentcolor)); }
.ortlab-code .c1 {
  color: var(--jp-mirror-editor-comment-color, color-mix(in srgb, currentcolor 70%, transparent)); font-style: italic; }
.ortlab-code .o { color: var(--jp-mirror-editor-operator-color, color-mix(in srgb, #9333ea 60%, currentcolor)); }
"""
"""Goes with `highlighted`; the colours of JupyterLab's theme where there is one, others that both grounds bear."""


def highlighted(source: str) -> str:
    """Write Python code as one HTML element; everything in it is escaped."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    inner = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    return f'<pre class="ortlab-code" tabindex="0">{inner}</pre>'


SORTS: Final = "ortlab-sorts"
"""Class of the tables that are sorted."""

SORT_SCRIPT: Final = """\
<style>
.ortlab table.ortlab-sorts thead button { font: inherit; color: inherit; background: none; border: 0; padding: 0;
  margin: 0; cursor: pointer; }
.ortlab table.ortlab-sorts thead button:focus-visible { outline: 2px solid var(--jp-brand-color1, #1976d2); }
.ortlab table.ortlab-sorts th[aria-sort=ascending] button::after { content: " \\25B2"; font-size: 9px; }
.ortlab table.ortlab-sorts th[aria-sort=descending] button::after { content: " \\25BC"; font-size: 9px; }
</style>
<script>
(() => {
  for (const table of document.querySelectorAll("table.ortlab-sorts:not([data-sorts])")) {
    table.dataset.sorts = "";
    const heads = [...table.tHead.rows[0].cells];
    const rows = [...table.tBodies[0].rows];
    heads.forEach((head, at) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("data-lm-suppress-shortcuts", "true"); // JupyterLab takes keys for itself
      button.append(...head.childNodes);
      head.append(button);
      const words = (row) => row.cells[at].textContent;
      button.addEventListener("click", () => {
        const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
        rows.sort((a, b) => way * words(a).localeCompare(words(b), undefined, { numeric: true }));
        table.tBodies[0].append(...rows);
      });
    });
  }
})();
</script>
"""
"""Makes a button of each heading. Nothing of a record is in it: names come from models and may hold markup."""
