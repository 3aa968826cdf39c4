"""A call of an operator that torch executes inside ONNX Runtime's graph, and its gradient by torch's autograd.

Some operators have no form in ONNX, or their form has no gradient in 1.19.2. Such a call stays one node of the graph,
``org.pytorch.aten::ATen``, with the operator's name in its attribute `operator`; its attribute `overload_name` holds a
`TorchCall` as JSON: what is constant about the call, and which input stands for which argument. In the backward a
second node runs the operator again on the saved inputs and asks torch for the vector-Jacobian product, as
``torch.utils.checkpoint`` does. So every operator that torch can differentiate trains.

Where torch has a formula that needs no second forward (``derivatives.yaml``), `FORMULAS` holds it, or `OF_COMPLEX` for
complex numbers: each function takes the gradient of the operator's only result and the operator's arguments, and
returns the gradients of its tensors in their order.

Between the nodes of a graph, booleans that such a call returns are bytes, because that is what
`ortlab.engine.border` hands over, and complex numbers are pairs of real ones in a last dimension of two,
because ONNX Runtime has no complex tensors. Between two calls these are what they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ortlab.engine.border import storages, unshared
from ortlab.engine.operators.torch_kernels import broadcast

_aten: Final = torch.ops.aten
_NOTHING: Final = nullcontext()


def _cumsum(grad: Tensor, x: Tensor, dim: int, **_: Any) -> tuple[Tensor]:
    grad = grad.to(x.dtype)
    return (grad.flip(dim).cumsum(dim).flip(dim) if grad.dim() else grad,)


def _bilinear(grad: Tensor, x: Tensor, _: Any, align: bool, scales: Sequence[float] | None) -> tuple[Tensor]:  # noqa: FBT001
    return (
        _aten.upsample_bilinear2d_backward(grad, grad.shape[-2:], x.shape, align, *(scales or (None, None))),
    )


def _grid_sampler(grad: Tensor, x: Tensor, grid: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    backward = _aten.grid_sampler_2d_backward if x.dim() == 4 else _aten.grid_sampler_3d_backward  # noqa: PLR2004
    found: tuple[Tensor, Tensor] = backward(grad, x, grid, *how, [True, True])
    return found


def _rms_norm(
    grad: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, ...]:
    axes = tuple(range(-len(shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = torch.rsqrt(x.square().mean(axes, keepdim=True) + eps)
    normal = x * scale
    of_normal = grad if weight is None else grad * weight
    shared = (of_normal * normal).mean(axes, keepdim=True)
    of_x = torch.addcmul(of_normal, normal, shared, value=-1).mul_(scale)
    if weight is None:
        return (of_x,)
    return of_x, normal.mul_(grad).sum(tuple(range(x.dim() - len(shape))))


def _grouped_mm(
    grad: Tensor, a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any
) -> tuple[Tensor, Tensor]:
    product = _aten._grouped_mm
    return product(grad, b.transpose(-2, -1), offsets), product(a.transpose(-2, -1), grad, offsets)


def _extreme(grad: Tensor, a: Tensor, b: Tensor, *, sign: int) -> tuple[Tensor, Tensor]:
    shared = torch.where(a == b, grad / 2, grad)
    of_a = shared.masked_fill((a < b) if sign > 0 else (a > b), 0)
    of_b = shared.masked_fill((a > b) if sign > 0 else (a < b), 0)
    return of_a.sum_to_size(a.shape).to(a.dtype), of_b.sum_to_size(b.shape).to(b.dtype)


def _maximum(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _extreme(grad, a, b, sign=1)


def _minimum(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return _extreme(grad, a, b, sign=-1)


def _im2col(grad: Tensor, x: Tensor, *windows: Sequence[int]) -> tuple[Tensor]:
    return (_aten.col2im(grad, x.shape[-2:], *windows),)


def _mse(grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1) -> tuple[Tensor]:
    # Its operands were of one shape in the trace; the exported graph broadcasts them no more (`layer_symbolics`).
    every = x.expand(broadcast(x.shape, target.shape))
    return (_aten.mse_loss_backward(grad, every, target, reduction).sum_to_size(x.shape),)


def _bce_with_logits(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> tuple[Tensor]:
    if pos_weight is None:
        found = torch.sigmoid(x).sub_(target)
    else:
        positive = pos_weight * target
        found = (positive + 1 - target).mul_(torch.sigmoid(x)).sub_(positive)
    found = found if weight is None else found * weight
    found = found.mul_(grad)
    return (found.div_(x.numel()) if reduction == 1 else found,)


def _kl_div(
    grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> tuple[Tensor]:
    shape = broadcast(x.shape, target.shape)
    found = (-grad * (target.exp() if log_target else target)).expand(shape)
    return ((found / found.numel() if reduction == 1 else found).sum_to_size(x.shape),)


def _log_sigmoid(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    # As torch's kernel has it: 1 less what is lost, so that numbers near 1 round alike.
    return (_aten.log_sigmoid_backward(grad, x, torch.exp(-x.abs())),)


# Torch's `fft_norm_mode`: 0 divides by nothing, 1 by the root of the size, 2 by the size.
_DIVIDED_BY: Final = {None: 0, "backward": 0, "ortho": 1, "forward": 2}
_INVERSE_DIVIDED_BY: Final = {None: 2, "backward": 2, "ortho": 1, "forward": 0}


def _fft(
    grad: Tensor,
    x: Tensor,
    sizes: int | Sequence[int] | None,
    dims: int | Sequence[int] | None,
    norm: str | None,
    *,
    inverse: bool = False,
) -> tuple[Tensor, ...]:
    named = range(x.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    axes = [axis % x.dim() for axis in named]
    if sizes is not None and sizes != x.shape[axes[0]]:
        return ()
    divided_by = (_INVERSE_DIVIDED_BY if inverse else _DIVIDED_BY)[norm]
    found = _aten._fft_c2c(grad, axes, divided_by, forward=inverse)
    return (found if x.is_complex() else found.real,)


def _rfft(grad: Tensor, x: Tensor, n: int | None, dim: int, norm: str | None) -> tuple[Tensor, ...]:
    if n is not None and n != x.shape[dim]:
        return ()
    whole = grad.new_zeros(x.shape)
    whole.narrow(dim, 0, grad.shape[dim]).copy_(grad)
    return _fft(whole, x, None, dim, norm)


def _irfft(grad: Tensor, x: Tensor, _: int | None, dim: int, norm: str | None) -> tuple[Tensor, ...]:
    dim %= x.dim()
    kept, size = x.shape[dim], grad.shape[dim]
    if kept != size // 2 + 1:
        return ()
    found = _aten._fft_r2c(grad, [dim], _INVERSE_DIVIDED_BY[norm], onesided=True)
    found.narrow(dim, 1, size - kept).mul_(2)  # entries that stand for two
    return (found,)


ONE_KERNEL: Final[dict[tuple[str, str], Callable[..., tuple[Any, ...]]]] = {
    ("elu", "default"): lambda grad, x, *how: ("elu_backward", grad, *how, False, x),
    ("flip", "default"): lambda grad, _, dims: ("flip", grad, dims),
    ("glu", "default"): lambda grad, x, dim=-1: ("glu_backward", grad, x, dim),
    ("hardshrink", "default"): lambda grad, x, size: ("hardshrink_backward", grad, x, size),
    ("hardswish", "default"): lambda grad, x: ("hardswish_backward", grad, x),
    ("hardtanh", "default"): lambda grad, x, low, high: ("hardtanh_backward", grad, x, low, high),
    ("leaky_relu", "default"): lambda grad, x, slope: ("leaky_relu_backward", grad, x, slope, False),
    ("logit", "default"): lambda grad, x, eps: ("logit_backward", grad, x, eps),
    ("mish", "default"): lambda grad, x: ("mish_backward", grad, x),
    ("mse_loss", "default"): lambda grad, x, target, how=1: ("mse_loss_backward", grad, x, target, how),
    ("pixel_shuffle", "default"): lambda grad, _, factor: ("pixel_unshuffle", grad, factor),
    ("relu6", "default"): lambda grad, x: ("hardtanh_backward", grad, x, 0, 6),
    ("roll", "default"): lambda grad, _, shifts, dims=(): ("roll", grad, [-one for one in shifts], list(dims)),
    ("smooth_l1_loss", "default"): lambda grad, x, target, how=1, beta=1.0: (
        "smooth_l1_loss_backward", grad, x, target, how, beta
    ),
    ("softshrink", "default"): lambda grad, x, size: ("softshrink_backward", grad, x, size),
}  # fmt: skip
"""By operator and overload: the operator of torch that computes the gradient of the first tensor, and its arguments."""


def _by_kernel(kernel: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Tensor]]:
    def formula(*arguments: Any) -> tuple[Tensor]:
        operator, *given = kernel(*arguments)
        return (getattr(_aten, operator)(*given),)

    return formula


FORMULAS: Final[dict[tuple[str, str], Callable[..., tuple[Tensor, ...]]]] = {
    **{key: _by_kernel(kernel) for key, kernel in ONE_KERNEL.items()},
    ("_grouped_mm", "default"): _grouped_mm,
    ("binary_cross_entropy_with_logits", "default"): _bce_with_logits,
    ("cumsum", "default"): _cumsum,
    ("grid_sampler", "default"): _grid_sampler,
    ("im2col", "default"): _im2col,
    ("kl_div", "default"): _kl_div,
    ("log1p", "default"): lambda grad, x: (grad / (x + 1),),
    ("log_sigmoid", "default"): _log_sigmoid,
    ("max", "other"): _maximum,
    ("maximum", "default"): _maximum,
    ("min", "other"): _minimum,
    ("minimum", "default"): _minimum,
    ("mse_loss", "default"): _mse,  # of one that is broadcast, too
    ("rms_norm", "default"): _rms_norm,
    ("upsample_bilinear2d", "vec"): _bilinear,
}
"""By operator, without its namespace ``aten::``, and overload.

