"""The calls of PyTorch's operators that need no Python: ``compiled_calls.cpp``, compiled and connected.

ONNX Runtime calls the library for each ``ATen`` node; the library calls :mod:`~ortlab.engine.operators.aten_executor`
for what it does not compute itself. A small model makes dozens of such calls in a step, and each takes a few
microseconds instead of thirty or, where Python's code is not in the processor's caches, a hundred and more. Both ways
call the same kernels of torch, so the numbers are the same bits, but for one kernel that is ours (``depthwise.h``). The
library knows `ortlab`'s own kernels by name; an operator of torch is described to it when it is first met, a
`TorchCall` with its constants.

Since every call comes through it, the library also knows when ONNX Runtime computes by itself, and for how long. Then
it lets torch's threads sleep, which would wait for the next call on the cores that ONNX Runtime's threads need.

It needs a C++ compiler (Linux, macOS) and PyTorch 2.13, the first with all of `_FUNCTIONS`: earlier ones write each
error to the terminal. Without them every call goes through Python, as it does where the environment variable
`ORTLAB_COMPILE` is 0.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch

from ortlab.engine import libraries
from ortlab.engine.operators.torch_calls import (
    BOOLEAN,
    NUMBER,
    NUMBERS,
    ONE_KERNEL,
    TENSOR,
    VALUE,
    CallableCall,
    argument_type,
)
from ortlab.errors import BuildError

COMPILE_VARIABLE: Final = "ORTLAB_COMPILE"
"""Environment variable that, set to 0, lets every call of PyTorch's operators go through Python."""

_FUNCTIONS: Final = (
    "aoti_torch_create_tensor_from_blob",
    "aoti_torch_empty_strided",
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_dtype",
    "aoti_torch_is_contiguous",
    "aoti_torch_is_defined",
    "aoti_torch_cpu_mm_out",
    "aoti_torch_cpu_addmm_out",
    "torch_call_dispatcher",
    "torch_new_list_reserve_size",
    "torch_list_push_back",
    "torch_new_stable_ivalue",
    "aoti_torch_grad_mode_is_enabled",
    "aoti_torch_grad_mode_set_enabled",
)
"""Functions of torch's C interface, in the order of ``struct Torch``."""

_GELU_BACKWARD: Final = (
    "_ZN2at4_ops13gelu_backward4callERKNS_6TensorES4_St17basic_string_viewIcSt11char_traitsIcEE"
)
"""``at::_ops::gelu_backward::call``."""
_MAY_BE_MISSING: Final = (_GELU_BACKWARD, "GOMP_parallel_start", "GOMP_parallel_end")
"""The last functions of ``struct Torch``."""


class _Torch(ctypes.Structure):
    _fields_: ClassVar = [(name, ctypes.c_void_p) for name in (*_FUNCTIONS, *_MAY_BE_MISSING)]


class _Connected:
    """The library of this process, once it is there, or why there is none."""

    library: Any = None
    with_lock: Any = None  # the same, for functions that need Python's lock
    lacking = "nothing has been wrapped"
    seed = 1  # that ONNX Runtime was given last


def connect(in_python: int) -> int:
    """Return the address of the library's function for ORT, or 0; `in_python` is that of the one for other calls."""
    if _Connected.library is None:
        _Connected.lacking = _connect(in_python)
    return 0 if _Connected.library is None else int(_Connected.library.ortlab_execute())


def lacking() -> str:
    """Say why every call goes through Python; empty where the library is in use."""
    return _Connected.lacking


def computed() -> int:
    """Return how many calls the library has computed in this process."""
    return 0 if _Connected.library is None else int(_Connected.library.ortlab_computed())


def library() -> Any:
    """Return the library itself, whose functions are in ``dropout.h``, ``where.h`` and at the end of its source."""
    return _Connected.library


def seed(value: int) -> None:
    """Let the next dropouts take this seed and those after it, as ONNX Runtime's do after ``onnxruntime.set_seed``."""
    _Connected.seed = value
    if _Connected.library is not None:
        _Connected.library.ortlab_seed(value)


def begin_run(key: int, threads: int) -> None:
    """Let torch's threads sleep where ONNX Runtime, with threads of its own, computes for long; up to `end_run`."""
    if _Connected.library is not None:
        _Connected.library.ortlab_begin_run(key, threads)


def end_run() -> None:
    """End what `begin_run` has begun in this thread, if anything."""
    if _Connected.library is not None:
        _Connected.library.ortlab_end_run()


def rests() -> int:
    """Return after how many calls, and before how many runs, of this thread torch's threads sleep."""
    return 0 if _Connected.library is None else int(_Connected.library.ortlab_rests())


