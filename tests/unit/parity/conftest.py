"""A fault in what PyTorch computes, and transformers in whose forward or backward it is looked for."""

from __future__ import annotations

import pytest
import pytorch_faults
import torch

import ortlab


@pytest.fixture
def spoil():
    """Return what multiplies a tensor where PyTorch computes it; in a trace it stays as it is."""
    return pytorch_faults.spoil


@pytest.fixture
def spoil_module():
    """Return what does so with what a module returns."""
    return pytorch_faults.spoil_module


@pytest.fixture
def lab_of():
    """Return what wraps a model, moves its weights off zero and one, and makes a step; unwrapped after the test."""
    labs = []

    def make(model, **batch):
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step():
            result = model(**batch)
            loss = result if isinstance(result, torch.Tensor) else result.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        lab = ortlab.wrap(model, log_level="ERROR")
        lab.step(step, progress=False)
        labs.append(lab)
        return lab

    yield make
    for lab in labs:
        lab.unwrap(forget=True)


@pytest.fixture
def vit():
    """Return a ViT, whose classifier reads one token, and a batch."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(3)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        num_labels=10,
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = ViTForImageClassification(config).train()
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 7])}
