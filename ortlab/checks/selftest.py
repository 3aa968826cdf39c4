"""Running a self-test: the doctor, then each part in a process of its own, within ten minutes or until Ctrl-C.

A GPU can end a process, so findings come from each part's process as they are made.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Final

import psutil

from ortlab import __version__
from ortlab.checks.selftest_parts import FINDING, PARTS, TRYING, Device, Size
from ortlab.engine.devices import check_gpu
from ortlab.engine.installation import versions
from ortlab.errors import OptionError
from ortlab.records.checks import Finding, Outcome, SelfTest

_MIB: Final = 2**20

_THREADS: Final = "OMP_NUM_THREADS"

LIMIT_S: Final = 600.0
"""What all parts together may take, in s; the rest is then not run."""

INSTALLATION: Final = "installation"

NAMES: Final = (INSTALLATION, *PARTS)

_ALL: Final = "all of it"

_SHARE: Final = 0.5
"""Of the time that is left, what a part may take that is not the last: one that hangs leaves time for the others."""

_SECONDS_PER_MINUTE: Final = 60


def run_selftest(
    *,
    gpu: bool = False,
    tiny: bool = False,
    only: Iterable[str] = NAMES,
    show: Callable[[str], object] = print,
    tick: Callable[[str, float], object] = lambda _trial, _seconds: None,
    keep: Callable[[SelfTest], object] = lambda _test: None,
    limit_s: float = LIMIT_S,
) -> SelfTest:
    """Try everything that can be tried on this machine.

    Parameters
    ----------
    gpu
        Whether to train on the first GPU; otherwise on the CPU, where less is tried and the rest is named.
    tiny
        Whether to try as little as shows that it runs; its figures mean little.
    only
        Parts to run, of `NAMES`; the others are named as not run.
    show
        Called with a line for each part and each finding.
    tick
        Told about every second what is being tried, and for how many seconds its part has been running.
    keep
        Given what was found after each part; it is marked as interrupted, so that a file of it says so if this process
        is ended.
    limit_s
        What all parts may take, in s. Each but the last may take half of what is left.

    Returns
    -------
    SelfTest
        What was found; after Ctrl-C, what was found so far.

    Raises
    ------
    OptionError
        If there is no part of a name, or no time.
    InstallError
        If `gpu` is asked for and PyTorch and ONNX Runtime do not both see one.
    """
    chosen = tuple(only)
    _check(chosen, limit_s)
    device: Device = "cuda" if gpu else "cpu"
    size: Size = "tiny" if tiny else "small"
    if gpu:
        check_gpu()
    ends = time.monotonic() + limit_s
    test = SelfTest(device, facts(device), datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def note(one: Finding) -> None:
        nonlocal test
        test = replace(test, findings=(*test.findings, one))
        name = f"{one.part}, {one.name}" if one.name == _ALL else one.name
        show(f"  {one.outcome:<12}  {name}: {one.said}")

    minutes = f"{limit_s / _SECONDS_PER_MINUTE:g} minutes"
    show(f"Self-test on {device}, at most {minutes}. Ctrl-C ends it and keeps what was found.")
    try:
        for number, name in enumerate(NAMES, start=1):
            if name not in chosen:
                note(Finding(name, _ALL, "not run", "not asked for"))
                continue
            left = ends - time.monotonic()
            if left <= 0:
                note(Finding(name, _ALL, "not run", f"the {minutes} were over"))
                continue
            show(f"[{number}/{len(NAMES)}] {name}")
            began = time.monotonic()
            share = left if name == NAMES[-1] else _SHARE * left
            for one in (
                _doctor(device)
                if name == INSTALLATION
                else findings_of(name, command(name, device, size), share, tick)
            ):
                note(one)
            test = replace(test, seconds={**test.seconds, name: round(time.monotonic() - began, 1)})
            keep(replace(test, interrupted=True))
        if not gpu:
            note(Finding("GPU", "all of the above on a GPU", "not run", "it takes `ortlab selftest --gpu`"))
    except KeyboardInterrupt:
        test = replace(test, interrupted=True)
    return test


def write(test: SelfTest, folder: Path) -> tuple[Path, Path]:
    """Write ``selftest.json`` and the readable ``selftest.txt`` into a folder, and return their paths."""
    from ortlab.render import text

    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "selftest.txt"
    report.write_text(text.render(test) + "\n", encoding="utf-8")
    return test.save(folder / "selftest.json"), report


def _check(chosen: tuple[str, ...], limit_s: float) -> None:
    if unknown := [name for name in chosen if name not in NAMES]:
        raise OptionError(f"There is no part {unknown[0]!r}.", fix=f"Parts: {', '.join(NAMES)}.")
    if not limit_s > 0:
        raise OptionError(f"{limit_s:g} s are no time for a self-test.", fix=f"The default is {LIMIT_S:g} s.")


def _doctor(device: Device) -> Iterator[Finding]:
    """Yield what the doctor found, but for the switches that cannot act: the part of the switches names them."""
    from ortlab.checks import doctor as examination

    outcomes: dict[str, Outcome] = {"ok": "held", "warn": "stated", "fail": "did not hold"}
    for check in examination.doctor().checks:
        if check.name.startswith("Switch"):
            continue
        said = check.found + (f" {check.fix}" if check.fix else "")
        # That there is no GPU is in order for the doctor, and nothing that holds.
        outcome: Outcome = "stated" if check.name == "GPU" and device == "cpu" else outcomes[check.status]
        yield Finding(INSTALLATION, check.name, outcome, said)


def facts(device: Device) -> dict[str, str]:
    """Return what a figure may depend on, by name; with "cuda", of the first GPU as well."""
    found = {
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total // _MIB} MiB",
        _THREADS: os.environ.get(_THREADS, "not set"),
        "python": platform.python_version(),
        "ortlab": __version__,
        **versions(),
    }
    if device == "cuda":
        import torch

        one = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": one.name,
            "compute capability": f"{one.major}.{one.minor}",
            "GPU memory": f"{one.total_memory // _MIB} MiB",
            "torch CUDA": str(torch.version.cuda),
        }
    return found


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
    """Yield the findings of a part, each as soon as it is made."""
    # Where the part's process ends in the middle of a trial, that trial has failed, and another process goes on behind
    # it.
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
