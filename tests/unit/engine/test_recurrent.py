"""LSTM, GRU and RNN layers: one call of PyTorch for each layer and direction, with PyTorch's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ortlab

LAYERS = {
    "lstm": lambda **how: nn.LSTM(6, 5, **how),
    "gru": lambda **how: nn.GRU(6, 5, **how),
    "rnn": lambda **how: nn.RNN(6, 5, **how),
    "relu": lambda **how: nn.RNN(6, 5, nonlinearity="relu", **how),
}
FORMS = {
    "plain": {},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
}


class Reading(nn.Module):
    """A layer that reads a scaled input, so that a gradient reaches it; it returns what is asked for."""

    def __init__(self, layer, returns):
        super().__init__()
        self.layer, self.returns = layer, returns
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, *states):
        if len(states) == 2:
            states = (states,)
        y, last = self.layer(x * self.scale, *states)
        found = {"y": y, "h": last[0] if isinstance(last, tuple) else last, "c": last[-1]}
        return tuple(found[name] for name in self.returns)


def losses(outputs):
    return sum((one * (number + 1)).square().sum() for number, one in enumerate(outputs))


def pair(layer, returns="yh", **options):
    torch.manual_seed(3)
    eager = Reading(layer, returns)
    model = copy.deepcopy(eager)
    return ortlab.wrap(model, options=ortlab.Options(**options), log_level="ERROR"), eager


def agree(lab, eager, *inputs):
    """Both train alike, also the inputs that ask for it."""
    own = [[one.detach().clone().requires_grad_(one.requires_grad) for one in inputs] for _ in range(2)]
    found = [model(*given) for model, given in zip((lab.module, eager), own, strict=True)]
    for outputs in found:
        losses(outputs).backward()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    for one, other in zip((*lab.module.parameters(), *own[0]), (*eager.parameters(), *own[1]), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)
        one.grad = other.grad = None


def operators(lab):
    return [node.operator for node in lab.profile(n=1, progress=False).nodes]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_it_trains_as_pytorch(kind, form):
    lab, eager = pair(LAYERS[kind](**FORMS[form]))
    agree(lab, eager, torch.randn(7, 3, 6))
    agree(lab, eager, torch.randn(4, 2, 6))  # the same graph with other sizes
    assert lab.status.state == "ready"
    lab.unwrap()


@pytest.mark.parametrize("returns", ["y", "h", "c", "yhc"])
def test_any_of_its_results_may_have_the_gradient(returns):
    lab, eager = pair(LAYERS["lstm"](), returns)
    states = [torch.randn(1, 3, 5, requires_grad=True) for _ in range(2)]
    agree(lab, eager, torch.randn(7, 3, 6, requires_grad=True), *states)
    lab.unwrap()


@pytest.mark.parametrize("kind", ["gru", "rnn"])
def test_a_first_state_has_its_gradient(kind):
    lab, eager = pair(LAYERS[kind](), "h")
    agree(lab, eager, torch.randn(7, 3, 6), torch.randn(1, 3, 5, requires_grad=True))
    lab.unwrap()


def test_pytorch_computes_it_unless_a_switch_says_otherwise():
    lab, eager = pair(LAYERS["lstm"](), "y")
    x = torch.randn(7, 3, 6)
    lab.step(lambda: losses(lab.module(x)).backward(), n=1, memory=False)
    assert "ortlab::lstm_layer_backward" in operators(lab)
    lab.set(aten_recurrent=False).rerun(memory=False)
    assert "com.microsoft.LSTMGrad" in operators(lab)
    lab.module.zero_grad()
    agree(lab, eager, x)
    lab.unwrap()


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(6, 5, proj_size=3),
        nn.LSTM(6, 5, 2, dropout=1e-12),  # drops nothing, as good as never
    ],
    ids=["projection", "dropout between the layers"],
)
def test_what_has_no_kernel_of_ours_trains_all_the_same(layer):
    lab, eager = pair(layer, "yh")
    agree(lab, eager, torch.randn(7, 3, 6))
    lab.unwrap()


class Packed(nn.Module):
    """A layer that reads sequences of different lengths without their padding."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        lengths = torch.tensor([7, 5, 2])
        packed = nn.utils.rnn.pack_padded_sequence(x * self.scale, lengths)
        return (nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0],)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_a_packed_sequence_is_refused_before_its_first_step(kind, wrap):
    lab = wrap(Packed(LAYERS[kind]()), log_level="ERROR")
    with pytest.raises(ortlab.OrtlabError, match=f"packed sequences through {kind.upper()} layers"):
        lab.module(torch.randn(7, 3, 6))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
def test_what_is_not_a_number_stays_so(kind, value):
    lab, eager = pair(LAYERS[kind](), "y")
    x = torch.randn(7, 3, 6)
    x[3, 1, 2] = value
    for model in (lab.module, eager):
        losses(model(x)).backward()
    for one, other in zip(lab.module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad.isfinite(), other.grad.isfinite())
    lab.unwrap()


def test_evaluation_after_training_has_pytorchs_numbers():
    lab, eager = pair(LAYERS["gru"](num_layers=2))
    x = torch.randn(7, 3, 6)
    agree(lab, eager, x)
    with torch.no_grad():
        torch.testing.assert_close(lab.module.eval()(x), eager.eval()(x), rtol=1e-5, atol=1e-6)
    lab.unwrap()


@pytest.mark.parametrize(("kind", "kept"), [("lstm", "uint8"), ("gru", "float"), ("rnn", "float")])
def test_what_the_backward_reads_is_among_the_saved_activations(kind, kept):
    from ortlab.engine.operators import recurrent

    lab, _ = pair(LAYERS[kind](), "y")
    x = torch.randn(7, 3, 6)
    lab.step(lambda: losses(lab.module(x)).backward(), n=1, memory=False)
    activations = lab.activations()
    assert not activations.unknown
    layer, h = lab.module.layer, torch.zeros(3, 5)
    how = {"lstm": (h, h, 0), "gru": (h, 0), "rnn": (h, 0, 0)}[kind]
    *_, largest = getattr(recurrent, f"{kind}_layer")(x, *(one.detach() for one in layer._flat_weights), *how)
    if kind == "rnn":
        largest = x.new_empty(7, 3, 5)  # the states are all that it keeps
    row = max(
        (row for row in activations.rows if f"ortlab::{kind}_layer" in row.operator),
        key=lambda row: row.bytes,
    )
    assert (row.bytes, row.dtype) == (largest.nbytes, kept)
    lab.unwrap()
