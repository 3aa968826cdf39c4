"""Train a few units with ORT and with PyTorch, and compare: `python -m ortlab.engine.selftest`.

The doctor runs it in a process of its own, because a broken installation may end the process. Each stage
writes one line of JSON as soon as it is done, so that what came before a crash is known.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ortlab.engine import devices as cuda

if TYPE_CHECKING:
    import torch

Findings: TypeAlias = dict[str, Any]


def load() -> Findings:
    """Import ORTModule beside the installed torch; return the versions imported and the state of the extensions."""
    # "aten", "functions" and "cache" are those of `ortlab.engine.extensions.ExtensionStatus`.
    from ortlab import engine
    from ortlab.engine import extensions

    engine.load()
    import onnxruntime
    import torch

    status = dataclasses.asdict(extensions.status())
    versions = {"torch": torch.__version__, "onnxruntime": onnxruntime.__version__}
    return versions | status | {"cache": str(status["cache"])}


def devices() -> Findings:
    """Look for the driver, GPUs, and what ONNX Runtime needs to use them."""
    # "driver" and "driver_fault" are those of `ortlab.engine.devices.Driver`; "gpus" are those that torch sees, with
    # free and total memory in bytes (None where it cannot be asked); "torch_cuda" is the CUDA that torch was built for,
    # or None; "libraries" are `ortlab.engine.devices.Found`, none unless ORT has a CUDA provider.
    import onnxruntime
    import torch

    driver = cuda.driver()
    found = cuda.examine() if cuda.provider() else ()
    return {
        "driver": driver.cuda,
        "driver_fault": driver.fault,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "torch_cuda": torch.version.cuda,
        "providers": onnxruntime.get_available_providers(),
        "libraries": [dataclasses.asdict(one) | {"serves": one.serves} for one in found],
    }


def _gpu(index: int) -> Findings:
    import torch

    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        free, total = None, None
        fault = str(error).splitlines()[0]
    else:
        fault = ""
    facts = torch.cuda.get_device_properties(index)
    capability = (facts.major, facts.minor)
    return {"name": facts.name, "capability": capability, "free": free, "total": total, "fault": fault}


def provider() -> Findings:
    """Load ORT's CUDA provider, where there is a driver and every library; it ends the process if it cannot start."""
    # "why" says why it was not tried.
    file = cuda.provider()
    if file is None:
        return {"loaded": False, "why": "this ONNX Runtime has none"}
    if cuda.driver().cuda is None:
        return {"loaded": False, "why": "there is no driver"}
    if not all(one.serves for one in cuda.preload()):
        return {"loaded": False, "why": "libraries are missing"}
    import ctypes

    import onnxruntime  # noqa: F401 - the provider asks it for its host

    ctypes.CDLL(str(file.with_name("libonnxruntime_providers_shared.so")), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(file))
    return {"loaded": True, "why": ""}


def on_gpu() -> Findings:
    """Take the step of `train` on the first GPU, with ORT's memory from torch's pool; nothing where there is none."""
    # "allocator" says what is wrong with the bridge to that pool; the rest is from `_compare`.
    import torch

    if not torch.cuda.is_available() or cuda.provider() is None:
        return {}
    from ortlab.engine.extensions import allocator_fault

    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4)).cuda()
    allocator = allocator_fault()
    return _compare(model, torch.arange(6, device="cuda").reshape(2, 3)) | {"allocator": allocator}


def train() -> Findings:
    """Take one step of an embedding, which ORT calls PyTorch back for, and a 4-unit linear layer."""
    import torch

    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4))
    return _compare(model, torch.arange(6).reshape(2, 3))


def functions() -> Findings:
    """Take one step of a 4-unit linear layer and an autograd Function, which ORT calls back as Python code."""
    import torch

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)
            return value * value

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (value,) = ctx.saved_tensors
            return 2 * value * gradient

    class Squared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = Square.apply(self.linear(value))
            return result

    return _compare(Squared(), torch.linspace(-1, 1, 8).reshape(2, 4))


def _compare(model: torch.nn.Module, value: torch.Tensor) -> Findings:
    """Take a step with PyTorch and one with ORT; raises RuntimeError where it was not ORT that took it."""
    # "difference" is the largest difference of the loss and the gradients, relative to the largest value of each;
    # "nodes" are the types of the nodes that call PyTorch back.
    from ortlab import engine

    wrapped = engine.load().ORTModule(model)
    pairs = zip(_step(model, value), _step(wrapped, value), strict=True)
    difference = max(
        ((by_ort - by_torch).abs().max() / by_torch.abs().max()).item() for by_torch, by_ort in pairs
    )
    manager = wrapped._torch_module._execution_manager(True)  # noqa: FBT003 - ORT's own signature
    if manager._execution_agent is None:
        raise RuntimeError("ORT has no session, so PyTorch took the step")
    types = {node.op_type for node in manager._onnx_models.optimized_model.graph.node}
    return {"difference": difference, "nodes": sorted(types & {"ATen", "PythonOp"})}


def _step(model: torch.nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss and the gradient of each parameter; the gradients are cleared."""
    loss = model(value).square().mean()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return [loss.detach(), *gradients]


STAGES: Final[dict[str, Callable[[], Findings]]] = {
    "load": load,
    "devices": devices,
    "train": train,
    "functions": functions,
    "provider": provider,
    "on_gpu": on_gpu,
}


def main() -> int:
    """Run the stages one after the other, and return 1 if a stage failed, otherwise 0."""
    # The line of a stage that failed has "error" and "fix". Without ORTModule there are no more stages.
    failed = False
    for stage, run in STAGES.items():
        try:
            findings = run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the doctor shows it
            findings = {"error": f"{type(error).__name__}: {error}", "fix": getattr(error, "fix", "")}
            failed = True
        print(json.dumps({"stage": stage} | findings), flush=True)  # noqa: T201 - read by the doctor
        if failed and stage == "load":
            break
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