def same_entries(
    dicts: Sequence[object], lengths: Sequence[int], keys: Sequence[object], values: Sequence[object]
) -> Callable[[], bool] | None:
    """Return what tells whether dicts hold these entries, all keys and values one after the other; None without it."""
    # The caller keeps all of these objects alive.
    if _Connected.with_lock is None:
        return None
    held = [id(one) for entry in zip(keys, values, strict=True) for one in entry]
    return functools.partial(
        _Connected.with_lock.ortlab_same_entries,
        ctypes.cast(ctypes.pythonapi.PyDict_Next, ctypes.c_void_p),
        len(dicts),
        (ctypes.c_void_p * len(dicts))(*map(id, dicts)),
        (ctypes.c_int64 * len(lengths))(*lengths),
        (ctypes.c_void_p * len(held))(*held),
    )


@contextmanager
def through_python() -> Iterator[None]:
    """Let every call go through Python for a while."""
    if _Connected.library is None:
        yield
        return
    _Connected.library.ortlab_enable(False)  # noqa: FBT003 - a function of C
    try:
        yield
    finally:
        _Connected.library.ortlab_enable(True)  # noqa: FBT003


def _connect(in_python: int) -> str:
    """Compile, load and connect the library; return why that cannot be, or nothing."""
    if os.environ.get(COMPILE_VARIABLE, "").strip() == "0":
        return f"{COMPILE_VARIABLE} is 0"
    functions, missing = _functions()
    if missing:
        return f"PyTorch {torch.__version__} has no {missing}; 2.13 and later have it"
    try:
        library = ctypes.CDLL(str(libraries.build(source=libraries.COMPILED_CALLS)))
    except BuildError as error:
        return " ".join(filter(None, (error.what, error.why)))
    except OSError as error:
        return str(error)
    library.ortlab_connect.argtypes = [ctypes.POINTER(_Torch), ctypes.c_void_p]
    library.ortlab_enable.argtypes = [ctypes.c_bool]
    library.ortlab_computed.restype = ctypes.c_uint64
    library.ortlab_execute.restype = ctypes.c_size_t
    library.ortlab_seed.argtypes = [ctypes.c_uint64]
    library.ortlab_take_seeds.argtypes, library.ortlab_take_seeds.restype = [ctypes.c_uint64], ctypes.c_uint64
    library.ortlab_dropout.argtypes = [
        *[ctypes.c_void_p] * 3,
        ctypes.c_int64,
        ctypes.c_float,
        ctypes.c_uint64,
    ]
    library.ortlab_dropout_backward.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_float]
    library.ortlab_where.argtypes = [
        ctypes.c_int64,
        *[ctypes.POINTER(ctypes.c_int64)] * 2,
        *[ctypes.c_void_p] * 4,
    ]
    library.ortlab_begin_run.argtypes = [ctypes.c_size_t, ctypes.c_uint32]
    library.ortlab_rests.restype = ctypes.c_uint64
    texts = [ctypes.c_char_p] * 5
    library.ortlab_describe.argtypes = [*texts, ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t]
    library.ortlab_seed(_Connected.seed)
    library.ortlab_connect(ctypes.byref(functions), in_python)
    with_lock = ctypes.PyDLL(library._name)
    with_lock.ortlab_same_entries.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_void_p] * 3]
    with_lock.ortlab_same_entries.restype = ctypes.c_bool
    _Connected.library, _Connected.with_lock = library, with_lock
    return ""


def _functions() -> tuple[_Torch, str]:
    """Return the addresses of torch's functions, and the name of one that it lacks."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    functions = _Torch()
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    except OSError:
        return functions, name
    for function in (*_FUNCTIONS, *_MAY_BE_MISSING):
        if hasattr(loaded, function):
            setattr(functions, function, ctypes.cast(getattr(loaded, function), ctypes.c_void_p).value)
        elif function in _FUNCTIONS:
            return functions, function
    return functions, ""


# ---- calls that are described to the library ---------------------------------------------------------------------


class _Described(NamedTuple):
    """A call in words."""

    operator: Any  # of torch
    words: list[str]  # one for each argument
    results: list[tuple[int, int]]  # type and the input that has its shape, each -1 if that is not known


def describe(call: CallableCall, text: str) -> None:
    """Let the library make a call itself from now on, the one of this name and text, if it has words for it."""
    described = None if _Connected.library is None else _described(call)
    if described is not None:
        _tell(call.name, text, described)


def describe_operator(name: str, overload: str, operator: Any, booleans: Collection[str]) -> None:
    """Let the library call an operator of torch whose arguments are the inputs; those of these names are masks."""
    schema = operator._schema
    if _Connected.library is None or not _gives_tensors(operator, len(schema.returns)):
        return
    inputs = [_Input(number, _kind_of(one, booleans)) for number, one in enumerate(schema.arguments)]
    words = _words(schema.arguments, inputs)
    if words:
        _tell(name, overload, _Described(operator, words, [(-1, -1)] * len(schema.returns)))


def _gives_tensors(operator: Any, count: int) -> bool:
    """Say whether an operator returns so many tensors, and not a list of them."""
    returns = operator._schema.returns
    return len(returns) == count and all(one.type.kind() == "TensorType" for one in returns)


def _tell(name: str, overload: str, described: _Described) -> None:
    schema = described.operator._schema
    texts = name, overload, schema.name, schema.overload_name, " ".join(described.words)
    numbers = [number for result in described.results for number in result]
    in_memory = (ctypes.c_int64 * len(numbers))(*numbers)
    _Connected.library.ortlab_describe(*(one.encode() for one in texts), in_memory, len(described.results))


def _kind_of(argument: Any, booleans: Collection[str]) -> str:
    kind, _, several = argument_type(argument)
    if kind == "TensorType":
        return BOOLEAN if argument.name in booleans else TENSOR
    return NUMBERS if several else NUMBER


class _Input(NamedTuple):
    """An input of the node, in the place of an argument."""

    number: int
    kind: str


_TYPES: Final = {
    "uint8": 0, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7, "bool": 11, "bfloat16": 15,
}  # fmt: skip
"""Those of results, with their numbers in torch's C interface."""

