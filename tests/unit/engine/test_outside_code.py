"""What models of other people do that the zoo's do not: each trains as in PyTorch, over batches of several sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ortlab
from ortlab.errors import BuildError

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def trains_as_pytorch(model, batches, *, autocast=False, **switches):
    """Hold outputs and gradients of each batch against PyTorch's; return what the lab said."""
    reference = copy.deepcopy(model)
    lab = ortlab.wrap(model, **switches)
    for batch in batches:
        results = []
        for run in (reference, model):
            run.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = run(*batch)
            output.float().square().mean().backward()
            results.append((output, [one.grad for one in run.parameters()]))
        (expected, gradients), (output, ours) = results
        close = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(output, expected, **close)
        for one, gradient in zip(ours, gradients, strict=True):
            wanted = None if gradient is None else gradient.to_dense()
            torch.testing.assert_close(one, wanted, **close)
        for found, wanted in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(*batches[0]), reference.eval()(*batches[0]), **close)
    messages = [one.text for one in lab.messages]
    lab.unwrap()
    return messages


class Heads(nn.Module):
    """An attention of vit-pytorch: einops splits three chunks into heads by sizes that it computes of their shapes."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(48, 3 * 8)

    def forward(self, image):
        count, channels, height, width = image.shape
        patches = image.reshape([count, channels, height // 4, 4, width // 4, 4]).permute(0, 2, 4, 3, 5, 1)
        patches = patches.reshape([count, (height // 4) * (width // 4), 4 * 4 * channels])
        q, k, v = (
            one.reshape([one.shape[0], one.shape[1], 2, one.shape[2] // 2]).transpose(1, 2)
            for one in self.qkv(patches).chunk(3, dim=-1)
        )
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return mixed.transpose(1, 2).reshape([mixed.shape[0], mixed.shape[2], 8])


def test_the_sizes_of_chunks_are_those_of_each_batch():
    torch.manual_seed(0)
    sizes = [(2, 3, 8, 8), (4, 3, 8, 8), (3, 3, 12, 8)]
    said = trains_as_pytorch(Heads(), [(torch.randn(size),) for size in sizes])
    assert not any("Built anew" in text for text in said)


class ScoredTokens(nn.Module):
    """Ignores some labels, by the module that ORTModule's label sparsity looks for."""

    def __init__(self):
        super().__init__()
        self.scores, self.loss = nn.Linear(4, 10), nn.CrossEntropyLoss()

    def forward(self, x, labels):
        return self.loss(self.scores(x), labels)


def test_ignored_labels_under_autocast():
    torch.manual_seed(0)
    labels = torch.tensor([1, -100, 3, 4, -100, 2, 0, 1])
    trains_as_pytorch(ScoredTokens(), [(torch.randn(8, 4), labels)], autocast=True)


class Trend(nn.Module):
    """Decomposes series as DLinear does: an average along the time, and a slice of a transposed sum."""

    def __init__(self):
        super().__init__()
        self.average, self.season, self.trend = nn.AvgPool1d(5, 1), nn.Linear(12, 6), nn.Linear(12, 6)

    def forward(self, x):
        padded = torch.cat([x[:, :1].repeat(1, 2, 1), x, x[:, -1:].repeat(1, 2, 1)], dim=1)
        mean = self.average(padded.permute(0, 2, 1)).permute(0, 2, 1)
        both = self.season((x - mean).permute(0, 2, 1)) + self.trend(mean.permute(0, 2, 1))
        return both.permute(0, 2, 1)[:, -6:]


def test_a_graph_at_which_the_compute_optimizer_stops_is_built_without_it():
    torch.manual_seed(0)
    said = trains_as_pytorch(Trend(), [(torch.randn(size, 12, 4),) for size in (3, 2)])
    assert ["without the compute optimizer" in text for text in said].count(True) == 1


