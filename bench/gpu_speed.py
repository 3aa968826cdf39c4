"""What a training step takes on one GPU, in time and memory: ONNX Runtime beside PyTorch, float32 and bfloat16.

A step is forward, backward and AdamW (fused) of a model of 12 layers, hidden 768, 12 heads, vocabulary 8192, with a
batch of 16 sequences of 256 tokens, without dropout: float32 as PyTorch multiplies by default, without TF32, and
automatic mixed precision in bfloat16. "ORT, PyTorch's attention" has `sdpa_fallback` on. All take turns in one process;
the clock waits for the GPU before and after each turn. Memory is step memory, as `lab.memory` measures it.

Everything is stated, nothing is claimed. Without a GPU only `--quick` runs: a tiny model, on the CPU.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from report import Report, arguments, check_names
from rounds import Times, interleave, ratio

SEQUENCES, LENGTH, VOCABULARY = 16, 256, 8192
STEPS = 5
"""Of each turn, behind one that is not counted."""
MIB = 2**20
FAMILIES = ("BERT", "GPT-2", "Llama", "DeBERTa-v2")
CANDIDATES: dict[str, dict[str, Any]] = {
    "PyTorch": {"engine": "eager"},
    "ORT": {"engine": "ort", "sdpa_fallback": False},
    "ORT, PyTorch's attention": {"engine": "ort", "sdpa_fallback": True},
}


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=5, only="models")
    import torch

    if not torch.cuda.is_available() and not read.quick:
        raise SystemExit(
            "PyTorch sees no GPU: `ortlab doctor` says why. --quick shows on the CPU that this runs."
        )
    report = Report("gpu_speed", read)
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        report.note(f"GPU: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}.")
    precisions = ("float32",) if read.quick else ("float32", "bfloat16")
    rows = []
    check_names("model", read.only, FAMILIES)
    for name in ["tiny"] if read.quick else read.only or FAMILIES:
        for precision in precisions:
            found = measured(name, precision, read.rounds)
            print(*found, sep="\n", flush=True)  # a machine that is lent may be taken away
            rows += found
            torch.cuda.empty_cache()
    report.table("Forward, backward and AdamW", rows)
    for row in rows:
        if row["candidate"] != "PyTorch":
            title = f"{row['model']}, {row['precision']}: {row['candidate']} / PyTorch"
            report.claim(title, row["time / PyTorch"])
    report.write()


def measured(name: str, precision: str, rounds: int) -> list[dict[str, Any]]:
    """Train a model in each way; return a row for each."""
    import torch
    from models import attentions, families, tiny, tokens

    import ortlab
    from ortlab.runs.stopwatch import synchronizer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait = synchronizer(device) or (lambda: None)
    if name == "tiny":
        model, batch = tiny()
    else:
        build = families(12, 768, heads=12, inner=4, vocabulary=VOCABULARY)[name]
        model, batch = build(attentions(name)[-1]), tokens(SEQUENCES, LENGTH, VOCABULARY)
    model.to(device)
    batch = {key: value.to(device) for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    lab = ortlab.wrap(model, name=name, log_level="ERROR")

    def step() -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def turn(change: dict[str, Any]) -> float:
        lab.set(**change)
        step()
        wait()
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        return (time.perf_counter() - start) / STEPS

    times: Times = interleave({key: partial(turn, change) for key, change in CANDIDATES.items()}, rounds)
    rows = []
    for key, change in CANDIDATES.items():
        against = ratio(times, key, "PyTorch")
        rows.append(
            {
                "model": name,
                "precision": precision,
                "candidate": key,
                "step [ms]": statistics.median(times[key]) * 1e3,
                "time / PyTorch": against.median,
                "95 % interval": f"{against.low:.3f} - {against.high:.3f}",
                "step memory [MiB]": lab.memory(step, **change).rise_bytes / MIB,
            }
        )
    lab.unwrap()
    return rows


if __name__ == "__main__":
    main()
