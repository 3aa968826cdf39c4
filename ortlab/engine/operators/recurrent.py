"""LSTM, GRU and RNN on the CPU: one call of PyTorch for each layer and direction, forward and backward.

The gradients of 1.19.2 (LSTMGrad, GRUGrad: ``orttraining/training_ops/cpu/rnn``) take 10 to 24 times as long as
PyTorch's, and know one direction only. An LSTM layer is oneDNN's, the kernel that PyTorch itself runs; it keeps a
workspace for its backward. PyTorch has no kernel for a GRU or RNN layer and records some 20 operators for each entry of
the sequence; here the layer keeps its gates, and the backward multiplies all entries at once wherever it can. A
layer that reads packed sequences is a call of PyTorch's own operator.

A layer's `x` has the shape (length, batch, inputs), its state (batch, hidden), its weights are those of `torch.nn`:
(gates * hidden, inputs) and (gates * hidden, hidden), each with a bias or without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from ortlab.engine.build_environment import acts
from ortlab.engine.exporter import symbolic_module
from ortlab.engine.operators.symbolic_words import (
    LeftToTorch,
    aten,
    constant,
    filled,
    int64,
    is_training_export,
)
from ortlab.engine.operators.torch_kernels import kernel
from ortlab.errors import BuildError

_RANKS: Final = {"lstm": (3, 2, 2, 1), "gru": (3, 2, 3), "rnn": (3, 2)}
"""How many dimensions each result of a kernel has: the states, the last one or two, and what the backward reads."""

_LSTM: Final = 2  # oneDNN's number of the kind of layer, as torch gives it (at::native::RNN.cpp)

# --- kernels ---------------------------------------------------------------------------------------------------------


@kernel(
    "(Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor h, Tensor c, int reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def lstm_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, c: Tensor, reverse: int
) -> Any:
    """Return the states, shape (length, batch, hidden), the last state, the last cell, and oneDNN's workspace."""
    how = (_LSTM, w_hh.shape[1], 1, True, False, False, True)
    arguments: tuple[Any, ...] = (x, w_ih, w_hh, b_ih, b_hh, h, c, bool(reverse), [], *how)
    with torch.enable_grad():  # without it there is no workspace, whatever is said about training
        *results, workspace = torch.ops.aten.mkldnn_rnn_layer.default(*arguments)
    if x.is_meta:  # there torch says that the workspace is empty
        workspace = workspace.new_empty(_workspace_bytes(*x.shape, w_hh.shape[1]))
    return *results, workspace


@cache
def _workspace_bytes(length: int, batch: int, inputs: int, hidden: int) -> int:
    """Let oneDNN make a workspace, whose size only it knows."""
    shapes = (
        *((length, batch, inputs), (4 * hidden, inputs), (4 * hidden, hidden)),
        *((4 * hidden,), (4 * hidden,), (batch, hidden), (batch, hidden)),
    )
    return int(lstm_layer(*(torch.zeros(shape) for shape in shapes), 0)[-1].numel())


@kernel(
    "(Tensor? grad_y, Tensor? grad_h, Tensor? grad_c, Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, "
    "Tensor h, Tensor c, int reverse, Tensor y, Tensor last_h, Tensor last_c, Tensor workspace) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def lstm_layer_backward(  # noqa: PLR0913, PLR0917 - as the node has them
    grad_y: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    h: Tensor,
    c: Tensor,
    reverse: int,
    y: Tensor,
    last_h: Tensor,
    last_c: Tensor,
    workspace: Tensor,
) -> Any:
    """Return the gradients of `lstm_layer`'s input, weights, biases and first state and cell."""
    gradients = [
        torch.zeros_like(of) if grad is None else grad
        for grad, of in ((grad_y, y), (grad_h, last_h), (grad_c, last_c))
    ]
    backward = torch.ops.aten.mkldnn_rnn_layer_backward.default
    how: tuple[Any, ...] = (bool(reverse), _LSTM, w_hh.shape[1], 1, True, True, False, [], False)
    weights = (w_ih, w_hh, b_ih, b_hh)
    return backward(x, *weights, h, c, y, last_h, last_c, *gradients, *how, workspace)


