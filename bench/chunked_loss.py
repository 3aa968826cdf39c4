"""With a vocabulary of 50,000, a step with its loss in blocks of rows rises by at most 0.35 of PyTorch's memory.

A GPT-2 (4 layers, hidden 384, 6 heads, dropout as its family has it) trains with AdamW on a batch of 8 sequences of 512
tokens. Each candidate is measured by `lab.memory()` in a process of its own: PyTorch, PyTorch with each layer
checkpointed, torch.compile, and ONNX Runtime without and with `chunked_loss`, also at memory level 1. Losses and the
gradients of the first step are held against PyTorch's, without dropout.

What it costs is the time of a step with `chunked_loss` over one without, in interleaved rounds in one process: stated.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from memory_measurement import MIB
from report import THREADS, Report, arguments, in_own_process

CANDIDATES: dict[str, dict[str, Any]] = {
    "eager": {"engine": "eager"},
    "checkpoint": {"engine": "checkpoint"},
    "compile": {"engine": "compile"},
    "ort": {},
    "ort, chunked_loss": {"chunked_loss": True},
    "ort, memory_level=1": {"memory_level": 1},
    "ort, chunked_loss, memory_level=1": {"chunked_loss": True, "memory_level": 1},
}
STEPS = 2
"""Of each run of a round; the first does not count."""


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        setting = json.loads(sys.argv[-1])
        print(json.dumps({"memory": memory, "numbers": numbers, "times": times}[setting["what"]](setting)))
        return
    read = arguments(__doc__, rounds=3)
    report = Report("chunked_loss", read)

    def child(what: str, **setting: Any) -> Any:
        print(what, setting, file=sys.stderr, flush=True)
        setting |= {"what": what, "quick": read.quick, "rounds": read.rounds}
        return in_own_process(__file__, "--child", json.dumps(setting))

    # The quick setting compiles nothing: that alone would take most of its time.
    names = [name for name in CANDIDATES if not (read.quick and name == "compile")]
    rises = {name: child("memory", candidate=name) for name in names}
    eager = rises["eager"]
    report.table(
        "Rise of a step above its start",
        [
            {"candidate": name, "rise [MiB]": round(rise / MIB, 1), "/ eager": round(rise / eager, 3)}
            for name, rise in rises.items()
        ],
    )
    apart = child("numbers")
    report.table("Relative difference from PyTorch, without dropout", [apart])
    taken = child("times")
    report.table("Time of a step", taken["table"])
    report.claim("Step memory with chunked_loss / eager", rises["ort, chunked_loss"] / eager, at_most=0.35)
    report.claim("Step memory with chunked_loss / without", rises["ort, chunked_loss"] / rises["ort"])
    report.claim(
        "Step memory with chunked_loss, memory_level=1 / checkpointed layers",
        rises["ort, chunked_loss, memory_level=1"] / rises["checkpoint"],
    )
    report.claim("Loss and gradients against PyTorch, worst", max(apart.values()), at_most=1e-5)
    report.claim("Time of a step with chunked_loss / without, median of rounds", taken["ratio"])
    report.write()


def _model(*, quick: bool, dropout: float = 0.1) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(THREADS)
    torch.manual_seed(2024)
    layers, hidden, rows, length, words = (2, 48, 2, 160, 4_000) if quick else (4, 384, 8, 512, 50_000)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": 6, "n_positions": length, "vocab_size": words}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0, use_cache=False))
    tokens = torch.randint(words, (rows, length))
    return model.train(), {"input_ids": tokens, "labels": tokens}


def _trained(*, quick: bool) -> tuple[Any, Any]:
    import torch

    import ortlab

    model, batch = _model(quick=quick)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return ortlab.wrap(model, log_level="ERROR"), step


def memory(setting: dict[str, Any]) -> int:
    """Return how far a step of a candidate rises above its start, in bytes."""
    lab, step = _trained(quick=setting["quick"])
    lab.set(**CANDIDATES[setting["candidate"]])
    lab.step(step, n=1, memory=False, progress=False)
    rise: int = lab.memory().rise_bytes
    return rise


def numbers(setting: dict[str, Any]) -> dict[str, float]:
    """Return the relative difference of the loss and of the worst gradient, in norms, from PyTorch's."""
    import ortlab

    model, batch = _model(quick=setting["quick"], dropout=0.0)
    found = []
    for switched in (False, True):
        lab = ortlab.wrap(model, log_level="ERROR", chunked_loss=True) if switched else None
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.item(), {name: one.grad.clone() for name, one in model.named_parameters()}))
        model.zero_grad()
        if lab is not None:
            lab.unwrap()
    (expected_loss, expected), (loss, gradients) = found
    worst = max(float((gradients[name] - one).norm() / one.norm()) for name, one in expected.items())
    return {"loss": abs(loss / expected_loss - 1), "worst gradient": worst}


def times(setting: dict[str, Any]) -> dict[str, Any]:
    """Return a row for each way, and the ratio of their times, from interleaved rounds."""
    from rounds import ratio

    lab, step = _trained(quick=setting["quick"])
    found: dict[str, list[float]] = {"without": [], "chunked_loss": []}
    lab.step(step, n=1, memory=False, progress=False)
    for number in range(setting["rounds"] + 1):
        for name in list(found)[:: 1 if number % 2 else -1]:
            lab.set(chunked_loss=name == "chunked_loss")
            run = lab.step(step, n=STEPS, memory=False, progress=False)
            if number:
                found[name].append(run.step_ms)
    against = ratio(found, "chunked_loss", "without")
    table = [
        {"way": name, "median [ms]": round(sorted(one)[len(one) // 2]), "least [ms]": round(min(one))}
        for name, one in found.items()
    ]
    table[1]["ratio"] = f"{against.median:.3f} ({against.low:.3f} - {against.high:.3f})"
    table[0]["ratio"] = ""
    return {"table": table, "ratio": against.median}


if __name__ == "__main__":
    main()
