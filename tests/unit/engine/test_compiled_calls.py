"""The compiled calls of PyTorch's operators: the same bits as through Python, and Python where they cannot be sure."""

from __future__ import annotations

import copy
import ctypes
import gc
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from forked import python
from session_records import Doubled
from torch import nn

import ortlab
from ortlab.engine import libraries, sessions
from ortlab.engine.border import give_pointer, take_error, take_pointer, unreadable_pointer
from ortlab.engine.operators import (
    aten_executor,
    compiled_calls,
    dropout,  # noqa: F401 - it declares kernels
    recurrent,
    sums_of_products,  # noqa: F401 - it declares a kernel
)
from ortlab.engine.operators.torch_calls import TorchCall
from ortlab.errors import ExecutionError
from ortlab.runs import process_memory

pytestmark = pytest.mark.filterwarnings("ignore:Setting `training` to something:DeprecationWarning")

_Execute = type(aten_executor.execute_callback)


@pytest.fixture(scope="module")
def compiled(ortmodule):
    assert compiled_calls.lacking() == ""
    return _Execute(aten_executor.execute_aten_operator_address())


def called(execute, name, inputs, n_outputs, overload=""):
    """Call as ORT does, on copies of the inputs, and take the outputs as ORT does."""
    aten_executor._find(name.encode(), overload.encode())  # as ORT does when it makes a session
    copies = [None if one is None else one.clone() for one in inputs]
    pointers = (ctypes.c_void_p * len(copies))(*(None if t is None else give_pointer(t) for t in copies))
    outputs = (ctypes.c_void_p * n_outputs)()
    execute(name.encode(), overload.encode(), len(copies), pointers, n_outputs, outputs)
    error = take_error()
    if error is not None:
        assert set(outputs) == {unreadable_pointer()}
        raise error
    results = [None if pointer is None else take_pointer(pointer) for pointer in outputs]
    return results, copies


def numbers(*values):
    return torch.tensor(values)


def number(value, dtype=None):
    return torch.tensor(value, dtype=dtype)


def flag(value):
    return torch.tensor(value, dtype=torch.uint8)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


X = random(3, 5, 8)
WHOLE = (X * 4).round()
GRAD = random(3, 5, 8) * 2
ROWS = random(8)
PROBABILITIES = X.softmax(-1)
IMAGES, WINDOW = random(2, 4, 9, 9), random(6, 4, 3, 3)
OF_IMAGES = random(2, 6, 5, 5)
LOGITS, CLASSES = random(6, 7), numbers(1, 3, 0, 6, 3, 2)
LOG_PROBABILITIES = LOGITS.log_softmax(1)
POOLED = nn.functional.max_pool2d(IMAGES, 2, return_indices=True)[1]
ENTRIES = numbers(7, -1, 0, 3, 3, 3, -8, 2, 1, 5, 5, 5, 0, 0, 6, 6, 4, 4, 4, 4).view(1, 5, 4)
ONCE, TWICE, PADDED = numbers(1, 1), numbers(2, 2), numbers(1, 1)
CHANNELS = [random(4), random(4), random(4), random(4).abs() + 1]
BATCH = [random(6, 4, 3, 3), *CHANNELS]
STATISTICS = torch.ops.aten.native_batch_norm(BATCH[0], *CHANNELS[:2], None, None, True, 0.1, 1e-5)[1:]
GROUPS = torch.ops.aten.native_group_norm(IMAGES, *CHANNELS[:2], 2, 4, 81, 2, 1e-5)[1:]
MEAN, DEVIATION = X.mean(-1, keepdim=True), X.var(-1, keepdim=True, correction=0).rsqrt()
INDICES = numbers(2, 0, -1, 2, 2, 1)
LSTM = [
    random(5, 2, 3),
    random(16, 3),
    random(16, 4),
    random(16),
    random(16) * 2,
    random(2, 4),
    random(2, 4) * 2,
]
with torch.enable_grad():
    OF_LSTM = recurrent.lstm_layer(*LSTM, 1)
POOLING = [numbers(3, 3), TWICE, PADDED, ONCE]

