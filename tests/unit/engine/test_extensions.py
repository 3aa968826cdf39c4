"""The stand-ins for ORT's C++ extensions: how they are put in place, and the cache of the compiled runner."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import FrozenInstanceError

import pytest
from forked import python

from ortlab.engine import extensions, libraries
from ortlab.engine.functions import abi as function_abi
from ortlab.errors import BuildError

PACKAGE = "onnxruntime.training.ortmodule.torch_cpp_extensions"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv(libraries.CACHE_VARIABLE, str(folder))
    return folder


def addresses(library):
    runners = function_abi.compiled_runners(library)
    return runners.forward, runners.backward


# ------------------------------------------------------------------------------------------- in ORTModule


def test_installed_modules_are_what_ort_imports(ortmodule):
    import importlib

    for name in ("aten_op_executor", "torch_interop_utils"):
        module = importlib.import_module(f"{PACKAGE}.{name}")
        assert module is sys.modules[f"{PACKAGE}.{name}"]
        assert module is getattr(importlib.import_module(PACKAGE), name)
    assert importlib.import_module(PACKAGE).is_installed("any folder")
    assert ortmodule._FALLBACK_INIT_EXCEPTION is None


def test_install_is_idempotent(ortmodule):
    before = {name: module for name, module in sys.modules.items() if name.startswith(PACKAGE)}
    status = extensions.status()
    extensions.install()
    assert {name: module for name, module in sys.modules.items() if name.startswith(PACKAGE)} == before
    assert extensions.status() == status


def test_another_init_error_is_not_hidden(ortmodule, monkeypatch):
    monkeypatch.setattr(ortmodule, "_FALLBACK_INIT_EXCEPTION", RuntimeError("torch is too old"))
    monkeypatch.setattr(extensions._Installed, "aten", "")
    monkeypatch.setattr(extensions._Installed, "functions", extensions.status().functions)
    extensions.install()
    assert str(ortmodule._FALLBACK_INIT_EXCEPTION) == "torch is too old"


def test_extensions_of_orts_own_stay(ortmodule, monkeypatch):
    # A module that is already imported under the name stands for one that was compiled and fits.
    own = sys.modules[f"{PACKAGE}.aten_op_executor"], sys.modules[f"{PACKAGE}.torch_interop_utils"]
    monkeypatch.setattr(extensions._Installed, "functions", extensions.status().functions)
    monkeypatch.setattr(extensions._Installed, "aten", "")
    extensions.install()
    assert (sys.modules[f"{PACKAGE}.aten_op_executor"], sys.modules[f"{PACKAGE}.torch_interop_utils"]) == own
    assert extensions.status().aten == extensions.status().functions == "ONNX Runtime's own extension"


def test_extension_that_cannot_be_loaded_counts_as_missing(ortmodule, tmp_path, monkeypatch):
    (tmp_path / "broken_extension.so").write_bytes(b"compiled for another torch")
    monkeypatch.setattr(sys.modules[PACKAGE], "__path__", [str(tmp_path)])
    assert not extensions._imports("broken_extension")
    assert not extensions._imports("no_such_extension")


def test_status_is_a_record(ortmodule, cache):
    status = extensions.status()
    assert status.aten == "compiled calls"
    assert status.functions in {"ctypes x86-64 System V", "compiled"}
    assert status.cache == cache
    with pytest.raises(FrozenInstanceError):
        status.aten = "other"


def test_platform_without_ctypes_path_compiles(ortmodule, cache, monkeypatch):
    monkeypatch.setattr(function_abi.platform, "machine", lambda: "aarch64")
    assert not function_abi.system_v_is_spoken()
    assert extensions._choose_runners().path == "compiled"
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    runners = extensions._choose_runners()
    assert runners.path.startswith("unavailable: There is no C++ compiler.")
    assert (runners.forward, runners.backward) == (0, 0)


# --------------------------------------------------------------------------------------------- the cache


def test_build_compiles_once_and_reports(cache):
    stages = []
    library = extensions.build(lambda stage, fraction: stages.append((stage, fraction)))
    assert library.parent == cache
    assert any("Compiling" in stage for stage, _ in stages)
    assert [fraction for _, fraction in stages] == sorted(fraction for _, fraction in stages)
    assert stages[-1][1] == 1.0
    assert all(addresses(library))

    built, stages[:] = library.stat().st_mtime_ns, []
    assert extensions.build(lambda stage, fraction: stages.append((stage, fraction))) == library
    assert library.stat().st_mtime_ns == built
    assert not any("Compiling" in stage for stage, _ in stages)
    # Nothing unfinished is left.
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".lock", ".so", ".so"]


def test_deleted_cache_is_made_again(cache):
    extensions.build()
    shutil.rmtree(cache.parent)
    assert extensions.build().is_file()


def test_another_source_or_compiler_is_another_library(cache, tmp_path, monkeypatch):
    compiler = libraries.find_compiler()
    path = libraries.library_path(compiler)
    changed = tmp_path / "runner.cpp"
    changed.write_text(libraries.FUNCTION_RUNNER.read_text() + "\n// another\n")
    assert libraries.library_path(compiler, changed) != path
    wrapper = tmp_path / "my-c++"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    assert libraries.find_compiler() == str(wrapper)
    assert libraries.library_path(str(wrapper)) != path


BUILD_ON_SIGNAL = """
import sys, time
from pathlib import Path
from ortlab.engine import extensions
from ortlab.engine.functions import abi

