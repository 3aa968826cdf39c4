"""Operators made of PyTorch's kernels for the CPU, which ``ATen`` nodes of a gradient graph call by name.

A node ``org.pytorch.aten::ATen`` whose operator is ``ortlab::<name>`` calls the function `<name>` of this module. Each
computes what the operators of ONNX Runtime that it stands for compute, with fewer passes over memory or with a faster
kernel; `torch_backward` and `exact_choice` put them into the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ortlab.engine.passes.graph_edits import NAMESPACE

_REDUCTIONS: Final = ("none", "mean", "sum")  # in the order of torch's numbers (at::Reduction)
_MEAN: Final = 1
_PLANE: Final = 2  # dimensions
_IMAGES: Final = 4
_MANY_CHANNELS: Final = 16  # as many as fit into a register
_WIDE_WINDOW: Final = 5
"""Entries of each side of a depthwise convolution's window from which on channels last are quicker."""

# --- memory for their outputs, kept from step to step -------------------------------------------------------------

SMALLEST_KEPT: Final = 2**20
"""Bytes from which on memory is kept; the C library itself keeps what is smaller."""

_LARGEST_OF_HEAP: Final = 2**25 - 2**16
"""Bytes of the largest block that raises the limit; with what the C library adds it has to stay below 32 MiB."""

# How many tensors and other holders a storage has; not in every build of torch, and then nothing is kept.
_holders = getattr(torch._C, "_storage_Use_Count", None)


