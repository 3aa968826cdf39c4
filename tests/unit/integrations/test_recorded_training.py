"""Trainings that somebody else's loop runs, written into the ledger step by step."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import ortlab
from ortlab.errors import StepError
from ortlab.records.runs import Run


@pytest.fixture
def lab(bert):
    lab = ortlab.wrap(bert())
    yield lab
    lab.unwrap()


@pytest.fixture
def trainer(rows, tmp_path):
    """Return what makes a Trainer for a model."""

    def make(model, **chosen):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            **{"max_steps": 3, "eval_strategy": "steps", "eval_steps": 2, **chosen},
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        return Trainer(model=model, args=arguments, train_dataset=rows(), eval_dataset=rows(4))

    return make


def test_a_trainer_is_recorded_step_by_step(lab, bert, trainer):
    plain = trainer(bert())
    plain.train()
    used = trainer(lab.module)
    run = lab.record(used.train)
    assert list(lab.runs) == [run]
    assert (run.executed_by, len(run.steps)) == ("ort", 3)
    logged = [entry["loss"] for entry in plain.state.log_history if "loss" in entry]
    assert run.losses == pytest.approx(logged, rel=1e-5, abs=5e-5)  # transformers 4 logs four digits
    assert used.state.log_history[-1]["epoch"] > 0
    first, *others = run.steps
    assert first.initialization_ms > 0
    assert [step.initialization_ms for step in others] == [0.0, 0.0]  # that of the evaluation is in no step
    for step in run.steps:
        parts = step.forward_ms, step.backward_ms, step.optimizer_ms
        assert min(parts) > 0
        assert sum(parts) <= step.total_ms
    assert run.initialization.stage == "export"
    assert Run.from_dict(run.to_dict()) == run


def test_engines_are_compared_from_one_start(lab, bert, trainer):
    start = {name: value.clone() for name, value in lab.module.state_dict().items()}
    first = lab.record(trainer(lab.module).train)
    lab.module.load_state_dict(start)
    second = lab.set(engine="eager").record(trainer(lab.module).train)
    assert (first.executed_by, second.executed_by) == ("ort", "eager")
    assert first.data_digest == second.data_digest
    assert first.losses == pytest.approx(second.losses, rel=1e-5)
    assert lab.compare() is not None


def test_an_interrupted_training_keeps_its_steps(lab, trainer):
    class Interrupt(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 2:
                raise KeyboardInterrupt

    used = trainer(lab.module)
    used.add_callback(Interrupt)
    before = [value.detach().clone() for value in lab.module.parameters()]
    with pytest.raises(
        KeyboardInterrupt, match="its 2 steps so far are run 1, and what it has changed stays"
    ):
        lab.record(used.train)
    assert [len(run.steps) for run in lab.runs] == [2]
    assert any(
        not torch.equal(one, other) for one, other in zip(before, lab.module.parameters(), strict=True)
    )
    lab.set(engine="eager")  # the lab is free again
    assert torch.autograd.backward.__module__ == "torch.autograd"


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (lambda _: None, "did not call the wrapped model"),
        (lambda lab: lab.module(torch.ones(1, 8, dtype=torch.long)), "no optimizer made a step"),
    ],
)
def test_a_loop_that_did_not_train_is_an_error(lab, train, said):
    with pytest.raises(StepError, match=said):
        lab.record(lambda: train(lab))
    assert not lab.runs


def test_a_result_is_no_training(lab):
    with pytest.raises(StepError, match="do not call it"):
        lab.record(3.0)


@pytest.mark.parametrize("engine", ["ort", "eager"])
def test_several_optimizers_make_one_step(engine, lab):
    module = lab.set(engine=engine).module
    heads, body = module.classifier.parameters(), module.bert.parameters()
    optimizers = [torch.optim.SGD(heads, lr=0.1), torch.optim.SGD(body, lr=0.1)]

    def train():
        for _ in range(2):
            batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.tensor([0, 1])}
            module(**batch).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run = lab.record(train)
    assert (run.executed_by, len(run.steps)) == (engine, 2)