# What is called, with which inputs, for how many outputs.
CALLS = {
    "sum over an axis": ("ortlab::sum_over", [X, numbers(0, 0), numbers(0, 1)], 1),
    "sum over all, kept": ("ortlab::sum_over", [X, numbers(1, 0), None], 1),
    "sum of doubles": ("ortlab::sum_over", [X.double(), numbers(1, 0), numbers(-1)], 1),
    "sum over nothing": ("ortlab::sum_over", [X, numbers(1, 1), torch.zeros(0, dtype=torch.int64)], 1),
    "mean": ("ortlab::mean_over", [X, numbers(0, 0), numbers(2)], 1),
    # Of whole numbers, whose sums are the same in each order.
    "sum of products": ("ortlab::sum_of_products", [numbers(0, 0), numbers(0, 1), WHOLE, WHOLE + 1], 1),
    "sum of three products over all": (
        "ortlab::sum_of_products",
        [numbers(0, 0), None, WHOLE, WHOLE + 1, WHOLE - 2],
        1,
    ),
    "sum of a product that is broadcast": (
        "ortlab::sum_of_products",
        [numbers(1, 1), numbers(-2), WHOLE[:1], WHOLE[:, :1, :1], WHOLE[0, 0]],
        1,
    ),
    "product": ("ortlab::matmul", [X, random(8, 6)], 1),
    "product with a transpose": ("ortlab::matmul_transposed", [X, random(6, 8)], 1),
    "product of rows": ("ortlab::matmul_of_rows", [X, random(3, 5, 4)], 1),
    "gemm": ("ortlab::gemm", [random(3, 4), random(4, 5), numbers(0, 0), None], 1),
    "gemm, turned, with an addend": (
        "ortlab::gemm",
        [random(4, 3), random(5, 4), numbers(1, 1), random(5)],
        1,
    ),
    "layer norm": ("ortlab::layer_norm_backward", [GRAD, X, ROWS, MEAN, DEVIATION], 3),
    "RMS norm": ("ortlab::rms_norm_backward", [GRAD, X, ROWS, DEVIATION], 2),
    "convolution": ("ortlab::convolution", [IMAGES, WINDOW, TWICE, PADDED, ONCE, numbers(1), None], 1),
    "convolution with a bias": (
        "ortlab::convolution",
        [IMAGES, WINDOW, TWICE, PADDED, ONCE, numbers(1), random(6)],
        1,
    ),
    "convolution's gradients": (
        "ortlab::convolution_backward",
        [OF_IMAGES, IMAGES, WINDOW, TWICE, PADDED, ONCE, numbers(1), numbers(0, 1, 2)],
        3,
    ),
    "convolution's gradients but the input's": (
        "ortlab::convolution_backward",
        [OF_IMAGES, IMAGES, WINDOW, TWICE, PADDED, ONCE, numbers(1), numbers(1, 2)],
        2,
    ),
    "rows added at places": ("index_add", [X, number(1), numbers(4, 0, 4), random(3, 3, 8), number(1.0)], 1),
    "rows added at places of the last axis": (
        "index_add",
        [X, number(-1), numbers(7), random(3, 5, 1), number(1.0)],
        1,
    ),
    "rows added to what has no gradient": (
        "ortlab::index_add_to",
        [random(3, 3, 8), X, number(1), numbers(4, 0, 4)],
        1,
    ),
    "entries added to what has no gradient": (
        "ortlab::scatter_add_to",
        [random(1, 5, 4), X, number(1), ENTRIES.abs() % 5],
        1,
    ),
    "rows added nowhere": ("index_add", [X, number(0), CLASSES[:0], X[:0], number(1.0)], 1),
    "a copy": ("ortlab::copy_of", [X], 1),
    "a copy of whole numbers": ("ortlab::copy_of", [CLASSES], 1),
    "a copy of nothing": ("ortlab::copy_of", [X[:0]], 1),
    "a sum": ("ortlab::add", [X, GRAD], 1),
    "a sum with a row": ("ortlab::add", [X, ROWS], 1),
    "a row's sum with all": ("ortlab::add", [ROWS, X], 1),
    "a sum with a number": ("ortlab::add", [X, number(0.3)], 1),
    "a sum of numbers": ("ortlab::add", [number(0.7), number(0.3)], 1),
    "a sum of nothing": ("ortlab::add", [X[:0], GRAD[:0]], 1),
    "a bias": ("ortlab::add_bias", [X, ROWS], 1),
    "a bias of nothing": ("ortlab::add_bias", [X[:0], ROWS], 1),
    "relu": ("ortlab::relu_backward", [GRAD, X.relu()], 1),
    "relu of what is not a number": (
        "ortlab::relu_backward",
        [torch.ones(4), number([float("nan"), float("inf"), -0.0, -1.0])],
        1,
    ),
    "gelu": ("ortlab::gelu_backward", [GRAD, X], 1),
    "gelu by tanh": ("ortlab::gelu_tanh_backward", [GRAD, X], 1),
    "leaky relu": ("ortlab::leaky_relu", [X, number(0.2)], 1),
    "leaky relu's gradient": ("ortlab::leaky_relu_backward", [GRAD, X, number(0.2)], 1),
    "cross entropy": ("ortlab::cross_entropy", [LOGITS, CLASSES, None, number(1), number(-100)], 3),
    "cross entropy with weights": (
        "ortlab::cross_entropy",
        [LOGITS, CLASSES, random(7).abs(), number(2), number(3)],
        3,
    ),
    "cross entropy's gradient": (
        "ortlab::cross_entropy_backward",
        [number(1.5), LOG_PROBABILITIES, CLASSES, None, number(1), number(-100), number(4.0)],
        1,
    ),
    "cross entropy's gradient, summed": (
        "ortlab::cross_entropy_backward",
        [number(1.5), LOG_PROBABILITIES, CLASSES, None, number(2), number(3), number(4.0)],
        1,
    ),
    "cross entropy's gradient of each": (
        "ortlab::cross_entropy_backward",
        [random(6), LOG_PROBABILITIES, CLASSES, None, number(0), number(-100), number(4.0)],
        1,
    ),
    "cross entropy's gradient of many rows": (
        "ortlab::cross_entropy_backward",
        [
            *(number(1.5), random(700, 500).log_softmax(1), (random(700) * 100).long().abs()),
            *(None, number(1), number(3), number(690.0)),
        ],
        1,
    ),
    "cross entropy's gradient of none": (
        "ortlab::cross_entropy_backward",
        [number(1.5), LOG_PROBABILITIES, torch.full((6,), 3), None, number(1), number(3), number(0.0)],
        1,
    ),
    "loss": ("ortlab::log_softmax_loss", [LOGITS, CLASSES, number(1), number(3)], 2),
    "loss of each, with weights": (
        "ortlab::log_softmax_loss",
        [LOGITS, CLASSES, number(0), number(-100), random(7).abs()],
        2,
    ),
    "loss's gradient": (
        "ortlab::log_softmax_loss_backward",
        [number(0.5), LOG_PROBABILITIES, CLASSES, number(1), number(3)],
        1,
    ),
    "loss's gradient of each, with weights": (
        "ortlab::log_softmax_loss_backward",
        [random(6), LOG_PROBABILITIES, CLASSES, number(0), number(-100), random(7).abs()],
        1,
    ),
    "where, broadcast": ("ortlab::where", [(X[:1] > 0).to(torch.uint8), X, random(1)], 1),
    "where, of other ranks": ("ortlab::where", [(X > 0).to(torch.uint8), ROWS, random(5, 1)], 1),
    "where, of nothing": ("ortlab::where", [(X[:0] > 0).to(torch.uint8), ROWS, X[:1]], 1),
    "layer norm, forward": ("ortlab::layer_norm", [X, ROWS, random(8) + 1, number(1e-3)], 3),
    "layer norm, forward, over two axes": ("ortlab::layer_norm", [X, X[0], X[1], number(1e-5)], 3),
    "softmax": ("ortlab::softmax_backward", [GRAD, PROBABILITIES], 1),
    "softmax in place": ("ortlab::softmax_backward_over", [GRAD, PROBABILITIES], 1),
    "gather": ("ortlab::gather_backward", [numbers(3, 4), INDICES, random(6, 4), number(0)], 1),
    "gather along a later axis": (
        "ortlab::gather_backward",
        [numbers(2, 3, 4), INDICES.int().view(2, 3), random(2, 2, 3, 4), number(-2)],
        1,
    ),
    "rotary embedding": (
        "ortlab::rotary_backward",
        [random(2, 3, 5, 8), random(1, 1, 5, 8), random(1, 1, 5, 8) * 2],
        1,
    ),
    "slice": (
        "ortlab::slice_backward",
        [random(3, 2, 8), numbers(3, 5, 8), numbers(-3), numbers(4), numbers(1)],
        1,
    ),
    "slice of two axes": (
        "ortlab::slice_backward",
        [random(2, 5, 4), numbers(3, 5, 8), numbers(1, 4), numbers(9999, 8), numbers(0, -1), ONCE],
        1,
    ),
    "slice of the first axes": (
        "ortlab::slice_backward",
        [random(1, 4, 8), numbers(3, 5, 8), numbers(2, 0), numbers(3, -1)],
        1,
    ),
    "slice of every second row": (
        "ortlab::slice_backward",
        [random(3, 2, 8), numbers(3, 5, 8), numbers(1), numbers(9223372036854775807), numbers(1), numbers(2)],
        1,
    ),
    "slice of every third entry": (
        "ortlab::slice_backward",
        [random(3, 5, 3), numbers(3, 5, 8), numbers(0), numbers(8), numbers(-1), numbers(3)],
        1,
    ),
    "entries by index": ("ortlab::gather_elements", [X, ENTRIES, numbers(3, 5, 4), number(-1)], 1),
    "entries by index, their gradient": (
        "ortlab::gather_elements_backward",
        [random(3, 5, 4), numbers(3, 5, 8), ENTRIES, number(2)],
        1,
    ),
    "embedding's gradient, added": (
        "ortlab::add_embedding_gradient",
        [random(5, 4), random(2, 3, 4), numbers(1, 0, 4, 4, 4, 0).view(2, 3), number(0)],
        1,
    ),
    "embedding's gradient, added, without padding": (
        "ortlab::add_embedding_gradient",
        [random(5, 4), random(3, 4), numbers(1, 0, 1), number(-1)],
        1,
    ),
    "pooling to one entry": ("ortlab::adaptive_avg_pool2d", [IMAGES, numbers(1, 1)], 1),
    "pooling to some": ("ortlab::adaptive_avg_pool2d", [IMAGES, numbers(3, 9)], 1),
    "pooling to the same": ("ortlab::adaptive_avg_pool2d", [IMAGES, numbers(9, 9)], 1),
    "rows by index": ("index_select", [X, number(1), numbers(4, 0, 0)], 1),
    "pooling's gradient": (
        "max_pool2d_with_indices_backward",
        [random(2, 4, 4, 4), IMAGES, TWICE, TWICE, numbers(0, 0), ONCE, flag(0), POOLED],
        1,
    ),
    "output gradient": ("ortlab::add_output_gradient", [X, GRAD], 1),
    "output gradient in another shape": (
        "ortlab::add_output_gradient",
        [X, GRAD.view(15, 8), numbers(15, 8)],
        1,
    ),
    "no output gradient": ("ortlab::add_output_gradient", [X, number(0.0), numbers(15, 8)], 1),
    "silu": ("ortlab::silu_backward", [GRAD, X], 1),
    "sigmoid's gradient": ("ortlab::sigmoid_backward", [GRAD, X.sigmoid()], 1),
    "tanh's gradient": ("ortlab::tanh_backward", [GRAD, X.tanh()], 1),
    "quotient": ("ortlab::divided", [X, number(3.0)], 1),
    "sqrt": ("ortlab::sqrt", [X], 1),
    "tanh": ("ortlab::tanh", [X], 1),
    "erf": ("ortlab::erf", [X], 1),
    "sigmoid": ("ortlab::sigmoid", [X], 1),
    "embedding": ("embedding", [random(5, 4), numbers(3, 0, 3), number(-1), flag(0), flag(0)], 1),
    "embedding with the namespace": (
        "aten::embedding",
        [random(5, 4), numbers(3, 0), number(0), flag(0), flag(0)],
        1,
    ),
    "embedding's gradient": (
        "embedding_backward",
        [random(3, 4), numbers(3, 0, 3), numbers(5), number(0), flag(0), flag(0)],
        1,
    ),
    "batch norm": (
        "native_batch_norm",
        [*BATCH, flag(1), number(0.1, torch.float64), number(1e-5)],
        3,
    ),
    "batch norm without statistics": (
        "native_batch_norm",
        [*BATCH[:3], None, None, flag(1), number(0.1), number(1e-5)],
        3,
    ),
    "batch norm's gradients": (
        "native_batch_norm_backward",
        [
            random(6, 4, 3, 3),
            BATCH[0],
            *CHANNELS[:1],
            *CHANNELS[2:],
            *STATISTICS,
            flag(1),
            number(1e-5),
            flag([1] * 3),
        ],
        3,
    ),
    "group norm": (
        "native_group_norm",
        [IMAGES, *CHANNELS[:2], number(2), number(4), number(81), number(2), number(1e-5)],
        3,
    ),
    "group norm's gradients": (
        "native_group_norm_backward",
        [
            random(2, 4, 9, 9),
            IMAGES,
            *GROUPS,
            CHANNELS[0],
            number(2),
            number(4),
            number(81),
            number(2),
            flag([1, 1, 1]),
        ],
        3,
    ),
    "maxima of few channels": ("ortlab::max_pool2d", [IMAGES, *POOLING, flag(0)], 2),
    "maxima of many channels": ("ortlab::max_pool2d", [random(2, 20, 9, 9), *POOLING, flag(1)], 2),
    "LSTM": ("ortlab::lstm_layer", [*LSTM, number(0)], 4),
    "LSTM, backwards": ("ortlab::lstm_layer", [*LSTM, number(1)], 4),
    "LSTM's gradients": (
        "ortlab::lstm_layer_backward",
        [random(5, 2, 4), random(2, 4), random(2, 4) * 3, *LSTM, number(1), *OF_LSTM],
        7,
    ),
    "LSTM's gradients, of the states alone": (
        "ortlab::lstm_layer_backward",
        [random(5, 2, 4), None, None, *LSTM, number(1), *OF_LSTM],
        7,
    ),
    "dropout": ("ortlab::dropout", [X, number(0.4), flag(1), number(5)], 2),
    "dropout, repeated later": ("ortlab::dropout_to_repeat", [X, number(0.4), flag(1), number(5)], 3),
    "dropout, repeated": ("ortlab::dropout_repeated", [X, number(0.4), flag(1), number(77)], 2),
    "dropout's gradient": ("ortlab::dropout_backward", [GRAD, (X > 0).byte(), number(0.4), flag(1)], 1),
    "gradients of a convolution": (
        "ortlab::grouped_convolution_backward",
        [
            OF_IMAGES,
            IMAGES,
            WINDOW,
            numbers(6),
            TWICE,
            PADDED,
            ONCE,
            flag(0),
            numbers(0, 0),
            number(1),
            flag([1] * 3),
        ],
        3,
    ),
    "gradients of a depthwise convolution, without bias": (
        "ortlab::grouped_convolution_backward",
        [
            IMAGES,
            IMAGES,
            random(4, 1, 3, 3),
            None,
            ONCE,
            PADDED,
            ONCE,
            flag(0),
            numbers(0, 0),
            number(4),
            flag([1, 1, 0]),
        ],
        3,
    ),
    "gradient of pooling to some": ("ortlab::adaptive_avg_pool2d_backward", [random(2, 4, 3, 9), IMAGES], 1),
    "gradient of pooling to one entry": (
        "ortlab::adaptive_avg_pool2d_backward",
        [random(2, 4, 1, 1), IMAGES],
        1,
    ),
    "windows, which lie in the memory of the input": ("unfold", [X, number(2), number(3), number(2)], 1),
    "windows, which are all of the input": ("unfold", [X, number(0), number(1), number(1)], 1),
    "entries from elsewhere": ("aten::masked_fill", [X, X > 0, number(2.0)], 1, "Tensor"),
    "scores with a mask": ("where", [X > 0, X, GRAD], 1, "self"),
    "convolution of torch": (
        "convolution",
        [IMAGES, WINDOW, random(6), TWICE, PADDED, ONCE, flag(0), numbers(0, 0), number(1)],
        1,
    ),
}


