"""PyTorch against ONNX Runtime, tensor by tensor: what differs is found where it is, and nothing else is disturbed."""

from __future__ import annotations

import ctypes
import json
import math
import os

import numpy as np
import pytest
import torch
from pytorch_faults import spoil_module
from torch import nn

import ortlab
from ortlab.errors import LedgerError, StepError
from ortlab.parity.parity import DIFFERS, NOT_COMPARED, Distance, Parity, Site
from ortlab.parity.tensor_comparison import Compared, Reference, WithoutDropout, stored
from ortlab.records import activation_statistics as statistics
from ortlab.records.activation_statistics import TensorStatistics
from ortlab.render import html, text


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, *, scale=None):
        hidden = torch.tanh(self.inner(self.norm(x)))
        return {"out": [x + self.drop(self.outer(hidden))], "nothing": None, "name": "block"}


class Weighing(nn.Module):
    """Attention that returns its weights as well, as transformers' eager attention does."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(8, 16)

    def forward(self, x):
        asked, kept = self.both(x).chunk(2, -1)
        weights = (asked @ kept.transpose(-2, -1)).softmax(-1)
        return weights @ kept, weights


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Weighing()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.attention(x)[0]).square().mean()


class Net(nn.Module):
    """A module that is called twice, one that is never called, and outputs that are nested or no tensors."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels):
        x = self.block(x)["out"][0]
        x = self.block(x, scale=None)["out"][0] * 1.5
        return nn.functional.cross_entropy(self.head(x), labels)


def lab_of(model, *batch, lr=0.1):
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=lr)

    def step():
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, log_level="ERROR")
    lab.step(step, progress=False)
    return lab


def net_and_lab():
    torch.manual_seed(3)
    model = Net()
    return model, lab_of(model, torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1]))


@pytest.fixture(scope="module")
def compared():
    model, lab = net_and_lab()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    generator, runs, hooks = torch.get_rng_state(), len(lab.runs), hook_count(model)
    found = lab.parity(2, progress=False)
    left = {
        "weights": all(torch.equal(one, state[name]) for name, one in model.state_dict().items()),
        "generator": torch.equal(torch.get_rng_state(), generator),
        "ledger": len(lab.runs) == runs,
        "hooks": hook_count(model) == hooks,
        "dropout": model.block.drop.p == 0.5,
        "state": lab.status.state,
    }
    again = lab.rerun(progress=False)
    yield model, lab, found, left, again
    lab.unwrap(forget=True)


def hook_count(model):
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    hooks = sum(len(getattr(part, table)) for part in model.modules() for table in tables)
    return hooks + sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters())


@pytest.mark.row("I8")
def test_equal_engines_give_no_alarm(compared):
    _, _, found, _, _ = compared
    assert found.ok, found.first
    assert found.outcome == "agrees"
    kinds = {pair.site.kind for pair in found.pairs if pair.distance}
    assert kinds == {
        "input",
        "output",
        "input gradient",
        "output gradient",
        "parameter gradient",
        "updated parameter",
    }
    assert found.loss_difference < 1e-5
    assert found.written_bytes > 0


def test_a_gradient_that_would_be_written_over_is_compared():
    torch.manual_seed(3)
    lab = lab_of(Weighed(), torch.randn(2, 64, 8))
    try:
        found = lab.parity(1, progress=False)
        seen = {
            pair.site.name for pair in found.pairs if pair.site.kind == "output gradient" and pair.distance
        }
        operators = {node.operator for node in lab.profile(n=1, progress=False).nodes}
    finally:
        lab.unwrap(forget=True)
    assert "ortlab::softmax_backward_over" in operators
    assert len(seen) == 2  # of what attends, and of the weights
    assert found.ok, found.first


def test_a_module_that_is_called_twice_is_compared_twice_and_one_that_is_not_called_is_not_there(compared):
    _, _, found, _, _ = compared
    calls = {
        pair.site.call
        for pair in found.pairs
        if pair.site.module == "block.inner" and pair.site.kind == "output"
    }
    assert calls == {1, 2}
    twice = [p for p in found.pairs if p.site.module == "block.inner" and p.site.kind == "output"]
    assert all(pair.distance for pair in twice), [pair.note for pair in twice]
    of_never = {pair.site.kind for pair in found.pairs if pair.site.module == "never"}
    assert of_never <= {"updated parameter"}


def test_nested_outputs_are_named_by_their_place(compared):
    _, _, found, _, _ = compared
    names = {p.site.name for p in found.pairs if p.site.module == "block" and p.site.kind == "output"}
    assert names == {"out.0"}


