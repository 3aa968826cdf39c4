"""The least memory of a step: layers recomputed by ortlab, against PyTorch's checkpointed layers and memory levels.

Models are a BERT, a GPT-2, a Llama, a DeBERTa-v2, a T5, a ViT and an ALBERT, which calls one layer six times (6 layers,
hidden 384, batch 8, sequence 256, vocabulary 512; the ViT 128 images of 17 patches; AdamW), without dropout and with
0.1 where they have such modules. Each configuration is trained in a process of its own, with glibc told by its
environment to map large buffers and ONNX Runtime's arena off, and the kernel's mark of the peak is read; what is
compared is the rise of a step above its start. Gradients and losses are compared in the tests.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from memory_measurement import MAPPED, MIB, resident
from report import THREADS, Report, arguments, in_own_process, one_by_one

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "eager": {"engine": "eager"},
    "checkpointed layers": {"engine": "checkpoint"},
    "ort": {"engine": "ort"},
    "memory_level=1": {"engine": "ort", "memory_level": 1},
    "recompute=layers": {"engine": "ort", "recompute": "layers"},
    "recompute=layers:1/2": {"engine": "ort", "recompute": "layers:1/2"},
    "recompute=layers:1/2 nested": {"engine": "ort", "recompute": "layers:1/2 nested"},
    "recompute=layers:3 nested": {"engine": "ort", "recompute": "layers:3 nested"},
    "recompute=all but matmuls": {"engine": "ort", "recompute": "all but matmuls"},
}
FAMILIES = ("BERT", "GPT-2", "Llama", "DeBERTa-v2", "T5", "ViT", "ALBERT")


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        print(json.dumps(one(json.loads(sys.argv[-1]))))
        return
    read = arguments(__doc__, rounds=1, resumes=True, only="models")
    report = Report("recompute_floor", read)
    cases = [
        f"{family}, dropout {dropout}"
        for family in read.only or (FAMILIES[:1] if read.quick else FAMILIES)
        for dropout in ((0.0,) if family == "Llama" else (0.0, 0.1))
    ]
    rows = one_by_one("recompute_floor", read, cases, lambda case: measured(case, quick=read.quick))
    report.table("Rise of a step above its start", rows)
    for column, limit in (
        ("layers / level 1", 1.0),
        ("layers / checkpointed layers", 1.05),
        ("layers:1/2 / checkpointed layers", 0.75),
        ("the least / checkpointed layers", 0.75),
    ):
        report.claim(f"Step memory, {column}, the largest", max(row[column] for row in rows), at_most=limit)
    report.write()


def measured(case: str, *, quick: bool) -> dict[str, Any]:
    """Measure a model, "BERT, dropout 0.1", in each configuration."""
    family, _, dropout = case.partition(", dropout ")
    setting = {"family": family, "dropout": float(dropout), "quick": quick}
    found = {name: in_process({**setting, "configuration": name}) for name in CONFIGURATIONS}
    peer, halves = found["checkpointed layers"], found["recompute=layers:1/2"]
    least = min(rise for name, rise in found.items() if name.startswith("recompute="))
    return {
        "model": family,
        "dropout": float(dropout),
        **{f"{name} [MiB]": round(rise / MIB, 1) for name, rise in found.items()},
        "layers / checkpointed layers": round(found["recompute=layers"] / peer, 2),
        "layers:1/2 / checkpointed layers": round(halves / peer, 2),
        "the least / checkpointed layers": round(least / peer, 2),
        "layers / level 1": round(found["recompute=layers"] / found["memory_level=1"], 2),
    }


def in_process(setting: dict[str, Any]) -> float:
    """Run a configuration in a process of its own; return the rise of its step, in bytes."""
    found: float = in_own_process(__file__, "--child", json.dumps(setting), environment=MAPPED)
    return found


def one(setting: dict[str, Any]) -> float:
    """Train one configuration; return the largest rise of three steps, in bytes."""
    import torch
    from models import VOCABULARY, batches, families, tokens

    import ortlab

    torch.set_num_threads(THREADS)
    wished = CONFIGURATIONS[setting["configuration"]]
    layers, hidden, length = (2, 64, 32) if setting["quick"] else (6, 384, 256)
    model = families(layers, hidden)[setting["family"]]("eager")
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = setting["dropout"]
    batch = tokens(8, length, VOCABULARY)
    if setting["family"] == "ViT":
        (batch,) = batches("ViT", 1, length // 2, length)
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
