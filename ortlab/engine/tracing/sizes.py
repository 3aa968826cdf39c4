"""What a trace has decided by the sizes of its one batch, and whether it would decide alike for another.

All sizes are symbols of a graph, but ``if x.shape[0] == 3`` leaves one of its branches in it, and ``range(x.shape[0])``
that many turns; ORTModule 1.19.2 trains every other batch with them, without a word. Whatever Python reads of sizes in
a trace (see `guards`) is kept beside the export, with the part of the trace that computes it. When a call brings sizes
that have not been seen, that part is computed again: on numbers where it is about numbers, and on torch's ``meta``
device, which has shapes and no data, where it only asks for the size of something. An export is good for a call if
Python would read the same. Where that cannot be computed, as behind an autograd Function, it is good for the sizes that
it was made with, and for those that have given the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from ortlab.engine.tracing.origins import Origins, asks_sizes, is_sized_by_data, nodes_of
from ortlab.engine.tracing.traced_writes import not_traced

if TYPE_CHECKING:
    from ortlab.engine.schema import Schema

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The sizes of each tensor of a call."""

_REMEMBERED: Final = 4096
"""Shapes of calls for which an export remembers whether it is good."""

_NUMBERS: Final = {
    "__bool__": bool,
    "__complex__": complex,
    "__float__": float,
    "__int__": int,
    "__index__": int,
}

_LAYOUTS: Final[Mapping[str, Callable[[torch.Tensor], Any]]] = {
    "as_strided": lambda tensor: (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()),
    "nbytes": lambda tensor: tensor.nbytes,
    "storage_offset": lambda tensor: tensor.storage_offset(),
    "stride": lambda tensor: tensor.stride(),
}
LAYOUTS: Final = frozenset(_LAYOUTS)
"""Functions whose results follow from how a tensor lies in memory, and which no trace follows."""


