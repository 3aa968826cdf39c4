"""Gradients stop in ONNX Runtime where PyTorch stops them, or the export is refused; nothing goes wrong in silence."""

# ruff: noqa: ARG004, ARG005 - bodies and Functions are called alike, whatever they look at

from __future__ import annotations

import copy
import subprocess

import pytest
import torch
from forked import python
from small_transformers import batch_of, bert, llama
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ortlab
from ortlab.errors import BuildError, ExecutionError

pytestmark = [
    pytest.mark.usefixtures("ortmodule"),
    pytest.mark.filterwarnings("ignore:Setting `training` to something:DeprecationWarning"),
]


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 4))
        self.norm = nn.BatchNorm1d(4)
        self.body = body

    def forward(self, x):
        return self.body(self, x, self.a(x))


def steps(module, *, input_gradient=False):
    """Train two batches, different ones, so that nothing of the first may have become a constant."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(module.parameters(), 0.01)
    seen = []
    for _ in range(2):
        x = torch.randn(5, 6, requires_grad=input_gradient)
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        seen.append((loss.detach(), gradients | {"x": x.grad}))
        optimizer.step()
    return seen


def pair(body):
    torch.manual_seed(1)
    net = Net(body).train()
    return net, copy.deepcopy(net)


def same_training(body, **options):
    net, reference = pair(body)
    expected = steps(reference, **options)
    lab = ortlab.wrap(net)
    for (loss, gradients), (right_loss, right) in zip(steps(net, **options), expected, strict=True):
        torch.testing.assert_close(loss, right_loss, rtol=1e-5, atol=1e-6)
        for name, gradient in right.items():
            if gradient is None:
                assert gradients[name] is None, name
            else:
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-5, msg=name)
    return lab


def stops(lab):
    return sum(
        attribute.s == b"detach_copy"
        for node in lab.graph("gradient").model.graph.node
        for attribute in node.attribute
    )


# --- what torch cuts --------------------------------------------------------------------------------------------


def no_grad_block(net, x, h):
    with torch.no_grad():
        weights = F.softmax(net.b(h), -1)
    return (weights * F.log_softmax(net.c(h), -1)).sum()


def no_grad_decorator(net, x, h):
    @torch.no_grad()
    def teacher(h):
        return net.b(h).tanh()

    return (teacher(h) * net.c(h)).sum()


def set_grad_enabled_call(net, x, h):
    torch.set_grad_enabled(False)
    weights = h.exp()
    torch.set_grad_enabled(True)
    return (weights * h).sum()


def inference_mode(net, x, h):
    with torch.inference_mode():
        shift = h.exp()
    return h.pow(2).sum() + shift.sum()


def enable_grad_inside(net, x, h):
    with torch.no_grad():
        outer = h.exp()
        with torch.enable_grad():
            inner = net.b(h).sin() * outer
        last = inner * 2
    return (last + inner + outer * h).sum()


def several_outputs(net, x, h):
    with torch.no_grad():
        values, _ = h.max(dim=1)
        first, second = h.split(2, dim=1)
        rows = h.unbind(1)
    return (h * values[:, None] * first.sum() + second.sum() * h + rows[0][:, None] * h).sum()


def views_without_gradient(net, x, h):
    with torch.no_grad():  # such a view says that it requires a gradient, and has none to give
        turned, column, flat, wide = h.t(), h[:, 1:2], h.view(-1), net.scale[None]
    return ((turned.t() + column + flat.view(5, 4) + wide) * h).sum() + net.scale.pow(2).sum()


def keyword_arguments(net, x, h):
    with torch.no_grad():
        weights = F.softmax(input=h, dim=-1) + torch.mul(input=h, other=h)
        sizes = F.linear(input=torch.ones(5, 4), weight=net.b.weight, bias=net.b.bias)
    return ((weights + sizes) * h).sum()


def lists(net, x, h):
    with torch.no_grad():
        joined = torch.cat([h, net.b(h)], dim=1)
        stacked = torch.stack([h, net.b(h)]).mean(0)
    return ((joined[:, 4:] + stacked) * h).sum()


def write_without_gradient(net, x, h):
    copied = torch.zeros_like(h)
    with torch.no_grad():
        copied.copy_(h)
        copied[:, 0] = h[:, 1]
        copied += h
    return (copied * h).sum()


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach().clone() * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Exponential(Function):
    @staticmethod
    def forward(x):
        with torch.no_grad():
            return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def function_without_gradient(net, x, h):
    with torch.no_grad():
        weights = Doubled.apply(h) + Exponential.apply(h)
    return (weights * h).sum()


def straight_through(net, x, h):
    return net.b(h + (torch.round(h) - h).detach()).pow(2).mean()


def momentum_encoder(net, x, h):
    with torch.no_grad():
        target = net.norm(net.c(h.tanh()))
    return 2 - 2 * F.cosine_similarity(net.b(h.tanh()), target.detach(), dim=-1).mean()


def changed_after_detach(net, x, h):
    mean = h.detach().clone()
    mean.mul_(2)
    mean += h
    before = h * 2
    after = before.tanh()
    before.detach_()
    return (mean * h).sum() + (net.b(before) * after).sum()


def fresh_leaf(net, x, h):
    with torch.no_grad():
        leaf = net.a(x)
    leaf.requires_grad_(True)
    return (net.b(leaf) * leaf).sum() + h.detach().requires_grad_(False).sum() * net.c(h).sum()


CUT = {
    "detach": lambda net, x, h: (h * 2 + h.detach() * h).sum(),
    "torch.detach of a parameter": lambda net, x, h: (h * torch.detach(net.scale) + net.scale).sum(),
    "data": lambda net, x, h: (h.data * h).sum(),
    "data of a parameter": lambda net, x, h: (h * net.scale.data + net.scale).sum(),
    "only a detached weight": lambda net, x, h: F.linear(h, net.b.weight.detach(), net.b.bias).pow(2).sum(),
    "everything before": lambda net, x, h: net.b(h.detach()).pow(2).sum(),
    "branch of where": lambda net, x, h: torch.where(x[:, :4] > 0, h.detach(), h * 2).pow(2).sum(),
    "half precision": lambda net, x, h: (h.half().detach().float() * h).sum(),
    "double precision": lambda net, x, h: (h.double().detach() * h).sum().float(),
    "running statistics": lambda net, x, h: (net.scale * (h - h.mean(0).detach())).pow(2).sum(),
    "Function": lambda net, x, h: (Doubled.apply(h) * Exponential.apply(net.b(h))).sum(),
    "checkpoint": lambda net, x, h: checkpoint(
        lambda h: net.b(h).tanh() * h.detach(), h, use_reentrant=False
    ).sum(),
} | {
    body.__name__: body
    for body in (
        no_grad_block,
        no_grad_decorator,
        set_grad_enabled_call,
        inference_mode,
        enable_grad_inside,
        several_outputs,
        views_without_gradient,
        keyword_arguments,
        lists,
        write_without_gradient,
        function_without_gradient,
        straight_through,
        momentum_encoder,
        changed_after_detach,
        fresh_leaf,
    )
}


@pytest.mark.parametrize("name", CUT)
def test_gradients_are_those_of_pytorch(name):
    lab = same_training(CUT[name])
    # A Function is outside of the graph, and what it detaches with it.
    assert (stops(lab) > 0) is (name != "Function")


def test_gradient_of_an_input():
    same_training(lambda net, x, h: (h.detach() * h).sum() + (x.detach() * x).sum(), input_gradient=True)


WITHOUT_REPAIR = """
import torch, ortlab
from ortlab.engine.tracing import gradient_stops
gradient_stops.install = lambda: None

