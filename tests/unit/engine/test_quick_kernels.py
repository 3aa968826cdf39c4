"""Nodes of the backward that ONNX Runtime computes slowly: PyTorch's kernels take their place, to the digit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortlab.engine.operators import torch_kernels as kernels


class Of(nn.Module):
    """A function of an input times a weight, between two layers, so that nothing is an output of the graph."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.before, self.behind = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.behind(self.function(self.before(x)))


def rows(x):
    return x[torch.tensor([5, 0, 5, -1, -7, 5])]


CASES = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "log_sum_exp": lambda x: x - x.logsumexp(-1, keepdim=True),
    "topk": lambda x: x.sort(-1, descending=True).values,
    "relu_backward": torch.relu,
    "leaky_relu_backward": lambda x: F.leaky_relu(x, 0.2),
    "gelu_backward": F.gelu,
    "gelu_tanh_backward": lambda x: F.gelu(x, approximate="tanh"),
    "log_softmax_backward": lambda x: x.log_softmax(-1),
    "log_softmax_backward, another axis": lambda x: x.log_softmax(0),
    "gather_backward": rows,
    "gather_backward, another axis": lambda x: x.index_select(1, torch.tensor([3, 3, 0, 3])),
    "gather_backward, a single entry": lambda x: x.softmax(0)[3].expand(8, -1, -1) + x,
    "gather_elements_backward": lambda x: x.gather(1, torch.tensor([[[0, 1, 1] + [0] * 61] * 2] * 8)),
    "gather_elements": lambda x: x.gather(
        2, torch.tensor([[[3, 0, 3, -0, 63] + [1] * 59] * 16]).expand_as(x)
    ),
    "log": lambda x: (x.square() + 1).log(),
    "sin": torch.sin,
    "cos": torch.sin,
    "layer_norm_backward": lambda x: F.layer_norm(x, (64,)),
    "slice_backward": lambda x: x.softmax(0)[1:7:2],
    "grouped_convolution_backward": lambda x: F.conv1d(
        x, x[0, :, None, :9].softmax(-1), padding=4, groups=16
    ),
    "max_pool2d": lambda x: F.max_pool2d(x[None].transpose(1, 2), 3, 1, 1)[0].transpose(0, 1),
    "where": lambda x: torch.where(x > 0, x, x * 0.1 + 1),
}


def train(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss


def trained_alike(eager, x, wrap, atol=1e-4):
    """Train a model on PyTorch and a copy on ONNX Runtime, compare their gradients, and name the operators that ran."""
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    lab.step(lambda: train(model, x), n=1, memory=False)
    train(eager, x)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=atol)
    return [node.operator for node in lab.profile(n=1, progress=False).nodes]


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_takes_the_nodes_place_and_trains_as_pytorch(case, wrap):
    torch.manual_seed(1)
    eager = Of(CASES[case])
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    x = torch.randn(8, 16, 64)
    run = lab.step(lambda: train(model, x), n=1, memory=False)
    loss = train(eager, x)
    torch.testing.assert_close(torch.tensor(run.losses[0]), loss.detach(), rtol=1e-5, atol=1e-5)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    used = [node.operator for node in lab.profile(n=1, progress=False).nodes]
    assert f"ortlab::{case.partition(',')[0]}" in used
    off = lab.set(aten_backward=False).rerun(memory=False)
    assert off.losses == pytest.approx(run.losses)
    assert not any(node.operator.startswith("ortlab::") for node in lab.profile(n=1, progress=False).nodes)


def test_small_nodes_stay_with_onnx_runtime(wrap):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    lab = wrap(model, log_level="ERROR")
    lab.step(lambda: train(model, torch.randn(4, 8)), n=1, memory=False)
    used = {node.operator for node in lab.profile(n=1, progress=False).nodes}
    assert "com.microsoft.ReluGrad" in used


