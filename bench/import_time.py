"""`import ortlab` costs at most 50 ms over a bare `python -c pass`, and imports neither torch nor onnxruntime.

Both are timed as whole processes, from start to exit, in interleaved rounds; bytecode is compiled already.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

from report import REPOSITORY, Report, arguments
from rounds import interleave, ratio, rows

HEAVY = ("torch", "onnxruntime", "onnx", "numpy", "pandas", "transformers", "IPython", "ipywidgets")
CODE = "import sys, json, ortlab; print(json.dumps([name for name in sys.argv[1:] if name in sys.modules]))"


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=40)
    report = Report("import_time", read)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}

    def python(*arguments: str) -> Callable[[], object]:
        command = [sys.executable, *arguments]
        return lambda: subprocess.run(command, env=environment, check=True, capture_output=True, text=True)

    candidates = {"import ortlab": python("-c", "import ortlab"), "pass": python("-c", "pass")}
    times = interleave(candidates, read.rounds)
    report.table("A fresh process, start to exit", rows(times))
    report.table("Ratio", [ratio(times, "import ortlab", "pass").row("import ortlab / pass")])
    imported = json.loads(python("-c", CODE, *HEAVY)().stdout)
    report.note(f"Of {', '.join(HEAVY)}, it imports: {', '.join(imported) or 'none'}.")
    added = [one - other for one, other in zip(times["import ortlab"], times["pass"], strict=True)]
    of_minima = min(times["import ortlab"]) - min(times["pass"])
    report.claim(
        "import ortlab, median of rounds [ms over pass]", statistics.median(added) * 1e3, at_most=50.0
    )
    report.claim("import ortlab, of minima [ms over pass]", of_minima * 1e3, at_most=50.0)
    report.claim("torch and onnxruntime imported", len({"torch", "onnxruntime"} & set(imported)), at_most=0)
    report.write()


if __name__ == "__main__":
    main()
