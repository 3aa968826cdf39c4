"""Operators that ONNX Runtime cannot train, or ONNX cannot express, train as calls of PyTorch."""

from __future__ import annotations

import copy
import operator
import subprocess
import warnings

import pytest
import torch
from fault_cases import Wrapped, largest_difference
from forked import python
from torch import nn
from torch.nn import functional as F

import ortlab
from ortlab.engine import load
from ortlab.errors import BuildError

TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning"),
    pytest.mark.filterwarnings("ignore:Exporting aten..index operator of advanced indexing:UserWarning"),
    pytest.mark.filterwarnings("ignore:It is not recommended to have more than one:UserWarning"),
]

# Exported by torch to operators that have no gradient in 1.19.2, or no right one.
WITHOUT_GRADIENT = {
    "elu": lambda h, *_: F.elu(h),
    "hardswish": lambda h, *_: F.hardswish(h),
    "hardsigmoid": lambda h, *_: F.hardsigmoid(h),
    "selu": lambda h, *_: F.selu(h),
    "mish": lambda h, *_: F.mish(h),
    "prelu": lambda h, net, _: F.prelu(h, net.bias),
    "cumsum": lambda h, *_: h.cumsum(1),
    "amax": lambda h, *_: h.amax(1),
    "norm of order 3": lambda h, *_: h.norm(3, dim=1),
    "var": lambda h, *_: h.var(1),
    "prod": lambda h, *_: h.prod(1),
    "exponent": lambda h, net, _: (h.abs() + 1) ** net.bias,
    "round": lambda h, *_: h.round() + h,
    "bilinear resize to a computed size": lambda h, *_: F.interpolate(
        h[None, None], size=(h.shape[0] * 2, 5), mode="bilinear"
    ),
    "grid_sample": lambda h, *_: F.grid_sample(
        h[None, None], h[:2, :4].tanh().reshape(1, 2, 2, 2), align_corners=False
    ),
    "reflecting pad": lambda h, *_: F.pad(h[None], (1, 2), mode="reflect"),
    "scatter into a constant": lambda h, _, x: torch.zeros(5, 8).scatter(1, x.argsort(1), h),
    "hstack, with a branch in ONNX": lambda h, *_: torch.hstack([h, h * 2]),
    "flip": lambda h, *_: h.flip(1) * h,
    "two results, one used": lambda h, *_: h.cummax(1)[0],
}
# Operators that torch's exporter does not know, or refuses with these arguments.
WITHOUT_FORM = {
    "erfinv": lambda h, *_: torch.erfinv(h.tanh() * 0.5),
    "quantile": lambda h, *_: torch.quantile(h, 0.3, dim=1),
    "kthvalue": lambda h, *_: h.kthvalue(2, 1)[0],
    "smooth_l1_loss": lambda h, _, x: F.smooth_l1_loss(h, x),
    "label smoothing": lambda h, _, x: F.cross_entropy(h, x.argmax(-1), label_smoothing=0.1),
    "class probabilities": lambda h, _, x: F.cross_entropy(h, x.softmax(-1)),
    "ctc_loss": lambda h, *_: F.ctc_loss(
        h[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])
    ),
    "index_put, accumulate=True": lambda h, _, x: x.index_put(
        (torch.tensor([0, 0]),), h[:2], accumulate=True
    ),
    "index_put by a mask": lambda h, net, x: (
        (h * 2).reshape(5, 2, 4).index_put((x.reshape(5, 2, 4)[..., 0] > 0,), net.bias[:4])
    ),
    "scatter_reduce": lambda h, _, x: h.scatter_reduce(0, (x > 0).long(), h.exp(), "amax"),
    "adaptive_max_pool1d": lambda h, *_: F.adaptive_max_pool1d(h[None], 2),
    "a list of tensors": lambda h, *_: torch.block_diag(h, h[:2] * 2),
    "a boolean input and result": lambda h, _, x: h * torch.isin((x > 0).long(), torch.tensor([1])),
    "bfloat16": lambda h, *_: (h[..., None].bfloat16() * torch.arange(3)).float(),
    "linalg.solve": lambda h, *_: torch.linalg.solve(h[:, :5] + 9 * torch.eye(5), h),
    "complex: fft": lambda h, *_: torch.fft.fftn(h, dim=(0, 1)).abs(),
    "complex: polar": lambda h, *_: torch.view_as_real(torch.polar(h.abs(), h)).flatten(1),
    "complex: moved": lambda h, *_: torch.view_as_real(torch.polar(h.abs(), h).to(h.device)).flatten(1),
    "complex: product": lambda h, *_: torch.fft.irfft(
        torch.fft.rfft(h) * torch.complex(h[:, :5], h[:, 3:]), n=8
    ),
}
ALL = WITHOUT_GRADIENT | WITHOUT_FORM


