"""A batch as the arguments of a forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ortlab.errors import StepError
from ortlab.records.preflight import Finding, Kind, Place

_PLAIN: Final = (bool, int, float, str, bytes, type(None))


class Call(NamedTuple):
    """The arguments of one call of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_call(batch: object) -> Call:
    """Read a batch: a mapping has keyword arguments, a tuple or list positional ones, anything else is the only one.

    Raises StepError for a mapping whose keys are no names.
    """
    if isinstance(batch, Mapping):
        if not all(isinstance(key, str) for key in batch):
            raise StepError(
                "The keys of this batch are no names.",
                why="A mapping holds the forward's keyword arguments: model(**batch).",
                fix="Give a tuple for positional arguments.",
            )
        return Call((), dict(batch))
    if isinstance(batch, (tuple, list)):
        return Call(tuple(batch), {})
    return Call((batch,), {})


def findings_in(
    call: Call, forward: Callable[..., Any], place: Place, device: torch.device
) -> Iterator[Finding]:
    """Yield what is wrong with a call before anything runs; place and device are the model's."""
    try:
        inspect.signature(forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        yield Finding.of(
            Kind.INPUT,
            f"The batch is not what the forward takes: {error}.",
            place,
            "Give a mapping for model(**batch), a tuple for model(*batch), a tensor for model(batch).",
        )
    named = {**{f"batch[{position}]": value for position, value in enumerate(call.args)}, **call.kwargs}
    for name, value in named.items():
        for path, leaf in _leaves(name, value):
            yield from _findings_in_leaf(path, leaf, place, device)


def _findings_in_leaf(path: str, leaf: object, place: Place, device: torch.device) -> Iterator[Finding]:
    if not isinstance(leaf, torch.Tensor):
        if not isinstance(leaf, _PLAIN):
            yield Finding.of(
                Kind.INPUT,
                f"{path} is a {type(leaf).__name__}, which cannot be an input of a graph.",
                place,
                "Give tensors, numbers, texts and None, in lists, tuples and dicts.",
            )
        return
    if leaf.device != device and not (leaf.dim() == 0 and leaf.device.type == "cpu"):
        yield Finding.of(
            Kind.DEVICE,
            f"{path} is on {leaf.device}, the model on {device}.",
            place,
            f"Move it: {path}.to({str(device)!r}).",
        )
    if leaf.layout is not torch.strided or leaf.is_nested:
        yield Finding.of(
            Kind.LAYOUT, f"{path} is not a dense tensor.", place, "Give a dense one: x.to_dense()."
        )
    if leaf.is_complex():
        yield Finding.of(
            Kind.DTYPE,
            f"{path} is {_dtype(leaf)}; ONNX Runtime has no complex tensors.",
            place,
            "Give its real and imaginary parts: torch.view_as_real(x).",
        )
    if leaf.numel() == 0:
        yield Finding.of(
            Kind.INPUT, f"{path} is empty: its shape is {list(leaf.shape)}.", place, "Give a batch with data."
        )


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for position, item in enumerate(value):
            yield from _leaves(f"{path}[{position}]", item)
    else:
        yield path, value


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
