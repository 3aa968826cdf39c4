"""Watch a trace for what it makes of its one batch: a graph that holds values of that batch is good for no other.

Torch's tracer warns when a tensor becomes a Python number or a branch, but not what the number depends on. Those that
come from sizes alone are harmless to a key that has the sizes in it, and every model of transformers has some; those
that come from data are not.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch.jit._trace import TracerWarning
from torch.overrides import TorchFunctionMode

SIZES: Final = frozenset({"size", "shape", "numel", "nelement", "__len__", "sym_size", "sym_numel"})
"""Functions that ask a tensor for its sizes."""

_CHECK_SIZES: Final = frozenset({"batch_norm", "instance_norm", "group_norm", "multi_head_attention_forward"})
"""Functions of ``torch.nn.functional`` that branch on sizes, and on nothing else; a mode does not see their insides."""

FACTS: Final = frozenset(
    """dim ndim ndimension dtype device layout requires_grad is_leaf is_cuda is_cpu is_sparse is_quantized
    is_meta is_floating_point is_complex is_signed is_contiguous is_conj is_neg is_inference is_nested
    is_mkldnn is_mps element_size itemsize nbytes stride storage_offset get_device names _is_view
    retain_grad is_shared is_pinned is_tensor is_same_size result_type can_cast type name grad_fn is_xpu
    is_vulkan is_ipu is_xla is_mtia is_sparse_csr is_maia is_hpu has_names __hash__ _version output_nr
    is_distributed broadcast_tensors __dir__ register_hook _backward_hooks grad""".split()  # noqa: SIM905
)
"""Functions of a tensor in whose results its values have no part."""

_ARITHMETIC: Final = frozenset(
    """add sub mul div floor_divide remainder neg eq ne lt le gt ge true_divide __add__ __radd__ __sub__
    __rsub__ __mul__ __rmul__ __floordiv__ __rfloordiv__ __truediv__ __rtruediv__ __mod__ __rmod__
    __neg__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __pow__ __rdiv__ rsub __iadd__ __isub__ __imul__
    __ifloordiv__""".split()  # noqa: SIM905
)
_SIZED_BY_DATA: Final = frozenset(
    """nonzero nonzero_numpy argwhere masked_select unique unique_consecutive _unique2 bincount
    repeat_interleave histc combinations unique_dim tensor_split""".split()  # noqa: SIM905
)
_ELEMENTWISE: Final = _ARITHMETIC | frozenset(
    """where masked_fill masked_fill_ maximum minimum min max clamp clamp_min clamp_max logical_and
    logical_or pow logical_xor logical_not bitwise_and bitwise_or __and__ __or__ __xor__ __rand__
    __ror__ __invert__ __rpow__ copy_ fill_ add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__
    fmod isin stack cat to type_as abs exp log lerp addcmul addcdiv greater less greater_equal
    less_equal not_equal full_like""".split()  # noqa: SIM905
)
"""What takes a number among its arguments for a value, never for a size."""

_COMPARISONS: Final = {"lt": 0.0, "ge": 0.0, "le": -0.0, "gt": 1.0}
"""Comparisons that come out alike for each number from [0, 1) if the other is at most (`gt`: at least) this."""


class TracedValues(TorchFunctionMode):
    """Notes what of the batch becomes constant while a module is traced; enter it with `on`."""

    def __init__(self) -> None:
        super().__init__()
        self._baked = ""
        self._warned = ""
        self._of_sizes: dict[int, torch.Tensor] = {}  # kept alive, so that ids stay theirs
        self._sizes_need_data = False
        self._converting_size = False
        self._random = random_states()

    @property
    def baked_in(self) -> str:
        """What became constant, in words; empty if nothing did."""
        return self._baked or self._warned

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._get_tracing_state() is None:
            return function(*args, **kwargs)
        name = function_name(function)
        of_sizes = bool(args) and id(args[0]) in self._of_sizes
        before, self._converting_size = self._converting_size, of_sizes or name in SIZES | _CHECK_SIZES
        try:
            result = function(*args, **kwargs)
        finally:
            self._converting_size = before
        self._note(name, args, kwargs, result)
        return result

    def _note(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if not self._baked and random_states() != self._random:
            self._baked = "random numbers that Python or numpy drew"
        if name in SIZES:
            if self._sizes_need_data:
                self._bake(name)
            self._of_sizes |= {id(one): one for one in flat(result) if isinstance(one, torch.Tensor)}
            return
        if name in _SIZED_BY_DATA or self._is_sized_by(name, args, kwargs):
            self._sizes_need_data = True
        tensors = [one for one in flat((args, kwargs)) if isinstance(one, torch.Tensor)]
        of_sizes = bool(tensors) and all(id(one) in self._of_sizes for one in tensors)
        if isinstance(result, torch.Tensor):
            self._of_sizes.pop(id(result), None)  # data may have been written into it
            if of_sizes and name in _ARITHMETIC:
                self._of_sizes[id(result)] = result
        elif tensors and not of_sizes and name not in FACTS and holds_numbers(result):
            self._bake(name)

    def _is_sized_by(self, name: str, args: Any, kwargs: Any) -> bool:
        """Tell whether data may decide the size of a result: a mask as an index, a number among the sizes."""
        others = [one for one in flat((args[1:], kwargs)) if isinstance(one, torch.Tensor)]
        if name in ("__getitem__", "__setitem__"):
            return any(
                one.dtype in (torch.bool, torch.uint8) or (one.dim() == 0 and id(one) not in self._of_sizes)
                for one in others
            )
        if name == "where" and len(args) + len(kwargs) == 1:  # is nonzero by another name
            return True
        return name not in _ELEMENTWISE and any(
            one.dim() == 0 and not one.is_floating_point() and id(one) not in self._of_sizes for one in others
        )

    def _bake(self, name: str) -> None:
        self._baked = self._baked or f"a value of the first batch, which `{name.strip('_')}` made a constant"

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the block, and the tracer's warnings in it."""
        outer = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
            if issubclass(category, TracerWarning) and not self._converting_size:
                self._warned = self._warned or f"what the tracer warned of: {str(message).splitlines()[0]}"
            outer(message, category, *rest, **named)

        warnings.showwarning = show
        try:
            with self:
                yield
        finally:
            warnings.showwarning = outer


def function_name(function: Any) -> str:
    """Return the name of what a mode was given; of a property, that of the property."""
    name = str(getattr(function, "__name__", ""))
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return name


def flat(value: Any) -> Iterator[Any]:
    """Yield what lists, tuples, dicts and slices hold."""
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from flat(part)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def is_certain_of_uniform(name: str, other: object) -> bool:
    """Tell whether a comparison is alike for each number from [0, 1), as that of a layer drop of probability 0."""
    # The comparison has a name such as ``"lt"`` or ``"__lt__"``; it is certain only if `other` is a number.
    limit = _COMPARISONS.get(name.strip("_"))
    if limit is None or not isinstance(other, (int, float)):
        return False
    return other >= limit if name.strip("_") == "gt" else other <= limit


def holds_numbers(result: Any) -> bool:
    """Tell whether a result is or holds a value of Python or numpy."""
    return any(
        isinstance(one, (bool, int, float, complex, np.ndarray, np.generic, str)) for one in flat(result)
    )


def random_states() -> tuple[Any, ...]:
    """Read the states of the generators that torch does not know, to compare them."""
    generator: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the state that code may use
    state = generator["state"]
    return (random.getstate(), state["pos"], state["key"].tobytes())
