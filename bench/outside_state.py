"""Models of public code whose forward writes to its buffers and weights, or computes with sizes and complex numbers."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm


class Discriminator(nn.Sequential):
    """SNGAN: each weight is divided by its largest singular value, which an iteration follows from step to step."""

    def __init__(self) -> None:
        super().__init__(
            spectral_norm(nn.Conv2d(3, 8, 3, 1, 1)),
            nn.LeakyReLU(0.1),
            spectral_norm(nn.Conv2d(8, 8, 4, 2, 1)),
            nn.LeakyReLU(0.1),
            nn.Flatten(),
            spectral_norm(nn.Linear(8 * 4 * 4, 1)),
        )


class Quantizer(nn.Module):
    """VQ-VAE-2: codes are moving averages of what is near them, which the forward writes by ``.data``."""

    def __init__(self, codes: int = 8, width: int = 4) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, width, 4, 2, 1), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        self.register_buffer("codes", torch.randn(width, codes))
        self.register_buffer("sizes", torch.zeros(codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the image again, and how far codes are from what they stand for."""
        found = self.encoder(image).permute(0, 2, 3, 1)
        flat = found.reshape(-1, self.codes.shape[0])
        apart = (
            flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes + self.codes.pow(2).sum(0, keepdim=True)
        )
        nearest = (-apart).max(1)[1]
        chosen = F.one_hot(nearest, self.codes.shape[1]).type(flat.dtype)
        code = F.embedding(nearest.view(*found.shape[:-1]), self.codes.t())
        if self.training:
            self.sizes.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.data.mul_(0.9).add_(flat.t() @ chosen, alpha=0.1)
            total = self.sizes.sum()
            sizes = (self.sizes + 1e-5) / (total + self.codes.shape[1] * 1e-5) * total
            self.codes.data.copy_(self.sums / sizes.unsqueeze(0))
        difference = (code.detach() - found).pow(2).mean()
        code = found + (code - found).detach()
        return self.decoder(code.permute(0, 3, 1, 2)), difference


class Renormed(nn.Conv2d):
    """A convolution whose filters the forward keeps within a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Renorm, then convolve."""
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=1.0)
        return super().forward(x)


class EegNet(nn.Sequential):
    """EEGNet: filters over time, then over channels."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, (1, 5), padding=(0, 2), bias=False),
            nn.BatchNorm2d(4),
            Renormed(4, 8, (4, 1), groups=4, bias=False),
            nn.BatchNorm2d(8),
            nn.ELU(),
            nn.AvgPool2d((1, 2)),
            nn.Flatten(),
            nn.Linear(32, 3),
        )


class Masked(nn.Conv2d):
    """A convolution that the forward keeps from seeing what comes later."""

    def __init__(self, channels: int, width: int, *, itself: bool) -> None:
        super().__init__(channels, width, 5, padding=2)
        mask = torch.ones_like(self.weight)
        mask[:, :, 2, 2 + itself :] = 0
        mask[:, :, 3:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mask, then convolve."""
        self.weight.data *= self.mask
        return super().forward(x)


class PixelCnn(nn.Sequential):
    """PixelCNN: each pixel from those before it."""

    def __init__(self) -> None:
        super().__init__(
            Masked(1, 8, itself=False), nn.ReLU(), Masked(8, 8, itself=True), nn.ReLU(), nn.Conv2d(8, 4, 1)
        )


class BarlowTwins(nn.Module):
    """Barlow Twins: its loss writes through the diagonal of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.norm = nn.BatchNorm1d(6, affine=False)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the loss of two views."""
        product = self.norm(self.net(one)).t() @ self.norm(self.net(other))
        product.div_(len(one))
        kept = torch.diagonal(product).add_(-1).pow_(2).sum()
        count = len(product)
        others = product.flatten()[:-1].view(count - 1, count + 1)[:, 1:].flatten()
        return kept + 0.005 * others.pow_(2).sum()


class Dino(nn.Module):
    """DINO: a teacher that follows its student, and a centre that follows the teacher's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 6), nn.Linear(8, 6)
        self.teacher.requires_grad_(requires_grad=False)
        self.register_buffer("centre", torch.zeros(1, 6))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return the loss of two views."""
        with torch.no_grad():
            for ours, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                theirs.data.mul_(0.99).add_(0.01 * ours.detach().data)
            taught = self.teacher(other)
        wanted = F.softmax((taught - self.centre) / 0.04, -1)
        with torch.no_grad():
            self.centre = self.centre * 0.9 + taught.mean(0, keepdim=True) * 0.1
        return -(wanted * F.log_softmax(self.student(one) / 0.1, -1)).sum(-1).mean()


class Modulated(nn.Module):
    """StyleGAN2: a convolution with as many groups as there are samples."""

    def __init__(self, channels: int = 4, width: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, width, channels, 3, 3))
        self.style, self.strength = nn.Linear(8, channels), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        """Return an image of twice the size, with noise."""
        count, channels, height, width = x.shape
        weight = self.weight * self.style(style).view(count, 1, channels, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)
        weight = weight.view(-1, channels, 3, 3)
        x = F.conv2d(x.view(1, count * channels, height, width), weight, padding=1, groups=count)
        x = F.interpolate(x.view(count, -1, height, width), scale_factor=2, mode="bilinear")
        return F.leaky_relu(x + self.strength * x.new_empty(count, 1, 2 * height, 2 * width).normal_(), 0.2)


class S4d(nn.Module):
    """S4D: a kernel as long as the sequence, of complex exponentials."""

    def __init__(self, channels: int = 4, states: int = 6) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(channels, states, 2))
        self.step = nn.Parameter(torch.randn(channels) * 0.1 - 3)
        self.decay = nn.Parameter(torch.log(0.5 * torch.ones(channels, states)))
        self.turn = nn.Parameter(math.pi * torch.arange(states).float().repeat(channels, 1))
        self.skip = nn.Parameter(torch.randn(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve by Fourier transforms."""
        length, step = x.shape[-1], torch.exp(self.step)
        power = -torch.exp(self.decay) + 1j * self.turn
        kernel = (power * step.unsqueeze(-1)).unsqueeze(-1) * torch.arange(length)
        mix = torch.view_as_complex(self.mix) * (torch.exp(power * step.unsqueeze(-1)) - 1.0) / power
        kernel = 2 * torch.einsum("hn,hnl->hl", mix, torch.exp(kernel)).real
        seen = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return F.gelu(torch.fft.irfft(seen, n=2 * length)[..., :length] + x * self.skip.unsqueeze(-1))


def two(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two views of some samples."""
    return torch.randn(4 * count, 8), torch.randn(4 * count, 8)
