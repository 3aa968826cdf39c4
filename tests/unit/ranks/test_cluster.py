"""A cell or a function runs on all ranks; where one fails, is interrupted or dies, no rank and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
import warnings

import ipyparallel
import psutil
import pytest

from ortlab.errors import ExecutionError, OptionError
from ortlab.ranks import Cluster, latest
from ortlab.ranks.cluster import RANK_BYTES
from ortlab.ranks.processes import RankDiedError
from ortlab.render import html, text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # On a machine with one core.
    pytest.mark.filterwarnings("ignore:.*ranks share"),
]

PATIENCE_SECONDS = 300
"""No figure, but what a test waits at most on a machine that is busy with other things."""

TOGETHER = """
import torch, torch.distributed as dist
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
total = total.item()
"""

WAITING = """
import torch, torch.distributed as dist, time
if dist.get_rank() == 1:
    {there}
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(scope="module")
def cluster():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = Cluster(2, threads=1).start()
    yield started
    processes = started.processes
    started.stop()
    wait_until(lambda: not any(map(lives, processes)))


@pytest.fixture
def interruptible():
    """Hear SIGINT, also where the tests run in the background of a shell, which ignores it for them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def started_here():
    """Everything that this process has started, by process id."""
    return {one.pid for one in psutil.Process().children(recursive=True)}


def ports(pids):
    """Ports on which these processes listen."""
    found = set()
    for pid in pids:
        process = psutil.Process(pid)
        connections = getattr(process, "net_connections", None) or process.connections
        found |= {one.laddr.port for one in connections("tcp") if one.status == psutil.CONN_LISTEN}
    return found


def check_together(cluster):
    """All ranks stand in one group that works, and have what they had."""
    cluster.run_cell(TOGETHER)
    assert cluster.values("total") == [3.0, 3.0]
    assert cluster.values("kept") == ["kept", "kept"]


def test_each_rank_gives_back_what_it_printed_and_showed(cluster):
    seen = []
    outputs = cluster.run_cell(
        TOGETHER + "import sys\nprint('rank', dist.get_rank())\nprint('oh', file=sys.stderr)\ntotal",
        seen=seen.append,
    )
    assert [one.stdout for one in outputs] == ["rank 0\n", "rank 1\n"]
    assert [one.stderr for one in outputs] == ["oh\n", "oh\n"]
    assert [one.displays[-1]["text/plain"] for one in outputs] == ["3.0", "3.0"]
    assert seen[-1] == outputs
    assert [one.error for one in outputs] == [None, None]


def test_variables_go_there_and_come_back(cluster):
    cluster.push(factor=4)
    cluster.run_cell("import torch.distributed as dist\nproduct = factor * (dist.get_rank() + 1)")
    assert cluster.values("product") == [4, 8]
    outputs = cluster.run_cell("product = 0", on=[1])
    assert [one.rank for one in outputs] == [1]
    assert cluster.values("product") == [4, 0]
    with pytest.raises(OptionError, match="no rank 2"):
        cluster.run_cell("product", on=[2])
    with pytest.raises(ExecutionError, match="NameError"):
        cluster.values("never_set")


def test_the_magics_are_there_and_a_rank_without_a_lab_says_so(cluster):
    outputs = cluster.run_cell("%ort_cluster -h")
    assert all("%ort_cluster stop" in one.stdout for one in outputs)
    with pytest.raises(ExecutionError, match="There is no lab on this rank"):
        cluster.gather()


def test_what_all_ranks_raise_is_said_once_and_the_group_stays(cluster):
    cluster.run_cell("kept = 'kept'\nimport torch.distributed as dist\ngroup = dist.group.WORLD")
    with pytest.raises(ExecutionError, match=r"Rank 0 failed, as did 1 more") as raised:
        cluster.run_cell("undefined")
    assert "NameError: name 'undefined'" in raised.value.why
    assert "process group" not in raised.value.fix
    check_together(cluster)
    assert cluster.values("group is dist.group.WORLD") == [True, True]


def test_a_rank_that_waits_for_one_that_raised_comes_back(cluster):
    before = cluster.processes
    cluster.push(kept="kept")
    seen = []
    with pytest.raises(ExecutionError, match="Rank 1 failed; all ranks") as raised:  # rank 0 only followed
        cluster.run_cell(WAITING.format(there="raise ValueError('one gives up')"), seen=seen.append)
    assert raised.value.why == "ValueError: one gives up"
    assert "put DistributedDataParallel around the model again" in raised.value.fix
    assert "one gives up" in seen[-1][1].error.traceback
    assert cluster.processes == before
    check_together(cluster)


SLOW = """
import time
import torch.distributed as dist
from ortlab.ranks import rank_process
broken = rank_process._break
def late(*request):
    time.sleep(3)
    broken(*request)
