"""What an export depends on: the structure of a call's inputs, and the module's own state.

ORTModule 1.19.2 exports once and, with its default skip-check policy, never looks again: an input of another dtype
ends in a raw ORT error (row T17), a flag of another value or a module switched to eval is ignored without a word.
ortlab takes a fingerprint of each call instead and rebuilds when it changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch

Entry: TypeAlias = tuple[str, str]
"""A name ("kwargs.input_ids", "encoder.layer.0") and what an export bakes in about it ("int64, 2 dims, cpu")."""

Schema: TypeAlias = tuple[Entry, ...]

_BAKED_IN: Final = (bool, int, float, str, type(None))
_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))

_constants: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def call_schema(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Schema:
    """Describe the inputs of a call as far as an export depends on them.

    Sizes are left out, since they are symbolic in the exported graph; dtype, number of dimensions, device and
    `requires_grad` of each tensor are in. So are the values of Python numbers, strings, booleans and None, because
    tracing follows one branch for one value.

    Parameters
    ----------
    args, kwargs
        The arguments of the module's forward.
    """
    entries = list(_leaves("input", list(args)))
    for name, value in kwargs.items():
        entries.extend(_leaves(f"input {name}", value))
    return tuple(entries)


def module_schema(module: torch.nn.Module) -> Schema:
    """Describe a module as far as an export depends on it.

    Training flags of all submodules, the numbers, flags and texts among their attributes (dropout probability,
    epsilon, ...) and in the module's `config`, and of each parameter and buffer its dtype, number of dimensions,
    device, `requires_grad` and the name it is tied to; not its values, which ORT reads anew in each step.
    """
    entries: list[Entry] = [
        (f"config.{key}", repr(value)) for key, value in _settings(module).items() if type(value) in _BAKED_IN
    ]
    first_name: dict[int, str] = {}
    for name, submodule in module.named_modules():
        entries.append((name, "training" if submodule.training else "eval"))
        constants = _constant_names(type(submodule), vars(submodule))
        entries += [(f"{name}.{key}", repr(vars(submodule).get(key))) for key in constants]
        for key, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if tensor is not None:
                path = f"{name}.{key}"
                tied = first_name.setdefault(id(tensor), path)
                entries.append((path, _describe(tensor) if tied == path else f"tied to {tied}"))
    return tuple(entries)


def module_state(module: torch.nn.Module) -> tuple[object, ...]:
    """Read what `module_schema` describes, and which tensors it is about, fast enough for every step.

    Equal states have equal schemas. Of an unequal one the schema has to be made to see whether the difference matters:
    a parameter that was replaced by another of its kind needs no new export, only to be handed to ORT.
    """
    state: list[object] = [value for value in _settings(module).values() if type(value) in _BAKED_IN]
    for submodule in module.modules():
        attributes = submodule.__dict__
        state += (id(submodule), attributes["training"])
        state += [attributes.get(name) for name in _constant_names(type(submodule), attributes)]
        for table in (attributes["_parameters"], attributes["_buffers"]):
            for tensor in table.values():
                if tensor is not None:
                    state += (id(tensor), tensor.dtype, tensor.dim(), tensor.device, tensor.requires_grad)
    return tuple(state)


def difference(before: Schema, after: Schema) -> str:
    """Say in one clause what changed between two schemas; empty if nothing did."""
    old, new = dict(before), dict(after)
    for name, description in new.items():
        if name not in old:
            return f"`{name}` is new"
        if old[name] != description:
            return f"`{name}` changed from {old[name]} to {description}"
    gone = next((name for name in old if name not in new), None)
    return f"`{gone}` is gone" if gone is not None else ""


def _constant_names(kind: type, attributes: Mapping[str, object]) -> tuple[str, ...]:
    """Name the attributes that a trace bakes into a graph as constants or branches; read off a class's first object."""
    if kind not in _constants:
        _constants[kind] = tuple(
            name
            for name, value in attributes.items()
            if type(value) in _BAKED_IN and name not in _OF_EVERY_MODULE
        )
    return _constants[kind]


def _settings(module: torch.nn.Module) -> Mapping[str, object]:
    """Return the attributes of a module's `config`, which models of transformers read in their forward."""
    return getattr(module.__dict__.get("config"), "__dict__", {})


def _leaves(name: str, value: Any) -> Iterator[Entry]:
    if isinstance(value, torch.Tensor):
        yield name, _describe(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{name}.{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for position, item in enumerate(value):
            yield from _leaves(f"{name}[{position}]", item)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield name, repr(value)
    else:
        yield name, f"{type(value).__qualname__} object"


def _describe(tensor: torch.Tensor) -> str:
    grad = ", requires grad" if tensor.requires_grad else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}, {tensor.dim()} dims, {tensor.device}{grad}"
