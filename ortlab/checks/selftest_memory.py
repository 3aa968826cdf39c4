"""The parts about memory: how far a step rises, and the headline experiment (row F6) in small."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ortlab.checks.selftest_models import small_model, step_of
from ortlab.checks.selftest_trial import Device, Size, Trial, not_run
from ortlab.records.selftest import Finding

if TYPE_CHECKING:
    from ortlab.lab.lab import Lab

_MIB: Final = 2**20
_LEVEL_1: Final = "ONNX Runtime, memory level 1"


def memory(device: Device, size: Size) -> Iterator[Trial]:
    """Measure how far a step rises above its start: ONNX Runtime, PyTorch, and ONNX Runtime at memory level 1."""
    import ortlab

    module, batch = small_model("BERT", device, wide=size != "tiny")
    lab = ortlab.wrap(module, name="BERT", log_level="ERROR")
    lab.step(step_of(module, batch), n=1, progress=False)
    changes: dict[str, dict[str, Any]] = {"ONNX Runtime": {}, "PyTorch": {"engine": "eager"}}
    for name, change in changes.items():
        yield Trial("memory", name, partial(_risen, name, lab, change))
    if size == "tiny":
        yield not_run("memory", _LEVEL_1, "the tiny form leaves it out")
    else:
        yield Trial("memory", _LEVEL_1, partial(_risen, _LEVEL_1, lab, {"memory_level": 1}))
    lab.unwrap()


def _risen(name: str, lab: Lab, change: dict[str, Any]) -> list[Finding]:
    found = lab.memory(**change)
    said = f"a step rises by {found.rise_bytes / _MIB:,.1f} MiB above its start ({found.label})"
    return [Finding("memory", name, "stated", said, float(found.rise_bytes))]


def headline(device: Device, size: Size) -> Iterator[Trial]:
    """Look for the largest batch under a limit, without plans and with GELU recomputed."""
    yield Trial("headline", "largest batch", partial(_searched, device, size))


def _searched(device: Device, size: Size) -> list[Finding]:
    from ortlab.checks import headline as experiment

    small = experiment.SMALL_ON_GPU if device == "cuda" else experiment.ON_CPU
    found = experiment.run_headline("ort", experiment.TINY if size == "tiny" else small, device)
    alone = experiment.largest(found.rows, "ort")
    recomputed = experiment.largest(found.rows, "ort" + experiment.GELU)
    findings = []
    for name, row in {"without plans": alone, "GELU recomputed": recomputed}.items():
        if row is None:
            findings.append(Finding("headline", name, "did not hold", "no batch fits"))
        else:
            said = f"largest batch {row.batch}, {row.samples_per_s:.3g} samples per second"
            findings.append(Finding("headline", name, "stated", said, float(row.batch)))
    if alone and recomputed and alone.samples_per_s and recomputed.samples_per_s:
        pace = recomputed.samples_per_s / alone.samples_per_s
        said = f"without plans it is {alone.batch / recomputed.batch:.2g} of that with GELU recomputed"
        findings.append(
            Finding.held_to(0.5, "headline", "largest batch", said, alone.batch / recomputed.batch)
        )
        said = f"{pace:.3g} times those without plans (row F6 states {experiment.F6:.3g}, on 16 A100)"
        findings.append(Finding("headline", "samples per second, GELU recomputed", "stated", said, pace))
    return findings
