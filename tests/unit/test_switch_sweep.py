"""Every switch that this machine can act on is switched live, and the model still trains on ORT, as on PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortlab
import ortlab.engine.installation
import ortlab.errors
from ortlab.options.options import Options, switches, unmet

VALUES = {
    "memory_plan": [("FusedMatMul+Add+:1:-1",)],
    "cast_allow": [("Cast",)],
    "skip_check": [()],
    "save_onnx_path": ["."],
    "save_onnx_prefix": ["tokens"],
    "opset": [12, 20],
}
PARENTS = {"fallback_policy": "fallback", "fallback_retry": "fallback", "save_onnx_path": "save_onnx"}
HALF_PRECISION = {"cast_strategy": "INSERT_AND_REDUCE"}


class Tagger(nn.Module):
    """A model with a padding index, ignored labels and a loss of its own, for the sparsity switches to act on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, 50)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(nn.functional.gelu(self.hidden(self.embedding(tokens))))
        return self.loss(logits.view(-1, 50), labels.view(-1))


def values(switch):
    if switch.type is bool:
        return [not switch.default]
    if switch.name in VALUES:
        return VALUES[switch.name]
    return [choice for choice in switch.choices if choice != switch.default]


def cases():
    have = ortlab.engine.installation.have()
    for switch in switches():
        if unmet(switch.name, have):
            continue
        for value in values(switch):
            yield pytest.param(switch.name, value, id=f"{switch.name}={value}")


@pytest.fixture(scope="module")
def trained():
    """Wrap and run a model once; the switches are toggled on the same lab, as a user does it."""
    torch.manual_seed(2)
    model = Tagger()
    tokens = torch.randint(1, 50, (4, 8))
    labels = tokens.clone()
    labels[:, :5] = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, options=Options(), engine="eager")
    expected = lab.step(step, n=3).losses
    lab.set(engine="ort")
    yield lab, expected
    lab.unwrap()


@pytest.mark.parametrize(("name", "value"), list(cases()))
def test_a_live_switch_trains_on_ort(trained, name, value, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    lab, expected = trained
    changes = {name: value} | ({PARENTS[name]: True} if name in PARENTS else {})
    lab.set(**changes)
    try:
        run = lab.rerun()
    finally:
        defaults = Options()
        lab.set(**{changed: getattr(defaults, changed) for changed in changes})
    assert run.executed_by == "ort"
    tolerance = 1e-3 if HALF_PRECISION.get(name) == value else 1e-5
    assert run.losses == pytest.approx(expected, rel=tolerance)
    if name.startswith("save_onnx") and name != "save_onnx_prefix":
        assert len(list(tmp_path.glob("*.onnx"))) == 5


def test_switches_that_cannot_act_are_refused_with_their_reason(trained):
    lab, _ = trained
    refused = [switch for switch in switches() if switch.type is bool and unmet(switch.name, lab.have)]
    assert refused
    for switch in refused:
        if switch.default:
            continue
        with pytest.raises(ortlab.errors.OptionError) as caught:
            lab.set(**{switch.name: True})
        assert switch.name in str(caught.value)
