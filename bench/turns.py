"""Candidates that are timed against each other, each in a process of its own that lives through all rounds.

In one process they would disturb each other's heap: PyTorch's memory is trimmed in another candidate's turn, and its
first step takes up to twice as long. A turn also leaves out its first steps until the page faults of a step have
settled.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from report import CLOCK

SETTLE_AT_MOST = 8
"""Steps that a turn may leave out."""
FEW_FAULTS, ALIKE = 64, 1.1
"""Page faults of a step that count as none, and how many times fewer a step before them may count as as many."""

Answer = dict[str, Any]


class Candidate:
    """A process that answers commands; `script` has to call `serve` where it is started with `--child <name>`."""

    def __init__(self, script: str, name: str) -> None:
        self.name = name
        self.ended = False
        self._process = subprocess.Popen(
            [sys.executable, script, "--child", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str, *arguments: object) -> Answer:
        """Send a command and return what it answers; a process that ends instead has failed."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([command, *arguments]) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._gone()
        for line in process.stdout:
            if line.startswith(_MARK):
                answer: Answer = json.loads(line.removeprefix(_MARK))
                return answer
        return self._gone()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _gone(self) -> Answer:
        self.ended = True
        return {"failed": f"{self.name}: its process ended with {self._process.wait()}"}


_MARK = "ANSWER "


def is_child() -> str:
    """Return the name of the candidate that this process is; empty if it is none."""
    return sys.argv[sys.argv.index("--child") + 1] if "--child" in sys.argv else ""


def serve(commands: dict[str, Callable[..., Answer]]) -> None:
    """Answer the commands of standard input until it ends; what a command raises is its answer, too."""
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            answer = commands[command](*arguments)
        except Exception as error:  # noqa: BLE001 - what one candidate refuses is a row of the table
            answer = {"failed": f"{is_child()}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        print(_MARK + json.dumps(answer), flush=True)


def turn(step: Callable[[], object], seconds: float) -> Answer:
    """Take steps until their page faults have settled, then time as many as fit into a turn, at least three.

    They have settled where a step has none, or as many as the step before: PyTorch takes the memory of large
    convolutions anew in each step.
    """
    settled = False
    former = math.inf
    for _ in range(SETTLE_AT_MOST):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        settled = faults <= FEW_FAULTS or former / ALIKE <= faults <= former * ALIKE
        if settled:
            break
        former = faults
    clock = time.process_time if CLOCK == "processor" else time.perf_counter
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:  # noqa: PLR2004 - fewer have no median
        start = clock()
        step()
        times.append(clock() - start)
    return {"seconds": statistics.median(times), "settled": settled}


def slowest_nodes(lab: Any, step: Callable[[], object], count: int) -> Answer:
    """Name the kinds of nodes that take most of a step on ONNX Runtime, in ms."""
    lab.step(step, n=1, progress=False, memory=False)
    times: Counter[str] = Counter()
    for node in lab.profile(progress=False).nodes:
        times[node.operator.removeprefix("com.microsoft.")] += node.ms
    return {"nodes": ", ".join(f"{kind} {ms:.2f}" for kind, ms in times.most_common(count))}


def in_turns(candidates: Sequence[Candidate], rounds: int) -> tuple[dict[str, list[float]], int, str]:
    """Let candidates that have built something time it; each round begins with another one.

    Returns the seconds of a step in each round by candidate, how many turns never settled, and what failed.
    """
    times: dict[str, list[float]] = {one.name: [] for one in candidates}
    unsettled = 0
    for number in range(rounds):
        first = number % len(candidates)
        for one in (*candidates[first:], *candidates[:first]):
            answer = one.ask("turn")
            if "failed" in answer:
                return times, unsettled, answer["failed"]
            times[one.name].append(answer["seconds"])
            unsettled += not answer["settled"]
    return times, unsettled, ""
