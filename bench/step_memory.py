"""The step memory of a run agrees with a fresh process's within 2 %; what it adds to a run of 20 steps is stated.

Models are a BERT, a GPT-2 and a Llama (4 layers, hidden 256, batch 8, sequence 128, AdamW, no dropout). One process for
each has trained on ONNX Runtime and on PyTorch before, and then makes the runs whose `step_memory_bytes` is held
against a fresh process in which nothing else has run, with glibc told by its environment to map large buffers and ORT's
arena off from the start. The cost is the time of a run with its step memory over one without, in rounds of the two: of
the first run, which also makes a session without an arena, and of those after it.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

from memory_measurement import MAPPED, MIB
from report import THREADS, Report, arguments, in_own_process


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        setting = json.loads(sys.argv[-1])
        print(json.dumps((fresh if setting["fresh"] else used)(setting)))
        return
    read = arguments(__doc__, rounds=3)
    report = Report("step_memory", read)
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    for family in ("BERT",) if read.quick else ("BERT", "GPT-2", "Llama"):
        model = {"family": family, "quick": read.quick, "rounds": read.rounds}
        here = in_own_process(__file__, "--child", json.dumps({**model, "fresh": False}))
        for engine, size in here["sizes"].items():
            alone = in_own_process(
                __file__,
                "--child",
                json.dumps({**model, "fresh": True, "engine": engine}),
                environment=MAPPED,
            )
            rows.append(
                {
                    "model": family,
                    "engine": engine,
                    "of the run [MiB]": round(size / MIB, 2),
                    "lab.memory() [MiB]": round(here["measured"][engine] / MIB, 2),
                    "fresh process [MiB]": round(alone / MIB, 2),
                    "difference [%]": round(100 * (size / alone - 1), 2),
                }
            )
        costs.append({"model": family, **here["costs"]})
    report.table("Step memory", rows)
    report.table("What it adds to a run", costs)
    worst = max(abs(row["difference [%]"]) for row in rows)
    report.claim("Step memory of a run against a fresh process's, worst difference [%]", worst, at_most=2.0)
    later = [float(row["later runs, added [%]"]) for row in costs]
    report.claim("What it adds to a run of 20 steps, worst model, session there [%]", max(later))
    report.write()


def _trained(setting: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from budget import language_model

    import ortlab

    torch.set_num_threads(THREADS)
    size = (2, 64, 2, 32, 512) if setting["quick"] else (4, 256, 8, 128, 8192)
    model, batch = language_model(setting["family"], *size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lab = ortlab.wrap(model, log_level="ERROR")

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return lab, step


def used(setting: dict[str, Any]) -> dict[str, Any]:
    """Make runs in a process that has trained before; return their step memory, and what it costs."""
    lab, step = _trained(setting)
    count = 4 if setting["quick"] else 20
    lab.step(step, n=count, memory=False, progress=False)
    lab.set(engine="eager").rerun(memory=False, progress=False)
    lab.set(engine="ort").rerun(memory=False, progress=False)
    times: dict[bool, list[float]] = {True: [], False: []}
    first = 0.0
    for number in range(setting["rounds"] + 1):
        for memory in (True, False) if number % 2 == 0 else (False, True):
            start = time.perf_counter()
            run = lab.rerun(memory=memory, progress=False)
            spent = time.perf_counter() - start
            if memory and number == 0:
                first = spent  # with the session that is made for it
            elif number:
                times[memory].append(spent)
    plain = statistics.median(times[False])
    sizes = {"ort": lab.rerun(n=3, progress=False).step_memory_bytes}
    measured = {"ort": lab.memory().rise_bytes}
    sizes["eager"] = lab.set(engine="eager").rerun(n=3, progress=False).step_memory_bytes
    measured["eager"] = lab.memory().rise_bytes
    return {
        "sizes": sizes,
        "measured": measured,
        "costs": {
            "steps": count,
            "a step [ms]": round(run.step_ms, 1),
            "a run without [s]": round(plain, 2),
            "first run, added [%]": round(100 * (first / plain - 1), 1),
            "later runs, added [%]": round(100 * (statistics.median(times[True]) / plain - 1), 1),
        },
    }


def fresh(setting: dict[str, Any]) -> int:
    """Train in a process where nothing else has run, and return how far a step rises, by the kernel's mark alone."""
    from ortlab.runs.process_memory import reset_peak, resident_set

    lab, step = _trained(setting)
    lab.set(engine=setting["engine"], cpu_memory_arena=False)
    lab.step(step, n=3, memory=False, progress=False)
    rises = []
    for _ in range(3):
        gc.collect()
        reset_peak()
        start = resident_set()[0]
        step()
        rises.append(resident_set()[1] - start)
    return int(statistics.median(rises))


if __name__ == "__main__":
    main()
