"""The batches of a search, checked to have the size that was asked for, and the step that trains on one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from ortlab.engine.exhaustion import ran_out, reason
from ortlab.errors import OptionError, StepError

if TYPE_CHECKING:
    MakeBatch = Callable[[int], Any]
    Train = Callable[[Any], object]

_EXAMPLE = (
    'lab.find_batch_size(lambda size: {name: tensor[:size] for name, tensor in data.items()}, limit="6 GiB")'
)


def checked_batch(make_batch: MakeBatch, size: int) -> Any:
    """Make a batch and check that a tensor of it has `size` as its first dimension.

    Raises OptionError where `make_batch` fails, or returns no tensors or none of that size; MemoryError where memory
    runs out meanwhile.
    """
    try:
        batch = make_batch(size)
    except Exception as error:
        if ran_out(error):
            raise MemoryError(f"make_batch({size}): {error}") from error
        raise OptionError(
            f"make_batch({size}) failed: {reason(error)}.",
            fix="Try it by itself; it must return a batch of any size.",
        ) from error
    tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise OptionError(
            f"make_batch({size}) returned a {type(batch).__name__} without tensors.",
            why="A batch is a mapping, a tuple or a tensor; its size is that of the tensors' first dimension.",
            fix=_EXAMPLE,
        )
    if not any(tensor.size(0) == size for tensor in tensors):
        shapes = ", ".join(" x ".join(map(str, tensor.shape)) for tensor in tensors[:3])
        raise OptionError(
            f"make_batch({size}) returned a batch of {tensors[0].size(0)}: its tensors are {shapes}.",
            why="The first dimension of one tensor at least must be the size that was asked for.",
            fix=_EXAMPLE,
        )
    return batch


def check_callable(thing: object, name: str) -> None:
    """Raise OptionError for what cannot be called."""
    if not callable(thing):
        raise OptionError(f"{name} must be a function, not a {type(thing).__name__}.", fix=_EXAMPLE)


def plain_step(module: torch.nn.Module) -> Train:
    """Return the step that is taken where the user gives none: forward, loss, backward, gradients cleared.

    The loss is `output.loss`, `output["loss"]`, the first of a tuple, or the output itself, whichever is a scalar. The
    step has no optimizer, so no peak contains optimizer state.
    """

    def train(batch: Any) -> torch.Tensor:
        if isinstance(batch, Mapping):
            output = module(**batch)
        else:
            output = module(*batch) if isinstance(batch, (tuple, list)) else module(batch)
        loss = _loss(output)
        loss.backward()  # type: ignore[no-untyped-call]
        module.zero_grad(set_to_none=True)
        return loss.detach()

    return train


def _loss(output: Any) -> torch.Tensor:
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for found in (named, first, output):
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return found
    raise StepError(
        f"The model returned a {type(output).__name__} without a loss.",
        why="The search trains by output.loss, or by the output itself if it is a scalar.",
        fix="Put the labels into the batch, or give a step: lab.find_batch_size(make_batch, limit=..., train=step).",
    )


def _leaves(batch: Any) -> Sequence[Any]:
    plain = dict(batch) if isinstance(batch, Mapping) else batch  # a tokenizer's BatchEncoding is no dict
    return tree_leaves(plain)