class OutputBuffers:
    """The memory of one session, of which a piece is used again when nothing holds a tensor in it any more."""

    # ONNX Runtime takes the outputs of its own kernels from an arena. PyTorch gives the memory of a large tensor back
    # to the system when the tensor dies, and the next one gets new pages, which the system has to clear: for the logits
    # of a language model that takes a third as long as the matrix product that fills them.

    def __init__(self) -> None:
        self._kept: dict[int, list[torch.UntypedStorage]] = {}
        self._last_used: dict[int, int] = {}
        self._run = 0

    @property
    def size(self) -> int:
        """Bytes kept, in use or not."""
        return sum(size * len(kept) for size, kept in self._kept.items())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let `empty` take memory from here, for one run of the forward or of the backward graph."""
        self._run += 1
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return memory of at least `size` bytes that nobody holds."""
        # It is up to an eighth larger, so that batches of almost the same shape share it.
        step = 2 ** max(size.bit_length() - 4, 0)
        size = -(-size // step) * step
        self._last_used[size] = self._run
        kept = self._kept.setdefault(size, [])
        for storage in kept:
            if _holders is not None and _holders(storage._cdata) == 1:
                return storage
        self._let_go()
        kept.append(torch.UntypedStorage(size))
        return kept[-1]

    def _let_go(self) -> None:
        """Free what the last two steps, forward and backward, had no use for: the shapes of the inputs change."""
        for size in [size for size, run in self._last_used.items() if run < self._run - 4]:
            del self._kept[size], self._last_used[size]


@cache
def keep_heap() -> None:
    """Let the C library keep the pages of tensors that are freed, once in a process."""
    # glibc gives free pages at the end of its heap back where they are more than twice the largest block that was ever
    # freed, up to twice 32 MiB ("dynamic mmap threshold", mallopt(3)). A small model never frees a large block, and
    # each of its steps then gets new pages, which the system has to clear: a quarter of the time of some.
    torch.empty(_LARGEST_OF_HEAP, dtype=torch.uint8)


_current: Final[ContextVar[OutputBuffers | None]] = ContextVar("current", default=None)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a dense tensor without values, of the dtype of `like`, from the buffers in use if it is large."""
    size = math.prod(shape) * like.element_size()
    buffers = _current.get()
    if buffers is None or size < SMALLEST_KEPT or _holders is None or like.device.type != "cpu":
        return like.new_empty(tuple(shape))
    output = torch.empty(0, dtype=like.dtype)
    output.set_(buffers.storage(size), 0, tuple(shape))  # type: ignore[call-overload]
    return output


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which shapes broadcast; torch's function takes a tenth of a millisecond for it."""
    return np.broadcast_shapes(*map(tuple, shapes))


# --- operators by name --------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """An operator: what to call, and its schema as torch's own operators have it."""

    call: Callable[..., Any]
    schema: torch.FunctionSchema


KERNELS: Final[dict[str, Kernel]] = {}
"""The operators of this module by name, without the namespace."""


def kernel(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let ``ATen`` nodes call a function by its name, with the arguments and results of this schema."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        KERNELS[name] = Kernel(function, torch._C.parse_schema(f"{NAMESPACE}::{name}{signature}"))
        return function

    return declare


# --- products of matrices ---------------------------------------------------------------------------------------


@kernel("(Tensor a, Tensor b) -> Tensor")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the last dimension of `a`, shape (..., k), with a matrix of shape (k, n)."""
    return _product(a.reshape(-1, a.shape[-1]), b, (*a.shape[:-1], b.shape[1]))


@kernel("(Tensor a, Tensor b) -> Tensor")
def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the last dimension of `a`, shape (..., k), with the transpose of a matrix of shape (n, k)."""
    return _product(a.reshape(-1, a.shape[-1]), b.t(), (*a.shape[:-1], b.shape[0]))


@kernel("(Tensor a, Tensor b) -> Tensor")
def matmul_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """Sum the outer products of the rows of `a`, shape (..., m), and of `b`, shape (..., n): shape (m, n)."""
    rows = a.reshape(-1, a.shape[-1]).t(), b.reshape(-1, b.shape[-1])
    return _product(*rows, (a.shape[-1], b.shape[-1]))


def _product(a: Tensor, b: Tensor, shape: tuple[int, ...]) -> Tensor:
    output = empty(shape, a)
    torch.mm(a, b, out=output.view(a.shape[0], b.shape[1]))
    return output


@kernel("(Tensor a, Tensor b, int[] turned, Tensor? addend=None) -> Tensor")
def gemm(a: Tensor, b: Tensor, turned: list[int], addend: Tensor | None) -> Tensor:
    """Multiply two matrices, each transposed first where `turned` is 1, and add what broadcasts to the product."""
    a, b = (one.t() if is_turned else one for one, is_turned in zip((a, b), turned, strict=True))
    output = empty((a.shape[0], b.shape[1]), a)
    if addend is None:
        return torch.mm(a, b, out=output)
    return torch.addmm(addend, a, b, out=output)


@kernel("(Tensor x, Tensor weights, Tensor offsets) -> Tensor")
def grouped_linear(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Multiply groups of rows with the transpose of a matrix each, shape (groups, n, k); `offsets` are their ends."""
    output = empty((x.shape[0], weights.shape[1]), x)
    for weight, rows in zip(weights, _groups(offsets, output), strict=True):
        torch.mm(x[rows], weight.t(), out=output[rows])
    return output


@kernel("(Tensor grad, Tensor x, Tensor weights, Tensor offsets) -> (Tensor, Tensor)")
def grouped_linear_backward(
    grad: Tensor, x: Tensor, weights: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and matrices of `grouped_linear`."""
    of_x, of_weights = empty(x.shape, x), empty(weights.shape, weights)
    for weight, of_weight, rows in zip(weights, of_weights, _groups(offsets, of_x), strict=True):
        torch.mm(grad[rows], weight, out=of_x[rows])
        torch.mm(grad[rows].t(), x[rows], out=of_weight)
    return of_x, of_weights


def _groups(offsets: Tensor, output: Tensor) -> Iterator[slice]:
    """Return the rows of each group; those of no group become 0 in the output."""
    ends = offsets.tolist()
    output[ends[-1] :].zero_()
    return (slice(start, end) for start, end in zip([0, *ends], ends, strict=False))


# --- memory of one's own -----------------------------------------------------------------------------------------


@kernel("(Tensor x) -> Tensor")
def copy_of(x: Tensor) -> Tensor:
    """Return a copy."""
    return empty(x.shape, x).copy_(x)


@kernel("(Tensor a, Tensor b) -> Tensor")
def add(a: Tensor, b: Tensor) -> Tensor:
    """Add two tensors of one dtype, into the memory of neither."""
    return torch.add(a, b, out=empty(broadcast(a.shape, b.shape), a))


@kernel("(Tensor(a!) product, Tensor bias) -> Tensor(a!)")
def add_bias(product: Tensor, bias: Tensor) -> Tensor:
    """Add a vector to the rows of what another kernel has computed, in its memory, which nothing else reads."""
    return product.add_(bias)


# --- masks, eight entries in a byte ------------------------------------------------------------------------------

_EIGHT: Final = 8
_TO_HIGHEST_BYTE: Final = 0x0102040810204080
"""Times eight bytes that are 0 or 1, read as one integer, it has these as the bits of its highest byte."""


@kernel("(Tensor mask) -> Tensor")
def packed_bits(mask: Tensor) -> Tensor:
    """Return the bytes of a mask, each 0 or 1, as bits: in the order of memory, the lowest bit first."""
    flat = mask.reshape(-1)
    if flat.numel() % _EIGHT:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % _EIGHT))
    return flat.view(torch.int64).mul(_TO_HIGHEST_BYTE).bitwise_right_shift_(56).to(torch.uint8)


@kernel("(Tensor packed, int[] shape) -> Tensor")
def unpacked_bits(packed: Tensor, shape: list[int]) -> Tensor:
    """Return what `packed_bits` was given, in its shape."""
    flat = _bits_of_bytes(packed.device).index_select(0, packed.int()).view(torch.uint8)
    return flat[: math.prod(shape)].view(shape)


@cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """Return the eight bits of each byte, as eight bytes that are read as one integer."""
    numbers = torch.arange(2**_EIGHT, dtype=torch.int64, device=device)
    bits = torch.arange(_EIGHT, dtype=torch.int64, device=device)
    return ((numbers[:, None] >> bits) & 1).to(torch.uint8).view(torch.int64).reshape(-1)


# --- gradients of layers ----------------------------------------------------------------------------------------


@kernel("(Tensor x, Tensor weight, Tensor bias, Tensor eps) -> (Tensor, Tensor, Tensor)")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: Tensor) -> Any:
    """Return the layer normalisation of entries, their mean and their inverse deviation."""
    return torch.ops.aten.native_layer_norm.default(x, list(weight.shape), weight, bias, eps.item())


