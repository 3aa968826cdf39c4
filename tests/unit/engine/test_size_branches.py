"""A forward that decides by sizes of its batch does for each batch what it does in PyTorch."""
# ruff: noqa: ARG004, ARG005 - what decides is given both, and a Function its context

from __future__ import annotations

import copy
import math

import pytest
import torch
from fault_cases import Deciding
from torch import nn
from torch.utils.checkpoint import checkpoint

import ortlab
from ortlab.engine.tracing.sizes import Computation
from ortlab.errors import BuildError, ExecutionError

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.fixture
def trained(wrap):
    """Return a function that runs a model beside its copy on batches of some sizes, and says what was built."""

    def run(model, rows, **options):
        torch.manual_seed(0)
        reference, built = copy.deepcopy(model), []
        lab = wrap(model, **options)
        for number in rows:
            x = torch.randn(number, 4)
            outputs = [one(x) for one in (reference, model)]
            torch.testing.assert_close(outputs[1], outputs[0])
            built.append(lab.status.executed_by)
            for one, output in zip((reference, model), outputs, strict=True):
                one.zero_grad()
                output.sum().backward()
            grads = [[parameter.grad for parameter in one.parameters()] for one in (reference, model)]
            torch.testing.assert_close(grads[1], grads[0])
        assert set(built) <= {"ort", "ort parts"}
        return lab

    return run


def exports(lab):
    """Count the exports of a lab, each of which but the first is said."""
    return 1 + sum("Built anew from the export" in one.text for one in lab.messages)


