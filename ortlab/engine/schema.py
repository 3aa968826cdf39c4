"""What an export depends on: the structure of a call's inputs, and the module's own state.

ORTModule 1.19.2 exports once and, with its default skip-check policy, never looks again: an input of another dtype
ends in a raw ORT error, a flag of another value or a module switched to eval is ignored without a word.
ortlab takes a fingerprint of each call instead and rebuilds when it changes.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import CellType
from typing import Any, Final, TypeAlias

import torch

from ortlab.engine.devices import multiplies_in_tf32
from ortlab.engine.operators import compiled_calls
from ortlab.engine.tracing import baked_in
from ortlab.engine.tracing.reached import Reached
from ortlab.engine.tracing.taps import Looker

Entry: TypeAlias = tuple[str, str]
"""A name ("kwargs.input_ids", "encoder.layer.0") and what an export bakes in about it ("int64, 2 dims, cpu")."""

Schema: TypeAlias = tuple[Entry, ...]

_UNCHANGING: Final = frozenset({torch.nn.Module, object})
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES: Final = ("_modules", "_parameters", "_buffers")
_FACTS: Final = attrgetter("dtype", "shape", "device", "requires_grad")
_DICT: Final = attrgetter("__dict__")
_VALUES: Final = methodcaller("values")
_NO_SETTINGS: Final[Mapping[str, object]] = {}


def call_schema(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Schema:
    """Describe the inputs of a call as far as an export depends on them."""
    # Sizes are left out, since they are symbolic in the exported graph, except those of 1, which are not (see
    # `tracing.graph_inputs`), and of 0; dtype, number of dimensions, device and `requires_grad` of each tensor are in.
    # So are the values of Python numbers, strings, booleans and None, because tracing follows one branch for one value.
    entries = list(_leaves("input", list(args)))
    for name, value in kwargs.items():
        entries.extend(_leaves(f"input {name}", value))
    return tuple(entries)


def surroundings(device_type: str) -> Schema:
    """Describe what a build finds around the call: mixed precision, the dtype of new tensors, TF32 on a GPU."""
    mixed = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    precision = str(torch.get_autocast_dtype(device_type)) if mixed else "off"
    products = "TF32" if device_type == "cuda" and multiplies_in_tf32() else "float32"
    return (
        ("autocast", precision),
        ("default dtype", str(torch.get_default_dtype())),
        ("matrix products", products),
    )


def module_schema(
    module: torch.nn.Module, functions: Iterable[object] = (), written: Collection[str] = ()
) -> Schema:
    """Describe a module as far as an export depends on it, in terms that another process would use, too.

    - Of each part its class, the code of that class, whether it trains, its hooks (but a `Looker`), and what
      a trace makes a constant of: numbers, flags, texts, tensors and functions among its attributes, also in lists
      and dicts. Hooks on the module itself do not count, as its caller runs them.
    - Of the model's `config` the same.
    - Of each parameter and buffer its dtype, shape, device, `requires_grad` and the name it is tied to; not its values,
      which ORT reads anew in each step. Buffers that are not in the `state_dict` are constants, with their values,
      but for those that the forward writes to, whose names are `written`.
    - Of global variables and of attributes of objects and classes those that the forward reaches; see `Reached`.

    `functions` are more functions that its forward consists of.
    """
    entries: list[Entry] = [
        (f"config.{key}", baked_in.describe(value)) for key, value in _settings(module).items()
    ]
    entries += [("the forward of this module", baked_in.describe(function)) for function in functions]
    kinds: dict[type, None] = {}
    first_name: dict[int, str] = {}
    inputs = buffer_ids(module, written)
    for name, part in module.named_modules():
        attributes = part.__dict__
        kind = type(part)
        kinds.update(dict.fromkeys(_bodies(kind)))
        entries.append(
            (name or "the module", f"{'training' if part.training else 'eval'}, {kind.__qualname__}")
        )
        entries += [
            (f"{name}.{key}", baked_in.describe(attributes[key])) for key in _constant_names(attributes)
        ]
        if part is not module:
            entries += [
                (f"{name}.{table} {key}", baked_in.describe(hook))
                for table in _HOOKS
                for key, hook in attributes[table].items()
                if not isinstance(hook, Looker)
            ]
        constant = attributes["_non_persistent_buffers_set"]
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                path = f"{name}.{key}"
                tied = first_name.setdefault(id(tensor), path)
                entries.append((path, _describe_kept(tensor) if tied == path else f"tied to {tied}"))
                if key in constant and key in part._buffers:
                    value = "an input" if id(tensor) in inputs else baked_in.digest_of_tensor(tensor)
                    entries.append((f"{path} (not in the state_dict)", value))
    entries += [(f"the code of {kind.__qualname__}", _digest_of_body(kind)) for kind in kinds]
    entries += Reached(module, functions).described()
    return tuple(entries)


class ModuleReader:
    """Reads what `module_schema` describes, and which tensors it is about, fast enough for every step."""

    # Equal states have equal schemas. If states differ, the schema has to be made to see whether the difference
    # matters: a parameter that was replaced by another of its kind needs no new export, only to be handed to ORT. A
    # reader keeps what it has seen of the module's code; after a change, make another. In most steps each place holds
    # the object that it held before, and what can change in place has not. Then the state is the same object, and no
    # part of the module is looked at by itself.

    def __init__(
        self, module: torch.nn.Module, functions: Iterable[object] = (), written: Collection[str] = ()
    ) -> None:
        self._module = module
        self._functions = tuple(functions)
        self._written = written
        self._kinds: dict[type, None] = {}
        self._code: list[tuple[Mapping[str, object], Iterable[str]]] = []
        self._code_cells: list[CellType] = []
        self._reached: Reached
        self._state: tuple[object, ...] = ()

    def state(self) -> tuple[object, ...]:
        """Read the present state."""
        if not self._state or not self._is_untouched():
            # An interrupt between these lines must not leave the state to objects that it was not read from.
            before, self._state = self._state, ()
            values, themselves = self._find()
            mutable = [one for one in values if not baked_in.is_fixed(one)]
            few = [one for one in mutable if baked_in.holds_few(one)]
            self._few: list[Any] = [one for one in few if not isinstance(one, dict)]
            self._mutable = [one for one in mutable if not baked_in.holds_few(one)]
            self._dicts = Entries(
                [*self._named, *self._hooks, *self._bodies, *(one for one in few if isinstance(one, dict))]
            )
            self._sized += self._few
            self._objects, self._shape = [*self._read_objects()], self._read_shape()
            self._states = [*map(baked_in.state, self._mutable)]
            hooks = [
                key for table in self._hooks for key, hook in table.items() if not isinstance(hook, Looker)
            ]
            names = [*map(tuple, self._named)]
            found = (baked_in.states(values), [*map(id, themselves)], hooks, names, self._shape)
            self._state = before if before == found else found
        return self._state

    def _is_untouched(self) -> bool:
        return (
            self._dicts.are_the_same()
            and self._read_shape() == self._shape
            and all(map(is_, self._read_objects(), self._objects))
            and [*map(baked_in.state, self._mutable)] == self._states
        )

    def _find(self) -> tuple[list[object], list[object]]:
        """Find what the state is read from; return the objects whose values count, and those that count themselves."""
        settings = _settings(self._module)
        self._parts = list(self._module.modules())
        dicts = [part.__dict__ for part in self._parts]
        values: list[object] = [*settings.values()]
        self._cells: list[CellType] = []
        inputs = buffer_ids(self._module, self._written)
        for attributes in dicts:
            own = [attributes[name] for name in _constant_names(attributes)]
            self._cells += baked_in.closures(own)
            buffers = attributes["_buffers"]
            not_kept = sorted(attributes["_non_persistent_buffers_set"] & buffers.keys())
            constants = [one for name in not_kept if id(one := buffers[name]) not in inputs]
            values += (attributes["training"], *own, *constants)
        kinds = dict.fromkeys(map(type, self._parts))
        if not self._kinds.keys() >= kinds.keys():
            self._kinds |= kinds
            self._read_code()
            self._reached = Reached(self._module, self._functions)
        self._awaited = sorted(self._reached.awaited)
        compared, others = self._reached.values()
        values += (*compared, *map(baked_in.content, chain(self._cells, self._code_cells)))
        tables = [attributes[name] for attributes in dicts for name in _TABLES]
        held = [one for table in tables for one in table.values()]
        self._tensors = [one for one in held if isinstance(one, torch.Tensor)]
        # Hooks on the module itself do not count.
        self._hooks = [attributes[name] for attributes in dicts[1:] for name in _HOOKS]
        self._not_kept = [attributes["_non_persistent_buffers_set"] for attributes in dicts]
        self._named = [settings, *dicts, *tables]
        self._bodies = [body for body, _ in self._code]
        self._sized = [*self._reached.tables]
        functions = [body.get(name) for body, names in self._code for name in names]
        return values, [*self._parts, *held, *others, *functions]

    def _read_objects(self) -> Iterator[object]:
        """Yield all objects that places hold now which are not entries of dicts."""
        compared, others = self._reached.values()
        return chain(
            (_settings(self._module), *compared, *others),
            map(_DICT, self._parts),
            map(baked_in.content, chain(self._cells, self._code_cells)),
            chain.from_iterable(self._few),
        )

    def _read_shape(self) -> tuple[object, ...]:
        """Return what can change while all objects are the same."""
        return (
            [*chain.from_iterable(self._not_kept)],
            [*map(type, self._parts)],
            [*map(len, self._sized)],
            [*map(_FACTS, self._tensors)],
            [*map(sys.modules.__contains__, self._awaited)],
        )

    def _read_code(self) -> None:
        bodies = dict.fromkeys(body for kind in self._kinds for body in _bodies(kind))
        found = {body: baked_in.functions_of(body) for body in bodies}
        self._code = [(vars(body), functions) for body, functions in found.items()]
        self._code_cells = baked_in.closures(
            [*self._functions, *(one for functions in found.values() for one in functions.values())]
        )


class Entries:
    """The keys and values of some dicts, and of the bodies of classes, at one moment."""

    # A model of some dozen parts has thousands, and each step has to look at all. The compiled library does so in
    # microseconds, Python in a tenth of a millisecond.

    def __init__(self, dicts: Iterable[Mapping[str, object]]) -> None:
        # What a `mappingproxy`, such as `vars` of a class, stands for is the only thing that it refers to.
        self._dicts = [one if isinstance(one, dict) else gc.get_referents(one)[0] for one in dicts]
        self._lengths = [*map(len, self._dicts)]
        self._keys = [*chain.from_iterable(self._dicts)]
        self._values = [*chain.from_iterable(map(_VALUES, self._dicts))]
        self._same: Callable[[], bool] | None = None

    def are_the_same(self) -> bool:
        """Tell whether the dicts have the same keys in the same order, and hold the same objects."""
        if self._same is None:  # the library is there from the first session on, if at all
            self._same = compiled_calls.same_entries(self._dicts, self._lengths, self._keys, self._values)
        if self._same is not None:
            return self._same()
        return (
            [*map(len, self._dicts)] == self._lengths
            and [*chain.from_iterable(self._dicts)] == self._keys
            and all(map(is_, chain.from_iterable(map(_VALUES, self._dicts)), self._values))
        )


def difference(before: Schema, after: Schema) -> str:
    """Say in one clause what changed between two schemas; empty if nothing did."""
    old, new = dict(before), dict(after)
    for name, description in new.items():
        if name not in old:
            return f"`{name}` is new"
        if old[name] != description:
            if name.startswith("the "):
                return f"{name} changed"
            return f"`{name}` changed from {old[name]} to {description}"
    gone = next((name for name in old if name not in new), None)
    return f"`{gone}` is gone" if gone is not None else ""


def buffer_ids(module: torch.nn.Module, names: Collection[str]) -> set[int]:
    """Return the `id` of each buffer of these names."""
    return {id(buffer) for name, buffer in module.named_buffers() if name in names} if names else set()


def _constant_names(attributes: Mapping[str, object]) -> tuple[str, ...]:
    """Name the attributes of a part that a trace bakes into a graph as constants, branches or code."""
    # A list of nothing but the part's own parameters and buffers does not count, such as the `_flat_weights` of an
    # LSTM: these are read anew in each step.
    tables: Any = attributes
    own = {id(one) for table in ("_parameters", "_buffers") for one in tables[table].values()}
    return tuple(
        name
        for name, value in attributes.items()
        if name not in baked_in.OF_EVERY_MODULE
        and name != "config"
        and baked_in.matters(value)
        and not (isinstance(value, (list, tuple)) and value and all(id(item) in own for item in value))
    )


def _settings(module: torch.nn.Module) -> Mapping[str, object]:
    """Return the attributes of a module's `config`, which models of transformers read in their forward."""
    return getattr(module.__dict__.get("config"), "__dict__", _NO_SETTINGS)


