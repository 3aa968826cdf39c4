"""Fixtures that several unit tests share."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest


def _models():
    spec = importlib.util.spec_from_file_location("tests_unit_models", Path(__file__).with_name("models.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def accelerate_forgotten():
    """Forget precision and device, which accelerate keeps for the process, and the variables that it sets."""
    before = dict(os.environ)
    yield
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def experiment():
    """Return a model, its optimizer and a training step, without dropout."""
    return _models().Experiment()


@pytest.fixture
def noisy_experiment():
    """Return the same with dropout."""
    return _models().Experiment(dropout=0.5)


@pytest.fixture(scope="module")
def custom_layer():
    """Return a layer of four features around an autograd Function of its own."""
    import torch

    torch.manual_seed(2)
    return _models().Custom(4, 4)


@pytest.fixture
def lab(experiment):
    """Wrap the experiment's model; unwrap it after the test."""
    import ortlab

    lab = ortlab.wrap(experiment.model)
    yield lab
    lab.unwrap()
