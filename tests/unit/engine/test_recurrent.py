"""LSTM, GRU and RNN layers: one call of PyTorch for each layer and direction, with PyTorch's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

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

    def __init__(self, layer, *, is_sorted=False, total=None):
        super().__init__()
        self.layer, self.is_sorted, self.total = layer, is_sorted, total
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x * self.scale, lengths, enforce_sorted=self.is_sorted)
        y, last = self.layer(packed)
        padded, _ = pad_packed_sequence(
            y, total_length=x.shape[0] if self.total == "as before" else self.total
        )
        return (padded, *last) if isinstance(last, tuple) else (padded, last)


class PackedTokens(nn.Module):
    """What embeds and scores packed tokens, none of which is padding: their number is another in each batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.score = nn.Embedding(9, 6), nn.LSTM(6, 5), nn.Linear(5, 9)

    def forward(self, ids, mask):
        packed = pack_padded_sequence(ids, mask.sum(0).cpu(), enforce_sorted=False)
        y, _ = self.layer(packed._replace(data=self.embed(packed.data)))
        return (nn.functional.cross_entropy(self.score(y.data), packed.data), y.data)


def train_alike(model, *batches, one_graph=True):
    """Train a model as it is and wrapped, on one batch after the other; all numbers are the same bits."""
    eager = copy.deepcopy(model)
    lab = ortlab.wrap(model, log_level="ERROR")
    for batch in batches:
        found = []
        for one in (lab.module, eager):
            one.zero_grad()
            torch.manual_seed(7)
            outputs = one(*batch)
            losses(outputs).backward()
            found.append([*outputs, *(parameter.grad for parameter in one.parameters())])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
    assert lab.status.executed_by == "ort"
    assert one_graph != any("Built anew" in one.text for one in lab.messages)
    lab.unwrap()


PACKED = {
    "in any order": {},
    "sorted": {"is_sorted": True},
    "padded as before": {"total": "as before"},
    "padded further": {"total": 9},
}


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences_train_bit_for_bit(kind, form):
    torch.manual_seed(3)
    model = Packed(LAYERS[kind](num_layers=2, bidirectional=True), **PACKED[form])
    lengths = [[7, 5, 2], [6, 6, 1], [4, 3, 3, 1]]  # the second has another longest one in the same shape
    if form != "sorted":
        lengths[1].reverse()
    train_alike(model, *((torch.randn(7, len(one), 6), torch.tensor(one)) for one in lengths))


def test_a_packed_sequence_that_is_longer_than_its_padding_ends_the_step():
    model = Packed(LAYERS["gru"](), total=6)
    lab = ortlab.wrap(model, log_level="FATAL")
    model(torch.randn(7, 3, 6), torch.tensor([5, 6, 2]))
    with pytest.raises(ortlab.OrtlabError, match=r"_pad_packed_sequence failed: .* total_length"):
        model(torch.randn(7, 3, 6), torch.tensor([5, 7, 2]))
    lab.unwrap()


def test_a_pre_flight_says_that_packed_sequences_train():
    report = ortlab.preflight(Packed(LAYERS["gru"]()), (torch.randn(7, 3, 6), torch.tensor([5, 2, 7])))
    assert "Trains whole on ONNX Runtime; 3 operators are run by PyTorch inside the graph." in str(report)


def test_packed_sequences_drop_out_what_pytorch_does():
    torch.manual_seed(3)
    model = Packed(LAYERS["lstm"](num_layers=2, dropout=0.5))
    train_alike(model, *((torch.randn(7, 3, 6), torch.tensor([2, 7, 4])) for _ in range(2)))


def test_a_loss_of_packed_tokens_trains():
    torch.manual_seed(3)
    eager = PackedTokens()
    model = copy.deepcopy(eager)
    lab = ortlab.wrap(model, log_level="ERROR")
    for lengths in ([7, 5, 2], [1, 6, 6]):
        ids = torch.randint(9, (7, 3))
        mask = (torch.arange(7)[:, None] < torch.tensor(lengths)).long()
        found = [one(ids, mask) for one in (lab.module, eager)]
        assert found[0][1].shape == (sum(lengths), 5)
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
        for loss, _ in found:
            loss.backward()
        for one, other in zip(lab.module.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    lab.unwrap()


def test_a_list_of_sequences_is_packed():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.GRU(6, 5)

        def forward(self, *sequences):
            y, last = self.layer(pack_sequence(sequences, enforce_sorted=False))
            return pad_packed_sequence(y)[0], last

    torch.manual_seed(3)
    batches = ([torch.randn(length, 6) for length in lengths] for lengths in ([5, 7, 2], [3, 4, 9]))
    train_alike(Listed(), *batches, one_graph=False)  # torch makes numbers of the sizes of the sequences


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
