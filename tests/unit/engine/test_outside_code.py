"""What models of other people do that the zoo's do not: each trains as in PyTorch, over batches of several sizes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ortlab

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
