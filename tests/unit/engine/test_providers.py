"""A device without an execution provider is refused before the export."""

from __future__ import annotations

import re

import pytest
import torch
from cuda_stubs import python, wheels
from torch import nn

from ortlab.engine import repairs
from ortlab.engine.devices import check_device, device_made_current, gpu_faults
from ortlab.engine.schema import surroundings
from ortlab.errors import BuildError

CPU_BUILD = ["CPUExecutionProvider"]
CUDA_BUILD = ["CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.mark.parametrize(("device", "available"), [("cpu", CPU_BUILD), ("cpu", CUDA_BUILD)])
def test_devices_with_a_provider_pass(device, available):
    check_device(torch.device(device), available)


def test_a_second_gpu_passes_where_the_libraries_are(tmp_path):
    wheels(tmp_path)
    code = "import torch; from ortlab.engine.devices import check_device as check; "
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


def test_another_major_version_of_a_library_is_refused_with_the_command(tmp_path):
    wheels(tmp_path)
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    (folder / "libcudnn.so.8").rename(folder / "libcudnn.so.9")
    # A torch with CUDA would load them, were they on the path when it is imported.
    code = f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r}); from ortlab.engine.devices import check_device; "
    done = python(f"{code}check_device(torch.device('cuda:0'), {CUDA_BUILD})")
    assert (
        "BuildError: Libraries that ONNX Runtime needs on a GPU are missing: cuDNN (libcudnn.so.8)."
        in done.stderr
    )
    assert re.search(rf"There is .*{folder / 'libcudnn.so.9'}.*, of another version\.", done.stderr)
    assert "pip install 'nvidia-cudnn-cu11>=8.9,<9'" in done.stderr


def test_a_session_of_a_model_on_the_second_gpu_is_asked_for_there(wrap):
    """Up to the call of the device: what ORTModule would create the session with, and which GPU is current then."""
    model = nn.Linear(2, 2)
    lab = wrap(model)
    model(torch.ones(1, 2)).sum().backward()
    manager = lab._bench.engine.execution._manager
    assert manager._get_session_config()[1:] == (["CPUExecutionProvider"], [{}])
    manager._graph_transition_manager._device = torch.device("cuda", 1)
    manager._runtime_options.use_external_gpu_allocator = False  # its addresses are read where torch has CUDA
    _, providers, (options, _) = manager._get_session_config()
    assert providers == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert options["device_id"] == "1"
    assert options["use_tf32"] == "0"

    current = device_made_current(torch.device("cuda", 1))
    assert isinstance(current, torch.cuda.device)
    assert current.idx == 1
    with device_made_current(torch.device("cpu")):
        pass  # there is no device to make current


def test_matrices_are_multiplied_in_the_precision_that_pytorch_has_on_a_gpu():
    """By default PyTorch multiplies in float32 and ONNX Runtime's provider in TF32."""
    shown = {"sessions": [], "builds": []}
    config = repairs._multiply_as_torch(lambda _manager: (None, CUDA_BUILD, [{}, {}]))
    for precision in ("highest", "high", "highest"):
        torch.set_float32_matmul_precision(precision)
        shown["sessions"].append(config(None)[2][0]["use_tf32"])
        shown["builds"].append(dict(surroundings("cuda"))["matrix products"])
    assert shown == {"sessions": ["0", "1", "0"], "builds": ["float32", "TF32", "float32"]}
    assert dict(surroundings("cpu"))["matrix products"] == "float32"


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


def test_a_lab_refuses_before_it_exports(wrap):
    model = nn.Linear(2, 2, device="meta")
    wrap(model)
    with pytest.raises(BuildError, match="device 'meta'"):
        model(torch.ones(1, 2, device="meta"))
