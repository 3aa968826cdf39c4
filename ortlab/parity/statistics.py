"""What is written down about an activation or a gradient, so that two of them can be compared without keeping both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES: Final = 128
"""Elements that are kept as they are, from the first on; as many as ORTModule's own subscriber keeps."""

_BLOCK: Final = 2**15 - 64
"""Elements that are looked at together on the CPU: what is made of them stays in a core's cache.

From 2**15 on torch gives an operator to several threads (``GRAIN_SIZE``). Those have to wait for each other at its end,
which takes longer than an operator of this size where other work has one of the cores.
"""

_LARGE_BLOCK: Final = 2**24
"""The same elsewhere, where each operator is a launch; it bounds the memory of the copies, 128 MiB."""

_OWN: Final = frozenset({"torch.float32", "torch.float64"})
"""Types in which signs are counted as they are: sums of signs of a block are exact in them."""


def blocks(flat: Tensor) -> tuple[Tensor, ...]:
    """Cut a tensor of one dimension into the parts that are looked at together; none for an empty one."""
    size = _BLOCK if flat.device.type == "cpu" else _LARGE_BLOCK
    return tuple(flat[start : start + size] for start in range(0, flat.numel(), size))


@dataclass(frozen=True)
class TensorStatistics:
    """The facts about a tensor.

    Attributes
    ----------
    shape
        Its sizes.
    dtype
        Its element type, as torch prints it: "torch.float32".
    minimum, maximum, mean
        Over all elements; nan if one element is nan, and for an empty tensor.
    std
        Standard deviation with n - 1 in the denominator, as `torch.std`; nan for fewer than two elements.
    nan, inf, negative, positive, zero
        How many elements are so.
    sample
        The first 128 elements.
    """

    shape: tuple[int, ...]
    dtype: str
    minimum: float
    maximum: float
    mean: float
    std: float
    nan: int
    inf: int
    negative: int
    positive: int
    zero: int
    sample: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorStatistics:
        """Look once at every element of a tensor, block by block.

        Sums are taken in float64, of the distances to the mean of the block. Means and squares of blocks are combined
        as by Chan, Golub and LeVeque (1979), so that values far from zero lose no digits.

        Parameters
        ----------
        tensor
            Of any shape, real type and device.
        """
        import torch

        flat = tensor.detach().reshape(-1)
        sample = tuple(flat[:SAMPLES].to(torch.float64).tolist())
        parts, count, missing = blocks(flat), flat.numel(), float("nan")
        if not parts:
            of_nothing = (missing, missing, missing, missing, 0, 0, 0, 0, 0)
            return cls(tuple(tensor.shape), str(tensor.dtype), *of_nothing, sample)
        copy = torch.empty_like(parts[0], dtype=torch.float64)
        lows, highs, means, squares, balance, signed = [], [], [], [], 0.0, 0.0
        for block in parts:
            exact = copy[: block.numel()].copy_(block)
            wide = block if str(block.dtype) in _OWN else exact
            lows.append(wide.amin().item())  # nan if one element is
            highs.append(wide.amax().item())
            signs = torch.sign(wide)  # that of nan is 0
            balance += signs.sum().item()
            signed += signs.square_().sum().item()
            means.append(exact.sum().item() / block.numel())
            exact -= means[-1]
            squares.append(exact.square_().sum().item())  # torch.dot gives any size to several threads
        sizes = [block.numel() for block in parts]
        shift = sum((mean - means[0]) * size for mean, size in zip(means, sizes, strict=True)) / count
        average = means[0] + shift
        between = sum((mean - average) ** 2 * size for mean, size in zip(means, sizes, strict=True))
        variation = sum(squares) + between
        of_blocks = torch.tensor([lows, highs], dtype=torch.float64)
        minimum, maximum = of_blocks[0].min().item(), of_blocks[1].max().item()  # nan again, which min() may not see
        nan = inf = 0
        if not (math.isfinite(minimum) and math.isfinite(maximum)):
            nan, inf = int(flat.isnan().sum()), int(flat.isinf().sum())
        return cls(
            tuple(tensor.shape),
            str(tensor.dtype),
            minimum,
            maximum,
            average,
            math.sqrt(variation / (count - 1)) if count > 1 else missing,
            nan,
            inf,
            round(signed - balance) // 2,
            round(signed + balance) // 2,
            count - round(signed) - nan,
            sample,
        )
