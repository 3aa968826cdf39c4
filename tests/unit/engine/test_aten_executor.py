"""PyTorch's operators behind ORT's ATen node: called through the C function pointers, and by real sessions."""

from __future__ import annotations

import copy
import ctypes
import gc
import threading
import weakref

import numpy as np
import psutil
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from ortlab.engine import border
from ortlab.engine.border import (
    DLManagedTensor,
    give_pointer,
    storage_address,
    take_error,
    take_pointer,
    unreadable_pointer,
)
from ortlab.engine.operators import aten_executor
from ortlab.errors import ExecutionError

pytestmark = pytest.mark.filterwarnings("ignore:Setting `training` to something:DeprecationWarning")


def execute(name, overload, inputs, n_outputs=1):
    """Call the callback as ORT does, with owned pointers, and take the outputs as ORT does."""
    pointers = (ctypes.c_void_p * len(inputs))(*(None if t is None else give_pointer(t) for t in inputs))
    outputs = (ctypes.c_void_p * n_outputs)()
    aten_executor.execute_callback(name, overload, len(inputs), pointers, n_outputs, outputs)
    error = take_error()
    if error is not None:
        assert set(outputs) == {unreadable_pointer()}
        raise error
    results = [None if pointer is None else take_pointer(pointer) for pointer in outputs]
    return results[0] if n_outputs == 1 else results


def scalar(number):
    return torch.tensor(number)


X = torch.linspace(-1, 1, 12).reshape(3, 4)
MASK = X > 0

CALLS = {
    "Tensor": ("aten::exp", "", [X], X.exp()),
    "name without namespace": ("exp", "", [X], X.exp()),
    "Scalar, with kw-only default": ("aten::add", "Scalar", [X, scalar(2.5), None], X + 2.5),
    "kw-only Scalar given": ("aten::add", "Tensor", [X, X, scalar(3)], X + 3 * X),
    "Scalar as int64": ("aten::mul", "Scalar", [X, scalar(3)], X * 3),
    "Scalars not given": (
        "aten::softplus",
        "",
        [X, scalar(1.0), scalar(20.0)],
        nn.functional.softplus(X),
    ),
    "int and bool": (
        "aten::_softmax",
        "",
        [X, scalar(1), torch.tensor([0], dtype=torch.uint8)],
        X.softmax(1),
    ),
    "bool as int64": ("aten::_softmax", "", [X, torch.tensor([1]), scalar(0)], X.softmax(1)),
    "list of int": (
        "aten::sum",
        "dim_IntList",
        [X, torch.tensor([0, 1]), scalar(1), None],
        X.sum((0, 1), True),
    ),
    "optional list not given": ("aten::sum", "dim_IntList", [X, None, None, None], X.sum()),
    "optional int, ScalarType": (
        "aten::sum",
        "dim_IntList",
        [X, torch.tensor([0]), None, scalar(7)],
        X.double().sum(0),
    ),
    "empty list": ("aten::amax", "", [X, torch.empty(0, dtype=torch.int64), None], X.amax()),
    "float, optional list of float": (
        "aten::upsample_nearest2d",
        "vec",
        [X[None, None], None, torch.tensor([2.0, 2.0])],
        nn.functional.interpolate(X[None, None], scale_factor=2),
    ),
    "list of bool": (
        "aten::convolution_backward",
        "",
        [
            *(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2)),
            *(None, torch.tensor([1, 1]), torch.tensor([0, 0]), torch.tensor([1, 1])),
            *(scalar(0), torch.tensor([0, 0]), scalar(1), torch.tensor([1, 1, 0], dtype=torch.uint8)),
        ],
        [
            torch.tensor([[[[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]]]),
            torch.full((1, 1, 2, 2), 4.0),
            None,  # an undefined output
        ],
    ),
    "optional Tensor not given": (
        "aten::native_layer_norm",
        "",
        [X, torch.tensor([4]), None, None, scalar(1e-5)],
        list(torch.native_layer_norm(X, [4], None, None, 1e-5)),
    ),
    "optional Tensor given": (
        "aten::clamp",
        "Tensor",
        [X, torch.zeros(4), None],
        X.clamp(min=0),
    ),
    "list of Tensor": ("aten::cat", "", [X, X * 2, X * 3, scalar(1)], torch.cat([X, X * 2, X * 3], 1)),
    "list of optional Tensor": (
        "aten::index",
        "Tensor",
        [X, None, torch.tensor([2, 0])],
        X[:, [2, 0]],
    ),
    "boolean input": ("aten::masked_fill", "Scalar", [X, MASK, scalar(0.0)], X.masked_fill(MASK, 0)),
    "boolean output": ("aten::gt", "Scalar", [X, scalar(0.0)], MASK.to(torch.uint8)),
    "int output": ("aten::sym_size", "int", [X, scalar(1)], scalar(4)),
    "trailing input left out": ("aten::sum", "dim_IntList", [X, torch.tensor([1])], X.sum(1)),
    "not contiguous": ("aten::transpose", "int", [X, scalar(0), scalar(1)], X.t().contiguous()),
    "int64": ("aten::cumsum", "", [torch.arange(4), scalar(0), None], torch.arange(4).cumsum(0)),
    "half": ("aten::neg", "", [X.half()], -X.half()),
    "bfloat16": ("aten::neg", "", [X.bfloat16()], -X.bfloat16()),
    "empty Tensor": ("aten::exp", "", [X[:0]], X[:0]),
    "0-dimensional": ("aten::exp", "", [scalar(0.0)], scalar(1.0)),
}