@kernel("(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)")
def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> Any:
    """Return the gradients of input, weight and bias of a layer normalisation."""
    shape = list(weight.shape)
    # Of the bias, which the gradient does not depend on, torch reads the shape only.
    return torch.ops.aten.native_layer_norm_backward.default(
        grad, x, shape, mean, rstd, weight, weight, [True, True, True]
    )


@kernel("(Tensor grad, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor)")
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Any:
    """Return the gradients of input and weight of a normalisation by the root of the mean square over a row."""
    # That of a layer normalisation with a mean of zero, which takes the mean of the gradient from each row as well.
    shape, rows = list(weight.shape), rstd.numel()
    of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward.default(
        grad, x, shape, torch.zeros_like(rstd), rstd, weight, None, [True, True, False]
    )
    taken = torch.mv(grad.view(rows, -1), weight).mul_(rstd.view(-1)).div_(weight.numel())
    return of_x.view(rows, -1).add_(taken[:, None]).view(x.shape), of_weight


@kernel(
    "(Tensor x, Tensor weight, Tensor bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, "
    "float eps) -> (Tensor, Tensor, Tensor)"
)
def instance_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Any:
    """Normalise each channel of each sample: a batch normalisation of shape (1, samples * channels, ...)."""
    # Running statistics move towards the averages over the samples.
    samples = x.shape[0]
    each = [None if one is None else one.repeat(samples) for one in (weight, bias, running_mean, running_var)]
    normal = torch.ops.aten.native_batch_norm.default
    output, mean, rstd = normal(_as_channels(x), *each, True, momentum, eps)  # noqa: FBT003 - of the input
    for running, moved in zip((running_mean, running_var), each[2:], strict=True):
        if running is not None and moved is not None:
            running.copy_(moved.view(samples, -1).mean(0))
    return output.view(x.shape), mean, rstd


@kernel(
    "(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor rstd, float eps) -> (Tensor, Tensor, Tensor)"
)
def instance_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, eps: float
) -> Any:
    """Return the gradients of input, weight and bias of `instance_norm`."""
    of_channels = torch.ops.aten.native_batch_norm_backward.default(
        _as_channels(grad),
        _as_channels(x),
        weight.repeat(x.shape[0]),
        None,
        None,
        mean,
        rstd,
        True,  # noqa: FBT003 - of the input
        eps,
        [True] * 3,
    )
    of_input, *of_parameters = of_channels
    return of_input.view(x.shape), *(one.view(x.shape[0], -1).sum(0) for one in of_parameters)