def test_the_lab_is_as_it_was(compared):
    _, lab, _, left, again = compared
    assert left == {**dict.fromkeys(left, True), "state": "ready"}
    assert again.losses == lab.runs.run(1).losses


@pytest.mark.row("I2")
def test_the_checklist_is_answered(compared):
    _, _, found, _, _ = compared
    answers = {check.question: check for check in found.checks}
    assert answers["Is dropout off?"].state == "done"
    assert "lets everything pass" in answers["Is dropout off?"].result
    assert "another seed changes" in answers["What does another seed change?"].result
    assert answers["Does PyTorch repeat itself?"].result.startswith("Bit for bit")
    assert answers["Does ONNX Runtime repeat itself?"].result.startswith("Bit for bit")
    assert answers["Does looking change the numbers?"].state == "done"


def test_it_goes_to_json_and_back(compared, tmp_path):
    _, _, found, _, _ = compared
    read = Parity.load(found.save(tmp_path / "parity.json"))
    assert json.dumps(read.to_dict()) == json.dumps(found.to_dict())  # nan is not equal to itself
    assert (repr(read), read.checks, read.losses) == (repr(found), found.checks, found.losses)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(LedgerError, match="is not a comparison of tensors"):
        Parity.load(tmp_path / "other.json")


def test_the_page_the_table_and_the_figure(compared):
    _, _, found, _, _ = compared
    assert "none is further apart" in text.render(found)
    assert "data:image/svg+xml" in html.render(found)
    table = found.table()
    assert len(table) == len(found.pairs)
    assert {"module", "verdict", "distance", "floor", "reference std", "candidate std"} <= {*table.columns}
    assert len(ortlab.plot(found).axes) == 3


@pytest.mark.row("I8")
@pytest.mark.parametrize(("ahead", "back", "phase"), [(1.001, 1.0, "forward"), (1.0, 1.001, "backward")])
@pytest.mark.parametrize("path", ["block.outer", "head"])
def test_a_fault_is_found_in_its_module(path, ahead, back, phase):
    model, lab = net_and_lab()
    spoil_module(model.get_submodule(path), ahead=ahead, back=back)
    found = lab.parity(1, seeds=False, progress=False)
    lab.unwrap(forget=True)
    assert (found.first.module, found.first.phase) == (path, phase)
    assert found.first.pair.verdict == DIFFERS
    assert found.outcome == "diverges"
    page = text.render(found)
    assert f"in the {phase} of step 1, in {path} (Linear)" in page


class Between(Net):
    """Computes something between the calls, which the engines do not agree on."""

    def forward(self, x, labels):
        x = self.block(x)["out"][0]
        x = self.block(x)["out"][0] * (1.5 if torch._C._get_tracing_state() else 1.502)
        return nn.functional.cross_entropy(self.head(x), labels)


@pytest.mark.row("I8")
def test_a_fault_between_the_calls_is_the_callers():
    torch.manual_seed(3)
    lab = lab_of(Between(), torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1]))
    found = lab.parity(1, seeds=False, progress=False)
    lab.unwrap(forget=True)
    assert (found.first.module, found.first.module_class) == ("", "Between")
    assert "what it hands to head" in found.first.reason
    assert found.first.source.startswith(__file__)


class Timed(nn.Module):
    """Blocks that begin alike: each takes the SiLU of the same time, as in a diffusion model."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.by_time, self.by_value = nn.Linear(4, 8), nn.Linear(8, 8)

        def forward(self, x, time):
            return self.by_value(x) + self.by_time(nn.functional.silu(time))

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 4)
        self.parts = nn.ModuleList(Timed.Part() for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x, time):
        time = self.time(time)
        for part in self.parts:
            x = part(x, time).tanh()
        return (self.last(x) + x).square().mean()


def test_modules_that_share_nodes_of_the_graph_give_no_alarm():
    torch.manual_seed(3)
    lab = lab_of(Timed(), torch.randn(5, 8), torch.rand(5, 1))
    found = lab.parity(1, progress=False)
    assert found.ok, found.first
    notes = {(pair.site.module, pair.site.kind, pair.site.name): pair.note for pair in found.pairs}
    for number in range(3):
        assert "share nodes" in notes[f"parts.{number}", "input gradient", "1"]
    for number in (1, 2):  # the first one takes the batch, which has no gradient
        assert not notes[f"parts.{number}", "input gradient", "0"]
    assert not notes["last", "input gradient", "0"]
    lab.unwrap()


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden + 0.1 * torch.randn_like(hidden)).sum()


def test_a_model_that_is_random_by_design_is_said_to_be():
    torch.manual_seed(3)
    lab = lab_of(Random(), torch.randn(3, 4))
    found = lab.parity(1, seeds=False, progress=False)
    lab.unwrap(forget=True)
    answers = {check.question: check for check in found.checks}
    assert answers["Is dropout off?"].state == "found"
    assert "random by design" in answers["Is dropout off?"].result


class Dropping(nn.Module):
    """Layers of torch that drop without a dropout: in attention, and between the layers of an LSTM."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.recurrent = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.recurrent(self.encoder(x))[0].square().mean()