What returns fewer gradients than there are tensors knows those of the first tensors only: a loss's target needs none.
"""

OF_COMPLEX: Final[dict[tuple[str, str], Callable[..., tuple[Tensor, ...]]]] = {
    ("abs", "default"): lambda grad, x: (x.sgn().mul_(grad),),
    ("fft_fft", "default"): _fft,
    ("fft_fftn", "default"): _fft,
    ("fft_ifft", "default"): partial(_fft, inverse=True),
    ("fft_irfft", "default"): _irfft,
    ("fft_rfft", "default"): _rfft,
    ("real", "default"): lambda grad, _: (torch.complex(grad, torch.zeros_like(grad)),),
}
"""As `FORMULAS`, for calls that take or return complex numbers; without those in which a transform changes a size."""


TENSOR, BOOLEAN, COMPLEX = "tensor", "boolean", "complex"
NUMBER, NUMBERS, TENSORS, VALUE = "number", "numbers", "tensors", "value"

_GRADIENT: Final = "_vjp"
"""Ends the name of the node that computes a gradient."""


@dataclass(frozen=True)
class TorchCall:
    """What is constant about one call of an operator."""

    overload: str  # "default" for the unnamed one
    # One entry for each argument of the schema: ("tensor",), ("boolean",) or ("complex",) for an input of the node,
    # ("number",) and ("numbers",) for an input that becomes a Python number or a list of them, ("tensors", kinds) for a
    # list, with None for one that is not given, ("value", value) for a constant.
    arguments: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[str, int], ...]  # torch's dtype ("float32", "bool") and rank of each output
    # Whether it draws numbers and has a gradient. Then the generator's state before the call is one more output, from
    # which the backward draws the same numbers again.
    random: bool = False
    # Whether it gives one more byte, and whether it takes the one that a call before it gives, to run after that. Of
    # calls with one text, ORT knows one gradient, for as many inputs as one of them has.
    awaited: bool = False
    waits: bool = False
    gradient_of: tuple[int, ...] = ()  # the inputs whose gradient the second node gives
    gradients_from: tuple[int, ...] = ()  # the outputs whose gradient it gets, as its first inputs

    @property
    def text(self) -> str:
        """The call as the attribute `overload_name` of its node; equal calls have equal texts."""
        said = {name: value for name, value in asdict(self).items() if value not in ((), False)}
        return json.dumps(said, separators=(",", ":"))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each input of the forward node stands for; an element of a list of tensors is one input."""
        kinds: list[str] = []
        for kind, *rest in self.arguments:
            if kind == TENSORS:
                kinds += [element for element in rest[0] if element is not None]
            elif kind != VALUE:
                kinds.append(kind)
        return tuple(kinds)

    def trained(self, inputs: Sequence[int], outputs: Sequence[int]) -> TorchCall:
        """Return the call with the gradients of `inputs` to be computed from those of `outputs`."""
        return replace(self, gradient_of=tuple(inputs), gradients_from=tuple(outputs))


