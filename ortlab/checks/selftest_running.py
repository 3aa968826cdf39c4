"""Running a self-test: the doctor, then each part in a process of its own, within ten minutes or until Ctrl-C."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from ortlab import __version__
from ortlab.checks import selftest_child as child
from ortlab.checks.selftest_parts import PARTS
from ortlab.engine.devices import check_gpu
from ortlab.engine.installation import versions
from ortlab.errors import OptionError
from ortlab.records.selftest import Finding, Outcome, SelfTest

if TYPE_CHECKING:
    from ortlab.checks.selftest_trial import Device, Size

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
            for one in _doctor(device) if name == INSTALLATION else _part(name, device, size, share, tick):
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


def _part(
    name: str, device: Device, size: Size, limit_s: float, tick: Callable[[str, float], object]
) -> Iterator[Finding]:
    return child.findings_of(name, child.command(name, device, size), limit_s, tick)


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
