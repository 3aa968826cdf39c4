"""What is written down about an activation or a gradient, so that two of them can be compared without keeping both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SAMPLES: Final = 128
"""Elements that are kept as they are, from the first on; as many as ORTModule's own subscriber keeps."""

_ROWS: Final = 4
"""In how many rows the elements of a block lie where their squares are summed, row by row.

numpy's BLAS gives more than 10,000 numbers to several threads (OpenBLAS, ``ddot.c``), torch more than 2**15
(``GRAIN_SIZE``). Those have to wait for each other at the end, which takes longer than an operator of this size where
other work has one of the cores.
"""

_BLOCK: Final = _ROWS * 8176
"""Elements that are looked at together on the CPU: what is made of them stays in a core's cache."""

_LARGE_BLOCK: Final = 2**24
"""The same elsewhere, where each operator is a launch; it bounds the memory of the copies, 128 MiB."""

_OWN: Final = frozenset({"torch.float32", "torch.float64"})
"""Types whose extremes and signs are looked up in the tensor itself, not in its copy in float64."""


def blocks(flat: Tensor) -> tuple[Tensor, ...]:
    """Cut a tensor of one dimension into the parts that are looked at together; none for an empty one."""
    size = _BLOCK if flat.device.type == "cpu" else _LARGE_BLOCK
    return tuple(flat[start : start + size] for start in range(0, flat.numel(), size))


@dataclass(frozen=True)
class TensorStatistics:
    """The facts about a tensor."""

    shape: tuple[int, ...]  #: Its sizes
    dtype: str  #: Its element type, as torch prints it: "torch.float32"
    minimum: float  #: Over all elements; nan if one element is nan, and for an empty tensor
    maximum: float  #: See `minimum`
    mean: float  #: See `minimum`
    #: Standard deviation with n - 1 in the denominator, as `torch.std`; nan for fewer than two elements.
    std: float
    nan: int  #: How many elements are so
    inf: int  #: See `nan`
    negative: int  #: See `nan`
    positive: int  #: See `nan`
    zero: int  #: See `nan`
    sample: tuple[float, ...]  #: The first 128 elements

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
        look = _on_cpu(parts[0].numel()) if flat.device.type == "cpu" else _elsewhere
        seen = [look(part) for part in parts]
        sizes = [part.numel() for part in parts]
        means = [one.mean for one in seen]
        shift = sum((mean - means[0]) * size for mean, size in zip(means, sizes, strict=True)) / count
        average = means[0] + shift
        between = sum((mean - average) ** 2 * size for mean, size in zip(means, sizes, strict=True))
        variation = sum(one.squares for one in seen) + between
        minimum = float(np.min([one.low for one in seen]))  # nan if one is, which min() may not see
        maximum = float(np.max([one.high for one in seen]))
        nan = inf = 0
        if not (math.isfinite(minimum) and math.isfinite(maximum)):
            nan, inf = int(flat.isnan().sum()), int(flat.isinf().sum())
        negative, positive = sum(one.negative for one in seen), sum(one.positive for one in seen)
        return cls(
            tuple(tensor.shape),
            str(tensor.dtype),
            minimum,
            maximum,
            average,
            math.sqrt(variation / (count - 1)) if count > 1 else missing,
            nan,
            inf,
            negative,
            positive,
            count - negative - positive - nan,
            sample,
        )


class _OfBlock(NamedTuple):
    """What is seen of the elements of one block; squares are those of their distances to its mean."""

    low: float
    high: float
    negative: int
    positive: int
    mean: float
    squares: float


def _on_cpu(longest: int) -> Callable[[Tensor], _OfBlock]:
    """Return what looks at blocks on the CPU; numpy's reductions of a cached block are the quickest at hand."""
    import torch

    copy = torch.empty(_ROWS * -(-longest // _ROWS), dtype=torch.float64)
    wide, flags_of_all = copy.numpy(), np.empty(longest, dtype=np.bool_)
    rows = wide.reshape(_ROWS, -1)

    def look(block: Tensor) -> _OfBlock:
        size = block.numel()
        exact, flags = wide[:size], flags_of_all[:size]
        own = block.numpy() if str(block.dtype) in _OWN else block.to(torch.float64).numpy()
        np.copyto(exact, own)
        with np.errstate(all="ignore"):  # what nan and inf do to a mean is told by the mean
            low, high = float(np.minimum.reduce(own)), float(np.maximum.reduce(own))  # nan if one element is
            negative = int(np.count_nonzero(np.less(own, 0, out=flags)))
            positive = int(np.count_nonzero(np.greater(own, 0, out=flags)))
            mean = copy[:size].sum().item() / size
            exact -= mean
            wide[size:] = 0
            squares = float(np.matmul(rows[:, None, :], rows[:, :, None]).sum())
        return _OfBlock(low, high, negative, positive, mean, squares)

    return look


def _elsewhere(block: Tensor) -> _OfBlock:
    """Look at a block where its device is."""
    import torch

    exact = block.to(torch.float64)
    low, high = torch.aminmax(exact)  # nan if one element is
    mean = exact.sum().item() / block.numel()
    negative, positive = int((exact < 0).sum()), int((exact > 0).sum())
    return _OfBlock(low.item(), high.item(), negative, positive, mean, (exact - mean).square_().sum().item())
