"""What a training step takes on one GPU, in time and memory: ONNX Runtime beside PyTorch, float32 and bfloat16.

A step is forward, backward and AdamW (fused) of a model of 12 layers, hidden 768, 12 heads, vocabulary 8192, with a
batch of 16 sequences of 256 tokens, without dropout: float32 as PyTorch multiplies by default, without TF32, and
automatic mixed precision in bfloat16. "ORT, PyTorch's attention" has `sdpa_fallback` on. All take turns in one process;
the clock waits for the GPU before and after each turn. Memory is the peak of PyTorch's pool, which ONNX Runtime takes
its memory from, above what was allocated when the step began.

Everything is stated, nothing is claimed. Without a GPU only `--quick` runs: a tiny model, on the CPU, without memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from report import Report, arguments
from rounds import Times, interleave, ratio

SEQUENCES, LENGTH, VOCABULARY = 16, 256, 8192
STEPS = 5
"""Of each turn, behind one that is not counted."""
MIB = 2**20
CANDIDATES: dict[str, dict[str, Any]] = {
    "PyTorch": {"engine": "eager"},
    "ORT": {"engine": "ort"},
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
    chosen = ["tiny"] if read.quick else read.only or [name for name in MODELS if name != "tiny"]
    if unknown := set(chosen) - set(MODELS):
        raise SystemExit(f"There is no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}.")
    for name in chosen:
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

    import ortlab

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(2024)
    model, batch = MODELS[name]()
    model, batch = model.to(device), {key: value.to(device) for key, value in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    lab = ortlab.wrap(model, name=name, log_level="ERROR")

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def turn(change: dict[str, Any]) -> float:
        lab.set(**{"sdpa_fallback": False} | change)
        step()
        _wait(device)
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        _wait(device)
        return (time.perf_counter() - start) / STEPS

    def turn_of(change: dict[str, Any]) -> Callable[[], float]:
        return lambda: turn(change)

    times: Times = interleave({key: turn_of(change) for key, change in CANDIDATES.items()}, rounds)
    rows = []
    for key, change in CANDIDATES.items():
        turn(change)
        against = ratio(times, key, "PyTorch")
        rows.append(
            {
                "model": name,
                "precision": precision,
                "candidate": key,
                "step [ms]": statistics.median(times[key]) * 1e3,
                "time / PyTorch": against.median,
                "95 % interval": f"{against.low:.3f} - {against.high:.3f}",
                "memory [MiB]": risen(step) if device == "cuda" else "",
                "loss": float(step().detach()),
            }
        )
    lab.unwrap()
    return rows


def risen(step: Callable[[], object]) -> float:
    """Return what a step needs above its start at its peak, in MiB."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _bert() -> tuple[Any, Any]:
    from models import bert, tokens

    return bert(12, 768, heads=12, vocabulary=VOCABULARY), tokens(SEQUENCES, LENGTH, VOCABULARY)


def _gpt2() -> tuple[Any, Any]:
    from models import tokens
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    config = GPT2Config(n_layer=12, n_embd=768, n_head=12, vocab_size=VOCABULARY, **quiet, **ends)
    return GPT2LMHeadModel(config).train(), tokens(SEQUENCES, LENGTH, VOCABULARY)


def _llama() -> tuple[Any, Any]:
    from models import tokens
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=2048,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train(), tokens(SEQUENCES, LENGTH, VOCABULARY)


def _deberta() -> tuple[Any, Any]:
    from models import tokens

    from ortlab.checks.headline import Size, deberta

    model = deberta(Size(12, 768, 12, VOCABULARY, LENGTH, ()))
    for part in model.modules():
        if type(part).__name__ == "Dropout":
            part.p = 0.0
    return model, tokens(SEQUENCES, LENGTH, VOCABULARY)


def _tiny() -> tuple[Any, Any]:
    from models import tiny

    return tiny()


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "BERT": _bert,
    "GPT-2": _gpt2,
    "Llama": _llama,
    "DeBERTa-v2": _deberta,
    "tiny": _tiny,
}


if __name__ == "__main__":
    main()
