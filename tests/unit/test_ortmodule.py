"""ORTModule on ortlab's engine: what scripts that were written for 1.19.2's own expect of it."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pickle
import warnings

import pytest
import torch
from torch import nn

import ortlab
from ortlab import ortmodule
from ortlab.errors import BuildError, FallbackWarning, OptionError, WrapError
from ortlab.ortmodule import DebugOptions, LogLevel, ORTModule, load_from_json


class Net(nn.Module):
    """A model with a buffer, an attribute, a frozen layer, and methods of its own around its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 2)
        self.register_buffer("shift", torch.ones(2))
        self.scale = 2.0

    def forward(self, x, *, factor: float = 1.0):
        return self.last(self.frozen(self.first(x)).relu()) * self.scale * factor + self.shift

    def predict(self, x):
        return self(x).argmax(-1)

    def each(self, batches):
        for x in batches:
            yield self.forward(x)

    def itself(self):
        return self


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def only_ort(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")


def train(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def test_a_script_trains_as_in_pytorch(model, x):
    reference = copy.deepcopy(model)
    model = ORTModule(model)
    optimizer, other = (torch.optim.AdamW(one.parameters()) for one in (model, reference))
    for size in (3, 3, 2):
        torch.testing.assert_close(train(model, optimizer, x[:size]), train(reference, other, x[:size]))
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    assert model.lab.status.executed_by == "ort"
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x, factor=3.0), reference.eval()(x, factor=3.0))
    assert model.lab.status.executed_by == "ort"


def test_the_model_itself_goes_on_as_pytorchs(model, x):
    """Scripts check an ORTModule against the model that it was made of."""
    module = ORTModule(model)
    module(x)
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    assert module.module is model
    before = len(calls)
    model(x)
    assert len(calls) == before + 1


def test_names_are_those_of_the_model(model):
    module, plain = ORTModule(model), Net()
    for listed in ("named_parameters", "named_buffers", "named_children", "named_modules", "state_dict"):
        assert list(dict(getattr(module, listed)())) == list(dict(getattr(plain, listed)())), listed
    assert [one for one in module.parameters()] == [one for one in model.parameters()]  # noqa: C416 - of tensors
    assert next(module.modules()) is model
    assert module.get_parameter("first.weight") is model.first.weight
    assert module.get_buffer("shift") is model.shift
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert {"predict", "scale", "first", "lab"} <= set(dir(module))
    assert "(first): Linear" in repr(module)


def test_modes_dtypes_and_registrations_reach_the_model(model):
    module = ORTModule(model)
    assert module.eval() is module
    assert (module.training, model.training, model.first.training) == (False, False, False)
    assert module.train() is module
    assert model.last.training
    model.eval()
    assert not module.training
    assert module.to(torch.float64) is module
    assert model.first.weight.dtype is torch.float64
    assert module.float().requires_grad_(False) is module
    assert not any(one.requires_grad for one in model.parameters())
    module.register_buffer("more", torch.zeros(1))
    module.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    module.add_module("part", nn.Linear(1, 1))
    assert {"more", "weight", "part.bias"} <= set(model.state_dict())
    seen = []
    assert module.apply(seen.append) is module
    assert model.part in seen


def test_attributes_are_those_of_the_model_and_rebuild_it(model, x):
    module = ORTModule(model)
    first = module(x)
    module.scale = 4.0
    assert model.scale == 4.0
    torch.testing.assert_close(module(x) - model.shift, 2 * (first - model.shift))
    module.new = [1]
    assert model.new == [1]
    del module.new
    assert not hasattr(model, "new")
    with pytest.raises(AttributeError, match="nothing"):
        _ = module.nothing


def test_methods_of_the_model_run_its_forward_on_onnx_runtime(model, x):
    module = ORTModule(model)
    reference = copy.deepcopy(model)
    for call in (lambda one: one.predict(x), lambda one: list(one.each([x, -x]))):
        module.lab._bench.executed_by = ""
        torch.testing.assert_close(call(module), call(reference))
        assert module.lab.status.executed_by == "ort"
    assert module.itself() is module


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),  # noqa: S301 - its own
        saved_and_loaded,
    ],
)
def test_a_copy_is_an_ortmodule_of_its_own(model, x, copied):
    module = ORTModule(model)
    module.lab.set(memory_level=1)
    before = module(x)
    other = copied(module)
    assert type(other) is ORTModule
    assert other.lab is not module.lab
    assert other.lab.options == module.lab.options
    torch.testing.assert_close(other(x), before)
    assert other.lab.status.executed_by == "ort"
    with torch.no_grad():
        other.shift.add_(1)
    torch.testing.assert_close(other(x), before + 1)
    torch.testing.assert_close(module(x), before)


class Outer(nn.Module):
    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1


def test_as_a_part_of_another_model(model, x):
    outer, plain = Outer(ORTModule(model)), Outer(copy.deepcopy(model))
    assert list(outer.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in outer.named_parameters()] == [name for name, _ in plain.named_parameters()]
    other = Outer(ORTModule(Net()))
    other.load_state_dict(plain.state_dict())
    torch.testing.assert_close(other(x), plain(x))
    outer.eval()
    assert not model.training