@pytest.mark.parametrize(("rows", "kernel"), [(32, "ReluGrad"), (4096, "ortlab::relu_backward")])
def test_the_rows_of_the_first_batch_count(rows, kernel, wrap):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    used = trained_alike(model, torch.randn(rows, 4), wrap)
    assert any(operator.endswith(kernel) for operator in used)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -0.0, 3e20])
@pytest.mark.parametrize("exponent", [2, 3])
def test_a_square_or_a_cube_of_special_values_is_pytorchs(exponent, value, wrap):
    model = Of(lambda x: x**exponent)
    eager = copy.deepcopy(model)
    wrap(model, log_level="ERROR")
    x = torch.full((200, 64), value)
    torch.testing.assert_close(model(x), eager(x), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("exponent", [2, 2.0, 3])
def test_a_square_or_a_cube_is_a_product(exponent, wrap):
    torch.manual_seed(1)
    used = trained_alike(Of(lambda x: x**exponent), torch.randn(8, 16, 64), wrap)
    assert "Pow" not in used


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("case", ["relu_backward", "leaky_relu_backward", "log_softmax_backward", "where"])
def test_what_is_not_a_number_is_what_it_is_in_pytorch(case, value, wrap):
    torch.manual_seed(1)
    model = Of(CASES[case])
    eager = copy.deepcopy(model)
    wrap(model, log_level="ERROR")
    x = torch.randn(8, 16, 64)
    x[2, 3, 4] = value
    train(model, x)
    train(eager, x)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad.isnan(), other.grad.isnan())


@pytest.mark.parametrize(
    ("start", "end", "step"), [(1, 9, 3), (-2, -9, -2), (0, 2**63 - 1, 1), (9, -(2**63), -1)]
)
def test_the_gradient_of_a_slice_goes_where_it_was_taken_from(start, end, step):
    grad = torch.randn(4, len(range(10)[start:end:step]))
    whole = kernels.slice_backward(grad, [4, 10], [start], [end], [1], [step])
    expected = torch.zeros(4, 10)
    expected[:, list(range(10))[start:end:step]] = grad
    assert torch.equal(whole, expected)


WINDOWS = {
    "wide": nn.Conv2d(8, 8, 7, padding=3, groups=8),
    "wide, sides unlike": nn.Conv2d(8, 8, (5, 8), padding=(1, 6), groups=8),
    "wider than the image": nn.Conv2d(8, 8, 15, padding=(14, 7), groups=8),
    "one dimension": nn.Conv1d(8, 8, 9, padding=4, groups=8),
    "wide, stride and dilation": nn.Conv2d(8, 8, 5, stride=2, padding=(2, 4), dilation=(1, 2), groups=8),
    "wide, one dimension": nn.Conv1d(8, 8, 9, padding=2, stride=3, groups=8),
    "narrow": nn.Conv2d(8, 8, 3, groups=8),
    "wide one way": nn.Conv2d(8, 8, (1, 7), groups=8),
    "two groups": nn.Conv2d(8, 6, 5, groups=2),
    "transposed": nn.ConvTranspose2d(8, 8, 5, groups=8),
    "three dimensions": nn.Conv3d(8, 8, 5, padding=2, groups=8),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_gradients_of_grouped_convolutions_are_pytorchs_whatever_the_layout(case):
    torch.manual_seed(1)
    model = WINDOWS[case]
    x = torch.randn(2, 8, *([12] * (model.weight.dim() - 2)), requires_grad=True)
    output = model(x)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, [x, model.weight, model.bias], grad)
    is_transposed = isinstance(model, nn.modules.conv._ConvTransposeNd)
    how = [model.stride, model.padding, model.dilation, is_transposed, model.output_padding]
    arguments = [grad, x.detach(), model.weight.detach(), [8], *map(list, how[:3]), how[3], list(how[4])]
    found = kernels.grouped_convolution_backward(*arguments, model.groups, [True] * 3)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        ([2, 2], [], [0, 0], [1, 1], False),
        ([3, 2], [1, 2], [1, 0], [2, 1], False),
        ([3, 3], [2, 2], [1, 1], [1, 1], True),
    ],
)
def test_maxima_and_their_places_are_pytorchs_bit_for_bit(how):
    """Also where entries of a window are equal, infinite or not a number."""
    torch.manual_seed(1)
    x = torch.randn(3, 20, 17, 15).relu()
    x[torch.rand_like(x) < 0.05] = torch.nan
    x[torch.rand_like(x) < 0.3] = -torch.inf
    maxima, places = torch.ops.aten.max_pool2d_with_indices(x, *how)
    found = kernels.max_pool2d(x, *how)
    assert all(one.is_contiguous() for one in found)
    torch.testing.assert_close(found[0], maxima, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found[1], places)


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="torch 2.4 has no such product")
def test_the_gradient_of_a_product_of_groups_is_two_products_of_groups():
    """As in a mixture of experts; the rows of an expert stand together, and one expert has none."""
    from ortlab.engine.operators import torch_calls

    torch.manual_seed(1)
    rows, experts = torch.randn(12, 16, requires_grad=True), torch.randn(4, 16, 24, requires_grad=True)
    offsets = torch.tensor([3, 3, 8, 12], dtype=torch.int32)
    output = torch.ops.aten._grouped_mm(rows, experts, offsets)
    grad = torch.randn_like(output)
    expected = torch.autograd.grad(output, [rows, experts], grad)
    found = torch_calls.FORMULAS["_grouped_mm", "default"](grad, rows.detach(), experts.detach(), offsets)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