folder, number = Path(sys.argv[1]), sys.argv[2]
(folder / f"ready-{number}").touch()
while not (folder / "go").exists():
    time.sleep(0.001)
stages = []
library = extensions.build(lambda stage, fraction: stages.append(stage))
assert abi.compiled_runners(library).forward
print(library, any("Compiling" in stage for stage in stages))
"""


def test_two_processes_build_at_once(cache, tmp_path):
    processes = [
        subprocess.Popen(
            python("-c", BUILD_ON_SIGNAL, tmp_path, str(number)),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for number in range(2)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=120)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][0] == outputs[1][0]
    assert sorted(compiled for _, compiled in outputs) == ["False", "True"]


def test_waits_for_the_lock_of_another(cache):
    from filelock import FileLock

    library = libraries.library_path(libraries.find_compiler())
    cache.mkdir(parents=True)
    lock = FileLock(library.with_suffix(".lock"))
    lock.acquire()
    stages = []

    def report(stage, fraction):
        stages.append(stage)
        if stage == "Waiting for the cache folder":
            # What the other process does before it lets go.
            libraries._compile(libraries.find_compiler(), library)
            lock.release()

    extensions.build(report)
    assert "Compiling runner.cpp" not in stages


@pytest.mark.parametrize("folder", ["file/cache", "/proc/ortlab"])
def test_unwritable_cache_names_folder_and_variable(folder, tmp_path, monkeypatch):
    # Root may write into any folder whatever its mode, but nobody can make one below a file, or in /proc.
    (tmp_path / "file").touch()
    path = tmp_path / folder  # an absolute folder replaces tmp_path
    monkeypatch.setenv(libraries.CACHE_VARIABLE, str(path))
    with pytest.raises(BuildError, match=re.escape(str(path))) as raised:
        extensions.build()
    assert libraries.CACHE_VARIABLE in raised.value.fix


def test_compiler_that_fails_is_quoted(cache, tmp_path, monkeypatch):
    compiler = tmp_path / "broken-c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no space left" >&2\nexit 4\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(BuildError, match="no space left") as raised:
        extensions.build()
    assert "CXX" in raised.value.fix
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_windows_is_refused(monkeypatch):
    monkeypatch.setattr(libraries.sys, "platform", "win32")
    with pytest.raises(BuildError, match="Windows"):
        libraries.find_compiler()


def test_library_needs_no_python_to_be_loaded(cache):
    # Only two addresses and a setter: whatever this process's Python is, the next one can use the same file.
    loaded = ctypes.CDLL(str(extensions.build()))
    assert loaded.ortlab_forward_runner
    assert not hasattr(loaded, "PyInit_runner")