@pytest.mark.parametrize("case", CALLS)
def test_argument_kinds(case):
    name, overload, inputs, expected = CALLS[case]
    results = execute(
        name.encode(), overload.encode(), inputs, len(expected) if isinstance(expected, list) else 1
    )
    torch.testing.assert_close(results, expected)


def test_is_tensor():
    def ask(name, overload, index, *, is_input):
        return aten_executor.is_tensor_callback(name, overload, index, is_input)

    assert [ask(b"aten::sum", b"dim_IntList", i, is_input=True) for i in range(4)] == [
        True,
        False,
        False,
        False,
    ]
    assert [ask(b"aten::native_layer_norm", b"", i, is_input=False) for i in range(3)] == [True] * 3
    assert not ask(b"aten::sym_size", b"int", 0, is_input=False)
    assert ask(b"aten::stack", b"", 0, is_input=True)
    assert not ask(b"aten::no_such_operator", b"", 0, is_input=True)
    assert "no_such_operator" in str(take_error())


@pytest.mark.parametrize(
    ("name", "overload", "inputs", "message"),
    [
        (b"aten::no_such_operator", b"", [X], "aten::no_such_operator failed: AttributeError"),
        (
            b"aten::mm",
            b"",
            [X, X],
            "aten::mm failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
        ),
        (b"aten::exp", b"", [X, X], "takes 1 inputs, but ONNX Runtime passed 2"),
        (b"aten::randn", b"generator", [scalar(3), X], "is a GeneratorType, which ONNX Runtime cannot pass"),
        (b"aten::_softmax", b"", [X, torch.tensor([1, 0]), scalar(0)], "aten::_softmax failed: RuntimeError"),
    ],
)
def test_errors_keep_operator_and_message(name, overload, inputs, message):
    with pytest.raises(ExecutionError, match=message) as raised:
        execute(name, overload, inputs)
    assert raised.value.__cause__ is not None
    assert message.split(": ")[0] in str(raised.value)


def test_wrong_number_of_outputs_is_an_error():
    with pytest.raises(ExecutionError, match="aten::native_layer_norm failed"):
        execute(
            b"aten::native_layer_norm", b"", [X, torch.tensor([4]), None, None, scalar(1e-5)], n_outputs=2
        )


def test_the_first_error_is_the_one_reported():
    for name in (b"aten::first", b"aten::second"):
        aten_executor.is_tensor_callback(name, b"", 0, True)
    assert "aten::first" in str(take_error())
    assert take_error() is None


def test_input_is_not_copied():
    address = X.data_ptr()
    tensor = take_pointer(give_pointer(X))
    assert tensor.data_ptr() == address


def test_outputs_share_memory_with_nothing():
    # A view of an input: ORT may overwrite the one while it still reads the other.
    x = X.clone()
    view = execute(b"aten::view", b"", [x, torch.tensor([12])])
    assert storage_address(view) != storage_address(x)
    assert torch.equal(view, x.reshape(12))


def test_an_array_that_torch_refuses_is_given_back():
    freed = []
    deleter = type(DLManagedTensor().deleter)(freed.append)
    refused = DLManagedTensor.from_buffer_copy(DLManagedTensor.from_address(unreadable_pointer()))
    refused.dl_tensor.device_type = 99
    refused.deleter = deleter
    with pytest.raises((BufferError, RuntimeError, ValueError)):
        take_pointer(ctypes.addressof(refused))
    assert freed == [ctypes.addressof(refused)]