if dist.get_rank():
    rank_process._break = late
"""


def test_a_rank_that_hears_late_leaves_the_next_group_alone(cluster):
    cluster.push(kept="kept")
    cluster.run_cell(SLOW)
    try:
        with pytest.raises(ExecutionError, match="Rank 1 failed; all ranks"):
            cluster.run_cell(WAITING.format(there="raise ValueError('one gives up')"))
        check_together(cluster)
        time.sleep(4)
        check_together(cluster)
    finally:
        cluster.run_cell("rank_process._break = broken")


STOPPED = """
import time
import torch.distributed as dist
if dist.get_rank():
    raise ValueError('one gives up')
try:
    time.sleep(3600)
except KeyboardInterrupt:
    raise RuntimeError('zero was stopped') from None
"""


def test_what_a_rank_makes_of_being_stopped_is_no_failure_of_its_own(cluster):
    seen = []
    with pytest.raises(ExecutionError, match="Rank 1 failed; all ranks"):
        cluster.run_cell(STOPPED, seen=seen.append)
    assert seen[-1][0].error.value == "zero was stopped"
    check_together(cluster)


@pytest.mark.parametrize("there", ["time.sleep(3600)", "while True: pass"])
def test_ranks_that_are_interrupted_come_back(cluster, interruptible, there):
    """One rank computes or sleeps, and the other waits for it in C++, where no signal is heard."""
    before = cluster.processes
    cluster.push(kept="kept")
    running = threading.Event()

    def press(outputs):
        if not running.is_set() and any("waits" in one.stdout for one in outputs):
            running.set()
            os.kill(os.getpid(), signal.SIGINT)

    cell = "print('waits', flush=True)\n" + WAITING.format(there=there)
    with pytest.raises(KeyboardInterrupt):
        cluster.run_cell(cell, seen=press)
    assert running.is_set()
    assert cluster.processes == before
    check_together(cluster)


DEAF = """
import signal, time
import torch.distributed as dist
if dist.get_rank():
    hearing = signal.signal(signal.SIGINT, signal.SIG_IGN)
    print('waits', flush=True)
    time.sleep(2)
    signal.signal(signal.SIGINT, hearing)
    time.sleep(3600)
