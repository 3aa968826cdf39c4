"""The first step of a new process with the exports of an earlier one on disk, against the first step without.

A step is forward and backward of a BERT (12 layers, hidden 768, batch 2, sequence 128). Each process is fresh; the
clock starts when the model and the batch are there and the libraries are imported, and stops after the first step. The
process that fills the folder is timed as well: it works out the key, watches the trace and writes. Losses of all three
are compared to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from report import REPOSITORY, THREADS, Report, arguments

NAMES = ("without", "filling", "with")


def main() -> None:
    """Measure, print and write."""
    if "--child" in sys.argv:
        print(json.dumps(first_step(sys.argv[-1], quick="--quick" in sys.argv)))
        return
    read = arguments(__doc__, rounds=3)
    from rounds import ratio, rows

    report = Report("export_cache", read)
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    losses = set()
    for _ in range(1 if read.quick else read.rounds):
        with tempfile.TemporaryDirectory(prefix="ortlab-bench-") as folder:
            for name in NAMES:
                found = in_fresh_process("" if name == "without" else folder, read)
                assert found["read"] == (name == "with")
                times[name].append(found["first"])
                losses.add(found["loss"])
    assert len(losses) == 1, losses
    report.table("First step", rows(times, unit="s", scale=1))
    found_ratio = ratio(times, "with", "without")
    report.table(
        "Ratio",
        [found_ratio.row("with / without"), ratio(times, "filling", "without").row("filling / without")],
    )
    report.claim("First step of a new process, with / without the cache", found_ratio.median)
    report.write()


def in_fresh_process(folder: str, read: argparse.Namespace) -> dict[str, object]:
    """Take the first step in a process of its own."""
    command = [sys.executable, __file__, *(["--quick"] if read.quick else []), "--child", folder]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def first_step(folder: str, *, quick: bool) -> dict[str, object]:
    """Take the first step of this process; return its seconds, its loss and whether an export was read."""
    import torch
    from models import bert, tiny, tokens

    import ortlab
    import ortlab.engine.execution

    torch.set_num_threads(THREADS)
    model, batch = tiny() if quick else (bert(12, 768), tokens(2, 128))
    start = time.perf_counter()
    lab = ortlab.wrap(model, export_cache_dir=folder)
    loss = model(**batch)["loss"]
    loss.backward()
    first = time.perf_counter() - start
    assert lab.status.executed_by == "ort"
    was_read = any("was read from" in message.text for message in lab.messages)
    return {"first": first, "loss": loss.item().hex(), "read": was_read}


if __name__ == "__main__":
    main()
