"""The part that holds FusedAdam and the functions of FP16_Optimizer against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from ortlab.checks.selftest_trial import Device, Size, Trial, not_run
from ortlab.records.selftest import Finding

if TYPE_CHECKING:
    import torch

_MODES: Final = {0: "L2", 1: "decay as in transformers", 2: "decay as in torch"}
_AS_TORCH: Final = 2
_LR, _DECAY, _EPS = 1e-2, 0.1, 1e-6
_BOUND: Final = 1e-5
"""Largest difference from float64, relative to the largest number: some roundings of float32 (6e-8) in five steps."""


def optimizers(device: Device, size: Size) -> Iterator[Trial]:
    """Take steps of FusedAdam in each of its modes; take a norm as FP16_Optimizer does."""
    for mode, words in _MODES.items():
        name = f"FusedAdam, {words}"
        if size == "tiny" and mode:
            yield not_run("optimizers", name, "the tiny form tries one mode")
        else:
            yield Trial("optimizers", name, partial(_steps, name, mode, device))
    name = "FP16_Optimizer's norm of float16 gradients"
    yield Trial("optimizers", name, partial(_norm, name, device))
    for library, what in {"DeepSpeed": "DeepSpeed ZeRO", "Apex": "Apex O2"}.items():
        yield not_run("optimizers", f"FP16_Optimizer, {what}", f"the self-test does not start {library}")


def _steps(name: str, mode: int, device: Device) -> list[Finding]:
    import torch

    from ortlab.optim import fused_adam
    from ortlab.records.runs import optimizer_name

    torch.manual_seed(5)
    value = torch.nn.Parameter(torch.randn(4096, device=device))
    optimizer = fused_adam([value], lr=_LR, adam_w_mode=mode, weight_decay=_DECAY, eps=_EPS)
    exact = _Adam(value.detach().double(), mode)
    for _ in range(5):
        value.grad = torch.randn_like(value) * 1e-3
        exact.step(value.grad.double())
        optimizer.step()
    apart = _apart(value.detach().double(), exact.value)
    said = f"{optimizer_name(optimizer)}; differs from float64 by {apart:.2g}"
    return [Finding.held_to(_BOUND, "optimizers", name, said, apart)]


class _Adam:
    """Adam in float64 as ``multi_tensor_adam.cu`` of 1.19.2 writes it, with bias correction and torch's betas."""

    def __init__(self, value: torch.Tensor, mode: int) -> None:
        import torch

        self.value = value.clone()
        self._mean, self._square = torch.zeros_like(value), torch.zeros_like(value)
        self._mode, self._count = mode, 0

    def step(self, slope: torch.Tensor) -> None:
        self._count += 1
        first, second = 1 - 0.9**self._count, 1 - 0.999**self._count
        if self._mode == 0:
            slope = slope + _DECAY * self.value
        if self._mode == _AS_TORCH:
            self.value = self.value * (1 - _LR * _DECAY)
        self._mean = 0.9 * self._mean + 0.1 * slope
        self._square = 0.999 * self._square + 0.001 * slope * slope
        if self._mode == _AS_TORCH:
            root = (self._square / second).sqrt() + _EPS
            self.value = self.value - _LR * self._mean / (first * root)
        else:
            root = self._square.sqrt() + _EPS
            self.value = self.value - _LR * math.sqrt(second) / first * self._mean / root
        if self._mode == 1:
            self.value = self.value * (1 - _LR * _DECAY)


def _norm(name: str, device: Device) -> list[Finding]:
    import torch

    from ortlab.engine import fused_ops

    torch.manual_seed(6)
    tensors = [(100 * torch.randn(size, device=device)).half() for size in (30_000, 17, 1)]
    norm, _ = fused_ops.multi_tensor_l2norm(2048 * 32, None, [tensors])
    exact = torch.cat([one.double() for one in tensors]).norm()
    apart = _apart(norm.double(), exact.reshape(1))
    return [Finding.held_to(_BOUND, "optimizers", name, f"differs from float64 by {apart:.2g}", apart)]


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()
