"""Let a trace go where PyTorch does not: augmented assignments to tensors whose entries share memory.

PyTorch refuses to write to an expanded tensor. Models have branches for traces in which they do it nevertheless:
transformers 4.56 beside torch 2.4 joins a mask with ``mask |= ...`` (``masking_utils.sdpa_mask_older_torch``), where
without a trace it needs no mask. What the assignment means is clear, since the name stands for the result from then on,
and in a graph of values it can be had: it writes to a copy. Whoever looks at the old tensor later is refused, because
PyTorch has no answer that the graph could agree with.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ortlab.engine.tracing.not_traced import not_traced


class ExpandedWrites:
    """The tensors that writes have left behind, because the writes went to copies."""

    def __init__(self) -> None:
        self._left: list[weakref.ref[torch.Tensor]] = []

    def target(self, written: torch.Tensor) -> torch.Tensor:
        """Return what a write to a tensor goes to: the tensor itself, or a copy if its entries share memory."""
        if not _is_expanded(written):
            return written
        self._left.append(weakref.ref(written))
        return written.clone(memory_format=torch.contiguous_format)

    def stale(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Tell whether one of the tensors was left behind by a write."""
        return any(reference() is tensor for tensor in tensors for reference in self._left)


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    # Not the forward's question: a trace would bind its export to the sizes of the batch (see `input_sizes`).
    with torch._C.DisableTorchFunction(), not_traced():
        return any(
            size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