@kernel(
    "(Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor h, int reverse) "
    "-> (Tensor, Tensor, Tensor)"
)
def gru_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, reverse: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states, shape (length, batch, hidden), the last state, and the gates, (length, batch, 4 * hidden)."""
    hidden = w_hh.shape[1]
    from_x = _product(x, w_ih, b_ih)
    y = x.new_empty(*x.shape[:2], hidden)
    gates = x.new_empty(*x.shape[:2], 4 * hidden)
    turned = w_hh.t()
    for t in _entries(x, reverse):
        from_h = torch.addmm(b_hh, h, turned)
        both, new, recalled = gates[t].split((2 * hidden, hidden, hidden), 1)
        torch.add(from_x[t, :, : 2 * hidden], from_h[:, : 2 * hidden], out=both)
        reset, update = both.sigmoid_().split(hidden, 1)
        recalled.copy_(from_h[:, 2 * hidden :])
        torch.addcmul(from_x[t, :, 2 * hidden :], reset, recalled, out=new)
        new.tanh_()
        h = torch.add((h - new).mul_(update), new, out=y[t])
    return y, h, gates


@kernel(
    "(Tensor? grad_y, Tensor? grad_h, Tensor x, Tensor w_ih, Tensor w_hh, Tensor h, int reverse, Tensor y, "
    "Tensor gates) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def gru_layer_backward(  # noqa: PLR0917 - as the node has them
    grad_y: Tensor | None,
    grad_h: Tensor | None,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    h: Tensor,
    reverse: int,
    y: Tensor,
    gates: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of `gru_layer`'s input, weights, biases and first state."""
    hidden = w_hh.shape[1]
    reset, update, new, recalled = gates.split(hidden, 2)
    before = _states_before(h, y, reverse)
    # How each pre-activation changes the state, for all entries at once; what depends on later entries is `grad`.
    of_update = (before - new).mul_(update).mul_(1 - update)
    of_new = torch.addcmul(torch.ones_like(new), new, new, value=-1).mul_(1 - update)
    of_reset = of_new * recalled * reset * (1 - reset)
    of_recalled = of_new * reset
    changes = torch.cat([of_reset, of_update, of_recalled], 2)
    from_h = torch.empty_like(changes)
    from_x = torch.empty_like(changes)
    grad = torch.zeros_like(h) if grad_h is None else grad_h
    for t in reversed(list(_entries(x, reverse))):
        grad = grad if grad_y is None else grad + grad_y[t]
        torch.mul(changes[t].view(-1, 3, hidden), grad[:, None], out=from_h[t].view(-1, 3, hidden))
        torch.mul(of_new[t], grad, out=from_x[t, :, 2 * hidden :])
        grad = torch.addmm(grad * update[t], from_h[t], w_hh)
    from_x[:, :, : 2 * hidden] = from_h[:, :, : 2 * hidden]
    return (
        (from_x.flatten(0, 1) @ w_ih).view_as(x),
        _outer(from_x, x),
        _outer(from_h, before),
        from_x.sum((0, 1)),
        from_h.sum((0, 1)),
        grad,
    )


@kernel(
    "(Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor h, int reverse, int relu) "
    "-> (Tensor, Tensor)"
)
def rnn_layer(
    x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, h: Tensor, reverse: int, relu: int
) -> tuple[Tensor, Tensor]:
    """Return the states, shape (length, batch, hidden), of a layer with tanh or relu, and the last one."""
    y = _product(x, w_ih, b_ih + b_hh)
    turned = w_hh.t()
    for t in _entries(x, reverse):
        h = y[t].addmm_(h, turned)
        h = h.relu_() if relu else h.tanh_()
    return y, h


@kernel(
    "(Tensor? grad_y, Tensor? grad_h, Tensor x, Tensor w_ih, Tensor w_hh, Tensor h, int reverse, int relu, Tensor y) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def rnn_layer_backward(  # noqa: PLR0917 - as the node has them
    grad_y: Tensor | None,
    grad_h: Tensor | None,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    h: Tensor,
    reverse: int,
    relu: int,
    y: Tensor,
) -> tuple[Tensor, ...]:
    """Return the gradients of `rnn_layer`'s input, weights, biases and first state."""
    changes = (y > 0).to(y.dtype) if relu else torch.addcmul(torch.ones_like(y), y, y, value=-1)
    before = _states_before(h, y, reverse)
    grad = torch.zeros_like(h) if grad_h is None else grad_h
    for t in reversed(list(_entries(x, reverse))):
        grad = changes[t].mul_(grad if grad_y is None else grad + grad_y[t]) @ w_hh
    bias = changes.sum((0, 1))
    return (
        (changes.flatten(0, 1) @ w_ih).view_as(x),
        _outer(changes, x),
        _outer(changes, before),
        bias,
        bias,
        grad,
    )


def _entries(x: Tensor, reverse: int) -> Iterator[int]:
    """Return the positions of the sequence in the order in which the layer reads them."""
    return reversed(range(len(x))) if reverse else iter(range(len(x)))


def _states_before(h: Tensor, y: Tensor, reverse: int) -> Tensor:
    """Return the state before each entry of the sequence, shape (length, batch, hidden)."""
    return torch.cat([y[1:], h[None]]) if reverse else torch.cat([h[None], y[:-1]])


def _product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.flatten(0, 1), weight.t()).view(*x.shape[:2], weight.shape[0])


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum the outer products of all entries and samples."""
    return a.flatten(0, 1).t() @ b.flatten(0, 1)


# --- symbolic functions ----------------------------------------------------------------------------------------------


def lstm(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the symbolic function of ``aten::lstm``: a call for each layer and direction."""

    def symbolic(g: Any, x: Any, *args: Any) -> Any:
        states = _unpacked(args[0])
        if states is None and is_training_export():
            raise _of_packed(g, "LSTM")
        if states is None or not _is_ours(g) or not torch.backends.mkldnn.is_available():
            return plain(g, x, *args)
        return _layers(g, "lstm", x, states, *args[1:])

    return symbolic


