"""Which wrappers are around a model, in which order, and whether that order can work (rows A5, A6).

ORTModule replaces a module's forward, so it belongs next to the model. What spreads training over processes hooks into
parameters and gradients and goes around it: ORT inside DDP and DeepSpeed, never the other way round. `torch.compile`
may be around a wrapped model, where it compiles what ORT does not run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from ortlab.errors import WrapError
from ortlab.runs.wrapping import is_wrapped

_ORT: Final = "ORT"
_DDP: Final = "DistributedDataParallel"
_DATA_PARALLEL: Final = "DataParallel"
_FSDP: Final = "FullyShardedDataParallel"
_FULLY_SHARD: Final = "fully_shard"
_COMPILE: Final = "torch.compile"
_DEEPSPEED: Final = "DeepSpeedEngine"

_KINDS: Final = {
    ("torch", "DistributedDataParallel"): _DDP,
    ("torch", "DataParallel"): _DATA_PARALLEL,
    ("torch", "FullyShardedDataParallel"): _FSDP,
    ("torch", "FSDPModule"): _FULLY_SHARD,
    ("torch", "OptimizedModule"): _COMPILE,
    ("deepspeed", "DeepSpeedEngine"): _DEEPSPEED,
    ("onnxruntime", "ORTModule"): _ORT,
    ("ortlab", "ORTModule"): _ORT,
}
"""Wrappers by package and class; by name, so that neither DeepSpeed nor torch.distributed is imported for it."""

_INNER: Final = {
    _DDP: "module",
    _DATA_PARALLEL: "module",
    _FSDP: "_fsdp_wrapped_module",
    _COMPILE: "_orig_mod",
    _DEEPSPEED: "module",
}
"""The attribute with what is wrapped; `fully_shard` has none, it changes the module's class."""

_HOOKS: Final = "It hooks into parameters and gradients, and what ORT exports runs no such hooks."

_AROUND: Final = {
    _DDP: (_HOOKS, "DistributedDataParallel(model)"),
    _DEEPSPEED: (_HOOKS, "deepspeed.initialize(model=model, ...)"),
    _COMPILE: ("A compiled forward cannot be exported.", "torch.compile(model)"),
}
"""What goes around a wrapped model: why it cannot be inside, and how it is put around."""

_NOT_WITH_ORT: Final = {
    _DATA_PARALLEL: (
        "It copies the module to each GPU in each step, and ORTModule holds one module on one device.",
        "Use DistributedDataParallel, one process per GPU: ortlab.wrap(model), then DistributedDataParallel(model).",
    ),
    _FSDP: (
        "It frees and gathers the parameters around each layer's forward, and a graph of ORT needs all of them.",
        "Use DistributedDataParallel or DeepSpeed's ZeRO stages 1 and 2, which leave parameters whole.",
    ),
    _FULLY_SHARD: (
        "It makes the parameters sharded DTensors, and a graph of ORT needs plain and whole ones.",
        "Use DistributedDataParallel or DeepSpeed's ZeRO stages 1 and 2, which leave parameters whole.",
    ),
}
"""Why a wrapper does not go together with ORT in any order, and what does."""


@dataclass(frozen=True)
class Layer:
    """One thing around a model, or the model itself.

    Attributes
    ----------
    kind
        "ORT", the name of a wrapper such as "DistributedDataParallel", or "" for the model.
    name
        How it is written in a nest: the kind, or the class of the model.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Fault:
    """Why a nest of wrappers cannot work; `what`, `why` and `fix` as in an `OrtlabError`."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class WrapperOrder:
    """The wrappers around a model, as they are nested.

    Attributes
    ----------
    layers
        From the outermost to the model.
    inside
        Kinds of wrappers around parts of the model.
    fault
        What is wrong with the order; None if nothing is.
    """

    layers: tuple[Layer, ...]
    inside: tuple[str, ...]
    fault: Fault | None

    @property
    def written(self) -> str:
        """The nest in one line, for example "DistributedDataParallel(ORT(Net))"."""
        return "(".join(layer.name for layer in self.layers) + ")" * (len(self.layers) - 1)

    @property
    def has_ort(self) -> bool:
        """Whether ORT runs anything of it."""
        return _ORT in self.inside or any(layer.kind == _ORT for layer in self.layers)