class Experts(nn.Module):
    """Rows that go to experts, the rows of an expert together."""

    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.Linear(16, 16), nn.Linear(24, 3)
        self.weights = nn.Parameter(torch.randn(4, 24, 16))

    def forward(self, x, offsets):
        product = torch.ops.aten._grouped_mm(self.before(x), self.weights.transpose(-2, -1), offsets)
        return self.behind(product)


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="torch 2.4 has no such product")
def test_experts_are_not_turned_in_memory_and_train_as_in_pytorch(wrap):
    torch.manual_seed(1)
    eager = Experts()
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    for ends in ([3, 3, 8, 12], [1, 2, 3, 12]):
        x, offsets = torch.randn(12, 16), torch.tensor(ends, dtype=torch.int32)
        for one in (model, eager):
            one.zero_grad()
        lab.step(lambda x=x, offsets=offsets: model(x, offsets).square().sum().backward(), n=1, memory=False)
        eager(x, offsets).square().sum().backward()
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)
    used = [node.operator for node in lab.profile(n=1, progress=False).nodes]
    assert {"ortlab::grouped_linear", "ortlab::grouped_linear_backward"} <= set(used)
    assert "Transpose" not in used
    model.eval()
    torch.testing.assert_close(model(x, offsets), eager(x, offsets))


def test_rows_of_no_expert_are_zeros():
    x, weights, offsets = torch.randn(5, 3), torch.randn(2, 4, 3), torch.tensor([2, 3])
    product = kernels.grouped_linear(x, weights, offsets)
    assert torch.equal(
        product, torch.cat([x[:2] @ weights[0].t(), x[2:3] @ weights[1].t(), torch.zeros(2, 4)])
    )
    of_x, of_weights = kernels.grouped_linear_backward(product, x, weights, offsets)
    assert not of_x[3:].any()
    torch.testing.assert_close(of_weights[1], product[2:3].t() @ x[2:3])


