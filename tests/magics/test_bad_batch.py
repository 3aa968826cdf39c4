"""A batch or a model that no step can be taken with: a UsageError with what, why and next, and nothing changed."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError

from .conftest import STEP

BAD = {
    "empty": ("inputs, labels = inputs[:0], labels[:0]", "is empty: its shape is 0 x 8", "drop_last"),
    "elsewhere": ("inputs = inputs.to('meta')", "`input` is on meta", "Move the batch to the model"),
    "no tensor": ("inputs = inputs.tolist()", "is a list, not a tensor", "torch.as_tensor(input)"),
    "nan": ("net[0].bias.data[1] = float('nan')", "'0.bias' (nan in 1 of 16 values)", "lab.restore()"),
    "frozen": ("net.requires_grad_(False)", "no trainable parameter", "requires_grad_(True)"),
}


def test_a_bad_batch_is_a_usage_error_and_the_next_good_one_trains(stepped_shell, unchanged):
    shell = stepped_shell
    shell.run("kept = inputs, labels, net[0].bias.data.clone()")
    for spoil, what, fix in BAD.values():
        with unchanged(shell):
            shell.run(spoil)
            with pytest.raises(UsageError) as caught:
                shell.run(STEP)
            shell.run("inputs, labels = kept[:2]; net[0].bias.data.copy_(kept[2]); net.requires_grad_(True)")
        assert type(caught.value) is UsageError
        assert what in str(caught.value)
        assert "\nNext: " in str(caught.value)
        assert fix in str(caught.value)
    run = shell.run("%ort_rerun")
    assert run.losses == shell.user_ns["lab"].runs[0].losses
