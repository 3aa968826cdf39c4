"""The head of a model and its cross entropy in one call of torch, over blocks of rows, forward and backward together.

The logits of a language model, shape (rows, classes), their log probabilities and their gradient are the largest
tensors of its step. Here each block of rows gets its logits, its share of the loss and its share of the gradients of
what the logits are made of, and then its memory serves the next block. Kept for the backward are those gradients, of
the shapes of the hidden states and of the weight: the gradient of the loss, a number, is multiplied into them. Rows
whose label is ignored are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from ortlab.engine.operators.torch_kernels import empty, kernel

KERNEL: Final = "chunked_cross_entropy"
"""Name of the forward, without its namespace."""

FEWEST_ROWS: Final = 256
"""Rows of a block at least: with fewer, the products of matrices are slow."""

MEAN, SUM = 1, 2
"""How the losses of the rows become one, by torch's numbers (at::Reduction)."""


def rows_of_block(width: int) -> int:
    """Return how many rows are computed at once, for hidden states of this width."""
    # With as many rows as the hidden states have entries, the logits of a block are as large as the head's weight.
    return max(width, FEWEST_ROWS)


class How(NamedTuple):
    """What is constant about a call, as the integers that its node gets."""

    reduction: int
    ignored: int  # the label that does not count
    turned: int  # 1 where the weight has the shape (width, classes), 0 where it is (classes, width)
    of_hidden: int  # 1 where the gradient of the hidden states is wanted
    of_weight: int
    of_bias: int


@kernel(
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, int[] how) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    how: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss and its gradients by hidden states, shape (..., width), weight and bias."""
    # A gradient that is not wanted is empty. `how` holds a `How`.
    head = _Head(hidden, weight, bias, How(*how))
    loss = head.loss(target.reshape(-1).long(), class_weight)
    of_bias = head.of_bias if bias is None else head.of_bias.to(bias.dtype)
    return loss, head.of_hidden, head.of_weight.to(weight.dtype), of_bias


@kernel(
    "(Tensor grad, Tensor(a!) of_hidden, Tensor(b!) of_weight, Tensor(c!) of_bias) "
    "-> (Tensor(a!), Tensor(b!), Tensor(c!))"
)
def chunked_cross_entropy_backward(
    grad: Tensor, of_hidden: Tensor, of_weight: Tensor, of_bias: Tensor
) -> tuple[Tensor, ...]:
    """Multiply the gradient of the loss into the gradients that the forward has left, in their memory."""
    gradients = of_hidden, of_weight, of_bias
    if grad.device.type == "cpu" and grad.item() == 1:
        return gradients
    return tuple(one.mul_(grad) for one in gradients)


class _Head:
    """The gradients of a loss, which its blocks fill, and what makes its logits."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> None:
        self._how = how
        self._bias = bias
        self._table = weight if how.turned else weight.t()  # (width, classes)
        # Sums over blocks need more digits than half precision has.
        self._exact = torch.promote_types(hidden.dtype, torch.float32)
        nothing = hidden.new_empty(0)
        self._rows = hidden.reshape(-1, hidden.shape[-1])
        self.of_hidden = empty(hidden.shape, hidden) if how.of_hidden else nothing
        self.of_weight = self._zeros(weight) if how.of_weight else nothing
        self.of_bias = nothing if bias is None or not how.of_bias else self._zeros(bias)

    def _zeros(self, like: Tensor) -> Tensor:
        if like.dtype is self._exact:
            return empty(like.shape, like).zero_()
        return torch.zeros_like(like, dtype=self._exact)

    def loss(self, target: Tensor, class_weight: Tensor | None) -> Tensor:
        """Compute the loss, and the gradients beside it; `target` has the label of each row."""
        if target.is_meta:
            return self._rows.new_empty((), dtype=self._exact)
        counted = (target != self._how.ignored).nonzero().squeeze(1)
        if self.of_hidden.numel() and len(counted) < len(target):
            self.of_hidden.zero_()
        target = target[counted]
        shares = torch.ones(len(target), dtype=self._exact, device=target.device)
        if class_weight is not None and len(target):
            # What the first block says of a label that no class has comes too late for the index.
            shares = class_weight[target.clamp(0, len(class_weight) - 1)]
        whole = shares.sum() if self._how.reduction == MEAN else shares.new_ones(())
        shares = shares / whole
        total = torch.zeros((), dtype=torch.float64, device=target.device)
        step = rows_of_block(self._rows.shape[1])
        for start in range(0, len(counted), step):
            block = slice(start, start + step)
            rows = counted[block] if len(counted) < len(self._rows) else block
            total += self._block(rows, target[block], shares[block], class_weight)
        return (total / whole).to(self._exact)

    def _block(
        self, rows: Tensor | slice, target: Tensor, shares: Tensor, class_weight: Tensor | None
    ) -> Tensor:
        """Return the sum of the losses of some rows, and add what they give to the gradients."""
        hidden = self._rows[rows]
        shape = (len(hidden), self._table.shape[1])
        logits = empty(shape, hidden)
        if self._bias is None:
            torch.mm(hidden, self._table, out=logits)
        else:
            torch.addmm(self._bias, hidden, self._table, out=logits)
        scores = logits.to(self._exact)
        # A row is written after it was read on the CPU (vec_log_softmax_lastdim_chunk_kernel), so no second buffer.
        chances = scores if scores.device.type == "cpu" else torch.empty_like(scores)
        torch.ops.aten._log_softmax.out(scores, 1, False, out=chances)  # noqa: FBT003 - half_to_float
        loss = nll_loss(chances, target, class_weight, ignore_index=self._how.ignored, reduction="sum")
        if not any(self._how[-3:]):
            return loss
        change = chances.exp_().mul_(shares[:, None]).scatter_add_(1, target[:, None], -shares[:, None])
        if self.of_bias.numel():
            self.of_bias += change.sum(0)
        change = change.to(hidden.dtype)
        if self._how.of_hidden:
            self.of_hidden.view_as(self._rows)[rows] = change @ self._table.t()
        if self._how.of_weight:
            pair = (hidden, change) if self._how.turned else (change, hidden)
            self._add_product(*pair)
        return loss

    def _add_product(self, left: Tensor, right: Tensor) -> None:
        """Add the sum of the rows' outer products to the gradient of the weight."""
        if left.dtype is self._exact:
            self.of_weight.addmm_(left.t(), right)
        else:
            self.of_weight += left.t() @ right
