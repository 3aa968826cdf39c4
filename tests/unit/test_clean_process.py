"""The guard in tests/conftest.py catches what it promises to catch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run_pytest(folder: Path, body: str) -> subprocess.CompletedProcess:
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_one.py").write_text(body, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", folder],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("import os\ndef test(): os.environ['ORTMODULE_LOG_LEVEL'] = 'INFO'", "ORTMODULE_LOG_LEVEL"),
        ("import os\ndef test(tmp_path): os.chdir(tmp_path)", "working directory"),
        ("import warnings\ndef test(): warnings.simplefilter('always')", "warning filters"),
        ("import torch\ndef test(): torch.set_default_dtype(torch.float64)", "default dtype"),
        ("def test():\n import torch\n torch.use_deterministic_algorithms(True)", "deterministic"),
        ("def test():\n import torch\n torch.set_grad_enabled(False)", "gradient recording"),
    ],
)
def test_what_is_left_behind_is_named(tmp_path, body, named):
    result = run_pytest(tmp_path, body)
    assert result.returncode == 1
    assert "the test left the process changed" in result.stdout
    assert named in result.stdout


def test_a_clean_test_passes(tmp_path):
    body = "import os\ndef test(monkeypatch):\n monkeypatch.setenv('X', '1')\n import torch\n torch.zeros(1)"
    result = run_pytest(tmp_path, body)
    assert result.returncode == 0, result.stdout