def test_the_dropouts_inside_layers_of_torch_are_off():
    torch.manual_seed(3)
    lab = lab_of(Dropping(), torch.randn(3, 6, 8))
    found = lab.parity(1, progress=False)
    assert found.ok, found.first
    answers = {one.question: one for one in found.checks}
    assert answers["Is dropout off?"].state == "done"
    lab.unwrap()


DROPPING = {
    "attention": (lambda: nn.MultiheadAttention(8, 2, dropout=0.5), lambda layer, x: layer(x, x, x)[0]),
    "attention without weights": (
        lambda: nn.MultiheadAttention(8, 2, dropout=0.5),
        lambda layer, x: layer(x, x, x, need_weights=False)[0],
    ),
    "lstm": (lambda: nn.LSTM(8, 8, 2, dropout=0.5), lambda layer, x: layer(x)[0]),
    "gru": (lambda: nn.GRU(8, 8, 2, dropout=0.5), lambda layer, x: layer(x)[0]),
    "rnn": (lambda: nn.RNN(8, 8, 2, dropout=0.5), lambda layer, x: layer(x)[0]),
    "packed lstm": (
        lambda: nn.LSTM(8, 8, 2, dropout=0.5),
        lambda layer, x: layer(nn.utils.rnn.pack_padded_sequence(x, [6, 4, 3]))[0].data,
    ),
    "torch.dropout": (nn.Identity, lambda _, x: torch.dropout(x, 0.5, train=True)),
    "torch.feature_dropout_": (nn.Identity, lambda _, x: torch.feature_dropout_(x.clone(), 0.5, train=True)),
    "layer": (lambda: nn.Dropout1d(0.5), lambda layer, x: layer(x)),
}


@pytest.mark.parametrize("case", DROPPING)
def test_without_dropout_nothing_is_dropped(case):
    make, call = DROPPING[case]
    torch.manual_seed(3)
    layer, x = make(), torch.randn(6, 3, 8)
    dropped = call(layer, x)
    with WithoutDropout() as without:
        whole = call(layer, x)
    assert without.found == 1
    torch.testing.assert_close(whole, call(layer.eval(), x) if case not in BUILT_IN else x)
    assert not torch.equal(dropped, whole)


BUILT_IN = ("torch.dropout", "torch.feature_dropout_")


class Roots(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.log(self.first(x))).sum()


def test_nan_in_both_engines_is_no_difference_and_is_said():
    torch.manual_seed(3)
    lab = lab_of(Roots(), torch.randn(3, 4), lr=0.0)
    found = lab.parity(1, seeds=False, progress=False)
    lab.unwrap(forget=True)
    assert any("nan" in note and "Look for its cause there" in note for note in found.notes)
    assert any("not finite in step 1. Go back to weights" in note for note in found.notes)
    assert found.forward is None
    assert found.loss_difference == 0


@pytest.mark.row("I8")
def test_nan_of_one_engine_alone_is_where_they_part():
    model, lab = net_and_lab()
    spoil_module(model.get_submodule("block.outer"), ahead=math.nan)
    found = lab.parity(1, seeds=False, progress=False)
    lab.unwrap(forget=True)
    assert (found.first.module, found.first.pair.distance.relative) == ("block.outer", math.inf)
    assert found.loss_difference == math.inf
    assert "by nan or inf on one side only" in text.render(found)


class Noise(torch.autograd.Function):
    """Adds noise that nothing winds back: it comes from the system."""

    @staticmethod
    def forward(_, hidden):
        noise = np.frombuffer(os.urandom(hidden.numel()), "uint8").reshape(tuple(hidden.shape)) / 128 - 1
        return hidden + torch.from_numpy(noise.astype("float32"))

    @staticmethod
    def backward(_, grad):
        return grad