def described(inputs, operator, *arguments, results=(("float32", 3),), **said):
    """Return what `called` takes for a call that holds its constants, each of which stands in a tuple here."""
    overload = said.pop("overload", "default")
    kinds = [("value", *one) if isinstance(one, tuple) else (one,) for one in arguments]
    name = f"{operator}_vjp" if "gradient_of" in said else operator
    n_outputs = len(results) + said.get("random", False)
    return name, inputs, n_outputs, TorchCall(overload, tuple(kinds), results, **said).text


FIRST = {"gradient_of": (0,), "gradients_from": (0,)}
TARGET = random(3, 5, 8) + 1

LOSS = {"results": (("float32", 0),)}

# The same for calls that hold their constants.
DESCRIBED = {
    "loss": described([X, TARGET], "mse_loss", "tensor", "tensor", (1,), **LOSS),
    "loss of each": described([X, TARGET], "smooth_l1_loss", "tensor", "tensor", (0,), (0.3,)),
    "its gradient": described(
        [number(1.5), X, TARGET], "mse_loss", "tensor", "tensor", (1,), **LOSS, **FIRST
    ),
    "its gradient, with a target that is broadcast": described(
        [number(1.5), X, TARGET[:1]], "mse_loss", "tensor", "tensor", (1,), **LOSS, **FIRST
    ),
    "gradient of a loss of each": described(
        [GRAD, X, TARGET], "smooth_l1_loss", "tensor", "tensor", (0,), (0.3,), **FIRST
    ),
    "activation": described([X], "mish", "tensor"),
    "activation's gradient": described([GRAD, X], "hardswish", "tensor", **FIRST),
    "roll": described([X], "roll", "tensor", ((2, -1),), ((1, 2),)),
    "roll's gradient": described([GRAD, X], "roll", "tensor", ((2, -1),), ((1, 2),), **FIRST),
    "flip's gradient": described([GRAD, X], "flip", "tensor", ((-1,),), **FIRST),
    "what is returned as it is": described([X, X], "expand_as", "tensor", "tensor"),
    "booleans": described([X], "isfinite", "tensor", results=(("bool", 3),)),
    "of booleans": described(
        [X > 0], "any", "boolean", (1,), (False,), overload="dim", results=(("bool", 2),)
    ),
    "a number of the batch": described(
        [X, number(4)], "unfold", "tensor", (2,), "number", (2,), results=(("float32", 4),)
    ),
    "sizes of the batch": described([ROWS, numbers(3, 5, 8)], "expand", "tensor", "numbers", (False,)),
    "two results": described(
        [X], "topk", "tensor", (3,), (-1,), (True,), (True,), results=(("float32", 3), ("int64", 3))
    ),
    "an option that is given": described(
        [X], "std", "tensor", ((1,),), (True,), (False,), overload="dim", results=(("float32", 2),)
    ),
    "halves": described([X.bfloat16()], "mish", "tensor", results=(("bfloat16", 3),)),
}
ALL_CALLS = {**CALLS, **DESCRIBED}


