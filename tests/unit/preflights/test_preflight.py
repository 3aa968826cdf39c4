"""The pre-flight of models that are well, of parts of those that are not, and what it leaves behind: nothing."""

from __future__ import annotations

import random
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from broken_models import (
    BROKEN,
    GPT_PLACE,
    Branch,
    Counter,
    CountOfData,
    History,
    Item,
    OwnStatistics,
    bert,
    gpt2,
    in_bert,
    in_gpt2,
    tokens,
)
from torch import nn

import ortlab
from ortlab.errors import StepError, WrapError
from ortlab.records.preflight import Kind, Level
from ortlab.render import html, text


def kinds(report) -> list[Kind]:
    return [one.kind for one in report.findings]


class LayerDrop(nn.Module):
    """Draws a number as transformers does for a layer drop, whose probability is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand([]) < 0.0:
            return x
        sizes = torch.tensor(x.shape)
        if sizes.prod() > 3 and bool((torch.arange(x.shape[1]) >= 0).all()):
            x = x * float(x.shape[1]) ** -0.5
        return self.layer(x).view(-1, x.shape[-1])


@pytest.mark.parametrize("make", [bert, gpt2])
def test_a_healthy_model_trains_whole(make):
    report = ortlab.preflight(make(), tokens(), progress=False)
    assert report.ok
    assert not [one for one in report.findings if one.stops]
    assert report.only == []
    assert text.render(report).splitlines()[2] == "Trains whole on ONNX Runtime."


def test_numbers_made_of_sizes_and_a_layer_drop_of_zero_are_no_findings():
    assert ortlab.preflight(LayerDrop(), torch.randn(2, 4), progress=False).findings == ()


def test_operators_that_pytorch_runs_are_counted_and_are_no_obstacle():
    model = nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 4), nn.ELU())
    report = ortlab.preflight(model, torch.randn(2, 4), progress=False)
    assert report.ok
    assert kinds(report) == [Kind.BY_TORCH] * 2
    assert [one.place.module for one in report.findings] == ["1", "3"]
    assert "1 operator is run by PyTorch inside the graph" in text.render(report)


# --- what can be wrapped ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind", "place"),
    [(in_bert, Item, "bert.encoder.layer.1"), (in_gpt2, CountOfData, "transformer.h.1")],
)
def test_the_largest_parts_are_found_and_train_when_they_are_wrapped(make, kind, place, wrap):
    torch.manual_seed(0)
    broken = make(kind)
    report = ortlab.preflight(broken.model, broken.batch, progress=False)
    assert not report.ok
    assert report.built  # it exports; it would be wrong
    assert {path for path in report.only if path.startswith(place)} == {
        path for path in report.only if path.startswith(f"{place}.")
    }
    assert broken.guilty not in report.only
    assert f"{broken.guilty}.inner" in report.only
    assert report.share > 0.9
    expected = _gradients(broken)
    lab = wrap(broken.model, only=report.only)
    found = _gradients(broken)
    assert lab.status.executed_by == "ort parts"
    largest = max(float(one.abs().max()) for one in expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * largest


def _gradients(broken) -> list[torch.Tensor]:
    broken.model.zero_grad()
    broken.model(**broken.batch).loss.backward()
    return [one.grad.clone() for one in broken.model.parameters() if one.grad is not None]


def test_wrapping_after_it_does_not_export_again(wrap):
    model, batch = bert(), tokens()
    ortlab.preflight(model, batch, progress=False)
    lab = wrap(model)
    assert lab._bench.ort is not None
    run = lab.step(lambda: _step(model, batch), n=1, progress=False)
    assert run.initialization.stage == "session"
    assert run.initialization.export_ms == 0


def _step(model, batch):
    loss = model(**batch).loss
    loss.backward()
    return loss


def test_a_second_look_traces_again():
    broken = in_bert(Branch)
    first = ortlab.preflight(broken.model, broken.batch, search=False, progress=False)
    second = ortlab.preflight(broken.model, broken.batch, search=False, progress=False)
    assert kinds(first) == kinds(second) == [Kind.BRANCH]


def test_a_wrapped_model_stays_wrapped(wrap):
    model, batch = gpt2(), tokens()
    lab = wrap(model)
    loss = model(**batch).loss
    report = ortlab.preflight(model, batch, progress=False)
    assert report.ok
    assert model(**batch).loss == loss
    assert lab.status.executed_by == "ort"


# --- nothing is changed -------------------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, object]:
    return {
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: one.grad for name, one in model.named_parameters()},
        "class": [type(part) for part in model.modules()],
        "mode": [part.training for part in model.modules()],
        "hooks": [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in model.modules()],
        "names": [sorted(part.__dict__) for part in model.modules()],
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tobytes(),  # noqa: NPY002 - the generator that code may use
    }


def same(before: dict[str, object], after: dict[str, object]) -> bool:
    tensors = [(before["tensors"][name], value) for name, value in after["tensors"].items()]
    return (
        all(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) for one, other in tensors)
        and torch.equal(before["torch"], after["torch"])
        and all(before[key] == after[key] for key in ("class", "mode", "hooks", "names", "random", "numpy"))
        and all(before["gradients"][name] is one for name, one in after["gradients"].items())
    )  # fmt: skip


@pytest.mark.parametrize("kind", [Counter, History, OwnStatistics])
def test_the_model_is_left_as_it_was(kind):
    torch.manual_seed(0)
    broken = in_gpt2(kind)
    broken.model.transformer.h[0].eval()
    fault = broken.model.get_submodule(GPT_PLACE)
    calls, seen = fault.__dict__.get("calls"), list(getattr(fault, "seen", ()))
    before = state(broken.model)
    report = ortlab.preflight(broken.model, broken.batch, progress=False)
    assert [one.place.module for one in report.findings if one.stops] == [GPT_PLACE]
    assert same(before, state(broken.model))
    assert fault.__dict__.get("calls") == calls
    assert list(getattr(fault, "seen", ())) == seen


class Interrupted(nn.Module):
    """Sends an interrupt to its own process in the forward that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch._C._get_tracing_state() is not None:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return self.layer(x)


