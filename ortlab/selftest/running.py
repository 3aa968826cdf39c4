"""Running a self-test: the doctor, then each part in a process of its own, within ten minutes or until Ctrl-C."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from ortlab.engine.versions import versions
from ortlab.errors import InstallError, OptionError
from ortlab.options import Need
from ortlab.selftest.parts import PARTS
from ortlab.selftest.record import Finding, SelfTest

LIMIT_S: Final = 600.0
"""What all parts together may take, in s; the rest is then not run."""

INSTALLATION: Final = "installation"
NAMES: Final = (INSTALLATION, *PARTS)

# ortlab's folder goes to the end of the path, as for the doctor's process.
_CHILD: Final = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("ortlab.selftest.parts", run_name="__main__", alter_sys=True)
"""
_LAST_WORDS: Final = 300


def run_selftest(
    *,
    gpu: bool = False,
    tiny: bool = False,
    only: Iterable[str] = NAMES,
    show: Callable[[str], None] = print,
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
        Called with a line for each finding.
    limit_s
        What all parts may take, in s.

    Returns
    -------
    SelfTest
        What was found; after Ctrl-C, what was found so far.

    Raises
    ------
    OptionError
        If there is no part of a name.
    InstallError
        If `gpu` is asked for and PyTorch and ONNX Runtime do not both see one.
    """
    chosen = tuple(only)
    if unknown := [name for name in chosen if name not in NAMES]:
        raise OptionError(f"There is no part {unknown[0]!r}.", fix=f"Parts: {', '.join(NAMES)}.")
    device, size = "cuda" if gpu else "cpu", "tiny" if tiny else "small"
    if gpu:
        _check_gpu()
    started = time.monotonic()
    test = SelfTest(device, _machine(device), datetime.now(timezone.utc).isoformat(timespec="seconds"))

    def note(one: Finding) -> None:
        nonlocal test
        test = replace(test, findings=(*test.findings, one))
        show(f"  {one.name}: {one.outcome}: {one.said}")

    try:
        for number, name in enumerate(NAMES, start=1):
            left = limit_s - (time.monotonic() - started)
            if name not in chosen:
                note(Finding(name, "all of it", "not run", "not asked for"))
                continue
            if left <= 0:
                note(Finding(name, "all of it", "not run", f"the {limit_s:.0f} seconds were over"))
                continue
            show(f"[{number}/{len(NAMES)}] {name}")
            began = time.monotonic()
            for one in _doctor() if name == INSTALLATION else _part(name, device, size, left):
                note(one)
            test = replace(test, seconds={**test.seconds, name: round(time.monotonic() - began, 1)})
        if not gpu:
            note(
                Finding("GPU", "all of the above on a GPU", "not run", "asked for by `ortlab selftest --gpu`")
            )
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


def _check_gpu() -> None:
    from ortlab.engine.installation import have

    if Need.CUDA not in have():
        raise InstallError(
            "There is no GPU that PyTorch and ONNX Runtime both see.",
            why="`--gpu` trains on one.",
            fix="`ortlab doctor` names what is missing; without `--gpu` the CPU is tested.",
        )


def _machine(device: str) -> dict[str, str]:
    facts = {"system": platform.platform(), "python": platform.python_version(), "cores": str(os.cpu_count())}
    facts |= versions()
    if device == "cuda":
        import torch

        one = torch.cuda.get_device_properties(0)
        facts |= {
            "GPU": one.name,
            "GPU memory": f"{one.total_memory} bytes",
            "torch CUDA": str(torch.version.cuda),
        }
    return facts


def _doctor() -> Iterable[Finding]:
    from ortlab import doctor

    outcomes = {"ok": "held", "warn": "stated", "fail": "did not hold"}
    for check in doctor.examine().checks:
        said = check.found + (f" {check.fix}" if check.fix else "")
        yield Finding(INSTALLATION, check.name, outcomes[check.status], said)  # type: ignore[arg-type]


def _part(name: str, device: str, size: str, limit_s: float) -> Iterable[Finding]:
    """Run a part in a process of its own; its findings come as they are made."""
    command = [sys.executable, "-c", _CHILD, str(Path(__file__).parents[2]), name, device, size]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        # A session of its own: Ctrl-C is for this process, which then ends that one.
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        ends = time.monotonic() + limit_s
        timer = _Timer(child, limit_s)
        try:
            assert child.stdout is not None  # noqa: S101 - a pipe was asked for
            for line in child.stdout:
                if line.startswith("FINDING"):
                    yield Finding(**json.loads(line.removeprefix("FINDING")))
            code = child.wait()
        finally:
            timer.cancel()
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if time.monotonic() >= ends:
            yield Finding(name, "the rest of it", "not run", "the time was over")
        elif code:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["nothing was said"])[-1]
            yield Finding(
                name, "the rest of it", "failed", f"its process ended with code {code}: {last[:_LAST_WORDS]}"
            )


class _Timer:
    """Ends a process after some seconds."""

    def __init__(self, child: subprocess.Popen[str], seconds: float) -> None:
        import threading

        self._timer = threading.Timer(seconds, child.kill)
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()
