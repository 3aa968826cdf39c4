"""A batch or a model that no step can be taken with: said with what, why and next, and nothing is lost by it."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from torch import nn

import ortlab.notebook.widgets.panel
from ortlab.engine.calls import check_call
from ortlab.errors import BuildError, ExecutionError, StepError
from ortlab.render import text
from ortlab.studies.batch_size_room import ProcessCeiling


class Tagger(nn.Module):
    """Token ids in, a loss over five classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, input_ids, mask=None, labels=None):
        hidden = self.embed(input_ids)
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return nn.functional.cross_entropy(self.head(self.drop(hidden.mean(1))), labels)


class Trained:
    """A lab, its optimizer, and a batch that a test exchanges."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.lab = ortlab.wrap(Tagger())
        self.optimizer = torch.optim.AdamW(self.lab.module.parameters(), lr=1e-2)
        self.good = {"input_ids": torch.randint(0, 10, (4, 6)), "labels": torch.randint(0, 5, (4,))}
        self.batch = self.good

    def step(self):
        batch = self.batch
        loss = self.lab.module(batch) if isinstance(batch, list) else self.lab.module(**batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self):
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = (*self.lab.module.state_dict().values(), *moments, torch.get_rng_state())
        return [tensor.detach().clone() for tensor in tensors]


@pytest.fixture(scope="module")
def trained():
    """Return a lab that has trained three steps; it serves all bad batches, since none may change it."""
    found = Trained()
    found.lab.step(found.step, n=3)
    yield found
    found.lab.unwrap()


IDS = torch.arange(24).view(4, 6) % 10
LABELS = torch.arange(4)
BAD = {
    "mask on another device": ({"mask": torch.ones(4, 6, device="meta")}, "`mask` is on meta", ".to('cpu')"),
    "all on another device": ({"input_ids": IDS.to("meta"), "labels": LABELS.to("meta")}, "on cpu, and", ".to("),
    "wrong name": ({"input_ids": None, "ids": IDS}, "mask (optional)", "model(**batch)"),
    "nothing": ({"input_ids": None, "labels": None}, "the call gave nothing", "model(**batch)"),
    "float ids": ({"input_ids": IDS.float()}, "input_ids (float32, 4 x 6, cpu)", "Correct the model or the batch"),
    "wrong rank": ({"input_ids": IDS[0]}, "input_ids (int64, 6, cpu)", "Correct the model or the batch"),
    "a list": ({"input_ids": IDS.tolist()}, "`input_ids` is a list", "torch.as_tensor(input_ids)"),
    "no examples": ({"input_ids": IDS[:0], "labels": LABELS[:0]}, "is empty: its shape is 0 x 6", "drop_last"),
    "no tokens": ({"input_ids": IDS[:, :0]}, "`input_ids` is empty: its shape is 4 x 0", "drop_last"),
    "sparse": ({"mask": torch.ones(4, 6).to_sparse()}, "sparse_coo", "mask.to_dense()"),
    "a label too high": ({"labels": LABELS + 2}, "Target 5 is out of bounds", "Correct the model or the batch"),
    "a label far too high": ({"labels": LABELS * 10**7}, "Target 10000000 is out", "Correct the model or the batch"),
    "a negative label": ({"labels": LABELS - 3}, "is out of bounds", "Correct the model or the batch"),
    "labels for others": ({"labels": LABELS[:2]}, "match target batch_size (2)", "orrect the "),
    "an id too high": ({"input_ids": IDS + 1}, "index out of range", "operator"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_explained_and_changes_nothing(trained, name):
    changes, why, fix = BAD[name]
    lab, before = trained.lab, trained.state()
    runs, options, built = list(lab.runs), lab.options, lab.status
    trained.batch = {k: v for k, v in {**trained.good, **changes}.items() if v is not None}
    try:
        with pytest.raises((BuildError, ExecutionError)) as caught:
            lab.step(trained.step)
    finally:
        trained.batch = trained.good
    error = caught.value
    assert why in str(error)
    assert error.why
    assert fix in error.fix
    assert list(lab.runs) == runs
    assert lab.options is options
    assert lab.engine == built.engine
    for one, other in zip(before, trained.state(), strict=True):
        assert torch.equal(one, other)
    again = lab.rerun(progress=False)  # the last good build is there, and does what it did
    assert again.initialization is None
    assert again.losses == runs[0].losses


def test_a_dict_that_is_not_unpacked_is_named(trained):
    with pytest.raises(BuildError, match="whole dict") as caught:
        trained.lab.module(trained.good)
    assert caught.value.fix == "Unpack it: model(**batch)."


def test_the_panel_shows_it_and_goes_on(trained, monkeypatch):
    panel = ortlab.notebook.widgets.panel.Panel(trained.lab)
    runs = len(trained.lab.runs)
    monkeypatch.setattr(trained, "batch", {"input_ids": IDS[:0], "labels": LABELS[:0]})
    panel.rerun.click()
    assert "is empty: its shape is 0 x 6" in panel.errors.text
    assert "drop_last" in panel.errors.text
    monkeypatch.undo()
    assert len(trained.lab.runs) == runs
    panel.rerun.click()
    assert panel.errors.text == ""
    assert trained.lab.runs[-1].losses == trained.lab.runs[0].losses
    panel.close()


def test_an_ignored_label_is_none_too_high(trained):
    ignored = torch.tensor([-100, 1, 2, 3])
    trained.lab.module(**{**trained.good, "labels": ignored}).backward()
    trained.optimizer.zero_grad()


def test_a_model_on_several_devices_or_without_values_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    for module, what in (
        (model, "several devices: '0.weight' on cpu, '1.weight' on meta"),
        (model[1], "'weight' of Linear is on device 'meta'"),
    ):
        lab = ortlab.wrap(module)
        with pytest.raises(StepError, match="not loaded") as caught:
            lab.step(lambda module=module: module(torch.ones(1, 2)).sum().backward())
        assert "to_empty" in caught.value.fix
        with pytest.raises(BuildError, match=what) as caught:
            module(torch.ones(1, 2))
        assert "to_empty" in caught.value.fix
        assert not list(lab.runs)
        lab.unwrap()


# ---- weights and losses that are no numbers ------------------------------------------------------------------------


def test_weights_that_are_no_numbers_are_named_and_can_be_gone_back_from(trained):
    lab, head = trained.lab, trained.lab.module.head
    runs = len(lab.runs)
    for value, words in ((math.nan, "nan in 2 of 40 values"), (math.inf, "infinite in 2 of 40 values")):
        with torch.no_grad():
            head.weight[0, :2] = value
        with pytest.raises(StepError, match=r"'head\.weight'") as caught:
            lab.step(trained.step)
        assert words in caught.value.what
        assert "lab.restore()" in caught.value.fix
        assert len(lab.runs) == runs
        lab.restore()
        assert head.weight.isfinite().all()
    assert lab.rerun().losses == lab.runs[0].losses


def test_a_loss_that_becomes_nan_is_said_wherever_the_run_is_shown(trained, tmp_path):
    lab = trained.lab
    lab.restore()
    done = []

    def step():
        done.append(1)
        if len(done) == 3:
            with torch.no_grad():
                lab.module.head.weight.fill_(math.nan)
        return trained.step()

    run = lab.step(step, n=4)
    assert [math.isnan(loss) for loss in run.losses] == [False, False, True, True]
    said = "has a loss of nan from step 3 on"
    assert said in text.render(run)
    assert said in text.render(lab.runs)
    first = next(run for run in lab.runs if run.losses == lab.runs[0].losses)
    contrast = lab.compare(first.number, run.number).contrasts[0]
    assert said in "; ".join(contrast.remarks)
    assert contrast.loss_difference == math.inf
    loaded = ortlab.load(lab.runs.save(tmp_path / "runs.json"))
    assert json.loads((tmp_path / "runs.json").read_text())
    assert said in text.render(loaded)
    lab.restore()


# ---- nothing to train, and eval mode -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ort", "eager"])
def test_a_model_without_a_trainable_parameter_says_so(engine, wrap):
    model = nn.Sequential(nn.Linear(3, 2)).requires_grad_(requires_grad=False)
    lab = wrap(model, engine=engine)
    with pytest.raises(StepError, match="no trainable parameter") as caught:
        lab.step(lambda: model(torch.ones(1, 3)).sum().backward())
    assert "2 parameters have requires_grad=False" in caught.value.why
    assert "requires_grad_(True)" in caught.value.fix
    assert not list(lab.runs)
    x = torch.ones(1, 3, requires_grad=True)
    lab.step(lambda: model(x).sum().backward())  # the input may learn
    assert x.grad.abs().sum() > 0


def test_a_loss_without_a_gradient_is_explained(trained):
    def step():
        with torch.no_grad():
            loss = trained.lab.module(**trained.good)
        loss.backward()

    with pytest.raises(StepError, match="does not depend on any parameter"):
        trained.lab.step(step)


def test_training_in_eval_mode_is_what_pytorch_does_and_is_said():
    torch.manual_seed(2)
    found = Trained()
    found.lab.module.eval()
    run = found.lab.step(found.step, n=3)
    said = "trained in eval mode: without dropout"
    assert run.mode == "evaluation"
    assert said in text.render(run)
    assert said in text.render(found.lab.runs)
    eager = found.lab.set(engine="eager").rerun()
    assert run.losses == pytest.approx(eager.losses, rel=1e-5)
    assert said in "; ".join(found.lab.compare().contrasts[0].remarks)
    found.lab.module.train()
    assert "other mode: training and evaluation" in "; ".join(
        found.lab.compare(run.number, found.lab.step(found.step, n=3).number).contrasts[0].remarks
    )
    found.lab.unwrap()


# ---- no memory left --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="on other systems nothing bounds a process")
def test_a_batch_that_memory_does_not_suffice_for_is_named_and_loses_nothing(wrap):
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(4, 50_000), nn.ReLU(), nn.Linear(50_000, 1))
    lab = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(2, 4)]

    def step():
        optimizer.zero_grad()
        loss = model(batches[-1]).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    lab.step(step, n=2)
    before = [value.clone() for value in model.state_dict().values()]
    batches.append(torch.randn(5_000, 4))  # 1 GB after the first layer
    ceiling = ProcessCeiling()
    ceiling.put_up(64 << 20)
    try:
        with pytest.raises(
            ExecutionError, match="Memory ran out while ONNX Runtime ran the model, in forward, at "
        ) as caught:
            lab.step(step)
    finally:
        ceiling.take_down()
    assert "lab.set(memory_level=1)" in caught.value.fix
    assert "ONNX Runtime says: " in caught.value.why
    assert len(lab.runs) == 1
    assert all(
        torch.equal(one, other) for one, other in zip(before, model.state_dict().values(), strict=True)
    )
    first = ortlab.wrap(nn.Sequential(nn.Linear(4, 50_000)))  # the first call, which PyTorch traces
    ceiling.put_up(64 << 20)
    try:
        with pytest.raises(BuildError, match="The forward of Sequential failed") as caught:
            first.module(batches[-1])
    finally:
        ceiling.take_down()
    assert "Take a smaller batch" in caught.value.fix
    first.unwrap()
    batches.pop()
    assert lab.rerun().losses == lab.runs[0].losses


def test_an_empty_tensor_is_found_at_any_depth():
    """As in the `past_key_values` of a decoder: ONNX Runtime ends the process where a batch is empty."""

    class Decoder(nn.Module):
        def forward(self, hidden, past=None):
            return hidden

    full, empty = torch.ones(2, 3), torch.ones(0, 3)
    for past, name in (((full, empty), r"past\[1\]"), (((full, full), (full, empty)), r"past\[1\]\[1\]")):
        with pytest.raises(BuildError, match=rf"`{name}` is empty"):
            check_call(Decoder(), (full,), {"past": past})
    check_call(Decoder(), (full,), {"past": ((full, full), (1, [2, 3]))})
