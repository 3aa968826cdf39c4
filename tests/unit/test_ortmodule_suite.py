"""What ORTModule's own tests demand of calls, results, gradients and operators; `docs/ortmodule.md` has the list."""

from __future__ import annotations

import copy
import random
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from ortlab.errors import BuildError, ExecutionError, FallbackWarning
from ortlab.ortmodule import DebugOptions, LogLevel, ORTModule

pytestmark = pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")


@pytest.fixture(autouse=True)
def only_ort(monkeypatch):
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    torch.manual_seed(0)


class Pair:
    """A model, and an ORTModule of a copy, which get the same calls."""

    def __init__(self, model):
        self.plain = model
        self.ort = ORTModule(copy.deepcopy(model))

    def both(self, call):
        """Return what a call gives with the model, and with the ORTModule."""
        expected = call(self.plain)
        self.ort.lab._bench.executed_by = ""
        actual = call(self.ort)
        assert self.ort.lab.status.executed_by == "ort"
        return expected, actual

    def check(self, *arguments, **more):
        """Call both with tensors of their own; compare results, and gradients where there are some."""
        given = [copied((arguments, more)) for _ in range(2)]
        sides = iter(given)

        def call(model):
            args, kwargs = next(sides)
            return model(*args, **kwargs)

        expected, actual = self.both(call)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        for result in (expected, actual):
            trained = [one for one in tensors_in(result) if one.requires_grad]
            if trained:
                sum(one.sum() for one in trained).backward()
        for one, other in zip(*map(tensors_in, given), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5)
        self.compare_gradients()

    def compare_gradients(self):
        for (name, one), (_, other) in zip(
            self.plain.named_parameters(), self.ort.named_parameters(), strict=True
        ):
            torch.testing.assert_close(
                other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
            one.grad = other.grad = None


def copied(value):
    """Copy a call, with tensors that have no past."""
    if isinstance(value, torch.Tensor):
        return value.detach().as_strided(value.shape, value.stride()).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else value


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return (
        [one for part in value for one in tensors_in(part)]
        if not isinstance(value, (str, int, float, type(None)))
        else []
    )


# --- calls ------------------------------------------------------------------------------------------------------------


class Taking(nn.Module):
    """Takes what a call may have, and computes something else for each."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, x, y=None, *more, z=None, flag=True, count=1, scale=1.0, word="plain", batch=None, **named
    ):
        x = self.layer(x) * scale + count
        x = x.relu() if flag else x
        x = x * 2 if word.lower() == "double" else x
        for one in (y, z, *more, *named.values()):
            x = x if one is None else x * one
        if isinstance(batch, dict):
            x = x + batch["one"] + batch["more"]["two"] + batch["more"]["list"][1]
        elif batch is not None:
            x = x + batch[1] + (0 if batch[0] is None else batch[0])
        return x


def a(*shape):
    return torch.rand(*(shape or (3, 4))) + 0.5


CALLS = {
    "by position, by name, in any order": [
        lambda m, x, y: m(x, y),
        lambda m, x, y: m(y=y, x=x),
        lambda m, x, y: m(x, None, z=y),
        lambda m, x, y: m(z=y, x=x, y=None),
        lambda m, x, _: m(x),
    ],
    "more or fewer of them": [
        lambda m, x, y: m(x, y, x, y),
        lambda m, x, y: m(x, y, x),
        lambda m, x, y: m(x, named=y),
        lambda m, x, y: m(x, other=y, named=x),
        lambda m, x, y: m(x, y, x, z=y, named=x),
    ],
    "numbers and text": [
        lambda m, x, _: m(x, flag=False),
        lambda m, x, _: m(x, flag=True, count=-100000),
        lambda m, x, _: m(x, scale=-1.23e4),
        lambda m, x, _: m(x, scale=2.5, count=7),
        lambda m, x, _: m(x, word="double"),
    ],
    "containers": [
        lambda m, x, y: m(x, batch=[x, y]),
        lambda m, x, y: m(x, batch=(None, y)),
        lambda m, x, y: m(x, batch={"one": x, "more": {"two": y, "list": [y, x]}, "unused": y}),
        lambda m, x, y: m(x, batch={"one": x, "more": {"two": y, "list": (None, x)}, "unused": None}),
    ],
    "memory in another order": [
        lambda m, x, _: m(x.t().contiguous().t()),
        lambda m, x, y: m(x[:, [0, 0, 1, 1]], y.expand(2, 3, 4)[0]),
    ],
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_call(kind):
    """Each form twice and in turn: the graph is that of the form, also when one comes back."""
    pair = Pair(Taking())
    for call in [*CALLS[kind], CALLS[kind][0]]:
        for _ in range(2):
            x, y = a(), a()
            expected, actual = pair.both(lambda model, form=call, x=x, y=y: form(model, x, y))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            expected.sum().backward()
            actual.sum().backward()
            pair.compare_gradients()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float64])
def test_tensors_of_other_types_go_in_and_out(dtype):
    class Choosing(nn.Linear):
        def forward(self, mask, x, y):
            z = super().forward(torch.where(mask == 1, x, y)).relu()
            return z, (z * 3).to(dtype), mask

    pair = Pair(Choosing(4, 4))
    pair.check(torch.randint(0, 2, (3, 4)).to(dtype), a(), a())


# --- results ----------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    loss: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


RESULTS = {
    "twice the same tensor": lambda _, h, __: (h, h),
    "an argument handed through": lambda _, h, x: (h, x),
    "what has no gradient between": lambda _, h, __: (h, (h > 0).long(), h.exp(), h.argmax(-1)),
    "nothing among them": lambda _, h, __: {"out": h, "none": None},
    "nested": lambda _, h, __: {"a": {"b": h}, "c": (h * 2, [h * 3])},
    "a named tuple": lambda _, h, __: Named(h.sum(), (h, h * 2)),
    "many, in their order": lambda _, h, __: tuple(h * i for i in range(12)),
    "a copy by torch.tensor": lambda _, h, __: (h, torch.tensor(h), torch.tensor(h * 9, dtype=torch.uint8)),
    "others in evaluation": lambda m, h, __: (h, h * 2) if m.training else h,
}


class Giving(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.layer, self.drop, self.unused, self.give = (
            nn.Linear(4, 4),
            nn.Dropout(0.0),
            nn.Linear(4, 4),
            give,
        )

    def forward(self, x):
        return self.give(self, self.drop(self.layer(x)), x)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning")
@pytest.mark.parametrize("kind", RESULTS)
def test_a_result(kind):
    pair = Pair(Giving(RESULTS[kind]))
    for mode in (True, False, True):
        pair.plain.train(mode)
        pair.ort.train(mode)
        for size in (3, 2):
            pair.check(a(size, 4))
            pair.check(a(size, 4).requires_grad_())


def test_a_loss_of_some_results_has_the_gradients_of_these():
    pair = Pair(Giving(lambda m, h, x: (h.softmax(-1), m.unused(x).relu())))
    for which in (0, 1):
        x = a()
        expected, actual = pair.both(lambda model, x=x, which=which: model(x)[which])
        torch.testing.assert_close(actual, expected)
        expected.sum().backward()
        actual.sum().backward()
        for one, other in zip(pair.plain.parameters(), pair.ort.parameters(), strict=True):
            assert (one.grad is None) == (
                other.grad is None
            )  # 1.19.2 makes zeros where the loss leads to nothing
            torch.testing.assert_close(other.grad, one.grad)
            one.grad = other.grad = None


def test_a_result_that_is_written_to_before_the_backward_is_refused_as_in_pytorch():
    pair = Pair(Giving(lambda _, h, __: h.softmax(-1)))
    for model, error, said in (
        (pair.plain, RuntimeError, "modified by an inplace operation"),
        (pair.ort, ExecutionError, "Written to between a forward pass and its backward: an output"),
    ):
        result = model(a().requires_grad_())
        result.add_(1)
        with pytest.raises(error, match=said):
            result.sum().backward()


# --- gradients and modes ----------------------------------------------------------------------------------------------


def test_gradients_are_asked_for_and_not():
    """Of arguments and of weights, from one call to the next; what a frozen weight has stays."""
    pair = Pair(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    for wanted, trained in ((False, True), (True, True), (True, False), (False, True)):
        for model in (pair.plain, pair.ort):
            model.get_submodule("0").requires_grad_(trained)
        pair.check(a().requires_grad_(wanted))


@pytest.mark.parametrize("first", [0, 1])
def test_two_forwards_then_their_backwards_in_either_order(first):
    pair = Pair(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    batches = [a().requires_grad_(), a(5, 4).requires_grad_()]
    expected, actual = pair.both(lambda model: [model(x) for x in batches])
    for results in (expected, actual):
        torch.testing.assert_close(results, expected)
        for which in (first, 1 - first):
            (results[which] ** 2).sum().backward()
        gradients = [x.grad for x in batches]
        for x in batches:
            x.grad = None
        if results is expected:
            wanted = gradients
    torch.testing.assert_close(gradients, wanted)
    pair.compare_gradients()


def test_several_in_a_row_around_a_common_part_and_beside_others():
    common, one, other, plain = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def train(wrap):
        parts = [wrap(copy.deepcopy(part)) for part in (common, one, other)]
        rest = copy.deepcopy(plain)
        whole = nn.Sequential(parts[0], rest, parts[1])
        for x in (torch.ones(3, 4), torch.ones(2, 4) / 2):
            whole(x).sum().backward()
            parts[2](parts[0](x) + rest(x).sin()).sum().backward()
        return [weight.grad for part in (*parts, rest) for weight in part.parameters()]

    torch.testing.assert_close(train(ORTModule), train(lambda part: part))


class Plain(nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("model", [Plain(), nn.Flatten(), nn.Sequential(Plain(), nn.Tanh())])
def test_a_model_without_weights(model):
    pair = Pair(model)
    for x in (a(), a(5, 4).requires_grad_()):
        pair.check(x)


def test_without_gradients_in_evaluation_and_with_exact_algorithms_asked_for():
    pair = Pair(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9), nn.BatchNorm1d(8)))
    before = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]  # noqa: NPY002
    pair.ort.eval()(a())
    after = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]  # noqa: NPY002
    assert before[:2] == after[:2]
    pair.plain.eval()
    pair.check(a())
    with torch.no_grad():
        pair.check(a())
        assert not pair.ort.train()(a()).requires_grad
    assert pair.ort.train()(a()).requires_grad
    torch.use_deterministic_algorithms(True)
    try:
        pair.plain.load_state_dict(pair.ort.state_dict())
        pair.ort.eval()
        pair.check(a())
    finally:
        torch.use_deterministic_algorithms(False)


def test_evaluation_has_a_graph_of_its_own():
    module = ORTModule(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    module(a()).sum().backward()
    with torch.no_grad():
        module.eval()(a())
    by_mode = {
        mode: module.lab.graphs(mode=mode)["optimized"].operators for mode in ("training", "inference")
    }
    assert {mode: "BatchNormalization" in operators for mode, operators in by_mode.items()} == {
        "training": False,
        "inference": True,
    }


# --- operators --------------------------------------------------------------------------------------------------------


def _grad(*shape):
    return a(*shape).requires_grad_()


OPERATORS = {
    "permute": (lambda x: x.permute(2, 0, 1).sin(), lambda: [_grad(4, 5, 6)]),
    "permute of four": (lambda x: x.permute(3, 0, 2, 1).sin(), lambda: [_grad(2, 3, 4, 5)]),
    "numpy's T": (lambda x: x.T.exp(), lambda: [_grad()]),
    "scatter by a table": (
        lambda x, i, v: x.index_put((i,), v),
        lambda: [a(5, 1), torch.tensor([[2, -1], [0, -1]]), a(2, 2, 1)],
    ),
    "min of two, also equal": (
        torch.minimum,
        lambda: [
            torch.tensor([0.0, 0, 1, 1]).requires_grad_(),
            torch.tensor([1.0, 0, 1, 0]).requires_grad_(),
        ],
    ),
    "max along an axis": (lambda x: x.max(-1, keepdim=True), lambda: [_grad()]),
    "min of all": (lambda x: x.min(), lambda: [_grad()]),
    "argmax and unfold": (lambda x: (x * x.argmax()).unfold(1, 2, 2), lambda: [_grad()]),
    "diagonal": (lambda x: x.diagonal(1, 0, 2).sin(), lambda: [_grad(4, 3, 5)]),
    "sums over several axes": (lambda x: x.sum((-1, 0)) + x.sum(), lambda: [_grad(3, 4, 5)]),
    "chunks": (lambda x: x.chunk(3, 1), lambda: [_grad(4, 7)]),
    "einsum": (lambda x, y: torch.einsum("kes,ems->mek", x, y), lambda: [_grad(2, 3, 4), _grad(3, 5, 4)]),
    "einsum to a vector": (lambda x, y: torch.einsum("se,se->s", x, y), lambda: [_grad(), _grad()]),
    "nearest": (lambda x: functional.interpolate(x, scale_factor=2.0), lambda: [_grad(1, 2, 3, 4)]),
    "bilinear": (
        lambda x: functional.interpolate(x, size=(5, 9), mode="bilinear", align_corners=True),
        lambda: [_grad(1, 2, 4, 5)],
    ),
    "bicubic": (
        lambda x: functional.interpolate(x, size=(5, 9), mode="bicubic"),
        lambda: [_grad(1, 2, 4, 5)],
    ),
    "a chain of casts": (lambda x: x + x.bool().float().long().float(), lambda: [_grad()]),
    "triangles": (lambda x: x.triu(-1) + x.tril(2), lambda: [_grad(2, 4, 5)]),
    "softmax in another type": (lambda x: x.softmax(-1, dtype=torch.float64), lambda: [_grad()]),
    "reciprocal and leaky": (lambda x: 1 / x + functional.leaky_relu(-x, 0.5), lambda: [_grad()]),
    "sigmoid and tanh": (lambda x: x.sigmoid() * x.tanh(), lambda: [_grad()]),
    "bits": (torch.bitwise_or, lambda: [torch.tensor([1, -7]), torch.tensor([9, 4])]),
    "squeeze of what may be one": (lambda x: x.squeeze(1).exp(), lambda: [_grad(2, 1, 3)]),
    "pools": (
        lambda x: functional.max_pool2d(x, 3, 2, 1) + functional.avg_pool2d(x, 3, 2, 1),
        lambda: [_grad(1, 2, 9, 9)],
    ),
    "adaptive pool": (lambda x: functional.adaptive_avg_pool2d(x, (2, 3)), lambda: [_grad(1, 2, 9, 8)]),
}


class Computing(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, *inputs):
        return self.compute(*inputs)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator(name):
    compute, inputs = OPERATORS[name]
    pair = Pair(Computing(compute))
    for _ in range(2):
        pair.check(*inputs())


LAYERS = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 8)),
    "conv transposed": (
        lambda: nn.ConvTranspose3d(4, 6, 3, 2, 1, groups=2, dilation=(1, 2, 1)),
        (1, 4, 3, 5, 4),
    ),
    "group norm": (lambda: nn.GroupNorm(3, 6), (4, 6, 5, 5)),
    "embedding with padding": (lambda: nn.Embedding(8, 4, padding_idx=1), None),
}


@pytest.mark.parametrize("algorithm", [None, "EXHAUSTIVE", "HEURISTIC"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_under_any_search_of_convolutions(name, algorithm, monkeypatch):
    if algorithm:
        monkeypatch.setenv("ORTMODULE_CONV_ALGO_SEARCH", algorithm)
    make, shape = LAYERS[name]
    pair = Pair(make())
    pair.check(torch.tensor([[0, 1, 2], [1, 1, 7]]) if shape is None else _grad(*shape))


def test_draws_of_torch_follow_its_seed():
    pair = Pair(Computing(lambda x: torch.multinomial(x, 2, replacement=True)))
    x = a()
    for _ in range(2):
        expected, actual = pair.both(lambda model: (torch.manual_seed(5), model(x))[1])
        assert torch.equal(actual, expected)


class OfWords(nn.Module):
    """What a classifier of words is made of; its forward is each test's own."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(16, 32, padding_idx=1), nn.Linear(32, 3)
        self.loss = nn.CrossEntropyLoss()


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("scaled", [1.0, 65536.0])
def test_losses_under_autocast(ignored, scaled):
    class Classes(OfWords):
        def forward(self, x, labels):
            logits = self.head(self.words(x))
            binary = functional.binary_cross_entropy_with_logits(logits, torch.ones_like(logits) / 3)
            return self.loss(logits.view(-1, 3), labels.view(-1)) + binary

    pair = Pair(Classes())
    x, labels = torch.tensor([[0, 2, 3, 1], [1, 1, 5, 6]]), torch.tensor([[1, 2, 0, 2], [0, 0, 2, 1]])
    if ignored:
        labels[0, 1:] = -100
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = pair.both(lambda model: model(x, labels))
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    for loss in (expected, actual):
        (loss * scaled).backward()
    for one, other in zip(pair.plain.parameters(), pair.ort.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=3e-2, atol=3e-3 * scaled)


class Inner(nn.Module):
    def forward(self, x):
        return x * x / 2


class Around(torch.autograd.Function):
    """Calls a module, which may be an ORTModule, in both directions."""

    @staticmethod
    def forward(ctx, x, wrap):
        ctx.save_for_backward(x)
        ctx.inner = wrap(Inner())
        return ctx.inner(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.inner(x).backward(gradient)
        return x.grad, None


def test_inside_an_autograd_function():
    x = torch.tensor([1.0, -2.0, 3.0]).requires_grad_()
    (Around.apply(x, ORTModule) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([1.0, -4.0, 9.0]))


def test_a_gradient_that_a_script_registers_is_in_the_graph():
    from onnxruntime.training.ortmodule._custom_gradient_registry import register_gradient

    @register_gradient("", "Cos")
    def of_cos():
        return [("Sin", ["I(0)"], ["s"]), ("Mul", ["s", "GO(0)"], ["p"]), ("Neg", ["p"], ["GI(0)"])]

    pair = Pair(Computing(torch.cos))
    pair.check(_grad())
    assert {"Mul", "Neg"} <= pair.ort.lab.graph("gradient").operators.keys()


def test_a_model_of_transformers_is_saved_and_opened_again(tmp_path):
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    module = ORTModule(transformers.BertForSequenceClassification(config))
    output = module(torch.tensor([[1, 2, 3]]), labels=torch.tensor([1]))
    assert type(output).__name__ == "SequenceClassifierOutput"
    output.loss.backward()
    module.save_pretrained(tmp_path)
    opened = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(opened.state_dict(), module.state_dict())


# --- fallback ---------------------------------------------------------------------------------------------------------


class Reading(nn.Linear):
    """Branches on a value of a random number, which no graph holds."""

    def forward(self, x):
        return super().forward(x) * (1.0 if torch.rand([]) < 2 else 2.0)


@pytest.mark.parametrize("policy", ["FALLBACK_FORCE_TORCH_FORWARD", "FALLBACK_UNSUPPORTED_DEVICE", ""])
@pytest.mark.parametrize("mode", [True, False])
def test_every_policy_but_disable_lets_pytorch_step_in(policy, mode, monkeypatch):
    if policy:
        monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", policy)
    else:
        monkeypatch.delenv("ORTMODULE_FALLBACK_POLICY")
    module = ORTModule(Reading(4, 4)).train(mode)
    x = a()
    with pytest.warns(FallbackWarning, match="A random number that Python reads"):
        torch.testing.assert_close(module(x), module.module(x))
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        module(x)


class Holder:
    def __init__(self, factor):
        self.factor = factor


class Scaled(nn.Linear):
    def forward(self, x, holder):
        return super().forward(x) * holder.factor


def test_an_object_that_no_graph_takes_is_named_or_left_to_pytorch(monkeypatch):
    x, holder = a(), Holder(2.0)
    with pytest.raises(BuildError, match=r"argument `holder` of this call cannot be given(.|\n)*Holder"):
        ORTModule(Scaled(4, 4))(x, holder)
    monkeypatch.delenv("ORTMODULE_FALLBACK_POLICY")
    module = ORTModule(Scaled(4, 4))
    with pytest.warns(FallbackWarning, match="argument `holder`"):
        torch.testing.assert_close(module(x, holder), module.module(x, holder))


# --- files, variables, logs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_files_of_the_graphs_have_the_names_of_1_19_2(mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ORTModule(nn.Linear(4, 4), DebugOptions(save_onnx=True, onnx_prefix="net"))
    with torch.set_grad_enabled(mode == "training"):
        module.train(mode == "training")(a())
    stages = ["torch_exported", "optimized", "execution_model"] + ["optimized_pre_grad"] * (
        mode == "training"
    )
    assert {f"net_{stage}_{mode}.onnx" for stage in stages} <= {path.name for path in tmp_path.iterdir()}
    exported = onnx.load(tmp_path / f"net_torch_exported_{mode}.onnx")
    assert "Gemm" in [one.op_type for one in exported.graph.node]


@pytest.mark.parametrize("opset", [15, 16, 17])
def test_an_opset_by_its_variable(opset, monkeypatch):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", str(opset))
    pair = Pair(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()))
    pair.check(_grad())
    exported = pair.ort.lab.graph("exported").model
    assert [one.version for one in exported.opset_import if not one.domain] == [opset]


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        ("SKIP_CHECK_DISABLED", ()),
        ("SKIP_CHECK_DEVICE", ("DEVICE",)),
        ("SKIP_CHECK_DEVICE|SKIP_CHECK_BUILD_GRADIENT", ("DEVICE", "BUILD_GRADIENT")),
    ],
)
def test_checks_are_left_out_by_their_variable(words, left_out, monkeypatch):
    monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", words)
    assert ORTModule(nn.Linear(4, 4)).lab.options.skip_check == left_out


