"""A step through `lab.module` takes at most 1.01 times as long as the same step through raw ORTModule.

A step is forward and backward of a BERT (4 layers, hidden 512, batch 8, sequence 128). Both sides run in one process
on the same torch, with the same kernels and session options: ORTModule lets idle threads spin and takes none of
PyTorch's kernels, so the lab's switches for that are set alike. What these gain, `cpu_step` measures.
A second raw ORTModule is timed against the first: what their ratio is away from 1, is noise.

What ortlab adds is Python that runs once per call and depends on the number of modules, parameters and inputs, not on
their sizes. So it is measured a second time, as a difference, on a BERT with as many layers and hidden size 16, where
a step is short and noise is small.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from unittest import mock

from report import THREADS, Report, arguments
from rounds import Times, interleave, ratio, rows


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=20)
    import torch
    from models import bert, tokens

    torch.set_num_threads(THREADS)
    report = Report("step_overhead", read)
    layers, hidden, batch, length = (1, 32, 2, 16) if read.quick else (4, 512, 8, 128)
    vocabulary = 64 if read.quick else 30522
    model, inputs = bert(layers, hidden, vocabulary=vocabulary), tokens(batch, length, vocabulary)

    times = compare(model, inputs, read.rounds)
    report.table(
        f"One step: BERT, {layers} layers, hidden {hidden}, batch {batch}, length {length}", rows(times)
    )
    against_raw = ratio(times, "lab.module", "raw ORTModule")
    control = ratio(times, "raw ORTModule again", "raw ORTModule")
    report.table("Ratios", [against_raw.row("lab.module / raw"), control.row("raw again / raw (noise)")])

    small = compare(bert(layers, 16, vocabulary=64), tokens(1, 8, 64), 3 if read.quick else 200)
    report.table(f"One step: BERT, {layers} layers, hidden 16, batch 1, length 8", rows(small))
    # Of the minima: ORTModule's spinning threads make short steps vary by several milliseconds.
    added_us = (min(small["lab.module"]) - min(small["raw ORTModule"] + small["raw ORTModule again"])) * 1e6
    step = min(times["raw ORTModule"])
    parts = fingerprints(model, inputs)
    report.table("Of that, looking for what would need another export", rows(parts, unit="us", scale=1e6))
    report.claim("What ortlab adds to a step [us]", added_us)
    report.claim("The same, as 1 + share of the large step", 1 + added_us / 1e6 / step, at_most=1.01)
    report.claim("lab.module / raw ORTModule, median of rounds", against_raw.median, at_most=1.01)
    report.write()


def compare(model: object, batch: dict, rounds: int) -> Times:
    """Time steps of one model behind a lab and behind ORTModule, twice."""
    import ortlab
    from ortlab.engine import load

    ortmodule = load()
    as_raw = ortlab.Options(
        intra_op_spinning=True, aten_backward=False, aten_cross_entropy=False, log_level="ERROR"
    )
    lab = ortlab.wrap(copy.deepcopy(model), options=as_raw)
    with mock.patch.dict(os.environ, {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"}):
        quiet = ortmodule.DebugOptions(log_level=ortmodule.LogLevel.ERROR)
        raw = [ortmodule.ORTModule(copy.deepcopy(model), quiet) for _ in range(2)]
        sides = {"lab.module": lab.module, "raw ORTModule": raw[0], "raw ORTModule again": raw[1]}
        times = interleave({name: step(side, batch) for name, side in sides.items()}, rounds, warm_up=3)
    assert lab.status.executed_by == "ort"
    lab.unwrap()
    return times


def step(module: object, batch: dict) -> Callable[[], object]:
    """Return what is timed: forward and backward."""

    def run() -> float:
        module.zero_grad(set_to_none=True)
        start = time.perf_counter()
        module(**batch)["loss"].backward()
        return time.perf_counter() - start

    return run


def fingerprints(model: object, batch: dict) -> Times:
    """Time the parts of ortlab's check that the present build still fits, in a step in which nothing has changed."""
    from ortlab.engine.schema import ModuleReader, call_schema

    parts = {"inputs": lambda: call_schema((), batch), "modules, parameters": ModuleReader(model).state}
    return interleave(parts, 200)


if __name__ == "__main__":
    main()
