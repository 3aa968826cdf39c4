"""After 20 toggles a process needs at most 1.05 times the memory it needed after the first, and holds one session.

The model is a BERT (12 layers, hidden 768, batch 2, sequence 128). In a fresh process it is wrapped and takes a step;
then switches are changed 20 times, for new sessions and for new graphs, with a step (forward and backward) after each.
The first change and the twentieth lead to the same options. After each step gradients are dropped, Python's garbage is
collected and the C library gives free memory back to the system (`malloc_trim`, where there is one); what is compared
then is the process's resident set. Sessions, graphs and exports that are alive are counted as Python objects.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from typing import Any

from report import REPOSITORY, THREADS, Report, arguments

LEVEL = {"memory_level": 1}
BACK = {"memory_level": 0}
CHANGES = (
    *(LEVEL, BACK),
    *({"compute_optimizer": False}, {"compute_optimizer": True}),
    *({"intra_op_spinning": True}, {"intra_op_spinning": False}),
    *({"memory_level": 2}, BACK),
    *({"cast_level": 2}, {"cast_level": 1}),
    *({"cast_strategy": "NONE"}, {"cast_strategy": "FLOOD_FILL"}),
    *(LEVEL, BACK),
    *({"cast_level": 0}, {"cast_level": -1}, {"cast_level": 1}),
    *({"cpu_memory_arena": False}, {"cpu_memory_arena": True}),
    LEVEL,
)
COUNTED = {
    "ONNX Runtime sessions": ("InferenceSession", 1),
    "Exports": ("Export", 1),
    "Gradient graphs": ("BuiltGraph", 4),
}
"""Python classes, and how many objects of each a lab keeps: as many graphs as `exports.KEPT_GRAPHS`."""
MIB = 2**20


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        print(json.dumps(toggle(quick="--quick" in sys.argv)))
        return
    read = arguments(__doc__, rounds=2)
    report = Report("toggle_memory", read)
    processes = [in_fresh_process(quick=read.quick) for _ in range(1 if read.quick else read.rounds)]
    report.table(
        "Resident set after each toggle, first process",
        [
            {"toggle": f"{number} {change}", "MiB": round(size / MIB, 1)}
            for number, (change, size) in enumerate(zip(CHANGES, processes[0]["bytes"], strict=True), 1)
        ],
    )
    ends = [(one["bytes"][0], one["bytes"][-1]) for one in processes]
    report.table(
        "After the first and the last toggle, with the same options",
        [
            {
                "process": number,
                "first [MiB]": round(first / MIB, 1),
                "last [MiB]": round(last / MIB, 1),
                "ratio": last / first,
            }
            for number, (first, last) in enumerate(ends, 1)
        ],
    )
    worst = max(last / first for first, last in ends)
    report.claim(f"Memory after {len(CHANGES)} toggles / after 1, worst process", worst, at_most=1.05)
    for name, (_, limit) in COUNTED.items():
        alive = max(one[name] for one in processes)
        report.claim(f"{name} alive after the last toggle", alive, at_most=limit)
    report.write()


def in_fresh_process(*, quick: bool) -> dict[str, Any]:
    """Measure in a process of its own; return what `toggle` does."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, __file__, *(["--quick"] if quick else []), "--child"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def toggle(*, quick: bool) -> dict[str, Any]:
    """Make all changes, each with a step; return the resident set after each, and what is alive at the end."""
    import psutil
    import torch
    from models import bert, tiny, tokens

    import ortlab

    torch.set_num_threads(THREADS)
    model, batch = tiny() if quick else (bert(12, 768, heads=12), tokens(2, 128))
    lab = ortlab.wrap(model, log_level="ERROR")

    def step() -> None:
        model(**batch)["loss"].backward()
        model.zero_grad(set_to_none=True)
        assert lab.status.executed_by == "ort"

    step()
    sizes = []
    for change in CHANGES:
        lab.set(**change)
        step()
        gc.collect()
        with suppress(OSError, AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        sizes.append(psutil.Process().memory_info().rss)
    kinds = Counter(type(thing).__name__ for thing in gc.get_objects())
    return {"bytes": sizes, **{name: kinds[kind] for name, (kind, _) in COUNTED.items()}}


if __name__ == "__main__":
    main()