@pytest.mark.parametrize("call", ALL_CALLS.values(), ids=ALL_CALLS)
def test_the_same_bits_as_through_python(compiled, call):
    before = compiled_calls.computed()
    compiled_calls.seed(7)
    results, written = called(compiled, *call)
    assert compiled_calls.computed() == before + 1
    compiled_calls.seed(7)
    expected, also_written = called(aten_executor.execute_callback, *call)
    if call[0] == "ortlab::lstm_layer":  # oneDNN leaves gaps in its workspace as they were
        assert results.pop().shape == expected.pop().shape
    for result, one in zip(results + written, expected + also_written, strict=True):
        if one is None:
            assert result is None
        else:
            assert result.dtype == one.dtype
            assert result.is_contiguous()
            torch.testing.assert_close(result, one, rtol=0, atol=0, equal_nan=True)


def sum_of_products(compiled, factors, axes):
    """Return what the library computes, without the axes that it sums over; for no axes it sums over all."""
    before = compiled_calls.computed()
    inputs = [numbers(0, 0), numbers(*axes) if axes else None, *factors]
    (result,), _ = called(compiled, "ortlab::sum_of_products", inputs, 1)
    assert compiled_calls.computed() == before + 1
    return result


# Shapes of factors, and the axes that their product is summed over.
PRODUCTS = {
    "over all": ([(7, 33, 70)] * 2, ()),
    "over all, of a long row": ([(100_003,)] * 3, ()),
    "over the rows": ([(50, 40, 65)] * 2, (0, 1)),
    "over the rows, of wide ones": ([(9, 9001)] * 3, (0,)),
    "over the columns": ([(400, 70)] * 2, (1,)),
    "over images": ([(3, 40, 14, 13)] * 3, (0, 2, 3)),
    "over channels": ([(3, 40, 14, 13)] * 2, (1,)),
    "over every other axis": ([(5, 4, 6, 7, 3)] * 2, (-1, 0, -3)),
    "of what is broadcast": ([(6, 1, 9), (70, 9), (6, 70, 1)], (0, 2)),
    "of a single number": ([(1,), (80, 70)], (0,)),
    "of many sums": ([(3, 700, 900)] * 2, (0,)),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_sums_of_products_are_exact_whatever_the_threads(compiled, case):
    shapes, axes = PRODUCTS[case]
    factors = [random(*shape) for shape in shapes]
    product = factors[0] * factors[1]  # in single precision, as a product of its own is
    for factor in factors[2:]:
        product = product * factor
    summed = axes or tuple(range(product.dim()))
    expected = product.double().sum(summed)
    most = product.abs().double().sum(summed) * torch.finfo(torch.float32).eps
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(sum_of_products(compiled, factors, axes))
    finally:
        torch.set_num_threads(threads)
    assert found[0].shape == expected.shape
    assert ((found[0].double() - expected).abs() <= most).all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_reaches_its_own_sum_of_products_only(compiled, value):
    a, b = random(30, 64), random(30, 64).abs() + 1
    a[3, 5] = value
    for axes in ((), (0,), (1,)):
        found = sum_of_products(compiled, [a, b], axes)
        expected = (a * b).sum(axes or (0, 1))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4, equal_nan=True)


