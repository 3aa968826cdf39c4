"""A cluster in a real Jupyter kernel: interrupted while its ranks work or start, restarted, killed; nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager

from ortlab.ranks.guard import NOTEBOOK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PATIENCE_SECONDS = 300
"""No figure, but what a test waits at most on a machine that is busy with other things."""

START = "%load_ext ortlab\ncluster = %ort_cluster -n 2 --threads 1\nprint('ranks:', *cluster.processes)"

WAITING = """%%ort_ranks
import time, torch, torch.distributed as dist
kept = dist.get_rank()
print("waits", flush=True)
if kept == 1:
    time.sleep(3600)
dist.all_reduce(torch.ones(1))
"""

TOGETHER = """%%ort_ranks
total = torch.tensor([float(kept)])
dist.all_reduce(total)
print("total", total.item())
"""


class Kernel:
    """A kernel as JupyterLab starts one, and a client that has no browser."""

    def __init__(self):
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join([root, *filter(None, sys.path)])
        self.manager = KernelManager()
        self.manager.start_kernel(env={**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"})
        self._connect()

    def _connect(self):
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_SECONDS)

    @property
    def process(self):
        return self.manager.provisioner.pid

    def send(self, cell):
        """Let a cell run, and return the id of the request."""
        return self.client.execute(cell)

    def printed(self, request, words=None):
        """Return what a cell prints until these words are in it, or until it has ended."""
        text = ""
        while words is None or words not in text:
            message = self.client.get_iopub_msg(timeout=PATIENCE_SECONDS)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            text += content.get("text", "") + "\n".join(content.get("traceback", ()))
            if words is None and content.get("execution_state") == "idle":
                break
        return text

    def run(self, cell):
        """Run a cell to its end, and return what it printed."""
        return self.printed(self.send(cell))

    def interrupt(self):
        self.manager.interrupt_kernel()

    def restart(self, *, now):
        """Restart it as the button does; `now` kills it at once, which JupyterLab does with one that is busy."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=now)
        self._connect()

    def shut_down(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel():
    started = Kernel()
    yield started
    process = started.process
    started.shut_down()
    wait_until(lambda: not belonging_to(process))


def belonging_to(notebook):
    """List the processes of this machine that a cluster in that process has started, by their environment."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error, KeyError):
            if json.loads(one.environ()[NOTEBOOK])[0] == notebook and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one.pid)
    return found


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ctrl_c_brings_the_ranks_back_and_a_restart_leaves_none(kernel):
    started = kernel.run(START)
    assert "ranks:" in started
    assert len(belonging_to(kernel.process)) >= 3  # the controller, and two ranks

    request = kernel.send(WAITING)
    kernel.printed(request, "[0] waits")
    kernel.interrupt()
    assert kernel.printed(request).endswith("Stopped; the ranks have come back, and keep their variables.")
    # The same processes, with their variables, in a group that works.
    assert kernel.run("print('ranks:', *cluster.processes)") in started
    assert kernel.run(TOGETHER).split("\n")[:2] == ["[0] total 1.0", "[1] total 1.0"]

    before = kernel.process
    kernel.send(WAITING)
    kernel.restart(now=False)
    assert kernel.process != before
    wait_until(lambda: not belonging_to(before))
    # The new kernel starts its own.
    assert "ranks:" in kernel.run(START)


def test_a_cluster_that_is_starting_can_be_interrupted_or_lose_its_kernel(kernel):
    request = kernel.send(START)
    wait_until(lambda: belonging_to(kernel.process))
    kernel.interrupt()
    assert kernel.printed(request).startswith("Stopped %ort_cluster; ")
    wait_until(lambda: not belonging_to(kernel.process))

    kernel.send(START)
    wait_until(lambda: len(belonging_to(kernel.process)) > 1)
    before = kernel.process
    kernel.restart(now=True)
    wait_until(lambda: not belonging_to(before))


ALONE = """
import time
from ortlab.ranks import Cluster
cluster = Cluster(2, threads=1).start()
print("started", flush=True)
time.sleep(3600)
"""


def test_schedulers_end_where_the_notebook_and_their_controller_were_killed_at_once():
    with subprocess.Popen([sys.executable, "-c", ALONE], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout.readline() == "started\n"
        processes = psutil.Process(notebook.pid).children(recursive=True)
        of_controller = [
            one for one in processes if any("ipyparallel.controller" in word for word in one.cmdline())
        ]
        controller = next(one for one in of_controller if one.parent() not in of_controller)
        schedulers = controller.children(recursive=True)
        assert schedulers
        for one in (notebook, controller):
            one.kill()
        _, left = psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)
        for one in left:
            one.kill()
    assert not left