def _as_channels(x: Tensor) -> Tensor:
    """Put samples and channels into one dimension."""
    return x.reshape(1, -1, *x.shape[2:])


@kernel("(Tensor grad, Tensor x) -> Tensor")
def gelu_backward(grad: Tensor, x: Tensor) -> Any:
    """Return the gradient of the exact Gelu, the one with the error function."""
    return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="none", grad_input=empty(x.shape, x))


@kernel("(Tensor grad, Tensor probabilities, Tensor? mask=None) -> Tensor")
def softmax_backward(grad: Tensor, probabilities: Tensor, mask: Tensor | None) -> Any:
    """Return the gradient of a softmax over the last dimension; where `mask` is true, `grad` counts as zero."""
    if mask is None:
        return _softmax_backward(grad, probabilities, empty(probabilities.shape, probabilities))
    return softmax_backward_over(empty(probabilities.shape, probabilities).copy_(grad), probabilities, mask)


@kernel("(Tensor(a!) grad, Tensor probabilities, Tensor? mask=None) -> Tensor(a!)")
def softmax_backward_over(grad: Tensor, probabilities: Tensor, mask: Tensor | None) -> Any:
    """Return what `softmax_backward` does, in the memory of `grad`, which nothing else reads."""
    # A buffer of scores more would be the peak of a step with long sequences. The kernel
    # (vec_host_softmax_backward_lastdim) reads a row before it writes it.
    if mask is not None:
        grad.masked_fill_(mask, 0.0)
    return _softmax_backward(grad, probabilities, grad)


def _softmax_backward(grad: Tensor, probabilities: Tensor, output: Tensor) -> Any:
    backward = torch.ops.aten._softmax_backward_data.out
    return backward(grad, probabilities, -1, probabilities.dtype, grad_input=output)


# --- what ONNX Runtime computes slowly, as `ortlab.engine.operators.quick_choice` puts it into the graph -------


@kernel("(Tensor grad, Tensor x) -> Tensor")
def relu_backward(grad: Tensor, x: Tensor) -> Any:
    """Return the gradient of a Relu; `x` is its input or its result."""
    backward = torch.ops.aten.threshold_backward.grad_input
    return backward(grad, x, 0, grad_input=empty(x.shape, x))


@kernel("(Tensor x, float slope) -> Tensor")
def leaky_relu(x: Tensor, slope: float) -> Any:
    """Return x where it is positive, else x times the slope."""
    return torch.ops.aten.leaky_relu.out(x, slope, out=empty(x.shape, x))


@kernel("(Tensor x, int[] axes, int keeps) -> Tensor")
def log_sum_exp(x: Tensor, axes: list[int], keeps: int) -> Tensor:
    """Return the logarithm of the sum of the exponentials over some axes."""
    return torch.logsumexp(x, axes, keepdim=bool(keeps))


@kernel("(Tensor x, int k, int[] how) -> (Tensor, Tensor)")
def topk(x: Tensor, k: int, how: list[int]) -> Any:
    """Return the largest or smallest entries along an axis, and their places; `how` is axis, largest and sorted."""
    axis, largest, in_order = how
    if k == x.shape[axis]:  # as x.sort() is exported
        return x.sort(axis, descending=bool(largest))
    return x.topk(k, axis, bool(largest), bool(in_order))


@kernel("(Tensor grad, Tensor output, float slope) -> Tensor")
def leaky_relu_backward(grad: Tensor, output: Tensor, slope: float) -> Any:
    """Return the gradient of a LeakyRelu whose slope is not negative, from its result."""
    backward = torch.ops.aten.leaky_relu_backward.grad_input
    return backward(grad, output, slope, True, grad_input=empty(grad.shape, grad))  # noqa: FBT003 - is a result


@kernel("(Tensor grad, Tensor x) -> Tensor")
def gelu_tanh_backward(grad: Tensor, x: Tensor) -> Any:
    """Return the gradient of the Gelu that is approximated with a tanh."""
    return torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=empty(x.shape, x))