def depthwise_gradients(compiled, grad, x, weight, window, wanted=(1, 1, 1)):
    """Return what the library computes for a depthwise convolution; `window` has stride, padding and dilation."""
    channels = x.shape[1]
    moves = [numbers(*one) for one in window]
    rest = flag(0), numbers(*[0] * len(window[0])), number(channels), flag(wanted)
    inputs = [grad, x, weight, numbers(channels), *moves, *rest]
    before = compiled_calls.computed()
    results, _ = called(compiled, "ortlab::grouped_convolution_backward", inputs, 3)
    assert compiled_calls.computed() == before + 1
    return results


# Shapes of images, and the window with its stride, padding and dilation.
WIDE_WINDOWS = {
    "of ConvNeXt": ((2, 40, 14, 14), (7, 7), (1, 1), (3, 3), (1, 1)),
    "sides unlike": ((2, 8, 12, 12), (5, 8), (1, 1), (1, 6), (1, 1)),
    "wider than the image": ((3, 33, 2, 3), (15, 9), (1, 1), (7, 4), (1, 1)),
    "beside the image": ((2, 4, 6, 6), (5, 5), (3, 3), (8, 8), (1, 1)),
    "stride and dilation": ((17, 8, 12, 12), (5, 5), (2, 1), (2, 4), (1, 2)),
    "an image in several bands": ((2, 3, 90, 75), (5, 7), (1, 1), (2, 3), (1, 1)),
    "bands, stride and dilation": ((1, 3, 150, 160), (5, 6), (2, 2), (5, 1), (3, 2)),
    "one dimension": ((2, 70, 31), (9,), (3,), (2,), (1,)),
}


