"""The least memory of a step: layers recomputed by ortlab, against PyTorch's checkpointed layers and memory levels.

Models are a BERT, a GPT-2 and a Llama (6 layers, hidden 384, batch 8, sequence 256, vocabulary 512, AdamW), each with
dropout 0.1 where it has such modules, and without. Each configuration is trained in a process of its own, with glibc
told by its environment to map large buffers and ONNX Runtime's arena off, and the kernel's mark of the peak is read;
what is compared is the rise of a step above its start. Gradients and losses are compared in the tests.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from memory_measurement import MAPPED, MIB, resident
from report import THREADS, Report, arguments, in_own_process

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "eager": {"engine": "eager"},
    "checkpointed layers": {"engine": "checkpoint"},
    "ort": {"engine": "ort"},
    "memory_level=1": {"engine": "ort", "memory_level": 1},
    "recompute=layers": {"engine": "ort", "recompute": "layers"},
    "recompute=layers:1/2": {"engine": "ort", "recompute": "layers:1/2"},
    "recompute=all but matmuls": {"engine": "ort", "recompute": "all but matmuls"},
}
FAMILIES = ("BERT", "GPT-2", "Llama")


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        print(json.dumps(one(json.loads(sys.argv[-1]))))
        return
    read = arguments(__doc__, rounds=1)
    report = Report("recompute_floor", read)
    rows, shares, ours, halves = [], [], [], []
    for family in FAMILIES[:1] if read.quick else FAMILIES:
        for dropout in (0.0, 0.1):
            setting = {"family": family, "dropout": dropout, "quick": read.quick}
            found = {name: in_process({**setting, "configuration": name}) for name in CONFIGURATIONS}
            shares.append(found["recompute=layers"] / found["checkpointed layers"])
            halves.append(found["recompute=layers:1/2"] / found["checkpointed layers"])
            ours.append(found["recompute=layers"] / found["memory_level=1"])
            rows.append(
                {
                    "model": family,
                    "dropout": dropout,
                    **{f"{name} [MiB]": round(rise / MIB, 1) for name, rise in found.items()},
                    "layers / checkpointed layers": round(shares[-1], 2),
                    "layers:1/2 / checkpointed layers": round(halves[-1], 2),
                    "layers / level 1": round(ours[-1], 2),
                }
            )
    report.table("Rise of a step above its start", rows)
    report.claim(
        "Step memory of recompute=layers, largest share of memory_level=1's [%]", 100 * max(ours), at_most=100
    )
    report.claim(
        "Step memory of recompute=layers, largest share of checkpointed layers' [%]",
        100 * max(shares),
        at_most=105,
    )
    report.claim(
        "Step memory of recompute=layers:1/2, largest share of checkpointed layers' [%]",
        100 * max(halves),
        at_most=75,
    )
    report.write()


def in_process(setting: dict[str, Any]) -> float:
    """Run a configuration in a process of its own; return the rise of its step, in bytes."""
    found: float = in_own_process(__file__, "--child", json.dumps(setting), environment=MAPPED)
    return found


def one(setting: dict[str, Any]) -> float:
    """Train one configuration; return the largest rise of three steps, in bytes."""
    import torch
    from models import VOCABULARY, families, tokens

    import ortlab

    torch.set_num_threads(THREADS)
    wished = CONFIGURATIONS[setting["configuration"]]
    layers, hidden, length = (2, 64, 32) if setting["quick"] else (6, 384, 256)
    model = families(layers, hidden)[setting["family"]]("eager")
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = setting["dropout"]
    batch = tokens(8, length, VOCABULARY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lab = ortlab.wrap(model, cpu_memory_arena=False, log_level="ERROR", **wished)

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    step()
    step()
    rises = []
    for _ in range(3):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        start = resident("VmRSS")
        step()
        rises.append(resident("VmHWM") - start)
    assert lab.status.executed_by == wished["engine"]
    return max(rises)


if __name__ == "__main__":
    main()
