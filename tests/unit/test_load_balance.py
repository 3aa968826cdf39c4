"""The load balancing samplers deal every sample out, in every epoch, evenly; processes of a cluster end with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import ortlab
from ortlab.errors import ExecutionError, OptionError
from ortlab.ranks import Cluster
from ortlab.ranks.balancing import Balance, balance, measured
from ortlab.render import html, text

# Of two ranks, on a machine with one core.
pytestmark = pytest.mark.filterwarnings("ignore:.*ranks share")


def lengths(count=203):
    """Lengths as of sentences: most short, few long."""
    return np.random.default_rng(4).lognormal(3, 0.6, count).astype(int).clip(3, 128).tolist()


@pytest.mark.row("G5")
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [203, 210, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_covers_every_sample(ranks, count, shuffle):
    record = balance(lengths(count), 4, ranks=ranks, epochs=3, shuffle=shuffle)
    for epoch in record.having:
        assert epoch.is_even
        assert not record.missing(epoch)
        seen = epoch.seen()
        assert set(seen) == set(range(count))
        # Only what fills the last step up is repeated.
        assert record.repeated(epoch) < ranks * 5
    assert not record.never_seen


@pytest.mark.row("G5")
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_dropped_is_less_than_a_step_and_comes_another_time(ranks):
    record = balance(lengths(), 4, ranks=ranks, epochs=6, drop_last=True)
    for epoch in record.having:
        assert epoch.is_even
        assert len(record.missing(epoch)) < ranks * 4
        assert record.repeated(epoch) <= ranks
        assert all(len(batch) == 4 for rank in epoch.batches for batch in rank)
    assert not record.never_seen


def uneven(indices):
    """Batches of as many samples as come to two hundred tokens: ranks get different numbers of them."""
    sizes, batches, room = lengths(), [], 0
    for index in indices:
        if not batches or room < sizes[index]:
            batches.append([])
            room = 200
        batches[-1].append(index)
        room -= sizes[index]
    return batches


@pytest.mark.row("G5")
@pytest.mark.parametrize("drop_last", [True, False])
def test_ranks_make_as_many_steps_whatever_makes_the_batches(drop_last):
    record = balance(lengths(), uneven, ranks=3, epochs=3, drop_last=drop_last)
    for epoch in record.having:
        assert epoch.is_even
        if not drop_last:
            assert not record.missing(epoch)
    assert record.batch_size == 0


@pytest.mark.row("G5")
def test_tokens_are_spread_evenly():
    record = balance(lengths(), 8, ranks=4, epochs=2)
    assert record.imbalance(record.without) > 1.2
    assert record.imbalance(record.having) < 1.1
    assert record.waiting(record.having) < record.waiting(record.without) / 2
    table = record.table()
    one = table[(table["balancing"] == "with") & (table["epoch"] == 1)]
    assert one.groupby("step")["rank"].count().eq(4).all()
    assert Balance.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    for shown in (text.render(record), html.render(record)):
        assert "predicted" in shown
    assert len(ortlab.plot(record).axes) == 2


AS_RELEASED = """
import warnings; warnings.simplefilter("ignore")
import onnxruntime.training.utils.data as data
S, B = data.LoadBalancingDistributedSampler, data.LoadBalancingDistributedBatchSampler
sampler = S([3, 5, 2, 7, 4], complexity_fn=int, world_size=2, rank=0)
list(sampler)
try:
    list(sampler)
except ValueError as error:
    print("second epoch:", error)
