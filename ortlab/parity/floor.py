"""The floor: what rounding and repetition explain of a difference, and what stands still meanwhile."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ortlab.parity.parity import FORWARD, OUTPUT_GRADIENT, Site

if TYPE_CHECKING:
    from ortlab.parity.tensor_comparison import Compared, Reference

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


FACTOR: Final = 4.0
"""A distance counts as a difference from this multiple of the measured floor on.

The floor is made by moving each number that a module returns by at most `UNITS` = 4 units of rounding, evenly
spread: 4 / sqrt(3) = 2.3 units in the mean of squares, which is what 64 roundings in a row come to, since each is off
by half a unit at most, 0.29 in the mean of squares. Four floors are 1,000 roundings in a row. Where engines agree,
hardly a tensor is more than one floor apart: ``bench/fault_finding.py`` states how near its clean pairs come.
"""

LEAST: Final = 16.0
MOST: Final = 256.0
"""Bounds of the units of rounding that every limit allows; between them it is the root of the length of sums."""


def limits(
    reference: Reference, rounded: Compared, repeated: Iterable[Compared], own_use: Collection[Site] = ()
) -> dict[Site, tuple[float, float]]:
    """Return the floor and the limit of each site, both relative distances.

    Two orders of a sum of n numbers differ by sqrt(n) units with a probability near one, since each of the two is off
    by up to sqrt(n) / 2 (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019). How long
    the sums of a step are is told by the largest of its tensors: at most as long as its last dimension, or as the
    others together.

    `rounded` is the run with other rounding; what the `repeated` runs differ by is chance. `own_use` has the sites of
    outputs that their modules have used, too: there the run with other rounding moves only what others get, a part of
    the gradient.
    """
    in_part = {replace(site, kind=OUTPUT_GRADIENT) for site in own_use}
    chances = [one.distances for one in repeated]
    by_call = _by_call(rounded)
    units = min(MOST, max(LEAST, math.sqrt(reference.longest)))
    found = {}
    for site, epsilon in reference.epsilon.items():
        known = None if site in in_part else rounded.distances.get(site)
        floor = by_call.get(_call(site), 0.0) if known is None else known.relative
        floor = max([floor, *(one[site].relative for one in chances if site in one)])
        found[site] = (floor, max(FACTOR * floor, units * epsilon))
    return found


def _by_call(rounded: Compared) -> Mapping[tuple[object, ...], float]:
    """Return the middle floor of each call's forward and backward.

    It serves tensors that the run with other rounding does not have. The gradient of what a module returns and has used
    itself before, such as the probabilities of an attention, is one: what is moved is the tensor that is returned.
    """
    found: dict[tuple[object, ...], list[float]] = {}
    for site, distance in rounded.distances.items():
        found.setdefault(_call(site), []).append(distance.relative)
    return {call: median(floors) for call, floors in found.items()}


def _call(site: Site) -> tuple[object, ...]:
    return site.step, site.module, site.call, site.kind in FORWARD
