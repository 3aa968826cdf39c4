"""Let the tests of this folder import the models beside them, wrap them, prove who ran, and record what they found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# pytest's importlib mode leaves sys.path alone.
sys.path.append(str(Path(__file__).parent))
from zoo_record import Recorder


def pytest_addoption(parser):
    parser.addoption(
        "--zoo-record",
        type=Path,
        metavar="FILE",
        help="write what the zoo found as JSON, for docs/compatibility.md",
    )


def pytest_configure(config):
    file = config.getoption("--zoo-record", default=None)
    if file is not None:
        config.pluginmanager.register(Recorder(file))


@pytest.fixture
def wrap(wrap):
    """Return `ortlab.wrap`, whose fallback is off; the labs are unwrapped after the test."""

    def without_fallback(model, **options):
        lab = wrap(model, **options)
        assert not lab.options.fallback
        return lab

    return without_fallback


@pytest.fixture
def session_runs(monkeypatch):
    """Count how often ONNX Runtime's training sessions run, where Python hands over to its C++ code."""
    from ortlab.engine import load

    load()
    from onnxruntime.training.ortmodule._execution_agent import TrainingAgent

    runs = {"forward": 0, "backward": 0}

    def counted(direction):
        original = getattr(TrainingAgent, f"run_{direction}")

        def run(self, *args):
            original(self, *args)
            runs[direction] += 1

        return run

    for direction in runs:
        monkeypatch.setattr(TrainingAgent, f"run_{direction}", counted(direction))
    return runs