def gru(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the symbolic function of ``aten::gru``: a call for each layer and direction."""
    return _of_one_state("gru", plain)


def rnn(activation: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the symbolic function of ``aten::rnn_tanh`` or ``aten::rnn_relu``."""
    return _of_one_state("rnn", plain, int(activation == "relu"))


def _of_one_state(kind: str, plain: Callable[..., Any], *numbers: int) -> Callable[..., Any]:
    def symbolic(g: Any, x: Any, *args: Any) -> Any:
        is_packed = _unpacked(args[1]) is None  # then the first state stands where else the weights do
        if is_packed and is_training_export():
            raise _of_packed(g, kind.upper())
        if is_packed or not _is_ours(g):
            return plain(g, x, *args)
        return _layers(g, kind, x, [args[0]], *args[1:], numbers=numbers)

    return symbolic


def _of_packed(g: Any, layer: str) -> Exception:
    """Return what the translation of such a layer ends with: on the CPU it is left to PyTorch, on a GPU refused."""
    if str(next(g.original_node.inputs()).type().device()) == "cpu":
        return LeftToTorch(
            "its sequences are packed"
        )  # ORT refuses them (``lstm_io_utils.cc``, ``gru_io_utils.cc``)
    return BuildError(
        f"ONNX Runtime cannot train packed sequences through {layer} layers on a GPU.",
        why="PyTorch computes them, and reads from the CPU how long they are, where a graph on a GPU has no values.",
        fix="Give the layer padded sequences and leave the padding out of the loss, or leave the layer to PyTorch: "
        "ortlab.wrap(model, only=[...]).",
    )


def _is_ours(g: Any) -> bool:
    """Say whether a layer trains in float32 on the CPU, and `aten_recurrent` asks for PyTorch."""
    kind = next(g.original_node.inputs()).type()  # as traced: what symbolics emit has no device
    on_cpu = str(kind.device()) == "cpu" and kind.scalarType() == "Float"
    return on_cpu and acts("aten_recurrent") and is_training_export()


def _unpacked(value: Any) -> list[Any] | None:
    helper = symbolic_module("symbolic_helper")
    return list(helper._unpack_list(value)) if helper._is_packed_list(value) else None


def _layers(g: Any, kind: str, x: Any, states: list[Any], *args: Any, numbers: tuple[int, ...] = ()) -> Any:
    """Emit the layers one after the other; return the last layer's output and the last states of all."""
    weights, has_biases, number, dropout, train, bidirectional, batch_first = args
    parameters = _unpacked(weights) or []
    directions, layers = 1 + constant(bidirectional, "i"), constant(number, "i")
    each = 4 if constant(has_biases, "i") else 2
    if len(parameters) != each * layers * directions:
        raise LeftToTorch("it projects its states")
    if constant(dropout, "f") and constant(train, "i") and layers > 1:
        raise LeftToTorch("it drops out between its layers")
    turns = constant(batch_first, "i")
    y = g.op("Transpose", x, perm_i=[1, 0, 2]) if turns else x
    last: list[list[Any]] = [[] for _ in states]
    for layer in range(layers):
        read = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = _with_biases(g, parameters[index * each : (index + 1) * each], like=x)
            first = [g.op("Gather", state, int64(g, index), axis_i=0) for state in states]
            how = [int64(g, one) for one in (direction, *numbers)]
            results = aten(g, f"ortlab::{kind}_layer", y, *weights, *first, *how, outputs=len(_RANKS[kind]))
            for one, axes in zip(results, _RANKS[kind], strict=True):
                one.setType(x.type().with_sizes([None] * axes))
            if kind == "lstm":
                results[-1].setType(results[-1].type().with_dtype(torch.uint8))
            read.append(results[0])
            for ends, end in zip(last, results[1:], strict=False):
                ends.append(g.op("Unsqueeze", end, int64(g, [0])))
        y = g.op("Concat", *read, axis_i=2) if directions > 1 else read[0]
    y = g.op("Transpose", y, perm_i=[1, 0, 2]) if turns else y
    found = (y, *(g.op("Concat", *ends, axis_i=0) if len(ends) > 1 else ends[0] for ends in last))
    for value, traced in zip(found, g.original_node.outputs(), strict=True):
        value.setType(traced.type())
    return found


def _with_biases(g: Any, weights: list[Any], *, like: Any) -> list[Any]:
    """Return the two weights and two biases of a layer; zeros where it has none."""
    if len(weights) > 2:  # noqa: PLR2004 - weights alone
        return weights
    width = g.op("Slice", g.op("Shape", weights[1]), int64(g, [0]), int64(g, [1]))
    return [*weights, *[filled(g, width, 0, like=like)] * 2]
