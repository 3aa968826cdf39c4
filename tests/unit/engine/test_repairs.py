"""Faults of 1.19.2 that are not an operator's: switches, logging, seeds, buffers, failing exports."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ortlab.engine import patching
from ortlab.errors import BuildError

TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore:ONNX Preprocess - Removing mutation from node aten..add_:UserWarning"),
]


class TokenLoss(nn.Module):
    """Embedding and cross entropy, most of whose labels are to be ignored."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Linear(8, 20)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, ids, labels):
        scores = self.head(torch.tanh(self.embedding(ids)))
        return self.criterion(scores.view(-1, 20), labels.view(-1))


def token_batch():
    ids = torch.randint(1, 20, (4, 8))
    return ids, torch.where(torch.rand(4, 8) < 0.3, ids, -100)


def operators(wrapped):
    manager = wrapped._torch_module._execution_manager(True)
    return [node.op_type for node in manager._onnx_models.optimized_model.graph.node]


def raw(script, **environment):
    """Run a script on 1.19.2 as released; return its standard output, or the last line of its error."""
    start = (
        "from fault_cases import unrepaired\nortmodule = unrepaired()\nimport torch\nfrom torch import nn\n"
    )
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + script],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ
        | {
            "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        | environment,
    )
    return finished.stdout if not finished.returncode else finished.stderr.strip().splitlines()[-1]


SWITCHES = {
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": False,
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": True,
    "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": False,
}


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


def test_as_released_the_switches_end_in_a_type_error():
    script = """
from test_repairs import TokenLoss, token_batch
ortmodule.ORTModule(TokenLoss())(*token_batch())
"""
    assert raw(script, ORTMODULE_ENABLE_COMPUTE_OPTIMIZER="0").startswith("TypeError")
    assert raw(script, ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER="0").startswith("TypeError")


def test_a_compute_optimizer_switched_off_after_wrapping_leaves_no_marker(ortmodule):
    wrapped = ortmodule.ORTModule(TokenLoss())
    wrapped._torch_module._execution_manager(True)._runtime_options.enable_compute_optimizer = False
    wrapped(*token_batch())
    assert "PythonOp" not in operators(wrapped)


@pytest.mark.parametrize("level", ["VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"])
def test_sessions_get_the_severity_that_the_level_means(ortmodule, level, capfd):
    wrapped = ortmodule.ORTModule(
        nn.Linear(2, 2), ortmodule.DebugOptions(log_level=ortmodule.LogLevel[level])
    )
    wrapped(torch.randn(1, 2)).sum().backward()
    manager = wrapped._torch_module._execution_manager(True)
    severities = {"VERBOSE": 0, "DEVINFO": 1, "INFO": 2, "WARNING": 2, "ERROR": 3, "FATAL": 4}
    assert manager._get_session_config()[0].log_severity_level == severities[level]


def test_as_released_the_level_fatal_ends_in_an_error():
    script = """
level = ortmodule.DebugOptions(log_level=ortmodule.LogLevel.FATAL)
ortmodule.ORTModule(nn.Linear(2, 2), level)(torch.randn(1, 2))
"""
    assert "Error" in raw(script).partition(":")[0]


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return nn.functional.dropout(x * self.weight, 0.5, training=self.training)


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


def test_as_released_seed_zero_repeats_its_mask():
    script = """
from test_repairs import Dropped
wrapped, x = ortmodule.ORTModule(Dropped()), torch.ones(200)
torch.manual_seed(0)
print("same" if torch.equal(wrapped(x), wrapped(x)) else "different")
"""
    assert raw(script).splitlines()[-1] == "same"


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


def test_models_with_buffers_run_with_the_input_checks_on(ortmodule, monkeypatch):
    monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", "SKIP_CHECK_DISABLED")
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    wrapped = ortmodule.ORTModule(module)
    for _ in range(2):
        wrapped(torch.randn(6, 4)).sum().backward()
    assert module[1].num_batches_tracked == 2


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


def test_an_output_that_is_no_tensor_is_named(ortmodule):
    class Returning(nn.Linear):
        def forward(self, x):
            return super().forward(x), Opaque(x)

    with pytest.raises(BuildError, match="Opaque") as refusal:
        ortmodule.ORTModule(Returning(2, 2))(torch.randn(1, 2))
    assert "use_cache" in refusal.value.fix


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


def test_a_module_that_counts_in_a_buffer_is_refused(ortmodule):
    module = Counting()
    with pytest.raises(BuildError, match="steps"):
        ortmodule.ORTModule(module)(torch.randn(2, 4))
    assert module.steps == 0


def test_a_module_that_caches_in_a_buffer_trains(ortmodule):
    module = Caching()
    reference, x = copy.deepcopy(module), torch.randn(2, 4)
    torch.testing.assert_close(ortmodule.ORTModule(module)(x), reference(x))


def test_batch_normalisation_used_twice_counts_twice(ortmodule):
    norm = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), norm)
    reference, x = copy.deepcopy(module), torch.randn(6, 4)
    wrapped = ortmodule.ORTModule(module)
    for _ in range(2):
        wrapped(x)
        reference(x)
    assert norm.num_batches_tracked == reference[1].num_batches_tracked == 4
    torch.testing.assert_close(norm.running_var, reference[1].running_var, rtol=TOLERANCE, atol=0)


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
