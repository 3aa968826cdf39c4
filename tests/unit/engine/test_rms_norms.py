"""Normalisations by the root of the mean square, written out as models do, are one operator and train as PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from small_transformers import batch_of, llama, step_of, t5
from torch import nn
from torch.nn import functional as F

WIDTH = 64


class Norm(nn.Module):
    """A normalisation between two layers, so that nothing of it is an output of the graph."""

    def __init__(self, form, size=WIDTH):
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.form = form

    def forward(self, x):
        return self.behind(self.form(self.before(x), self.weight))


def scaled(x, by=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + by)


def read_twice(x, w):
    y = scaled(x)
    return y * w + y[..., :1]


FORMS = {
    "llama": lambda x, w: w * scaled(x.to(torch.float32)).to(x.dtype),
    "t5": lambda x, w: w * (x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-3)),
    "gemma": lambda x, w: scaled(x.float()) * (1.0 + w.float()),
    "divided": lambda x, w: x / torch.sqrt((x * x).mean(2, keepdim=True) + 1e-5) * w,
    "layer": lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-4),
    "layer without a number": lambda x, w: F.rms_norm(x, (WIDTH,), w),
    "a frozen weight": lambda x, w: scaled(x) * w.detach() + w,
    "a frozen input": lambda x, w: x + scaled(x.detach()) * w,
    "the number first": lambda x, w: x * (1e-5 + (x**2.0).mean(-1, True)).sqrt().reciprocal() * w,
    "no weight": lambda x, w: scaled(x) + w,
    "read twice": read_twice,
    "no weight of a row's width": lambda x, w: scaled(x) * w[:1],
    "layer without a weight": lambda x, w: F.rms_norm(x, (WIDTH,)) + w,
}

OTHERS = {
    "layer over two axes": lambda x, w: F.rms_norm(x, (16, WIDTH), w.expand(16, WIDTH)),
    "another axis": lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * w,
    "a cube": lambda x, w: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-6) * w,
    "of something else": lambda x, w: (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "with the mean read twice": lambda x, w: scaled(x) * w + x.pow(2).mean(-1, keepdim=True),
}


def train(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss


def operators(lab):
    return [node.operator for node in lab.profile(n=1, progress=False).nodes]


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_one_operator_and_trains_as_pytorch(form, kernels, wrap):
    torch.manual_seed(1)
    eager = Norm(FORMS[form])
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR", aten_backward=kernels)
    x = torch.randn(8, 16, WIDTH)
    run = lab.step(lambda: train(model, x), n=1, memory=False)
    loss = train(eager, x)
    torch.testing.assert_close(torch.tensor(run.losses[0]), loss.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    used = operators(lab)
    assert used.count("SimplifiedLayerNormalization") == 1
    assert not {"Pow", "Div", "ReduceMean", "ortlab::mean_over", "ortlab::sqrt"} & set(used)
    assert ("ortlab::rms_norm_backward" in used) == kernels


class Bare(nn.Module):
    """A normalisation without a weight of rows of any width."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return scaled(x * self.scale, 0.5)


@pytest.mark.parametrize("opset", [12, 20])
def test_without_a_weight_rows_have_any_width(opset, wrap):
    eager = Bare()
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR", opset=opset)
    for width in (3, 8):
        x = torch.randn(5, width)
        lab.step(lambda x=x: train(model, x), n=1, memory=False)
        train(eager, x)
        torch.testing.assert_close(model.scale.grad, eager.scale.grad, rtol=1e-4, atol=1e-5)
        assert "SimplifiedLayerNormalization" in operators(lab)


@pytest.mark.parametrize("form", OTHERS)
def test_what_looks_like_one_and_is_none_stays_and_trains_as_pytorch(form, wrap):
    torch.manual_seed(1)
    eager = Norm(OTHERS[form])
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    x = torch.randn(8, 16, WIDTH)
    run = lab.step(lambda: train(model, x), n=1, memory=False)
    torch.testing.assert_close(torch.tensor(run.losses[0]), train(eager, x).detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert "SimplifiedLayerNormalization" not in operators(lab)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 0.0])
def test_numbers_at_the_edges_are_pytorchs(value, wrap):
    torch.manual_seed(1)
    eager = Norm(FORMS["llama"])
    model = copy.deepcopy(eager)
    wrap(model, log_level="ERROR")
    x = torch.randn(8, 16, WIDTH)
    x[2, 3] = value
    results = [train(one, x) for one in (model, eager)]
    torch.testing.assert_close(*results, equal_nan=True)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_rows_of_any_number_of_dimensions(wrap):
    torch.manual_seed(1)
    eager = Norm(FORMS["llama"])
    model = copy.deepcopy(eager)
    wrap(model, log_level="ERROR")
    for shape in ((5,), (2, 3), (2, 3, 4)):
        x = torch.randn(*shape, WIDTH)
        torch.testing.assert_close(train(model, x), train(eager, x), rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [llama, t5])
def test_models_keep_one_tensor_less_for_each_norm_and_plans_recompute_them_bit_for_bit(make, wrap):
    torch.manual_seed(1)
    model, batch = make(), batch_of()
    norms = sum(type(part).__name__.endswith(("RMSNorm", "T5LayerNorm")) for part in model.modules())
    lab = wrap(model, log_level="ERROR")
    lab.step(step_of(model, batch), n=1, memory=False)
    expected = {name: one.grad.clone() for name, one in model.named_parameters()}
    assert operators(lab).count("SimplifiedLayerNormalization") == norms
    plan = next(
        row.config for row in lab.plan().rows if row.config.startswith("SimplifiedLayerNormalization+")
    )
    model.zero_grad()
    lab.set(memory_plan=(plan,))
    lab.step(step_of(model, batch), n=1, memory=False)
    for name, one in model.named_parameters():
        assert torch.equal(one.grad, expected[name])
