"""The doctor: what is installed, whether it can train, and which command repairs what cannot."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psutil

from ortlab.engine import devices, installation, libraries
from ortlab.errors import InstallError, OptionError
from ortlab.options.options import Need, Options, declaration, switches
from ortlab.options.switches import REASONS
from ortlab.records.checks import Check, Report, Status

if TYPE_CHECKING:
    import torch


# Loss and gradients in float32 differ by rounding only; with so few units that stays far below this.
_TOLERANCE: Final = 1e-5
# Importing takes seconds, and longer from a cold disk; compiling the Function runner comes once on top.
_SELFTEST_SECONDS: Final = 300
_Judge: TypeAlias = tuple[str, Callable[[Mapping[str, Any]], list[Check]]]
"""Name of the check that a stage stands for, and what makes its checks of the findings."""

# ortlab's folder goes to the end of the path: if it is site-packages, it would hide the standard library at the
# front.
_SELFTEST: Final = """
import runpy, sys
sys.path.append(sys.argv[1])
runpy.run_module("ortlab.engine.selftest", run_name="__main__")
"""
_MIB: Final = 2**20


def doctor(environ: Mapping[str, str] | None = None, *, module: torch.nn.Module | None = None) -> Report:
    """Look at everything that training with ONNX Runtime needs; it takes some seconds.

    A few units are trained in a fresh process, so that an installation that ends the process is reported too.

    Parameters
    ----------
    environ
        Environment variables to examine and to run that process with; those of this process if None.
    module
        What the training loop calls: a model with whatever is put around it. If given, the order of the wrappers is
        looked at, too.

    Returns
    -------
    Report
        One check for each thing; nothing raises.
    """
    environ = os.environ if environ is None else environ
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    checks = [
        _installed("Python", installation.check_python, lambda _: python),
        _installed(
            "Packages",
            installation.check_packages,
            lambda found: ", ".join(f"{name} {version}" for name, version in found.items()),
        ),
        _installed("ONNX Runtime", installation.check_onnxruntime, lambda one: f"{one.name} {one.version}"),
    ]
    if all(check.status == "ok" for check in checks):
        trained = _trained(*_selftest(environ), environ)
        checks += trained
        if all(check.status != "fail" for check in trained):
            # What follows imports torch and ONNX Runtime here.
            checks += _switches(installation.have())
    if module is not None:
        checks.append(examine_wrappers(module))
    checks += [
        _cache(),
        *_notebook(),
        _transformers(),
        _compiler(environ),
        _machine(),
        _variables(environ),
    ]
    return Report(tuple(checks))


def examine_wrappers(module: torch.nn.Module) -> Check:
    """Look at the order of the wrappers around a model; `module` is the outermost, what the training loop calls.

    The check is "ok" where ORT is inside what belongs around it, "fail" where the order cannot work, and "warn" where
    nothing runs on ORT; with the nest in one line, and what repairs it.
    """
    from ortlab.runs.wrapping import wrapper_order

    name, order = "Wrappers", wrapper_order(module)
    if order.fault is not None:
        return Check(name, "fail", f"{order.fault.what} {order.fault.why}", order.fault.fix)
    if not order.has_ort:
        return Check(
            name, "warn", f"{order.written}: nothing of it runs on ORT", "Wrap it: ortlab.wrap(model)."
        )
    return Check(name, "ok", order.written)


def _installed(name: str, check: Callable[[], Any], shown: Callable[[Any], str]) -> Check:
    try:
        return Check(name, "ok", shown(check()))
    except InstallError as error:
        return Check(name, "fail", " ".join(filter(None, (error.what, error.why))), error.fix)


def _selftest(environ: Mapping[str, str]) -> tuple[dict[str, dict[str, Any]], str]:
    """Train in a fresh process; return the findings of each stage that ended, and how the process ended."""
    # The user's options are left out: they are examined on their own, and could hide that training works.
    kept = {name: value for name, value in environ.items() if not name.startswith("ORTMODULE_")}
    chosen = Options(log_level="ERROR").environment()
    command = [sys.executable, "-c", _SELFTEST, str(Path(__file__).parents[2])]
    try:
        done = subprocess.run(
            command,
            env=kept | chosen,
            capture_output=True,
            text=True,
            timeout=_SELFTEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"The process that trains did not end within {_SELFTEST_SECONDS} seconds."
    stages = {}
    for line in done.stdout.splitlines():
        if line.startswith('{"stage"'):
            findings = json.loads(line)
            stages[findings.pop("stage")] = findings
    last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    return stages, f"The process that trains ended with code {done.returncode}: {last}"


def _trained(stages: Mapping[str, dict[str, Any]], end: str, environ: Mapping[str, str]) -> list[Check]:
    def one(judge: Callable[[str, Mapping[str, Any]], Check], name: str) -> _Judge:
        return name, lambda findings: [judge(name, findings)]

    judges: dict[str, _Judge] = {
        "load": one(_load, "ORTModule"),
        "devices": ("GPU", lambda findings: gpu_checks(findings, environ)),
        "train": one(_step, "Training step"),
        "functions": one(_step, "Autograd Functions"),
        "provider": ("CUDA provider", provider_check),
        "on_gpu": ("GPU step", lambda findings: gpu_step(findings, lambda name: _step(name, findings))),
    }
    checks = []
    for stage, (name, judge) in judges.items():
        findings = stages.get(stage)
        if findings is None:
            checks.append(
                Check(name, "fail", end, f"Run `{sys.executable} -m ortlab.engine.selftest` to see it all.")
            )
            break
        if "error" in findings:
            checks.append(Check(name, "fail", findings["error"], findings["fix"]))
            if stage == "load":
                break
        else:
            checks += judge(findings)
    return checks


def _load(name: str, findings: Mapping[str, Any]) -> Check:
    found = (
        f"onnxruntime {findings['onnxruntime']} beside torch {findings['torch']}; "
        f"operators by {findings['aten']}, Functions by {findings['functions']}"
    )
    if findings["functions"].startswith("unavailable"):
        fix = "Install a C++ compiler, then run `ortlab build`; only models with autograd Functions need it."
        return Check(name, "warn", found, fix)
    return Check(name, "ok", found)


def _step(name: str, findings: Mapping[str, Any]) -> Check:
    difference = findings["difference"]
    found = f"executed by ORT; loss and gradients differ from PyTorch's by {difference:.1e} (relative)"
    # Written so that nan fails.
    if not difference <= _TOLERANCE:
        return Check(
            name, "fail", found, "Install the versions of requirements/constraints.txt, then report it."
        )
    return Check(name, "ok", found)


def _switches(have: Collection[Need]) -> list[Check]:
    """Name the switches that cannot act here, by what they need; a machine without a GPU is no fault."""
    lacking: dict[Need, list[str]] = {}
    for one in switches():
        needs = one.needs + (declaration(one.part_of).needs if one.part_of else ())
        for need in dict.fromkeys(needs):
            if need not in have:
                lacking.setdefault(need, []).append(one.name)
    checks = []
    for need, names in lacking.items():
        title = f"Switches ({need.value.replace('_', ' ')})"
        checks.append(Check(title, "ok", f"{', '.join(names)}: cannot act here; each {REASONS[need]}"))
    broken = [
        Check(f"Switch {one.name}", "ok", f"{one.name} {one.broken}") for one in switches() if one.broken
    ]
    return checks + broken


def _cache() -> Check:
    folder = libraries.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fix = f"Set {libraries.CACHE_VARIABLE} to a folder that can be written."
        return Check("Cache folder", "warn", f"{folder} cannot be written: {error.strerror}", fix)
    return Check("Cache folder", "ok", str(folder))


def _notebook() -> list[Check]:
    checks = []
    # The first major versions with the protocol that the panel speaks.
    for name, first in {"ipywidgets": 8, "jupyterlab": 4, "anywidget": 0}.items():
        version = _version(name)
        if version is None:
            checks.append(
                Check(name, "warn", "not installed: no panel", f"Run `{installation.pip('install', name)}`.")
            )
        elif int(version.split(".")[0]) < first:
            fix = f"Run `{installation.pip('install', f'{name}>={first}')}`."
            checks.append(Check(name, "warn", f"{version} is too old for the panel", fix))
        else:
            checks.append(Check(name, "ok", version))
    return checks


def _transformers() -> Check:
    version = _version("transformers")
    return Check(
        "transformers", "ok", version or "not installed; only `ortlab demo` and the tutorials need it"
    )


def _compiler(environ: Mapping[str, str]) -> Check:
    """Look for the compiler that Inductor will ask for: that of CXX, or its default (`torch._inductor.config.cpp`)."""
    wanted = environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(wanted, path=environ.get("PATH"))
    lacking = f'{wanted} is not installed; on a CPU, engine="compile" needs it'
    return Check("C++ compiler", "ok", found or lacking)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Check:
    memory = psutil.virtual_memory()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{usable} cores; {memory.available // _MIB} of {memory.total // _MIB} MiB of memory are free"
    return Check("Machine", "ok", found)


def _variables(environ: Mapping[str, str]) -> Check:
    name = "Variables"
    try:
        _, notes = Options.from_environment(environ)
    except OptionError as error:
        return Check(name, "fail", " ".join(filter(None, (error.what, error.why))), error.fix)
    odd = [note for note in notes if " sets " not in note]
    if odd:
        return Check(name, "warn", " ".join(notes), "Unset those that are old or unknown.")
    return Check(name, "ok", " ".join(notes) or "no ORTMODULE_* variable changes an option")


_LITTLE: Final = 512 * _MIB
"""Free memory below which not even a CUDA context, cuBLAS and cuDNN of two CUDA versions fit beside a model."""

_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_TORCH: Final = "Install a torch for CUDA: https://pytorch.org/get-started/locally/"
_DRIVER: Final = (
    "Install a driver from https://www.nvidia.com/drivers; `nvidia-smi` shows the one that is there."
)


def gpu_checks(findings: Mapping[str, Any], environ: Mapping[str, str]) -> list[Check]:
    """Judge what `ortlab.engine.selftest.devices` found under these environment variables."""
    # Where there is neither a driver nor a CUDA build of ONNX Runtime, one check says that there is no GPU. What only
    # matters on a GPU is "warn" where none is there, and "fail" where one is. `findings` may have been through JSON.
    by_ort = "CUDAExecutionProvider" in findings["providers"]
    if findings["driver"] is None and not findings["gpus"] and not by_ort:
        return [Check("GPU", "ok", "not present: the CPU will be used")]
    checks = [_driver(findings), _gpu(findings, environ, by_ort=by_ort)]
    if by_ort:
        lacking: Status = "fail" if findings["gpus"] else "warn"
        checks += [_library(one, lacking) for one in findings["libraries"]]
    if by_ort and findings["gpus"]:
        checks += [_memory(findings["gpus"]), _kernels(findings["gpus"]), _versions(findings)]
    return checks


def provider_check(findings: Mapping[str, Any]) -> list[Check]:
    """Judge what `ortlab.engine.selftest.provider` found; nothing where there was nothing to load."""
    if not findings["loaded"]:
        return []
    return [Check("CUDA provider", "ok", "loads, with every library that it needs")]


def gpu_step(findings: Mapping[str, Any], step: Callable[[str], Check]) -> list[Check]:
    """Judge what `ortlab.engine.selftest.on_gpu` found; nothing where there is no GPU."""
    if not findings:
        return []
    fault = findings["allocator"]
    found = "ONNX Runtime takes its memory from torch's pool"
    bridge = Check("Allocator bridge", "ok", found)
    if fault:
        found = f"{fault}; without it each keeps a pool of its own, and neither can reuse what the other has freed"
        bridge = Check("Allocator bridge", "warn", found, "Set lab.set(external_gpu_allocator=False).")
    return [step("GPU step"), bridge]


def _driver(findings: Mapping[str, Any]) -> Check:
    name, driver = "NVIDIA driver", findings["driver"]
    if driver is None:
        return Check(name, "warn", f"none ({devices.DRIVER} is not there): the CPU will be used", _DRIVER)
    runs, least = installation.dotted(tuple(driver)), installation.dotted(devices.LEAST_DRIVER)
    if tuple(driver) < devices.LEAST_DRIVER:
        found = f"too old: it runs CUDA up to {runs}, and ONNX Runtime's libraries need one for {least}"
        return Check(name, "warn", f"{found}: the CPU will be used", _DRIVER)
    torch_cuda = findings["torch_cuda"]
    if torch_cuda and int(torch_cuda.split(".")[0]) > driver[0]:
        found = f"too old for torch: it runs CUDA up to {runs}, and torch was built for {torch_cuda}"
        return Check(name, "warn", found, f"{_DRIVER} Or install a torch for CUDA {driver[0]}.")
    if findings["driver_fault"]:
        return Check(name, "warn", f"runs CUDA up to {runs}; but {findings['driver_fault']}", _DRIVER)
    return Check(name, "ok", f"runs CUDA up to {runs}")


def _gpu(findings: Mapping[str, Any], environ: Mapping[str, str], *, by_ort: bool) -> Check:
    name, names = "GPU", ", ".join(one["name"] for one in findings["gpus"])
    if findings["gpus"] and by_ort:
        return Check(name, "ok", names)
    if findings["gpus"]:
        found = f"{names}, which this ONNX Runtime cannot use: the CPU will be used"
        swap = (
            f"{installation.pip('uninstall', '-y', installation.CPU)} && "
            f"{installation.pip('install', 'ortlab[cuda]')}"
        )
        return Check(name, "warn", found, f"Run `{swap}`.")
    if findings["driver"] is None:
        return Check(name, "ok", "not present: the CPU will be used")
    if _VISIBLE in environ:
        found = f"{_VISIBLE}={environ[_VISIBLE]!r} lets no GPU be seen: the CPU will be used"
        return Check(name, "warn", found, f"Run `unset {_VISIBLE}`, or set it to 0 for the first.")
    if not findings["torch_cuda"]:
        return Check(name, "warn", "a driver, and a torch without CUDA: the CPU will be used", _TORCH)
    return Check(name, "warn", "a driver, but torch sees no GPU: the CPU will be used", _DRIVER)


def _library(one: Mapping[str, Any], lacking: Status) -> Check:
    library = one["library"]
    if one["serves"]:
        return Check(library["name"], "ok", one["path"])
    found = f"{library['soname']} is missing"
    if one["fault"]:
        found = f"{library['soname']} cannot be loaded: {one['fault']}"
    elif one["others"]:
        found = f"{library['soname']} is missing; there is {', '.join(one['others'])}, of another version"
    return Check(library["name"], lacking, found, f"Run `{installation.pip('install', library['package'])}`.")


def _memory(gpus: list[Mapping[str, Any]]) -> Check:
    words, short = [], False
    for index, one in enumerate(gpus):
        if one["free"] is None:
            words.append(f"GPU {index} cannot be asked: {one['fault']}")
            short = True
        else:
            words.append(f"GPU {index}: {one['free'] // _MIB} of {one['total'] // _MIB} MiB are free")
            short = short or one["free"] < _LITTLE
    fix = "`nvidia-smi` lists the processes that hold the rest; end those that are yours." if short else ""
    return Check("GPU memory", "warn" if short else "ok", "; ".join(words), fix)


def _kernels(gpus: list[Mapping[str, Any]]) -> Check:
    name, kinds = (
        "GPU kernels",
        {one["name"]: devices.kernels_for(tuple(one["capability"])) for one in gpus},
    )
    levels = {one["name"]: installation.dotted(tuple(one["capability"])) for one in gpus}
    for gpu, kind in kinds.items():
        if kind == "none":
            found = (
                f"{gpu}: compute capability {levels[gpu]} is older than any that ONNX Runtime has kernels for"
            )
            return Check(name, "fail", found, "Train on the CPU: model.cpu().")
    for gpu, kind in kinds.items():
        if kind == "ptx":
            found = (
                f"{gpu}: compute capability {levels[gpu]} is newer than ONNX Runtime's kernels; the driver compiles "
                "each at its first use, which takes minutes in the first process, and keeps it in ~/.nv/ComputeCache"
            )
            fix = "Run `export CUDA_CACHE_MAXSIZE=4294967296` first, so that all of them are kept."
            return Check(name, "warn", found, fix)
    return Check(name, "ok", ", ".join(f"{gpu}: native ({levels[gpu]})" for gpu in kinds))


def _versions(findings: Mapping[str, Any]) -> Check:
    torch_cuda = findings["torch_cuda"]
    if torch_cuda and torch_cuda.startswith("11."):
        return Check("CUDA versions", "ok", f"torch and ONNX Runtime both use CUDA 11 (torch: {torch_cuda})")
    found = f"torch uses CUDA {torch_cuda} and ONNX Runtime 11.8, each its own libraries, with one driver"
    return Check("CUDA versions", "ok", found)