def wrapper_order(module: torch.nn.Module, *, wrapping: bool = False) -> WrapperOrder:
    """Look at everything that is put around a model.

    Parameters
    ----------
    module
        The outermost module: what the training loop calls.
    wrapping
        Whether `ortlab.wrap` is about to be put around it.

    Returns
    -------
    WrapperOrder
        The nest, and what is wrong with it.
    """
    layers, core = _nest(module)
    if wrapping:
        layers.insert(0, Layer(_ORT, _ORT))
    inside = tuple(
        dict.fromkeys(kind for part in core.modules() if part is not core for kind in _kinds_of_part(part))
    )
    order = WrapperOrder(tuple(layers), inside, None)
    return replace(order, fault=_fault(order))


def check_call(module: torch.nn.Module) -> None:
    """Raise WrapError for a call of a wrapped module that `DataParallel` has copied or FSDP has sharded since."""
    attributes = module.__dict__
    kind = _DATA_PARALLEL if attributes.get("_is_replica") else None
    if attributes.get("_is_fsdp_managed_module"):  # torch/distributed/fsdp/_dynamo_utils.py
        kind = _FSDP
    elif _is_sharded(type(module)):  # type: ignore[arg-type] # a class is hashable
        kind = _FULLY_SHARD
    if kind is not None:
        why, fix = _NOT_WITH_ORT[kind]
        raise WrapError(f"{kind} is around a model that ORT is to run.", why=why, fix=fix)


@functools.lru_cache(maxsize=64)
def _is_sharded(kind: type) -> bool:
    return _FULLY_SHARD in _kinds_of_class(kind)


def _nest(module: torch.nn.Module) -> tuple[list[Layer], torch.nn.Module]:
    """Return the layers from the outermost one, and the model in their middle."""
    layers: list[Layer] = []
    while True:
        kinds = list(_kinds(module))
        layers += [Layer(kind, kind) for kind in kinds]
        inner = next((getattr(module, _INNER[kind], None) for kind in kinds if kind in _INNER), None)
        if not isinstance(inner, torch.nn.Module):
            return [*layers, Layer("", type(module).__name__)], module
        module = inner


def _kinds(module: torch.nn.Module) -> Iterator[str]:
    """Name the wrappers that one module is, the outer one first."""
    if is_wrapped(module):
        yield _ORT
    yield from _kinds_of_class(type(module))


def _kinds_of_part(module: torch.nn.Module) -> Iterator[str]:
    yield from _kinds(module)
    # Module.compile(); on the outermost one it is around ORT in any case.
    if getattr(module, "_compiled_call_impl", None) is not None:
        yield _COMPILE


def _kinds_of_class(kind: type) -> Iterator[str]:
    for body in kind.__mro__:
        known = _KINDS.get((body.__module__.partition(".")[0], body.__name__))
        if known is not None:
            yield known


def _fault(order: WrapperOrder) -> Fault | None:
    kinds = [layer.kind for layer in order.layers]
    if not order.has_ort:
        return None
    for kind in (*kinds, *order.inside):
        if kind in _NOT_WITH_ORT:
            why, fix = _NOT_WITH_ORT[kind]
            return Fault(f"{kind} and ORT do not go together: {order.written}.", why, fix)
    first = kinds.index(_ORT) if _ORT in kinds else len(kinds)
    for kind in (*kinds[first:], *(order.inside if _ORT in kinds else ())):
        if kind in _AROUND:
            why, call = _AROUND[kind]
            return Fault(
                f"The order is wrong: ORT is around {kind}, and has to be inside it: {order.written}.",
                why,
                f"Wrap the model first, ortlab.wrap(model), then {call}. Where {kind} is there already, wrap what "
                f"is in it: ortlab.wrap(model.{_INNER[kind]}).",
            )
    return None
