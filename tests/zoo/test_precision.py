"""Automatic mixed precision and short or long floats on the CPU: against PyTorch in the same precision, and exactly."""

from __future__ import annotations

import copy

import pytest
import small_transformers
import torch
from torch import nn

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
    pytest.mark.filterwarnings("ignore:ONNX Preprocess - Removing mutation from node aten..add_:UserWarning"),
    pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size other than 1:UserWarning"),
    # PyTorch's kernels stand in for most of the graph here, and ortlab says which.
    pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning"),
]

SHORT = (torch.bfloat16, torch.float16)
NOT_WORSE = 1.5
"""Sums that are formed in another order round in another way: the error may be this much larger than PyTorch's."""


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(72, 4)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.head(self.features(x).flatten(1)), labels)}


def cnn():
    return Classifier(), {"x": torch.randn(4, 3, 8, 8), "labels": torch.arange(4)}


def text():
    ids = torch.randint(5, 100, (2, 8))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def bert():
    return small_transformers.bert(layers=1, heads=4, words=100), text()


def llama():
    more = {"num_key_value_heads": 2, "pad_token_id": 0, "loss_type": "ForCausalLM"}
    return small_transformers.llama(layers=1, heads=4, words=100, **more), text()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def train(model, batch, autocast=None):
    """Return the loss and the gradients, in float64."""
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        loss = model(**batch)["loss"]
    loss.backward()
    found = {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}
    return loss.item(), found


def error(expected, actual):
    """Return the length of the difference of all gradients, relative to their length."""
    difference = sum((one - actual[name]).pow(2).sum() for name, one in expected.items())
    return (difference / sum(one.pow(2).sum() for one in expected.values())).sqrt().item()


def as_dtype(batch, dtype):
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in batch.items()}


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("make", [bert, llama, cnn])
def test_autocast_rounds_as_much_as_pytorchs(make, dtype, wrap, record_property):
    model, batch = make()
    full, mixed = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    lab = wrap(model.train())
    exact_loss, exact = train(full, batch)
    expected_loss, expected = train(mixed, batch, dtype)
    loss, found = train(model, batch, dtype)
    assert lab.status.executed_by == "ort"
    figures = error(exact, expected), error(exact, found), error(expected, found)
    record_property(
        "gradients: PyTorch from float32, ONNX Runtime from float32, each from the other", figures
    )
    print("from float32: PyTorch {:.1e}, ONNX Runtime {:.1e}; from each other {:.1e}".format(*figures))
    assert expected_loss != exact_loss, "autocast was at work"
    assert loss == pytest.approx(expected_loss, rel=2 * torch.finfo(dtype).eps)
    assert 0 < figures[1] <= NOT_WORSE * figures[0]
    # The same model goes on without autocast.
    for one in (full, model):
        one.zero_grad()
    assert error(train(full, batch)[1], train(model, batch)[1]) < 1e-5


@pytest.mark.parametrize("dtype", [*SHORT, torch.float64], ids=str)
@pytest.mark.parametrize("make", [bert, llama, cnn])
def test_a_model_in_another_dtype_rounds_as_much_as_pytorchs(make, dtype, wrap):
    model, batch = make()
    model.train().to(dtype)
    reference, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    lab = wrap(model)
    given = as_dtype(batch, dtype)
    expected_loss, expected = train(reference, given)
    loss, found = train(model, given)
    assert lab.status.executed_by == "ort"
    assert {one.grad.dtype for one in model.parameters() if one.grad is not None} == {dtype}
    assert loss == pytest.approx(
        expected_loss, rel=1e-6 if dtype == torch.float64 else torch.finfo(dtype).eps
    )
    if dtype == torch.float64:
        # Transformers computes some of a Llama in float32, whatever its dtype.
        assert error(expected, found) < (1e-6 if make is llama else 1e-12)
    else:
        right = train(exact, as_dtype(batch, torch.float64))[1]
        print(f"PyTorch {error(right, expected):.1e}, ONNX Runtime {error(right, found):.1e}")
        assert 0 < error(right, found) <= NOT_WORSE * error(right, expected)


def test_a_gradient_scaler_skips_the_same_step(wrap):
    model = nn.Linear(8, 3)
    reference = copy.deepcopy(model)
    lab = wrap(model)
    x, y = torch.randn(4, 8), torch.randn(4, 3)
    scales = []
    for one in (reference, model):
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(one(x), y) * (1e38 if step == 1 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert lab.status.executed_by == "ort"
    assert scales == [2.0**15] * 2, "one step was skipped"
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
