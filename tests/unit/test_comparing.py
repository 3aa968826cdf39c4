"""What a run hands over is looked at and written once, and never taken for what it was before."""

from __future__ import annotations

import pytest
import torch

from ortlab.parity.parity import OUTPUT, Site
from ortlab.parity.tensor_comparison import Reference, stored


def site(name, module="part"):
    return Site(1, module, 1, OUTPUT, name)


@pytest.fixture
def store():
    with stored() as made:
        yield made


@pytest.mark.parametrize("copy", [torch.Tensor.detach, torch.Tensor.clone], ids=["the same memory", "a copy"])
def test_equal_tensors_are_written_once(store, copy):
    torch.manual_seed(0)
    values, reference = torch.randn(6, 7), Reference(store)
    reference.take(site("first"), values)
    reference.take(site("second"), copy(values))
    assert store.number_of_bytes == 6 * 7 * 4
    assert store.are_one(site("first"), site("second"))
    assert reference.facts[site("second")] == reference.facts[site("first")]
    assert torch.equal(store.get(site("second")), values)


def test_tensors_that_differ_in_one_number_are_two(store):
    reference = Reference(store)
    reference.take(site("first"), torch.zeros(5))
    reference.take(site("second"), torch.tensor([0.0, 0.0, 0.0, 0.0, 1e-30]))
    assert not store.are_one(site("first"), site("second"))
    assert reference.facts[site("second")].positive == 1


@pytest.mark.parametrize(
    "alias", [torch.Tensor.detach, torch.from_dlpack], ids=["one counter", "two counters"]
)
def test_what_was_written_into_is_looked_at_again(store, alias):
    values, reference = torch.ones(4), Reference(store)
    other = alias(values)  # a tensor that came through DLPack counts its changes for itself
    reference.take(site("first"), values)
    other.add_(1)
    reference.take(site("second"), other)
    assert torch.equal(store.get(site("first")), torch.ones(4))
    assert torch.equal(store.get(site("second")), torch.full((4,), 2.0))
    assert reference.facts[site("second")].mean == 2.0


def test_what_the_model_returned_is_known_until_its_next_step(store):
    reference, logits = Reference(store), torch.arange(12.0)
    reference.take(site("logits", module=""), logits)
    for number in range(20):
        reference.take(site(str(number)), torch.full((12,), float(number)))
    reference.take(site("last"), logits.clone())
    assert store.are_one(site("last"), site("logits", module=""))
    assert store.number_of_bytes == 21 * 12 * 4


def test_a_tensor_of_many_pieces_comes_back_as_it_was(store):
    torch.manual_seed(0)
    large, small = torch.randn(3, 500_001), torch.randn(3)
    store.put(site("small"), small)
    store.put(site("large"), large)
    store.put(site("half"), large[0].half())
    assert torch.equal(store.get(site("large")), large)
    assert torch.equal(store.get(site("small")), small)
    assert torch.equal(store.get(site("half")), large[0].half())