@pytest.mark.parametrize("case", WIDE_WINDOWS)
def test_gradients_of_wide_depthwise_windows_are_pytorchs(compiled, case):
    shape, window, *moves = WIDE_WINDOWS[case]
    x, weight, bias = random(*shape), random(shape[1], 1, *window), random(shape[1])
    inputs = [one.double().requires_grad_() for one in (x, weight, bias)]
    convolution = {1: nn.functional.conv1d, 2: nn.functional.conv2d}[len(window)]
    output = convolution(*inputs, *moves, groups=shape[1])
    grad = random(*output.shape)
    expected = [one.float() for one in torch.autograd.grad(output, inputs, grad.double())]
    found = depthwise_gradients(compiled, grad, x, weight, moves)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    _, again, none = depthwise_gradients(compiled, grad, x, weight, moves, (1, 1, 0))
    assert torch.equal(again, found[1])
    assert none is None


def test_the_number_of_threads_changes_no_bit_of_a_depthwise_gradient(compiled):
    x, grad, weight = random(5, 70, 9, 9), random(5, 70, 9, 9), random(70, 1, 5, 5)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(depthwise_gradients(compiled, grad, x, weight, ((1, 1), (2, 2), (1, 1)))[1])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("where", [(0, 0), (0, 5), (11, 11), (6, 6)])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_reaches_the_weights_that_it_stands_under(compiled, where, value):
    x, grad, weight = random(2, 2, 12, 12), random(2, 2, 12, 12), random(2, 1, 5, 5)
    x[0, 0][where] = grad[1, 1][where] = value
    found = depthwise_gradients(compiled, grad, x, weight, ((1, 1), (2, 2), (1, 1)))
    expected = torch.zeros(2, 1, 5, 5)
    padded = nn.functional.pad(x, (2, 2, 2, 2), value=0.0)
    inside = nn.functional.pad(torch.ones(12, 12, dtype=torch.bool), (2, 2, 2, 2), value=False)
    for row in range(5):
        for column in range(5):
            part = (..., slice(row, row + 12), slice(column, column + 12))
            expected[:, 0, row, column] = (grad * padded[part])[..., inside[part]].sum((0, 2))
    torch.testing.assert_close(found[1], expected, rtol=1e-5, atol=1e-4, equal_nan=True)


def test_every_call_of_the_library_is_compared():
    source = libraries.COMPILED_CALLS.read_text(encoding="utf-8")
    names = set(re.findall(r'^    \{"([\w:]+)"', source, re.MULTILINE))
    assert len(names) > 25
    called = {name for name, *_ in CALLS.values()}
    assert names <= called
    assert names >= {name for name in called if name.startswith("ortlab::")}


LARGE = random(600, 600)