class Weighed(Wrapped):
    """A function whose every result counts differently, so that no gradient is zero by symmetry."""

    def __init__(self, function):
        super().__init__(function)
        self.second.bias.data.abs_()

    def forward(self, x):
        result = super().forward(x)
        weights = 1 + torch.arange(result.numel()) / 7
        return (result * weights.reshape(result.shape or (1,))).sum()


@pytest.mark.parametrize("name", ALL)
def test_it_trains_as_in_pytorch(name):
    assert largest_difference(load(), lambda: (Weighed(ALL[name]), (torch.randn(5, 8),))) <= TOLERANCE


@pytest.mark.parametrize("name", ["elu", "cumsum", "grid_sample"])
def test_the_onnx_form_has_no_gradient(name, monkeypatch):
    """As released: the gradient builder stops at what torch's exporter makes of it."""
    from ortlab.engine.operators import untrained_operators

    monkeypatch.setattr(untrained_operators, "_untrained", lambda *_: set())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = load().ORTModule(Weighed(ALL[name]))
        with pytest.raises(Exception, match=r"gradient|Gradient"):
            wrapped(torch.randn(5, 8))


def test_a_kept_export_trains_in_another_process(tmp_path):
    """The next process makes no trace, and has to tell ONNX Runtime the gradients of the calls all the same."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch, ortlab\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 1)).train()\n"
        "lab = ortlab.wrap(model, export_cache_dir=sys.argv[1])\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "print(lab.status.executed_by, model[0].weight.grad.sum().item())\n"
    )
    command = python(script, tmp_path / "kept")
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].startswith("ort ")


def test_an_operator_that_needs_no_gradient_stays_onnx(wrap):
    lab = wrap(Weighed(lambda h, _, x: h * F.elu(x)).train())
    lab.module(torch.randn(5, 8)).backward()
    assert not said(lab)


def test_the_messages_name_what_pytorch_runs(wrap):
    lab = wrap(Weighed(lambda h, *_: F.elu(F.elu(h)) + h.cumsum(1)).train())
    lab.module(torch.randn(5, 8)).backward()
    assert said(lab) == ["PyTorch computes inside the graph: aten::cumsum, aten::elu (2)."]


def said(lab):
    return [message.text for message in lab.messages if "PyTorch computes" in message.text]


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: F.dropout2d(h.reshape(1, 5, 2, 4), 0.5),
        lambda h: F.rrelu(h, training=True),
        F.gumbel_softmax,
        lambda h: F.alpha_dropout(h, 0.5),
    ],
    ids=["dropout2d", "rrelu", "gumbel_softmax", "alpha_dropout"],
)
def test_random_operators_draw_what_pytorch_draws_forward_and_backward(draw, wrap):
    torch.manual_seed(0)
    model = Weighed(lambda h, *_: draw(h)).train()
    reference, x = copy.deepcopy(model), torch.randn(5, 8)
    wrap(model)
    for seed in range(3):
        for module in (reference, model):
            module.zero_grad()
            torch.manual_seed(seed)
            module(x).backward()
        torch.testing.assert_close(model.first.weight.grad, reference.first.weight.grad)


def test_only_the_inputs_that_need_a_gradient_get_one(wrap):
    """1.19.2 asks of the n-th gradient whether the n-th input needs one."""
    model = Weighed(lambda h, net, x: torch.addcdiv(x, h, net.weight[0].detach() + 3)).train()
    reference, x = copy.deepcopy(model), torch.randn(5, 8)
    wrap(model)
    for module in (reference, model):
        module(x).backward()
    torch.testing.assert_close(model.first.weight.grad, reference.first.weight.grad)
    assert model.second.weight.grad is None


def test_autocast_of_the_caller_does_not_reach_into_the_graph(wrap):
    """A backward that is called where autocast is on runs the graph as it was traced, without."""
    lab = wrap(Weighed(lambda h, *_: torch.linalg.solve(h[:, :5] + 9 * torch.eye(5), h)).train())
    x = torch.randn(5, 8)

    def gradients(*, mixed):
        lab.module.zero_grad()
        loss = lab.module(x).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            loss.backward()
        named = lab.module.named_parameters()
        return [parameter.grad.clone() for _, parameter in named if parameter.grad is not None]

    assert all(map(torch.equal, gradients(mixed=True), gradients(mixed=False)))


def test_a_constant_that_a_symbolic_changes_is_put_back():
    """Torch's repeat_interleave adds the rank to its dimension in place; the -1 of the stack is the same constant."""

    def rotary(h, *_):
        x = h.view(1, 5, 2, 4).transpose(1, 2)
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return turned * torch.repeat_interleave(h[None, :, :2], 2, dim=-1)

    assert largest_difference(load(), lambda: (Weighed(rotary), (torch.randn(5, 8),))) <= TOLERANCE


