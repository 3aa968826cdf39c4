"""What ortlab mends in the operators of 1.19.2: shown broken as released, and right with ortlab."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
from pathlib import Path

import pytest
import torch
from fault_cases import LOUD, SILENT, largest_difference
from forked import python
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import ortlab.ortmodule
from ortlab.engine import load
from ortlab.engine.operators import symbolics
from ortlab.errors import BuildError

TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore:ONNX Preprocess - Removing mutation from node aten..add_:UserWarning"),
    pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1 can be constant folded:UserWarning"),
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
]


def is_wrong(outcome: object) -> bool:
    return not isinstance(outcome, float) or math.isnan(outcome) or outcome > 100 * TOLERANCE


@pytest.fixture(scope="module")
def as_released():
    """What 1.19.2 does by itself, per case: a relative difference, the name of an exception, or "crash"."""
    script = Path(__file__).with_name("fault_cases.py")
    finished = subprocess.run(
        python(script),
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"},
    )
    return dict(json.loads(line) for line in finished.stdout.splitlines() if line.startswith('["'))


@pytest.mark.parametrize("name", SILENT)
def test_as_released_the_numbers_are_wrong(name, as_released):
    outcome = as_released[name]
    assert isinstance(outcome, float), outcome
    assert is_wrong(outcome)


@pytest.mark.parametrize("name", LOUD)
def test_as_released_it_does_not_train(name, as_released):
    assert isinstance(as_released[name], str)


@pytest.mark.parametrize("name", [*SILENT, *LOUD])
def test_with_ortlab_it_agrees_with_pytorch(name):
    assert largest_difference(ortlab.ortmodule, {**SILENT, **LOUD}[name]) <= TOLERANCE


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(6, 6, 3, groups=2, bias=False),
        nn.Conv1d(6, 12, 3, groups=6, stride=2, dilation=2),
        nn.ConvTranspose1d(6, 4, 3, bias=False, groups=2, stride=2, output_padding=1),
        nn.Conv1d(6, 6, 4, padding="same", groups=3),
        nn.Conv1d(6, 6, 4, padding="valid", groups=3),
        nn.BatchNorm1d(6, affine=False),
        nn.InstanceNorm1d(6, affine=True),
        nn.GroupNorm(3, 6, affine=False),
        nn.AdaptiveAvgPool1d(3),
        nn.AvgPool1d(3, stride=1, padding=1, count_include_pad=False),
        nn.MaxPool1d(3, stride=2, padding=1, ceil_mode=True),
    ],
    ids=str,
)
def test_layers_between_layers_agree_with_pytorch(layer):
    def build():
        return nn.Sequential(nn.Conv1d(6, 6, 1), nn.Tanh(), layer, nn.Flatten()), (torch.randn(3, 6, 14),)

    assert largest_difference(ortlab.ortmodule, build) <= TOLERANCE


class BothDirections(nn.Module):
    """ONNX Runtime's LSTM and GRU train in the forward direction only."""

    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 3, num_layers=2, bidirectional=True)

    def forward(self, x):
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
@pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size other than 1:UserWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_of_both_directions_agree_with_pytorch(kind):
    assert (
        largest_difference(ortlab.ortmodule, lambda: (BothDirections(kind), (torch.randn(5, 3, 4),)))
        <= TOLERANCE
    )


def test_a_kernel_that_is_a_buffer_agrees_with_pytorch():
    from fault_cases import ConstantKernel

    assert (
        largest_difference(ortlab.ortmodule, lambda: (ConstantKernel(), (torch.randn(2, 6, 9, 9),)))
        <= TOLERANCE
    )


class Strided(nn.Module):
    """A layer whose result is read by its layout in memory."""

    def __init__(self, before, *more):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.before = before
        self.more = more

    def forward(self, x):
        return torch.as_strided(self.before(self.layer(x)), (2, 2), (1, 2), *self.more)