# What the library leaves to Python, for which reason.
LEFT = {
    "a Scalar, for which torch's C interface has no word": ("softplus", [X, number(1.0), number(20.0)], 1),
    "a Scalar among constants": described([X], "elu", "tensor", (1.0,), (1.0,), (1.0,)),
    "a list of tensors": described(
        [X], "split", "tensor", (4,), (-1,), overload="Tensor", results=(("float32", 3),) * 2
    ),
    "a gradient that several kernels compute": described(
        [GRAD, X], "cumsum", "tensor", (1,), (None,), **FIRST
    ),
    "a gradient of what has been broadcast": described(
        [number(1.5), X[:1], TARGET], "mse_loss", "tensor", "tensor", (1,), **LOSS, **FIRST
    ),
    "a result of another type than in the trace": described([X], "mish", "tensor", results=(("float64", 3),)),
    "what gives the state of a generator": described(
        [X.sigmoid()], "bernoulli", "tensor", (None,), random=True
    ),
    "more than a MiB": ("ortlab::silu_backward", [LARGE, LARGE], 1),
    "a bias of more than a MiB": ("ortlab::add_bias", [LARGE, random(600)], 1),
    "an output of more than a MiB": ("ortlab::matmul", [random(800, 2), random(2, 800)], 1),
    "a product of doubles": ("ortlab::matmul", [X.double(), random(8, 2).double()], 1),
    "a mask": ("ortlab::softmax_backward", [GRAD, PROBABILITIES, torch.zeros(3, 5, 8, dtype=torch.bool)], 1),
    "rows that are multiplied before they are added": (
        "index_add",
        [X, number(0), numbers(2, 2), random(2, 5, 8), number(2.0)],
        1,
    ),
    "a sum of doubles": ("ortlab::add", [X.double(), X.double()], 1),
    "a sum in which both are spread": ("ortlab::add", [random(5, 1), random(4)], 1),
    "a loss of images": (
        "ortlab::log_softmax_loss",
        [random(2, 3, 4), numbers(0, 1, 2, 0, 0, 1, 1, 2).view(2, 4), number(1), number(-100)],
        2,
    ),
    "a slice backwards": (
        "ortlab::slice_backward",
        [random(3, 3, 8), numbers(3, 5, 8), numbers(4), numbers(-9), numbers(1), numbers(-2)],
        1,
    ),
    "entries along another axis than the last": (
        "ortlab::gather_elements",
        [X, torch.zeros(3, 2, 8, dtype=torch.int64), numbers(3, 2, 8), number(1)],
        1,
    ),
    "no rows": ("ortlab::matmul", [random(0, 8), random(8, 2)], 1),
}


@pytest.mark.parametrize("call", LEFT.values(), ids=LEFT)
def test_what_is_out_of_the_ordinary_goes_through_python(compiled, call):
    before = compiled_calls.computed()
    torch.manual_seed(0)
    results, _ = called(compiled, *call)
    assert compiled_calls.computed() == before
    torch.manual_seed(0)
    expected, _ = called(aten_executor.execute_callback, *call)
    for result, one in zip(results, expected, strict=True):
        torch.testing.assert_close(result, one, rtol=0, atol=0)


# What torch refuses, or would read beyond its end.
WRONG = {
    "shapes that do not fit": ("ortlab::silu_backward", [X, random(7)], 1, "size of tensor"),
    "a window of other channels": (
        "ortlab::convolution",
        [IMAGES, random(6, 3, 3, 3), TWICE, PADDED, ONCE, numbers(1), None],
        1,
        "channels",
    ),
    "an index that is too large": (
        "ortlab::gather_backward",
        [numbers(3, 4), numbers(3, 0), random(2, 4), number(0)],
        1,
        "index",
    ),
    "a mask that is none": ("where", [X.double(), X, GRAD], 1, "self", "boolean"),
    "a window that is too large": (
        *described([X, number(99)], "unfold", "tensor", (2,), "number", (2,), results=(("float32", 4),)),
        "maximum size",
    ),
    "an entry that there is not": (
        "ortlab::gather_elements",
        [X, ENTRIES + 1, numbers(3, 5, 4), number(-1)],
        1,
        "index",
    ),
    "a class that there is not": (
        "ortlab::cross_entropy_backward",
        [number(1.5), LOG_PROBABILITIES, CLASSES + 4, None, number(1), number(-100), number(4.0)],
        1,
        "index",
    ),
    "a class without a logit": (
        "ortlab::cross_entropy",
        [LOGITS, CLASSES + 4, None, number(1), number(-100)],
        3,
        "out of bounds",
    ),
    "a row that there is not": (
        "embedding",
        [random(5, 4), numbers(5), number(-1), flag(0), flag(0)],
        1,
        "index",
    ),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_an_error_is_that_of_python(compiled, call):
    *arguments, words = call
    with pytest.raises(ExecutionError, match=words) as raised:
        called(compiled, *arguments)
    with pytest.raises(ExecutionError) as expected:
        called(aten_executor.execute_callback, *arguments)
    assert str(raised.value) == str(expected.value)


# The input in whose memory the output lies.
OVER = {
    "ortlab::softmax_backward_over": 0,
    "ortlab::add_bias": 0,
    "ortlab::add_output_gradient": 0,
    "ortlab::cross_entropy_backward": 1,
    "ortlab::add_embedding_gradient": 0,
}


@pytest.mark.parametrize("call", ALL_CALLS.values(), ids=ALL_CALLS)
def test_memory_of_inputs_and_outputs_is_given_back(compiled, call):
    name, results, copies = call[0], *called(compiled, *call)

    def holders():
        return [one._use_count() for one in copies if one is not None]

    # Each is held by its variable alone, but for one in whose memory an output lies, until that is given back.
    alone = [1] * len(holders())
    place = OVER.get(name)
    assert holders() == [1 + (i == place) for i in range(len(alone))]
    del results
    assert holders() == alone


def test_many_calls_leave_no_memory_behind(compiled):
    in_use = ctypes.CDLL(None).mallinfo2
    in_use.restype = process_memory._Statistics

    def grown(call, count):
        gc.collect()
        before = in_use().uordblks
        for _ in range(count):
            called(compiled, *call)
        gc.collect()
        return in_use().uordblks - before

    for name, call in ALL_CALLS.items():
        grown(call, 20)
        # The least there can be are 32 bytes a call.
        assert min(grown(call, 200) for _ in range(3)) < 200 * 16, name


def test_a_training_step_is_the_same_either_way():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 4),
    )
    twin = copy.deepcopy(net)
    ortlab.wrap(net)
    ortlab.wrap(twin)
    for _ in range(3):
        x, y = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
        before = compiled_calls.computed()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        assert compiled_calls.computed() > before
        with compiled_calls.through_python():
            before = compiled_calls.computed()
            loss_of_twin = nn.functional.cross_entropy(twin(x), y)
            loss_of_twin.backward()
            assert compiled_calls.computed() == before
        assert torch.equal(loss, loss_of_twin)
        for parameter, of_twin in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(parameter.grad, of_twin.grad)
        for buffer, of_twin in zip(net.buffers(), twin.buffers(), strict=True):
            assert torch.equal(buffer, of_twin)


