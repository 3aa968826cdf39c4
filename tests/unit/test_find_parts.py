"""What `only` means: paths, patterns and modules; and what is said where it means nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import WrapError
from ortlab.runs.parts import find_parts, near_paths
from ortlab.runs.wrapping import is_wrapped


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        self.same = self.encoder.layer[0]
        self.scale = nn.Parameter(torch.ones(2))
        self.constants = nn.ParameterList([torch.ones(2)])

    def forward(self, x):
        return x


@pytest.fixture
def model():
    return Model()


LAYERS = ["encoder.layer.0", "encoder.layer.1", "encoder.layer.2"]


@pytest.mark.parametrize(
    ("only", "paths"),
    [
        ("heads.a", ["heads.a"]),
        (["heads.b", "encoder.layer.1"], ["encoder.layer.1", "heads.b"]),  # in the order of the model
        (("heads.a", "heads.a", "heads.*"), ["heads.a", "heads.b"]),
        ("encoder.layer.*", LAYERS),  # and not encoder.layer.1.0, which a star does not reach
        ("encoder.layer.[02]", ["encoder.layer.0", "encoder.layer.2"]),
        ("encoder.layer", LAYERS),  # containers without a forward stand for what they hold
        ("encoder", LAYERS),
        (["encoder.layer.0", "same"], ["encoder.layer.0"]),  # one module under two names
        (("encoder.layer.1.0" for _ in range(1)), ["encoder.layer.1.0"]),
    ],
)
def test_parts_are_found(model, only, paths):
    found = find_parts(model, only)
    assert list(found) == paths
    assert all(found[path] is model.get_submodule(path) for path in paths)


def test_modules_are_found(model):
    assert list(find_parts(model, model.heads["b"])) == ["heads.b"]
    assert list(find_parts(model, [model.heads["b"], "encoder.layer.0"])) == ["encoder.layer.0", "heads.b"]


@pytest.mark.parametrize(
    ("only", "words"),
    [
        ([], "There is no part in the list."),
        (3, "`only` takes paths of sub-modules, not a int."),
        ([3], "`only` takes paths of sub-modules, not a int."),
        ("", "The model itself is not a part of it."),
        ("*.nothing", "The model has no part '*.nothing'."),
        ("encoder.layer.7", "Did you mean 'encoder.layer."),
        ("layer.1", "Did you mean 'encoder.layer.1'"),
        ("encodr.layer.2", "Did you mean 'encoder.layer.2'"),
        ("quite.else", "[name for name, _ in model.named_modules()]"),
        ("scale", "It is a Parameter, which has no forward"),
        ("forward", "It is a method, which has no forward"),
        ("constants", "'constants' is a ParameterList without a forward."),
        (["encoder.layer.1", "encoder.layer.1.0"], "'encoder.layer.1.0' is a part of 'encoder.layer.1'."),
        (nn.Linear(2, 2), "The Linear in `only` is not a part of this Model."),
    ],
)
def test_what_is_no_part_is_refused_and_nothing_is_wrapped(model, only, words):
    with pytest.raises(WrapError) as caught:
        ortlab.wrap(model, only=only)
    assert words in str(caught.value)
    assert not any(is_wrapped(part) for part in model.modules())


def test_a_part_that_another_lab_holds_is_refused_and_the_others_are_given_back(model, wrap):
    wrap(model.heads["b"])
    with pytest.raises(WrapError, match="This Linear is wrapped already"):
        ortlab.wrap(model, only=["encoder.layer.0", "heads.b"])
    assert not is_wrapped(model)
    assert not is_wrapped(model.encoder.layer[0])
    assert is_wrapped(model.heads["b"])


def test_paths_that_end_alike_are_near():
    known = ["", "bert", "bert.encoder", "bert.pooler", "cls"]
    assert near_paths("encoder", known) == ["bert.encoder"]
    assert near_paths("bert.encodr", known)[0] == "bert.encoder"
    assert near_paths("zebra", known) == []