@kernel("(Tensor grad, Tensor output, int axis) -> Tensor")
def log_softmax_backward(grad: Tensor, output: Tensor, axis: int) -> Any:
    """Return the gradient of a LogSoftmax, from its result."""
    backward = torch.ops.aten._log_softmax_backward_data.out
    return backward(grad, output, axis, output.dtype, out=empty(output.shape, output))


@kernel("(int[] shape, Tensor indices, Tensor grad, int axis) -> Tensor")
def gather_backward(shape: list[int], indices: Tensor, grad: Tensor, axis: int) -> Tensor:
    """Add the gradient of each gathered row to the row that it is of; indices may be negative."""
    axis %= len(shape)
    rows = indices.reshape(-1).long()
    grad = grad.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    whole = empty(shape, grad).zero_()
    if rows.numel() == 1:
        row = int(rows)
        whole.narrow(axis, row + shape[axis] * (row < 0), 1).copy_(grad)
        return whole
    return whole.index_add_(axis, torch.where(rows < 0, rows + shape[axis], rows), grad)


@kernel("(Tensor x, Tensor indices, int[] shape, int axis) -> Tensor")
def gather_elements(x: Tensor, indices: Tensor, shape: list[int], axis: int) -> Tensor:
    """Take entries along an axis by indices that are broadcast to a shape; they may be negative."""
    entries = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    entries = entries.expand(broadcast(entries.shape, shape))
    return torch.gather(x, axis, entries, out=empty(entries.shape, x))


@kernel("(Tensor grad, int[] shape, Tensor indices, int axis) -> Tensor")
def gather_elements_backward(grad: Tensor, shape: list[int], indices: Tensor, axis: int) -> Tensor:
    """Add the gradient of each gathered entry to the entry that it is of; indices may be negative, and broadcast."""
    entries = torch.where(indices < 0, indices + shape[axis], indices).long()
    return empty(shape, grad).zero_().scatter_add_(axis, entries.expand_as(grad), grad)


@kernel("(Tensor grad, int[] shape, int[] starts, int[] ends, int[]? axes=None, int[]? steps=None) -> Tensor")
def slice_backward(
    grad: Tensor,
    shape: list[int],
    starts: list[int],
    ends: list[int],
    axes: list[int] | None,
    steps: list[int] | None,
) -> Tensor:
    """Put the gradient of a Slice where it was taken from, and zeros elsewhere."""
    whole = empty(shape, grad)
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    part = whole
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        places = range(shape[axis])[start:end:step]
        if not places:
            return whole.zero_()
        if step < 0:  # torch has no view that goes backwards
            grad, places = grad.flip(axis), places[::-1]
        # Zeros go beside what is taken, and to all of it where a step leaves entries out.
        first, behind = places[0], places[-1] + 1
        for others in (slice(first), slice(behind, None), *([slice(first, behind)] if abs(step) > 1 else [])):
            part[_along(axis, shape, others)].zero_()
        part = part[_along(axis, shape, slice(first, behind, abs(step)))]
    part.copy_(grad)
    return whole


def _along(axis: int, shape: Sequence[int], places: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * (axis % len(shape)), places)