class Net(torch.nn.Linear):
    def forward(self, x):
        h = super().forward(x)
        return (h * 2 + h.detach() * h).sum()

torch.manual_seed(1)
net, x = Net(6, 4), torch.randn(5, 6)
net(x).backward()
right, net.weight.grad = net.weight.grad, None
ortlab.wrap(net)
net(x).backward()
print("wrong" if (net.weight.grad - right).abs().max() > 0.1 else "right")
"""


def test_1_19_2_needs_the_repair():
    command = python("-W", "ignore", "-c", WITHOUT_REPAIR)
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "wrong"


# --- outputs ----------------------------------------------------------------------------------------------------


def test_outputs_require_gradients_as_in_pytorch():
    def body(net, x, h):
        with torch.no_grad():
            silent = h.exp()
        return h.pow(2).sum(), h.detach(), silent, net.scale.detach(), x * 2, h.argmax(1), h

    net, reference = pair(body)
    ortlab.wrap(net)
    x = torch.randn(5, 6)
    outputs, expected = net(x), reference(x)
    assert [output.requires_grad for output in outputs] == [output.requires_grad for output in expected]
    for output, right in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, right, rtol=1e-5, atol=1e-6)
    (outputs[0] + outputs[-1].sum()).backward()
    (expected[0] + expected[-1].sum()).backward()
    torch.testing.assert_close(net.a.weight.grad, reference.a.weight.grad, rtol=1e-5, atol=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------


def write_to_detached(net, x, h):
    same = h.detach()
    same.mul_(2)  # line refused
    return (same * h).sum()


def write_to_source(net, x, h):
    source = h * 2
    same = source.detach()
    F.relu(source, inplace=True)  # line refused
    return (same * source).sum()


def write_to_data(net, x, h):
    y = h * 1
    y.data.mul_(3)  # line refused
    return (y + h).pow(2).sum()


def assign_data(net, x, h):
    y = h * 1
    y.data = y.data * 3  # line refused
    return (y + h).pow(2).sum()


def write_in_no_grad(net, x, h):
    y = h * 1
    with torch.no_grad():
        y.clamp_(-0.1, 0.1)  # line refused
    return (y + h).pow(2).sum()


def write_item_in_no_grad(net, x, h):
    y = h * 1
    with torch.no_grad():
        y[:, 0] = 0.0  # line refused
    return (y + h).pow(2).sum()


def write_view_in_no_grad(net, x, h):
    y = h * 1
    with torch.no_grad():
        y[:, 0].zero_()  # line refused
    return (y * h).sum()


@pytest.mark.parametrize(
    "body",
    [
        write_to_detached,
        write_to_source,
        write_to_data,
        assign_data,
        write_in_no_grad,
        write_item_in_no_grad,
        write_view_in_no_grad,
    ],
    ids=lambda body: body.__name__,
)
def test_writes_that_a_graph_cannot_show_are_refused_by_line(body):
    net, reference = pair(body)
    apply = Function.__dict__["apply"]
    ortlab.wrap(net)
    with pytest.raises(BuildError, match="line refused") as refusal:
        net(torch.randn(5, 6))
    assert __file__ in str(refusal.value)
    assert torch.is_grad_enabled()
    assert Function.__dict__["apply"] is apply
    for name, value in reference.state_dict().items():  # nothing was written before it was refused
        torch.testing.assert_close(net.state_dict()[name], value, rtol=0, atol=0)


def penalty(net, x, h):
    z = h.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net.b(z).tanh().sum(), z, create_graph=True)  # line refused
    return slope.pow(2).sum() + h.sum()


def inner_step(net, x, h):
    with torch.enable_grad():
        z = h.detach().requires_grad_()
        net.b(z).tanh().sum().backward(inputs=[z])  # line refused
    return (h - z.grad).sum()


def slope_of_function(net, x, h):
    return torch.func.grad(lambda z: net.b(z).tanh().sum())(h).sum()  # line refused


def slope_forward(net, x, h):
    return torch.func.jvp(lambda z: net.b(z).tanh(), (h,), (h,))[1].sum()  # line refused


@pytest.mark.parametrize(
    "body", [penalty, inner_step, slope_of_function, slope_forward], ids=lambda body: body.__name__
)
def test_a_forward_that_computes_gradients_is_refused_by_line_and_said_to_run_in_pytorch(body):
    net, reference = pair(body)
    ortlab.wrap(net)
    with pytest.raises(BuildError, match="line refused") as refusal:
        net(torch.randn(5, 6))
    assert "fails in plain PyTorch" not in str(refusal.value)
    reference(torch.randn(5, 6)).backward()


def test_a_write_is_fine_when_nobody_holds_what_was_detached():
    def body(net, x, h):
        shift = h.detach().mean()
        y = h * 1
        y.mul_(2)
        return (nn.functional.relu(y, inplace=True) * shift).sum()

    same_training(body)


# --- what needs nothing -----------------------------------------------------------------------------------------


def test_integers_and_constants_need_no_stop():
    def body(net, x, h):
        with torch.no_grad():
            order = h.argsort(dim=1).detach()
            grid = torch.zeros_like(h) + x[:, :4].detach()
        return (h.gather(1, order) * grid + h).pow(2).sum()

    assert stops(same_training(body)) == 0


@pytest.mark.parametrize("make", [bert, llama])
def test_transformers_pay_nothing(make):
    torch.manual_seed(2)
    model = make(words=50)
    reference = copy.deepcopy(model)
    batch = batch_of(words=50, first=5, mask=True)
    lab = ortlab.wrap(model)
    loss, right = model(**batch).loss, reference(**batch).loss
    loss.backward()
    right.backward()
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    assert stops(lab) == 0


def test_assigning_data_that_is_there_already_is_nothing_to_refuse(nets, with_ort):
    """A router that converts its weights to the dtype that they have, in each forward."""

    def body(net, h):
        net.after.to(h.dtype)
        return h * 2

    reference, module = nets(body)
    wrapped, x = with_ort(module), torch.randn(5, 6)
    for model in (reference, wrapped):
        model(x).backward()
    torch.testing.assert_close(module.before.weight.grad, reference.before.weight.grad)


class Heads(nn.Module):
    """A trunk, a head, one through a Function, an output that needs no gradient, and one of the argument alone."""

    def __init__(self):
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        h = self.norm(self.trunk(x))
        return self.first(h), Doubled.apply(self.second(h)), h.argmax(-1), x * 1


@pytest.mark.parametrize("switches", [{}, {"mem_efficient_grad_management": True}, {"recompute": ["norm"]}])
@pytest.mark.filterwarnings("ignore::ortlab.errors.PlanWarning")
def test_what_a_loss_of_one_head_does_not_reach_has_no_gradient_and_stays(switches):
    torch.manual_seed(1)
    plain = Heads()
    ours = copy.deepcopy(plain)
    ortlab.wrap(ours, **switches)
    optimizers = [torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.1) for net in (plain, ours)]
    for head in (0, 1, 1, 0, 3):
        x = torch.randn(5, 6, requires_grad=True)
        for net, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            net(x)[head].square().sum().backward()
            optimizer.step()
        for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), (head, name)
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


class Logged(nn.Module):
    """A head, and an output whose derivative is infinite where an entry of the trunk's is not positive."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.trunk(x)
        return self.head(h), h.clamp(min=0).log()