"""


def test_a_rank_that_was_interrupted_before_it_began_is_interrupted_again(cluster, interruptible):
    """Between two cells a rank ignores SIGINT, and on a busy machine one may begin long after the others."""
    cluster.push(kept="kept")
    pressed = threading.Event()

    def press(outputs):
        if not pressed.is_set() and any("waits" in one.stdout for one in outputs):
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        cluster.run_cell(DEAF, seen=press)
    check_together(cluster)


PRESSED_LATE = """
import functools, os, signal
kernel = get_ipython().kernel
hook = kernel.post_handler_hook
kernel.post_handler_hook = functools.partial(os.kill, os.getpid(), signal.SIGINT)
"""


def test_a_rank_that_is_interrupted_when_its_cell_is_over_lives(cluster):
    """That ended the process: ipykernel hears SIGINT until it has handled a message, and nobody above catches it."""
    cluster.run_cell(PRESSED_LATE)
    cluster.run_cell("kernel.post_handler_hook = hook")
    check_together(cluster)


def test_a_cluster_tells_how_it_stands(cluster):
    status = cluster.status()
    assert [one.process for one in status.running] == list(cluster.processes)
    assert all(one.resident_bytes > 1 << 20 for one in status.running)
    assert (status.ranks, status.backend, status.threads, status.died) == (2, "gloo", 1, "")
    for shown in (text.render(cluster), html.render(cluster)):
        assert "Running: 2 ranks over gloo" in shown
        assert str(cluster.processes[1]) in shown
    assert repr(cluster) == "Cluster(2, running)"
    assert latest() is cluster
    assert cluster.start() is cluster


def test_a_rank_that_is_killed_is_named_and_the_others_end():
    before = started_here()
    cluster = Cluster(2, threads=1).start()
    started = started_here() - before
    assert set(cluster.processes) <= started
    assert ports(started)

    def kill(outputs):
        if any("waits" in one.stdout for one in outputs) and lives(victim):
            os.kill(victim, signal.SIGKILL)

    victim = cluster.processes[1]
    cell = "print('waits', flush=True)\n" + WAITING.format(there="time.sleep(3600)")
    with pytest.raises(RankDiedError, match=rf"Rank 1 \(process {victim}\) was killed by signal 9") as raised:
        cluster.run_cell(cell, seen=kill)
    assert "Start the cluster again" in raised.value.fix
    assert not cluster.running
    assert not any(map(lives, started))
    assert started_here() <= before
    with pytest.raises(RankDiedError, match="while it ran"):
        cluster.run(os.getpid)
    for shown in (text.render(cluster), html.render(cluster)):
        assert "was killed by signal 9" in shown
        assert "Not running" in shown


def test_a_rank_that_dies_between_two_calls_is_told_and_the_others_end():
    before = started_here()
    told = []
    cluster = Cluster(2, threads=1, tell=told.append).start()
    started = started_here() - before
    os.kill(cluster.processes[0], signal.SIGKILL)
    wait_until(lambda: told)
    assert "Rank 0" in told[0]
    assert "between two calls" in told[0]
    assert not any(map(lives, started))
    with pytest.raises(RankDiedError, match="between two calls"):
        cluster.run(os.getpid)
    # It can be started again.
    with cluster:
        assert cluster.run(os.getpid) == list(cluster.processes)
        cluster.run_cell("import os")
        with pytest.raises(ExecutionError, match="'os' is a module, not a lab"):
            cluster.gather("os")
    assert started_here() <= before


REFUSING = """
import os, sys
if "ipyparallel.engine" in " ".join(sys.orig_argv):
    print("the licence of this engine has expired", flush=True)
    os._exit(3)
"""


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "ended before they are listed"])
def test_engines_that_do_not_start_are_told_with_the_end_of_their_log(tmp_path, monkeypatch, listed):
    async def start_engines(self, *args, start=ipyparallel.Cluster.start_engines, **kwargs):
        result = await start(self, *args, **kwargs)
        while not listed and any(one.launchers for one in self.engines.values()):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.1)
        return result

    monkeypatch.setattr(ipyparallel.Cluster, "start_engines", start_engines)
    (tmp_path / "sitecustomize.py").write_text(REFUSING, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    before = started_here()
    with pytest.raises(ExecutionError, match="2 processes of the cluster did not start") as raised:
        Cluster(2, threads=1).start()
    assert "ended with status 3 before it was ready" in raised.value.why
    assert "the licence of this engine has expired" in raised.value.why
    assert started_here() <= before


def test_a_port_in_use_and_the_variables_of_another_launcher_do_not_matter(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        for name, value in {**launcher, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5"}.items():
            monkeypatch.setenv(name, value)
        with Cluster(2, threads=1) as cluster:
            cluster.run_cell(TOGETHER)
            assert cluster.values("total") == [3.0, 3.0]
            assert cluster.values("__import__('os').environ['RANK']") == ["0", "1"]


def test_more_ranks_than_the_memory_holds_are_refused_before_any_starts():
    before = started_here()
    many = psutil.virtual_memory().total // RANK_BYTES + 1
    with pytest.raises(OptionError, match=f"{many} ranks do not fit into this machine's memory") as raised:
        Cluster(many).start()
    assert "MiB are free" in raised.value.why
    assert started_here() <= before


def test_more_ranks_than_cores_are_warned_of():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with pytest.warns(UserWarning, match=f"{cores + 1} ranks share {cores} core"):
        Cluster(cores + 1)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"threads": 0}, "0 threads"),
        ({"threads": 1.5}, "1.5 threads"),
        ({"backend": "mpi"}, "no backend 'mpi'"),
        ({"backend": "nccl", "ranks": 4096}, "4096 ranks cannot train over NCCL"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, words):
    with pytest.raises(OptionError, match=words):
        Cluster(**{"ranks": 1, **wrong})
