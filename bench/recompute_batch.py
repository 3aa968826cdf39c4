"""The largest batch and the samples per second of DeBERTa-v2 under one limit, with what is recomputed and without.

DeBERTa-v2 trains with AdamW on sequences of 256 tokens, each engine in a fresh process under the same limit of step
memory: ONNX Runtime without plans, with each GELU recomputed and with what ortlab recomputes (one search), PyTorch,
PyTorch with each layer checkpointed, and torch.compile with activation memory budgets. On a CPU (3 layers, hidden 384,
6 heads, vocabulary 8192) the limit lies a quarter of what recomputing GELU saves below what a batch of 8 needs without
plans. On a GPU (24 layers, hidden 1024, 16 heads) it is 0.9 of what is free, and sizes double until none fits.

ONNX Runtime states, of 16 A100: batch 16 takes 65 % of 40 GB; with GELU recomputed batch 32 takes 97 %, at 1.17 times
the samples per second. Claimed is that the batch doubles, which on a CPU says that the saving is real, not how large it
is, and that with layers recomputed it grows three times; every ratio of speed is stated whatever it is.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from report import THREADS, Report, arguments, in_own_process

if TYPE_CHECKING:
    from ortlab.checks.headline import Headline

CANDIDATES = ("eager", "checkpoint", "compile", "compile:0.5")
RECOMPUTED = ("recompute=layers", "recompute=layers:1/2 nested", "recompute=all but linear")
MIB = 2**20


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        engine, room = sys.argv[sys.argv.index("--child") + 1 :][:2]
        print(json.dumps(searched(engine, int(room), quick="--quick" in sys.argv).to_dict()))
        return
    read = arguments(__doc__, rounds=1)
    from ortlab.checks.headline import GELU, STATED, largest

    report = Report("recompute_batch", read)
    began = time.monotonic()
    ort = in_fresh_process("ort", 0, quick=read.quick)
    report.note(f"On {ort.device}, with at most {ort.room_bytes / MIB:.0f} MiB of step memory.")
    rows, seconds = ort.rows, {"ort": time.monotonic() - began}
    # The quick setting compiles nothing: that alone would take most of its time.
    for engine in CANDIDATES[:2] if read.quick else CANDIDATES:
        began = time.monotonic()
        try:
            rows += in_fresh_process(engine, ort.room_bytes, quick=read.quick).rows
        except subprocess.CalledProcessError as error:  # its own words are on standard error
            report.note(f"{engine} ended with code {error.returncode}; it is not in the tables.")
        seconds[engine] = time.monotonic() - began
    took = ", ".join(f"{engine} {one:.0f} s" for engine, one in seconds.items())
    report.note(f"Each process took, from start to end: {took}.")
    points = [
        {
            "engine": row.engine,
            "batch": row.batch,
            "outcome": row.outcome,
            "rise [MiB]": round(row.rise_bytes / MIB, 1) if row.rise_bytes else "",
            "samples/s": round(row.samples_per_s, 3) if row.samples_per_s else "",
            "plans": ",".join(row.plans),
        }
        for row in rows
    ]
    report.table("Points, each engine in a process of its own", points)
    best = {name: largest(rows, name) for name in dict.fromkeys(row.engine for row in rows)}
    found = [
        {
            "engine": name,
            "largest batch": row.batch if row else 0,
            "samples/s": row.samples_per_s if row else "",
        }
        for name, row in best.items()
    ]
    report.table("The largest batch of each", found)
    alone, recomputed = best["ort"], best.get("ort" + GELU)
    if recomputed is None:
        report.note("GELU recomputed fits no batch that ONNX Runtime alone does not fit.")
    grows = alone.batch / recomputed.batch if alone and recomputed else math.inf
    report.claim("Largest batch without plans / with GELU recomputed", grows, at_most=0.5)
    found_by_us = [row for words in RECOMPUTED if (row := best.get(f"ort, {words}"))]
    if alone and found_by_us and not read.quick:
        most = max(row.batch for row in found_by_us)
        report.claim(
            "Largest batch without plans / with layers recomputed", alone.batch / most, at_most=1 / 3
        )
    for name, row in best.items():
        if alone and row and row is not alone and alone.samples_per_s and row.samples_per_s:
            text = f"samples/s: {name} / ort without plans"
            text += f" (ONNX Runtime states {STATED:.2f}, on A100)" if row is recomputed else ""
            report.claim(text, row.samples_per_s / alone.samples_per_s)
    report.write()


def in_fresh_process(engine: str, room: int, *, quick: bool) -> Headline:
    """Measure in a process of its own; return what `searched` does."""
    from ortlab.checks.headline import Headline

    words = [*(["--quick"] if quick else []), "--child", engine, str(room)]
    return Headline.from_dict(in_own_process(__file__, *words))


def searched(engine: str, room: int, *, quick: bool) -> Headline:
    """Search with one engine, in this process."""
    import torch

    from ortlab.checks.headline import ON_CPU, ON_GPU, TINY, run_headline

    torch.set_num_threads(THREADS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = TINY if quick else ON_GPU if device == "cuda" else ON_CPU
    also = RECOMPUTED if engine == "ort" else ()
    return run_headline(engine, size, device, room_bytes=room, also=also)


if __name__ == "__main__":
    main()
