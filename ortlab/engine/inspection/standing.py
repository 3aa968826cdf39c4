"""What can be seen of a model as it stands, before anything runs: devices, dtypes, hooks, mode, weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ortlab.records.preflight import Finding, Kind, Level, Place

if TYPE_CHECKING:
    from ortlab.engine.inspection.places import Places

_SHORT = frozenset({torch.float16, torch.bfloat16})


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device that most of a model is on; the CPU for one without tensors."""
    counts: Counter[torch.device] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        counts[tensor.device] += tensor.numel()
    return counts.most_common(1)[0][0] if counts else torch.device("cpu")


def findings_in_model(model: torch.nn.Module, places: Places) -> Iterator[Finding]:
    """Yield what a look at the model's parts shows."""
    yield from _mode(model, places)
    device = device_of(model)
    for path, part in model.named_modules():
        if (part._backward_hooks or part._backward_pre_hooks) and part is not model:
            yield backward_hook(places.of_module(path))
        for name, tensor in (part._parameters | part._buffers).items():
            if tensor is not None:
                yield from _tensor(path, name, tensor, device, places)


def _mode(model: torch.nn.Module, places: Places) -> Iterator[Finding]:
    if not any(one.requires_grad for one in model.parameters()):
        yield Finding.of(
            Kind.NOT_TRAINED,
            "No parameter requires a gradient, so there is nothing to train.",
            places.root,
            "Set requires_grad on what shall be trained.",
        )
    if not model.training:
        yield Finding.of(
            Kind.MODE,
            "The model is in eval mode, and is looked at so: this says nothing about training mode.",
            places.root,
            "Call model.train(), then look again.",
        )
        return
    frozen = [path for path, part in model.named_modules() if not part.training]
    if frozen:
        rest = f" and {len(frozen) - 1} more parts are" if len(frozen) > 1 else " is"
        yield Finding.of(
            Kind.MODE, f"{frozen[0]}{rest} in eval mode, and is built so.", places.of_module(frozen[0])
        )


def backward_hook(place: Place) -> Finding:
    """Say that a backward hook stands on a module."""
    return Finding(
        Kind.HOOK,
        "A backward hook stands on this module; a graph has no place where it could run.",
        place,
        "Take it off, put it on the wrapped module itself, or leave this module to PyTorch.",
    )


def _tensor(
    path: str, name: str, tensor: torch.Tensor, device: torch.device, places: Places
) -> Iterator[Finding]:
    place = places.of_module(path)
    if tensor.is_meta:
        yield Finding.of(
            Kind.DEVICE,
            f"{name} is on the device meta: it has no values.",
            place,
            "Give it memory: module.to_empty(device=...), and load its weights.",
        )
        return
    if tensor.device != device:
        yield Finding.of(
            Kind.DEVICE,
            f"{name} is on {tensor.device}, most of the model on {device}.",
            place,
            f"Move it: model.to({str(device)!r}).",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        yield Finding.of(
            Kind.LAYOUT, f"{name} is not a dense tensor of floats.", place, "Leave this module to PyTorch."
        )
        return
    if tensor.dtype in _SHORT and tensor.device.type == "cpu":
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield Finding(
            Kind.DTYPE,
            f"It is {dtype} on the CPU, where PyTorch's kernels run most of it inside the graph.",
            place,
            "Train in float32 here: model.float().",
            level=Level.NOTE,
        )
    elif tensor.dtype is torch.float64:
        yield Finding(
            Kind.DTYPE,
            "It is float64, for which ONNX Runtime has few fast kernels.",
            place,
            "Train in float32 unless you need it: model.float().",
            level=Level.NOTE,
        )
    if isinstance(tensor, torch.nn.Parameter) and not _is_finite(tensor):
        yield Finding.of(
            Kind.VALUES,
            f"{name} holds nan or inf; so will the loss, on ONNX Runtime as in PyTorch.",
            place,
            "Load good weights, or start with a lower learning rate.",
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds neither nan nor inf; the sum, which needs no memory, shows that most do not."""
    values = tensor.detach()
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