def test_the_exporter_of_others_is_left_alone():
    import io

    load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = {"dynamo": False} if "dynamo" in torch.onnx.export.__code__.co_varnames else {}
        model = Weighed(lambda h, *_: F.elu(h))
        file = io.BytesIO()
        torch.onnx.export(model, (torch.randn(5, 8),), file, **arguments)
    assert b"Elu" in file.getvalue()
    assert b"org.pytorch.aten" not in file.getvalue()


@pytest.mark.parametrize(
    "operator", [operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_an_operator_that_writes_computes_what_pytorch_writes(operator, dtype, wrap):
    """As CPM-Ant joins its masks of whole numbers with ``|=``."""
    if dtype is torch.bool and "shift" in operator.__name__:
        dtype = torch.int32

    def masked(h, *_):
        whole = (h * 8).round().to(dtype)
        joined = operator(whole, (h * 3).abs().round().to(dtype))
        return h * (joined + whole)

    model = Weighed(masked).train()
    reference, x = copy.deepcopy(model), torch.randn(5, 8)
    lab = wrap(model)
    for module in (reference, model):
        module(x).backward()
    torch.testing.assert_close(model.first.weight.grad, reference.first.weight.grad)
    assert lab.status.executed_by == "ort"


@pytest.mark.parametrize(
    "draw", [lambda: torch.randint(0, 99, (4,)), lambda: torch.randperm(64)[:4], lambda: torch.randn(4)]
)
def test_a_draw_that_takes_no_tensor_is_made_anew_in_each_step(draw, wrap):
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + draw()

    lab = wrap(Shifted(4, 4).train())
    x = torch.ones(2, 4)
    torch.manual_seed(0)
    first, second = lab.module(x), lab.module(x)
    torch.manual_seed(0)
    again = lab.module(x)
    assert lab.status.executed_by == "ort"
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, again)


@pytest.mark.parametrize(
    "draw",
    [
        lambda h, x: h * torch.rand_like(h) + torch.rand_like(x),
        lambda h, x: torch.rand(4) * h + torch.randn(x.shape) * torch.rand(4),
        lambda h, x: (
            F.dropout2d((F.gumbel_softmax(h) + torch.rand(3, 4))[None, None], 0.5) * torch.randn_like(x)
        ),
        lambda h, x: h[:, torch.randperm(4)] * torch.bernoulli(x.sigmoid()) + torch.randn(4),
        lambda h, x: F.rrelu(F.rrelu(h, training=True) - 1, training=True) + F.rrelu(x, training=True),
        lambda h, x: h * x.new_empty(3, 1).normal_() + torch.empty(x.shape).normal_(0.5, 2.0),
    ],
    ids=["ready at once", "alike", "with gradients", "of whole numbers", "alike, with gradients", "in place"],
)
@pytest.mark.parametrize("training", [True, False])
def test_several_draws_are_made_in_the_order_of_the_forward(draw, training, wrap):
    class Drawing(nn.Linear):
        def forward(self, x):
            return draw(super().forward(x), x)

    torch.manual_seed(0)
    model = Drawing(4, 4).train(training)
    reference, lab = copy.deepcopy(model), wrap(model)
    for seed, x in enumerate((torch.randn(3, 4), torch.randn(3, 4))):
        results = []
        for module in (reference, model):
            torch.manual_seed(seed)
            with torch.set_grad_enabled(training):
                results.append(module(x))
            results.append(torch.rand(2))  # the generator is where the forward left it
            if training:
                results[-2].square().sum().backward()
        torch.testing.assert_close(results[2:], results[:2])
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    assert lab.status.executed_by == "ort"


def test_a_draw_that_cannot_be_left_to_torch_is_refused(wrap):
    """Torch's exporter would write it for ONNX Runtime's own generators, and takes these arguments for others."""

    class Drawing(nn.Linear):
        def forward(self, x):
            return super().forward(x) + nn.init.normal_(torch.empty(x.shape))

    with pytest.raises(BuildError, match="normal"):
        wrap(Drawing(4, 4)).module(torch.randn(3, 4))


@pytest.mark.parametrize("draw", [lambda: torch.rand(4), lambda: torch.ones(4)], ids=["drawn", "not drawn"])
def test_of_two_models_only_the_call_behind_a_draw_waits_for_one(draw, wrap):
    class Drawing(nn.Linear):
        def forward(self, x):
            hidden = super().forward(x) + draw()
            return F.scaled_dot_product_attention(hidden, hidden, hidden)

    lab = wrap(model := Drawing(4, 4).double())
    model(torch.randn(1, 2, 3, 4).double()).sum().backward()
    assert model.weight.grad.isfinite().all()
    assert lab.status.executed_by == "ort"


@pytest.mark.parametrize("training", [True, False])
def test_of_equal_scores_those_are_chosen_that_torch_chooses(training, wrap):
    """A router whose weights begin with zeros; ONNX's TopK takes the first ones."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(4, 16, bias=False)
            self.experts = nn.Parameter(torch.randn(16, 4))
            nn.init.zeros_(self.router.weight)

        def forward(self, x):
            scores, chosen = self.router(x).sigmoid().topk(3, dim=1)
            return (self.experts[chosen] * scores.unsqueeze(-1)).sum(1) + x

    torch.manual_seed(0)
    module, x = Routed().train(training), torch.randn(8, 4)
    plain = copy.deepcopy(module)
    assert not torch.equal(plain.router(x).topk(3, dim=1).indices, torch.arange(3).expand(8, 3))
    wrap(module)
    actual, expected = module(x), plain(x)
    for output in (actual, expected):
        output.pow(2).sum().backward()
    torch.testing.assert_close(actual, expected)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_sparse_embedding_has_its_gradient_dense():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    ours = copy.deepcopy(plain)
    lab = ortlab.wrap(ours)
    words = torch.tensor([[1, 2, 2], [0, 8, 1]])
    for net in (plain, ours):
        net(words).square().sum().backward()
    assert lab.status.executed_by == "ort"
    torch.testing.assert_close(ours[0].weight.grad, plain[0].weight.grad.to_dense())
