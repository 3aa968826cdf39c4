"""transformers' Trainer on a wrapped model, held against the same Trainer on the plain one (row A7)."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

import ortlab
from ortlab.errors import StepError

pytestmark = pytest.mark.row("A7")

TOLERANCE = 1e-5
"""Relative; loss, parameters and the optimizer's moments differ by rounding only."""

RATE = 1e-3
"""Learning rate: how far AdamW moves a parameter in a step, and so the least that one is measured against."""

EPSILON = 1e-4
"""AdamW's. A key's bias has a gradient of zero, of which PyTorch and ORT each see other rounding; the default of 1e-8
would make whole steps of it."""


class Training:
    """One training of a model, in PyTorch or on ORT."""

    def __init__(self, model, data, folder, *, on_ort, trainer=None, **arguments) -> None:
        chosen = {
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_grad_norm": 0.5,
            "learning_rate": RATE,
            "adam_epsilon": EPSILON,
            "logging_steps": 1,
            "save_strategy": "no",
            **arguments,
        }
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
        self.model = model
        self.lab = ortlab.wrap(model) if on_ort else None
        self.trainer = Trainer(
            model=model,
            args=TrainingArguments(output_dir=str(folder), **chosen, **quiet),
            train_dataset=data,
            eval_dataset=torch.utils.data.Subset(data, range(6)),
            **(trainer or {}),
        )

    def train(self, **how) -> Training:
        self.trainer.train(**how)
        if self.lab is not None:
            assert self.lab.status.executed_by == "ort"
            self.lab.unwrap()
        return self

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]


def check_same(measured: Training, expected: Training) -> None:
    """Hold the logged losses and gradient norms, the parameters and the optimizer's state against each other."""
    assert expected.logged("loss")
    for name in ("loss", "grad_norm", "eval_loss"):
        assert measured.logged(name) == pytest.approx(expected.logged(name), rel=TOLERANCE), name
    pairs = zip(measured.model.parameters(), expected.model.parameters(), strict=True)
    assert max(relative(one, other, least=RATE) for one, other in pairs) < TOLERANCE
    states = measured.trainer.optimizer.state_dict(), expected.trainer.optimizer.state_dict()
    for one, other in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        assert one.keys() == other.keys()
        assert one["step"] == other["step"] > 0
    for moment in ("exp_avg", "exp_avg_sq"):
        one, other = (
            torch.cat([part[moment].flatten() for part in state["state"].values()]) for state in states
        )
        assert relative(one, other) < TOLERANCE


def relative(one, other, least=1e-12) -> float:
    return float((one - other).detach().abs().max() / other.detach().abs().max().clamp_min(least))


def cross_entropy(outputs, labels, num_items_in_batch=None):
    """Return a loss as Trainer(compute_loss_func=...) takes it."""
    loss = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum", label_smoothing=0.1)
    return loss / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


# --- the model's own loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_trainer_needs_nothing_but_the_wrap(family, request, rows, tmp_path):
    make, data = request.getfixturevalue(family), rows(language=family == "gpt2")
    expected = Training(make(), data, tmp_path, on_ort=False).train()
    measured = Training(make(), data, tmp_path, on_ort=True)
    check_same(measured.train(), expected)
    # By the signature of the forward, the Trainer leaves out what the model does not take.
    assert set(measured.trainer._signature_columns) == set(expected.trainer._signature_columns)
    assert "extra" not in measured.trainer._signature_columns


def test_evaluation_while_training(bert, rows, tmp_path):
    seen = []

    def accuracy(prediction):
        seen.append(prediction.predictions.shape)
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    often = {"eval_strategy": "steps", "eval_steps": 2, "trainer": {"compute_metrics": accuracy}}
    expected = Training(bert(), rows(), tmp_path, on_ort=False, **often).train()
    measured = Training(bert(), rows(), tmp_path, on_ort=True, **often).train()
    check_same(measured, expected)
    assert measured.logged("eval_accuracy") == expected.logged("eval_accuracy")
    assert seen == [(6, 3)] * 4


