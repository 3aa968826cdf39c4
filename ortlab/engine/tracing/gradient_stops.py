"""Stop gradients in a graph where PyTorch stops them: `detach`, `.data`, and blocks under ``torch.no_grad()``.

Torch exports `detach` as nothing and does not record the other two, and ORTModule 1.19.2 exports the whole module
under ``no_grad`` (``_graph_transition_manager._get_exported_model``), so that nothing inside can be told apart.
Gradients then flow where the module's author cut them, and training goes wrong without a word.

So while a module is exported, what cuts a value off without being recorded gets a `detach` that is; what writes to
memory where a trace cannot say which values change with it is refused. `graph_passes.keep_needed_stops` puts the stops
that are needed into a form that ORT's gradient builder takes.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from ortlab.engine.operators.symbolic_words import aten, is_training_export
from ortlab.engine.passes.graph_edits import ATEN, STOP
from ortlab.engine.patching import replace
from ortlab.engine.tracing.graph_inputs import STATE_WRITES, give_out
from ortlab.engine.tracing.source_lines import in_words, model_frame
from ortlab.engine.tracing.taps import is_tracing
from ortlab.engine.tracing.traced_writes import (
    ExpandedWrites,
    TracedWrites,
    assign,
    memory,
    tensors_in,
    translatable,
)
from ortlab.errors import BuildError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_GET_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined] # a property, typed as a Tensor
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DETACH: Final = (torch.Tensor.detach, torch.detach)
_GRADIENTS: Final = {
    torch.autograd.grad: "grad",
    torch.autograd.backward: "backward",
    torch.Tensor.backward: "backward",
    torch._VF._make_dual: "jvp",  # type: ignore[attr-defined]
}
"""What a forward calls that computes gradients itself, and what users know it by."""
_WRITES_NOTHING: Final = frozenset(
    {"detach_", "requires_grad_", "share_memory_", "__index__", "__int__", "__invert__"}
)


def install() -> None:
    """Record in each export where gradients stop. Calling it again changes nothing."""
    from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
    from onnxruntime.training.ortmodule._io import _FlattenedModule

    CustomOpSymbolicRegistry.register("detach", "", _detach)
    CustomGradientRegistry.register_custom_stop_gradient_edges([0], ATEN, "ATen", STOP, "")
    replace(_FlattenedModule, "forward", _trace_with_gradients)
    replace(GraphTransitionManager, "_get_exported_model", _ask_functions)


def _detach(g: Any, x: Any) -> Any:
    """``Tensor.detach``: a copy that torch makes, through which no gradient flows."""
    if not is_training_export() or x.type().scalarType() not in {"Float", "Double", "Half", "BFloat16"}:
        return x
    return aten(g, STOP, x).setType(x.type())


def _trace_with_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run the forward of an export with gradients on, so that the blocks without them show."""
    from onnxruntime.training import ortmodule

    def forward(self: Any, *args: Any) -> Any:
        if not ortmodule.ORTMODULE_ONNX_EXPORT_CONTEXT[0]:
            return original(self, *args)
        stops = TracedStops(training=self.training)
        if (
            self.training
        ):  # what is a leaf in the export, and cannot be written to, may be none in the user's call
            args = tuple(one.clone() if getattr(one, "requires_grad", False) else one for one in args)
        writes = STATE_WRITES.get()
        if writes is not None and is_tracing():
            writes.begin()
        with torch.set_grad_enabled(self.training), stops.on():
            outputs = original(self, *args)
            return give_out(self, args, stops.written(args), outputs, stops)

    return forward


