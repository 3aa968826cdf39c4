"""Models that are in order warn of nothing; what a user can act on is still a warning."""

from __future__ import annotations

import pytest
import torch
from small_transformers import batch_of, bert, gpt2, llama, step_of
from torch.utils.checkpoint import checkpoint

from ortlab.errors import FallbackWarning
from ortlab.notebook.widgets.controls import Looks, close_tree
from ortlab.notebook.widgets.message_list import MessageList
from ortlab.records.messages import EXPORTER, KNOWN, RUNTIME, MessageLog
from ortlab.render import html, text
from ortlab.render.lab_pages import warnings_text

SIZES = {"words": 300, "drop": 0.1}


def stepping(model):
    return step_of(model, batch_of(2, 16, 300, first=3, mask=True))


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_a_healthy_model_has_no_warning(wrap, make):
    torch.manual_seed(0)
    model = make(**SIZES)
    lab = wrap(model)
    lab.step(stepping(model), n=2)
    lab.set(memory_level=1).rerun()
    assert len(lab.messages.of(level="WARNING")) == 0
    assert len(lab.messages) > 0  # and all of it is still there
    assert all(one.harmless for one in lab.messages)
    assert "WARNING" not in text.render(lab.messages)
    page = html.render(lab.messages)
    assert "Nobody has to act on this: " in page
    looks = Looks()
    shown = MessageList(lambda: lab.messages, looks)
    shown.opened()
    assert f"{len(lab.messages)} INFO" in shown._list.value
    assert warnings_text(lab.messages) == ""  # the tab counts nothing
    close_tree(shown)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        x.clamp_(max=0.9)
        return self.layers(x).cumsum(-1).square().mean()


def test_what_a_forward_writes_and_what_pytorch_computes_are_no_warning(wrap):
    model = Counting()
    lab = wrap(model)
    lab.step(lambda: model(torch.rand(2, 1, 8, 8)).backward(), n=3)
    assert not lab.messages.of(level="WARNING")
    (said,) = lab.messages.of(text="PyTorch computes inside the graph")
    assert "aten::cumsum" in said.text
    assert lab.messages.of(text="num_batches_tracked")
    assert (
        model.layers[1].num_batches_tracked == model.steps == 3
    )  # so the exporter's warnings do not hold here


def test_a_cache_that_costs_memory_is_a_warning(wrap):
    model = gpt2(**SIZES)
    model.config.use_cache = True
    lab = wrap(model)
    lab.step(stepping(model))
    (one,) = lab.messages.of(level="WARNING")
    assert "model.config.use_cache = False" in one.text


def test_a_fallback_is_a_warning(wrap):
    class Unsupported(torch.nn.Linear):
        def forward(self, x):
            return checkpoint(torch.tanh, super().forward(x), use_reentrant=True)

    model = Unsupported(4, 4)
    lab = wrap(model, fallback=True)
    with pytest.warns(FallbackWarning):
        run = lab.step(lambda: model(torch.randn(4, 4)).sum().backward())
    assert run.fell_back
    assert len(lab.messages.of(level="WARNING")) > 0


def test_what_is_not_listed_stays_a_warning_and_errors_stay_errors():
    log = MessageLog()
    log.add("WARNING", RUNTIME, "Memcpy nodes are added to the graph")
    log.add(
        "ERROR",
        RUNTIME,
        "Removing initializer 'a'. It is not used by any node and should be removed from the model.",
    )
    log.add(
        "WARNING",
        EXPORTER,
        "Removing initializer 'a'. It is not used by any node and should be removed from the model.",
    )
    assert [one.level for one in log.messages] == ["WARNING", "ERROR", "WARNING"]
    assert not any(one.harmless for one in log.messages)


def test_messages_of_one_kind_are_one_row_that_opens():
    log = MessageLog()
    with log.during_run(1), log.during("session"):
        for number in range(137):
            said = "It is not used by any node and should be removed from the model."
            log.add("WARNING", RUNTIME, f"Removing initializer 'weight<{number}>'. {said}")
        log.add("WARNING", RUNTIME, "something else of 'weight<3>'")
    folded, other = log.messages.kinds
    assert (len(folded), len(other), len(log.messages)) == (137, 1, 138)
    page = html.render(log.messages)
    assert page.count("<tr>") == 1 + 2
    assert "(137 times)" in page
    assert "weight&lt;136&gt;" in page
    assert "Run 1: 1 WARNING, 137 INFO" in text.render(log.messages)


def test_each_known_message_says_why():
    for one in KNOWN:
        assert one.reason.endswith(".")