@pytest.mark.parametrize("how", ["label_smoothing_factor", "compute_loss_func"])
def test_a_loss_of_the_trainer_stays_in_pytorch(how, bert, rows, tmp_path):
    chosen = {"label_smoothing_factor": 0.1} if how == "label_smoothing_factor" else {}
    trainer = {} if chosen else {"compute_loss_func": cross_entropy}
    expected = Training(bert(), rows(), tmp_path, on_ort=False, trainer=trainer, **chosen).train()
    measured = Training(bert(), rows(), tmp_path, on_ort=True, trainer=trainer, **chosen).train()
    check_same(measured, expected)


@pytest.mark.filterwarnings("ignore:`torch.cpu.amp.autocast:FutureWarning")  # transformers 4.56 calls it
def test_bfloat16_trains_within_its_rounding(bert, rows, tmp_path):
    expected = Training(bert(), rows(), tmp_path, on_ort=False, bf16=True).train()
    measured = Training(bert(), rows(), tmp_path, on_ort=True, bf16=True).train()
    assert measured.logged("loss") == pytest.approx(expected.logged("loss"), rel=2**-7)  # it has eight bits


# --- a loss inside ORT ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_label_smoothing_inside_ort(family, request, rows, tmp_path):
    make, data = request.getfixturevalue(family), rows(language=family == "gpt2")
    smoother = LabelSmoother(0.1)
    loss = functools.partial(smoother, shift_labels=True) if family == "gpt2" else smoother
    # Up to 4.56, the Trainer forgets to divide a smoothed loss by the number of accumulated batches.
    counts = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    chosen = {"gradient_accumulation_steps": 2 if counts else 1}
    expected = Training(make(), data, tmp_path, on_ort=False, label_smoothing_factor=0.1, **chosen).train()
    measured = Training(ortlab.with_loss(make(), loss), data, tmp_path, on_ort=True, **chosen).train()
    check_same(measured, expected)


def test_a_loss_function_inside_ort(bert, rows, tmp_path):
    trainer = {"compute_loss_func": cross_entropy}
    expected = Training(bert(), rows(), tmp_path, on_ort=False, trainer=trainer).train()
    model = ortlab.with_loss(bert(), cross_entropy)
    check_same(Training(model, rows(), tmp_path, on_ort=True).train(), expected)


def test_a_loss_that_the_trainer_takes_the_labels_from_is_an_error(bert, rows, tmp_path):
    model = ortlab.with_loss(bert(), cross_entropy)
    training = Training(model, rows(), tmp_path, on_ort=True, label_smoothing_factor=0.1)
    with pytest.raises(StepError, match="leave label_smoothing_factor and compute_loss_func unset"):
        training.train()
    training.lab.unwrap()


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 6),
    reason="transformers loads no optimizer state with a torch below 2.6 (CVE-2025-32434)",
)
def test_a_resumed_training_is_the_uninterrupted_one(bert, rows, tmp_path):
    def make():
        return ortlab.with_loss(bert(), cross_entropy)

    saved = {"save_strategy": "steps", "save_steps": 2}
    eager = Training(make(), rows(), tmp_path / "eager", on_ort=False, **saved).train()
    whole = Training(make(), rows(), tmp_path / "whole", on_ort=True, **saved).train()
    check_same(whole, eager)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = Training(make(), rows(), tmp_path / "whole", on_ort=True, **saved)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    check_same(resumed, whole)
    # And PyTorch goes on from what ORT has trained.
    plain = Training(make(), rows(), tmp_path / "whole", on_ort=False, **saved)
    check_same(plain.train(resume_from_checkpoint=str(checkpoint)), eager)


def test_a_checkpoint_is_one_of_the_plain_model(bert, rows, tmp_path):
    model = ortlab.with_loss(bert(), cross_entropy)
    training = Training(model, rows(), tmp_path, on_ort=True, save_strategy="steps", save_steps=4)
    training.train()
    folder = Path(tmp_path) / "checkpoint-4"
    loaded = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(loaded) is type(bert())
    assert loaded.config.architectures == ["BertForSequenceClassification"]
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys() == bert().state_dict().keys()
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
