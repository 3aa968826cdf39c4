"""The parts that train small models: on ONNX Runtime against PyTorch, and with each switch turned the other way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ortlab.checks.selftest_models import NAMES, parted, small_model, step_of, weights
from ortlab.checks.selftest_trial import SAME, Device, Size, Trial, not_run
from ortlab.records.selftest import Finding

if TYPE_CHECKING:
    import torch

    from ortlab.lab.lab import Lab
    from ortlab.options.options import Switch
    from ortlab.records.runs import Run

_STEPS: Final = 4
_FEW: Final = 2
"""Steps with a switch turned: the second loss has the first one's gradients in it."""

_LEFT_ALONE: Final = {
    "cast_allow": "it takes names of operators, and acts on mixed precision",
    "custom_autograd": "off, it refuses models that need it",
    "export_cache_dir": "it takes a folder",
    "fallback_policy": "it acts only where something fails",
    "fallback_retry": "it acts only where something fails",
    "log_level": "it changes only what is written",
    "memory_plan": "the headline experiment runs with one",
    "save_onnx": "it writes into the folder that it is run in",
    "save_onnx_path": "it takes a folder",
    "save_onnx_prefix": "it takes a file's name",
    "skip_check": "it leaves out checks, and changes no figure",
    "triton_config_file": "it takes a file",
    "triton_debug": "it writes into the folder that it is run in",
    "tuning": "it takes minutes",
    "tuning_max_duration_ms": "tuning takes minutes",
    "tuning_results_path": "it takes a folder",
}
"""Switches that are not tried, and why."""


def models(device: Device, size: Size) -> Iterator[Trial]:
    """Train models of the zoo's core by ONNX Runtime and by PyTorch from one start."""
    for name in NAMES:
        if size == "tiny" and name != NAMES[0]:
            yield not_run("models", name, "the tiny form trains one model")
        else:
            yield Trial("models", name, partial(_trained, name, device))


def _trained(name: str, device: Device) -> list[Finding]:
    import ortlab

    module, batch = small_model(name, device)
    start = weights(module)
    lab = ortlab.wrap(module, name=name, log_level="ERROR")
    try:
        run = lab.step(step_of(module, batch), n=_STEPS, progress=False)
        by_ort = weights(module)
        again = lab.set(engine="eager").rerun(progress=False)
        by_torch = weights(module)
    finally:
        lab.unwrap()
    if run.executed_by != "ort":
        return [_not_ort("models", name, run)]
    apart = parted((run.losses, again.losses), (by_ort, by_torch), start)
    said = f"losses, and what {_STEPS} steps did to the weights, differ from PyTorch's by {apart:.2g}"
    return [Finding.held_to(SAME[device], "models", name, said, apart)]


def switches(device: Device, size: Size) -> Iterator[Trial]:
    """Turn each switch the other way, and take the same steps; those that cannot act here say why."""
    import ortlab
    from ortlab.options.options import switches as declared
    from ortlab.options.options import unmet

    module, batch = small_model("BERT", device)
    start = weights(module)
    lab = ortlab.wrap(module, name="BERT", log_level="ERROR")
    default = lab.step(step_of(module, batch), n=_FEW, progress=False)
    end = weights(module)
    tried = 0
    for one in declared():
        why = unmet(one.name, lab.have) or (one.part_of and unmet(one.part_of, lab.have))
        why = why or _LEFT_ALONE.get(one.name, "")
        if not why and size == "tiny" and tried:
            why = "the tiny form tries one switch"
        if why:
            yield not_run("switches", one.name, why)
            continue
        tried += 1
        yield Trial("switches", one.name, partial(_turned, lab, one, default, (start, end), device))
    lab.unwrap()


def other_value(one: Switch) -> Any:
    """Return a value of a switch that is not its default: False for True, another choice, the least number."""
    if one.type is bool:
        return not one.default
    others = [value for value in one.choices if value != one.default]
    return others[0] if others else one.minimum


def _turned(
    lab: Lab, one: Switch, default: Run, ends: tuple[torch.Tensor, torch.Tensor], device: Device
) -> list[Finding]:
    from ortlab.options.options import Options, declaration

    change: dict[str, Any] = {one.name: other_value(one)}
    if one.part_of and not declaration(one.part_of).default:
        change[one.part_of] = True
    start, end = ends
    try:
        run = lab.set(**change).rerun(progress=False)
        here = weights(lab.module)
    finally:
        usual = Options()
        lab.set(**{name: getattr(usual, name) for name in change})
    if run.executed_by != "ort":
        return [_not_ort("switches", one.name, run)]
    apart = parted((run.losses, default.losses), (here, end), start)
    turned = ", ".join(f"{name}={value}" for name, value in change.items())
    said = f"{turned}: losses and weights differ from those of the default by {apart:.2g}"
    return [Finding.held_to(SAME[device], "switches", one.name, said, apart)]


def _not_ort(part: str, name: str, run: Run) -> Finding:
    return Finding(part, name, "did not hold", f"executed by {run.title}: {run.fallback_reason}")
