"""What a forward returns, as the tensors of a graph: also objects that hold tensors.

ORTModule 1.19.2 takes what a forward returns apart and puts it together again (``_io._extract_schema``,
``torch_io_helper.py``) as far as it is made of tensors, sequences and mappings. The causal models of transformers
return a cache of keys and values, an object of a class of its own, unless they are told not to; other models return a
dataclass or a distribution. Such an object is taken apart by its attributes here, and a new one is made in each step.
What stands for a tensor that the graph does not make raises an error that says why, whatever is asked of it.
"""

from __future__ import annotations

import copy
import functools
import types
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from ortlab.engine.patching import replace
from ortlab.errors import BuildError, ExecutionError

if TYPE_CHECKING:
    from collections.abc import Callable

_MADE_IN_PYTHON: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which a class statement sets
_FIXED: Final = (str, bytes, type, torch.dtype, torch.device, torch.memory_format, type(None))
"""Types of what is the same in every step."""

_PLAIN_MAPPINGS: Final = frozenset({dict, OrderedDict, defaultdict})


def install() -> None:
    """Let forwards return objects that hold tensors. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule import _graph_transition_manager as transitions
    from onnxruntime.training.ortmodule import _io

    replace(_io, "_extract_schema", _take_apart)
    replace(transitions, "unflatten_data_using_schema", _put_together)


# --- the parts --------------------------------------------------------------------------------------------------


class Part(ABC):
    """A part of what a forward returns, without its tensors."""

    @abstractmethod
    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the part with the tensors of a step."""


@dataclass(frozen=True)
class FixedPart(Part):
    """What is the same in every step, such as a dtype, a class or a text."""

    value: Any

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:  # noqa: ARG002 - the protocol's
        """Return the value."""
        return self.value


@dataclass(frozen=True)
class TensorPart(Part):
    """A tensor, by its place among those of the graph, where complex numbers are pairs of real ones."""

    index: int
    is_complex: bool

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tensor."""
        tensor = tensors[self.index]
        return torch.view_as_complex(tensor) if self.is_complex else tensor


@dataclass
class _Numbers:
    """Where the tensor is that holds all numbers of a result."""

    index: int = -1


@dataclass(frozen=True)
class NumberPart(Part):
    """A number in an object, by its place in the one tensor of the graph that holds all of them."""

    # A trace makes a tensor of a number that comes from a size, so that it is right for batches of other sizes.

    numbers: _Numbers
    place: int
    kind: type

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the number."""
        return self.kind(tensors[self.numbers.index][self.place])


@dataclass(frozen=True)
class SequencePart(Part):
    """A list, a tuple or the like, of class `kind`."""

    kind: type
    items: tuple[Part, ...]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a new one."""
        make: Any = getattr(self.kind, "_make", self.kind)  # that of a named tuple
        return make([item.filled(tensors) for item in self.items])


@dataclass(frozen=True)
class MappingPart(Part):
    """A mapping; `template` has its class and what else it needs, but other values."""

    template: Mapping[Any, Any]
    items: dict[Any, Part]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a new one."""
        made: Any = copy.copy(self.template)
        for key, item in self.items.items():
            made[key] = item.filled(tensors)
        return made


@dataclass(frozen=True)
class ObjectPart(Part):
    """An object that consists of its attributes."""

    kind: type
    attributes: dict[str, Part]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a new one; its class's `__init__` is not called."""
        base = types.SimpleNamespace if issubclass(self.kind, types.SimpleNamespace) else object
        made: Any = base.__new__(self.kind)
        for name, part in self.attributes.items():
            object.__setattr__(made, name, part.filled(tensors))
        return made


