"""A loss inside a model's forward: same model, same checkpoints, one graph (row A7)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle

import pytest
import torch
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

import ortlab
from ortlab.errors import StepError, WrapError

pytestmark = pytest.mark.row("A7")

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 2, 1, -100, 2])


@dataclasses.dataclass
class Outputs:
    """What a model may return."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


@dataclasses.dataclass
class Bare:
    """Outputs without a place for a loss."""

    logits: torch.Tensor


class Net(nn.Module):
    """A classifier that returns its logits in the form that is asked for."""

    def __init__(self, form=lambda logits: logits) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.form = form

    def forward(self, x: torch.Tensor) -> object:
        """Classify."""
        return self.form(self.layer(x))


def summed(outputs, labels, num_items_in_batch=None):
    loss = nn.functional.cross_entropy(outputs, labels, reduction="sum")
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def trained(model, **call):
    """Run a forward and a backward on ORT; return loss and gradient."""
    lab = ortlab.wrap(model)
    loss = model(X, labels=Y, **call)[0]
    loss.backward()
    assert lab.status.executed_by == "ort"
    lab.unwrap()
    return loss.detach(), model.layer.weight.grad


def check_like(model, expected: torch.Tensor, **call):
    expected.backward()
    loss, gradient = trained(model, **call)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    return gradient


def test_any_loss_becomes_part_of_the_graph():
    weight = torch.tensor([0.5, 1.0, 2.0])
    losses = {
        "function": nn.functional.cross_entropy,
        "module": nn.CrossEntropyLoss(),
        "module with tensors": nn.CrossEntropyLoss(weight=weight),
        "partial": functools.partial(nn.functional.cross_entropy, label_smoothing=0.1),
        "object": lambda outputs, labels: LabelSmoother(0.1)((outputs,), labels),
    }
    for loss in losses.values():
        plain, model = Net(), ortlab.with_loss(Net(), loss)
        assert model.state_dict().keys() == plain.state_dict().keys()
        gradient = check_like(model, loss(plain(X), Y))
        torch.testing.assert_close(gradient, plain.layer.weight.grad, rtol=1e-5, atol=1e-7)


def test_the_loss_is_computed_by_onnx_runtime(wrap):
    model = ortlab.with_loss(Net(), nn.CrossEntropyLoss())
    lab = wrap(model)
    loss, logits = model(X, labels=Y)
    graph = lab.graph("exported").model.graph
    assert "labels" in [one.name for one in graph.input]
    sizes = [len(one.type.tensor_type.shape.dim) for one in graph.output]
    assert sizes == [loss.dim(), logits.dim()] == [0, 2]


@pytest.mark.parametrize("on", [True, False])
def test_label_sparsity_finds_the_loss(on, wrap):
    """Rows whose label is ignored are left out of the logits (row D7): 4 of 64 count."""
    model = ortlab.with_loss(Net(), nn.CrossEntropyLoss())
    lab = wrap(model, label_sparse_optimizer=on)
    labels = torch.full((64,), -100)
    labels[:4] = 1
    loss = model(torch.randn(64, 4, generator=torch.Generator().manual_seed(2)), labels=labels)[0]
    loss.backward()
    nodes = {node.op_type for node in lab.graph("gradient").model.graph.node}
    assert ("NonZero" in nodes) == on


def test_the_loss_stands_where_it_is_looked_for():
    loss = nn.functional.cross_entropy(Net()(X), Y).detach()
    forms = {
        "tuple": (lambda logits: (logits, logits * 2), lambda outputs: outputs[0]),
        "dict": (lambda logits: {"logits": logits}, lambda outputs: outputs["loss"]),
        "dataclass": (Outputs, lambda outputs: outputs.loss),
        "tensor": (lambda logits: logits, lambda outputs: outputs[0]),
    }

    def first(outputs, labels):
        if isinstance(outputs, dict):
            outputs = outputs["logits"]
        logits = getattr(outputs, "logits", outputs[0] if isinstance(outputs, tuple) else outputs)
        return nn.functional.cross_entropy(logits, labels)

    for form, look in forms.values():
        model = ortlab.with_loss(Net(form), first)
        lab = ortlab.wrap(model)
        torch.testing.assert_close(look(model(X, labels=Y)).detach(), loss, rtol=1e-5, atol=0)
        lab.unwrap()


