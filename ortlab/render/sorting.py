"""A table in HTML that is sorted in the page, by a script that comes with it; without scripts it is a table as any."""

from __future__ import annotations

from typing import Final

CLASS: Final = "ortlab-sorts"
"""Class of the tables that are sorted."""

SCRIPT: Final = """\
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