def tensors_of(*values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a forward, in tuples, lists and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from tensors_of(*value.values())
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            yield from tensors_of(*value)


def shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """Return the sizes of each tensor among the arguments of a forward."""
    return tuple(tensor.shape for tensor in tensors_of(args, kwargs))


def batch_sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Schema:
    """Describe the sizes of the tensors among a forward's arguments, which a graph for one shape depends on."""
    return tuple(
        (f"size of tensor {position}", " x ".join(map(str, tensor.shape)))
        for position, tensor in enumerate(tensors_of(args, kwargs))
    )


def read(tensor: torch.Tensor, how: str) -> Any:
    """Return what Python gets where it reads a tensor by a function of this name."""
    if how in LAYOUTS:
        return _LAYOUTS[how](tensor)
    return _NUMBERS[how](tensor) if how in _NUMBERS else tensor.tolist()


class SizeRead(NamedTuple):
    """What Python has read of sizes at one place of the model's code."""

    place: str  # file, line and source
    how: str  # name of the function that read it
    found: Any
    value: int  # its number in the trace


class SizeGuards:
    """What an export depends on about the sizes of its inputs."""

    # `call` is the one that it was made for, and `readers` return its inputs from the arguments of any. Nothing is
    # known of other sizes without a `computation`, or without `reads`, as of an export from the disk.

    def __init__(
        self,
        reads: Sequence[SizeRead] | None,
        computation: Computation | None,
        readers: Sequence[Callable[..., Any]],
        call: tuple[Sequence[Any], Mapping[str, Any]],
    ) -> None:
        self.any = reads is None or bool(reads)  # whether the export depends on sizes at all
        self._reads = reads or ()
        self._computation = computation
        self._readers = readers
        self._good: dict[Shapes, bool] = {shapes(*call): True}
        if computation is not None and self._difference(*call) is not None:
            self._computation = None  # torch's meta device knows less of this model than its trace

    def hold(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether the export is good for the sizes of a call."""
        if not self.any:
            return True
        present = shapes(args, kwargs)
        good = self._good.get(present)
        if good is None:
            good = self._computation is not None and self._difference(args, kwargs) is None
            self._remember({present: good})
        return good

    def difference(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Say what of a call's sizes the export is not good for; empty if it is good for them."""
        if self.hold(args, kwargs):
            return ""
        found = self._difference(args, kwargs) if self._computation is not None else None
        where = f", at {self._reads[0].place}" if self._reads else ""
        return found or f"the forward depends on the sizes of its inputs{where}"

    def join(self, other: SizeGuards) -> None:
        """Take over what another export of the same graph knows: both are good for what either is good for."""
        if other._computation is not None and self._computation is None:
            self._reads, self._computation, self._readers = other._reads, other._computation, other._readers
            self._good = {present: good for present, good in self._good.items() if good}
        self._remember({present: good for present, good in other._good.items() if good})

    def _remember(self, known: Mapping[Shapes, bool]) -> None:
        for present, good in known.items():
            self._good.pop(present, None)
            self._good[present] = good
        while len(self._good) > _REMEMBERED:
            del self._good[next(iter(self._good))]

    def _difference(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Say what Python would read otherwise for a call; None if nothing, empty if that cannot be computed."""
        assert self._computation is not None  # noqa: S101 - asked where there is one
        try:
            with not_traced(), torch.no_grad():
                values = self._computation.values([reader(args, kwargs) for reader in self._readers])
                found = [read(values[one.value], one.how) for one in self._reads]
        except Exception:  # noqa: BLE001 - another branch may not fit these sizes, and meta kernels may be missing
            return ""
        for one, now in zip(self._reads, found, strict=True):
            if repr(now) != repr(one.found):  # 1 == 1.0 == True, and nan is not nan
                return f"the forward depends on a size, at {one.place} ({one.found} before, now {now})"
        return None


ANY_SIZES: Final = SizeGuards((), None, (), ((), {}))
"""Guards of an export that is good for all sizes."""


class _Step(NamedTuple):
    """One operator of a computation."""

    function: Callable[..., Any]
    inputs: Sequence[int]
    outputs: Sequence[int]


@dataclass(frozen=True)
class Computation:
    """The part of a trace that Python's reads of sizes depend on; values have the numbers that the trace gave them."""

    steps: Sequence[_Step]
    constants: Mapping[int, Any]
    inputs: Mapping[int, int]  # places among the inputs of the graph

    def values(self, inputs: Sequence[torch.Tensor]) -> Mapping[int, Any]:
        """Compute all values for these inputs, of which the shapes alone are looked at."""
        known = {number: _own(constant) for number, constant in self.constants.items()}
        known |= {number: _without_data(inputs[place]) for number, place in self.inputs.items()}
        for function, given, made in self.steps:
            results = function(*[known[one] for one in given])
            known.update(zip(made, results if len(made) != 1 else (results,), strict=True))
        return known


class Unknown(Exception):  # noqa: N818 - an answer, not an error
    """Raised where what a trace has read cannot be computed again."""


_TO_PYTHON: Final = frozenset(
    f"aten::{name}"
    for name in ("Int", "Float", "Bool", "IntImplicit", "FloatImplicit", "ScalarImplicit", "item")
)
_PLAIN: Final[Mapping[str, Callable[..., Any]]] = {
    "prim::ListConstruct": lambda *items: list(items),
    "prim::TupleConstruct": lambda *items: items,
    "prim::ListUnpack": lambda items: items if len(items) != 1 else items[0],
    "prim::TupleUnpack": lambda items: items if len(items) != 1 else items[0],
    "prim::NumToTensor": torch.tensor,
}


def computation_of(reads: Sequence[SizeRead], inputs: int, origins: Origins) -> Computation | None:
    """Cut what some reads depend on out of the present trace, whose first so many inputs are the call's."""
    # It is None where that cannot be computed again.
    internals: Any = torch._C
    graph = internals._get_tracing_state().graph()
    try:
        return _computation_of(graph, reads, inputs, origins)
    except Exception:  # noqa: BLE001 - `Unknown`, or an operator that this torch has no name or type for
        return None


def _computation_of(graph: Any, reads: Sequence[SizeRead], inputs: int, origins: Origins) -> Computation:
    origins.look()
    memory = origins.memory
    needed: dict[int, bool] = {}  # whether by its values, or for its shape only
    kept: set[int] = set()  # the memory of what is needed by its values

    def need(number: int, *, by_value: bool) -> None:
        needed[number] = needed.get(number, False) or by_value
        if by_value:
            kept.add(memory.get(number, number))

    for one in reads:
        need(one.value, by_value=one.how not in LAYOUTS)
    steps: list[_Step] = []
    constants: dict[int, Any] = {}
    for node in reversed(list(nodes_of(graph))):
        kind, made = node.kind(), [value.unique() for value in node.outputs()]
        given = list(node.inputs())
        writes = "(a!" in node.schema() and memory.get(given[0].unique()) in kept
        if needed.keys().isdisjoint(made) and not writes:
            continue
        by_value = writes or any(needed.get(one, False) for one in made) or is_sized_by_data(node)
        if kind == "prim::Constant":
            value = next(node.outputs()).toIValue()
            is_tensor = isinstance(value, torch.Tensor)
            constants[made[0]] = _without_data(value) if is_tensor and not by_value else value
            continue
        for value in given:
            shape_only = _is_tensors(value.type()) and (not by_value or asks_sizes(kind))
            need(value.unique(), by_value=not shape_only)
        steps.append(_Step(_function_of(node, by_value=by_value), [value.unique() for value in given], made))
    given = [value for value in graph.inputs() if value.unique() in needed]
    if any(needed[value.unique()] for value in given):
        raise Unknown  # data has a part in it
    places = {value.unique(): place for place, value in zip(range(inputs), graph.inputs(), strict=False)}
    constants |= {value.unique(): _like(value.type()) for value in given if value.unique() not in places}
    return Computation(tuple(reversed(steps)), constants, places)


def _like(kind: Any) -> torch.Tensor:
    """Return a tensor of a type of the trace, as that of a weight, without data."""
    return torch.empty_strided(kind.sizes(), kind.strides(), dtype=kind.dtype(), device="meta")


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _own(constant: Any) -> Any:
    """Copy a tensor that has data, which a step may write to."""
    return constant.clone() if isinstance(constant, torch.Tensor) and not constant.is_meta else constant


def _is_tensors(kind: Any) -> bool:
    """Tell whether a type of the trace is that of a tensor, or of a list of tensors."""
    while kind.kind() in ("ListType", "OptionalType"):
        kind = kind.getElementType()
    return bool(kind.kind() == "TensorType")


def _function_of(node: Any, *, by_value: bool) -> Callable[..., Any]:
    kind = node.kind()
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _TO_PYTHON:
        return torch.Tensor.item if kind != "aten::Int" else int
    space, _, name = kind.partition("::")
    if space == "prim" or any(True for _ in node.blocks()) or node.schema() == "(no schema)":
        raise Unknown
    schema = torch._C.parse_schema(node.schema())
    operator = getattr(getattr(getattr(torch.ops, space), name), schema.overload_name or "default")
    arguments = list(schema.arguments)
    device = "cpu" if by_value else "meta"
    if kind == "aten::_grouped_mm":
        # Its meta kernel takes no other dtype, and what is asked for is the shape.
        return lambda *given: operator(*[_as_bfloat16(one) for one in given]).to(given[0].dtype)

    def run(*given: Any) -> Any:
        positional, keywords = [], {}
        for argument, value in zip(arguments, given, strict=True):
            here = device if argument.name == "device" else value if by_value else _on_meta(value)
            if argument.kwarg_only:
                keywords[argument.name] = here
            else:
                positional.append(here)
        return operator(*positional, **keywords)

    return run


def _as_bfloat16(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.bfloat16() if is_float else _on_meta(value)


def _on_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_on_meta(one) for one in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value
