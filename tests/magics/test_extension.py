"""%load_ext, %unload_ext and %reload_ext: what was there before comes back."""

from __future__ import annotations

import subprocess
import sys

import pytest
from IPython.core.error import UsageError

import ortlab


def test_unloading_gives_back_the_users_own_magic(bare_shell):
    def theirs(line):
        return f"theirs: {line}"

    bare_shell.register_magic_function(theirs, "line", "ort_plan")
    bare_shell.run("%load_ext ortlab")
    with pytest.raises(UsageError):
        bare_shell.run("%ort_plan --wrong")
    bare_shell.run("%unload_ext ortlab")
    assert bare_shell.run("%ort_plan x") == "theirs: x"
    with pytest.raises(UsageError, match="not found"):
        bare_shell.run("%ort_wrap net")


def test_loading_twice_is_loading_once(bare_shell):
    def theirs(line):
        return "theirs"

    bare_shell.register_magic_function(theirs, "line", "ort_plan")
    ortlab.load_ipython_extension(bare_shell)
    ortlab.load_ipython_extension(bare_shell)
    ortlab.unload_ipython_extension(bare_shell)
    assert bare_shell.run("%ort_plan") == "theirs"
    ortlab.unload_ipython_extension(bare_shell)
    assert bare_shell.run("%ort_plan") == "theirs"


def test_a_lab_survives_a_reload(net_shell):
    lab = net_shell.user_ns["lab"]
    net_shell.run("%reload_ext ortlab")
    net_shell.run("%ort_set memory_level=1")
    assert lab.options.memory_level == 1


def test_loading_the_extension_loads_neither_torch_nor_onnxruntime():
    code = (
        "import sys\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from traitlets.config import Config\n"
        "shell = InteractiveShell(config=Config({'HistoryManager': {'enabled': False}}))\n"
        "assert shell.run_cell('%load_ext ortlab').success\n"
        "print(sorted({'torch', 'onnxruntime', 'pandas', 'ipywidgets'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