def is_torch_call(overload_name: str) -> bool:
    """Say whether the overload of an ATen node is a `TorchCall`; those of operators are identifiers."""
    return overload_name.startswith("{")


def gradient_name(operator: str) -> str:
    """Return the name of the node that computes the gradient of `operator`."""
    return operator + _GRADIENT


def parsed(text: str) -> TorchCall:
    """Read a call from its text."""
    said = json.loads(text)
    return TorchCall(**{name: _tuples(value) for name, value in said.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class CallableCall:
    """A `TorchCall` with its operator, ready to be executed with ORT's tensors."""

    name: str
    call: TorchCall

    @staticmethod
    @cache
    def find(name: str, text: str) -> CallableCall:
        """Look a call up, once; see `ortlab.engine.operators.aten_executor.Operator.find`."""
        return CallableCall(name, parsed(text))

    def is_tensor(self, index: int, *, is_input: bool) -> bool:
        """Say whether an input or output is a tensor, or else a value that ORT keeps on the CPU."""
        index -= len(self.call.gradients_from) if self.is_gradient else 0
        # Behind its arguments, the gradient of a call that draws gets the state of the generator.
        is_argument = is_input and 0 <= index < len(self.call.kinds)
        return not is_argument or self.call.kinds[index] not in {NUMBER, NUMBERS}

    def execute(self, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Call the operator, or compute its gradient."""
        # No output shares memory with an input or with another output, because ORT may overwrite any buffer whose last
        # reader has run.
        with _plain():
            outputs = self._gradient(tensors) if self.is_gradient else self._forward(tensors)
        owned = storages(tensors)
        return tuple(None if output is None else unshared(output.detach(), owned) for output in outputs)

    def results(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the outputs of the forward node; unlike `execute`, it takes tensors without memory, too."""
        with _plain():
            return self._forward(tensors)

    def _forward(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        state = [_generator_state(_device(tensors))] if self.call.random else []
        state += [torch.zeros(1, dtype=torch.uint8, device=_device(tensors))] if self.call.awaited else []
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:
            return self._results(tensors) + state

    def _gradient(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        asked = len(self.call.gradients_from)
        gradients, rest = tensors[:asked], list(tensors[asked:])
        state = rest.pop() if self.call.random else None
        if self._formula is not None and gradients[0] is not None:
            given, named = self._given_arguments(rest)
            of_result = _crossed(gradients[0], COMPLEX if self._dtypes[0].is_complex else TENSOR)
            by_input = [_crossing(one, one.dtype) for one in self._formula(of_result, *given, **named)]
            asked = max(self.call.gradient_of) + 1
            if asked <= len(by_input):
                return [by_input[index] if index in self.call.gradient_of else None for index in range(asked)]
        for index in self.call.gradient_of:
            rest[index] = _given(rest[index]).detach().requires_grad_()
        with torch.enable_grad(), _drawing_again(state, _device(rest)):
            results = self._results(rest)
        sources = [_given(rest[index]) for index in self.call.gradient_of]
        followed = [
            (results[index], gradient)
            for index, gradient in zip(self.call.gradients_from, gradients, strict=True)
            if gradient is not None and results[index].requires_grad
        ]
        found: Sequence[Tensor | None] = [None] * len(sources)
        if followed:
            ends, followed_gradients = zip(*followed, strict=True)
            found = torch.autograd.grad(ends, sources, followed_gradients, allow_unused=True)
        outputs: list[Tensor | None] = [None] * (max(self.call.gradient_of) + 1)
        for index, source, gradient in zip(self.call.gradient_of, sources, found, strict=True):
            # An embedding bag that is told to give a sparse gradient gets a dense one, as a graph has.
            outputs[index] = torch.zeros_like(source) if gradient is None else gradient.to_dense()
        return outputs

    def _results(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        given, named = self._given_arguments(tensors)
        results = self.operator(*given, **named)
        several = results if isinstance(results, tuple | list) else (results,)
        return [_crossing(result, dtype) for result, dtype in zip(several, self._dtypes, strict=True)]

    def _given_arguments(self, tensors: Sequence[Tensor | None]) -> tuple[list[Any], dict[str, Any]]:
        """Return the operator's arguments, those by position and those by name."""
        values = list(self._values(tensors))
        by_position = len(values) - len(self._names)
        return values[:by_position], dict(zip(self._names, values[by_position:], strict=True))

    # What is the same in each call takes longer to find than a small operator to run.

    @cached_property
    def is_gradient(self) -> bool:
        """Whether it computes the gradient of the operator."""
        return self.name.endswith(_GRADIENT)

    @cached_property
    def operator(self) -> Any:
        """The operator of torch, or the one whose gradient it computes."""
        namespace, _, base = self.name.removesuffix(_GRADIENT).rpartition("::")
        return getattr(getattr(getattr(torch.ops, namespace or "aten"), base), self.call.overload)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The names of the operator's last arguments, those that have to be given by name."""
        return tuple(one.name for one in self.operator._schema.arguments if one.kwarg_only)

    @cached_property
    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(getattr(torch, dtype) for dtype, _ in self.call.results)

    @cached_property
    def _formula(self) -> Callable[..., tuple[Tensor, ...]] | None:
        """The formula of the gradient, where only tensors are inputs; each of these operators has one result."""
        name = self.name.removesuffix(_GRADIENT).removeprefix("aten::")
        kinds = {*self.call.kinds, *(COMPLEX for dtype in self._dtypes if dtype.is_complex)}
        if not kinds <= {TENSOR, COMPLEX}:
            return None
        return (OF_COMPLEX if COMPLEX in kinds else FORMULAS).get((name, self.call.overload))

    def _values(self, tensors: Sequence[Tensor | None]) -> Iterator[Any]:
        inputs = iter(tensors)
        for kind, *rest in self.call.arguments:
            if kind == VALUE:
                yield list(rest[0]) if isinstance(rest[0], tuple) else rest[0]
            elif kind == TENSORS:
                yield [None if one is None else _crossed(next(inputs), one) for one in rest[0]]
            elif kind == NUMBER:
                yield _given(next(inputs)).item()
            elif kind == NUMBERS:
                yield _given(next(inputs)).reshape(-1).tolist()
            else:
                yield _crossed(next(inputs), kind)


class ArgumentType(NamedTuple):
    """The type of an argument in the schema of an operator."""

    kind: str  # of the value, or of the list's elements: "TensorType", "IntType", "FloatType" ...
    is_optional: bool
    is_list: bool


def argument_type(argument: Any) -> ArgumentType:
    """Read the type of an argument; ``Optional`` may wrap a list and a list's elements."""
    kind, is_optional, is_list = argument.type, False, False
    while kind.kind() in {"OptionalType", "ListType"}:
        is_optional |= kind.kind() == "OptionalType"
        is_list |= kind.kind() == "ListType"
        kind = kind.getElementType()
    return ArgumentType(kind.kind(), is_optional, is_list)


def crossing_type(dtype: str, rank: int) -> tuple[str, int]:
    """Return the dtype and rank that a result has between the nodes of a graph."""
    real = {"complex64": "float32", "complex128": "float64"}.get(dtype)
    return (real, rank + 1) if real else ("uint8" if dtype == "bool" else dtype, rank)


def draws(operator: str, text: str) -> bool:
    """Say whether a call draws numbers from torch's generators."""
    return torch.Tag.nondeterministic_seeded in CallableCall.find(operator, text).operator.tags


def is_elementwise(operator: str, call: TorchCall) -> bool:
    """Say whether a call works on each element of its only tensor, whose shape its result has."""
    tensors = [kind for kind in call.kinds if kind not in {NUMBER, NUMBERS}]
    return tensors == [TENSOR] and torch.Tag.pointwise in CallableCall(operator, call).operator.tags


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise TypeError("an input that the call needs was not passed by ONNX Runtime")
    return tensor


def _crossed(tensor: Tensor | None, kind: str) -> Tensor:
    """Turn an input of a node into what it is in torch."""
    tensor = _given(tensor)
    if kind == BOOLEAN:
        return tensor.view(torch.bool)
    return torch.view_as_complex(tensor.contiguous()) if kind == COMPLEX else tensor


def _crossing(result: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a result into what ONNX Runtime can hold, of the dtype that it had when it was traced."""
    result = result.to(dtype)
    if result.is_complex():
        return torch.view_as_real(result.resolve_conj())
    return result.to(torch.uint8) if result.dtype is torch.bool else result


def _plain() -> AbstractContextManager[object]:
    """Leave the caller's autocast: the trace has recorded the casts that it makes."""
    entered = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not entered:
        return _NOTHING
    stack = ExitStack()
    for kind in entered:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _device(tensors: Sequence[Tensor | None]) -> torch.device:
    """Return the device of the tensors; those that stand for numbers are on the CPU."""
    given = [tensor.device for tensor in tensors if tensor is not None]
    return next((device for device in given if device.type == "cuda"), torch.device("cpu"))


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@contextmanager
def _drawing_again(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw the numbers that were drawn from `state` on once more, and leave the generators as they are."""
    if state is None:
        yield
        return
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        if on_gpu:
            torch.cuda.set_rng_state(state.cpu(), device)
        else:
            torch.set_rng_state(state.clone())
        yield
