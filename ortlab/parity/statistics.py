"""What is written down about an activation or a gradient, so that two of them can be compared without keeping both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES: Final = 128
"""Elements that are kept as they are, from the first on; as many as ORTModule's own subscriber keeps."""

_BLOCK: Final = 2**24
"""Elements that are looked at together, which bounds the memory for it: float64 copies of 128 MiB."""


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
        """Look once at every element of a tensor, in float64.

        Means and squares of blocks are combined as by Chan, Golub and LeVeque (1979), so that values far from zero
        lose no digits.

        Parameters
        ----------
        tensor
            Of any shape, real type and device.
        """
        import torch

        flat = tensor.detach().reshape(-1)
        count, mean, squares = 0, 0.0, 0.0
        smallest, largest = [], []
        counts = dict.fromkeys(("nan", "inf", "negative", "positive", "zero"), 0)
        for block in torch.split(flat, _BLOCK) if flat.numel() else ():
            low, high = torch.aminmax(block)  # both are nan if one element is
            if block.is_floating_point() and not (math.isfinite(low) and math.isfinite(high)):
                counts["nan"] += int(block.isnan().sum())
                counts["inf"] += int(block.isinf().sum())
            counts["negative"] += int(torch.count_nonzero(block < 0))
            counts["positive"] += int(torch.count_nonzero(block > 0))
            counts["zero"] += block.numel() - int(torch.count_nonzero(block))
            smallest.append(low.to(torch.float64))
            largest.append(high.to(torch.float64))
            variance, block_mean = torch.var_mean(block.to(torch.float64), correction=0)
            apart, total = float(block_mean) - mean, count + block.numel()
            squares += float(variance) * block.numel() + apart**2 * count * block.numel() / total
            mean += apart * block.numel() / total
            count = total
        missing = float("nan")
        return cls(
            tuple(tensor.shape),
            str(tensor.dtype),
            float(torch.stack(smallest).min()) if smallest else missing,
            float(torch.stack(largest).max()) if largest else missing,
            mean if count else missing,
            (squares / (count - 1)) ** 0.5 if count > 1 else missing,
            **counts,
            sample=tuple(flat[:SAMPLES].to(torch.float64).tolist()),
        )