class Forwards(nn.Module):
    """A linear layer, and what somebody's forward does with its result."""

    def __init__(self, forward, *, width=4):
        super().__init__()
        self.layer, self.weights, self.does = (
            nn.Linear(4, width),
            nn.Parameter(torch.rand(width, 1) + 0.2),
            forward,
        )

    def forward(self, x):
        return self.does(self.layer(x), self.weights)


def weighed(parts):
    return sum(part.sum(0) * (index + 1) for index, part in enumerate(parts))


def part_written(dtype):
    def forward(h, _):
        whole = torch.zeros(h.shape[0], 8, dtype=dtype)
        whole[:, 2:6] = h
        part = whole[:, :4]
        part.copy_(h * 2)
        return whole * 2

    return forward


def copied(h, _):
    return torch.zeros(h.shape[0], 4, dtype=torch.float64).copy_(h) * 3


@pytest.mark.parametrize(
    "forward",
    [
        lambda h, _: weighed(h.split(2)),
        lambda h, _: weighed(h.split(h.shape[0] // 2 + 1)),
        lambda h, _: weighed(h.split([1, h.shape[0] - 1])),
        lambda h, _: weighed(h.chunk(3)),
        lambda h, _: weighed(h.tensor_split(3)),
    ],
    ids=["split", "split by a size", "split into sizes", "chunk", "tensor_split"],
)
def test_a_batch_is_cut_into_parts(forward):
    torch.manual_seed(0)
    trains_as_pytorch(Forwards(forward), [(torch.randn(size, 4),) for size in (3, 4, 5, 2, 7)])


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
@pytest.mark.parametrize(
    "forward",
    [part_written(torch.float64), part_written(torch.float16), copied],
    ids=["float64", "float16", "whole"],
)
def test_what_is_copied_takes_the_dtype_of_its_place(forward):
    torch.manual_seed(0)
    trains_as_pytorch(Forwards(forward), [(torch.randn(size, 4),) for size in (3, 2)])


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
def test_the_gradient_of_a_power_is_summed_over_the_dimensions_of_its_exponent():
    """As released it is not, and is wrong without a word where another gradient is added to it (ETSformer)."""

    def smoothed(h, weights):
        powers, weights = torch.arange(5.0), weights.sigmoid()
        return h[..., None] + (1 - weights) * weights**powers

    torch.manual_seed(0)
    trains_as_pytorch(Forwards(smoothed), [(torch.randn(size, 4),) for size in (3, 2)])


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
def test_sizes_of_complex_numbers():
    def strongest(h, _):
        frequencies = torch.fft.rfft(h, dim=-1)
        places = frequencies.abs().topk(2, dim=-1).indices
        rows = torch.arange(frequencies.size(0))[:, None].expand(-1, frequencies.size(1) - 1)
        return frequencies[rows, places].abs()

    torch.manual_seed(0)
    trains_as_pytorch(Forwards(strongest), [(torch.randn(size, 4),) for size in (3, 2)])


class Bag(nn.Module):
    """The bags of DLRM: sparse, or made elsewhere and not trained."""

    def __init__(self, *, sparse, trained):
        super().__init__()
        self.bag, self.layer = nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse), nn.Linear(4, 3)
        self.bag.weight.requires_grad_(trained)

    def forward(self, indices, offsets):
        return self.layer(self.bag(indices, offsets))


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
@pytest.mark.parametrize(("sparse", "trained"), [(True, True), (False, False)], ids=["sparse", "not trained"])
def test_embedding_bags(sparse, trained):
    torch.manual_seed(0)
    batches = [(torch.randint(20, (2 * size,)), torch.arange(0, 2 * size, 2)) for size in (4, 3)]
    trains_as_pytorch(Bag(sparse=sparse, trained=trained), batches)


@pytest.mark.parametrize("keeps", [True, False], ids=["running statistics", "neither weight nor statistics"])
def test_instance_normalisation(keeps):
    """The generators of StarGAN, with running statistics, and of CycleGAN, also in eval()."""
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(6, affine=keeps, track_running_stats=keeps)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 2, 1))
    trains_as_pytorch(model, [(torch.randn(size, 3, 7, 7),) for size in (2, 4, 1)])


