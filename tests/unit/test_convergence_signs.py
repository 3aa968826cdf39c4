"""The signs by which a user notices that two engines train differently, and a loss that ONNX Runtime computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortlab
from ortlab.render import text


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x, labels=None):
        logits = self.head(torch.tanh(self.hidden(x)))
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Diverging(Net):
    """Adds up otherwise where ONNX Runtime runs it than where PyTorch does."""

    def forward(self, x, labels=None):
        return super().forward(x if torch._C._get_tracing_state() else x * 1.1, labels)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 8, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def training(model, *, judged_by=None, scaler=None):
    """Return a step that trains, and returns its loss or what `judged_by` says of the model afterwards."""
    optimizer, (x, labels) = torch.optim.SGD(model.parameters(), lr=0.5), batch(5)

    def step():
        loss = model(x, labels)[0]
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss if judged_by is None else judged_by(model)

    return step


def evaluation_loss(model):
    model.eval()
    with torch.no_grad():
        loss = model(*batch(6))[0]
    model.train()
    return loss


def area_under_the_curve(model):
    model.eval()
    x, labels = batch(6)
    with torch.no_grad():
        scores = model(x).diff(dim=1)[:, 0]
    model.train()
    ahead = scores[labels == 1][:, None] - scores[labels == 0][None]
    return ahead.sigmoid().mean()


def parity_of(kind, **how):
    torch.manual_seed(4)
    model = kind()
    lab = ortlab.wrap(model, log_level="ERROR")
    lab.step(training(model, **how), progress=False)
    try:
        return lab.parity(2, seeds=False, progress=False)
    finally:
        lab.unwrap(forget=True)


@pytest.mark.row("I1")
@pytest.mark.parametrize("judged_by", [None, evaluation_loss, area_under_the_curve])
def test_losses_and_measures_of_both_engines_stand_beside_each_other(judged_by):
    found = parity_of(Net, judged_by=judged_by)
    assert found.ok, found.first
    assert all(None not in pair for pair in found.losses)
    assert found.loss_difference < 1e-5


@pytest.mark.row("I1")
@pytest.mark.parametrize("judged_by", [None, evaluation_loss, area_under_the_curve])
def test_a_discrepancy_is_told_in_each_step(judged_by):
    found = parity_of(Diverging, judged_by=judged_by)
    assert found.loss_difference > 1e-4
    assert found.loss_difference == max(abs(a - b) / max(abs(a), abs(b)) for a, b in found.losses)
    page = text.render(found)
    assert "The losses differ by" in page
    assert found.first.module in ("", "hidden")


class ScalerWithMinimum(torch.amp.GradScaler):
    """Raises at its minimum, as DeepSpeed's does."""

    def update(self, new_scale=None):
        super().update(new_scale)
        if self.get_scale() < 1.0:
            raise RuntimeError("Current loss scale already at minimum - cannot decrease scale anymore.")


class Overflowing(Net):
    """Has gradients without end where ONNX Runtime runs it."""

    def forward(self, x, labels=None):
        return super().forward(x * 3e38 if torch._C._get_tracing_state() else x, labels)


@pytest.mark.row("I1")
def test_a_loss_scaler_at_its_minimum_raises_and_the_lab_goes_on_from_before():
    torch.manual_seed(4)
    model = Overflowing()
    scaler = ScalerWithMinimum("cpu", init_scale=4.0, growth_interval=1000)
    lab = ortlab.wrap(model, log_level="ERROR", engine="eager")
    lab.step(training(model, scaler=scaler), progress=False)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="already at minimum"):
        lab.parity(4, seeds=False, progress=False)
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert (lab.engine, len(lab.runs)) == ("eager", 1)
    assert lab.rerun(progress=False).losses == lab.runs.run(1).losses
    lab.unwrap(forget=True)


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


class Smoothed(nn.Module):
    """A loss that ONNX Runtime computes with the model; `share` of it is another where it is traced."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, logits, labels):
        share = self.share if torch._C._get_tracing_state() else 0.1
        return nn.functional.cross_entropy(logits, labels) * (1 - share) + share * logits.square().mean()


def with_loss(share):
    torch.manual_seed(4)
    model = ortlab.with_loss(Logits(), Smoothed(share))
    optimizer, (x, labels) = torch.optim.SGD(model.parameters(), lr=0.5), batch(5)

    def step():
        loss = model(x, labels=labels)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, log_level="ERROR")
    lab.step(step, progress=False)
    return lab


@pytest.mark.row("J6")
def test_a_loss_inside_is_computed_by_onnx_runtime_and_compared_as_a_module():
    lab = with_loss(0.1)
    operators = {node.op_type for node in lab.graph("processed").model.graph.node}
    found = lab.parity(1, seeds=False, progress=False)
    lab.unwrap(forget=True)
    assert operators & {"SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal", "ATen"}
    (loss,) = [p for p in found.pairs if (p.site.module, p.site.kind) == ("ortlab_loss", "output")]
    assert loss.distance is not None, loss.note
    assert found.ok, found.first
    assert loss.reference.mean == found.losses[0][0]


@pytest.mark.row("J6")
def test_a_difference_in_the_loss_is_found_in_the_loss():
    lab = with_loss(0.1002)
    found = lab.parity(1, seeds=False, progress=False)
    lab.unwrap(forget=True)
    assert (found.first.module, found.first.module_class) == ("ortlab_loss", "Smoothed")
    assert found.first.phase == "forward"
