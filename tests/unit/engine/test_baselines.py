"""`torch.compile` with and without an activation memory budget, and the names of all engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch import config
from torch._inductor import config as inductor

import ortlab
from ortlab.errors import BuildError, OptionError
from ortlab.options.configuration import check_engine


class Tower(nn.Module):
    """Matrix products with something cheap to recompute between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x)).sin()
        return x.mean()


def kept_bytes(loss: torch.Tensor) -> int:
    """Count the bytes that a graph keeps for its backward pass, each storage once."""
    found, waiting, seen = {}, [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for tensor in getattr(node, "saved_tensors", ()):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        waiting += [following for following, _ in node.next_functions]
    return sum(found.values())


def test_budgets_keep_less_with_the_same_numbers_and_disturb_nothing_else():
    """One after another on one model and in two labs: no budget is served what was compiled for another one."""
    model, other = Tower(), Tower()
    x = torch.randn(32, 16)
    kept, losses, gradients = {}, {}, {}
    labs = {name: ortlab.wrap(one, engine="compile", name=name) for name, one in (("a", model), ("b", other))}

    def step(name: str, engine: str) -> None:
        lab = labs[name].set(engine=engine)
        lab.module.zero_grad()
        loss = lab.module(x)
        kept[name, engine], losses[name, engine] = kept_bytes(loss), loss.item()
        loss.backward()
        gradients[name, engine] = [p.grad.clone() for p in lab.module.parameters()]
        assert config.activation_memory_budget == 1.0
        assert lab.status.executed_by == engine

    step("a", "compile")
    step("a", "compile:0")
    step("b", "compile")
    step("a", "compile")
    assert kept["a", "compile:0"] < kept["a", "compile"] == kept["b", "compile"]
    assert len(set(losses.values())) == 1
    for found in gradients.values():
        for one, expected in zip(found, gradients["a", "compile"], strict=True):
            torch.testing.assert_close(one, expected)
    for lab in labs.values():
        lab.unwrap()


def test_a_missing_compiler_is_explained_and_the_lab_goes_on(wrap):
    model = Tower()
    lab = wrap(model, engine="compile:0.25")
    x = torch.randn(3, 16)
    with (
        inductor.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
        pytest.raises(BuildError, match=r"needs a C\+\+ compiler(?s:.*)apt-get install"),
    ):
        model(x)
    assert lab.status.state == "not built"
    assert config.activation_memory_budget == 1.0
    lab.set(engine="eager")
    model(x).backward()


def test_a_forward_that_torch_does_not_compile_is_no_run_of_compile(wrap):
    model = Tower()
    wrap(model, engine="compile")
    with torch._dynamo.config.patch(disable=True), pytest.raises(BuildError, match="compiled nothing"):
        model(torch.randn(2, 16))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("eager", "eager"),
        (" compile : 0.50 ", "compile:0.5"),
        ("compile:1", "compile:1"),
        ("compile:1e-2", "compile:0.01"),
        ("checkpoint: a.b + c.* ", "checkpoint:a.b+c.*"),
    ],
)
def test_an_engine_has_one_spelling(given, name):
    assert check_engine(given) == name == check_engine(name)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("compil", "Did you mean 'compile'"),
        ("checkpoints", "Did you mean 'checkpoint'"),
        ("", "There is no engine ''"),
        (None, "There is no engine None"),
        (["ort"], "There is no engine"),
        ("ort:1", "takes nothing after a colon"),
        ("compile:", "'' is no activation memory budget"),
        ("compile:1.1", "share from 0"),
        ("compile:-1", "share from 0"),
        ("compile:nan", "share from 0"),
        ("compile:half", "share from 0"),
        ("checkpoint:", "names no module"),
        ("checkpoint:a++b", "names no module"),
    ],
)
def test_what_is_no_engine_is_refused(given, says):
    with pytest.raises(OptionError, match=says) as refused:
        check_engine(given)
    assert refused.value.fix
