"""Memory level 1 takes at least 40 % off the step's memory of transformers, wherever they normalise.

Models are a BERT, a GPT-2 and a Llama (4 layers, hidden 256, batch 8, sequence 256, AdamW, no dropout). Each
configuration is trained in a fresh process, with glibc told by its environment to map large buffers and ONNX
Runtime's arena off, and the kernel's mark of the peak is read; what is compared is the rise of a step above its
start. "Every plan at once" is what a level comes to where no layer is found to start again from, as in ONNX Runtime
1.19.2 for BERT and Llama.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from memory_measurement import MAPPED, MIB, resident
from report import THREADS, Report, arguments, in_own_process

CONFIGURATIONS = ("eager", "level 0", "every plan at once", "level 1")
FAMILIES = ("BERT", "GPT-2", "Llama")


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        print(json.dumps(one(json.loads(sys.argv[-1]))))
        return
    read = arguments(__doc__, rounds=1)
    report = Report("memory_levels", read)
    rows = []
    for family in FAMILIES[:1] if read.quick else FAMILIES:
        setting = {"family": family, "length": 32 if read.quick else 256, "quick": read.quick}
        found = {name: in_process({**setting, "configuration": name}) for name in CONFIGURATIONS}
        rows.append(
            {
                "model": family,
                **{f"{name} [MiB]": round(one["rise"] / MIB, 1) for name, one in found.items()},
                "level 1 takes off [%]": round(
                    100 * (1 - found["level 1"]["rise"] / found["level 0"]["rise"]), 1
                ),
                "it recomputes": found["level 1"]["words"],
            }
        )
    report.table("Rise of a step above its start", rows)
    least = min(float(str(row["level 1 takes off [%]"])) for row in rows)
    report.claim("Memory that is left at level 1, largest share of level 0 [%]", 100 - least, at_most=60.0)
    report.write()


def in_process(setting: dict[str, Any]) -> dict[str, Any]:
    """Run a configuration in a process of its own; return what it printed."""
    found: dict[str, Any] = in_own_process(__file__, "--child", json.dumps(setting), environment=MAPPED)
    return found


def one(setting: dict[str, Any]) -> dict[str, Any]:
    """Train one configuration; return the largest rise of three steps, in bytes, and what the level says."""
    import torch
    from models import VOCABULARY, families, tokens

    import ortlab

    torch.set_num_threads(THREADS)
    name = setting["configuration"]
    model = families(4, 64 if setting["quick"] else 256)[setting["family"]]("eager")
    batch = tokens(8, setting["length"], VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = "eager" if name == "eager" else "ort"
    lab = ortlab.wrap(model, engine=engine, cpu_memory_arena=False, log_level="ERROR")

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    step()
    if name == "level 1":
        lab.set(memory_level=1)
    elif name == "every plan at once":
        parts = {part for row in lab.plan().rows for part in row.config.split(",")}
        lab.set(memory_plan=tuple(sorted(parts)))
    step()
    rises = []
    for _ in range(3):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        start = resident("VmRSS")
        step()
        rises.append(resident("VmHWM") - start)
    assert lab.status.executed_by == engine
    level_set = lab.plan().level_set if name == "level 1" else None
    return {"rise": max(rises), "words": level_set.sentence() if level_set else ""}


if __name__ == "__main__":
    main()