@kernel(
    "(Tensor grad, Tensor x, Tensor weight, int[]? bias_sizes, int[] stride, int[] padding, int[] dilation, "
    "bool transposed, int[] output_padding, int groups, bool[] wanted) -> (Tensor, Tensor, Tensor)"
)
def grouped_convolution_backward(  # noqa: PLR0913, PLR0917 - the arguments of torch's operator
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,  # noqa: FBT001 - in the order of torch's operator
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> Any:
    """Return the gradients of input, weight and bias of a convolution, as ``aten::convolution_backward`` does."""
    # For the weight of a depthwise convolution with a wide window the compiled library has a kernel (`depthwise.h`).
    # Without it, oneDNN has one in the layout with channels last only, and in another takes two to four times as long;
    # for windows of three it is the other way round.
    backward = torch.ops.aten.convolution_backward.default
    shape = stride, padding, dilation, transposed, output_padding, groups
    window = weight.shape[2:]
    is_depthwise = weight.shape[0] == groups == x.shape[1] and not transposed
    if not is_depthwise or len(window) > _PLANE or min(window) < _WIDE_WINDOW:
        return backward(grad, x, weight, bias_sizes, *shape, wanted)
    of_input = backward(grad, x, weight, None, *shape, [True, False, False])[0] if wanted[0] else None
    of_bias = grad.sum([axis for axis in range(grad.dim()) if axis != 1]) if wanted[2] else None
    if not wanted[1]:
        return of_input, None, of_bias
    if len(window) < _PLANE:
        grad, x, weight = (one.unsqueeze(2) for one in (grad, x, weight))
        shape = [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups
    grad, x = (one.contiguous(memory_format=torch.channels_last) for one in (grad, x))
    _, of_weight, _ = backward(grad, x, weight, None, *shape, [False, True, False])
    return of_input, of_weight.reshape(weight.shape[0], 1, *window).contiguous(), of_bias


@kernel(
    "(Tensor x, int[] window, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> (Tensor, Tensor)"
)
def max_pool2d(
    x: Tensor,
    window: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,  # noqa: FBT001 - in the order of torch's operator
) -> tuple[Tensor, ...]:
    """Return the maxima of windows and their places, as ``aten::max_pool2d_with_indices`` does, bit for bit."""
    # With channels last, torch compares many channels at once, which takes a half to a fifth of the time.
    if x.dim() == _IMAGES and x.shape[1] >= _MANY_CHANNELS:
        x = x.contiguous(memory_format=torch.channels_last)
    found = torch.ops.aten.max_pool2d_with_indices.default(x, window, stride, padding, dilation, ceil_mode)
    return tuple(one.contiguous() for one in found)


# --- cross entropy ----------------------------------------------------------------------------------------------


@kernel(
    "(Tensor logits, Tensor target, Tensor? weight, int reduction, int ignore_index) -> (Tensor, Tensor, Tensor)"
)
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of logits of shape (rows, classes), the log probabilities, and the sum of the rows' weights."""
    log_probabilities = empty(logits.shape, logits)
    torch.ops.aten._log_softmax.out(logits, 1, False, out=log_probabilities)  # noqa: FBT003 - half_to_float
    loss, total = torch.ops.aten.nll_loss_forward.default(
        log_probabilities, target, weight, reduction, ignore_index
    )
    return loss, log_probabilities, total


@kernel(
    "(Tensor grad, Tensor(a!) log_probabilities, Tensor target, Tensor? weight, int reduction, int ignore_index, "
    "Tensor total) -> Tensor(a!)"
)
def cross_entropy_backward(
    grad: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total: Tensor,
) -> Tensor:
    """Return the gradient of the logits: each row's share times (probabilities - the target's one)."""
    # It is written over the log probabilities, which nothing else reads.
    counts = target != ignore_index
    target = torch.where(counts, target, 0)
    share = grad / total if reduction == _MEAN else grad
    if weight is not None:
        share = share * weight[target]
    # Chosen rather than multiplied: with no row that counts, the share of the mean is infinite.
    share = torch.where(counts, share, 0.0)[:, None]
    return log_probabilities.exp_().mul_(share).scatter_add_(1, target[:, None], -share)


@kernel(
    "(Tensor logits, Tensor target, int reduction, int ignore_index, Tensor? weight=None) -> (Tensor, Tensor)"
)
def log_softmax_loss(
    logits: Tensor, target: Tensor, reduction: int, ignore_index: int, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the loss of logits of shape (batch, classes, ...) and the log probabilities."""
    log_probabilities = torch.log_softmax(logits, 1)
    loss = torch.nn.functional.nll_loss(
        log_probabilities, target.long(), weight, ignore_index=ignore_index, reduction=_REDUCTIONS[reduction]
    )
    return loss, log_probabilities


@kernel(
    "(Tensor grad, Tensor log_probabilities, Tensor target, int reduction, int ignore_index, Tensor? weight=None) "
    "-> Tensor"
)
def log_softmax_loss_backward(
    grad: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    reduction: int,
    ignore_index: int,
    weight: Tensor | None,
) -> Any:
    """Return the gradient of the logits, shape (batch, classes, ...), in the two steps in which torch computes it."""
    with torch.enable_grad():
        source = log_probabilities.detach().requires_grad_()
        loss = torch.nn.functional.nll_loss(
            source, target.long(), weight, ignore_index=ignore_index, reduction=_REDUCTIONS[reduction]
        )
        (share,) = torch.autograd.grad(loss, source, grad.reshape(loss.shape))
    return torch.ops.aten._log_softmax_backward_data.default(
        share, log_probabilities, 1, log_probabilities.dtype
    )


# --- sums and convolutions, as `ortlab.engine.operators.exact_choice` puts them into the graph ---------------------


@kernel("(Tensor x, int[] flags, int[]? axes=None) -> Tensor")
def sum_over(x: Tensor, flags: list[int], axes: list[int] | None) -> Tensor:
    """Sum over some axes, or all; `flags` are ONNX's keepdims and noop_with_empty_axes."""
    return over(torch.sum, x, flags, axes)


@kernel("(Tensor x, int[] flags, int[]? axes=None) -> Tensor")
def mean_over(x: Tensor, flags: list[int], axes: list[int] | None) -> Tensor:
    """Average over some axes, or all; see `sum_over`."""
    return over(torch.mean, x, flags, axes)


def over(reduce: Callable[..., Tensor], x: Tensor, flags: list[int], axes: list[int] | None) -> Tensor:
    """Reduce some axes, or all; see `sum_over`."""
    keeps, nothing_is_none = flags
    if not axes and nothing_is_none:
        return x
    return reduce(x, dim=axes or tuple(range(x.dim())), keepdim=bool(keeps))


@kernel("(Tensor x, int[] size) -> Tensor")
def adaptive_avg_pool2d(x: Tensor, size: list[int]) -> Any:
    """Average to a given size; for a single entry, torch takes the mean, which is more exact than its pooling."""
    return torch.ops.aten.adaptive_avg_pool2d.default(x, size)


@kernel("(Tensor grad, Tensor x) -> Tensor")
def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Any:
    """Return the gradient of `adaptive_avg_pool2d`."""
    if grad.shape[-2:] == (1, 1):
        return grad.expand(x.shape) / (x.shape[-2] * x.shape[-1])
    return torch.ops.aten._adaptive_avg_pool2d_backward.default(grad, x)


@kernel("(Tensor x, Tensor divisor) -> Tensor")
def divided(x: Tensor, divisor: Tensor) -> Tensor:
    """Divide, where ONNX Runtime multiplies by a rounded reciprocal: the gradient of a mean."""
    return x / divisor


@kernel("(Tensor grad, Tensor dividend, Tensor divisor, int[] wanted) -> (Tensor, Tensor)")
def quotient_backward(
    grad: Tensor, dividend: Tensor, divisor: Tensor, wanted: list[int]
) -> tuple[Tensor, ...]:
    """Return those of the gradients of dividend and divisor that are wanted, in the order in which torch divides."""
    # A divisor that is broadcast, as in a normalisation, divides sums instead of what is summed: two passes over memory
    # less, which make a tenth of a Llama's step.
    shape = broadcast(grad.shape, divisor.shape)
    found = []
    if 0 in wanted:
        found.append(torch.div(grad, divisor, out=empty(shape, grad)).sum_to_size(dividend.shape))
    if divisor.numel() < dividend.numel():
        products = torch.mul(grad, dividend, out=empty(shape, grad))
        return (*found, products.sum_to_size(divisor.shape).neg_().div_(divisor).div_(divisor))
    return (*found, (-grad * ((dividend / divisor) / divisor)).sum_to_size(divisor.shape))


# ---- one entry at a time ----------------------------------------------------------------------------------------


def _kernel_of_entries(name: str) -> None:
    """Declare a kernel that calls torch's operator of its name, which computes each entry by itself."""
    operator = getattr(torch.ops.aten, name).out

    def call(x: Tensor) -> Any:
        return operator(x, out=empty(x.shape, x))

    call.__name__ = name
    kernel("(Tensor x) -> Tensor")(call)


# ONNX Runtime's erf is 1 for what is not a number, its sqrt NaN for infinity, and its sign, the gradient of an absolute
# value, not 0 for what is not a number; its tanh is a rational approximation, five times less exact; its log, sine and
# cosine run on one thread.
for _name in ("cos", "erf", "log", "sigmoid", "sign", "sin", "sqrt", "tanh"):
    _kernel_of_entries(_name)


@kernel("(Tensor grad, Tensor output) -> Tensor")
def sigmoid_backward(grad: Tensor, output: Tensor) -> Any:
    """Return the gradient of a sigmoid."""
    return torch.ops.aten.sigmoid_backward.grad_input(grad, output, grad_input=empty(grad.shape, grad))


@kernel("(Tensor grad, Tensor x) -> Tensor")
def silu_backward(grad: Tensor, x: Tensor) -> Any:
    """Return the gradient of x * sigmoid(x)."""
    return torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=empty(x.shape, x))


@kernel("(Tensor grad, Tensor output) -> Tensor")
def tanh_backward(grad: Tensor, output: Tensor) -> Any:
    """Return the gradient of a hyperbolic tangent."""
    return torch.ops.aten.tanh_backward.grad_input(grad, output, grad_input=empty(grad.shape, grad))


@kernel("(Tensor x) -> Tensor")
def mean_over_space(x: Tensor) -> Tensor:
    """Average over all axes but the batch and the channels, which stay as axes of size one."""
    return x.mean(dim=tuple(range(2, x.dim())), keepdim=True)


@kernel(
    "(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, Tensor? bias=None) -> Tensor"
)
def convolution(
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    bias: Tensor | None,
) -> Any:
    """Return a convolution of one, two or three dimensions."""
    # Of torch's two names for it this one takes a third less time to call.
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)  # noqa: FBT003 - not transposed


@kernel(
    "(Tensor grad, Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, int[] wanted) "
    "-> (Tensor, Tensor, Tensor)"
)
def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    wanted: list[int],
) -> tuple[Tensor, ...]:
    """Return those of the gradients of input, weight and bias that are wanted."""
    mask = [index in wanted for index in range(3)]
    turned = {"transposed": False, "output_padding": [0] * len(stride)}
    windows = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, **turned}
    found = torch.ops.aten.convolution_backward.default(
        grad, x, weight, [weight.shape[0]], **windows, output_mask=mask
    )
    return tuple(found[index] for index in wanted)


