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
    import small_transformers

    torch.manual_seed(3)
    model = small_transformers.vit(heads=4, num_labels=10, attn_implementation="eager")
    return model, {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 7])}