def _ask_functions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``GraphTransitionManager._get_exported_model``: it runs the forward once and then traces it."""

    def get_exported_model(*args: Any, **kwargs: Any) -> Any:
        with functions_asked():
            return original(*args, **kwargs)

    return get_exported_model


# --- in the trace -------------------------------------------------------------------------------------------------


_FILLING: Final = frozenset(
    "fill full_like index_fill masked_fill new_full scatter clamp clip clamp_min clamp_max".split()  # noqa: SIM905
)
"""Functions whose result has the dtype of their tensor, whatever a number among their arguments is."""

_PROMOTING: Final = frozenset(
    """add radd iadd sub rsub isub mul rmul div rdiv truediv rtruediv true_divide pow rpow where eq ne lt le gt ge less
    greater less_equal greater_equal not_equal bitwise_and bitwise_or bitwise_xor and rand iand or ror ior xor rxor
    ixor""".split()  # noqa: SIM905
)
"""Functions whose result has a dtype that follows from a number among their arguments, too."""

_NUMBERS: Final = ("fill_value", "value", "other", "self", "input", "min", "max")
"""Names of arguments that are numbers."""


_FLAGS: Final = (torch.tensor(False), torch.tensor(True))  # noqa: FBT003 - made here, since a trace warns of each


def _without_flags(function: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> tuple[Any, Any]:
    """Return the arguments of a function with numbers or tensors for Python's True and False."""
    # The tracer notes a flag as what no operator takes: "INTERNAL ASSERT FAILED ... We don't have an op for aten::mul".
    name = getattr(function, "__name__", "").strip("_")
    fill = kwargs.get("fill_value", (None, *args)[-1])
    if name == "full" and type(fill) is bool:
        kwargs = kwargs | {"dtype": kwargs.get("dtype") or torch.bool}
    elif name == "full" and isinstance(fill, torch.Tensor):  # a size, which is a number outside of a trace
        return args, kwargs | {"dtype": kwargs.get("dtype") or _dtype_of(fill)}
    elif name not in _FILLING | _PROMOTING or not any(type(one) is bool for one in (*args, *kwargs.values())):
        return args, kwargs
    keeps = name in _FILLING | {"full"} or any(one.dtype is not torch.bool for one in given)

    def number(value: Any) -> Any:
        return value if type(value) is not bool else int(value) if keeps else _FLAGS[value]

    named = {key: number(value) if key in _NUMBERS else value for key, value in kwargs.items()}
    return (*map(number, args),), named


def _dtype_of(number: torch.Tensor) -> torch.dtype:
    """Return the dtype that torch.full makes of a number of this kind."""
    if number.is_floating_point():
        return torch.get_default_dtype()
    return torch.bool if number.dtype is torch.bool else torch.int64


