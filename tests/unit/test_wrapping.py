"""A module keeps its identity while a lab holds its forward."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import WrapError
from ortlab.lab.lab import latest
from ortlab.runs.wrapping import Takeover, is_wrapped


class Doubler(nn.Module):
    """A module with a documented forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        """Scale."""
        return self.linear(x) * scale


@pytest.fixture
def module():
    return Doubler()


def answer(*_):
    return "dispatched"


def test_calls_reach_the_dispatch_and_the_original_stays_at_hand(module):
    seen = []
    takeover = Takeover(module, lambda args, kwargs: seen.append((args, kwargs)) or "dispatched")
    x = torch.ones(1, 2)
    assert module(x, scale=3.0) == module.forward(x, scale=3.0) == "dispatched"
    assert seen == [((x,), {"scale": 3.0})] * 2
    torch.testing.assert_close(takeover.original_forward(x), module.linear(x) * 2)


def test_the_module_looks_as_before(module):
    signature, keys = inspect.signature(module.forward), list(module.state_dict())
    Takeover(module, answer)
    assert isinstance(module, Doubler)
    assert (type(module).__name__, type(module).__module__) == ("Doubler", __name__)
    assert inspect.signature(module.forward) == signature
    assert module.forward.__doc__ == "Scale."
    assert list(module.state_dict()) == keys
    assert repr(module) == repr(Doubler())


def test_a_call_from_inside_the_dispatch_runs_the_original(module):
    x = torch.ones(1, 2)
    Takeover(module, lambda args, kwargs: ("outer", module(*args, **kwargs)))
    who, value = module(x)
    assert who == "outer"
    torch.testing.assert_close(value, module.linear(x) * 2)


def test_copies_and_pickles_are_plain_modules(module):
    Takeover(module, answer)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (
        copy.copy(module),
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),  # noqa: S301 - made on the line
        torch.load(file, weights_only=False),
    ):
        assert type(other) is Doubler
        assert not is_wrapped(other)
        x = torch.ones(1, 2)
        torch.testing.assert_close(other(x), module.linear(x) * 2)
    assert is_wrapped(module)


def test_a_forward_on_the_instance_is_taken_over_and_given_back(module):
    def special(x):
        return x + 1

    module.forward = special
    takeover = Takeover(module, answer)
    assert module(torch.ones(1)) == "dispatched"
    assert takeover.original_forward(1) == 2
    takeover.release()
    assert module.forward is special


def test_a_forward_that_is_put_on_the_instance_later_stays_around_it(module):
    calls = []
    takeover = Takeover(module, lambda *_: module(torch.ones(1, 2)))
    inner = module.forward

    def outer(x):
        calls.append("outer")
        return inner(x)

    module.forward = outer
    torch.testing.assert_close(module(torch.ones(1, 2)), takeover.original_forward(torch.ones(1, 2)))
    assert calls == ["outer"]
    assert module.forward is outer


def test_release_puts_the_class_back_and_can_be_repeated(module):
    takeover = Takeover(module, answer)
    takeover.release()
    takeover.release()
    assert type(module) is Doubler
    assert not is_wrapped(module)
    assert set(vars(module)) == set(vars(Doubler()))


def test_a_taken_over_module_can_be_collected():
    module = Doubler()
    Takeover(module, answer)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_modules_of_one_class_keep_one_class():
    first, second = Doubler(), Doubler()
    Takeover(first, answer)
    Takeover(second, answer)
    assert type(first) is type(second)


def test_a_scripted_module_is_refused():
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(WrapError, match="scripted"):
        Takeover(scripted, answer)


def test_a_lab_without_a_name_lives_as_long_as_its_model():
    model = nn.Linear(2, 2)
    lab = weakref.ref(ortlab.wrap(model))
    gc.collect()
    assert latest() is lab() is not None
    del model
    gc.collect()
    assert lab() is None