def _bodies(kind: type) -> Iterator[type]:
    """Yield the classes that a module's code comes from, down to those of torch itself."""
    for body in kind.__mro__:
        if body not in _UNCHANGING:
            yield body


def _digest_of_body(kind: type) -> str:
    functions = baked_in.functions_of(kind)
    texts = [f"{name} {baked_in.digest_of_code(function)}" for name, function in functions.items()]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


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
    extent = f"{tensor.dim()} dims"
    if 1 in tensor.shape or 0 in tensor.shape:
        extent += f" ({', '.join(str(size) if size in {0, 1} else 'n' for size in tensor.shape)})"
    return _facts(tensor, extent)


def _describe_kept(tensor: torch.Tensor) -> str:
    return _facts(tensor, f"shape {list(tensor.shape)}")


def _facts(tensor: torch.Tensor, extent: str) -> str:
    return _in_words(tensor.dtype, extent, tensor.device, tensor.layout, tensor.requires_grad)


@functools.lru_cache(maxsize=1024)  # texts of dtypes and devices take longer than all else in a call's schema
def _in_words(
    dtype: torch.dtype,
    extent: str,
    device: torch.device,
    layout: torch.layout,
    requires_grad: bool,  # noqa: FBT001
) -> str:
    grad = ", requires grad" if requires_grad else ""
    kind = "" if layout is torch.strided else f", {str(layout).removeprefix('torch.')}"
    return f"{str(dtype).removeprefix('torch.')}, {extent}, {device}{kind}{grad}"