def _put_together(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``unflatten_data_using_schema``, which knows only ORT's own schemas."""

    def unflatten_data_using_schema(data: Any, schema: Any) -> Any:
        return schema.filled(data) if isinstance(schema, Part) else original(data, schema)

    return unflatten_data_using_schema


# --- taken apart ------------------------------------------------------------------------------------------------


def _take_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_io._extract_schema``, which knows only tensors in plain containers."""

    def extract_schema(data: Any, device: Any) -> Any:
        if _is_plain(data):
            return original(data, device)
        traced = bool(torch._C._get_tracing_state())
        taken = _Taken(device, _numbers_seen.get() if traced else ())
        schema = taken.part(data)
        if not traced:
            _numbers_seen.set(tuple(taken.number_places))
            _note(taken)
        return taken.all_tensors(), schema

    return extract_schema


def _is_plain(data: Any) -> bool:
    """Say whether ORT's own functions can take it apart."""
    if isinstance(data, (list, tuple)) and not isinstance(data, torch.Size):
        return all(map(_is_plain, data))
    if isinstance(data, Mapping):
        return all(isinstance(key, str) for key in data) and all(map(_is_plain, data.values()))
    if isinstance(data, torch.Tensor):
        return not data.is_complex()
    return data is None or isinstance(data, (str, bool, int, float))


_numbers_seen: Final[ContextVar[tuple[int, ...]]] = ContextVar("numbers_seen", default=())
"""Which leaves of a result were numbers in an object, when ORTModule ran the forward before it traced it."""


class _Taken:
    """The tensors that were found in what a forward returned, and the classes of the objects that held them."""

    # `device` is where numbers become tensors; `numbers` are the leaves, counted from 0, that are numbers although a
    # trace has made tensors of them.

    def __init__(self, device: Any, numbers: Sequence[int]) -> None:
        self.outermost: dict[str, None] = {}
        self.number_places: list[int] = []
        self._leaves = 0
        self._known_numbers = frozenset(numbers)
        self._tensors: list[torch.Tensor] = []
        self._numbers: list[torch.Tensor] = []
        self._place = _Numbers()
        self._device = device
        self._around: list[object] = []

    def part(self, data: Any, *, in_object: bool = False) -> Part:
        """Take a part of a result apart."""
        # A number in an object stays one. One beside the tensors of a result becomes a tensor, as ORT makes of it.
        if isinstance(data, torch.Tensor):
            known = self._leaves in self._known_numbers
            return self._number(data, int) if known else self._tensor(data)
        if isinstance(data, _FIXED) or (in_object and isinstance(data, bool)) or _is_global_function(data):
            return FixedPart(data)
        if isinstance(data, (bool, int, float)):
            return (
                self._number(data, type(data))
                if in_object
                else self._tensor(torch.tensor(data, device=self._device))
            )
        if any(data is one for one in self._around):
            raise _refusal(data, "it holds itself")
        self._around.append(data)
        try:
            return self._held(data, in_object=in_object)
        finally:
            self._around.pop()

    def _held(self, data: Any, *, in_object: bool) -> Part:
        kind = type(data)
        if isinstance(data, Mapping) and not _is_object(data):
            items = {key: self.part(value, in_object=in_object) for key, value in data.items()}
            by_name = kind not in _PLAIN_MAPPINGS
            # As torch_io_helper makes it of a `ModelOutput`, whose keys are attributes as well.
            template: Any = kind(**items) if by_name else copy.copy(data)
            if not by_name:
                template.clear()
            return MappingPart(template, items)
        if isinstance(data, Sequence):
            in_object |= isinstance(data, torch.Size)
            return SequencePart(kind, tuple(self.part(value, in_object=in_object) for value in data))
        if not _is_object(data):
            raise _refusal(data, "no attributes of it can be read that are all that there is to it")
        if not in_object:
            self.outermost[kind.__name__] = None
        return ObjectPart(kind, {name: self.part(value, in_object=True) for name, value in _attributes(data)})

    def all_tensors(self) -> list[torch.Tensor]:
        """Return the tensors, the last of which holds the numbers, if there are any."""
        self._place.index = len(self._tensors)
        return self._tensors + ([torch.stack(self._numbers)] if self._numbers else [])

    def _tensor(self, tensor: torch.Tensor) -> Part:
        self._leaves += 1
        is_complex = tensor.is_complex()
        self._tensors.append(torch.view_as_real(tensor.resolve_conj()) if is_complex else tensor)
        return TensorPart(len(self._tensors) - 1, is_complex)

    def _number(self, number: float | torch.Tensor, kind: type) -> Part:
        self.number_places.append(self._leaves)
        self._leaves += 1
        self._numbers.append(torch.as_tensor(number, dtype=torch.float64, device=self._device))
        return NumberPart(self._place, len(self._numbers) - 1, kind)


def _is_global_function(data: object) -> bool:
    """Say whether it is a function that holds nothing of a step."""
    if isinstance(data, types.FunctionType):
        return not data.__closure__
    return isinstance(data, types.BuiltinFunctionType) and isinstance(
        data.__self__, (types.ModuleType, type(None))
    )


def _is_object(data: object) -> bool:
    """Say whether an object consists of its attributes: its classes are written in Python, and it is no module."""
    kinds = type(data).__mro__[:-1]
    return not isinstance(data, (torch.nn.Module, type)) and all(
        kind is types.SimpleNamespace or kind.__flags__ & _MADE_IN_PYTHON for kind in kinds
    )


def _attributes(data: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(data, "__dict__", {}).items()
    for kind in type(data).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in {"__dict__", "__weakref__"} and hasattr(data, name):
                yield name, getattr(data, name)


def _note(taken: _Taken) -> None:
    """Warn of what objects cost."""
    if not taken.outermost:
        return
    advice = (
        " Without it steps need less memory: model.config.use_cache = False."
        if any(name.endswith("Cache") for name in taken.outermost)
        else ""
    )
    warnings.warn(
        f"The forward returns {', '.join(taken.outermost)}, so that each of its tensors is an output of the "
        f"graph.{advice}",
        UserWarning,
        stacklevel=2,
    )


def _refusal(data: object, why: str) -> BuildError:
    kind = type(data)
    return BuildError(
        "The forward of this module returns something that is no tensor and holds none in containers or attributes.",
        why=f"ONNX Runtime gives back tensors. This is {kind.__module__}.{kind.__qualname__}: {why}.",
        fix="Let the module return tensors, in tuples, lists, dicts or dataclasses.",
    )


# ---- outputs that no graph makes -----------------------------------------------------------------------------------


_TOUCHED: Final = tuple(
    """abs add and array bool call contains delitem divmod eq float floordiv ge getitem gt iadd imul index
    int invert isub iter itruediv le len lt matmul mod mul ne neg or pos pow radd rmatmul rmul rsub
    rtruediv setitem sub truediv xor""".split()  # noqa: SIM905 - so many words are easier to read without quotes
)
"""What Python and NumPy ask of a tensor by methods that `__getattr__` does not see."""


class UnmadeOutputError(ExecutionError, AttributeError):
    """An output was read that is not made in training; for `hasattr` it has no attributes."""


class UnmadeOutput:
    """Stands for an output that no graph makes; whatever is asked of it raises `UnmadeOutputError`."""

    # `name` is the output's, `switch` the option that leaves it out.

    def __init__(self, name: str, switch: str) -> None:
        self.__dict__.update(_name=name, _switch=switch)

    def __repr__(self) -> str:
        return f"<{self._name}: not made while {self._switch} is on>"

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(f".{name}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        self._refuse(f".{name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Refuse what torch would compute."""
        given = [*args, *(kwargs or {}).values()]
        given += [item for one in given if isinstance(one, (list, tuple)) for item in one]
        next(one for one in given if isinstance(one, cls))._refuse(f" by torch.{func.__name__}")

    def _refuse(self, how: str) -> NoReturn:
        # A copy is asked before it has attributes (`copy.deepcopy`, `pickle`).
        name, switch = (vars(self).get(attribute, "") for attribute in ("_name", "_switch"))
        raise UnmadeOutputError(
            f"The output '{name}' was read ({how.strip()}), and it is not made.",
            why=f"While {switch} is on, the loss is computed in blocks of rows, and no graph that trains makes "
            "all logits.",
            fix=f"Read them in eval mode under torch.no_grad(), or switch it off: lab.set({switch}=False).",
        )


def _touch(name: str) -> Any:
    def touched(self: UnmadeOutput, *_args: Any, **_kwargs: Any) -> NoReturn:
        self._refuse(name)

    return touched


for _name in _TOUCHED:
    setattr(UnmadeOutput, f"__{_name}__", _touch(f"__{_name}__"))


@dataclass(frozen=True)
class UnmadePart(Part):
    """A result, of structure `returned`, some of whose tensors the graph does not make: the names of these by place."""

    returned: Any
    unmade: Mapping[int, str]
    switch: str

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result with the tensors that there are."""
        from onnxruntime.training.ortmodule import _graph_transition_manager as transitions

        every, stand_ins = list(tensors), {}
        for place in sorted(self.unmade):
            mark = torch.empty(0)  # ORT's own structures take tensors only
            every.insert(place, mark)
            stand_ins[id(mark)] = UnmadeOutput(self.unmade[place], self.switch)
        return _replaced(transitions.unflatten_data_using_schema(every, self.returned), stand_ins)


def _replaced(data: Any, instead: Mapping[int, UnmadeOutput]) -> Any:
    """Put other things in the place of some tensors of a result that was just made."""
    again = functools.partial(_replaced, instead=instead)
    if isinstance(data, torch.Tensor):
        return instead.get(id(data), data)
    if isinstance(data, Mapping):
        made: Any = data
        for key, value in list(data.items()):
            new = again(value)
            if new is not value:
                made[key] = new
    elif isinstance(data, (list, tuple)) and not isinstance(data, torch.Size):
        items = [again(value) for value in data]
        if any(new is not old for new, old in zip(items, data, strict=True)):
            make: Any = getattr(type(data), "_make", type(data))
            return make(items)
    elif hasattr(data, "__dict__") and not isinstance(data, type):
        for name, value in list(vars(data).items()):
            new = again(value)
            if new is not value:
                object.__setattr__(data, name, new)
    return data


def names_of_tensors(schema: Any, around: str = "") -> dict[int, str]:
    """Return how a user reads each tensor of a result, by its place: "logits", "[1]", "states[0]"."""
    if isinstance(schema, Mapping):
        inside = [(f"{around}.{key}" if around else str(key), value) for key, value in schema.items()]
    elif isinstance(schema, (list, tuple)):
        inside = [(f"{around}[{place}]", value) for place, value in enumerate(schema)]
    else:
        return _named(schema, around)
    found: dict[int, str] = {}
    for name, value in inside:
        found |= names_of_tensors(value, name)
    return found


def _named(schema: Any, name: str) -> dict[int, str]:
    """Name what is no plain container: a tensor, or a structure of `ortlab.engine.tracing`."""
    if hasattr(schema, "returned"):
        return names_of_tensors(schema.returned, name)
    if isinstance(schema, (SequencePart, MappingPart)):
        return names_of_tensors(schema.items, name)
    if isinstance(schema, ObjectPart):
        return names_of_tensors(schema.attributes, name)
    place = schema.index if isinstance(schema, TensorPart) else getattr(schema, "tensor_idx", None)
    return {} if place is None else {place: name or "output"}
