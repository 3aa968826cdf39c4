"""The CUDA 11 libraries are found and loaded as the loader sees them; what is wrong with them is said."""

from __future__ import annotations

import json
import shutil

import pytest
from cuda_stubs import DRIVER, build_with_cuda, compiled, python, wheels

from ortlab.engine.devices import LIBRARIES, Found, check_libraries, kernels_for, provider
from ortlab.errors import BuildError

LOAD = """
import ctypes, json, sys
from ortlab.engine import devices
if sys.argv[-1] != "bare":
    print(json.dumps([[one.library.soname, one.path] for one in devices.preload()]))
print(ctypes.CDLL(str(devices.provider())).provider_total())
"""
EXAMINE = """
import dataclasses, json
from ortlab.engine import devices
print(json.dumps([dataclasses.asdict(one) | {"serves": one.serves} for one in devices.examine()]))
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """Return a folder of wheels, one with a CUDA build of onnxruntime, and one with a driver."""
    folder = tmp_path_factory.mktemp("stubs")
    files = wheels(folder / "wheels")
    build_with_cuda(folder / "build", list(files.values()))
    compiled(folder / "driver" / "libcuda.so.1", DRIVER)
    return folder


def examined(*folders, **environ):
    done = python(EXAMINE, *folders, **environ)
    assert done.returncode == 0, done.stderr
    return {one["library"]["soname"]: one for one in json.loads(done.stdout)}


def test_the_provider_finds_the_libraries_once_they_are_loaded(stubs):
    driver = {"LD_LIBRARY_PATH": str(stubs / "driver")}
    bare = python(LOAD.replace("sys.argv[-1]", "'bare'"), stubs / "build", stubs / "wheels", **driver)
    assert bare.returncode != 0
    assert "cannot open shared object file" in bare.stderr

    done = python(LOAD, stubs / "build", stubs / "wheels", **driver)
    assert done.returncode == 0, done.stderr
    loaded, total = done.stdout.splitlines()
    assert json.loads(loaded) == [
        [one.soname, str(stubs / "wheels" / "nvidia" / one.folder / "lib" / one.soname)] for one in LIBRARIES
    ]
    assert int(total) == 11 * len(LIBRARIES)


def test_without_a_driver_nothing_is_loaded(stubs):
    done = python(LOAD, stubs / "build", stubs / "wheels")
    assert done.stdout.splitlines()[0] == "[]"
    assert "cannot open shared object file" in done.stderr


def test_a_build_without_cuda_loads_nothing(stubs):
    package = stubs / "cpu" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    code = "from ortlab.engine import devices; print(devices.provider(), devices.preload())"
    done = python(code, stubs / "cpu", stubs / "wheels", LD_LIBRARY_PATH=str(stubs / "driver"))
    assert done.stdout.strip() == "None ()"


def test_another_major_version_is_not_taken_and_is_named(stubs, tmp_path):
    shutil.copytree(stubs / "wheels", tmp_path / "wheels")
    folder = tmp_path / "wheels" / "nvidia" / "cudnn" / "lib"
    (folder / "libcudnn.so.8").unlink()
    compiled(folder / "libcudnn.so.9", "int libcudnn;")
    found = examined(tmp_path / "wheels")
    assert found["libcublas.so.11"]["serves"]
    assert not found["libcudnn.so.8"]["serves"]
    # A torch with CUDA brings another one, which is named after it.
    assert found["libcudnn.so.8"]["others"][0] == str(folder / "libcudnn.so.9")


def test_a_file_that_is_no_library_is_named_and_the_next_folder_is_tried(stubs, tmp_path):
    shutil.copytree(stubs / "wheels", tmp_path / "wheels")
    broken = tmp_path / "wheels" / "nvidia" / "curand" / "lib" / "libcurand.so.10"
    broken.write_text("half a download", encoding="utf-8")
    one = examined(tmp_path / "wheels")["libcurand.so.10"]
    assert not one["serves"]
    assert str(broken) in one["fault"]
    again = examined(tmp_path / "wheels", stubs / "wheels")["libcurand.so.10"]
    assert again["serves"]
    assert again["path"].startswith(str(stubs))


@pytest.mark.parametrize(("variable", "below"), [("LD_LIBRARY_PATH", ""), ("CUDA_HOME", "lib64")])
def test_a_toolkit_of_the_system_serves_as_well(stubs, tmp_path, variable, below):
    home = tmp_path / "cuda"
    (home / below).mkdir(parents=True)
    for one in LIBRARIES:
        shutil.copy(stubs / "wheels" / "nvidia" / one.folder / "lib" / one.soname, home / below / one.soname)
    found = examined(**{variable: str(home)})
    assert all(one["serves"] for one in found.values())
    assert found["libcudnn.so.8"]["path"].startswith(str(home))


def test_what_is_missing_stops_a_model_on_the_gpu_with_one_command():
    runtime, dnn = LIBRARIES[0], LIBRARIES[-1]
    check_libraries([Found(runtime, "/somewhere/libcudart.so.11.0")])
    lacking = [
        Found(runtime, "/x", fault="/x: file too short"),
        Found(dnn, others=("/y/libcudnn.so.9",)),
        *(Found(one) for one in LIBRARIES[1:3]),
    ]
    with pytest.raises(BuildError, match=r"CUDA runtime \(libcudart.so.11.0\), cuDNN") as caught:
        check_libraries(lacking)
    assert "/x: file too short" in caught.value.why
    assert "There is /y/libcudnn.so.9, of another version." in caught.value.why
    assert caught.value.fix.count("nvidia-cublas-cu11") == 1
    assert "pip install" in caught.value.fix


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        ((5, 2), "none"),
        ((6, 0), "native"),
        ((6, 2), "native"),
        ((7, 5), "native"),
        ((8, 0), "native"),
        ((8, 9), "native"),
        ((9, 0), "ptx"),
        ((12, 0), "ptx"),
    ],
)
def test_kernels_run_on_their_own_major_capability_and_are_compiled_for_newer_ones(capability, kind):
    assert kernels_for(capability) == kind


def test_the_installed_build_says_whether_it_has_a_provider():
    from onnxruntime import get_available_providers

    assert (provider() is not None) == ("CUDAExecutionProvider" in get_available_providers())


def test_a_cuda_compiler_without_a_gpu_is_not_spoken_of(tmp_path):
    """As with torch's CUDA build where there is no GPU: it says so each time that somebody imports ORTModule."""
    pretend = "import torch; torch.cuda._is_compiled = lambda: True; torch.version.cuda = '13.0'; "
    pretend += "torch.cuda.is_available = lambda: False; "
    heard = python(pretend + "import torch.utils.cpp_extension", CUDA_HOME=str(tmp_path))
    assert "No CUDA runtime is found" in heard.stderr
    wrap = "import ortlab; model = torch.nn.Linear(1, 1); ortlab.wrap(model); model(torch.ones(1, 1))"
    done = python(pretend + wrap, CUDA_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
