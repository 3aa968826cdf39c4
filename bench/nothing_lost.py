"""What interrupts, failing steps, reruns, threads and damaged files lose, counted: nothing is timed.

python bench/nothing_lost.py                         all
python bench/nothing_lost.py --only threads records  these parts

- interrupts: Ctrl-C at random moments of ten calls, as often once as twice within 60 ms. Afterwards model, optimizer,
  scheduler, scaler, random numbers, switches and ledger are as before the call, or as after a whole one, bit for bit
  and dtype for dtype; the next step has the loss that it had; the call has ended.
- failing steps: 34 ways in which a user's step changes something and fails. All is as before, bit for bit, so is the
  next step, and raised is the user's own exception.
- reruns: 12 steps that hang on state outside the model repeat their losses, or the run says what nothing puts back.
- threads: 12 runs in which two labs, or a lab and another training, run in several threads: as each alone.
- records: damaged files of all that ortlab reads as JSON are read and shown, or refused by an error of ortlab's.

A round is one press and two quick ones in each call, and 50 damaged files. Each case has a process of its own.
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from families import in_a_process
from report import Report, arguments, check_names, one_by_one

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROUNDS = 20
LOADED = ("torch", "onnx", "onnxruntime", "ortlab")
LIMIT_S = 1800


class Part(NamedTuple):
    """One of the five counts."""

    title: str
    file: str
    cases: str = "CASES"  # the names in that file
    quick: str = "QUICK"
    count: str = "count"


PARTS = {
    "interrupts": Part("Interrupts that lose something", "lost_interrupts"),
    "failing steps": Part("Failing steps that leave something", "lost_steps"),
    "reruns": Part(
        "Reruns that differ, and say nothing", "lost_runs", "RERUNS", "QUICK_RERUNS", "count_rerun"
    ),
    "threads": Part(
        "Runs in threads that differ", "lost_runs", "THREADED", "QUICK_THREADED", "count_threads"
    ),
    "records": Part("Damaged files that raise another error than ortlab's", "lost_records"),
}


def main() -> None:
    """Count, print and write."""
    read = arguments(__doc__, rounds=ROUNDS, resumes=True, only="parts")
    warnings.filterwarnings("ignore")
    check_names("part", read.only, PARTS)
    report = Report("nothing_lost", read)
    chosen = {name: part for name, part in PARTS.items() if not read.only or name in read.only}
    asked = {
        f"{name}: {case}": (name, case)
        for name, part in chosen.items()
        for case in getattr(importlib.import_module(part.file), part.quick if read.quick else part.cases)
    }
    found = one_by_one("nothing_lost", read, list(asked), lambda one: counted(*asked[one], read.rounds))
    for name, part in chosen.items():
        rows = [row for row, (of, _) in zip(found, asked.values(), strict=True) if of == name]
        heads = dict.fromkeys(head for row in rows for head in row if head != "which")
        report.table(part.title, [{head: row.get(head, "") for head in heads} for row in rows])
        for row in rows:
            for words in row["which"]:
                report.note(f"{row['case']}: {words}")
        tried = sum(row["tried"] for row in rows)
        report.claim(f"{part.title}, of {tried:,}", sum(row["violations"] for row in rows), at_most=0)
    report.write()


def counted(name: str, case: str, rounds: int) -> dict[str, Any]:
    """Count one case in a process of its own, whose crash or hang is a loss, too."""
    found = in_a_process(child, (name, case, rounds), LOADED, LIMIT_S)
    if found.get("verdict") == "error":
        return {"case": case, "tried": 1, "violations": 1, "which": [found["reason"]]}
    return found


def child(sender: Connection, name: str, case: str, rounds: int) -> None:
    """Count one case and send what was found."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    part = PARTS[name]
    sender.send(getattr(importlib.import_module(part.file), part.count)(case, rounds))
    sender.close()


if __name__ == "__main__":
    main()
