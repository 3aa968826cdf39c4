"""Which inputs of a model hold tokens with padding, or labels of which some are ignored, and how many do not.

ORTModule 1.19.2 puts operators into the graph that print a density (`_runtime_inspector.FlagAndPrintDensity`), for
`torch.nn.CrossEntropyLoss` sub-modules only, and has lost the table. Here the inputs are counted before
they reach any engine, so that no graph changes and every engine can be watched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from ortlab.records.density import EMBED, LABEL, Density, DensityRow

_INTEGERS: Final = (torch.int64, torch.int32)


@dataclass(frozen=True)
class PaddedInput:
    """An input of the model that holds padding, or labels that are ignored."""

    name: str  # of the forward's parameter, with a path into a container: "batch.input_ids"
    kind: str  # "EMBED" or "LABEL"
    pad_index: int  # the token that is padding, or the label that is ignored

    def count(self, step: int, values: torch.Tensor) -> DensityRow:
        """Count what is valid in a batch of integers, of any shape whose first dimension is the batch."""
        valid = values != self.pad_index
        per_sample: tuple[int, ...] = ()
        if self.kind == EMBED and values.dim() > 1:
            per_sample = tuple(valid.flatten(1).sum(dim=1).tolist())
        return DensityRow(
            step, self.kind, self.name, self.pad_index, int(valid.sum()), values.numel(), per_sample
        )


class DensityProbe:
    """Counts the inputs of each step, which it finds by one run of the model, without gradients, when they are new."""

    # The search puts the model's buffers and the random state back.

    def __init__(self, module: torch.nn.Module, original_forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = original_forward
        self._names: tuple[str, ...] = ()
        self._inputs: tuple[PaddedInput, ...] = ()
        self._rows: list[DensityRow] = []

    def count(self, step: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count what is valid in the arguments of a call of the model."""
        values = dict(_integers(self._forward, args, kwargs))
        names = tuple(values)
        if names != self._names:
            self._names = names
            self._inputs = tuple(_find(self._module, self._forward, args, kwargs, values))
        self._rows += [one.count(step, values[one.name]) for one in self._inputs]

    def read(self) -> Density:
        """Return what was counted."""
        return Density(tuple(self._rows))


def _integers(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    bound = inspect.signature(forward).bind(*args, **kwargs)
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    for name, value in bound.arguments.items():
        unnamed = bound.signature.parameters[name].kind in variadic
        yield from _walk("" if unnamed else name, value)


def _walk(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.dtype in _INTEGERS and value.dim():
            yield path, value
        return
    if isinstance(value, Mapping):
        parts: Any = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        return
    for key, part in parts:
        yield from _walk(f"{path}.{key}" if path else str(key), part)


def _find(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    values: Mapping[str, torch.Tensor],
) -> Iterator[PaddedInput]:
    """Run the forward once and see which inputs reach an embedding or a cross entropy."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    devices = {value.device for value in (*values.values(), *module.parameters()) if value.is_cuda}
    with torch.random.fork_rng(sorted(devices, key=str)), torch.no_grad(), _Watch() as seen:
        try:
            forward(*args, **kwargs)
        finally:
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
    found = (
        PaddedInput(name, kind, pad_index)
        for kind, pad_index, used in seen.uses
        for name, value in values.items()
        if _same(value, used, pad_index)
    )
    yield from dict.fromkeys(found)


def _same(value: torch.Tensor, used: torch.Tensor, pad_index: int) -> bool:
    """Say whether an operator was given an input as it is, or, as in causal models, shifted by one place."""
    forms = [value]
    if value.dim() > 1 and value.size(-1) > 1:
        padded = torch.nn.functional.pad(value, (0, 1), value=pad_index)
        forms += [value[..., 1:], padded[..., 1:]]
    flat = used.reshape(-1)
    return any(form.numel() == flat.numel() and torch.equal(form.reshape(-1), flat) for form in forms)


class _Watch(TorchFunctionMode):
    """Sees every call of an embedding or a cross entropy, however its caller imported it."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[tuple[str, int, torch.Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = {} if kwargs is None else kwargs
        if func is torch.nn.functional.embedding:
            self._note(EMBED, func, args, named, "input", "padding_idx")
        elif func is torch.nn.functional.cross_entropy:
            self._note(LABEL, func, args, named, "target", "ignore_index")
        return func(*args, **named)

    def _note(self, kind: str, func: Any, args: Any, kwargs: Any, values: str, index: str) -> None:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        used, pad_index = bound.arguments[values], bound.arguments[index]
        if pad_index is not None and used.dtype in _INTEGERS:
            self.uses.append((kind, int(pad_index), used.detach().clone()))
