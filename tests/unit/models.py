"""Small seeded models for tests of the lab."""

from __future__ import annotations

import torch
from torch import nn


class Classifier(nn.Module):
    """A classifier with dropout and batch normalisation, and a flag that its forward branches on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, *, doubled: bool = False) -> torch.Tensor:
        hidden = self.norm(nn.functional.gelu(self.dropout(self.hidden(x))))
        return self.head(hidden * 2 if doubled else hidden)


class Tripled(torch.autograd.Function):
    """A square whose gradient is not the one that a tracer finds, so that the two can be told apart."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * gradient


class Custom(nn.Linear):
    """A layer whose gradients depend on `custom_autograd`: traced through, they are two thirds of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tripled.apply(super().forward(x))


class Experiment:
    """A model, an optimizer, a batch, and a training step over them."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(7)
        self.model = Classifier(dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(16, 4)
        self.y = torch.randint(0, 3, (16,))

    def step(self) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> list[torch.Tensor]:
        """Every tensor that a failed call must leave as it was, copied."""
        optimizer = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = (*self.model.state_dict().values(), *optimizer, torch.get_rng_state())
        return [tensor.detach().clone() for tensor in tensors]
