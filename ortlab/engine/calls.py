"""What a call of a model can be refused for before anything is built, and why its own forward may have failed."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ortlab.engine.providers import check_device
from ortlab.errors import BuildError

_SHOWN = 6
"""How many inputs an error lists."""

_ARRAYS = frozenset({"list", "tuple", "ndarray", "int", "float", "bool"})
"""Types that `torch.as_tensor` takes."""

_META = torch.device("meta")
_LOAD = "Load the weights first: model.to_empty(device='cpu'), then model.load_state_dict(...)."


def check_module(module: torch.nn.Module, available: Collection[str]) -> None:
    """Refuse a module that no session could hold: on several devices, on one without a provider, or without values.

    The `BuildError` says which parameter or buffer is where. `available` are the execution providers that
    `onnxruntime.get_available_providers()` returns.
    """
    kind = type(module).__name__
    places: dict[torch.device, str] = {}
    for name, parameter in module.named_parameters():
        places.setdefault(parameter.device, name)
    if len(places) > 1:
        where = ", ".join(f"{name!r} on {device}" for device, name in places.items())
        first = next(iter(places))
        raise BuildError(
            f"{kind} is on several devices: {where}.",
            why="One ONNX Runtime session trains on one device.",
            fix=_LOAD if _META in places else f"Move all of it to one: model.to({str(first)!r}).",
        )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise BuildError(
                f"{name!r} of {kind} is on device 'meta': it has a shape, and no values.",
                why="A model that is made on 'meta', or offloaded, gets its weights later, or not at all.",
                fix=_LOAD,
            )
    for device in places:
        check_device(device, available)


def check_call(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse inputs on which ONNX Runtime would end the process, or compute something else.

    Its CPU kernels divide by sizes: an empty batch ends the whole process with a floating point exception, or gives a
    loss where PyTorch's is nan. Raises `BuildError` for a tensor without elements, or one that is not strided.
    """
    for name, value in named_inputs(module, args, kwargs):
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout is not torch.strided:
            raise BuildError(
                f"`{name}` is a {str(value.layout).removeprefix('torch.')} tensor, which ONNX Runtime cannot read.",
                why="It trains on dense tensors.",
                fix=f"Pass `{name}` as {name}.to_dense(), or engine='eager' for this model.",
            )
        if not value.numel():
            raise BuildError(
                f"`{name}` is empty: its shape is {_shape(value)}.",
                why="ONNX Runtime 1.19.2 divides by sizes: an empty batch can end the whole process.",
                fix="Leave such batches out (drop_last, or a filter in the data loader), or let PyTorch run them: "
                "lab.set(engine='eager').",
            )


def explain(
    fault: Exception,
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[str, str]:
    """Return why a module's own forward failed, as far as its inputs show it, and what repairs that: sentences."""
    inputs = list(named_inputs(module, args, kwargs))
    why, fix = _misfit(fault, module, args, kwargs) or (
        f"It was called with {_listed(inputs)}.",
        "Mend the model or the batch; weights, optimizer and the last working build are untouched.",
    )
    return f"{why} It fails in plain PyTorch too; ONNX Runtime had no part in it.", fix


def named_inputs(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a call's arguments, each behind a name that a user knows.

    Names are "input_ids", "past[0]", "batch['labels']"; "argument 1" where the forward has no name. A leaf is whatever
    is neither a mapping nor a list or tuple that holds a tensor or mapping, at any depth.
    """
    names = _names(module, args, kwargs)
    for name, value in zip(names, (*args, *kwargs.values()), strict=True):
        yield from _leaves(name, value)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)) and _holds_tensors(value):
        for position, item in enumerate(value):
            yield from _leaves(f"{name}[{position}]", item)
    else:
        yield name, value


def _holds_tensors(value: Any) -> bool:
    """Tell whether a value is a tensor or a mapping, or a list or tuple that holds one at any depth."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, (torch.Tensor, Mapping))


def _misfit(
    fault: Exception,
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[str, str] | None:
    """Find what is certainly wrong with a call: its names, its devices, or a value that is no tensor."""
    found = _wrong_names(module, args, kwargs)
    if found is None and isinstance(fault, RuntimeError):
        found = _wrong_devices(module, args, kwargs)
    if found is None and isinstance(fault, (TypeError, AttributeError)):
        found = _wrong_kinds(fault, module, args, kwargs)
    return found


def _wrong_names(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    try:
        signature = inspect.signature(module.forward)
        signature.bind(*args, **kwargs)
    except ValueError:
        return None
    except TypeError:
        takes = ", ".join(
            str(one).partition(":")[0].partition("=")[0].strip()
            + ("" if one.default is one.empty else " (optional)")
            for one in signature.parameters.values()
        )
        given = [f"{len(args)} without a name"] * bool(args) + list(kwargs)
        return (
            f"Its forward takes {takes or 'nothing'}; the call gave {', '.join(given) or 'nothing'}.",
            "Give the batch the names that forward takes; a dict goes in as model(**batch).",
        )
    return None


def _wrong_devices(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    home = next((one.device for one in module.parameters()), None)
    strays = [
        f"`{name}` is on {value.device}"
        for name, value in named_inputs(module, args, kwargs)
        if isinstance(value, torch.Tensor) and home is not None and value.device != home
    ]
    if not strays:
        return None
    return (
        f"The model is on {home}, and {_and(strays)}.",
        f"Move the batch to the model: batch = {{name: value.to({str(home)!r}) for name, value in batch.items()}}.",
    )


def _wrong_kinds(
    fault: Exception, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, str] | None:
    names = _names(module, args, kwargs)
    for name, value in zip(names, (*args, *kwargs.values()), strict=True):
        kind = type(value).__name__
        if isinstance(value, torch.Tensor) or kind not in str(fault):
            continue
        if isinstance(value, Mapping):
            return f"`{name}` is a whole {kind}, not a tensor.", "Unpack it: model(**batch)."
        fix = f"Pass torch.as_tensor({name})." if kind in _ARRAYS else f"Pass a tensor as `{name}`."
        return f"`{name}` is a {kind}, not a tensor.", fix
    return None


def _names(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """Name each argument of a call."""
    try:
        parameters = [*inspect.signature(module.forward).parameters.values()]
    except (TypeError, ValueError):  # a forward written in C++ shows no parameters
        parameters = []
    known = [one.name for one in parameters if one.kind in {one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD}]
    unknown = [f"argument {number + 1}" for number in range(len(known), len(args))]
    return [*known[: len(args)], *unknown, *kwargs]


def _listed(inputs: Sequence[tuple[str, Any]]) -> str:
    words = [f"{name} ({_describe(value)})" for name, value in inputs[:_SHOWN]]
    if len(inputs) > _SHOWN:
        words.append(f"{len(inputs) - _SHOWN} more")
    return _and(words) or "no input"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}, {_shape(value)}, {value.device}"
    return "None" if value is None else type(value).__name__


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(str(size) for size in tensor.shape) or "a single number"


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
