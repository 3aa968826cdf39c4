"""A training step on ONNX Runtime takes at most as long as on PyTorch, on the CPU, with the default switches.

A step is forward and backward of a BERT for masked-language modelling (4 layers, hidden 512, 8 heads, vocabulary
30522, batch 8, sequence 128, attention by `scaled_dot_product_attention`), in float32 on two threads. The ratio is
taken once more with AdamW's step. Then each switch that this depends on is set to its other value, alone, against the
defaults: what one above 1 costs, is what the default gains.

The claim compares elapsed time. Beside it stands the CPU time of the process, which other work on the machine disturbs
less; it includes what PyTorch's threads spend waiting for each other, unless GOMP_SPINCOUNT=0 is set.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from report import THREADS, Report, arguments
from rounds import Times, interleave, ratio, rows

ALTERNATIVES = {
    "aten_backward": False,
    "aten_cross_entropy": False,
    "intra_op_spinning": True,
    "cpu_memory_arena": False,
    "compute_optimizer": False,
}


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=20)
    import torch
    from models import bert, tiny, tokens

    torch.set_num_threads(THREADS)
    report = Report("cpu_step", read)
    model, inputs = tiny() if read.quick else (bert(4, 512), tokens(8, 128))
    setting = "a tiny model" if read.quick else "BERT, 4 layers, hidden 512, batch 8, length 128"
    report.note(f"Widest vector instructions that PyTorch uses: {torch.backends.cpu.get_cpu_capability()}")

    elapsed, cpu = compare(model, inputs, {"PyTorch": None, "ORT": {}}, read.rounds)
    report.table(f"Forward and backward, elapsed: {setting}", rows(elapsed))
    report.table("The same, CPU time of both threads", rows(cpu))
    trained, _ = compare(model, inputs, {"PyTorch": None, "ORT": {}}, read.rounds, optimize=True)
    report.table("Forward, backward and AdamW, elapsed", rows(trained))
    against = ratio(elapsed, "ORT", "PyTorch")
    report.table(
        "Ratios",
        [
            against.row("ORT / PyTorch"),
            ratio(cpu, "ORT", "PyTorch").row("the same, CPU time"),
            ratio(trained, "ORT", "PyTorch").row("the same with AdamW, elapsed"),
        ],
    )

    table = []
    for name, value in ALTERNATIVES.items():
        sides = {"defaults": {}, "other": {name: value}}
        times, cpu_times = compare(model, inputs, sides, max(read.rounds // 2, 2))
        row = ratio(times, "other", "defaults").row(f"{name}={value}")
        table.append(row | {"CPU time": ratio(cpu_times, "other", "defaults").median})
    report.table("One switch at a time, against the defaults", table)
    report.claim("ORT / PyTorch, median of rounds", against.median, at_most=1.00)
    report.claim("ORT / PyTorch with AdamW, median of rounds", ratio(trained, "ORT", "PyTorch").median)
    report.write()


def compare(
    model: object,
    inputs: dict,
    sides: dict[str, dict[str, object] | None],
    rounds: int,
    *,
    optimize: bool = False,
) -> tuple[Times, Times]:
    """Time steps of copies of a model: on PyTorch for None, else on ORT with these switches.

    Returns
    -------
    elapsed, cpu
        Seconds of each round: on the clock, and of CPU time used by the process.
    """
    import ortlab

    candidates, labs = {}, []
    cpu: Times = {name: [] for name in sides}
    for name, switches in sides.items():
        module = copy.deepcopy(model)
        if switches is not None:
            labs.append(ortlab.wrap(module, options=ortlab.Options(log_level="ERROR", **switches)))
        candidates[name] = step(module, inputs, cpu[name], optimize=optimize)
    elapsed = interleave(candidates, rounds, warm_up=3)
    for lab in labs:
        assert lab.status.executed_by == "ort"
        lab.unwrap(forget=True)
    return elapsed, {name: values[-rounds:] for name, values in cpu.items()}


def step(module: object, inputs: dict, cpu: list[float], *, optimize: bool) -> Callable[[], float]:
    """Return what is timed; the CPU time of each step is appended to `cpu`."""
    from torch.optim import AdamW

    optimizer = AdamW(module.parameters(), lr=1e-5)

    def run() -> float:
        module.zero_grad(set_to_none=True)
        start, cpu_start = time.perf_counter(), time.process_time()
        module(**inputs)["loss"].backward()
        if optimize:
            optimizer.step()
        elapsed = time.perf_counter() - start
        cpu.append(time.process_time() - cpu_start)
        return elapsed

    return run


if __name__ == "__main__":
    main()