def test_hooks_around_it_are_its_own_and_survive_a_copy(model, x):
    module = ORTModule(model)
    handle = module.register_forward_hook(Doubling())
    torch.testing.assert_close(module(x), 2 * model(x))
    torch.testing.assert_close(copy.deepcopy(module)(x), 2 * model(x))
    handle.remove()
    torch.testing.assert_close(module(x), model(x))


class Doubling:
    def __call__(self, module, inputs, output):
        assert type(module) is ORTModule
        return output * 2


def test_steps_of_the_lab_call_it(model, x):
    module = ORTModule(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = module.lab.step(lambda: train(module, optimizer, x), n=2)
    assert run.executed_by == "ort"


class Scored(Net):
    def forward(self, x):
        return super().forward(x).square().mean()


def test_a_step_that_ortlab_takes_itself_is_one_of_the_ortmodule(x):
    module = ORTModule(Scored())
    found = module.lab.find_batch_size(
        lambda size: (torch.randn(size, 4),), "4 GiB", sizes=[2, 4], plans=[], n=1, progress=False
    )
    assert [(point.size, point.fits) for point in found.points] == [(2, True), (4, True)]


def test_two_of_one_model_share_its_lab(model, x):
    one = ORTModule(model)
    other = ORTModule(model)
    assert other.lab is one.lab
    torch.testing.assert_close(other(x), one(x))
    one.lab.unwrap()
    again = ORTModule(model)
    assert again.lab is not one.lab
    torch.testing.assert_close(again(x), model(x))


def test_what_cannot_be_wrapped_is_refused(model):
    module = ORTModule(model)
    with pytest.raises(WrapError, match="in another"):
        ORTModule(module)
    with pytest.raises(WrapError, match="wrapped already"):
        ortlab.wrap(module)
    with pytest.raises(WrapError, match="wrapped already"):
        ortlab.wrap(model)
    with pytest.raises(WrapError, match="cannot be wrapped"):
        ORTModule("model")
    with pytest.raises(WrapError, match="DataParallel"):
        module._replicate_for_data_parallel()


def test_names_that_it_hides_are_said(model):
    model.lab = "the laboratory of the model"
    with pytest.warns(UserWarning, match=r"lab of Net is behind ORTModule's own: ort_model\.module\.lab"):
        module = ORTModule(model)
    assert module.module.lab == "the laboratory of the model"


# --- options ----------------------------------------------------------------------------------------------------------


def test_debug_options_are_ortmodules_own(model, x, tmp_path, monkeypatch):
    monkeypatch.delenv("ORTMODULE_SAVE_ONNX_PATH", raising=False)
    debug = DebugOptions(log_level=LogLevel.INFO, save_onnx=True, onnx_prefix="net", save_path=str(tmp_path))
    module = ORTModule(model, debug)
    module(x)
    assert module.lab.options.log_level == "INFO"
    assert {path.name.partition("_")[0] for path in tmp_path.glob("*.onnx")} == {"net"}
    with pytest.raises(ValueError, match="onnx_prefix must be provided"):
        DebugOptions(save_onnx=True)
    with pytest.raises(TypeError, match="LogLevel"):
        DebugOptions(log_level="INFO")


def test_variables_of_the_environment_act(model, monkeypatch):
    monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "ERROR")
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    module = ORTModule(model, DebugOptions(log_level=LogLevel.INFO))
    assert (module.lab.options.log_level, module.lab.options.memory_level) == ("ERROR", 1)


JSON = {
    "OnnxOpsetVersion": 16,
    "UseStaticShape": True,
    "FallbackPolicy": ["FALLBACK_DISABLE"],
    "DebugOptions": {"LogLevel": "ERROR"},
}


def test_the_json_configuration_acts_by_its_variable_and_by_its_function(model, tmp_path, monkeypatch):
    file = tmp_path / "ortmodule_config.json"
    file.write_text(json.dumps(JSON), encoding="utf-8")
    expected = (16, True, False, "ERROR")
    by_function = ORTModule(Net())
    with pytest.raises(OptionError, match="No JSON"):
        load_from_json(by_function)
    load_from_json(by_function, file)
    monkeypatch.setenv("ORTMODULE_JSON_CONFIG_PATH", str(file))
    for module in (by_function, ORTModule(model)):
        options = module.lab.options
        assert (options.opset, options.static_shape, options.fallback, options.log_level) == expected


def test_the_opset_is_a_name_of_the_module(model, monkeypatch):
    monkeypatch.setattr(ortmodule, "ONNX_OPSET_VERSION", 16)
    assert ORTModule(model).lab.options.opset == 16


class Branching(Net):
    def forward(self, x):
        return super().forward(x) * (1.0 if torch.rand([]) < 2 else 2.0)


def test_pytorch_steps_in_and_says_so(x):
    module = ORTModule(Branching())
    with pytest.warns(FallbackWarning, match="A random number that Python reads"):
        output = module(x)
    torch.testing.assert_close(output, module.module(x))
    assert module.lab.status.state == "fallback"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x)


@pytest.mark.usefixtures("only_ort")
def test_pytorch_does_not_step_in_where_a_variable_forbids_it(x):
    with pytest.raises(BuildError, match="A random number that Python reads"):
        ORTModule(Branching())(x)
