"""What 1.19.2 gets wrong in its switches and checks, as released; and that ortlab gets it right, as a user meets it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import python
from switch_faults import AnyDtype, Dropped, TokenLoss, encoder, token_batch
from torch import nn

import ortlab

TOLERANCE = 1e-5

AS_RELEASED = {
    "T2": "TypeError: 'NoneType' object is not iterable",
    "T3": "TypeError: 'NoneType' object is not iterable",
    "T4": "left out",
    "T5": "left out",
    "T6": "1 PythonOp, printed in 3 of 3 steps",
    "T8": "Fail to parse from json file",
    "T9": "Invalid session log severity level",
    "T10": "3",
    "T11": "dropout is active",
    "T13": "same",
    "T16": "unresolved",
    "T17": "Tensor type mismatch",
    "T18": "AssertionError: ",
}


@pytest.fixture(scope="module")
def outcomes():
    """Try every fault in 1.19.2 as it is, in a fresh process, and return what happened by row."""
    script = Path(__file__).with_name("switch_faults.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ORTMODULE_")}
    finished = subprocess.run(
        python("-W", "ignore", script),
        check=True,
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    return dict(json.loads(line) for line in finished.stdout.splitlines() if line.startswith('["T'))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.row(name)) for name in AS_RELEASED])
def test_as_released_it_goes_wrong(outcomes, name):
    assert AS_RELEASED[name] in str(outcomes[name])


@pytest.mark.row("T12")
def test_as_released_a_standard_deviation_of_one_is_given_as_thousands(outcomes):
    assert float(outcomes["T12"]) > 1000


@pytest.fixture
def tokens():
    """Return a model whose labels are mostly to be ignored, a batch, and the losses of two steps in PyTorch."""
    torch.manual_seed(2)
    model, batch = TokenLoss(), token_batch()
    reference = copy.deepcopy(model)
    losses = []
    for _ in range(2):
        loss = reference(*batch)
        loss.backward()
        losses.append(loss.item())
    gradients = [parameter.grad for parameter in reference.parameters()]
    return model, batch, losses, gradients


def check_trained(run, model, losses, gradients):
    """Compare a run of two steps with PyTorch's losses and summed gradients."""
    assert run.executed_by == "ort"
    assert run.losses == pytest.approx(losses, rel=TOLERANCE)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=TOLERANCE, atol=1e-7)


def operators(lab, stage="optimized"):
    return [node.op_type for node in lab.graph(stage).model.graph.node]


@pytest.mark.parametrize(
    ("changes", "rows_are_left_out"),
    [
        pytest.param({"compute_optimizer": False}, False, marks=pytest.mark.row("T2", "D1")),
        pytest.param({"label_sparse_optimizer": False}, False, marks=pytest.mark.row("T4", "D7", "J7")),
        pytest.param({}, True, marks=pytest.mark.row("D7")),
    ],
    ids=repr,
)
def test_a_sparsity_switch_acts_and_trains_as_pytorch(tokens, changes, rows_are_left_out, wrap):
    model, batch, losses, gradients = tokens
    lab = wrap(model, **changes)
    run = lab.step(lambda: model(*batch).backward(), n=2)
    used = operators(lab)
    check_trained(run, model, losses, gradients)
    assert "PythonOp" not in used
    assert ("ShrunkenGather" in used) == rows_are_left_out


@pytest.mark.parametrize(
    ("variable", "rows_are_left_out", "note"),
    [
        pytest.param(
            "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER",
            False,
            "sets compute_optimizer=False",
            marks=pytest.mark.row("T2"),
        ),
        pytest.param(
            "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER",
            True,
            "sets embedding_sparse_optimizer=False",
            marks=pytest.mark.row("T3", "D6"),
        ),
        pytest.param(
            "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER",
            False,
            "sets label_sparse_optimizer=False",
            marks=pytest.mark.row("T4"),
        ),
        pytest.param(
            "ORTMODULE_ENABLE_SPARSE_OPTIMIZER",
            False,
            "no longer read by ORTModule 1.19.2; taken as label_sparse_optimizer=False",
            marks=pytest.mark.row("T5", "D5"),
        ),
    ],
)
def test_a_variable_for_sparsity_acts_and_is_mentioned(
    tokens, monkeypatch, variable, rows_are_left_out, note
):
    model, batch, losses, gradients = tokens
    monkeypatch.setenv(variable, "0")
    lab = ortlab.wrap(model)
    run = lab.step(lambda: model(*batch).backward(), n=2)
    used = operators(lab)
    lab.unwrap()
    check_trained(run, model, losses, gradients)
    assert ("ShrunkenGather" in used) == rows_are_left_out
    assert any(variable in said and note in said for said in lab.notes)
    assert os.environ[variable] == "0"


