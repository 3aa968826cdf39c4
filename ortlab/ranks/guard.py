"""The guard of each process that a cluster starts: where the notebook's process is gone, it ends its own.

A kernel that is killed, or restarted while it is busy, ends nothing. ipyparallel's processes would stay then, also in
the seconds before they have found each other. So each looks after the notebook from its first second on.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

NOTEBOOK: Final = "ORTLAB_CLUSTER_OF"
"""Variable that tells a process whose it is: process id of the notebook, and the cluster's folder."""

_POLL_SECONDS: Final = 0.2


def command(module: str) -> list[str]:
    """Return the command that runs a module beside a guard."""
    return [sys.executable, "-m", "ortlab.ranks.guard", module]


def variables(folder: Path) -> dict[str, str]:
    """Return the environment variables by which processes know that they belong to this one."""
    # The cluster's folder is removed with its processes.
    return {NOTEBOOK: json.dumps([os.getpid(), str(folder)])}


def watch() -> None:
    """Start the guard of this process, and of those that it will fork."""
    process, folder = json.loads(os.environ[NOTEBOOK])

    def start() -> None:
        threading.Thread(target=_guard, args=(process, folder), daemon=True, name="ortlab-guard").start()

    os.register_at_fork(after_in_child=start)  # ipyparallel's schedulers: threads are not forked
    start()


def _guard(process: int, folder: str) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        notebook = psutil.Process(process)
        # Not another process that has got the same id.
        while notebook.is_running() and notebook.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_POLL_SECONDS)
    own: list[Any] = psutil.Process().children(recursive=True)  # schedulers, loaders of data
    for one in own:
        with contextlib.suppress(psutil.Error):
            one.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)  # what waits in C++ hears nothing else


if __name__ == "__main__":
    watch()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
