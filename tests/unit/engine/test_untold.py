"""A forward that fails because it is traced is exported the way that PyTorch runs it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import NystromformerConfig, NystromformerForMaskedLM

from ortlab.errors import BuildError, ExecutionError

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def test_nystromformer_with_fewer_landmarks_than_words_trains_like_pytorch(wrap):
    """Under a trace transformers makes a mask of no padding, which does not fit to the landmarks."""
    torch.manual_seed(0)
    config = NystromformerConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, num_landmarks=4, segment_means_seq_len=16, attn_implementation="eager",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = NystromformerForMaskedLM(config).train()
    reference = copy.deepcopy(model)
    words = torch.randint(99, (2, 16))
    batch = {"input_ids": words, "labels": words, "attention_mask": torch.ones_like(words)}
    lab = wrap(model)
    losses = [one(**batch).loss for one in (reference, model)]
    assert lab.status.executed_by == "ort"
    assert any("asks whether it is traced" in one.text for one in lab.messages)
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for (name, one), two in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)
    batch["attention_mask"] = batch["attention_mask"].clone()
    batch["attention_mask"][0, 9:] = 0
    with pytest.raises(ExecutionError, match="depends on a value of the batch"):
        model(**batch)


class Asking(nn.Module):
    """A layer that does something else while it is traced, and may fail there."""

    def __init__(self, elsewhere, otherwise=torch.tanh) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.elsewhere, self.otherwise = elsewhere, otherwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return self.elsewhere(x) if torch.jit.is_tracing() else self.otherwise(x)


def test_a_forward_that_can_be_traced_is_told_of_it(wrap):
    model = Asking(torch.sigmoid).train()
    lab = wrap(model)
    model(torch.randn(3, 4)).sum().backward()
    assert not any("asks whether it is traced" in one.text for one in lab.messages)
    assert "Sigmoid" in {node.op_type for node in lab.graph("exported").model.graph.node}


def failing_in_a_trace(x):
    assert torch._C._get_tracing_state() is None, "the second reason"
    return torch.tanh(x)


def test_what_fails_either_way_says_why_it_failed_first(wrap):
    model = Asking(lambda x: x.view(5, 5), failing_in_a_trace).train()
    wrap(model)
    with pytest.raises(BuildError, match="invalid for input of size 12"):
        model(torch.randn(3, 4))
