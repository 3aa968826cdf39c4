"""A step of ONNX Runtime whose tensors are captured, looked at and written takes at most twice as long as one without.

Both are training steps of one model with the same graph, in turns. Captured are what each module takes and returns, the
gradients of that, the parameters' gradients and the updated parameters; of each the facts are computed and the whole
tensor is written to a file. What that is in bytes is stated. The distances to another run, which need a second file,
are no part of it, as upstream's subscriber has none.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from typing import Any

from report import THREADS, Report, arguments

SIZES = {"BERT": (4, 256, 8, 128), "GPT-2": (4, 256, 8, 128), "ViT": (4, 256, 64, 0)}
QUICK = {"BERT": (1, 32, 2, 8)}


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=9)
    import torch

    torch.set_num_threads(THREADS)
    report = Report("capture_overhead", read)
    rows = []
    for family, size in (QUICK if read.quick else SIZES).items():
        without, captured, written, count = measure(family, size, read.rounds)
        rows.append(
            {
                "model": family,
                "without [ms]": statistics.median(without),
                "captured [ms]": statistics.median(captured),
                "ratio": statistics.median(b / a for a, b in zip(without, captured, strict=True)),
                "tensors": count,
                "bytes per step": written,
            }
        )
    report.table("A training step with and without capture: medians", rows)
    report.claim("Captured / without, worst model", max(row["ratio"] for row in rows), at_most=2.0)
    report.write()


def measure(family: str, size: tuple[int, int, int, int], rounds: int) -> tuple[list, list, int, int]:
    """Return the times of both kinds of step, the bytes written for one, and how many tensors it has."""
    import torch
    from models import batches, families

    import ortlab
    from ortlab.engine.apart import built_apart
    from ortlab.engine.capture import Capture
    from ortlab.parity.comparing import Reference
    from ortlab.parity.observation import Observation
    from ortlab.parity.tensor_store import stored

    layers, hidden, batch_size, length = size
    model = families(layers, hidden)[family]("eager")
    batch = batches(family, 1, batch_size, length)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Any:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, log_level="ERROR")
    lab.step(step, progress=False)
    without, captured = [], []
    with stored() as store, contextlib.ExitStack() as stack:
        reference = Reference(store)
        capture = Capture(lambda _mark, _tensor: None)
        observation = Observation(model, reference.take, capture)
        capture.receive = observation.captured
        seen = observation.stepping(step)
        own = lab._ort._sessions  # noqa: SLF001 - the plain step keeps its session
        stack.enter_context(built_apart(lab._ort))  # noqa: SLF001
        with observation.watching(), capture.active():
            seen()  # builds
        apart = lab._ort._sessions  # noqa: SLF001
        before = store.number_of_bytes
        gc.collect()
        for number in range(rounds + 1):  # the first round warms up
            lab._ort._sessions = own  # noqa: SLF001
            plain = timed(step)
            lab._ort._sessions = apart  # noqa: SLF001
            with observation.watching(), capture.active():
                looked = timed(seen)
            if number:
                without.append(plain)
                captured.append(looked)
        written = (store.number_of_bytes - before) // (rounds + 1)
        count = len([site for site in reference.facts if site.step == observation.step])
    lab.unwrap(forget=True)
    return without, captured, written, count


def timed(step: Any) -> float:
    """Return what a step takes, in ms."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1000


if __name__ == "__main__":
    main()
