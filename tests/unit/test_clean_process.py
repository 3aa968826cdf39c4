"""The guard in tests/conftest.py catches what it promises to catch, and a child process that failed is heard."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

BODIES = """
import os
import subprocess
import sys
import warnings


def test_environment(): os.environ["ORTMODULE_LOG_LEVEL"] = "INFO"
def test_warnings(): warnings.simplefilter("always")
def test_clean_environment(monkeypatch): monkeypatch.setenv("X", "1")
def test_child():
    script = "import sys; print('said before'); sys.exit('why it failed')"
    subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
def test_dtype():
    import torch
    torch.set_default_dtype(torch.float64)
def test_deterministic():
    import torch
    torch.use_deterministic_algorithms(True)
def test_grad():
    import torch
    torch.set_grad_enabled(False)
def test_clean_torch():
    import torch
    torch.zeros(1)
def test_folder(tmp_path): os.chdir(tmp_path)
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Run the tests above in a process of their own, and return what pytest says."""
    folder = tmp_path_factory.mktemp("guarded")
    for file in TESTS.glob("*.py"):  # the guard, and what it is loaded with
        shutil.copy(file, folder)
    (folder / "test_one.py").write_text(BODIES, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", folder]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    ).stdout


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("environment", "ORTMODULE_LOG_LEVEL"),
        ("folder", "working directory"),
        ("warnings", "warning filters"),
        ("dtype", "default dtype"),
        ("deterministic", "deterministic"),
        ("grad", "gradient recording"),
    ],
)
def test_what_is_left_behind_is_named(reported, name, named):
    told = reported.partition(f" ERROR at teardown of test_{name} ")[2].partition(" ERROR at teardown")[0]
    assert "the test left the process changed" in told
    assert named in told


def test_clean_tests_pass(reported):
    assert "test_clean" not in reported
    assert "6 errors" in reported.splitlines()[-1]


def test_what_a_failed_child_process_said_is_shown(reported):
    told = reported.partition(" test_child ")[2].partition("\n____")[0]
    assert "standard error of the child process" in told
    assert "why it failed" in told
    assert "said before" in told
