"""A device without an execution provider is refused before the export."""

from __future__ import annotations

import pytest
import torch
from cuda_stubs import python, wheels
from torch import nn

import ortlab
from ortlab.engine.providers import check_device, gpu_faults
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


@pytest.mark.parametrize(
    ("cuda", "gpus", "available", "visible", "said"),
    [
        ("12.8", 1, CUDA_BUILD, None, []),
        ("12.8", 2, CUDA_BUILD, "0,1", []),
        (None, 0, CUDA_BUILD, "0", ["torch 2.13.0 was built without CUDA."]),
        ("12.8", 0, CUDA_BUILD, "", ["PyTorch sees no GPU, with CUDA_VISIBLE_DEVICES=''."]),
        ("12.8", 0, CUDA_BUILD, None, ["PyTorch sees no GPU."]),
        ("12.8", 1, CPU_BUILD, None, ["This ONNX Runtime has no CUDAExecutionProvider"]),
        (None, 0, CPU_BUILD, None, ["torch 2.13.0 was built", "no CUDAExecutionProvider"]),
    ],
)
def test_why_no_gpu_can_be_used(cuda, gpus, available, visible, said):
    faults = gpu_faults("2.13.0", cuda, gpus, available, visible)
    assert len(faults) == len(said)
    assert all(one in fault for one, fault in zip(said, faults, strict=True))


def test_a_lab_refuses_before_it_exports():
    model = nn.Linear(2, 2, device="meta")
    lab = ortlab.wrap(model)
    with pytest.raises(BuildError, match="device 'meta'"):
        model(torch.ones(1, 2, device="meta"))
    lab.unwrap()