WITHOUT = """
import sys, torch
from ortlab.engine.operators import compiled_calls
import ortlab
from ortlab.engine import extensions
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
ortlab.wrap(model)
model(torch.randn(3, 4)).sum().backward()
print(compiled_calls.computed(), extensions.status().aten)
"""


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"ORTLAB_COMPILE": "0"}, "ctypes (ORTLAB_COMPILE is 0)"),
        ({"PATH": "", "CXX": ""}, "ctypes (There is no C++ compiler."),
    ],
)
def test_without_the_library_python_is_called_and_the_reason_said(environment, words, monkeypatch, tmp_path):
    for name, value in {**environment, libraries.CACHE_VARIABLE: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(python("-c", WITHOUT), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"0 {words}")


def test_an_older_torch_is_named(monkeypatch):
    monkeypatch.setattr(compiled_calls, "_FUNCTIONS", (*compiled_calls._FUNCTIONS, "torch_of_tomorrow"))
    assert "has no torch_of_tomorrow" in compiled_calls._connect(0)


class Busy(nn.Module):
    """What ONNX Runtime computes for milliseconds, before and behind calls of torch."""

    def __init__(self, middle=None):
        super().__init__()
        self.before, self.middle, self.after = nn.Linear(256, 1024), middle or nn.Mish(), nn.Linear(1024, 256)

    def forward(self, x):
        return self.after(self.middle(self.before(x))).softmax(-1)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_region():
    return ctypes.CDLL(torch._C.__file__).omp_in_parallel()


def rests_in(model, steps=4):
    """Train in a thread of its own; return how often torch's rest in a step, and the gradients of the last one."""
    found = []

    def train():
        torch.manual_seed(0)
        x = torch.randn(1024, 256)
        for _ in range(steps):
            model.zero_grad()
            model(x).square().sum().backward()
        assert in_region() == 0
        found.extend((compiled_calls.rests(), [one.grad.clone() for one in model.parameters()]))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has libgomp on Linux only")
@pytest.mark.usefixtures("two_threads")
def test_the_threads_of_torch_sleep_while_onnxruntime_computes_for_long(monkeypatch):
    torch.manual_seed(0)
    model = Busy()
    twin = copy.deepcopy(model)
    ortlab.wrap(model)
    rests, gradients = rests_in(model)
    assert rests > 1
    monkeypatch.setattr(sessions._SessionOptions, "_share_cores", lambda _: None)
    ortlab.wrap(twin)
    none, expected = rests_in(twin)
    assert none == 0
    for one, other in zip(gradients, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has libgomp on Linux only")
@pytest.mark.usefixtures("two_threads")
def test_they_sleep_as_well_where_nothing_is_trained():
    model, rests = Busy(nn.LayerNorm(1024)).eval(), []
    ortlab.wrap(model)

    def evaluate():
        with torch.no_grad():
            for _ in range(4):
                model(torch.ones(1024, 256))
        rests.append(compiled_calls.rests())

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    assert rests[0] > 0


@pytest.mark.usefixtures("two_threads")
def test_they_do_not_sleep_where_onnxruntime_has_one_thread_or_runs_code_of_python():
    small = nn.Linear(4, 4)
    ortlab.wrap(small)
    small(torch.randn(2, 4)).sum().backward()
    with_python = Busy(Doubled.apply)
    ortlab.wrap(with_python)
    assert rests_in(with_python)[0] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="PyTorch has libgomp on Linux only")
@pytest.mark.usefixtures("two_threads")
def test_a_run_that_was_cut_off_ends_their_sleep(compiled):
    library = compiled_calls.library()
    slept = []
    for _ in range(2):  # the second knows how long the first took
        library.ortlab_begin_run(12345, 2)
        slept.append(in_region())
        time.sleep(0.01)
        called(compiled, "aten::exp", [X], 1)
        assert in_region() == 0
    assert slept == [0, 1]
    library.ortlab_begin_run(12345, 2)  # the one before has no end
    assert in_region() == 1
    for _ in range(2):
        compiled_calls.end_run()
        assert in_region() == 0
