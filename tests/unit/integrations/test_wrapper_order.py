"""ORT inside what spreads training over processes, not around it (rows A5, A6)."""

from __future__ import annotations

import json
import runpy
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import python
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ortlab
from ortlab.checks.doctor import examine_wrappers
from ortlab.errors import WrapError
from ortlab.runs.wrapping import wrapper_order

pytestmark = [pytest.mark.row("A5"), pytest.mark.row("A6")]


class Net(nn.Module):
    """A model."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4) if inner is None else inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the inner part."""
        return self.inner(x)


@pytest.fixture
def gloo(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def net():
    """A wrapped model."""
    lab = ortlab.wrap(Net())
    yield lab.module
    lab.unwrap()


def deepspeed_engine(module):
    """An engine of DeepSpeed as far as its wrapping goes; DeepSpeed itself needs a compiler and a launcher."""
    kind = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    engine = kind()
    engine.module = module
    return engine


# --- wrong orders ------------------------------------------------------------------------------------------------


def test_ort_around_ddp_is_refused_with_both_orders(gloo, wrap):
    parallel = DistributedDataParallel(Net())
    with pytest.raises(WrapError) as caught:
        ortlab.wrap(parallel)
    assert "ORT(DistributedDataParallel(Net))" in caught.value.what
    assert "ortlab.wrap(model), then DistributedDataParallel(model)" in caught.value.fix
    lab = wrap(parallel.module)  # what the error says does work
    parallel(torch.ones(2, 4)).sum().backward()
    assert lab.status.executed_by == "ort"


def test_ort_around_deepspeed_is_refused():
    with pytest.raises(WrapError, match="ORT is around DeepSpeedEngine"):
        ortlab.wrap(deepspeed_engine(Net()))


def test_ort_around_a_compiled_model_is_refused():
    with pytest.raises(WrapError, match=r"ORT\(torch.compile\(Net\)\)"):
        ortlab.wrap(torch.compile(Net()))


@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile])
def test_a_wrapper_in_the_middle_of_the_model_is_refused(wrapper):
    with pytest.raises(WrapError, match="ORT"):
        ortlab.wrap(Net(wrapper(nn.Linear(4, 4))))


def test_a_part_that_is_compiled_in_place_is_refused():
    part = nn.Linear(4, 4)
    part.compile()
    with pytest.raises(WrapError, match=r"around torch\.compile"):
        ortlab.wrap(Net(part))


def test_a_refused_model_is_left_alone(gloo):
    parallel = DistributedDataParallel(Net())
    before = type(parallel), type(parallel.module)
    with pytest.raises(WrapError):
        ortlab.wrap(parallel)
    assert (type(parallel), type(parallel.module)) == before
    parallel(torch.ones(2, 4)).sum().backward()


# --- what is put around it later -----------------------------------------------------------------------------------


def test_copies_by_data_parallel_never_run_in_pytorch_unsaid(net):
    copy = net._replicate_for_data_parallel()  # what DataParallel does for each GPU
    with pytest.raises(WrapError, match="DataParallel is around a model that ORT is to run"):
        copy(torch.ones(2, 4))


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_sharded_parameters_are_refused(net, gloo):
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(WrapError, match="FullyShardedDataParallel is around"):
        sharded(torch.ones(2, 4))


def test_torch_compile_around_it_leaves_it_to_ort(net):
    x = torch.ones(2, 4)
    compiled = torch.compile(net, backend="eager")
    with warnings.catch_warnings():  # torch 2.4 adds a filter at its first compilation
        torch.testing.assert_close(compiled(x), net.inner(x))
        compiled(x).sum().backward()
    assert ortlab.lab.lab.latest().status.executed_by == "ort"


# --- the linter ----------------------------------------------------------------------------------------------------


def test_the_linter_writes_the_nest(net, gloo):
    parallel = DistributedDataParallel(net)
    order = wrapper_order(torch.compile(parallel))
    assert order.written == "torch.compile(DistributedDataParallel(ORT(Net)))"
    assert order.has_ort
    assert order.fault is None
    assert wrapper_order(deepspeed_engine(net)).written == "DeepSpeedEngine(ORT(Net))"
    assert wrapper_order(nn.DataParallel(net)).fault.what.startswith(
        "DataParallel and ORT do not go together"
    )


def test_the_doctor_judges_the_order(net, gloo):
    good = examine_wrappers(DistributedDataParallel(net))
    assert (good.status, good.found) == ("ok", "DistributedDataParallel(ORT(Net))")
    bare = examine_wrappers(DistributedDataParallel(Net()))
    assert (bare.status, bare.fix) == ("warn", "Wrap it: ortlab.wrap(model).")
    bad = examine_wrappers(nn.DataParallel(net))
    assert bad.status == "fail"
    assert "DistributedDataParallel" in bad.fix


# --- the right order, in several processes ---------------------------------------------------------------------------


SCRIPT = Path(__file__).with_name("ddp_process.py")


def check_parity(result):
    """Hold losses of all batches, and parameters and buffers after all steps, against PyTorch's."""
    assert result["executed by"] == "ort"
    assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-5)
    assert max(result["differences"]) < 1e-5


def test_ort_inside_ddp_trains_as_pytorch_does(gloo):
    for result in runpy.run_path(str(SCRIPT))["found"](rank=0).values():
        check_parity(result)


def test_ort_inside_ddp_trains_in_two_processes(tmp_path):
    group = [
        subprocess.Popen(
            python(SCRIPT, tmp_path / "store", str(rank), "2"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [process.communicate(timeout=300) for process in group]
    assert [process.returncode for process in group] == [0, 0], ends
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in ends)
    for one in (first, second):
        for result in one.values():
            check_parity(result)
    assert first["wrapped first"]["weights"] == second["wrapped first"]["weights"]
    # Each has had data of its own.
    assert first["wrapped first"]["losses"][0] != second["wrapped first"]["losses"][0]
