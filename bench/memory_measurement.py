"""Memory measured in a process that has trained before differs by at most 2 % from a fresh process's.

Models are a BERT and a GPT-2 (4 layers, hidden 256, batch 8, sequence 128 and 256, AdamW, no dropout). One process for
each trains on ONNX Runtime with its arena on, on PyTorch, and at memory level 1, and then measures PyTorch, ONNX
Runtime, and ONNX Runtime with the plan that is predicted to save most, by `lab.memory()`. Each of the three is
also trained in a fresh process in which nothing else has run, with glibc told by its environment to map large buffers
and the arena off from the start; there the kernel's mark of the peak is read without ortlab's measurement. What is
compared is the rise of a step above its start, and what the plan saves of it. The claims are for steps of 50 MiB and
more: what Python takes meanwhile is half a MiB.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import THREADS, Report, arguments, in_own_process

MIB = 2**20
# As `ortlab.runs.process_memory.LARGEST_IN_HEAP`: both sides of a comparison map the same buffers.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "32768"}


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        setting = json.loads(sys.argv[-1])
        print(json.dumps((fresh if setting["fresh"] else used)(setting)))
        return
    read = arguments(__doc__, rounds=1)
    report = Report("memory_measurement", read)
    lengths = (32,) if read.quick else (128, 256)
    rows: list[dict[str, Any]] = []
    savings: list[dict[str, Any]] = []
    for family in ("BERT",) if read.quick else ("BERT", "GPT-2"):
        for length in lengths:
            model = {"family": family, "length": length, "quick": read.quick}
            here = child({**model, "fresh": False})
            alone = {
                name: child({**model, "fresh": True, "engine": name.split()[0], "plan": plan}, MAPPED)
                for name, plan in (("eager", ""), ("ort", ""), ("ort with the plan", here["plan"]))
            }
            for name, rise in alone.items():
                measured = here["rises"][name]
                rows.append(
                    {
                        "model": f"{family}, {length}",
                        "configuration": name.replace("the plan", here["plan"]),
                        "used process [MiB]": round(measured["rise"] / MIB, 2),
                        "steps apart [MiB]": round(measured["spread"] / MIB, 2),
                        "fresh process [MiB]": round(rise / MIB, 2),
                        "difference [%]": round(100 * (measured["rise"] / rise - 1), 2),
                    }
                )
            saved = [
                (one["ort"] - one["ort with the plan"])
                for one in ({name: found["rise"] for name, found in here["rises"].items()}, alone)
            ]
            savings.append(
                {
                    "model": f"{family}, {length}",
                    "plan": here["plan"],
                    "saved, used process [MiB]": round(saved[0] / MIB, 2),
                    "saved, fresh process [MiB]": round(saved[1] / MIB, 2),
                    "apart [% of the step]": round(100 * abs(saved[0] - saved[1]) / alone["ort"], 2),
                }
            )
    report.table("Rise of a step above its start", rows)
    report.table("What the plan saves", savings)
    worst = max(abs(row["difference [%]"]) for row in rows)
    report.claim("Rise, used against fresh process, worst difference [%]", worst, at_most=2.0)
    worst = max(row["apart [% of the step]"] for row in savings)
    report.claim("Saving, used against fresh process, worst [% of the step]", worst, at_most=2.0)
    worst = max(100 * row["steps apart [MiB]"] / row["used process [MiB]"] for row in rows)
    report.claim("Steps of one measurement apart, worst [% of the rise]", worst, at_most=2.0)
    report.write()


def child(setting: dict[str, Any], environment: dict[str, str] | None = None) -> Any:
    """Run a setting of this benchmark in a process of its own; return what it printed."""
    return in_own_process(__file__, "--child", json.dumps(setting), environment=environment)


def prepare(setting: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """Make the model and its step."""
    import torch
    from models import VOCABULARY, families, tokens

    torch.set_num_threads(THREADS)
    hidden = 64 if setting["quick"] else 256
    model = families(4, hidden)[setting["family"]]("eager")
    batch = tokens(8, setting["length"], VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return model, step


def used(setting: dict[str, Any]) -> dict[str, Any]:
    """Train in several ways, then measure with ortlab; return the plan and the rises in bytes."""
    import ortlab

    model, step = prepare(setting)
    lab = ortlab.wrap(model, log_level="ERROR")
    lab.step(step, n=2, progress=False)
    plan = lab.plan().rows[0].config
    for changes in ({"engine": "eager"}, {"engine": "ort", "memory_level": 1}):
        lab.set(**changes).rerun(2, progress=False)
    lab.set(memory_level=0)
    rises = {}
    for name, changes in (
        ("eager", {"engine": "eager"}),
        ("ort", {}),
        ("ort with the plan", {"memory_plan": (plan,)}),
    ):
        measured = lab.memory(**changes)
        rises[name] = {"rise": measured.rise_bytes, "spread": measured.spread_bytes}
    return {"plan": plan, "rises": rises}


def fresh(setting: dict[str, Any]) -> int:
    """Train one configuration and read the kernel's mark; return the largest rise of three steps, in bytes."""
    import ortlab

    model, step = prepare(setting)
    plans = (setting["plan"],) if setting["plan"] else ()
    lab = ortlab.wrap(
        model, engine=setting["engine"], memory_plan=plans, cpu_memory_arena=False, log_level="ERROR"
    )
    rise = risen(step)
    assert lab.status.executed_by == setting["engine"]
    return rise


def risen(step: Callable[[], None]) -> int:
    """Run a step to warm up, then read the kernel's mark; return the largest rise of three steps, in bytes."""
    for _ in range(3):
        step()
    rises = []
    for _ in range(3):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        start = resident("VmRSS")
        step()
        rises.append(resident("VmHWM") - start)
    return max(rises)


def resident(field: str) -> int:
    """Read a line of the kernel's status of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
