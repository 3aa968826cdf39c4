"""ORTModule finds the exporter modules it was written for, whatever torch is installed."""

from __future__ import annotations

import importlib
import inspect
import subprocess

import pytest
import torch
from forked import python

from ortlab.engine import exporter
from ortlab.errors import InstallError


@pytest.mark.parametrize("name", exporter._MODULES_USED_BY_ORT)
def test_the_modules_that_ort_imports_can_be_imported(name):
    exporter.prepare_torch()
    assert importlib.import_module(name)


def test_private_functions_that_ort_imports_are_there():
    exporter.prepare_torch()
    opset9 = importlib.import_module("torch.onnx.symbolic_opset9")
    assert callable(opset9._convolution)
    assert callable(opset9._convolution_mode)
    assert callable(importlib.import_module("torch.onnx.symbolic_opset11").squeeze)
    assert importlib.import_module("torch.onnx._globals").GLOBALS is not None


def test_preparing_replaces_nothing_and_twice_is_once():
    """What torch's users could see before is the same object after."""
    script = """
import importlib, torch.onnx
names = ("symbolic_helper", "symbolic_opset9", "symbolic_opset11")
before = {name: dict(vars(importlib.import_module("torch.onnx." + name))) for name in names}
export = torch.onnx.export
from ortlab.engine import exporter
exporter.prepare_torch()
once = {name: dict(vars(importlib.import_module("torch.onnx." + name))) for name in names}
exporter.prepare_torch()
for name in names:
    now = vars(importlib.import_module("torch.onnx." + name))
    assert all(now[key] is value for key, value in before[name].items()), name
    assert now.keys() == once[name].keys()
assert torch.onnx.export is export
"""
    subprocess.run(python("-c", script), check=True)


def test_what_a_failed_import_left_in_torch_is_taken_back():
    script = """
import torch, torch.utils.checkpoint
functions = lambda: (torch.manual_seed, torch.cuda.manual_seed, torch.utils.checkpoint.checkpoint)
before = functions()
import onnxruntime  # the training package: tries ORTModule, and passes over its ImportError
from ortlab import engine
from ortlab.engine import exporter
exporter.prepare_torch()
assert functions() == before
module = engine.load()
assert module.torch_manual_seed is before[0]
"""
    subprocess.run(python("-c", script), check=True)


def test_a_torch_that_is_too_old_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.3.1")
    with pytest.raises(InstallError, match=r"2\.3\.1 is too old") as error:
        exporter.prepare_torch()
    assert exporter.OLDEST_TORCH in error.value.fix
    assert exporter.NEWEST_TORCH in error.value.fix


def test_a_torch_without_the_exporter_is_named_with_what_to_install(monkeypatch):
    found = exporter._find
    monkeypatch.setattr(exporter, "_find", lambda name: "jit_utils" not in name and found(name))
    with pytest.raises(InstallError, match="no TorchScript ONNX exporter") as error:
        exporter.prepare_torch()
    assert exporter.NEWEST_TORCH in error.value.fix


def test_a_nightly_of_the_oldest_torch_is_new_enough(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.4.0a0+git1234")
    exporter.prepare_torch()


def test_only_ortmodules_own_export_asks_for_the_old_exporter(ortmodule):
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    module = ortmodule.ORTModule(torch.nn.Linear(2, 2))
    manager = module._torch_module._execution_manager(True)._graph_transition_manager
    assert isinstance(manager, GraphTransitionManager)
    parameters = inspect.signature(torch.onnx.export).parameters
    if "dynamo" in parameters:
        assert manager._export_extra_kwargs == {"dynamo": False}
        assert not hasattr(torch.onnx.export, "__wrapped__")
    else:
        assert manager._export_extra_kwargs == {}


def test_nvtx_marks_do_nothing_where_torch_has_no_nvtx(ortmodule):
    from onnxruntime.training.utils import torch_profile_utils

    if hasattr(torch._C, "_nvtx"):
        assert torch_profile_utils.torch_nvtx_range_push.__module__ == torch_profile_utils.__name__
    torch_profile_utils.torch_nvtx_range_push("mark")
    torch_profile_utils.torch_nvtx_range_pop()


def test_adapting_twice_is_once(ortmodule):
    from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager

    before = GraphTransitionManager.__init__
    exporter.adapt_ort()
    assert GraphTransitionManager.__init__ is before