class Series(nn.Module):
    """The model of time_sequence_prediction: a cell that carries its state through the parts of a series."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(1, 5).double(), nn.Linear(5, 1).double()

    def forward(self, series):
        state = [torch.zeros(series.size(0), 5, dtype=torch.double) for _ in range(2)]
        results = []
        for part in series.split(1, dim=1):
            state = self.cell(part, state)
            results.append(self.out(state[0]))
        return torch.cat(results, dim=1)


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
def test_a_cell_in_a_loop_over_float64():
    torch.manual_seed(0)
    trains_as_pytorch(Series(), [(torch.randn(size, 4).double(),) for size in (3, 2)])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(_, gradient):
        return gradient * 2


def through_a_view(h, _):
    part = h[:, :2]
    Doubled.apply(part)
    return h * 3


def behind_a_write(h, _):
    part = h[:, :2]
    part.mul_(3)
    return Doubled.apply(h) + h


def written(h, _):
    Doubled.apply(h)
    return h * 3


@pytest.mark.parametrize("forward", [written, through_a_view, behind_a_write], ids=lambda one: one.__name__)
def test_a_function_that_writes_in_place(forward):
    torch.manual_seed(0)
    trains_as_pytorch(Forwards(forward), [(torch.randn(size, 4),) for size in (3, 2)])


def rows_and_columns(h, _):
    """As Informer puts the attention of some queries back among the means of the others."""
    context = h.mean(1)[:, None, None].expand(-1, 3, 4).clone()
    top = h.topk(2, dim=1)[1] % 3
    context[torch.arange(h.shape[0])[:, None], top, :] = torch.stack([h, h * 2], 1)
    return context


def after_a_slice(h, _):
    places, whole = h[:2].topk(3)[1], torch.zeros(5, 4) + h.sum()
    whole[1:4:2, places] = torch.stack([h[:2, :3], h[:2, 1:]])
    return whole


def apart_by_a_slice(h, _):
    rows, whole = torch.tensor([[0], [1]]), torch.zeros(2, 3, 4) + h.sum()
    whole[rows, ..., torch.tensor([[0, 2], [1, 3]])] = h[:2, :3].expand(2, 2, 3)
    return whole


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
@pytest.mark.parametrize(
    "forward", [rows_and_columns, after_a_slice, apart_by_a_slice], ids=lambda one: one.__name__
)
def test_an_assignment_to_places_in_several_dimensions(forward):
    torch.manual_seed(0)
    trains_as_pytorch(Forwards(forward), [(torch.randn(size, 4),) for size in (3, 2)])


@pytest.mark.filterwarnings("ignore:PyTorch computes inside the graph:UserWarning")
def test_complex_numbers_written_one_frequency_after_the_other():
    """As FEDformer fills a spectrum."""

    def filled(h, _):
        spectrum = torch.fft.rfft(h, dim=-1)
        out = torch.zeros(h.shape[0], 3, dtype=torch.cfloat)
        for place, frequency in enumerate((2, 0)):
            out[:, place] = spectrum[:, frequency] * 2
        out[0, 1:] = spectrum[1, 0]
        return torch.fft.irfft(out, n=4)

    torch.manual_seed(0)
    trains_as_pytorch(Forwards(filled), [(torch.randn(size, 4),) for size in (3, 2)])


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 2, x * 3

    @staticmethod
    def backward(_, one, other):
        return one * 2 + other * 3


class Outer(torch.autograd.Function):
    """As the reversible layers of Reformer: it applies another Function."""

    @staticmethod
    def forward(_, x):
        one, other = Inner.apply(x)
        return one + other

    @staticmethod
    def backward(_, gradient):
        return gradient * 5


def test_a_function_inside_a_function_is_refused_with_its_line(wrap):
    lab = wrap(Forwards(lambda h, _: Outer.apply(h)))
    with pytest.raises(
        BuildError, match=r"The autograd Function Inner is applied inside another .*test_outside_code"
    ):
        lab.module(torch.randn(3, 4))
