"""A part of the self-test in a process of its own, because a GPU can end a process: findings come as they are made."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Final

from ortlab.checks.selftest_trial import FINDING, TRYING, Device, Size
from ortlab.records.selftest import Finding

_TICK_S: Final = 1.0
_LAST_WORDS: Final = 300
"""Characters of what a process said last."""

_REST: Final = "the rest of it"
_ENDED: Final = "ENDED"
"""What the last of the lines begins with; the exit code stands behind."""

# ortlab's folder goes to the end of the path, as for the doctor's process.
_RUN: Final = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("ortlab.checks.selftest_parts", run_name="__main__", alter_sys=True)
"""


def command(part: str, device: Device, size: Size) -> list[str]:
    """Return the command that runs a part; the names of the trials to leave out, as JSON, come behind it."""
    return [sys.executable, "-c", _RUN, str(Path(__file__).parents[2]), part, device, size]


def findings_of(
    part: str,
    command: Sequence[str],
    limit_s: float,
    tick: Callable[[str, float], object] = lambda _trial, _seconds: None,
) -> Iterator[Finding]:
    """Yield the findings of a part, each as soon as it is made.

    Where the part's process ends in the middle of a trial, that trial has failed, and another process goes on behind
    it. After `limit_s` seconds the process is ended. `tick` is told about every second what is being tried, and for how
    many seconds the part has been running.
    """
    began = time.monotonic()
    tried: list[str] = []
    while True:
        trial, code = "", 0
        with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
            with closing(_lines([*command, json.dumps(tried)], errors, began + limit_s)) as lines:
                for line in lines:
                    if line.startswith(TRYING):
                        trial = json.loads(line.removeprefix(TRYING))
                        tried += [trial] * bool(trial)
                    elif line.startswith(FINDING):
                        yield Finding(**json.loads(line.removeprefix(FINDING)))
                    elif line.startswith(_ENDED):
                        code = int(line.removeprefix(_ENDED))
                    tick(trial, time.monotonic() - began)
            errors.seek(0)
            said = (errors.read().strip().splitlines() or [""])[-1][:_LAST_WORDS]
        if code == 0:
            return
        over = time.monotonic() - began >= limit_s
        how = f"it had not ended after {limit_s:.0f} s" if over else _end(code, said)
        yield Finding(part, trial or _REST, "failed", how)
        if over and trial:
            yield Finding(part, _REST, "not run", f"the {limit_s:.0f} s of this part were over")
        if over or not trial:
            return


def _lines(command: Sequence[str], errors: IO[str], ends: float) -> Generator[str, None, None]:
    """Yield what a process prints, "" about every second, and at last `_ENDED` with its exit code."""
    said: queue.Queue[str | None] = queue.Queue()
    # A session of its own: Ctrl-C is for this process, which then ends that one.
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
    )
    reader = threading.Thread(target=_read, args=(child.stdout, said), daemon=True)
    reader.start()
    try:
        while (left := ends - time.monotonic()) > 0:
            try:
                line = said.get(timeout=min(left, _TICK_S))
            except queue.Empty:
                line = ""
            if line is None:
                break
            yield line
        else:
            child.kill()
        yield f"{_ENDED}{child.wait()}"
    finally:
        child.kill()
        child.wait()
        reader.join(_TICK_S)


def _read(stream: IO[str] | None, said: queue.Queue[str | None]) -> None:
    assert stream is not None  # noqa: S101 - a pipe was asked for
    with stream:
        for line in stream:
            said.put(line)
    said.put(None)


def _end(code: int, said: str) -> str:
    names = {-one.value: one.name for one in signal.Signals}
    how = f"was ended by {names[code]}" if code in names else f"ended with code {code}"
    return f"its process {how}" + (f": {said}" if said else "")
