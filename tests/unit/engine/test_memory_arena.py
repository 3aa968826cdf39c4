"""Each session has the arena that its options ask for, whatever the first session of the process had."""

from __future__ import annotations

import gc

import pytest
import torch
from onnxruntime.capi import _pybind_state
from torch import nn

import ortlab
from ortlab.engine import repairs

MIB = 2**20


def live_bytes(*, arena: bool) -> int:
    """What a session keeps after a step that has freed 64 MiB, in bytes of the C library's heap."""
    from ortlab.runs.process_memory import _libc

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 1))
    x = torch.randn(1024, 256)
    lab = ortlab.wrap(model, cpu_memory_arena=arena)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    gc.collect()
    statistics = _libc().mallinfo2()
    live = statistics.uordblks + statistics.hblkhd
    lab.unwrap(forget=True)
    return live


def test_the_arena_can_be_switched_off_and_on_again():
    off = live_bytes(arena=False)
    on = live_bytes(arena=True)
    off_again = live_bytes(arena=False)
    assert on - off > 32 * MIB
    assert on - off_again > 32 * MIB


def test_providers_are_dropped_only_when_the_kind_changes(monkeypatch):
    dropped = []
    monkeypatch.setattr(repairs, "_arena", None)
    monkeypatch.setattr(_pybind_state, "clear_training_ep_instances", lambda: dropped.append(1))
    for arena in (True, True, False, False, True):
        repairs._drop_provider_of_other_kind(arena=arena)
    assert len(dropped) == 3


@pytest.fixture(autouse=True)
def sessions_of_other_tests_gone():
    gc.collect()