class FirstCall(nn.Module):
    """Forgets an attribute in its first call, and counts calls in an object of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.is_new = True
        self.counter = SimpleNamespace(calls=0)

    def forward(self, x):
        self.counter.calls += 1
        if hasattr(self, "is_new"):
            del self.is_new
        return self.layer(x).sum()


def test_what_the_forward_deletes_or_changes_in_an_object_is_put_back():
    model = FirstCall()
    ortlab.preflight(model, torch.rand(2, 4))
    assert model.is_new is True
    assert model.counter.calls == 0


def test_an_interrupt_leaves_the_model_as_it_was():
    model, x = Interrupted(), torch.randn(2, 4)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        ortlab.preflight(model, x, progress=False)
    assert same(before, state(model))
    assert not torch.nn.modules.module._global_forward_hooks


# --- batches and models that are no good --------------------------------------------------------------------


def test_a_batch_is_a_mapping_a_tuple_or_a_tensor():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    for batch in (x, (x,), [x], {"input": x}):
        assert ortlab.preflight(model, batch, progress=False).ok


def test_a_batch_that_the_forward_does_not_take_is_said_so():
    report = ortlab.preflight(nn.Linear(4, 2), {"x": torch.randn(3, 4)}, progress=False)
    assert kinds(report)[0] is Kind.INPUT
    assert "correct that first" in text.render(report)


def test_keys_that_are_no_names_are_refused():
    with pytest.raises(StepError, match="no names"):
        ortlab.preflight(nn.Linear(4, 2), {0: torch.randn(3, 4)})


def test_what_is_no_module_is_refused():
    with pytest.raises(WrapError, match="cannot be wrapped"):
        ortlab.preflight(lambda x: x, torch.randn(3, 4))


def test_eval_mode_is_no_promise_of_training():
    report = ortlab.preflight(nn.Linear(4, 2).eval(), torch.randn(3, 4), progress=False)
    assert report.built
    assert not report.ok
    assert kinds(report) == [Kind.MODE]
    assert "Next: Call model.train(), then look again." in text.render(report)


def test_a_model_without_trainable_parameters_has_nothing_to_train():
    report = ortlab.preflight(nn.Linear(4, 2).requires_grad_(False), torch.randn(3, 4), progress=False)
    assert not report.ok
    assert Kind.NOT_TRAINED in kinds(report)


def test_weights_that_hold_nan_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    report = ortlab.preflight(model, torch.randn(3, 4), progress=False)
    assert [(one.kind, one.place.module) for one in report.findings] == [(Kind.VALUES, "1")]


def test_an_empty_batch_is_named():
    report = ortlab.preflight(nn.Linear(4, 2), torch.randn(0, 4), progress=False)
    assert Kind.INPUT in kinds(report)
    assert not report.ok


# --- how it looks -------------------------------------------------------------------------------------------


def test_the_page_says_verdict_next_step_module_and_line():
    torch.manual_seed(0)
    broken = BROKEN["Branch"]()
    report = ortlab.preflight(broken.model, broken.batch, search=False, progress=False)
    shown = text.render(report)
    assert "and no sub-module that is worth it does" in shown
    assert "bert.encoder.layer.1.intermediate (Branch)" in shown
    assert "broken_models.py:" in shown
    assert "No step was run" in shown
    assert "<table" in html.render(report)


def test_the_table_has_a_row_per_finding():
    torch.manual_seed(0)
    broken = BROKEN["Item"]()
    report = ortlab.preflight(broken.model, broken.batch, search=False, progress=False)
    table = report.table()
    # What is wrong comes first; that PyTorch computes the maximum is worth knowing only.
    assert set(table["module"]) == {broken.guilty}
    assert next(iter(table["level"])) == Level.WRONG.value
    assert list(table["level"]).count(Level.WRONG.value) == 1
    assert report.to_dict()["findings"][0]["place"]["module"] == broken.guilty
