"""The doctor on the GPU: each fault is named, with the command that mends it; a real driver library is asked."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from ortlab.checks.doctor import gpu_checks, gpu_step, provider_check
from ortlab.engine.devices import LIBRARIES
from ortlab.records.checks import Check

_spec = importlib.util.spec_from_file_location(
    "tests_cuda_stubs", Path(__file__).parent / "engine" / "cuda_stubs.py"
)
stubs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stubs)

A100 = {"name": "NVIDIA A100", "capability": [8, 0], "free": 39 * 2**30, "total": 40 * 2**30, "fault": ""}


def library(one, **changes):
    facts = {"library": dataclasses.asdict(one), "path": f"/wheels/{one.soname}", "others": [], "fault": ""}
    facts |= changes
    return facts | {"serves": bool(facts["path"]) and not facts["fault"]}


def findings(**changes):
    """What `devices` finds on a machine where all is well, with changes."""
    well = {
        "driver": [12, 4],
        "driver_fault": "",
        "gpus": [A100],
        "torch_cuda": "12.8",
        "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"],
        "libraries": [library(one) for one in LIBRARIES],
    }
    return json.loads(json.dumps(well | changes))


def checks(environ=None, **changes):
    return {one.name: one for one in gpu_checks(findings(**changes), environ or {})}


def test_a_machine_where_all_is_well():
    found = checks()
    assert {one.status for one in found.values()} == {"ok"}
    assert not any(one.fix for one in found.values())
    assert [*found][:2] == ["NVIDIA driver", "GPU"]
    assert {one.name for one in LIBRARIES} <= set(found)
    assert found["GPU kernels"].found == "NVIDIA A100: native (8.0)"
    assert "CUDA 12.8 and ONNX Runtime 11.8" in found["CUDA versions"].found
    assert "both use CUDA 11" in checks(torch_cuda="11.8")["CUDA versions"].found


def test_a_machine_without_a_gpu_has_one_line():
    found = gpu_checks(findings(driver=None, gpus=[], providers=["CPUExecutionProvider"], libraries=[]), {})
    assert found == [Check("GPU", "ok", "not present: the CPU will be used")]


@pytest.mark.parametrize(
    ("name", "status", "said", "fix", "changes"),
    [
        ("NVIDIA driver", "warn", "none (libcuda.so.1", "nvidia.com/drivers", {"driver": None, "gpus": []}),
        (
            "NVIDIA driver",
            "warn",
            "too old: it runs CUDA up to 10.2",
            "drivers",
            {"driver": [10, 2], "gpus": []},
        ),
        (
            "NVIDIA driver",
            "warn",
            "too old for torch: it runs CUDA up to 12.4, and torch was built for 13.0",
            "torch for CUDA 12",
            {"torch_cuda": "13.0", "gpus": []},
        ),
        (
            "NVIDIA driver",
            "warn",
            "it sees no GPU",
            "drivers",
            {"driver_fault": "it sees no GPU", "gpus": []},
        ),
        ("GPU", "warn", "a torch without CUDA", "pytorch.org", {"torch_cuda": None, "gpus": []}),
        ("GPU", "warn", "torch sees no GPU", "drivers", {"gpus": []}),
        (
            "GPU",
            "warn",
            "NVIDIA A100, which this ONNX Runtime cannot use",
            "pip install 'ortlab[cuda]'",
            {"providers": ["CPUExecutionProvider"], "libraries": []},
        ),
        (
            "GPU memory",
            "warn",
            "100 of 40960 MiB are free",
            "nvidia-smi",
            {"gpus": [A100 | {"free": 100 * 2**20}]},
        ),
        (
            "GPU memory",
            "warn",
            "GPU 1 cannot be asked: CUDA error: out of memory",
            "nvidia-smi",
            {"gpus": [A100, A100 | {"free": None, "fault": "CUDA error: out of memory"}]},
        ),
        (
            "GPU kernels",
            "warn",
            "takes minutes in the first process",
            "export CUDA_CACHE_MAXSIZE=4294967296",
            {"gpus": [A100, A100 | {"name": "NVIDIA H100", "capability": [9, 0]}]},
        ),
        (
            "GPU kernels",
            "fail",
            "compute capability 5.2 is older",
            "model.cpu()",
            {"gpus": [A100 | {"capability": [5, 2]}]},
        ),
        (
            "cuDNN",
            "fail",
            "there is /w/libcudnn.so.9, of another version",
            "nvidia-cudnn-cu11>=8.9,<9",
            {"libraries": [library(LIBRARIES[-1], path="", others=["/w/libcudnn.so.9"])]},
        ),
        (
            "cuBLAS",
            "fail",
            "libcublas.so.11 cannot be loaded: too short",
            "nvidia-cublas-cu11",
            {"libraries": [library(LIBRARIES[2], fault="too short")]},
        ),
        (
            "cuDNN",
            "warn",
            "libcudnn.so.8 is missing",
            "nvidia-cudnn-cu11",
            {"libraries": [library(LIBRARIES[-1], path="")], "gpus": []},
        ),
    ],
)
def test_each_fault_is_named_with_what_mends_it(name, status, said, fix, changes):
    check = checks(**changes)[name]
    assert check.status == status
    assert said in check.found
    assert fix in check.fix


@pytest.mark.parametrize("value", ["", "-1", "7"])
def test_a_hidden_gpu_is_the_variables_doing(value):
    check = checks({"CUDA_VISIBLE_DEVICES": value}, gpus=[])["GPU"]
    assert check.status == "warn"
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in check.found
    assert "unset CUDA_VISIBLE_DEVICES" in check.fix


def test_the_step_on_the_gpu_and_the_bridge_have_a_line_each():
    ok = Check("GPU step", "ok", "agrees")
    assert gpu_step({}, lambda _: ok) == []
    well = gpu_step({"allocator": ""}, lambda _: ok)
    assert [(one.name, one.status) for one in well] == [("GPU step", "ok"), ("Allocator bridge", "ok")]
    apart = gpu_step({"allocator": "torch's pool grew by 0 bytes"}, lambda _: ok)[1]
    assert apart.status == "warn"
    assert "external_gpu_allocator=False" in apart.fix
    assert "neither can reuse what the other has freed" in apart.found
    assert provider_check({"loaded": False, "why": "there is no driver"}) == []
    assert provider_check({"loaded": True, "why": ""})[0].status == "ok"


ASK = "import json; from ortlab.engine.devices import driver; print(json.dumps(vars(driver())))"
PROVIDER = "import json; from ortlab.engine import selftest; print('FOUND' + json.dumps(selftest.provider()))"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    stubs.compiled(folder / "libcuda.so.1", stubs.DRIVER)
    return folder


@pytest.mark.parametrize(
    ("version", "code", "status", "said"),
    [
        ("12040", "0", "ok", "runs CUDA up to 12.4"),
        ("10020", "0", "warn", "too old: it runs CUDA up to 10.2"),
        ("12040", "100", "warn", "it sees no GPU"),
        ("12040", "2", "warn", "no memory left"),
        ("12040", "803", "warn", "different versions"),
        ("12040", "777", "warn", "cuInit returned 777"),
    ],
)
def test_the_library_of_a_driver_is_asked(driver, version, code, status, said):
    done = stubs.python(ASK, LD_LIBRARY_PATH=str(driver), STUB_CUDA=version, STUB_INIT=code)
    assert done.returncode == 0, done.stderr
    asked = json.loads(done.stdout)
    check = checks(driver=asked["cuda"], driver_fault=asked["fault"], gpus=[], torch_cuda=None)[
        "NVIDIA driver"
    ]
    assert check.status == status
    assert said in check.found


def test_a_machine_with_an_old_driver_and_a_hidden_gpu_trains_on_the_cpu_and_says_so(driver):
    code = "import sys; from ortlab.cli import main; sys.exit(main(['doctor', '--json']))"
    here = {"LD_LIBRARY_PATH": str(driver), "CUDA_VISIBLE_DEVICES": ""}
    done = stubs.python(code, **here, STUB_CUDA="10020", STUB_INIT="100")
    assert done.returncode == 0, done.stderr
    report = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert report["NVIDIA driver"]["status"] == "warn"
    assert "too old: it runs CUDA up to 10.2" in report["NVIDIA driver"]["found"]
    assert "nvidia.com/drivers" in report["NVIDIA driver"]["fix"]
    assert report["GPU"]["status"] == "warn"
    assert "CUDA_VISIBLE_DEVICES='' lets no GPU be seen" in report["GPU"]["found"]
    assert report["Training step"]["status"] == "ok"


def test_the_provider_is_loaded_where_it_can_be(driver, tmp_path):
    files = stubs.wheels(tmp_path / "wheels")
    stubs.build_with_cuda(tmp_path / "build", list(files.values()))

    def loaded(*folders, **environ):
        done = stubs.python(PROVIDER, *folders, **environ)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.split("FOUND")[1])

    here = {"LD_LIBRARY_PATH": str(driver)}
    assert loaded(tmp_path / "build", tmp_path / "wheels", **here) == {"loaded": True, "why": ""}
    assert loaded(tmp_path / "build", tmp_path / "wheels")["why"] == "there is no driver"
    assert loaded(tmp_path / "build", **here)["why"] == "libraries are missing"
