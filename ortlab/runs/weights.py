"""Weights that no step can start from: nan, infinite, or without values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ortlab.errors import StepError

if TYPE_CHECKING:
    import torch

_NAMED = 3
"""Parameters that an error names."""


def check_weights(module: torch.nn.Module) -> None:
    """Raise StepError for weights that are nan, infinite or without values: every later step would give nan.

    A frozen parameter may be infinite, as a mask is.
    """
    kind = type(module).__name__
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise StepError(
                f"The weights of {kind} are not loaded: {name!r} is on device 'meta', without values.",
                fix="Load them first: model.to_empty(device='cpu'), then model.load_state_dict(...).",
            )
    wrong = {name: words for name, one in module.named_parameters() if (words := _fault(one))}
    if not wrong:
        return
    named = ", ".join(f"{name!r} ({words})" for name, words in list(wrong.items())[:_NAMED])
    more = f" and {len(wrong) - _NAMED} more parameters" if len(wrong) > _NAMED else ""
    raise StepError(
        f"The weights of {kind} are not finite: {named}{more}.",
        why="Every loss and every gradient that follows would be nan.",
        fix="Go back to weights that are: lab.restore() takes those from before the last run, load_state_dict those of "
        "a checkpoint. If training brought them there, lower the learning rate or clip the gradients.",
    )


def _fault(parameter: torch.Tensor) -> str:
    if not parameter.is_floating_point() or not parameter.numel():
        return ""
    values = parameter.detach()
    nan = int(values.isnan().sum())
    if nan:
        return f"nan in {nan:,} of {values.numel():,} values"
    infinite = int(values.isinf().sum()) if parameter.requires_grad else 0
    return f"infinite in {infinite:,} of {values.numel():,} values" if infinite else ""
