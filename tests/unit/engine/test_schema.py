"""What an export depends on is noticed, and nothing else."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ortlab.engine import schema
from ortlab.engine.operators import compiled_calls
from ortlab.engine.schema import Entries, ModuleReader, call_schema, difference, module_schema


class Configured(nn.Sequential):
    """A model with attributes of its own and a config, as those of transformers have."""

    def halved(self, x):
        return x / 2


def scaled_by(factor):
    def forward(x):
        return x * factor

    return forward


def counted(model, name):
    """Return the closure's cell of a function that is an attribute."""
    return getattr(model, name).__closure__[0]


@pytest.fixture(autouse=True)
def class_as_it_was():
    method = Configured.halved
    yield
    Configured.halved = method


@pytest.fixture(params=["in Python", "compiled"])
def way(request, ortmodule, monkeypatch):
    """Compare the entries of dicts in either way."""
    assert compiled_calls.lacking() == ""
    if request.param == "in Python":
        monkeypatch.setattr(compiled_calls._Connected, "with_lock", None)


@pytest.fixture
def model(way):
    torch.manual_seed(0)
    model = Configured(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
    model.temperature, model.doubled = 1.0, None
    model.config = SimpleNamespace(output_attentions=False, sizes=[1, 2])
    model.offset, model.widths, model.scaled = torch.zeros(2), {"a": [1, 2]}, scaled_by(2)
    model.append(nn.Tanh())
    model[0].register_buffer("angles", torch.ones(3), persistent=False)
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
    "another object of settings": lambda model: setattr(model, "config", SimpleNamespace(sizes=[1])),
    "True in a list in place of 1": lambda model: model.config.sizes.__setitem__(0, True),
    "another table of attributes": lambda model: setattr(
        model[1], "__dict__", {**vars(model[1]), "training": False}
    ),
    "a number under another name": lambda model: vars(model).__setitem__(
        "heat", vars(model).pop("temperature")
    ),
    "a setting in a list": lambda model: model.config.sizes.append(3),
    "another part": lambda model: model.append(nn.ReLU()),
    "a part of another class": lambda model: model.__setitem__(3, nn.Sigmoid()),
    "a forward put on a part": lambda model: setattr(model[3], "forward", torch.sin),
    "a hook on a part": lambda model: model[0].register_forward_hook(lambda *_: None),
    "a tensor of one's own": lambda model: setattr(model, "offset", torch.ones(2)),
    "a tensor written to": lambda model: model.offset.add_(1),
    "a number in a dict in a list": lambda model: model.widths["a"].append(3),
    "a function": lambda model: setattr(model, "scaled", torch.relu),
    "what a function closes over": lambda model: setattr(counted(model, "scaled"), "cell_contents", 3),
    "a method of the class": lambda _: setattr(Configured, "halved", lambda _self, x: x / 3),
    "a buffer that is a constant": lambda model: model[0].angles.mul_(2),
    "a shape": lambda model: setattr(model[0].weight, "data", torch.zeros(5, 4)),
    "an attribute that was not there": lambda model: setattr(model[3], "power", 2),
    "True in place of 1": lambda model: setattr(model, "temperature", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_the_module_matter(model, name):
    reader = ModuleReader(model)
    before, state = module_schema(model), reader.state()
    assert reader.state() == state
    CHANGES[name](model)
    assert difference(before, module_schema(model))
    assert reader.state() != state


def test_an_untouched_module_is_not_read_again(model, monkeypatch):
    reader = ModuleReader(model)
    state = reader.state()
    model(torch.randn(3, 4)).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(schema, "_constant_names", None)
        assert reader.state() is state
    model.eval().train()
    model[1].p = float(str(model[1].p))
    assert reader.state() is state


def test_an_interrupt_while_it_is_read_hides_no_change(model, monkeypatch):
    reader = ModuleReader(model)
    state = reader.state()
    model.temperature = 0.5

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(schema.baked_in, "states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.state()
    assert reader.state() != state


def test_a_forward_of_the_object_matters(model):
    one, two = (module_schema(model, [scaled_by(factor)]) for factor in (1, 2))
    assert difference(one, two) == "the forward of this module changed"
    assert ModuleReader(model, [scaled_by(1)]).state() != ModuleReader(model, [scaled_by(2)]).state()


def test_long_tables_are_not_read_through(model):
    model.config.label2id = {str(number): number for number in range(1000)}
    reader = ModuleReader(model)
    state = reader.state()
    assert reader.state() == state
    model.config.label2id["another"] = 1000
    assert reader.state() != state


def test_parts_that_were_taken_out_are_let_go(model):
    reader = ModuleReader(model)
    reader.state()
    part = weakref.ref(model[3])
    model[3] = nn.Identity()
    state = reader.state()
    gc.collect()
    assert part() is None
    assert reader.state() == state


def test_training_does_not_change_the_schema(model):
    before, state = module_schema(model), ModuleReader(model).state()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert module_schema(model) == before
    assert ModuleReader(model).state() == state


def test_a_replaced_parameter_is_another_tensor_with_the_same_schema(model):
    before, state = module_schema(model), ModuleReader(model).state()
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert module_schema(model) == before
    assert ModuleReader(model).state() != state


def test_a_copy_has_the_same_schema(model):
    assert module_schema(copy.deepcopy(model)) == module_schema(model)


class Body:
    number = 1


ENTRIES = {
    "a value": lambda table: table.update(b=object()),
    "a key more": lambda table: table.update(d=0),
    "a key less": lambda table: table.pop("c"),
    "the last key, with its value": lambda table: table.update(d=table.pop("c")),
    "the order": lambda table: table.update(a=table.pop("a")),
    "none left": lambda table: table.clear(),
    "an equal value of another type": lambda table: table.update(b=True),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.usefixtures("way")
def test_entries_are_compared_by_place_key_and_object(name):
    tables = [{}, {"a": None, "b": 1, "c": "x"}, OrderedDict(z=1)]
    entries = Entries(tables)
    assert entries.are_the_same()
    ENTRIES[name](tables[1])
    assert not entries.are_the_same()


@pytest.mark.usefixtures("way")
def test_entries_of_empty_dicts_and_of_classes_are_compared(monkeypatch):
    empty = {}
    entries = Entries([empty, vars(Body)])
    assert entries.are_the_same()
    empty["a"] = 1
    assert not entries.are_the_same()
    empty.clear()
    assert entries.are_the_same()
    monkeypatch.setattr(Body, "number", 2)
    assert not entries.are_the_same()
    assert Entries([]).are_the_same()
