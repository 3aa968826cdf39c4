"""A device without an execution provider is refused before the export."""

from __future__ import annotations

import pytest
import torch
from cuda_stubs import python, wheels
from torch import nn

import ortlab
from ortlab.engine.providers import check_device
from ortlab.errors import BuildError

CPU_BUILD = ["CPUExecutionProvider"]
CUDA_BUILD = ["CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.mark.parametrize(("device", "available"), [("cpu", CPU_BUILD), ("cpu", CUDA_BUILD)])
def test_devices_with_a_provider_pass(device, available):
    check_device(torch.device(device), available)


def test_a_second_gpu_passes_where_the_libraries_are(tmp_path):
    wheels(tmp_path)
    code = "import torch; from ortlab.engine.providers import check_device as check; "
    done = python(f"{code}check(torch.device('cuda:1'), {CUDA_BUILD}); print('passes')", tmp_path)
    assert done.stdout.strip() == "passes", done.stderr


@pytest.mark.parametrize(
    ("device", "what"),
    [("cuda:0", "no CUDAExecutionProvider"), ("meta", "cannot execute on"), ("mps", "cannot execute on")],
)
def test_devices_without_one_are_refused(device, what):
    with pytest.raises(BuildError, match=what) as caught:
        check_device(torch.device(device), CPU_BUILD)
    assert "model.cpu()" in caught.value.fix


def test_a_lab_refuses_before_it_exports():
    model = nn.Linear(2, 2, device="meta")
    lab = ortlab.wrap(model)
    with pytest.raises(BuildError, match="device 'meta'"):
        model(torch.ones(1, 2, device="meta"))
    lab.unwrap()
