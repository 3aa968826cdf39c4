"""Tensors inside a forward that are not the output of a module, handed over by the model's own code (row I6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    Listener = Callable[[str, torch.Tensor], torch.Tensor]

LISTENERS: Final[list[Listener]] = []
"""Called with name and tensor, in order; each returns what takes the tensor's place, with its value."""


def inspect_activation(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Let whoever listens see a tensor inside a forward, and its gradient in the backward.

    It is the identity, on PyTorch and on ONNX Runtime, and gradients pass through. Nobody listens unless something is
    subscribed (`lab.subscribe`); it then costs nothing and may stay in the model, where
    upstream's function of that name raises.

    Parameters
    ----------
    name
        What the tensor is called in files and tables.
    tensor
        Of any shape, dtype and device.

    Returns
    -------
    torch.Tensor
        The same values; go on with it, so that the gradient is seen.

    Examples
    --------
    >>> scores = ortlab.parity.inspect_activation("scores", query @ key.transpose(-1, -2))
    """
    for listener in tuple(LISTENERS):
        tensor = listener(name, tensor)
    return tensor
