"""Real ORTModule for the tests of the engine, loaded the way the product loads it."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from pathlib import Path
from typing import ClassVar

import pytest


@pytest.fixture(scope="session")
def ortmodule():
    from ortlab import engine

    ortmodule = engine.load()
    # The first export looks for DeepSpeed, which warns.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("onnxruntime.training.utils.hooks")
    return ortmodule


@pytest.fixture
def with_ort(ortmodule, monkeypatch):
    """Return a function that makes a module run on ORT and ortlab's node of autograd, without any fallback."""
    from onnxruntime.training.ortmodule import _graph_execution_manager_factory as factory
    from onnxruntime.training.ortmodule._fallback import _FallbackPolicy

    from ortlab.engine.autograd_node import AutogradNode

    class Manager(AutogradNode, factory.TrainingManager):
        lines: ClassVar = {}

    monkeypatch.setattr(factory, "TrainingManager", Manager)
    monkeypatch.setattr(ortmodule, "ORTMODULE_FALLBACK_POLICY", _FallbackPolicy.FALLBACK_DISABLE)
    options = ortmodule.DebugOptions(log_level=ortmodule.LogLevel.ERROR)
    return lambda module: ortmodule.ORTModule(module, options)


@pytest.fixture(scope="session")
def compiled_runner(tmp_path_factory):
    from ortlab.engine import libraries

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(libraries.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        return libraries.build()


@pytest.fixture(params=["ctypes", "compiled"])
def runners(request, ortmodule, compiled_runner):
    """Run Functions in either way; the one that the product chose is put back."""
    from ortlab.engine import extensions
    from ortlab.engine.functions import abi as function_abi

    chosen = extensions._choose_runners()
    if request.param == "compiled":
        extensions.use_runners(function_abi.compiled_runners(compiled_runner))
    elif not function_abi.system_v_is_spoken():
        pytest.xfail("ctypes cannot speak the C++ ABI of this platform; the product compiles the runner here")
    assert request.param in extensions.status().functions
    yield request.param
    extensions.use_runners(chosen)


@pytest.fixture
def nets():
    """Return a function that makes the same small network twice around a body: one for PyTorch, one for ORT."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.before = nn.Linear(6, 4)
            self.bias = nn.Parameter(torch.linspace(-1, 1, 4))
            self.after = nn.Linear(4, 3)
            self.body = body

        def forward(self, x):
            return self.after(self.body(self, self.before(x))).pow(2).mean()

    def make(body):
        torch.manual_seed(1)
        net = Net(body)
        return net, copy.deepcopy(net)

    return make


@pytest.fixture(autouse=True)
def no_callback_error_left():
    """Fail a test that leaves an exception behind which the next one would be named for."""
    yield
    from ortlab.engine.border import take_error

    left = take_error()
    assert left is None, left


@pytest.fixture
def no_fallback(monkeypatch):
    """Let a model that ORT cannot train fail instead of being trained by PyTorch in silence."""
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")


# pytest's importlib mode leaves sys.path alone; some tests here share cases that also run as a script.
sys.path.append(str(Path(__file__).parent))
