"""The cross entropy that transformers' models compute inside their forward, as a module that ORT can see.

ORT's label sparsity finds `torch.nn.CrossEntropyLoss` sub-modules only (row D7). Models of transformers call
`torch.nn.functional.cross_entropy`, or make the module anew in each forward, so nothing is left out. With
`ortlab.with_loss(model, ortlab.TokenLoss(), loss_only=True)` the same loss is a sub-module, and its gather can move
ahead of the head, whose logits nobody else reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.jit._trace import TracerWarning

from ortlab.errors import StepError


class TokenLoss(torch.nn.Module):
    """Cross entropy of logits, shape (..., classes), against labels, shape (...).

    Parameters
    ----------
    ignore_index
        The label that does not count.
    shift
        Whether a place predicts the label of the next one, as causal language models do.

    Examples
    --------
    >>> lab = ortlab.wrap(ortlab.with_loss(BertForMaskedLM(config), ortlab.TokenLoss(), loss_only=True))
    >>> lab = ortlab.wrap(ortlab.with_loss(GPT2LMHeadModel(config), ortlab.TokenLoss(shift=True), loss_only=True))
    """

    def __init__(self, *, ignore_index: int = -100, shift: bool = False) -> None:
        super().__init__()
        self.cross_entropy = torch.nn.CrossEntropyLoss(ignore_index=ignore_index)
        self.shift = shift

    def forward(self, outputs: Any, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean over the labels that count; a tensor of one element.

        Parameters
        ----------
        outputs
            What the model returned: logits, or an object, a mapping or a tuple with them.
        labels
            Class numbers, int64.

        Raises
        ------
        StepError
            If there are no logits in the outputs, or their shape does not fit that of the labels.
        """
        logits = _logits(outputs)
        if logits.shape[:-1] != labels.shape:
            raise StepError(
                f"Logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}.",
                why="TokenLoss takes a label for each place of the logits' shape but the last.",
                fix="Give labels of that shape, or write the loss as a function: with_loss(model, my_loss).",
            )
        if self.shift:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss: torch.Tensor = self.cross_entropy(logits.reshape(-1, _classes(logits)), labels.reshape(-1))
        return loss


def _classes(logits: torch.Tensor) -> int:
    """Return the number of classes as a constant of a trace: the weights of the head have that size.

    ORT moves its gather ahead of a Reshape only if the shape is constant (upstream_reshape.cc).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        return int(logits.shape[-1])


def _logits(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif isinstance(outputs, tuple | list):
        found = outputs[0] if outputs else None
    else:
        found = getattr(outputs, "logits", outputs)
    if not isinstance(found, torch.Tensor):
        raise StepError(
            f"There are no logits in a {type(outputs).__name__}.",
            fix="Return a tensor, or something whose `logits` is one; or write the loss as a function.",
        )
    return found
