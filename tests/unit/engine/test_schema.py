"""What an export depends on is noticed, and nothing else."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ortlab.engine.schema import call_schema, difference, module_schema, module_state


class Configured(nn.Sequential):
    """A model with attributes of its own and a config, as those of transformers have."""


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Configured(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
    model.temperature, model.doubled, model.config = 1.0, None, SimpleNamespace(output_attentions=False)
    return model


SAME = [
    ({"x": torch.ones(2, 3)}, {"x": torch.zeros(5, 7)}),
    ({"x": [torch.ones(2), None]}, {"x": [torch.zeros(3), None]}),
    ({"flag": True}, {"flag": True}),
]
OTHER = [
    (
        {"x": torch.ones(2)},
        {"x": torch.ones(2, 1)},
        "`input x` changed from float32, 1 dims, cpu to float32, 2 dims",
    ),
    ({"x": torch.ones(2)}, {"x": torch.ones(2).long()}, "to int64"),
    ({"x": torch.ones(2)}, {"x": torch.ones(2, requires_grad=True)}, "requires grad"),
    ({"x": torch.ones(2)}, {"x": torch.ones(2), "y": 1}, "`input y` is new"),
    ({"x": 1, "y": 1}, {"x": 1}, "`input y` is gone"),
    ({"flag": True}, {"flag": 1}, "`input flag` changed from True to 1"),
    ({"mode": "a"}, {"mode": "b"}, "changed from 'a' to 'b'"),
    ({"x": {"a": torch.ones(1)}}, {"x": {"b": torch.ones(1)}}, "`input x.b` is new"),
    ({"x": [torch.ones(1)]}, {"x": [torch.ones(1), torch.ones(1)]}, "`input x[1]` is new"),
]


@pytest.mark.parametrize(("before", "after"), SAME)
def test_sizes_and_values_of_tensors_do_not_matter(before, after):
    assert call_schema((), before) == call_schema((), after)
    assert difference(call_schema((), before), call_schema((), after)) == ""


@pytest.mark.parametrize(("before", "after", "what"), OTHER)
def test_what_a_trace_bakes_in_matters(before, after, what):
    assert what in difference(call_schema((), before), call_schema((), after))


def test_positions_are_told_apart():
    one, two = torch.ones(1), torch.ones(1).long()
    assert difference(call_schema((one, two), {}), call_schema((two, one), {})).startswith(
        "`input[0]` changed"
    )


CHANGES = {
    "a part in eval": lambda model: model[2].eval(),
    "dropout": lambda model: setattr(model[1], "p", 0.5),
    "epsilon": lambda model: setattr(model[2], "eps", 1e-3),
    "a frozen parameter": lambda model: model[0].weight.requires_grad_(requires_grad=False),
    "half precision": lambda model: model.half(),
    "a missing bias": lambda model: setattr(model[0], "bias", None),
    "a tie": lambda model: setattr(model[0], "bias", model[2].bias),
    "a number of one's own": lambda model: setattr(model, "temperature", 0.5),
    "a flag of one's own": lambda model: setattr(model, "doubled", True),
    "a setting": lambda model: setattr(model.config, "output_attentions", True),
    "another part": lambda model: model.append(nn.ReLU()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_module_matter(model, name):
    before, state = module_schema(model), module_state(model)
    CHANGES[name](model)
    assert difference(before, module_schema(model))
    assert module_state(model) != state


def test_training_does_not_change_the_schema(model):
    before, state = module_schema(model), module_state(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert module_schema(model) == before
    assert module_state(model) == state


def test_a_replaced_parameter_is_another_tensor_with_the_same_schema(model):
    before, state = module_schema(model), module_state(model)
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert module_schema(model) == before
    assert module_state(model) != state


def test_a_copy_has_the_same_schema(model):
    assert module_schema(copy.deepcopy(model)) == module_schema(model)
