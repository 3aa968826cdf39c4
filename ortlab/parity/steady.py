"""What has to stand still before numbers are compared: dropout off, deterministic kernels, rounding that is known."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPOUTS: Final = {
    getattr(functional, name): inspect.signature(getattr(functional, name))
    for name in (
        *("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"),
    )
}
UNITS: Final = 4.0
"""How many units of rounding a tensor is moved by: about what another order of summation does to a product."""


class WithoutDropout(TorchFunctionMode):
    """Lets every dropout in the block pass everything on, whoever calls it, in a trace as well."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0  # calls of a dropout that would have dropped something

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function` so that it drops nothing."""
        given = dict(kwargs or {})
        if function in _DROPOUTS:
            bound = _DROPOUTS[function].bind(*args, **given)
            bound.apply_defaults()
            self.found += bool(bound.arguments["training"] and bound.arguments["p"])
            bound.arguments["training"] = False
            return function(*bound.args, **bound.kwargs)
        if function is functional.scaled_dot_product_attention:
            place = 4  # query, key, value, attn_mask, dropout_p
            share = args[place] if len(args) > place else given.get("dropout_p", 0.0)
            self.found += bool(share)
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in given:
                given["dropout_p"] = 0.0
        return function(*args, **given)


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask torch and the sessions that ONNX Runtime makes meanwhile for deterministic kernels, where there are any."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
            yield
    finally:
        torch.use_deterministic_algorithms(mode=before[0], warn_only=before[1])


class Jitter:
    """Moves each number of a tensor, and of its gradient, by a few units of rounding, at random.

    What differs after that differs by rounding alone; the random numbers are its own.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, moved."""
        device = tensor.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(2)
        moved = torch.rand(
            tensor.shape, generator=self._generators[device], device=device, dtype=torch.float32
        )
        by = (moved * 2 - 1) * (UNITS * torch.finfo(tensor.dtype).eps)
        factor = (1 + by.to(torch.float64)).to(tensor.dtype)
        product: torch.Tensor = _Times.apply(tensor, factor)  # type: ignore[no-untyped-call]
        return product


class _Times(torch.autograd.Function):
    """A product that saves no tensor: torch.utils.checkpoint counts them, and what it repeats is not moved again."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.factor = factor
        return tensor * factor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None
