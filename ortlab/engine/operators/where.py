"""Where in one pass over memory: `where.h`, a choice between two tensors, bit for bit as PyTorch chooses."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ortlab.engine.operators import compiled_calls
from ortlab.engine.operators.torch_kernels import broadcast, empty, kernel


@kernel("(Tensor condition, Tensor a, Tensor b) -> Tensor")
def where(condition: Tensor, a: Tensor, b: Tensor) -> Any:
    """Return `a` where the condition is true, else `b`."""
    shape = broadcast(condition.shape, a.shape, b.shape)
    made = empty(shape, a)
    if compiled_calls.lacking() or made.device.type != "cpu" or not a.dtype == b.dtype == torch.float32:
        return torch.where(condition.view(torch.bool), a, b, out=made)
    sources = condition, a, b
    steps = [step for one in sources for step in one.expand(shape).stride()]
    compiled_calls.library().ortlab_where(
        len(shape),
        (ctypes.c_int64 * len(shape))(*shape),
        (ctypes.c_int64 * len(steps))(*steps),
        *(ctypes.c_void_p(one.data_ptr()) for one in (*sources, made)),
    )
    return made
