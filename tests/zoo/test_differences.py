"""The rule by which the zoo compares sees what it should see, and forgives rounding only."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import zoo_models as models
from differences import TOLERANCE, Differences

LARGE = torch.tensor([1.0, -2.0, 0.5])


def beyond(expected, actual):
    found = Differences()
    found.compare("gradient", expected, actual)
    return found.beyond()


def test_a_difference_beyond_the_tolerance_is_seen_with_its_tensor():
    assert not beyond({"weight": LARGE}, {"weight": LARGE * (1 + TOLERANCE / 2)})
    assert beyond({"weight": LARGE}, {"weight": LARGE * (1 + 2 * TOLERANCE)}).keys() == {"gradient"}
    assert "weight" in beyond({"weight": LARGE}, {"weight": LARGE * 1.01})["gradient"]


def test_one_wrong_entry_of_many_is_seen():
    many = torch.ones(10_000)
    wrong = many.clone()
    wrong[77] += 3 * TOLERANCE
    assert beyond({"weight": many}, {"weight": wrong})


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_is_never_within(wrong):
    actual = LARGE.clone()
    actual[1] = wrong
    assert beyond({"weight": LARGE}, {"weight": actual})
    found = Differences()
    for value in (actual, LARGE):  # nothing that comes after makes it good
        found.compare("gradient", {"weight": LARGE}, {"weight": value})
    assert found.beyond()


def test_a_tensor_of_a_thousandth_of_the_largest_has_to_be_right_too():
    small = torch.full((4,), 1e-3)
    assert beyond({"weight": LARGE, "bias": small}, {"weight": LARGE, "bias": small * 1.001})
    assert beyond({"weight": LARGE, "bias": small}, {"weight": LARGE, "bias": torch.zeros(4)})


def test_rounding_of_what_is_zero_is_compared_with_the_largest_of_its_kind():
    zero = torch.tensor([1e-9, -2e-9])
    assert not beyond({"weight": LARGE, "bias": zero}, {"weight": LARGE, "bias": -zero})
    assert beyond({"bias": zero}, {"bias": -zero}), "alone, it is the largest"


@pytest.mark.parametrize(
    ("actual", "said"),
    [
        ({}, "only one side"),
        ({"weight": LARGE[:2]}, "another shape"),
        ({"weight": LARGE.double()}, "another dtype"),
    ],
)
def test_what_is_missing_or_of_another_form_is_refused(actual, said):
    with pytest.raises(AssertionError, match=said):
        beyond({"weight": LARGE}, actual)


def test_a_disturbed_weight_is_seen_through_training(wrap):
    """The rule on the real engine: one weight of 2048 is 0.1 % off, and both gradients and loss show it."""
    case = models.Entry(models.mlp, "none").make()
    reference = copy.deepcopy(case.model)
    wrap(case.model)
    with torch.no_grad():
        case.model.body[0].weight[3, 5] *= 1.001
    found = Differences()
    losses = [case.loss(module(**case.batch)) for module in (reference, case.model)]
    for loss in losses:
        loss.backward()
    found.compare("loss", *({"": loss.detach()} for loss in losses))
    found.compare(
        "gradient",
        *({name: one.grad for name, one in module.named_parameters()} for module in (reference, case.model)),
    )
    assert "gradient" in found.beyond()