class Unsteady(nn.Module):
    """Is another function in each call."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.tanh(Noise.apply(self.first(x)))).sum()


def test_a_model_that_does_not_repeat_itself_is_said_to_and_measured_by_what_it_differs_from_itself():
    torch.manual_seed(3)
    lab = lab_of(Unsteady(), torch.randn(64, 4), lr=0.0)
    found = lab.parity(1, seeds=False, progress=False)
    lab.unwrap(forget=True)
    (repeats,) = (check for check in found.checks if check.question == "Does PyTorch repeat itself?")
    assert repeats.state == "found"
    assert repeats.result.startswith("No: two runs differ by up to")
    floors = {pair.site.module: pair.floor for pair in found.pairs if pair.site.kind == "output"}
    assert floors["last"] > 0.01 > floors["first"]
    assert found.forward is None


def test_tensors_of_other_shapes_and_types_say_so():
    ours, single = torch.randn(2, 3), Site(1, "a", 1, "output", "0")
    with stored() as store:
        Reference(store).take(single, ours)
        of_shape, of_type = Compared(store), Compared(store)
        of_shape.take(single, ours[:1])
        of_type.take(single, ours.half())
    assert of_shape.notes == {single: "shapes differ: [2, 3] and [1, 3]"}
    assert not of_shape.distances
    assert of_type.notes == {single: "types differ: torch.float32 and torch.float16"}
    assert 1e-6 < of_type.distances[single].relative < 1e-3


def test_runs_with_other_data_are_refused_and_leave_nothing_behind():
    torch.manual_seed(3)
    model = Net()
    numbers = iter(range(1000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x = torch.full((5, 8), float(next(numbers)) / 7)
        loss = model(x, torch.tensor([0, 1, 2, 0, 1]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    lab = ortlab.wrap(model, engine="eager")
    lab.step(step, progress=False)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(StepError, match="did not get the same data"):
        lab.parity(1, progress=False)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert (lab.engine, len(lab.runs), hook_count(model)) == ("eager", 1, 0)
    lab.unwrap(forget=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_failure_leaves_everything_as_it_was(error):
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(3, 4)
    calls = ctypes.c_int()  # in C, where no way back to the start looks

    def step():
        calls.value += 1
        loss = model(x).sum()
        loss.backward()
        with torch.no_grad():
            model[0].weight -= 0.1 * model[0].weight.grad
        model.zero_grad()
        if calls.value == 6:  # in the second run of ONNX Runtime
            raise error

    lab = ortlab.wrap(model)
    lab.step(step, progress=False)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(error):
        lab.parity(1, seeds=False, progress=False)
    assert calls.value == 6
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert (len(lab.runs), hook_count(model), lab.status.state) == (1, 0, "ready")
    assert not torch.are_deterministic_algorithms_enabled()
    lab.unwrap(forget=True)


def test_without_a_step_there_is_nothing_to_compare(wrap):
    lab = wrap(nn.Linear(2, 2))
    with pytest.raises(StepError, match="no step to go back to"):
        lab.parity()
    with pytest.raises(StepError, match="whole number"):
        lab.parity(0)


def test_distances():
    ours = torch.tensor([3.0, 4.0])
    assert Distance.between(ours, ours) == Distance(0.0, 0.0)
    assert Distance.between(ours, ours * 1.5) == Distance(pytest.approx(0.5), 2.0)
    assert Distance.between(torch.zeros(2), ours).relative == math.inf
    nan = torch.tensor([math.nan, math.inf, 1.0])
    assert Distance.between(nan, nan.clone()) == Distance(0.0, 0.0)
    assert Distance.between(nan, torch.tensor([0.0, math.inf, 1.0])).relative == math.inf


@pytest.mark.row("T12")
def test_the_deviation_of_ten_million_values_around_a_thousand(monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", 2**20)
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(10**7, generator=generator, dtype=torch.float64) * 1e-3 + 1e3
    exact = float(((values - values.mean()) ** 2).sum() / (values.numel() - 1)) ** 0.5
    assert TensorStatistics.of(values).std == pytest.approx(exact, rel=1e-6)
    single = values.float()
    centred = single.double() - single.double().mean()
    assert TensorStatistics.of(single).std == pytest.approx(
        float((centred.square().sum() / (values.numel() - 1)).sqrt()), rel=1e-6
    )


def test_what_is_not_compared_says_why(compared):
    _, _, found, _, _ = compared
    assert all(pair.note for pair in found.pairs if pair.verdict == NOT_COMPARED)