@kernel("(Tensor source, Tensor x, int axis, Tensor index) -> Tensor")
def index_add_to(source: Tensor, x: Tensor, axis: int, index: Tensor) -> Tensor:
    """Add rows to `x`, which has no gradient."""
    return empty(x.shape, x).copy_(x).index_add_(axis, index, source)


@kernel("(Tensor source, Tensor x, int axis, Tensor index) -> Tensor")
def scatter_add_to(source: Tensor, x: Tensor, axis: int, index: Tensor) -> Tensor:
    """Add entries to `x`, which has no gradient."""
    return empty(x.shape, x).copy_(x).scatter_add_(axis, index, source)


# --- sums, in the memory of their first operand ------------------------------------------------------------------


@kernel("(Tensor(a!) total, Tensor grad, int[]? shape=None) -> Tensor(a!)")
def add_output_gradient(total: Tensor, grad: Tensor, shape: list[int] | None) -> Tensor:
    """Add the gradient of an output of the graph; a scalar stands for "no gradient came" and adds nothing."""
    total = total if shape is None else total.view(shape)
    return total if grad.dim() == 0 else total.add_(grad)


@kernel("(Tensor grad, Tensor cosines, Tensor sines) -> Tensor")
def rotary_backward(grad: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return the gradient of a rotary embedding, ``x * cosines + concat(-x2, x1) * sines`` of the halves of x."""
    output = torch.mul(grad, cosines, out=empty(grad.shape, grad))
    turned, half = grad * sines, grad.shape[-1] // 2
    output[..., :half].add_(turned[..., half:])
    output[..., half:].sub_(turned[..., :half])
    return output


@kernel("(Tensor(a!) total, Tensor grad, Tensor indices, int padding_idx) -> Tensor(a!)")
def add_embedding_gradient(total: Tensor, grad: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    """Add the gradient of an embedding of the rows of `total`, shape (rows, width), without making it dense."""
    indices = indices.reshape(-1)
    grad = grad.reshape(-1, total.shape[1])
    if padding_idx >= 0:
        grad = grad.masked_fill((indices == padding_idx)[:, None], 0.0)
    return total.index_add_(0, indices, grad)


@kernel("(Tensor[] operands) -> Tensor")
def sum_of(operands: list[Tensor]) -> Tensor:
    """Add tensors of one shape, one after another."""
    total = operands[0] + operands[1]
    for operand in operands[2:]:
        total += operand
    return total
