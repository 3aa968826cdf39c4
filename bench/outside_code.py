"""Small models as people write them in plain torch: nanoGPT, PyTorch Geometric, Time-Series-Library, pytorch/examples.

Each keeps what the original does that a tracer or ONNX finds hard; widths and depths are tiny.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LENGTH, CHANNELS = 16, 12, 4


class NanoGPT(nn.Module):
    """nanoGPT: a causal mask in a buffer, tied weights, positions by an arange, the loss inside."""

    def __init__(self, *, flash: bool = False, words: int = 50) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, WIDTH), nn.Embedding(32, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.tokens.weight = self.head.weight
        self.flash = flash
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and loss."""
        batch, length = idx.size()
        assert length <= 32, f"Cannot forward sequence of length {length}"  # noqa: PLR2004
        x = self.tokens(idx) + self.positions(torch.arange(0, length, dtype=torch.long, device=idx.device))
        q, k, v = self.attention(self.norms[0](x)).split(WIDTH, dim=2)
        q, k, v = (one.view(batch, length, 2, WIDTH // 2).transpose(1, 2) for one in (q, k, v))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        x = x + self.projection(y.transpose(1, 2).contiguous().view(batch, length, WIDTH))
        x = x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
        logits = self.head(self.norms[2](x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def words(count: int, *, number: int = 50) -> torch.Tensor:
    """Return a batch of texts."""
    return torch.randint(number, (count, LENGTH))


# --- graphs, as PyTorch Geometric computes them ---------------------------------------------------------------------


class Sage(nn.Module):
    """GraphSAGE: what neighbours send is aggregated by `index_add`, or by a maximum."""

    def __init__(self, aggregation: str) -> None:
        super().__init__()
        self.aggregation = aggregation
        self.neighbours, self.own = nn.Linear(CHANNELS, WIDTH), nn.Linear(CHANNELS, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return scores of classes for each node."""
        source, target = edges
        messages = x[source]
        index = target.view(-1, 1).expand_as(messages)
        out = x.new_zeros(x.size(0), messages.size(1))
        if self.aggregation == "max":
            out = out.scatter_reduce(0, index, messages, reduce="amax", include_self=False)
        else:
            count = x.new_zeros(x.size(0)).scatter_add_(0, target, torch.ones_like(target, dtype=x.dtype))
            out = out.index_add_(0, target, messages) / count.clamp(min=1).unsqueeze(-1)
        return self.out(F.relu(self.neighbours(out) + self.own(x))).log_softmax(dim=-1)


class Gat(nn.Module):
    """GAT: a softmax over the neighbours of each node, whose maximum is scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(CHANNELS, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return features of each node."""
        h, nodes = self.linear(x), x.size(0)
        source, target = edges[0], edges[1]
        score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], dim=-1)), 0.2).squeeze(-1)
        largest = torch.full((nodes,), float("-inf")).scatter_reduce(0, target, score.detach(), reduce="amax")
        weight = (score - largest[target]).exp()
        total = x.new_zeros(nodes).scatter_add(0, target, weight)
        weight = weight / (total[target] + 1e-16)
        return x.new_zeros(nodes, h.size(1)).index_add(0, target, weight.unsqueeze(-1) * h[source])


class Gcn(nn.Module):
    """GCN: degrees to the power of -0.5, infinite ones to zero, and a pooling by graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """Return scores of classes for each node."""
        loops = torch.arange(x.size(0)).repeat(2, 1)
        source, target = torch.cat([edges, loops], dim=1)
        degree = x.new_zeros(x.size(0)).scatter_add_(0, target, x.new_ones(target.size(0)))
        power = degree.pow(-0.5)
        power = power.masked_fill_(power == float("inf"), 0)
        norm = (power[source] * power[target]).view(-1, 1)
        h = x.new_zeros(x.size(0), WIDTH).index_add(0, target, norm * self.linear(x)[source])
        return self.out(h.relu())


def graph(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of nodes, and edges."""
    nodes = 4 * count
    return torch.randn(nodes, CHANNELS), torch.randint(nodes, (2, 3 * nodes))


# --- series, as in Time-Series-Library ------------------------------------------------------------------------------


class ProbAttention(nn.Module):
    """Informer: keys are sampled, the queries that differ most get attention, the others the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same size."""
        batch, length, _ = x.shape
        q, k, v = (one(x).view(batch, length, 2, -1).transpose(1, 2) for one in self.project[:3])
        sampled = min(2 * math.ceil(math.log(length)), length)
        expanded = k.unsqueeze(-3).expand(batch, 2, length, length, WIDTH // 2)
        index = torch.randint(length, (length, sampled))
        sample = expanded[:, :, torch.arange(length).unsqueeze(1), index, :]
        scores = torch.matmul(q.unsqueeze(-2), sample.transpose(-2, -1)).squeeze(-2)
        sparsity = scores.max(-1)[0] - torch.div(scores.sum(-1), length)
        top = sparsity.topk(sampled, sorted=False)[1]
        chosen = q[torch.arange(batch)[:, None, None], torch.arange(2)[None, :, None], top, :]
        weights = torch.softmax(torch.matmul(chosen, k.transpose(-2, -1)) / math.sqrt(WIDTH // 2), dim=-1)
        context = v.mean(dim=-2).unsqueeze(-2).expand(batch, 2, length, v.shape[-1]).clone()
        context[torch.arange(batch)[:, None, None], torch.arange(2)[None, :, None], top, :] = torch.matmul(
            weights, v
        ).type_as(context)
        return self.project[3](context.transpose(1, 2).reshape(batch, length, -1))


class AutoCorrelation(nn.Module):
    """Autoformer: by a Fourier transform, the delays at which a series is most like itself are found and rolled by.

    `by_batch` says that one set of delays is taken for the whole batch, as in training.
    """

    def __init__(self, *, by_batch: bool) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.by_batch = by_batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same size."""
        batch, length, _ = x.shape
        q, k, v = (
            one(x).view(batch, length, 2, -1).permute(0, 2, 3, 1).contiguous() for one in self.project[:3]
        )
        both = torch.fft.rfft(q, dim=-1) * torch.conj(torch.fft.rfft(k, dim=-1))
        correlation = torch.fft.irfft(both, n=length, dim=-1)
        top = int(math.log(length))
        mean = torch.mean(torch.mean(correlation, dim=1), dim=1)
        if self.by_batch:
            index = torch.topk(torch.mean(mean, dim=0), top, dim=-1)[1]
            weights = torch.stack([mean[:, index[i]] for i in range(top)], dim=-1)
            shifted = [torch.roll(v, -int(index[i]), -1) for i in range(top)]
        else:
            weights, delay = torch.topk(mean, top, dim=-1)
            places = torch.arange(length).view(1, 1, 1, -1).repeat(batch, 2, WIDTH // 2, 1)
            twice = v.repeat(1, 1, 1, 2)
            shifted = [
                torch.gather(
                    twice, -1, places + delay[:, i].view(-1, 1, 1, 1).repeat(1, 2, WIDTH // 2, length)
                )
                for i in range(top)
            ]
        weights = torch.softmax(weights, dim=-1)
        out = torch.zeros_like(v).float()
        for i in range(top):
            out = out + shifted[i] * weights[:, i].view(-1, 1, 1, 1)
        return self.project[3](out.permute(0, 3, 1, 2).reshape(batch, length, -1))


class FourierBlock(nn.Module):
    """FEDformer: some frequencies are mixed by complex weights and written into a spectrum of zeros."""

    def __init__(self) -> None:
        super().__init__()
        modes = sorted(random.Random(0).sample(range(LENGTH // 2), 4))
        self.modes = modes
        self.real = nn.Parameter(torch.rand(2, WIDTH // 2, WIDTH // 2, len(modes)) / WIDTH)
        self.imaginary = nn.Parameter(torch.rand(2, WIDTH // 2, WIDTH // 2, len(modes)) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same size."""
        batch, length, _ = x.shape
        spectrum = torch.fft.rfft(x.view(batch, length, 2, -1).permute(0, 2, 3, 1), dim=-1)
        out = torch.zeros(batch, 2, WIDTH // 2, length // 2 + 1, dtype=torch.cfloat)
        weights = torch.complex(self.real, self.imaginary)
        for place, mode in enumerate(self.modes):
            out[:, :, :, place] = torch.einsum(
                "bhi,hio->bho", spectrum[:, :, :, mode], weights[:, :, :, place]
            )
        return torch.fft.irfft(out, n=length).permute(0, 3, 1, 2).reshape(batch, length, -1)


class Periods(nn.Module):
    """TimesNet: the strongest periods of the batch fold a series into images, which are convolved."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of the same size."""
        batch, length, width = x.size()
        spectrum = torch.fft.rfft(x, dim=1)
        strength = abs(spectrum).mean(0).mean(-1)
        strength[0] = 0
        top = torch.topk(strength, 2)[1].detach().cpu().numpy()
        weights = abs(spectrum).mean(-1)[:, top]
        results = []
        for period in length // top:
            padded = length if length % period == 0 else (length // period + 1) * period
            out = (
                torch.cat([x, torch.zeros([batch, padded - length, width])], dim=1) if padded > length else x
            )
            out = out.reshape(batch, padded // period, period, width).permute(0, 3, 1, 2).contiguous()
            out = self.convolve(out).permute(0, 2, 3, 1).reshape(batch, -1, width)
            results.append(out[:, :length, :])
        weights = F.softmax(weights, dim=1).unsqueeze(1).unsqueeze(1).repeat(1, length, width, 1)
        return torch.sum(torch.stack(results, dim=-1) * weights, -1) + x


class Decomposed(nn.Module):
    """DLinear: a moving average, and a linear layer along the time for each part."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.season, self.trend = nn.AvgPool1d(5, 1), nn.Linear(LENGTH, 6), nn.Linear(LENGTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next six values."""
        padded = torch.cat([x[:, :1].repeat(1, 2, 1), x, x[:, -1:].repeat(1, 2, 1)], dim=1)
        mean = self.average(padded.permute(0, 2, 1)).permute(0, 2, 1)
        season, trend = (x - mean).permute(0, 2, 1), mean.permute(0, 2, 1)
        return (self.season(season) + self.trend(trend)).permute(0, 2, 1)[:, -6:]


class Patches(nn.Module):
    """PatchTST: a series is normalised, unfolded into patches, and restored at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encode, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(6 * WIDTH, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next six values."""
        means = x.mean(1, keepdim=True).detach()
        x = x - means
        spread = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x /= spread
        patches = F.pad(x.permute(0, 2, 1), (0, 2), mode="replicate").unfold(-1, 4, 2)
        batch, channels, number, size = patches.shape
        out = self.encode(self.embed(patches.reshape(batch * channels, number, size)))
        out = self.head(out.reshape(batch, channels, -1)).permute(0, 2, 1)
        return out * spread[:, 0, :].unsqueeze(1).repeat(1, 6, 1) + means[:, 0, :].unsqueeze(1).repeat(
            1, 6, 1
        )


class Embedded(nn.Module):
    """A block between an embedding of a series and a head."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.embed, self.block = nn.Conv1d(CHANNELS, WIDTH, 3, padding=1, padding_mode="circular"), block
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a series of the same size."""
        h = self.embed(x.permute(0, 2, 1)).transpose(1, 2)
        return self.head(self.norm(h + self.block(h)))


def series(count: int) -> tuple[torch.Tensor]:
    """Return a batch of series."""
    return (torch.randn(count, LENGTH, CHANNELS),)


# --- pytorch/examples and tutorials ---------------------------------------------------------------------------------


class WordModel(nn.Module):
    """word_language_model: an LSTM whose hidden state is handed in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = (
            nn.Embedding(50, WIDTH),
            nn.LSTM(WIDTH, WIDTH, 2),
            nn.Linear(WIDTH, 50),
        )

    def forward(self, text: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Return log-probabilities and the next hidden state."""
        output, hidden = self.rnn(self.encoder(text), hidden)
        return F.log_softmax(self.decoder(output).view(-1, 50), dim=1), hidden


class Vae(nn.Module):
    """vae: drawn with randn_like, with a deviation of zero here, so that two engines can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = nn.Linear(64, 20), nn.Linear(20, 4), nn.Linear(20, 4)
        self.decode, self.out = nn.Linear(4, 20), nn.Linear(20, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the image, mean and logarithm of the variance."""
        h = F.relu(self.encode(x.view(-1, 64)))
        mean, spread = self.mean(h), self.spread(h)
        z = mean + 0.0 * torch.randn_like(spread) * torch.exp(0.5 * spread)
        return torch.sigmoid(self.out(F.relu(self.decode(z)))), mean, spread


class Translation(nn.Module):
    """The seq2seq tutorial: attention in a decoder that goes word by word, with its own words or the target's."""

    def __init__(self, *, forcing: bool) -> None:
        super().__init__()
        self.embed, self.encoder, self.decoder = (
            nn.Embedding(50, WIDTH),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.GRU(2 * WIDTH, WIDTH, batch_first=True),
        )
        self.query, self.key, self.score, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 1),
            nn.Linear(WIDTH, 50),
        )
        self.forcing = forcing

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of each word."""
        keys, hidden = self.encoder(self.embed(source))
        word = torch.empty(source.size(0), 1, dtype=torch.long).fill_(1)
        outputs = []
        for place in range(6):
            query = hidden.permute(1, 0, 2)
            scores = self.score(torch.tanh(self.query(query) + self.key(keys))).squeeze(2).unsqueeze(1)
            context = torch.bmm(F.softmax(scores, dim=-1), keys)
            output, hidden = self.decoder(torch.cat((self.embed(word), context), dim=2), hidden)
            output = self.out(output)
            outputs.append(output)
            word = target[:, place].unsqueeze(1) if self.forcing else output.topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


class StyleNet(nn.Module):
    """fast_neural_style: reflection padding, instance normalisation, upsampling by nearest neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.first, self.norm = (
            nn.ReflectionPad2d(4),
            nn.Conv2d(3, 8, 9),
            nn.InstanceNorm2d(8, affine=True),
        )
        self.down, self.out = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 3, 3, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return an image."""
        h = F.relu(self.down(F.relu(self.norm(self.first(self.pad(image))))))
        return self.out(F.interpolate(h, mode="nearest", scale_factor=2))


class Siamese(nn.Module):
    """siamese_network: one network for two images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.head = nn.Sequential(
            nn.Linear(4 * 7 * 7 * 2, 16), nn.ReLU(inplace=True), nn.Linear(16, 1), nn.Sigmoid()
        )

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return how alike they are."""
        parts = [self.features(image).view(image.size()[0], -1) for image in (one, other)]
        return self.head(torch.cat(parts, 1))