_KINDS: Final = {"IntType": "i", "SymIntType": "i", "FloatType": "f", "BoolType": "b"}
_OF_LAYOUT: Final = frozenset({"dtype", "layout", "memory_format"})
"""Arguments whose numbers torch's C interface counts otherwise."""


def _described(one: CallableCall) -> _Described | None:
    """Describe a call; None if the library has no words for it."""
    call = one.call
    own = "::" not in one.name.removeprefix("aten::")  # what another library computes may do more than that
    special = call.random or call.awaited or call.waits
    if not own or special or not set(call.kinds) <= {TENSOR, BOOLEAN, NUMBER, NUMBERS}:
        return None
    first = len(call.gradients_from) if one.is_gradient else 0
    numbers = iter(range(first, first + len(call.kinds)))
    arguments = [
        _constant(rest[0]) if kind == VALUE else _Input(next(numbers), kind) for kind, *rest in call.arguments
    ]
    operator, like = one.operator, -1
    if one.is_gradient:
        kernel = ONE_KERNEL.get((operator._schema.name.removeprefix("aten::"), call.overload))
        if (
            kernel is None
            or set(call.kinds) != {TENSOR}
            or call.gradient_of != (0,)
            or call.gradients_from != (0,)
        ):
            return None
        name, *arguments = kernel(_Input(0, TENSOR), *arguments)
        operator, like = getattr(torch.ops.aten, name).default, 1
    words = _words(operator._schema.arguments, arguments)
    known = all(dtype in _TYPES for dtype, _ in call.results)
    if not words or not known or not _gives_tensors(operator, len(call.results)):
        return None
    return _Described(operator, words, [(_TYPES[dtype], like) for dtype, _ in call.results])


def _constant(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _words(schema: Sequence[Any], values: Sequence[Any]) -> list[str]:
    """Return a word for each argument, as ``arguments_of`` in the library reads it; nothing if one has none."""
    words = []
    for index, argument in enumerate(schema):
        if index >= len(values) and not argument.has_default_value():
            return []
        word = _word(argument, values[index] if index < len(values) else argument.default_value)
        if not word:
            return []
        words.append(word)
    return words


def _word(argument: Any, value: Any) -> str:
    kind, is_optional, several = argument_type(argument)
    if value is None:
        return "n" if is_optional else ""
    if kind == "TensorType":
        word = "" if several else _word_of_tensor(value)
    else:
        letter = "" if argument.name in _OF_LAYOUT else _KINDS.get(kind, "")
        word = _word_of_numbers(value, letter, several=several) if letter else ""
    return ("?" if is_optional else "") + word if word else ""


def _word_of_tensor(value: Any) -> str:
    letter = {TENSOR: "T", BOOLEAN: "M"}.get(value.kind) if isinstance(value, _Input) else None
    return f"{letter}{value.number}" if letter else ""


def _word_of_numbers(value: Any, letter: str, *, several: bool) -> str:
    if isinstance(value, _Input):
        fits = value.kind == (NUMBERS if several else NUMBER) and not (several and letter == "f")
        return f"{'L' if several else letter.upper()}{value.number}" if fits else ""
    if several:
        whole = isinstance(value, list) and all(isinstance(one, int) for one in value)
        return f"l{','.join(str(int(one)) for one in value)}" if whole else ""
    if isinstance(value, list) or not math.isfinite(value):
        return ""
    return f"{letter}{float(value) if letter == 'f' else int(value)}"
