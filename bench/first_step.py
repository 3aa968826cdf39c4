"""The first step on ONNX Runtime takes at most a quarter of the first step of `torch.compile`, same model.

A step is forward and backward of a BERT (4 layers, hidden 512, batch 8, sequence 128). Each candidate starts in a fresh
process, and `torch.compile` (Inductor, its defaults) with an empty cache folder. The clock starts when the model, the
optimizer and the batch are there and the libraries are imported - ONNX Runtime on one side, Dynamo and Inductor on the
other. It stops after the first step: export, gradient graph and session on one side, tracing and compilation on the
other are inside. What the imports took before it, and AdamW after it (run by PyTorch on every side), is in tables of
their own. Eager PyTorch is timed for scale.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import REPOSITORY, THREADS, Report, arguments

IMPORTS = {
    # The first optimizer imports Dynamo, whoever runs the forward.
    "ort": ("torch._dynamo", "ortlab.engine.execution"),
    "compile": ("torch._dynamo", "torch._inductor.compile_fx"),
    "eager": ("torch._dynamo",),
}


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        print(json.dumps(first_step(sys.argv[-1], quick="--quick" in sys.argv)))
        return
    read = arguments(__doc__, rounds=3)
    from rounds import Times, ratio, rows

    report = Report("first_step", read)
    names = list(IMPORTS)
    found = {name: [] for name in names}
    for number in range(1 if read.quick else read.rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            found[name].append(in_fresh_process(name, read))

    def times(what: str) -> Times:
        return {name: [one[what] for one in ones] for name, ones in found.items()}

    report.table("First step", rows(times("first"), unit="s", scale=1))
    report.table("Imports before it, not counted", rows(times("imports"), unit="s", scale=1))
    report.table("Its optimizer, not counted", rows(times("optimizer"), unit="s", scale=1))
    report.table("Third step", rows(times("third"), unit="s", scale=1))
    against_compile = ratio(times("first"), "ort", "compile")
    report.table("Ratio", [against_compile.row("ort / compile")])
    report.claim("First step, ORT / torch.compile, median of rounds", against_compile.median, at_most=0.25)
    report.write()


def in_fresh_process(name: str, read: argparse.Namespace) -> dict[str, float]:
    """Measure one candidate in a process of its own, with an empty compilation cache."""
    command = [sys.executable, __file__, *(["--quick"] if read.quick else []), "--child", name]
    with tempfile.TemporaryDirectory(prefix="ortlab-bench-") as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
            "PYTHONPATH": str(REPOSITORY),
        }
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_step(name: str, *, quick: bool) -> dict[str, float]:
    """Take the first three steps of a process, and return seconds of the imports, the first and the third."""
    start = time.perf_counter()
    import torch
    from models import bert, tiny, tokens

    if name == "ort":
        import ortlab
    for module in IMPORTS[name]:
        importlib.import_module(module)
    imports = time.perf_counter() - start
    torch.set_num_threads(THREADS)
    model, batch = tiny() if quick else (bert(4, 512), tokens(8, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    steps, optimizing = [], []
    start = time.perf_counter()
    lab = ortlab.wrap(model, log_level="ERROR") if name == "ort" else None
    forward = torch.compile(model) if name == "compile" else model
    for _ in range(3):
        forward(**batch)["loss"].backward()
        steps.append(time.perf_counter() - start)
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        optimizing.append(time.perf_counter() - start)
        start = time.perf_counter()
    assert lab is None or lab.status.executed_by == "ort"
    return {"imports": imports, "first": steps[0], "optimizer": optimizing[0], "third": steps[2]}


if __name__ == "__main__":
    main()