def test_folders_and_prefixes_that_make_no_sense_are_refused(monkeypatch):
    with pytest.raises(TypeError, match="Expected name prefix of type str"):
        DebugOptions(save_onnx=True, onnx_prefix=23)
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", "/non/existent/directory")
    with pytest.raises(OSError, match="is not writable"):
        DebugOptions(save_onnx=True, onnx_prefix="net")


def test_sparse_labels_are_said():
    class Classes(OfWords):
        def forward(self, x, labels):
            return self.loss(self.head(self.words(x)).view(-1, 3), labels.view(-1))

    module = ORTModule(Classes(), DebugOptions(log_level=LogLevel.INFO))
    x, labels = (
        torch.tensor([[0, 2, 1, 1], [1, 1, 1, 1]]),
        torch.tensor([[1, -100, -100, 2], [0, -100, -100, 1]]),
    )
    module(x, labels).backward()
    said = "\n".join(one.text for one in module.lab.messages)
    assert "Label sparsity-based optimization is ON for" in said


def test_the_page_names_tests_that_exist():
    """The last column of the table in the manual names files of tests."""
    root = Path(__file__).parents[2]
    rows = re.findall(
        r"^\|.*\|.*\| (.+) \|$", (root / "docs/ortmodule.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    there = {path.stem.removeprefix("test_") for path in (root / "tests").rglob("test_*.py")}
    assert len(names) > 20
    assert names <= there