FORMULAS = {
    "abs of complex numbers": lambda x, w: torch.complex(x, w).abs(),
    "binary_cross_entropy_with_logits": lambda x, w: F.binary_cross_entropy_with_logits(x, w.detach()),
    "binary_cross_entropy_with_logits with weights": lambda x, w: F.binary_cross_entropy_with_logits(
        x, w.detach() / 2, weight=w.detach()[:1], pos_weight=w.detach()[0, 0, 0] + 1, reduction="none"
    ),
    "cumsum": lambda x, _: x.cumsum(-1),
    "elu": lambda x, _: F.elu(x, 0.7),
    "fft_fft": lambda x, _: torch.view_as_real(torch.fft.fft(x, dim=1, norm="ortho")),
    "fft_fft of complex numbers": lambda x, w: torch.view_as_real(torch.fft.fft(torch.complex(x, w))),
    "fft_fft that pads": lambda x, _: torch.view_as_real(torch.fft.fft(x, n=9)),
    "fft_fftn": lambda x, _: torch.view_as_real(torch.fft.fftn(x, dim=(1, 3))),
    "fft_fftn of all": lambda x, _: torch.view_as_real(torch.fft.fftn(x, norm="forward")),
    "fft_fftn to other sizes": lambda x, _: torch.view_as_real(torch.fft.fftn(x, (3, 7), (1, 3))),
    "fft_ifft": lambda x, _: torch.view_as_real(torch.fft.ifft(x, norm="forward").resolve_conj()),
    "fft_ifft of complex numbers": lambda x, w: torch.view_as_real(
        torch.fft.ifft(torch.complex(x, w), dim=2)
    ),
    "fft_irfft": lambda x, w: torch.fft.irfft(torch.complex(x, w)),
    "fft_irfft that cuts off": lambda x, w: torch.fft.irfft(torch.complex(x, w), n=4),
    "fft_irfft to an odd size": lambda x, w: torch.fft.irfft(torch.complex(x, w), n=7, dim=1),
    "fft_rfft": lambda x, _: torch.view_as_real(torch.fft.rfft(x)),
    "fft_rfft that cuts off": lambda x, _: torch.view_as_real(torch.fft.rfft(x, n=4)),
    "fft_rfft that pads": lambda x, _: torch.view_as_real(torch.fft.rfft(x, n=12, dim=1)),
    "fft_rfft of an odd size": lambda x, _: torch.view_as_real(torch.fft.rfft(x[..., 1:], norm="ortho")),
    "flip": lambda x, _: x.flip(0, 2),
    "glu": lambda x, _: F.glu(x),
    "glu of channels": lambda x, _: F.glu(x, dim=1),
    "grid_sampler": lambda x, w: F.grid_sample(
        x, w[:, 0, :, :2, None].expand(-1, -1, -1, 2), align_corners=False
    ),
    "hardswish": lambda x, _: F.hardswish(x * 3),
    "im2col": lambda x, _: F.unfold(x, (2, 3), padding=1, stride=(1, 2)),
    "kl_div": lambda x, w: F.kl_div(x.log_softmax(-1), w.detach(), reduction="batchmean"),
    "kl_div of logarithms": lambda x, w: torch.kl_div(x, w.detach()[0].log(), 1, log_target=True),
    "mish": lambda x, _: F.mish(x),
    "mse_loss": lambda x, w: F.mse_loss(x, w.detach()),
    "mse_loss that broadcasts": lambda x, w: torch._C._nn.mse_loss(x, w.detach()[:1], 0),
    "pixel_shuffle": lambda x, _: F.pixel_shuffle(x, 2),
    "real": lambda x, w: torch.complex(x, w).mul(torch.complex(w, x)).real,
    "rms_norm": lambda x, w: F.rms_norm(x, (4, 6), w[0, 0, :, :6].contiguous(), eps=1e-3),
    "rms_norm without weight": lambda x, _: F.rms_norm(x, (4, 6)),
    "roll": lambda x, _: x.roll((1, -2), (-1, 2)),
    "roll of all": lambda x, _: x.roll(5),
    "smooth_l1_loss": lambda x, w: F.smooth_l1_loss(x, w.detach(), beta=0.3),
    "upsample_bilinear2d": lambda x, _: F.interpolate(x, scale_factor=(2, 1.5), mode="bilinear"),
    "upsample_bilinear2d to a size": lambda x, _: F.interpolate(
        x, (7, 5), mode="bilinear", align_corners=True
    ),
}


class OfTwo(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(1, 1, 4, 6))
        self.weight = nn.Parameter(torch.rand(2, 4, 4, 6))

    def forward(self, x):
        return self.function(x * self.scale, self.weight)


