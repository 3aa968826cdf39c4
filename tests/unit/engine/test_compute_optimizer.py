"""A graph that the compute optimizer stops at is built without it, and the lab says so."""

from __future__ import annotations

import copy

import torch
from transformers import CanineConfig, CanineForSequenceClassification


def canine():
    """Its attention looks at windows whose size is computed, and its pooler reads the first place of what comes out."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    windows = {"downsampling_rate": 2, "upsampling_kernel_size": 2, "local_transformer_stride": 8}
    hashes = {"num_hash_buckets": 16, "num_hash_functions": 4}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = CanineConfig(max_position_embeddings=32, **sizes, **windows, **hashes, **dropout)
    ids = torch.arange(32).view(2, 16)
    labels = torch.tensor([0, 1])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return CanineForSequenceClassification(config).train(), batch


def test_a_size_that_nothing_names_leaves_the_compute_optimizer_out(wrap):
    model, batch = canine()
    plain = copy.deepcopy(model)
    lab = wrap(model)
    model(**batch).loss.backward()
    said = [message.text for message in lab.messages if "without the compute optimizer" in message.text]
    assert lab.status.executed_by == "ort"
    plain(**batch).loss.backward()
    assert len(said) == 1
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