def test_the_number_of_items_is_an_input_and_no_constant(wrap):
    model = ortlab.with_loss(Net(), summed)
    lab = wrap(model)
    first = model(X, labels=Y, num_items_in_batch=torch.tensor(4))[0]
    second = model(X, labels=Y, num_items_in_batch=torch.tensor(8))[0]
    torch.testing.assert_close(first, second * 2)
    assert lab.status.reason == "first call in this mode"


def test_a_change_of_the_loss_is_noticed(wrap):
    smoother = LabelSmoother(0.1)
    model = ortlab.with_loss(Net(lambda logits: (logits,)), smoother)
    lab = wrap(model)
    before = model(X, labels=Y)[0].item()
    smoother.epsilon = 0.4
    after = model(X, labels=Y)[0].item()
    expected = smoother((Net()(X),), Y).item()
    assert after == pytest.approx(expected, rel=1e-5)
    assert after != pytest.approx(before, rel=1e-3)
    assert "epsilon" in lab.status.reason


def test_the_model_stays_what_it_was():
    plain, model = Net(), ortlab.with_loss(Net(), summed)
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert list(inspect.signature(model.forward).parameters) == ["x", "labels", "num_items_in_batch"]
    assert list(inspect.signature(ortlab.with_loss(Net(), nn.CrossEntropyLoss()).forward).parameters) == [
        "x",
        "labels",
    ]
    model.eval()
    torch.testing.assert_close(model(X), plain(X))
    assert ortlab.without_loss(model) is model
    assert type(model) is Net
    assert vars(model).keys() == vars(plain).keys()
    assert model._modules.keys() == plain._modules.keys()
    assert ortlab.without_loss(model) is model


def test_copies_and_pickles_keep_the_loss():
    model = ortlab.with_loss(nn.Linear(4, 3), nn.CrossEntropyLoss())
    expected = model(X, labels=Y)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - made on the line
        torch.testing.assert_close(other(X, labels=Y)[0], expected)
    lab = ortlab.wrap(model)
    torch.testing.assert_close(copy.deepcopy(model)(X, labels=Y)[0], expected)
    lab.unwrap()
    torch.testing.assert_close(model(X, labels=Y)[0], expected)


def test_what_cannot_be_a_loss_is_refused(wrap):
    with pytest.raises(WrapError, match="has parameters"):
        ortlab.with_loss(Net(), nn.Linear(3, 1))
    with pytest.raises(WrapError, match="A float is no loss"):
        ortlab.with_loss(Net(), 0.1)
    model = ortlab.with_loss(Net(), summed)
    with pytest.raises(WrapError, match="has a loss already"):
        ortlab.with_loss(model, summed)
    wrap(model)
    for change in (lambda: ortlab.with_loss(model, summed), lambda: ortlab.without_loss(model)):
        with pytest.raises(WrapError, match="wrapped"):
            change()


@pytest.mark.parametrize(
    ("form", "loss", "call", "said"),
    [
        (lambda logits: logits, summed, {}, "has no labels"),
        (lambda logits: logits, lambda *_: 3.0, {"labels": Y}, "returned a float"),
        (Bare, lambda *_: torch.ones(()), {"labels": Y}, "no place in a Bare"),
    ],
)
def test_what_cannot_train_is_said_plainly(form, loss, call, said, wrap):
    model = ortlab.with_loss(Net(form), loss)
    wrap(model)
    with pytest.raises(StepError, match=said):
        model(X, **call)