def _as_traced(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return a call that says to the tracer what this one means; refuse one for gradients."""
    if function in _GRADIENTS:
        _refuse_gradients(_GRADIENTS[function])
    if function is torch.Tensor.normal_ and is_tracing():
        # Torch's exporter takes its tensor for the mean, or its size for that of the first step.
        drawn = torch.ops.aten.normal_functional(args[0].detach(), *args[1:], **kwargs)
        return torch.Tensor.copy_, (args[0], drawn), {}
    if function is torch.Tensor.fill_diagonal_ and args[0].dim() == len(args) == 2 and not kwargs:  # noqa: PLR2004
        x, value = args  # a matrix; there is no operator that would compute what is written
        places = torch.eye(*x.shape, dtype=torch.bool, device=x.device)
        return torch.Tensor.masked_fill_, (x, places, value), {}
    if is_tracing() and any(type(one) is complex for one in (*args, *kwargs.values())):
        like = next(tensors_in((args, kwargs)))
        args = tuple(_complex(one, like) for one in args)
        kwargs = {key: _complex(one, like) for key, one in kwargs.items()}
    return _copying(function, args), args, kwargs


def _complex(value: Any, like: torch.Tensor) -> Any:
    """Return a complex number as a tensor made of real ones: the exporter has no constant of that kind."""
    if type(value) is not complex:
        return value
    like = like.real if like.is_complex() else like
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    # Made from a tensor that is no constant, since the exporter would fold it to one.
    return torch.view_as_complex(
        torch.stack([like.new_full((), part, dtype=dtype) for part in (value.real, value.imag)])
    )


def _copying(function: Any, args: Sequence[Any]) -> Any:
    """Return what stands for ``torch.tensor`` of a tensor, which the tracer would make a constant."""
    if function is not torch.tensor or not (args and isinstance(args[0], torch.Tensor)):
        return function

    def copy(
        x: torch.Tensor, *, requires_grad: bool = False, pin_memory: bool = False, **kind: Any
    ) -> torch.Tensor:
        made = x.detach().clone().to(**kind).requires_grad_(requires_grad)
        return made.pin_memory() if pin_memory else made

    return copy


class TracedStops(TorchFunctionMode):
    """Put a recorded `detach` on each result that torch cuts off without recording it."""

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self.in_function = False  # on while an autograd Function runs, whose inside is not part of the graph
        self._training = training  # a graph for inference has no gradients to stop, only writes to show
        self._writes = TracedWrites()
        self._expanded = ExpandedWrites()
        self._sharing: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._apart: list[weakref.ref[torch.Tensor]] = []  # `.data` of what has no gradient

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.in_function:
            return function(*args, **(kwargs or {}))
        function, args, kwargs = _as_traced(function, args, kwargs or {})
        if isinstance(kwargs.get("out"), torch.Tensor):
            return self._into(function, types, args, **kwargs)
        if function in (_GET_DATA, _SET_DATA):
            return self._data(*args)
        written = _written_by(function, args, kwargs)
        if not self._training:
            self._save_parameter(written)
            return self._with_writes(function, args, kwargs, written)
        self._check_reading(function, args, kwargs)
        if written is not None:
            self._check_write(written)
            written = self._expanded.target(written)
            args = (written, *args[1:])
            if not torch.is_grad_enabled() or self._is_apart(written, args[1:], kwargs):
                rest, kwargs = _mapped(_detached, (args[1:], kwargs))
                args = (args[0], *rest)
        result = self._with_writes(function, args, kwargs, written)
        if isinstance(written, torch.nn.Parameter):
            self._writes.written_parameter(written)
        sources = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if function in _DETACH:
            return self._cut(result, sources)
        return self.stopped(result, sources)

    def _check_reading(self, function: Any, args: Any, kwargs: Any) -> None:
        if self._expanded.stale(tensors_in((args, kwargs))):
            _refuse(
                "Reading an expanded tensor that was written to",
                "read what the write returned, as `y = y | x` does, or expand a copy",
            )
        if getattr(function, "__name__", "") == "as_strided":
            _check_place_in_memory(*args, **kwargs)

    def _into(self, function: Any, types: Any, args: Any, *, out: torch.Tensor, **kwargs: Any) -> Any:
        """Compute what is written to `out`, and copy it there: the exporter knows no operator that takes one."""
        if torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in((args, kwargs, out))):
            return function(*args, out=out, **kwargs)  # which PyTorch refuses
        result = self.__torch_function__(function, types, args, kwargs)
        if not isinstance(result, torch.Tensor) or result.shape != out.shape:
            _refuse("An `out` that takes another shape", "use what the function returns")
        return self.__torch_function__(torch.Tensor.copy_, types, (out, result))

    def _with_writes(self, function: Any, args: Any, kwargs: Any, written: torch.Tensor | None) -> Any:
        """Call a function with tensors that show what was written to their memory, and note what it writes."""
        given = list(tensors_in((args, kwargs)))
        args, kwargs = _without_flags(function, args, kwargs, given)
        call = function
        if getattr(function, "__name__", "") == "__setitem__" and is_tracing():
            args, call = (args[0], *translatable(*args)), assign
        if written is not None:
            self.refresh(given)
        result = call(*args, **kwargs)
        results = list(tensors_in(result))
        if written is not None:
            self._writes.note_write(written)
        elif results and self._writes.stale(given, results):
            self.refresh(given)
            result = function(*args, **kwargs)
            results = list(tensors_in(result))
        self._writes.note_result(function, args, kwargs, given, results)
        return result

    def written(self, inputs: Sequence[Any]) -> list[int]:
        """Return the places of the inputs that were written to, which have their last values then."""
        places = [place for place, one in enumerate(inputs) if self.wrote_to(one)]
        self.refresh([inputs[place] for place in places])
        return places

    def wrote_to(self, tensor: object) -> bool:
        """Tell whether the memory of a tensor was written to."""
        return self._writes.wrote_to(tensor)

    def refresh(self, given: list[torch.Tensor]) -> None:
        """Give tensors the values that were written to their memory through others."""
        if is_tracing() and not self._writes.refreshed(given):
            _refuse(
                "Reading a tensor whose memory was written through another one",
                "read what was written, or write to a copy: `y = y * 3` for `y.mul_(3)`",
            )

    def _data(self, x: torch.Tensor, *assigned: torch.Tensor) -> torch.Tensor | None:
        """Return the `.data` of a tensor, or check what is assigned to it."""
        if assigned:
            whole = isinstance(x, torch.nn.Parameter) or not x.requires_grad
            if whole and _is_like(x, *assigned) and not self._writes.has_views(x):
                with torch.no_grad():
                    self.__torch_function__(torch.Tensor.copy_, (), (x, *map(_detached, assigned)))
            else:
                _check_data(x, *assigned)
            return None
        # The tracer does not see `.data` and would make its value a constant.
        if not self._training or not x.requires_grad or isinstance(x, torch.nn.Parameter):
            if x.requires_grad and self._training:
                self._writes.keep_gradient(x)
            shown: torch.Tensor = self._with_writes(torch.Tensor.detach, (x,), {}, None)
            self._apart.append(weakref.ref(shown))
            return shown
        return self._cut(x.detach(), [x])

    def stopped(self, result: Any, sources: list[torch.Tensor]) -> Any:
        """Return the result of an operator on `sources`, which need gradients, with a `detach` where it has none."""
        # A view that is made without gradients says that it requires one, and is the leaf of a graph of its own.
        given = {id(source) for source in sources} if not torch.is_grad_enabled() else None

        def is_stopped(tensor: torch.Tensor) -> bool:
            ends = not tensor.requires_grad if given is None else id(tensor) not in given
            return ends and tensor.is_floating_point()

        def stop(tensor: torch.Tensor) -> torch.Tensor:
            return self._cut(tensor.detach(), sources) if is_stopped(tensor) else tensor

        # A result that needs nothing is returned as it is: a traced torch.Size loses its values when it is rebuilt.
        return _mapped(stop, result) if sources and any(map(is_stopped, tensors_in(result))) else result

    def _cut(self, cut: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
        """Remember which tensors share the memory of one that was cut off."""
        place = memory(cut)
        sharing = [source for source in sources if memory(source) == place]
        if place and sharing:
            self._sharing.setdefault(place, []).extend(weakref.ref(tensor) for tensor in (*sharing, cut))
        return cut

    def _check_write(self, written: torch.Tensor) -> None:
        parameter = self._save_parameter(written)
        if parameter is not None:
            if parameter.requires_grad:
                self._writes.keep_gradient(parameter)
            return
        sharing = (reference() for reference in self._sharing.get(memory(written), ()))
        if any(other is not None and other is not written for other in sharing):
            _refuse(
                "Writing to memory that a detached tensor shares", "write to a copy: `x.detach().clone()`"
            )
        if written.requires_grad and not torch.is_grad_enabled():
            _refuse(
                "Writing without gradients to a tensor that has one",
                "write it as a new value, such as `y = x + (f(x) - x).detach()`",
            )

    def _is_apart(self, written: torch.Tensor, rest: Any, kwargs: Any) -> bool:
        """Tell whether what is written has no gradient for what it is written to; refuse what has one for a view."""
        if not any(one.requires_grad for one in tensors_in((rest, kwargs))):
            return False
        if any(reference() is written for reference in self._apart):
            return True
        first = self._writes.first(written)
        if first is not written and self._writes.is_detached(written) and not first.requires_grad:
            _refuse("Writing a value with a gradient to a detached tensor", "write `value.detach()`")
        return False

    def _save_parameter(self, written: torch.Tensor | None) -> torch.nn.Parameter | None:
        """Return the parameter that will be written to through a tensor, of which the export keeps the values."""
        writes = STATE_WRITES.get()
        first = None if written is None else self._writes.first(written)
        if writes is None or not isinstance(first, torch.nn.Parameter):
            return None
        writes.save(first)
        return first

    @contextmanager
    def on(self) -> Iterator[None]:
        """Turn the mode on; under `functions_asked`, also for autograd Functions."""
        token = _on.set(self)
        try:
            with self:
                yield
        finally:
            _on.reset(token)

    def call_function(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the `apply` of an autograd Function, and cut off its results where torch does."""
        given = list(tensors_in((args, kwargs)))
        self.in_function = True
        try:
            if self._writes.stale(given, ()):
                self.refresh(given)
            before = [_version(tensor) for tensor in given]
            result = call(*args, **kwargs)
            for tensor, version in zip(given, before, strict=True):
                if _version(tensor) != version:
                    self._check_write(tensor)
                    self._writes.note_write(tensor, by_function=True)
        finally:
            self.in_function = False
        if torch.is_grad_enabled() or not self._training:
            return result  # its backward says where gradients go, in PyTorch and in ORT
        return self.stopped(result, [tensor for tensor in tensors_in(args) if tensor.requires_grad])


_on: Final[ContextVar[TracedStops | None]] = ContextVar("on", default=None)
_exporting: Final = threading.RLock()


@contextmanager
def functions_asked() -> Iterator[None]:
    """Show the mode each call of an autograd Function, which torch hides from modes."""
    # It has to last for a whole export: torch's exporter looks for the `symbolic` of a traced Function only if its
    # `apply` is still the one that was traced (``torch/csrc/jit/python/python_ir.cpp``, autogradFunction).
    with _exporting:
        original = Function.__dict__["apply"]

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            call: Callable[..., Any] = original.__get__(None, cls)
            stops = _on.get()  # None in another thread
            if stops is None or stops.in_function:
                return call(*args, **kwargs)
            return stops.call_function(call, args, kwargs)

        type.__setattr__(Function, "apply", classmethod(apply))
        try:
            yield
        finally:
            type.__setattr__(Function, "apply", original)


def _version(tensor: torch.Tensor) -> int:
    """Return how often torch has seen writes to a tensor's memory; it does not count those under inference_mode."""
    return 0 if tensor.is_inference() else tensor._version


def _written_by(function: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the tensor that an operator writes to, None if it makes new ones."""
    name = getattr(function, "__name__", "")
    # Augmented assignments arrive as `add_` and the like, or under names such as `__iadd__`.
    in_place = name == "__setitem__" or (name.startswith("__i") and name not in _WRITES_NOTHING)
    in_place |= name.endswith("_") and not name.endswith("__") and name not in _WRITES_NOTHING
    written = args[0] if args and (in_place or kwargs.get("inplace") is True) else None
    return written if isinstance(written, torch.Tensor) else None


def _check_place_in_memory(
    x: torch.Tensor, _size: Any = (), _stride: Any = (), storage_offset: int | None = None, **_: Any
) -> None:
    """Refuse an `as_strided` that counts from another place than the first element of its tensor."""
    if storage_offset is not None and x.storage_offset() != 0:
        _refuse(
            "as_strided with a storage_offset, of a tensor that begins inside its memory,", "use indexing"
        )


def _is_like(x: torch.Tensor, data: torch.Tensor) -> bool:
    return (x.dtype, x.device, x.shape, x.stride()) == (data.dtype, data.device, data.shape, data.stride())


def _check_data(x: torch.Tensor, data: torch.Tensor) -> None:
    """Refuse an assignment to `.data`, unless it does nothing, as that of ``module.to(dtype)`` often does."""
    present, given = (
        (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        for tensor in (x, data)
    )
    if present != given:
        _refuse("Assigning to `.data`", "use a new value, such as `y = f(x.detach())`")


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad and tensor.is_floating_point() else tensor


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(change, part) for part in value])
    return value


def _here() -> str:
    """Return where the model's code is, for the end of a sentence."""
    frame = model_frame()
    return f": {in_words(frame)}" if frame else "."


def _refuse_gradients(name: str) -> NoReturn:
    raise BuildError(
        f"A forward that computes gradients itself ({name}) cannot be exported{_here()}",
        why="A trace does not see what PyTorch's autograd computes, and ONNX Runtime has no gradients of gradients.",
        fix="Train this model with PyTorch, lab.set(engine='eager'), or wrap the modules of it that it takes no "
        "gradients of: ortlab.wrap(model, only=[...]).",
    )


def _refuse(what: str, instead: str) -> NoReturn:
    raise BuildError(
        f"{what} cannot be exported{_here()}",
        why="An ONNX graph has values and no memory; gradients or later steps would silently differ from PyTorch's.",
        fix=f"Instead, {instead}.",
    )
