"""Verdicts: 20 comparisons of equal settings are silent; of 20 with a known difference 15 speak, and all rightly.

The model is a BERT (2 layers, hidden 128, batch 8, sequence 64, AdamW, no dropout). Equal settings are run in turns by
`lab.compare`; in every second comparison a busy loop in another process takes a core for a part of the time. The known
differences are memory level 1 and 2 against 0, of which recomputing takes more time and less memory, in turns; and
twice the batch, in runs one after another. A verdict is "faster", "slower", "less memory" or "more memory".
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from report import THREADS, Report, arguments

SPOKEN = {"faster", "slower"}
COMPARISONS, QUICK = 20, 2
BATCH_EVERY = 4
"""Every fourth known difference is twice the batch."""

_LOOP = "while True: pass"


def main() -> None:
    """Measure, print and write."""
    read = arguments(__doc__, rounds=6)
    report = Report("verdicts", read)
    import torch
    from budget import language_model

    import ortlab

    torch.set_num_threads(THREADS)
    count = QUICK if read.quick else COMPARISONS
    model, batch = language_model("BERT", *((1, 32, 2, 16, 64) if read.quick else (2, 128, 8, 64, 2048)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    taken = dict(batch)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**taken).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, log_level="ERROR")
    lab.step(step, n=8, progress=False)
    how: dict[str, Any] = {"rounds": read.rounds, "progress": False}
    equal, different = [], []
    for number in range(count):
        loaded = number % 2 == 1
        with busy_for_a_part(number) if loaded else nothing():
            found = lab.compare({"engine": "ort"}, **how)
        equal.append({"load": loaded, **row(found)})
        print(equal[-1], flush=True)
    for number in range(count):
        if number % BATCH_EVERY == BATCH_EVERY - 1:
            found = twice_the_batch(lab, step, taken, batch)
            expected, memory = "slower", "more memory"
        else:
            found = lab.compare(memory_level=1 + number % 2, **how)
            expected, memory = "slower", "less memory"
        different.append({**row(found), "expected": f"{expected}, {memory}"})
        print(different[-1], flush=True)
    report.table("Equal settings", equal)
    report.table("Known differences", different)
    said = [one for one in equal if one["time"] in SPOKEN or one["memory"]]
    report.claim(f"Verdicts spoken of {count} comparisons of equal settings", len(said), at_most=0)
    spoken = [one for one in different if one["time"] in SPOKEN]
    wrong = [one for one in spoken if one["time"] not in one["expected"]]
    wrong += [one for one in different if one["memory"] and one["memory"] not in one["expected"]]
    report.claim("Verdicts in the wrong direction", len(wrong), at_most=0)
    report.claim(
        f"Silent of {count} comparisons with a known difference", count - len(spoken), at_most=count // 4
    )
    report.claim("The same, on memory", sum(not one["memory"] for one in different), at_most=count // 4)
    report.write()


def row(found: Any) -> dict[str, Any]:
    """Return what a comparison of two says."""
    one = found.contrasts[0]
    return {
        "configuration": one.name,
        "ratio": round(one.time_ratio, 3),
        "low": round(one.time_low, 3),
        "high": round(one.time_high, 3),
        "time": one.verdict,
        "memory ratio": round(one.memory_ratio or 0.0, 3),
        "memory": one.memory,
        "why not": one.time.reason,
    }


def twice_the_batch(lab: Any, step: Any, taken: dict[str, Any], batch: dict[str, Any]) -> Any:
    """Run a batch and one of twice its size, one after the other, and compare the runs."""
    import torch

    first = lab.step(step, n=20, progress=False)
    taken.update({name: torch.cat([value, value]) for name, value in batch.items()})
    try:
        second = lab.step(step, n=20, progress=False)
    finally:
        taken.update(batch)
    found = lab.compare(first.number, second.number)
    lab.step(step, n=8, progress=False)
    return found


@contextmanager
def busy_for_a_part(seed: int) -> Iterator[None]:
    """Let another process keep a core busy, for some seconds that begin at some time."""
    draw, over = random.Random(seed), threading.Event()

    def load() -> None:
        if over.wait(draw.uniform(0.5, 4.0)):
            return
        loop = subprocess.Popen([sys.executable, "-c", _LOOP])
        over.wait(draw.uniform(2.0, 8.0))
        loop.kill()
        loop.wait()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def nothing() -> Iterator[None]:
    """Let the machine be."""
    time.sleep(0)
    yield


if __name__ == "__main__":
    main()
