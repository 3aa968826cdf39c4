"""accelerate around a wrapped model, and a wrap of what accelerate has prepared, held against PyTorch."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

import ortlab

pytestmark = pytest.mark.row("A7")

NAMES = ("input_ids", "attention_mask", "labels")


class Loop:
    """A training loop as accelerate's documentation has it."""

    def __init__(self, model, rows, wrapped: str, precision: str = "no") -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
        self.lab = ortlab.wrap(model) if wrapped == "before" else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        batches = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=collated)
        prepared = self.accelerator.prepare(model, optimizer, batches, schedule)
        self.model, self.optimizer, self.batches, self.schedule = prepared
        if wrapped == "after":
            self.lab = ortlab.wrap(self.model)

    def epoch(self) -> list[float]:
        """Train on all batches and return their losses."""
        losses = []
        for batch in self.batches:
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        if self.lab is not None:
            assert self.lab.status.executed_by == "ort"
        return losses

    def end(self) -> None:
        if self.lab is not None:
            self.lab.unwrap()


def collated(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in NAMES}


def check_same(measured, expected, tolerance=1e-5):
    for name, value in expected.state_dict().items():
        scale = value.abs().max().clamp_min(1e-3)
        assert float((measured.state_dict()[name] - value).abs().max() / scale) < tolerance, name


@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_a_loop_trains_as_in_pytorch(wrapped, bert, rows):
    expected = Loop(bert(), rows(12), "not")
    losses = expected.epoch()
    loop = Loop(bert(), rows(12), wrapped)
    assert loop.epoch() == pytest.approx(losses, rel=1e-5)
    check_same(loop.model, expected.model)
    assert loop.accelerator.unwrap_model(loop.model) is loop.lab.module
    loop.end()


def test_a_saved_state_goes_on_as_if_uninterrupted(bert, rows, tmp_path):
    expected = Loop(bert(), rows(12), "not")
    expected.epoch()
    losses = expected.epoch()
    whole = Loop(bert(), rows(12), "before")
    whole.epoch()
    whole.accelerator.save_state(tmp_path)
    assert whole.epoch() == pytest.approx(losses, rel=1e-5)
    resumed = Loop(bert(), rows(12), "before")
    resumed.accelerator.load_state(tmp_path)
    assert resumed.epoch() == pytest.approx(losses, rel=1e-5)
    check_same(resumed.model, expected.model)
    check_same(resumed.model, whole.model, tolerance=1e-6)
    whole.end()
    resumed.end()


def test_a_model_without_its_precision_still_runs_on_ort(rows, wrap):
    """`unwrap_model(keep_fp32_wrapper=False)` puts the innermost forward that it finds on the model."""
    model = torch.nn.Linear(4, 3)
    lab = wrap(model)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    bare = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert bare is model
    run = lab.step(lambda: bare(torch.ones(2, 4)).sum().backward())
    assert run.executed_by == "ort"


@pytest.mark.parametrize("wrapped", ["before", "after"])
def test_bfloat16_trains_within_its_rounding(wrapped, bert, rows):
    expected = Loop(bert(), rows(12), "not", "bf16")
    losses = expected.epoch()
    loop = Loop(bert(), rows(12), wrapped, "bf16")
    assert loop.epoch() == pytest.approx(losses, rel=2**-7)  # bfloat16 has eight bits
    loop.end()