@pytest.mark.parametrize(
    ("before", "more"),
    [
        (lambda h: h, ()),
        (lambda h: h.t().contiguous(), ()),
        (torch.t, ()),
        (lambda h: h[:, :, None].permute(2, 1, 0), (3,)),
    ],
    ids=["as it is", "copied", "transposed", "permuted, from an offset on"],
)
def test_memory_is_read_by_its_layout(before, more):
    """Torch's own export takes each tensor for contiguous."""
    build = lambda: (Strided(before, *more), (torch.randn(3, 4),))  # noqa: E731 - it is one line
    assert largest_difference(ortlab.ortmodule, build) <= TOLERANCE


class Windows(nn.Module):
    """Overlapping windows, as the local attention of Longformer makes them: the strides come from the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        batch, width = h.stride()
        return h.as_strided((h.shape[0] - 1, 2, h.shape[1]), (batch, batch, width)).prod(1)


def test_places_in_memory_are_those_of_each_batch(wrap):
    module = Windows().train()
    reference = copy.deepcopy(module)
    wrap(module)
    for rows in (4, 6):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(module(x), reference(x))


@pytest.mark.parametrize(
    ("before", "more", "reason"),
    [
        (lambda h: h[:, :2], (), "other memory in between"),
        (lambda h: h[:1].expand(3, -1), (), "share memory"),
        (lambda h: h[:1], (3,), "beyond"),
        (lambda h: h[1:], (4,), "storage_offset"),
    ],
)
def test_memory_that_a_graph_does_not_show_is_not_read(before, more, reason):
    with pytest.raises(BuildError) as refusal:
        load().ORTModule(Strided(before, *more))(torch.randn(3, 4))
    assert reason in str(refusal.value)


def test_a_graph_for_inference_stays_plain_onnx():
    ortmodule = load()
    module = nn.Sequential(nn.Conv2d(6, 6, 3, groups=2), nn.BatchNorm2d(6)).eval()
    module[1].running_mean.normal_()
    wrapped, x = ortmodule.ORTModule(module), torch.randn(2, 6, 5, 5)
    torch.testing.assert_close(wrapped(x), module(x))
    exported = wrapped._torch_module._execution_manager(False)._graph_transition_manager._exported_model_info
    assert {node.domain for node in exported.exported_model.graph.node} == {""}


def test_registrations_survive_that_ortmodule_registers_its_own_again():
    ortmodule = load()
    ortmodule.ORTModule(nn.Linear(2, 2))  # registers all symbolics anew
    assert largest_difference(ortmodule, LOUD["softplus"]) <= TOLERANCE
    ortmodule.ORTModule(nn.Linear(2, 2))
    assert largest_difference(ortmodule, LOUD["softplus"]) <= TOLERANCE


def test_installing_twice_changes_nothing():
    from onnxruntime.training.ortmodule._custom_op_symbolic_registry import CustomOpSymbolicRegistry

    load()
    before = dict(CustomOpSymbolicRegistry._SYMBOLICS)
    symbolics.install()
    assert before == CustomOpSymbolicRegistry._SYMBOLICS


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x, rows, columns):
        made = self.layer(x)
        chosen = made[rows, columns] * torch.arange(1.0, 1.0 + rows.shape[0])
        return chosen.sum() + (made.reshape(5, 6, 1)[rows, :, 0 * columns - 1] ** 2).sum()


@pytest.mark.parametrize(("rows", "columns"), [([0, 1, 2], [1, 2, 3]), ([-1, -2, 0], [-1, 3, -6])])
def test_several_indices_may_count_from_the_end(rows, columns):
    torch.manual_seed(4)
    model, x = Indexed(), torch.randn(5, 4)
    first, places = (
        (torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])),
        (torch.tensor(rows), torch.tensor(columns)),
    )
    expected = model(x, *places)
    expected.backward()
    gradient, model.layer.weight.grad = model.layer.weight.grad, None
    lab = ortlab.wrap(model)
    model(x, *first)  # the graph is made of indices that count from the start
    found = model(x, *places)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(model.layer.weight.grad, gradient)
    assert not lab.messages.of(level="WARNING")
    lab.unwrap(forget=True)


# ---- True and False ------------------------------------------------------------------------------------------------

MASKS = {
    "scatter": lambda x, m: torch.zeros_like(m).scatter(1, x.topk(2)[1], True),
    "scatter_": lambda x, m: torch.zeros_like(m).scatter_(1, x.topk(2)[1], value=True),
    "scatter of numbers": lambda x, m: x.scatter(1, m.long(), True),
    "index_fill": lambda _, m: m.index_fill(1, torch.tensor([1, 2]), True),
    "index_fill_": lambda _, m: m.clone().index_fill_(1, torch.tensor([1, 2]), False),
    "masked_fill": lambda x, m: m.masked_fill(x > 1, False),
    "masked_fill_": lambda x, m: m.clone().masked_fill_(x > 1, True),
    "fill_": lambda _, m: m.clone().fill_(True),
    "full_like": lambda _, m: torch.full_like(m, True),
    "new_full": lambda _, m: m.new_full((4,), True),
    "full": lambda _, m: m & torch.full((4,), True),
    "full, by name": lambda _, m: m & torch.full(size=(4,), fill_value=False),
    "full of numbers": lambda *_: torch.full((4,), True, dtype=torch.float) / 2,
    "equal": lambda _, m: m == True,  # noqa: E712
    "not equal": lambda _, m: m.ne(False),
    "less": lambda _, m: m < True,
    "or": lambda _, m: m | True,
    "and": lambda _, m: (m & True) * 2 + (m.long() & True),
    "exclusive or": lambda _, m: m ^ True,
    "where": lambda x, m: torch.where(m, True, x > 1),
    "where of numbers": lambda _, m: torch.where(m, True, m.int()) / 2,
    "where of masks": lambda x, m: torch.where(m, x < 0.5, x < -1),
    "clamp": lambda x, _: x.clamp(min=False),
    "sum of masks": lambda x, m: m + (x > -1),
    "sum with a number": lambda _, m: m.long() + True,
    "largest": lambda _, m: m.max(-1, keepdim=True)[0],
}


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask = mask

    def forward(self, x):
        return self.layer(x) * self.mask(x, x > 0)


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
@pytest.mark.parametrize("name", MASKS)
def test_a_flag_and_a_mask_are_taken_where_pytorch_takes_them(name, wrap):
    """As HY-V4 chooses experts: these ended in an INTERNAL ASSERT of torch, or for want of a kernel for bool."""
    torch.manual_seed(0)
    model = Masked(MASKS[name])
    reference, x = copy.deepcopy(model), torch.randn(5, 4)
    lab = wrap(model)
    found, expected = model(x), reference(x)
    for output in (found, expected):
        output.sum().backward()
    assert lab.status.executed_by == "ort"
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad)


def of_padding(x, padding):
    rows, places = map(torch.arange, padding.shape)
    with TransformGetItemToIndex():
        return torch.vmap(lambda row: torch.vmap(lambda place: padding[row, place])(places))(rows)[..., None]


def of_places(x, _):
    places = torch.arange(x.shape[1])
    mask = torch.vmap(lambda query: torch.vmap(lambda key: query >= key)(places))(places)
    return mask.sum(-1, keepdim=True)


@pytest.mark.parametrize("mask", [of_padding, of_places])
def test_a_mask_that_is_made_with_vmap_is_exported_for_all_sizes(mask, wrap):
    """As T5Gemma2's encoder makes it: torch indexes there in a Function of its own, which has no form after `vmap`."""
    model = Padded(mask)
    reference = copy.deepcopy(model)
    lab = wrap(model)
    for rows, places in ((2, 5), (3, 5), (2, 7)):
        x, padding = torch.randn(rows, places, 4), torch.rand(rows, places) > 0.5
        torch.testing.assert_close(model(x, padding), reference(x, padding))
    assert lab.status.executed_by == "ort"


class Padded(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask = mask

    def forward(self, x, padding):
        return self.layer(x) * self.mask(x, padding)
