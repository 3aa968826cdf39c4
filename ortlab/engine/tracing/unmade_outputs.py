"""What stands in a model's result for a tensor that the graph does not make: to touch it is an error that says why."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from ortlab.engine.tracing.outputs import MappingPart, ObjectPart, Part, SequencePart, TensorPart
from ortlab.errors import ExecutionError

_TOUCHED: Final = tuple(
    """abs add and array bool call contains delitem divmod eq float floordiv ge getitem gt iadd imul index
    int invert isub iter itruediv le len lt matmul mod mul ne neg or pos pow radd rmatmul rmul rsub
    rtruediv setitem sub truediv xor""".split()  # noqa: SIM905 - so many words are easier to read without quotes
)
"""What Python and NumPy ask of a tensor by methods that `__getattr__` does not see."""


class UnmadeOutputError(ExecutionError, AttributeError):
    """An output was read that is not made in training; for `hasattr` it has no attributes."""


class UnmadeOutput:
    """Stands for an output that no graph makes; whatever is asked of it raises `UnmadeOutputError`.

    `name` is the output's, `switch` the option that leaves it out.
    """

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
