"""Faults of 1.19.2 that are not an operator's: switches, logging, seeds, buffers, failing exports."""

from __future__ import annotations

import contextlib
import copy
import io
import subprocess
import sys

import pytest
import torch
from switch_faults import Dropped, TokenLoss, operators, token_batch
from torch import nn

from ortlab.engine import patching
from ortlab.ortmodule import ORTModule

TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore:ONNX Preprocess - Removing mutation from node aten..add_:UserWarning"),
]


SWITCHES = {
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": False,
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": True,
    "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": False,
}


@pytest.mark.row("T2", "T3", "T4")
@pytest.mark.parametrize(("switch", "label_is_used"), SWITCHES.items())
def test_sparsity_switches_do_what_they_say(ortmodule, switch, label_is_used, monkeypatch):
    monkeypatch.setenv(switch, "0")
    torch.manual_seed(2)
    module = TokenLoss()
    reference, batch = copy.deepcopy(module), token_batch()
    wrapped = ortmodule.ORTModule(module, ortmodule.DebugOptions(log_level=ortmodule.LogLevel.ERROR))
    expected, actual = reference(*batch), wrapped(*batch)
    expected.backward()
    actual.backward()
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=0)
    for left, right in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=TOLERANCE, atol=1e-7)
    used = operators(wrapped)
    assert "PythonOp" not in used  # the marker that only the optimizer would take out again
    assert ("ShrunkenGather" in used) == label_is_used


@pytest.mark.row("T6")
def test_a_compute_optimizer_switched_off_after_wrapping_leaves_no_marker(ortmodule):
    wrapped = ortmodule.ORTModule(TokenLoss())
    wrapped._torch_module._execution_manager(True)._runtime_options.enable_compute_optimizer = False
    wrapped(*token_batch())
    assert "PythonOp" not in operators(wrapped)


@pytest.mark.row("T9", "T10", "B2")
@pytest.mark.parametrize("level", ["VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"])
def test_sessions_get_the_severity_that_the_level_means(ortmodule, level, capfd):
    wrapped = ortmodule.ORTModule(
        nn.Linear(2, 2), ortmodule.DebugOptions(log_level=ortmodule.LogLevel[level])
    )
    wrapped(torch.randn(1, 2)).sum().backward()
    manager = wrapped._torch_module._execution_manager(True)
    severities = {"VERBOSE": 0, "DEVINFO": 1, "INFO": 2, "WARNING": 2, "ERROR": 3, "FATAL": 4}
    assert manager._get_session_config()[0].log_severity_level == severities[level]


@pytest.mark.row("T13")
def test_seed_zero_gives_the_first_two_steps_different_masks(ortmodule):
    wrapped, x = ortmodule.ORTModule(Dropped()), torch.ones(200)
    masks = {}
    for seed in (0, 0, 1, 2**31 - 1):
        torch.manual_seed(seed)
        first, second = wrapped(x).detach(), wrapped(x).detach()
        assert not torch.equal(first, second)
        masks.setdefault(seed, []).append(first)
    assert torch.equal(*masks[0])
    assert not torch.equal(masks[0][0], masks[1][0])


class Failing(nn.Module):
    """Draws a random number, then fails, on the run that is traced."""

    def __init__(self):
        super().__init__()
        self.loss = TokenLoss()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids, labels):
        self.norm(torch.randn(4, 8))
        if torch.jit.is_tracing():
            raise RuntimeError("not while tracing")
        return self.loss(ids, labels)


def test_a_failed_export_leaves_no_traces(ortmodule):
    module = Failing()
    hooks = [len(part._forward_pre_hooks) for part in module.modules()]
    buffers = [buffer.clone() for buffer in module.buffers()]
    batch = token_batch()
    wrapped = ortmodule.ORTModule(module)
    state = torch.get_rng_state()
    with pytest.raises(Exception, match="not while tracing"):
        wrapped(*batch)
    assert [len(part._forward_pre_hooks) for part in module.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state)
    for buffer, before in zip(module.buffers(), buffers, strict=True):
        torch.testing.assert_close(buffer, before, rtol=0, atol=0)


def test_an_export_runs_where_standard_output_has_no_descriptor(ortmodule):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        wrapped = ortmodule.ORTModule(nn.Linear(2, 2))
        assert wrapped(torch.randn(1, 2)).shape == (1, 2)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.linear(x)


class Caching(nn.Module):
    """Fills a buffer from the shape of its input: the same again for the same input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ramp", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.ramp.shape != x.shape[-1:]:
            self.ramp = torch.arange(x.shape[-1], dtype=x.dtype)
        return self.linear(x) * self.ramp


def test_a_module_that_counts_in_a_buffer_counts_its_steps():
    module = Counting()
    wrapped = ORTModule(module)
    for _ in range(3):
        wrapped(torch.randn(2, 4))
    assert module.steps == 3


def test_a_module_that_caches_in_a_buffer_trains(ortmodule):
    module = Caching()
    reference, x = copy.deepcopy(module), torch.randn(2, 4)
    torch.testing.assert_close(ortmodule.ORTModule(module)(x), reference(x))


def test_batch_normalisation_used_twice_counts_twice():
    norm = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), norm)
    reference, x = copy.deepcopy(module), torch.randn(6, 4)
    wrapped = ORTModule(module)
    for _ in range(2):
        wrapped(x)
        reference(x)
    assert norm.num_batches_tracked == reference[1].num_batches_tracked == 4
    torch.testing.assert_close(norm.running_var, reference[1].running_var, rtol=TOLERANCE, atol=0)


COLLECTED = """
import gc, torch, ortlab
class Circle(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.itself = [self]
frozen, collect = [], gc.collect
def counted(*arguments):
    frozen.append(gc.get_freeze_count())
    return collect(*arguments)
gc.collect = counted
model = Circle()
lab = ortlab.wrap(model)
before = gc.get_freeze_count(), len(gc.get_objects())
model(torch.ones(1, 1)).sum().backward()
assert max(frozen) > 0.5 * before[1], (frozen, before)
assert gc.get_freeze_count() in (0, before[0])
assert sum(isinstance(one, Circle) for one in gc.get_objects()) == 1
frozen.clear()
lab.step(lambda: model(torch.ones(1, 1)).sum().backward(), memory=False, progress=False)
lab.memory(n=2)
assert sum(one > 0.5 * before[1] for one in frozen) >= 4, frozen  # steps that warm up, and those that are measured
assert gc.get_freeze_count() in (0, before[0])
from ortlab.engine.patching import only_new_garbage
with only_new_garbage(), only_new_garbage():
    assert gc.get_freeze_count() > before[0] + 1000
assert gc.get_freeze_count() in (0, before[0])
gc.freeze()
kept = gc.get_freeze_count()
with only_new_garbage():
    pass
assert gc.get_freeze_count() == kept  # whoever has frozen objects keeps them
"""


def test_an_export_and_a_measured_step_look_for_garbage_among_their_own_objects_only():
    """The copy of the model that the export has made is freed; what was there before is not looked at."""
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", COLLECTED], check=True)


def test_nothing_is_replaced_twice(ortmodule):
    from ortlab.engine import repairs

    before = set(patching._done)
    repairs.install_all()
    assert patching._done == before


def test_loading_from_many_threads_gives_one_module():
    from concurrent.futures import ThreadPoolExecutor

    from ortlab.engine import load

    with ThreadPoolExecutor(4) as pool:
        assert len({id(module) for module in pool.map(lambda _: load(), range(8))}) == 1