def test_the_formula_of_a_squared_error_sums_over_what_broadcasts():
    from ortlab.engine.operators.torch_calls import FORMULAS as BY_NAME

    x, target = torch.randn(1, 3, requires_grad=True), torch.randn(4, 3)
    F.mse_loss(x.expand(4, 3), target).backward()
    (found,) = BY_NAME["mse_loss", "default"](torch.ones(()), x.detach(), target)
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", FORMULAS)
def test_a_call_whose_gradient_has_a_formula_runs_no_second_forward(case, dtype, monkeypatch, wrap):
    from ortlab.engine.operators import aten_executor, compiled_calls, torch_calls

    aten_executor._find.cache_clear()  # a call that another test has made knows its formula
    torch_calls.CallableCall.find.cache_clear()
    torch.manual_seed(1)
    model = OfTwo(FORMULAS[case]).to(dtype)
    eager = copy.deepcopy(model)
    wrap(model, log_level="ERROR")
    x = torch.randn(2, 4, 4, 6, dtype=dtype)
    used = []
    name = case.split()[0]
    for table in ("FORMULAS", "OF_COMPLEX"):
        formulas = {
            key: lambda *args, key=key, of=of, **named: (used.append(key[0]), of(*args, **named))[1]
            for key, of in getattr(torch_calls, table).items()
        }
        monkeypatch.setattr(torch_calls, table, formulas)
    with compiled_calls.through_python():
        train(model, x)
    train(eager, x)
    assert used == [name]
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


SELECTING = {
    "max": lambda x: x - x.max(1, keepdim=True).values,
    "min of the first axis": lambda x: x - x.min(0).values,
    "median of the last axis": lambda x: x - x.median(-1).values[..., None],
    "nanmedian": lambda x: x * x.nanmedian(-2, keepdim=True).values,
    "mode": lambda x: x + x.mode(1, keepdim=True).values,
    "kthvalue": lambda x: x + x.kthvalue(3, 0, keepdim=True).values,
    "kthvalue of the last axis": lambda x: x + x.kthvalue(3).values[..., None],
    "topk": lambda x: x[:, :4] * x.topk(4, 1).values,
    "topk, the smallest": lambda x: x.topk(64, largest=False, sorted=False).values,
}


@pytest.mark.parametrize("case", SELECTING)
def test_what_selects_is_not_run_once_more_for_its_gradient(case, wrap):
    torch.manual_seed(1)
    eager = Of(SELECTING[case])
    model = copy.deepcopy(eager)
    lab = wrap(model, log_level="ERROR")
    # A second batch has other sizes, and entries that are equal.
    for x in (torch.randn(8, 16, 64), torch.randn(5, 7, 64).round()):
        for one in (model, eager):
            one.zero_grad()
            train(one, x)
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)
    lab.step(lambda: train(model, x), n=1, memory=False)
    used = [node.operator for node in lab.profile(n=1, progress=False).nodes]
    assert any("value_selecting_reduction_backward" in operator for operator in used)
    assert not any("_vjp" in operator for operator in used)


ADDING = {
    "index_add_to": lambda x: torch.zeros_like(x).index_add(1, torch.tensor([3, 3, 0, 1] * 4), x),
    "index_add_to, in place": lambda x: x.new_ones(9, 16, 64).index_add_(0, torch.arange(8) // 2, x * 2),
    "scatter_add_to": lambda x: torch.zeros(3, 16, 64).scatter_add(0, (x > 0).long(), x),
}


@pytest.mark.parametrize("case", ADDING)
def test_what_is_added_to_zeros_costs_no_sum_of_itself(case, wrap):
    """1.19.2 wants gradients of both or of none, and zeros have none."""
    torch.manual_seed(1)
    model = Of(ADDING[case])
    used = trained_alike(model, torch.randn(8, 16, 64), wrap, atol=1e-3)
    assert f"ortlab::{case.partition(',')[0]}" in used
    assert "ortlab::where" not in used
    assert used.count("ortlab::sum_over") == len(list(model.parameters())) // 2, (
        "the gradients of biases only"
    )