def turns(h, x):
    total = h.sum(0)
    for row in range(x.shape[0] // 4):
        total = total * 0.5 + x[row]
    return total


def rows_in_turn(h, _):
    return sum(row * number for number, row in enumerate(h))


def weighed_chunks(h, _):
    return sum(part.sum(0) * (number + 1) for number, part in enumerate(h.chunk(2)))


def by_function(h, _):
    """The comparison is in torch's own code, which no mode sees."""
    return h * 2 if 5 in h.new_ones(h.shape[0]).cumsum(0) else h * 3


def pooled(h, _):
    pooled = nn.functional.max_pool1d(h.t()[None], 2)
    return h * 2 if pooled.shape[-1] == 2 else h * 3


BRANCHES = {
    "equality": (lambda h, x: h * 2 if x.shape[0] == 3 else h * 3, 2),
    "inequality": (lambda h, x: h * 2 if x.size(0) > 4 else h * 3, 2),
    "whole shape": (lambda h, x: h * 2 if x.shape == (3, 4) else h * 3, 2),
    "of an activation": (lambda h, x: h * 2 if h.t().shape[-1] != 3 else h * 3, 2),
    "of a pooled activation": (pooled, 2),
    "product of sizes": (lambda h, x: h * 2 if x.numel() > 16 else h * 3, 2),
    "remainder": (lambda h, x: h * 2 if x.shape[0] % 2 else h * 3, 2),
    "remainder of len": (lambda h, x: h * 2 if len(x) % 2 else h * 3, 4),  # len() gives the number away
    "truth": (lambda h, x: h * 2 if x.shape[0] - 3 else h * 3, 2),
    "one of several": (lambda h, x: h * 2 if x.shape[0] in (3, 4) else h * 3, 3),  # 3, 4, neither
    "one of a set": (lambda h, x: h * 2 if x.shape[0] in {3, 4} else h * 3, 4),
    "key of a dict": (lambda h, x: h * {3: 2.0, 5: 4.0}.get(x.shape[0], 1.0), 4),
    "min": (lambda h, x: h[: min(x.shape[0], 5)].sum(0), 2),
    "max": (lambda h, x: h.sum(0) * max(x.shape[0], 5), 2),
    "turns": (turns, 3),
    "rows": (rows_in_turn, 4),
    "squeeze": (lambda h, x: h.squeeze(0), 1),
    "squeeze of a width": (lambda h, x: torch.squeeze(h, -1) * 2, 1),
    "chunks": (weighed_chunks, 1),
    "square root": (lambda h, x: h / math.sqrt(h.size(0)), 4),
    "square root of a width": (lambda h, x: h / math.sqrt(h.size(-1)), 1),
    "tensor of a size": (lambda h, x: h * torch.tensor([x.shape[0]]), 4),
    "strides": (lambda h, x: h * 2 if h.t().contiguous().stride(0) > 4 else h * 3, 4),
    "bytes": (lambda h, x: h * 2 if x.nbytes > 64 else h * 3, 4),
    "numbers made of a size": (lambda h, x: h * 2 if torch.arange(x.shape[0]).sum() > 6 else h * 3, 2),
    "equal tensors": (lambda h, x: h * 2 if torch.equal(torch.arange(len(x)), torch.arange(5)) else h * 3, 4),
    "inside of torch": (by_function, 2),
    "checkpointed": (
        lambda h, x: checkpoint(lambda a: a * 2 if a.shape[0] == 3 else a * 3, h, use_reentrant=False),
        2,
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_each_size_takes_its_own_branch(name, trained):
    decide, expected = BRANCHES[name]
    lab = trained(Deciding(decide).train(), (3, 5, 4, 3, 8, 5, 4))
    assert exports(lab) == expected


def convolved(h, _, **given):
    return nn.functional.conv1d(h.t()[None], torch.ones(1, 4, 3), **given)


def grouped(h, _):
    return nn.functional.conv1d(h.reshape(1, -1, 4), torch.ones(h.shape[0], 1, 1), groups=h.shape[0])


READ_BY_TORCH = {
    "roll": lambda h, x: torch.roll(h, h.shape[0] // 2, 0) * x,
    "adaptive pool": lambda h, x: nn.functional.adaptive_avg_pool1d(h.t(), h.shape[0] // 2),
    "pool over all": lambda h, x: nn.functional.max_pool1d(h.t(), kernel_size=h.shape[0]),
    "padding": lambda h, x: convolved(h, x, padding=h.shape[0] // 2),
    "dilation": lambda h, x: convolved(h, x, padding=4, dilation=h.shape[0] // 2),
    "stride": lambda h, x: convolved(h, x, padding=4, stride=h.shape[0] // 2),
    "groups": grouped,
    "number of chunks": lambda h, x: torch.cat(h.chunk(x.shape[0] // 2)[::-1]),
    "value to scatter": lambda h, x: h.scatter(1, torch.zeros(len(h), 1, dtype=torch.long), x.shape[0]) * h,
    "places made by full": lambda h, x: h.gather(0, torch.full((1, 4), x.shape[0] - 1)),
    "rounded": lambda h, x: h[: round(x.shape[0] * 0.7)],
    "cut off": lambda h, x: h[: math.trunc(x.shape[0] / 2)],
    "quotient and remainder": lambda h, x: h[: divmod(x.shape[0], 2)[0]] * divmod(7, x.shape[0])[1],
    "bits": lambda h, x: h * (x.shape[0] & 3),
    "below zero": lambda h, x: h * (-x.shape[0] // 4),
    "shifted below zero": lambda h, x: h * ((2 - x.shape[0]) >> 1),
    "counted down": lambda h, x: h[torch.arange(x.shape[0] - 1, -1, -1)] * x,
    "counted from the end": lambda h, x: h[torch.arange(-x.shape[0], 0)] * x,
}
"""What follows from a size where torch reads it, in C++, and keeps a number, or where ONNX means something else."""


@pytest.mark.parametrize("name", READ_BY_TORCH)
def test_what_follows_from_a_size_follows_from_each(name, trained):
    trained(Deciding(READ_BY_TORCH[name]).train(), (4, 6, 5, 9, 4))


def test_what_torch_checks_of_a_size_it_checks_for_each_batch(trained):
    class Checked(nn.Linear):
        def forward(self, x):
            torch._check(x.shape[0] < 9, lambda: "too many rows")
            return super().forward(x)

    model = Checked(4, 4)
    assert exports(trained(model, (2, 3, 8))) == 1
    with pytest.raises(BuildError, match="too many rows"):
        model(torch.randn(9, 4))


def test_maxima_go_back_to_where_they_were(wrap):
    class Unpooled(nn.Conv2d):
        def forward(self, x):
            maxima, places = nn.functional.max_pool2d(super().forward(x), 2, return_indices=True)
            return nn.functional.max_unpool2d(maxima, places, 2, output_size=x.shape[2:])

    torch.manual_seed(0)
    model = Unpooled(4, 4, 1)
    reference = copy.deepcopy(model)
    wrap(model)
    for rows, size in ((2, 4), (3, 7)):
        x = torch.randn(rows, 4, size, 6)
        outputs = [one(x) for one in (reference, model)]
        torch.testing.assert_close(outputs[1], outputs[0])
        for one, output in zip((reference, model), outputs, strict=True):
            one.zero_grad()
            output.square().sum().backward()
        torch.testing.assert_close(model.weight.grad, reference.weight.grad)


def test_in_evaluation_and_in_a_part_of_a_part(trained):
    inner = Deciding(lambda h, x: h * 2 if h.shape[0] > 4 else h * 3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner))
    with torch.no_grad():
        lab = ortlab.wrap(model.eval())
        for rows in (3, 5, 4, 8):
            x = torch.randn(rows, 4)
            h = inner.layer(model[0](x))
            torch.testing.assert_close(model(x), h * (2 if rows > 4 else 3))
    assert exports(lab) == 2
    lab.unwrap(forget=True)
    trained(model.train(), (3, 5, 4, 8))


def test_in_a_wrapped_part(trained):
    model = nn.Sequential(nn.Linear(4, 4), Deciding(lambda h, x: h * 2 if h.shape[0] > 4 else h * 3))
    trained(model.train(), (3, 5, 4, 8), only=["1"])


def test_a_size_that_was_seen_is_looked_up(trained, monkeypatch):
    asked, values = [], Computation.values
    monkeypatch.setattr(Computation, "values", lambda self, given: asked.append(1) or values(self, given))
    model = Deciding(lambda h, x: h * 2 if x.shape[0] > 4 else h * 3).train()
    lab = trained(model, (3, 5, 4, 8, 3, 5, 4, 8))
    before = len(asked)
    for rows in (3, 5, 4, 8, 8, 4, 5, 3):
        model(torch.randn(rows, 4))
    assert len(asked) == before
    assert exports(lab) == 2


def test_a_graph_is_returned_to_without_another_build(trained):
    model = Deciding(lambda h, x: h * 2 if x.shape[0] > 4 else h * 3).train()
    lab = trained(model, (3, 5))
    built = []
    lab._bench.ort._on_built = built.append
    for rows in (3, 5, 2, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(model(x), model.layer(x) * (2 if rows > 4 else 3))
    assert not built


def test_other_sizes_than_those_of_the_first_batch_are_said_with_the_line(trained):
    lab = trained(Deciding(lambda h, x: h * 2 if x.shape[0] > 4 else h * 3).train(), (3, 5))
    (said,) = [one.text for one in lab.messages if "Built anew" in one.text]
    assert "the forward depends on a size, at " in said
    assert "test_size_branches.py, line" in said
    assert "(False before, now True)" in said


def test_with_and_without_gradients_eval_has_an_export_each(trained):
    """The exported models are the same, and the one for inference has no gradient graph."""
    model = Deciding(lambda h, x: h * 2 if x.shape[0] == 3 else h * 3).eval()
    lab = trained(model, (3,))
    x = torch.ones(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(model(x), model.layer(x) * 2)
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(model.layer.bias.grad, torch.full((4,), 6.0))
    assert lab.status.executed_by == "ort"


def test_sizes_that_decide_nothing_need_one_export(trained):
    lab = trained(Deciding(lambda h, x: h[: x.shape[0] - 1].reshape(-1, 2).sum(0)).train(), (3, 5, 4, 8))
    assert exports(lab) == 1


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def behind_a_function(h, _):
    y = Twice.apply(h)
    return y * 2 if y.shape[0] == 3 else y * 3


def test_what_cannot_be_computed_again_is_exported_for_each_size(trained):
    """No shape is known of what a Function returns."""
    model = Deciding(behind_a_function).train()
    lab = trained(model, (3, 5, 4, 5, 4, 3))
    assert exports(lab) == 3
    built = []
    lab._bench.ort._on_built = built.append
    for rows in (4, 5, 3):
        model(torch.randn(rows, 4))
    assert not built


def test_a_slice_up_to_a_number_of_the_data_is_data():
    """Its size is, too, and no size of an input."""
    model = Deciding(lambda h, x: h * x[: x[:, 0].gt(0).sum()].shape[0]).train()
    lab = ortlab.wrap(model)
    x = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).repeat(1, 4)
    torch.testing.assert_close(model(x), model.layer(x) * 2)
    with pytest.raises(ExecutionError, match="depends on a value of the batch"):
        model(torch.tensor([[1.0], [1.0], [1.0], [-1.0]]).repeat(1, 4))
    lab.unwrap(forget=True)


def test_one_from_the_disk_knows_its_own_sizes_only(tmp_path):
    """The entry keeps no computation; a model that reads no sizes is good for all of them."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    for decide, least in ((lambda h, x: h * 2 if x.shape[0] > 4 else h * 3, 2), (lambda h, x: h * 2, 1)):
        for expected in (least, 2 * least if least > 1 else 1):
            torch.manual_seed(0)
            model = Deciding(decide).train()
            lab = ortlab.wrap(model, export_cache_dir=str(folder))
            for rows in (3, 5, 4, 8):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(model(x), decide(model.layer(x), x))
            assert exports(lab) == expected
            lab.unwrap(forget=True)
