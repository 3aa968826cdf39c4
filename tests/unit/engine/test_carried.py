"""What a forward reads in Python is looked at in each step; what it carries from call to call there is refused."""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import ortlab
from ortlab.engine.schema import ModuleReader, module_schema
from ortlab.errors import BuildError

pytestmark = pytest.mark.usefixtures("no_fallback")

LOUD = False
CALLS = 0


class Mode(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Settings:
    scale = 1.0

    def __init__(self):
        self.factor, self.deep = 1.0, SimpleNamespace(on=False)
        self.steps_done = 0  # no forward reads it
        self.factor_1 = 1.0

    @property
    def twice(self):
        return 2 * self.factor

    def of(self, number):
        return getattr(self, f"factor_{number}")


class Slotted:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


def louder(h):
    return h * (3 if LOUD else 1)


def imports(_, h):
    import rarely_used

    return h * rarely_used.factor


def imports_a_function(_, h):
    from rarely_used import louder

    return louder(h)


class Reading(nn.Module):
    """Computes with what `read` gets of it in Python."""

    scale = 1.0

    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read
        self.cfg, self.slotted, self.mode = Settings(), Slotted(), Mode.ONE
        self.table, self.number = np.ones(4, np.float32), np.float32(1)
        self.names, self.many, self.held = OrderedDict(a=1.0), [1.0] * 100, [Settings()]
        self.weights = torch.ones(4)

    def forward(self, x):
        return self.read(self, self.layer(x))


def set_global(_):
    global LOUD  # noqa: PLW0603 - what is tested
    LOUD = True


def put_imported(_):
    sys.modules["rarely_used"].factor = 3.0


def put(path, value):
    def change(model):
        *owners, name = path.split(".")
        for one in owners:
            model = getattr(model, one)
        setattr(model, name, value)

    return change


READ = {
    "an attribute of an object": (lambda m, h: h * m.cfg.factor, put("cfg.factor", 3.0)),
    "a property of an object": (lambda m, h: h * m.cfg.twice, put("cfg.factor", 3.0)),
    "an object in an object": (lambda m, h: h * (3 if m.cfg.deep.on else 1), put("cfg.deep.on", True)),
    "another object": (lambda m, h: h * m.cfg.deep.on, put("cfg.deep", SimpleNamespace(on=True))),
    "an object in a list": (lambda m, h: h * m.held[0].factor, lambda m: put("factor", 3.0)(m.held[0])),
    "a slot": (lambda m, h: h * m.slotted.factor, put("slotted.factor", 3.0)),
    "an attribute of its class": (lambda m, h: h * m.scale, lambda _: put("scale", 3.0)(Reading)),
    "an attribute of an object's class": (
        lambda m, h: h * m.cfg.scale,
        lambda _: put("scale", 3.0)(Settings),
    ),
    "an array written to": (lambda m, h: h * torch.from_numpy(m.table), lambda m: m.table.__imul__(3)),
    "a number of an array": (lambda m, h: h * float(m.table[0]), lambda m: m.table.__setitem__(0, 3)),
    "a number of numpy": (lambda m, h: h * float(m.number), put("number", np.float32(3))),
    "a global": (lambda _, h: h * (3 if LOUD else 1), set_global),
    "a global in a function": (lambda _, h: louder(h), set_global),
    "an enumeration": (lambda m, h: h * m.mode.value, put("mode", Mode.TWO)),
    "an ordered dict": (lambda m, h: h * m.names["a"], lambda m: m.names.update(a=3.0)),
    "a long list": (lambda m, h: h * m.many[70], lambda m: m.many.__setitem__(70, 3.0)),
    "a name that is computed": (lambda m, h: h * getattr(m.cfg, f"factor_{1}"), put("cfg.factor_1", 3.0)),
    "a variable as a name": (
        lambda m, h: h * sum(getattr(m.cfg, one) for one in ("factor_1",)),
        put("cfg.factor_1", 3.0),
    ),
    "a name that a method computes": (lambda m, h: h * m.cfg.of(1), put("cfg.factor_1", 3.0)),
    "a module imported in the forward": (imports, put_imported),
    "a function imported in the forward": (imports_a_function, put_imported),
    "a tensor written to through .data": (lambda m, h: h * m.weights, lambda m: m.weights.data.mul_(3)),
}


@pytest.fixture(autouse=True)
def as_before():
    global LOUD, CALLS
    yield
    LOUD, CALLS, Reading.scale, Settings.scale = False, 0, 1.0, 1.0


@pytest.fixture
def rarely_used(tmp_path, monkeypatch):
    """A module of the user's that nothing has imported yet."""
    (tmp_path / "rarely_used.py").write_text("factor = 1.0\n\ndef louder(h):\n    return h * factor\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("rarely_used", None)


@pytest.mark.usefixtures("rarely_used")
@pytest.mark.parametrize("name", READ)
def test_what_a_forward_reads_is_noticed(name):
    read, change = READ[name]
    model = Reading(read)
    read(model, torch.ones(4))
    reader = ModuleReader(model)
    before, state = module_schema(model), reader.state()
    assert reader.state() == state
    change(model)
    assert reader.state() != state
    assert module_schema(model) != before


@pytest.mark.usefixtures("rarely_used")
@pytest.mark.parametrize(
    "name",
    [
        "an object in an object",
        "a global in a function",
        "a number of an array",
        "an attribute of its class",
        "a name that is computed",
        "a module imported in the forward",
    ],
)
def test_the_next_step_computes_with_it(name, wrap):
    read, change = READ[name]
    model, x = Reading(read), torch.randn(3, 4)
    lab = wrap(model)
    first = model(x).detach()
    change(model)
    second = model(x).detach()
    said = [one.text for one in lab.messages if "Built anew" in one.text]
    assert lab.status.executed_by == "ort"
    assert torch.allclose(second, 3 * first, rtol=1e-5)
    assert len(said) == 1


def test_what_no_forward_reads_may_change():
    model = Reading(lambda m, h: h * m.cfg.factor)
    reader = ModuleReader(model)
    before, state = module_schema(model), reader.state()
    model.cfg.steps_done += 1
    model.cfg.another = 3
    globals()["a name that no forward has"] = 3
    reader.state()
    assert module_schema(model) == before
    del globals()["a name that no forward has"], model.cfg.another
    assert reader.state() == state


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.cfg, self.hidden = nn.Linear(4, 4), 0, SimpleNamespace(rate=1.0), None
        self.ready = False


class ByAttribute(Counting):
    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


class ByObject(Counting):
    def forward(self, x):
        self.cfg.rate *= 0.5
        return self.layer(x) * self.cfg.rate


class ByGlobal(Counting):
    def forward(self, x):
        global CALLS  # noqa: PLW0603 - what is tested
        CALLS += 1
        return self.layer(x) * CALLS


class ByTensor(Counting):
    def forward(self, x):
        before = torch.zeros(4) if self.hidden is None else self.hidden
        after = self.layer(x) + before
        self.hidden = after.detach().mean(0)
        return after


class ByFirstCall(Counting):
    def forward(self, x):
        if not self.ready:
            self.ready = True
            return self.layer(x) * 0.5
        return self.layer(x)


class ByWriting(Counting):
    """Returns the same in each call, and writes to its argument from the second one on."""

    def forward(self, x):
        y = self.layer(x)
        if self.ready:
            x.zero_()
        self.ready = True
        return y


@pytest.mark.parametrize("kind", [ByAttribute, ByObject, ByGlobal, ByTensor, ByFirstCall, ByWriting])
def test_what_it_carries_on_is_refused_and_stays_as_it_was(kind):
    model = kind()
    lab = ortlab.wrap(model)
    with pytest.raises(BuildError, match=r"in every call, and uses it|than later ones"):
        model(torch.randn(3, 4))
    lab.unwrap()
    assert (model.calls, model.cfg.rate, model.hidden, model.ready, CALLS) == (0, 1.0, None, False, 0)


def test_a_first_call_in_pytorch_is_the_way_out(wrap):
    model, x = ByFirstCall(), torch.randn(3, 4)
    lab = wrap(model, engine="eager")
    model(x)
    expected = model(x)
    lab.set(engine="ort")
    assert torch.allclose(model(x), expected, atol=1e-6)


class Noting(Counting):
    """Keeps what others look at, and a mask for the next call."""

    def forward(self, x):
        self.calls += 1
        if self.hidden is None or self.hidden.shape != x.shape[1:]:
            self.hidden = torch.ones(x.shape[1:]).cumsum(0)
        self.attention = torch.softmax(self.layer(x), -1)
        return self.attention * self.hidden


def test_what_is_only_kept_is_no_obstacle_and_a_count_that_stops_is_said(wrap):
    model, x = Noting(), torch.randn(3, 4)
    expected = Noting()
    expected.load_state_dict(model.state_dict())
    lab = wrap(model)
    outputs = [model(x) for _ in range(2)]
    said = [one.text for one in lab.messages if "self.calls" in one.text]
    assert all(torch.allclose(one, expected(x), atol=1e-6) for one in outputs)
    assert len(said) == 1


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(_, x):
        Counted.calls += 1
        return 2 * x

    @staticmethod
    def backward(_, gradient):
        return 2 * gradient


class CallsCounted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return Counted.apply(self.layer(x)).sum()


def test_what_a_function_counts_builds_nothing_anew(wrap):
    model = CallsCounted()
    wrap(model)
    model(torch.ones(2, 4)).backward()
    before = Counted.calls
    for _ in range(3):
        model(torch.ones(2, 4)).backward()
    assert Counted.calls == before + 3  # it runs in each step, and only there
