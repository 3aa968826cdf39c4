"""From an empty notebook to the first budget answer, with the README's own cells: seconds, cells and characters typed.

The cells are the README's first blocks up to `%ort_budget 70%`, in a fresh kernel each round; starting the kernel is
part of the time. Characters are those of the cells without what follows a `#`, with and without the example model, in
whose place a user has one of their own.
"""

from __future__ import annotations

import re
import statistics
import time

from report import REPOSITORY, Report, arguments

_CELL = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"\s+#.*$", re.MULTILINE)


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=3)
    report = Report("front_door", read)
    import nbformat
    from nbclient import NotebookClient

    found = _CELL.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))
    asked = next(number for number, cell in enumerate(found) if cell.startswith("%ort_budget"))
    cells = [cell.strip() for cell in found[: asked + 1]]
    rows = []
    for _ in range(1 if read.quick else read.rounds):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        start = time.perf_counter()
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(REPOSITORY)}}).execute()
        seconds = time.perf_counter() - start
        shown = notebook.cells[-1].outputs[-1]["data"]["text/plain"]
        answer = next(line for line in shown.splitlines() if "memory costs" in line)
        rows.append({"seconds": round(seconds, 1), "answer": answer})
    typed = [len(_COMMENT.sub("", cell)) for cell in cells]
    report.table("From an empty notebook to the answer", rows)
    report.claim("Cells, the example model's included", len(cells))
    report.claim("Characters typed, with the example model", sum(typed))
    report.claim("Characters typed, with a model of one's own", sum(typed[1:]))
    median = statistics.median(float(row["seconds"]) for row in rows)
    report.claim("Seconds from an empty notebook to the answer", median, at_most=60.0)
    report.write()


if __name__ == "__main__":
    main()