def test_an_array_that_an_interrupt_finds_taken_is_given_back_once(monkeypatch):
    """Giving it back twice corrupted memory: Ctrl-C, right after torch has taken an input of a kernel."""
    freed, real = [], border.from_dlpack

    def take_and_stop(capsule):
        real(capsule)
        raise KeyboardInterrupt

    array = DLManagedTensor.from_buffer_copy(DLManagedTensor.from_address(give_pointer(X.clone())))
    array.deleter = type(DLManagedTensor().deleter)(freed.append)
    monkeypatch.setattr(border, "from_dlpack", take_and_stop)
    with pytest.raises(KeyboardInterrupt):
        take_pointer(ctypes.addressof(array))
    assert freed == [ctypes.addressof(array)]


def test_200_calls_leak_nothing():
    array = np.ones((512, 512), dtype=np.float32)
    alive = weakref.ref(array)
    inputs = [torch.from_numpy(array), torch.tensor([1]), scalar(0)]
    del array

    def calls(count):
        for _ in range(count):
            execute(b"aten::_softmax", b"", inputs)
        gc.collect()
        return len(gc.get_objects()), psutil.Process().memory_info().rss

    calls(5)
    objects, memory = calls(5)
    more_objects, more_memory = calls(200)
    assert more_objects - objects < 20
    assert more_memory - memory < 40 * 2**20  # 200 outputs of 1 MiB that were not given back would be 200 MiB
    inputs.clear()
    assert alive() is None  # one input capsule that was not given back would keep it


def test_called_from_foreign_threads():
    results = []

    def work():
        results.extend(execute(b"aten::exp", b"", [X]) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(torch.equal(result, X.exp()) for result in results)


def aten_model(operator, overload, inputs, outputs):
    node = helper.make_node(
        "ATen",
        [name for name, _, _ in inputs],
        [name for name, _, _ in outputs],
        domain="org.pytorch.aten",
        operator=operator,
        overload_name=overload,
    )
    graph = helper.make_graph(
        [node],
        "one operator",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("org.pytorch.aten", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.fixture
def session(ortmodule):
    import onnxruntime
    from onnxruntime.training.ortmodule.torch_cpp_extensions.cpu.aten_op_executor import (
        load_aten_op_executor_cpp_extension,
    )

    load_aten_op_executor_cpp_extension()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4

    def make(*model):
        content = aten_model(*model).SerializeToString()
        return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    return make


FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def test_session_runs_an_operator(session):
    run = session("erfinv", "", [("x", FLOAT, ["n", "m"])], [("y", FLOAT, ["n", "m"])])
    (y,) = run.run(None, {"x": (X * 0.9).numpy()})
    torch.testing.assert_close(torch.from_numpy(y), torch.erfinv(X * 0.9))


def test_session_stops_at_a_failed_operator_and_works_afterwards(session):
    run = session("mm", "", [("a", FLOAT, ["n", "m"]), ("b", FLOAT, ["k", "l"])], [("y", FLOAT, ["n", "l"])])
    for _ in range(3):
        with pytest.raises(Exception, match="ATen"):
            run.run(None, {"a": X.numpy(), "b": X.numpy()})
        assert "mat1 and mat2 shapes cannot be multiplied" in str(take_error())
    (y,) = run.run(None, {"a": X.numpy(), "b": X.t().contiguous().numpy()})
    torch.testing.assert_close(torch.from_numpy(y), X @ X.t())


def test_training_with_aten_operators_matches_pytorch(with_ort):
    # max_pool2d and its backward, which ORTModule 1.19.2 itself sends to PyTorch.
    torch.manual_seed(0)
    eager = nn.Sequential(
        nn.Embedding(7, 16, padding_idx=0), nn.Unflatten(-1, (4, 4)), nn.MaxPool2d(2), nn.Flatten()
    )
    wrapped = copy.deepcopy(eager)
    model, x = with_ort(wrapped), torch.tensor([[1, 2, 3], [0, 5, 6]])
    called = set()
    find = aten_executor.Operator.execute

    def note(self, tensors):
        called.add(self.name)
        return find(self, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aten_executor.Operator, "execute", note)
        for net in (eager, model):
            net(x).pow(2).sum().backward()
    assert called & {"aten::max_pool2d_with_indices", "aten::embedding"}, called
    torch.testing.assert_close(wrapped[0].weight.grad, eager[0].weight.grad, rtol=1e-5, atol=1e-6)
