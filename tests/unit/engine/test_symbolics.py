"""What ortlab mends in the operators of 1.19.2: shown broken as released, and right with ortlab."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fault_cases import LOUD, SILENT, Wrapped, largest_difference
from torch import nn
from torch.nn import functional as F

from ortlab.engine import load, symbolics
from ortlab.errors import BuildError

TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:ONNX Preprocess - Removing mutation from node aten..add_:UserWarning"),
    pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1 can be constant folded:UserWarning"),
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
]


@pytest.fixture(scope="module")
def as_released():
    """What 1.19.2 does by itself, per case: a relative difference, the name of an exception, or "crash"."""
    script = Path(__file__).with_name("fault_cases.py")
    finished = subprocess.run(
        [sys.executable, script],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"},
    )
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('["')]
    return dict(lines)


@pytest.mark.parametrize("name", SILENT)
def test_as_released_the_numbers_are_wrong(name, as_released):
    outcome = as_released[name]
    assert isinstance(outcome, float), outcome
    assert math.isnan(outcome) or outcome > 100 * TOLERANCE


@pytest.mark.parametrize("name", LOUD)
def test_as_released_it_does_not_train(name, as_released):
    assert isinstance(as_released[name], str)


@pytest.mark.parametrize("name", [*SILENT, *LOUD])
def test_with_ortlab_it_agrees_with_pytorch(name):
    assert largest_difference(load(), {**SILENT, **LOUD}[name]) <= TOLERANCE


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(6, 6, 3, groups=2, bias=False),
        nn.Conv1d(6, 12, 3, groups=6, stride=2, dilation=2),
        nn.ConvTranspose1d(6, 4, 3, bias=False, groups=2, stride=2, output_padding=1),
        nn.Conv1d(6, 6, 4, padding="same", groups=3),
        nn.Conv1d(6, 6, 4, padding="valid", groups=3),
        nn.BatchNorm1d(6, affine=False),
        nn.InstanceNorm1d(6, affine=True),
        nn.GroupNorm(3, 6, affine=False),
        nn.AdaptiveAvgPool1d(3),
        nn.AvgPool1d(3, stride=1, padding=1, count_include_pad=False),
        nn.MaxPool1d(3, stride=2, padding=1, ceil_mode=True),
    ],
    ids=str,
)
def test_layers_between_layers_agree_with_pytorch(layer):
    def build():
        return nn.Sequential(nn.Conv1d(6, 6, 1), nn.Tanh(), layer, nn.Flatten()), (torch.randn(3, 6, 14),)

    assert largest_difference(load(), build) <= TOLERANCE


def test_a_kernel_that_is_a_buffer_agrees_with_pytorch():
    from fault_cases import ConstantKernel

    assert largest_difference(load(), lambda: (ConstantKernel(), (torch.randn(2, 6, 9, 9),))) <= TOLERANCE


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_by_torch_agrees_with_pytorch(weighted, reduction):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(8, 5)
            self.register_buffer("weight", torch.rand(5) if weighted else None)
            self.register_buffer("target", torch.tensor([0, 4, -100, 2, 1, 1]))

        def forward(self, x):
            return F.cross_entropy(self.scores(x), self.target, weight=self.weight, reduction=reduction)

    token = symbolics.ATEN_CROSS_ENTROPY.set(True)
    try:
        assert largest_difference(load(), lambda: (Loss(), (torch.randn(6, 8),))) <= TOLERANCE
    finally:
        symbolics.ATEN_CROSS_ENTROPY.reset(token)


REFUSED = {
    "label smoothing": lambda h, _, x: F.cross_entropy(h, x.argmax(-1), label_smoothing=0.1),
    "class probabilities": lambda h, _, x: F.cross_entropy(h, x.softmax(-1)),
    "accumulate=True": lambda h, _, x: x.index_put((torch.tensor([0, 0]),), h[:2], accumulate=True),
    "scatter_reduce": lambda h, _, x: h.scatter_reduce(0, (x > 0).long(), h.exp(), "amax"),
    "adaptive_max_pool1d": lambda h, *_: F.adaptive_max_pool1d(h[None], 2),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_mended_is_refused_by_name(what):
    wrapped = load().ORTModule(Wrapped(REFUSED[what]))
    with pytest.raises(BuildError, match=what) as refusal:
        wrapped(torch.randn(5, 8))
    assert refusal.value.fix


def test_instance_norm_with_statistics_is_refused():
    wrapped = load().ORTModule(nn.InstanceNorm2d(6, track_running_stats=True, affine=True))
    with pytest.raises(BuildError, match="InstanceNorm"):
        wrapped(torch.randn(2, 6, 5, 5))


def test_a_graph_for_inference_stays_plain_onnx():
    ortmodule = load()
    module = nn.Sequential(nn.Conv2d(6, 6, 3, groups=2), nn.BatchNorm2d(6)).eval()
    module[1].running_mean.normal_()
    wrapped, x = ortmodule.ORTModule(module), torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(wrapped(x), module(x))
    exported = wrapped._torch_module._execution_manager(False)._graph_transition_manager._exported_model_info
    assert {node.domain for node in exported.exported_model.graph.node} == {""}


def test_registrations_survive_that_ortmodule_registers_its_own_again():
    ortmodule = load()
    ortmodule.ORTModule(nn.Linear(2, 2))  # registers all symbolics anew
    assert largest_difference(ortmodule, LOUD["softplus"]) <= TOLERANCE
    ortmodule.ORTModule(nn.Linear(2, 2))
    assert largest_difference(ortmodule, LOUD["softplus"]) <= TOLERANCE


def test_installing_twice_changes_nothing():
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    load()
    before = dict(CustomOpSymbolicRegistry._SYMBOLICS)
    symbolics.install()
    assert before == CustomOpSymbolicRegistry._SYMBOLICS
