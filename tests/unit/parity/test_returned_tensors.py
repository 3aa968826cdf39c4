"""What a module returns and uses itself, what it returns twice, in place, recomputed; and weights that are shared."""

from __future__ import annotations

import pytest
import small_transformers
import torch
from small_transformers import batch_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortlab.render import text


@pytest.fixture
def gpt2():
    """Return a GPT-2 whose attentions return their probabilities, too, and a batch."""
    torch.manual_seed(3)
    model = small_transformers.gpt2(heads=4, words=512, attn_implementation="eager")
    return model, batch_of(words=512, first=5)


@pytest.mark.row("I8")
def test_a_fault_in_the_product_of_an_attention_is_the_attentions_own(gpt2, lab_of, spoil, monkeypatch):
    from transformers.models.gpt2 import modeling_gpt2

    model, batch = gpt2
    original, place = modeling_gpt2.eager_attention_forward, model.transformer.h[1].attn

    def attention(module, *args, **kwargs):
        context, probabilities = original(module, *args, **kwargs)
        return spoil(context, back=1.001) if module is place else context, probabilities

    lab = lab_of(model, **batch)
    monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", attention)
    found = lab.parity(1, seeds=False, progress=False)
    assert (found.first.phase, found.first.module) == ("backward", "transformer.h.1.attn")
    assert found.first.reason.endswith("and only transformer.h.1.attn itself uses that")
    assert found.first.others == ()


class Attention(nn.Module):
    """Returns its probabilities, after it has used them."""

    def __init__(self, own):
        super().__init__()
        self.inputs, self.own = nn.Linear(8, 24), own

    def forward(self, x):
        query, key, value = self.inputs(x).chunk(3, -1)
        probabilities = torch.softmax(query @ key.transpose(1, 2), -1)
        return self.own(probabilities) @ value, probabilities


class Layer(nn.Module):
    """An attention whose probabilities are in the loss, too."""

    def __init__(self, own, others):
        super().__init__()
        self.before, self.attention, self.others = nn.Linear(8, 8), Attention(own), others

    def forward(self, x):
        context, probabilities = self.attention(self.before(x))
        return context.square().mean() + self.others(probabilities).square().mean()


@pytest.mark.row("I8")
def test_where_others_use_it_as_well_both_are_named(lab_of, spoil):
    for place in ("own", "others"):
        torch.manual_seed(3)
        uses = {"own": lambda tensor: tensor, "others": lambda tensor: tensor}
        uses[place] = lambda tensor: spoil(tensor, back=1.01)
        lab = lab_of(Layer(**uses), x=torch.randn(3, 5, 8))
        found = lab.parity(1, seeds=False, progress=False)
        assert (found.first.phase, found.first.module, found.first.others) == ("backward", "attention", ("",))
        assert "attention itself uses that, too" in found.first.reason
        assert "It may also be the model" in text.render(found)


class Pair(nn.Module):
    """Returns one tensor under two names, and another one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        one = self.first(x)
        return {"one": one, "same": one, "other": torch.sin(self.second(one))}


class Writing(nn.Module):
    """Asks whether two outputs are one, and writes into what it got."""

    def __init__(self, *, recomputes=False):
        super().__init__()
        self.pair, self.outer, self.head = Pair(), nn.Sequential(Pair()), nn.Linear(8, 1)
        self.recomputes = recomputes
        self.were_one = []

    def forward(self, x):
        found = checkpoint(self.pair, x, use_reentrant=False) if self.recomputes else self.pair(x)
        if not torch.jit.is_tracing():
            self.were_one.append(found["one"] is found["same"])
        found["other"] += x
        found = self.outer(found["other"] + found["same"])
        return self.head(found["one"] + found["other"]).square().mean()


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_returned_twice_written_into_or_computed_again_is_as_unwatched(lab_of, recomputes):
    torch.manual_seed(3)
    model = Writing(recomputes=recomputes)
    lab = lab_of(model, x=torch.randn(3, 8))
    loss = lab.runs.run(1).losses[0]
    model.were_one.clear()
    found = lab.parity(1, seeds=False, progress=False)
    assert found.ok, found.first
    assert found.losses[0][1] == pytest.approx(loss, rel=1e-6)
    assert set(model.were_one) == {True}
    gradients = {
        (pair.site.module, pair.site.name): pair.verdict
        for pair in found.pairs
        if pair.site.kind == "output gradient" and pair.distance
    }
    assert ("outer.0", "other") in gradients
    assert ("outer", "other") in gradients


@pytest.mark.row("I8")
def test_a_fault_behind_an_output_that_was_written_into_is_the_callers(lab_of, spoil):
    class Caller(Writing):
        def forward(self, x):
            found = self.pair(x)
            found["other"] += x
            return self.head(found["one"] + spoil(found["other"], back=1.01)).square().mean()

    torch.manual_seed(3)
    lab = lab_of(Caller(), x=torch.randn(3, 8))
    found = lab.parity(1, seeds=False, progress=False)
    assert (found.first.phase, found.first.module) == ("backward", "")


@pytest.mark.row("I8")
def test_modules_that_share_a_weight_are_named_and_one_that_was_not_called_is_not(lab_of, spoil_module):
    torch.manual_seed(3)
    model, batch = small_transformers.t5(layers=1, heads=4, words=512), batch_of(words=512, first=5)
    lab = lab_of(model, **batch)
    spoil_module(model.encoder.embed_tokens, back=1.01)
    found = lab.parity(1, seeds=False, progress=False)
    assert (found.first.pair.site.module, found.first.pair.site.kind) == ("shared", "parameter gradient")
    named = {found.first.module, *found.first.others}
    assert named == {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}
    assert "a sum over 3 modules that share it" in found.first.reason
