"""Faults in what PyTorch computes, which parity looks for; what ONNX Runtime is traced from stays as it is."""

from __future__ import annotations

import torch


class Multiplied(torch.autograd.Function):
    """A value, and its gradient, times a factor each."""

    @staticmethod
    def forward(ctx, tensor, ahead, back):
        ctx.back = back
        return tensor * ahead

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.back, None, None


def spoil(tensor, *, ahead=1.0, back=1.0):
    """Multiply a tensor and its gradient where PyTorch computes it; in a trace it stays as it is."""
    return tensor if torch._C._get_tracing_state() else Multiplied.apply(tensor, ahead, back)


def spoil_module(part, **factors):
    """Do so with what a module returns."""
    original = part.forward
    part.forward = lambda *args, **kwargs: spoil(original(*args, **kwargs), **factors)