def test_an_infinite_derivative_behind_an_output_that_the_loss_leaves_out_is_refused_by_line():
    model = Logged()
    lab = ortlab.wrap(model)
    x = torch.linspace(-1, 1, 30).reshape(5, 6)
    with pytest.raises(ExecutionError, match=rf"Log at {__file__}:\d+, may be why") as refused:
        model(x)[0].sum().backward()
    assert "detach" in refused.value.fix
    with torch.no_grad():
        model.trunk.bias.fill_(100.0)  # then all logarithms are finite
    model(x)[0].sum().backward()
    assert model.trunk.weight.grad.isfinite().all()
    with torch.no_grad():
        model.trunk.weight.fill_(
            torch.nan
        )  # a loss of all outputs leaves nothing out, and nothing is refused
    sum(one.sum() for one in model(x)).backward()
    assert model.trunk.weight.grad.isnan().any()
    lab.unwrap()


def test_dropping_everything_gives_zeros_and_passes_a_gradient_of_zeros():
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 4), nn.Dropout(1.0), nn.Linear(4, 4))
    ours = copy.deepcopy(plain)
    ortlab.wrap(ours)
    x = torch.randn(5, 6)
    for net in (plain, ours):
        net(x).sum().backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
    assert not ours[0].weight.grad.any()


