"""%ort_cluster, %%ort_ranks and %ort_ranks: two ranks, as a notebook uses them, and what the magics refuse."""

from __future__ import annotations

import psutil
import pytest
from IPython.core.error import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*ranks share")  # as many cores there may not be

PRINTING = """%%ort_ranks
import torch.distributed as dist
print("rank", dist.get_rank())
print("no end of line", end="")
"""

MODEL = """%%ort_ranks
import torch, torch.distributed as dist
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
lab = %ort_wrap net
parallel = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
inputs = torch.randn(4, 8)[dist.get_rank()::2]
"""

STEP = """%%ort_ranks
%%ort_step -n 3
loss = parallel(inputs).square().mean()
loss.backward()
optimizer.step()
optimizer.zero_grad()
"""

FAILING = STEP.replace(
    "loss.backward()", "loss.backward()\nif dist.get_rank() == 1: raise ValueError('one gives up')"
)

DYING = STEP.replace(
    "loss.backward()",
    "loss.backward()\nimport os, signal\nif dist.get_rank() == 1: os.kill(os.getpid(), signal.SIGKILL)",
)

WRONG_ORDER = """%%ort_ranks
other = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
%ort_wrap other
"""

WEIGHTS = "[float(one.double().sum()) for one in net.state_dict().values()]"


@pytest.fixture
def cluster(shell):
    """Start two ranks; end them, whatever the test did."""
    started = shell.run("started = %ort_cluster -n 2 --threads 1\nstarted")
    yield started
    started.stop()


def children():
    """Process ids of what this process has started."""
    return {one.pid for one in psutil.Process().children(recursive=True)}


@pytest.mark.slow
@pytest.mark.row("A5")
def test_a_cell_runs_on_each_rank_of_one_cluster(shell, cluster, capsys):
    ended = children()
    assert set(cluster.processes) <= ended
    assert "Running: 2 ranks over gloo, 1 thread each." in shell.formats(cluster)["text/plain"]
    # No other is started beside it.
    assert shell.run("%ort_cluster -n 2 --threads 1") is cluster
    assert "runs already" in capsys.readouterr().out
    assert shell.run("%ort_cluster") is cluster
    with pytest.raises(UsageError, match=r"A cluster of 2 ranks runs already(.|\n)*%ort_cluster stop"):
        shell.run("%ort_cluster -n 3 --threads 1")

    capsys.readouterr()
    shell.run(PRINTING)
    words = [f"[{rank}] {line}" for rank in (0, 1) for line in (f"rank {rank}", "no end of line")]
    assert capsys.readouterr().out.splitlines() == words

    assert shell.run("%ort_cluster stop") is cluster
    assert "Not running" in shell.formats(cluster)["text/plain"]
    assert not ended & children()
    with pytest.raises(UsageError, match="The cluster does not run"):
        shell.run(PRINTING)


@pytest.mark.slow
@pytest.mark.row("A5")
def test_ranks_train_and_are_brought_together(shell, cluster, captured, capsys, tmp_path):
    started = children()
    shell.run(MODEL)
    assert not captured.outputs  # no panel: nobody could click on it
    with pytest.raises(UsageError, match="The order is wrong: ORT is around DistributedDataParallel"):
        shell.run(WRONG_ORDER)

    shell.run(STEP)
    pages = [output.data["text/html"] for output in captured.outputs]
    assert len(pages) == 2
    assert pages[0].startswith("<details open><summary><strong>rank 0</strong>")
    assert pages[1].startswith("<details><summary><strong>rank 1</strong>")
    assert all("Executed by ONNX Runtime" in page for page in pages)

    ranks = shell.run("ranks = %ort_ranks\nranks")
    assert [one.run.executed_by for one in ranks.rows()] == ["ort", "ort"]
    assert all(one.exchange_ms > 0 for one in ranks.rows())
    assert not ranks.cautions()
    trained = cluster.values(WEIGHTS)
    assert trained[0] == trained[1]

    # Rank 1 fails while rank 0 waits for it: both are as before the call, and go on when DDP is renewed.
    capsys.readouterr()
    with pytest.raises(UsageError, match=r"Rank 1 failed(.|\n)*one gives up"):
        shell.run(FAILING)
    assert "ValueError" in capsys.readouterr().err
    assert cluster.values(WEIGHTS) == trained
    assert cluster.values("len(lab.runs)") == [1, 1]
    shell.run("%%ort_ranks\nparallel = nn.parallel.DistributedDataParallel(net)")
    shell.run(STEP)
    assert shell.run("%ort_ranks 1").shown == 1
    again = shell.run("%ort_ranks")
    assert again.shown == 2

    # The same from files.
    shell.user_ns["folder"] = tmp_path
    cluster.push(folder=str(tmp_path))
    shell.run("%%ort_ranks\nfrom ortlab.ranks import save_rank\nsave_rank(lab.runs, folder)")
    opened = shell.run("%ort_ranks --from $folder")
    assert [one.runs for one in opened.ledgers] == [one.runs for one in again.ledgers]

    # Rank 1 dies in the middle of a step, and rank 0 waits for it in the next: it is named, and nothing is left.
    died = cluster.processes[1]
    with pytest.raises(UsageError, match=rf"Rank 1 \(process {died}\) was killed by signal 9 while it ran"):
        shell.run(DYING)
    assert not cluster.running
    assert not started & children()
    with pytest.raises(UsageError, match="the other ranks were ended"):
        shell.run(STEP)