sampler = S([3, 5, 2, 7, 4, 9, 1, 1], complexity_fn=int, world_size=2, rank=0)
given = iter([[[0], [1], [2]], [[3]]])
batches = B(sampler, batch_fn=lambda indices: next(given), drop_last=True)
print("batches:", len(batches), len(list(batches)))
"""


@pytest.mark.row("G5")
def test_as_released_the_samplers_fail():
    from forked import python  # ranks import this file, and have no tests beside it

    finished = subprocess.run(
        python("-W", "ignore", "-c", AS_RELEASED), check=False, capture_output=True, text=True
    )
    assert "second epoch: The truth value of an array" in finished.stdout, finished.stderr
    assert "batches: 1 4" in finished.stdout


def test_groups_are_sorted_in_every_epoch():
    from ortlab.engine.samplers import samplers

    sampler_class, _ = samplers()
    sizes = [9, 1, 8, 2, 7, 3, 6, 4]
    sampler = sampler_class(sizes, complexity_fn=int, world_size=1, rank=0, group_size=4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = [sizes[index] for index in sampler]
        assert sorted([order[:4], order[4:]]) == [[1, 2, 8, 9], [3, 4, 6, 7]]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dataset": []}, "empty"),
        ({"dataset": iter([1])}, "no length"),
        ({"dataset": [1, 2.5]}, "no whole number"),
        ({"dataset": [1, -2]}, "is -2"),
        ({"dataset": [0, 0]}, "any tokens"),
        ({"ranks": 0}, "ranks is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"batches": None}, "batch size is None"),
        ({"random_level": 2}, "random_level"),
        ({"sorted": True}, "no 'sorted'"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, words):
    arguments = {"dataset": [1, 2, 3], "batches": 1, "ranks": 2, **wrong}
    with pytest.raises(OptionError, match=words):
        balance(**arguments)


def test_a_cluster_of_another_size_is_refused():
    with pytest.raises(OptionError, match="for 3 ranks, and the cluster has 2"):
        measured(balance([1, 2, 3], 1, ranks=3), Cluster(2), make_step)


def make_step(rank):
    import torch

    sizes = torch.arange(1, 14).flip(0)

    def step(batch):
        width = int(sizes[list(batch)].max()) * 60
        return torch.ones(width, width) @ torch.ones(width, width)

    return step


def summed(number):
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank() + number)])
    dist.all_reduce(total)
    return total.item()


def failing():
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank one gives up")
    dist.barrier()  # waits for the other


@pytest.mark.row("G5")
def test_processes_train_together_and_end():
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    with Cluster(2, threads=1) as cluster:
        started = cluster.processes
        assert cluster.run(summed, 5) == [11.0, 11.0]
        record = measured(balance(list(range(13, 0, -1)), 2, ranks=2, epochs=2), cluster, make_step)
        assert all(map(psutil.pid_exists, started))
        with pytest.raises(ExecutionError, match=r"Rank 1 failed.*\n.*rank one gives up"):
            cluster.run(failing)
        # The rank that waited for the other has come back, too, and both train together again.
        assert cluster.processes == started
        assert cluster.run(summed, 5) == [11.0, 11.0]
    with pytest.raises(ExecutionError, match="does not run"):
        cluster.run(summed, 5)
    assert not any(map(psutil.pid_exists, started))
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before
    for epoch in (*record.without, *record.having):
        assert epoch.timing is not None
        assert len(epoch.timing.busy_ms) == len(epoch.timing.waited_ms) == 2
        assert all(len(rank) == epoch.steps for rank in epoch.timing.busy_ms)
        assert min(map(min, epoch.timing.busy_ms)) > 0
    assert record.lost_ms is not None
    assert record.ranks == 2
    assert Balance.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert "measured" in text.render(record)


KILLED = """
import os, sys
from ortlab.ranks import Cluster
cluster = Cluster(1).start()
import psutil
print(*[one.pid for one in psutil.Process().children(recursive=True)], flush=True)
os.kill(os.getpid(), 9)
"""


def test_processes_do_not_outlive_a_kernel_that_is_killed():
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])},
    )
    assert finished.returncode == -9, finished.stderr
    started = [int(word) for word in finished.stdout.split()]
    assert started
    deadline = time.monotonic() + 60
    while alive := [pid for pid in started if _alive(pid)]:
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in alive]
        time.sleep(0.2)


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True, "two"])
def test_a_cluster_of_no_ranks_is_refused(ranks):
    with pytest.raises(OptionError, match="whole number above 0"):
        Cluster(ranks)