@pytest.mark.row("T6", "D1")
def test_the_compute_optimizer_switched_off_live_leaves_no_mark_and_prints_nothing(tokens, capfd):
    model, batch, losses, gradients = tokens
    lab = ortlab.wrap(model)
    lab.step(lambda: model(*batch).backward(), n=2)
    assert "ShrunkenGather" in operators(lab)
    capfd.readouterr()
    run = lab.set(compute_optimizer=False).rerun(progress=False)
    used = operators(lab)
    lab.unwrap()
    check_trained(run, model, losses, gradients)
    assert not {"PythonOp", "ShrunkenGather"} & set(used)
    assert "density" not in capfd.readouterr().out


@pytest.mark.row("T8", "F12", "F13")
@pytest.mark.parametrize("given", ["set", "variable", "file"])
def test_plans_are_taken_as_text_from_everywhere(monkeypatch, tmp_path, given, wrap):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
    reference, x, plan = copy.deepcopy(model), torch.randn(5, 4), "Gelu+:1:-1"
    reference(x).sum().backward()
    if given != "set":
        file = tmp_path / "plans.json"
        file.write_text(json.dumps([plan]), encoding="utf-8")
        monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", plan if given == "variable" else str(file))
    lab = wrap(model, **({"memory_plan": plan} if given == "set" else {}))
    lab.step(lambda: model(x).sum().backward())
    computed = operators(lab, "execution").count("Gelu")
    enabled = [row.config for row in lab.plan().rows if row.enabled]
    assert lab.options.memory_plan == (plan,)
    assert computed == 2  # in forward, and again in backward
    assert enabled == [plan]
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=TOLERANCE, atol=1e-7)


@pytest.mark.row("T9", "B1", "B2")
def test_the_level_fatal_trains(tokens, wrap):
    model, batch, losses, gradients = tokens
    lab = wrap(model, log_level="FATAL")
    run = lab.step(lambda: model(*batch).backward(), n=2)
    check_trained(run, model, losses, gradients)


@pytest.mark.row("T13")
def test_seed_zero_gives_a_run_two_masks_and_repeats_them(wrap):
    model, x = Dropped(), torch.ones(200)
    lab = wrap(model)
    torch.manual_seed(0)
    outputs = []

    def step():
        output = model(x)
        outputs.append(output.detach().clone())
        output.sum().backward()

    lab.step(step, n=2)
    lab.rerun()
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


@pytest.mark.row("T11", "C6")
def test_evaluation_after_training_has_no_dropout(wrap):
    model, x = Dropped(), torch.ones(200)
    wrap(model)
    assert (model(x) == 0).any()
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), x)


@pytest.mark.row("T16")
def test_every_saving_behind_ignored_labels_has_a_value(tokens, wrap):
    model, batch, *_ = tokens
    lab = wrap(model)
    model(*batch).backward()
    rows = [row for row in lab.plan().rows if "valid_indices_count" in row.saving_symbolic]
    assert [row.saving_bytes for row in rows] == [8 * 16 * 4]  # a quarter of 4 x 8 labels, 16 float32 each


@pytest.mark.row("T17")
def test_another_dtype_or_rank_rebuilds_and_says_so(wrap):
    torch.manual_seed(2)
    model, reference = (module := AnyDtype()), copy.deepcopy(module)
    lab = wrap(model)
    for x in (
        torch.ones(3, 4),
        torch.ones(3, 4, dtype=torch.float64),
        torch.ones(2, 3, 4),
        torch.ones(3, 4).int(),
    ):
        torch.testing.assert_close(model(x), reference(x))
    assert "changed" in lab.status.reason


@pytest.mark.row("T18")
def test_the_encoder_of_pytorch_trains(wrap):
    torch.manual_seed(2)
    model, x = encoder(), torch.randn(2, 5, 8)
    reference = copy.deepcopy(model)
    expected = reference(x)
    expected.sum().backward()
    lab = wrap(model)
    run = lab.step(lambda: model(x).sum().backward())
    assert run.executed_by == "ort"
    for left, right in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-5)
