"""Forwards that return objects with tensors in them, numbers, complex numbers, and what no input has a part in."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from ortlab.errors import BuildError

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore:The forward returns:UserWarning"),
    pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning"),
]


@dataclass
class Scores:
    values: Tensor
    rows: int
    said: str = "scores"


@dataclass(frozen=True, slots=True)
class Frozen:
    values: Tensor
    flag: bool
    scale: float


class Pair(NamedTuple):
    values: Tensor
    more: Scores


class Holder:
    """Tensors in attributes of every kind, and a class and a number among them."""

    def __init__(self, hidden: Tensor) -> None:
        self.layers = [hidden * 2, (hidden.exp(), None)]
        self.shape = hidden.shape
        self.by_layer = {0: hidden.sin(), "one": {"deep": Scores(hidden.cos(), hidden.shape[0])}}
        self.kind = Scores
        self.dtype = hidden.dtype


RETURNED: dict[str, Any] = {
    "a dataclass": lambda h: Scores(h, h.shape[0]),
    "a frozen dataclass with slots": lambda h: Frozen(h, flag=True, scale=0.5),
    "a simple namespace": lambda h: SimpleNamespace(values=h, more=[h * 2]),
    "a named tuple": lambda h: Pair(h, Scores(h * 2, 3)),
    "a mapping with numbers as keys": lambda h: {0: h, 1: [h * 2]},
    "a defaultdict": lambda h: defaultdict(list, {"a": h}),
    "attributes of every kind": Holder,
    "a distribution": lambda h: Normal(h, h.exp()),
    "a distribution among tensors": lambda h: {"policy": Categorical(logits=h), "value": h.sum(-1)},
    "complex numbers": lambda h: torch.complex(h, h * 2),
    "numbers and constants": lambda h: (h, 5, 5, True, torch.ones(3), torch.tensor([True, False])),
}


class Returning(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.make = make

    def forward(self, x):
        return self.make(self.layer(x))


def leaves(value):
    """Yield what a result consists of: tensors, and everything else with its place."""
    if isinstance(value, Tensor):
        yield torch.view_as_real(value) if value.is_complex() else value
    elif isinstance(value, dict):
        yield type(value)
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        yield type(value)
        for item in value:
            yield from leaves(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield type(value)
        yield from leaves(vars(value))
    elif hasattr(value, "__slots__"):
        yield type(value)
        yield from leaves([getattr(value, name) for name in value.__slots__])
    else:
        yield value


def assert_same(expected, actual):
    """Compare two results part by part, and differentiate both."""
    loss_of = []
    for left, right in zip(leaves(expected), leaves(actual), strict=True):
        if isinstance(left, Tensor):
            torch.testing.assert_close(right, left)
            assert right.requires_grad == left.requires_grad
        else:
            # A number beside the tensors of a result is a tensor in ONNX Runtime's, as it is in ORTModule.
            assert left == (right.item() if isinstance(right, Tensor) else right)
            continue
        if left.requires_grad:
            loss_of.append((left, right))
    for side in zip(*loss_of, strict=True):
        weights = (torch.linspace(1, 2, tensor.numel()).reshape(tensor.shape) for tensor in side)
        sum((tensor * weight).sum() for tensor, weight in zip(side, weights, strict=True)).backward()


@pytest.mark.parametrize("kind", RETURNED)
def test_what_a_forward_returns_comes_back_as_it_is(kind, wrap):
    torch.manual_seed(0)
    model = Returning(RETURNED[kind]).train()
    reference = copy.deepcopy(model)
    lab = wrap(model)
    for rows in (3, 5):  # a number that comes from a size is right for the next batch, too
        x = torch.randn(rows, 6)
        for module in (reference, model):
            module.zero_grad()
        assert_same(reference(x), model(x))
        assert lab.status.executed_by == "ort"
        torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad)


def test_each_step_returns_another_object(wrap):
    model = Returning(Holder).train()
    wrap(model)
    first, second = model(torch.ones(2, 6)), model(torch.zeros(2, 6))
    assert first is not second
    assert not torch.equal(first.layers[0], second.layers[0])


def test_decoders_train_and_return_their_cache(wrap):
    """The default of transformers, with a layer whose cache counts tokens."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        vocab_size=40, sliding_window=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).train()
    assert model.config.use_cache
    reference = copy.deepcopy(model)
    lab = wrap(model)
    for length in (6, 9):
        tokens = torch.randint(3, 40, (2, length))
        for module in (reference, model):
            module.zero_grad()
        expected, actual = (module(input_ids=tokens, labels=tokens) for module in (reference, model))
        expected.loss.backward()
        actual.loss.backward()
        assert lab.status.executed_by == "ort"
        for left, right in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(right.grad, left.grad, rtol=1e-4, atol=1e-6)
        assert type(actual.past_key_values) is type(expected.past_key_values)
        assert actual.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
        for left, right in zip(expected.past_key_values.layers, actual.past_key_values.layers, strict=True):
            torch.testing.assert_close(right.keys, left.keys)
    assert any("use_cache = False" in message.text for message in lab.messages)


class Knot:
    def __init__(self, hidden):
        self.hidden = hidden
        self.itself = self


@pytest.mark.parametrize("make", [Knot, lambda h: (h, iter([h])), lambda h: (h, h.detach().numpy())])
def test_what_cannot_be_taken_apart_is_named(make, wrap):
    lab = wrap(Returning(make).train())
    with pytest.raises(BuildError, match=r"test_outputs.Knot|list_iterator|ndarray"):
        lab.module(torch.ones(2, 6))