class Frozen(nn.Module):
    """Layers some of whose weights are constants or need no gradient, in front of and behind trained ones."""

    def __init__(self, shape, *layers):
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def frozen(layer):
    return layer.requires_grad_(requires_grad=False)


SHARED = frozen(nn.LayerNorm(8))
HALF_FROZEN = {
    "norms of their own": lambda: Frozen(
        (4, 6, 8), nn.Linear(8, 8), frozen(nn.LayerNorm(8)), nn.Linear(8, 8), frozen(nn.LayerNorm(8))
    ),
    "a norm that is shared": lambda: Frozen((4, 6, 8), nn.Linear(8, 8), SHARED, nn.Linear(8, 8), SHARED),
    "norms without weights": lambda: Frozen(
        *((4, 6, 8), nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False)),
        *(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False)),
    ),
    "batch norm": lambda: Frozen((4, 3, 6, 6), nn.Conv2d(3, 5, 3), frozen(nn.BatchNorm2d(5))),
    "instance norm": lambda: Frozen(
        (4, 3, 6, 6), nn.Conv2d(3, 5, 3), nn.InstanceNorm2d(5), nn.Conv2d(5, 2, 1)
    ),
    "group norm": lambda: Frozen((4, 3, 6, 6), nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4, affine=False)),
    "an image and a transposed convolution": lambda: Frozen((4, 3, 6, 6), nn.ConvTranspose2d(3, 5, 3)),
}


@pytest.mark.parametrize("case", HALF_FROZEN)
def test_what_needs_no_gradient_takes_no_sum_of_an_activation(case):
    torch.manual_seed(3)
    model = HALF_FROZEN[case]()
    eager = copy.deepcopy(model)
    x = torch.randn(model.shape)
    lab = ortlab.wrap(model)
    for one in (model, eager):
        one(x).sin().sum().backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    graph = lab.graph("gradient").model.graph
    lab.unwrap()
    given = {value.name for value in graph.input}
    sums = [node for node in graph.node if any(name.endswith("_tied_sum") for name in node.output)]
    assert all(node.input[0] in given for node in sums)
    assert bool(sums) == (case != "norms of their own")


def test_what_no_gradient_came_to_has_none_beside_a_norm_without_weights():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Linear(8, 8, bias=False), nn.Linear(8, 16)

        def forward(self, x):
            return self.small(x), nn.functional.layer_norm(self.large(x), (16,))

    model = Two()
    lab = ortlab.wrap(model)
    model(torch.randn(4, 8))[1].sin().sum().backward()
    lab.unwrap()
    assert model.small.weight.grad is None
    assert model.large.bias.grad is not None
