"""Function transforms of `torch.func`, and forward-mode differentiation, stop at a wrapped model."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ortlab.errors import ExecutionError


def refuse_transforms() -> None:
    """Raise ExecutionError if a call comes from inside a transform, whose tensors ONNX Runtime cannot see through.

    That is in `torch.func.grad`, `vmap`, `jvp`, `jacrev` and their like, and in `torch.autograd.forward_ad.dual_level`.
    """
    functorch: Any = torch._C._functorch
    layer = functorch.peek_interpreter_stack()
    if layer is not None:
        name = f"torch.func's {str(layer.key()).rpartition('.')[2].lower()} transform"
    elif forward_ad._current_level >= 0:
        name = "forward-mode differentiation (torch.autograd.forward_ad)"
    else:
        return
    raise ExecutionError(
        f"A wrapped model was called inside {name}.",
        why="ONNX Runtime computes outputs and, with backward(), gradients; a transform needs PyTorch's own operators.",
        fix="Call it outside, or with PyTorch: lab.set(engine='eager').",
    )
