"""Files of ORT's Triton fusion, written by ORT's own code generator: it needs neither Triton nor a GPU for that.

Only what the generator is handed is made here: sub-graphs that are cut out of the graphs of real builds, by the rules
of ``triton_fusion.cc`` (1.19.2), since the fusion itself is in the CUDA build alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import sympy
from onnx import helper

ALIAS = "ort_triton_without_its_kernels"
"""The modules of ``onnxruntime.training.ort_triton`` under a name of their own: its ``__init__`` imports Triton."""


def generator():
    """Return ORT's ``triton_op_executor``, which writes the files."""
    if ALIAS not in sys.modules:
        import onnxruntime.training

        package = types.ModuleType(ALIAS)
        package.__path__ = [str(Path(onnxruntime.training.__file__).parent / "ort_triton")]
        sys.modules[ALIAS] = package
    return importlib.import_module(f"{ALIAS}.triton_op_executor")


def cut(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """Take nodes out of a graph as a model: scalar constants go with them, everything else is fed."""
    graph = model.graph
    nodes = [node for node in graph.node if node.name in names]
    assert len(nodes) == len(names), names
    known = {one.name: one for one in (*graph.value_info, *graph.input, *graph.output)}
    constants = {one.name: one for one in graph.initializer if list(one.dims) in ([], [1])}
    made = {name for node in nodes for name in node.output}
    read = list(dict.fromkeys(name for node in nodes for name in node.input if name))
    outside = {name for node in graph.node if node.name not in names for name in node.input}
    outside |= {one.name for one in graph.output}
    part = helper.make_graph(
        nodes,
        "test",
        [known[name] for name in read if name not in made and name not in constants],
        [known[name] for node in nodes for name in node.output if name in outside or name not in read],
        [constants[name] for name in read if name in constants],
    )
    return helper.make_model(part, opset_imports=model.opset_import, ir_version=model.ir_version)


def key_of(part: onnx.ModelProto) -> int:
    """Return what ``triton_fusion.cc`` names a sub-graph by."""
    value = 0
    for byte in part.SerializeToString():
        value = (value * 101 + (byte - 256 if byte > 127 else byte)) % 2**32
    return value


def shapes_of(part: onnx.ModelProto, symbols: Mapping[str, int]) -> list[list[int]]:
    """Return the sizes of the inputs."""

    def size(dim) -> int:
        return int(sympy.sympify(dim.dim_param).subs(symbols)) if dim.dim_param else dim.dim_value

    return [[size(dim) for dim in one.type.tensor_type.shape.dim] for one in part.graph.input]


def write(part: onnx.ModelProto, symbols: Mapping[str, int], monkeypatch) -> int:
    """Let ORT generate the code of a sub-graph and write its files into ``triton_debug`` below the present folder."""
    executor = generator()
    monkeypatch.setattr(executor, "_DEBUG_MODE", True)
    # Loading the code imports Triton; that it is Python is seen without.
    monkeypatch.setattr(executor.PyCodeCache, "load", lambda _self, code: compile(code, "kernel", "exec"))
    key = key_of(part)
    with warnings.catch_warnings():
        # 1.19.2 does not write into that array.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        warnings.filterwarnings("ignore", "Use triton's random for Dropout")
        executor._gen_module(key, part, shapes_of(part, symbols))
    return key
