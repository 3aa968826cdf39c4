"""A rerun repeats a step with all its state in Python, or says what it cannot put back."""

from __future__ import annotations

import collections
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_transformers import batch_of, step_of
from torch import nn
from transformers import OlmoeConfig, OlmoeForCausalLM

from ortlab.errors import StepError

TICKS = 0


class Trainer:
    """A loop as people write it: everything hangs on one object."""

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 0.5**epoch)
        self.generator, self.done, self.seen = torch.Generator().manual_seed(1), 0, []

    def step(self):
        self.optimizer.zero_grad()
        loss = (self.model(torch.ones(2, 4)) ** 2).mean() * torch.rand((), generator=self.generator)
        (loss / (1 + self.done)).backward()
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1
        self.seen.append(float(loss.detach()))
        return loss


def scaled(model, scale):
    """Return a step whose loss is multiplied by what a function returns."""
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4)

    def step():
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean() * scale()
        loss.backward()
        optimizer.step()
        return loss

    return step


def averages(model, advance):
    held = {name: one.detach().clone() for name, one in model.named_parameters()}

    def scale():
        advance(held, model)
        return 1 + sum(one.abs().sum() for one in held.values())

    return scaled(model, scale)


def replace(held, model):
    held.update({name: 0.5 * held[name] + one.detach() for name, one in model.named_parameters()})


def write(held, model):
    for name, one in model.named_parameters():
        held[name].mul_(0.5).add_(one.detach())


def counter(model):
    count = 0

    def scale():
        nonlocal count
        count += 1
        return 1 / count

    return scaled(model, scale)


def counter_of_module(model):
    def scale():
        global TICKS  # noqa: PLW0603 - what is tested
        TICKS += 1
        return 1 / TICKS

    return scaled(model, scale)


def counter_of_model(model):
    model.ticks = 0

    def scale():
        model.ticks += 1
        return 1 / model.ticks

    return scaled(model, scale)


def made_in_the_step(model):
    held = SimpleNamespace()

    def scale():
        held.rate = getattr(held, "rate", 1.0) * 0.5
        return held.rate

    return scaled(model, scale)


class Counted:
    ticks = 0


def counter_of_class(model):
    Counted.ticks = 0

    def scale():
        Counted.ticks += 1
        return 1 / Counted.ticks

    return scaled(model, scale)


class Sharpened(nn.Module):
    """Reads a number that only the step changes."""

    def __init__(self):
        super().__init__()
        self.linear, self.sharpness = nn.Linear(4, 1), 1.0

    def forward(self, x):
        return self.linear(x) * self.sharpness


def array(model):
    held = np.ones(2)

    def scale():
        held[0] *= 0.5
        return float(held[0])

    return scaled(model, scale)


def window(model):
    held = collections.deque([1.0], maxlen=2)

    def scale():
        held.append(len(held) + sum(held))
        return sum(held)

    return scaled(model, scale)


def drawing(generator, draw):
    return lambda model: scaled(model, lambda: draw(generator))


CASES = {
    "an object": lambda model: Trainer(model).step,
    "averages replaced": lambda model: averages(model, replace),
    "averages written to": lambda model: averages(model, write),
    "a counter": counter,
    "a global counter": counter_of_module,
    "a counter on the model": counter_of_model,
    "a counter of a class": counter_of_class,
    "an attribute made in the step": made_in_the_step,
    "an array": array,
    "a deque": window,
    "torch.Generator": drawing(torch.Generator().manual_seed(1), lambda one: torch.rand((), generator=one)),
    "numpy's Generator": drawing(np.random.default_rng(1), lambda one: float(one.random())),
    "numpy's RandomState": drawing(np.random.RandomState(1), lambda one: float(one.rand())),
    "Python's Random": drawing(random.Random(1), lambda one: one.random()),
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


@pytest.mark.parametrize("name", CASES)
def test_a_rerun_repeats_every_loss(model, name, wrap):
    lab = wrap(model, engine="eager")
    first = lab.step(CASES[name](model), n=3, memory=False)
    again = lab.rerun(memory=False)
    assert again.losses == first.losses
    assert len(set(first.losses)) == 3
    assert again.start_digest == first.start_digest
    assert again.unkept == ()


def test_a_rerun_repeats_numbers_of_the_model_that_only_its_forward_reads(wrap):
    torch.manual_seed(0)
    model = Sharpened()
    dropout = nn.Dropout(0.0)
    model.linear = nn.Sequential(dropout, model.linear)

    def scale():
        model.sharpness *= 0.5
        dropout.p = 0.0 if dropout.p else 0.5
        return 1.0

    lab = wrap(model, engine="eager")
    first = lab.step(scaled(model, scale), n=3, memory=False)
    again = lab.rerun(memory=False)
    assert again.losses == first.losses
    lab.restore()
    assert (model.sharpness, dropout.p) == (1.0, 0.0)


def growing(model, items):
    """A step that appends to a long list, and computes with its length."""
    held = list(range(items))

    def scale():
        held.append(len(held))
        return 1 + (len(held) - items)

    return scaled(model, scale)


@pytest.mark.parametrize(("items", "is_put_back"), [(3_000, True), (30_000, False)])
def test_a_long_list_is_put_back_or_said(model, items, is_put_back, wrap):
    lab = wrap(model, engine="eager")
    first = lab.step(growing(model, items), n=3, memory=False)
    again = lab.rerun(memory=False)
    assert (again.losses == first.losses) is is_put_back
    assert again.unkept == (() if is_put_back else ("held, which is too large to keep a copy of",))


def test_a_failing_step_leaves_python_as_it_was(model, wrap):
    trainer = Trainer(model)

    def step():
        trainer.step()
        if trainer.done == 2:
            raise ValueError("of the step")
        return trainer.done

    lab = wrap(model, engine="eager")
    with pytest.raises(ValueError, match="of the step"):
        lab.step(step, n=3, memory=False)
    assert trainer.done == 0
    assert trainer.scheduler.last_epoch == 0
    assert torch.equal(trainer.generator.get_state(), torch.Generator().manual_seed(1).get_state())


def test_what_the_user_changes_between_runs_stays(model, wrap):
    settings, names = SimpleNamespace(scale=1.0, ticks=0), {"scale": 1.0}

    def scale():
        settings.ticks += 1
        return settings.scale * names["scale"] / settings.ticks

    lab = wrap(model, engine="eager")
    first = lab.step(scaled(model, scale), n=2, memory=False)
    settings.scale, names["scale"] = 2.0, 3.0
    again = lab.rerun(memory=False)
    assert again.losses[0] == pytest.approx(6 * first.losses[0])
    assert (settings.scale, names["scale"]) == (2.0, 3.0)


def test_what_is_only_written_down_goes_on(model, wrap):
    steps, losses = 0, []
    inner = scaled(model, lambda: 1.0)

    def step():
        nonlocal steps
        steps += 1
        losses.append(float(inner().detach()))

    lab = wrap(model, engine="eager")
    lab.step(step, n=2, memory=False)
    lab.rerun(memory=False)
    assert steps == len(losses) == 4


def test_what_cannot_be_put_back_is_said_of_the_run_and_in_comparisons(model, wrap):
    ticks = itertools.count(1)
    lab = wrap(model, engine="eager")
    first = lab.step(scaled(model, lambda: 1 / next(ticks)), n=3, memory=False)
    lab.rerun(memory=False)
    words = "nothing puts back ticks, a count of itertools"
    pages = [str(first), str(lab.compare())]
    read = type(first).from_dict(first.to_dict())
    assert all(words in " ".join(page.split()) for page in pages)
    assert read == first


def test_a_generator_of_the_system_which_has_no_state_is_said(model, wrap):
    system = random.SystemRandom()
    lab = wrap(model, engine="eager")
    run = lab.step(scaled(model, system.random), n=2, memory=False)
    assert "a SystemRandom" in " ".join(str(run).split())


def test_a_generator_function_that_a_step_draws_from_is_said(model, wrap, tmp_path):
    rates = (1 / (1 + number) for number in range(100))
    with (tmp_path / "log.txt").open("w") as log:

        def scale():
            log.write("a step\n")
            return next(rates)

        lab = wrap(model, engine="eager")
        first = lab.step(scaled(model, scale), n=3, memory=False)
        again = lab.rerun(memory=False)
    assert again.losses != first.losses
    assert again.unkept == ("rates, a generator",)


def test_an_error_of_an_object_that_refuses_its_state_is_still_said(model, wrap):
    class Refusing:
        def state_dict(self):
            return {}

        def load_state_dict(self, _):
            raise ValueError("no")

    holder = SimpleNamespace(one=Refusing())

    def step():
        holder.one.state_dict()
        return inner()

    inner = scaled(model, lambda: 1.0)
    lab = wrap(model, engine="eager")
    lab.step(step, memory=False)
    with pytest.raises(StepError, match="Refusing"):
        lab.restore()


@pytest.fixture
def experts_with_router_logits(wrap):
    """A mixture of experts whose first forward puts hooks on its parts, and notes that it has, as transformers does."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(3)
    model = OlmoeForCausalLM(OlmoeConfig(vocab_size=64, **sizes, **experts, **ends)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batch_of(2, 8, first=3)
    lab = wrap(model)
    lab.step(step_of(model, batch, optimizer), n=2)
    return lab


def test_a_rerun_exports_nothing_anew_for_what_the_first_forward_settled(experts_with_router_logits):
    lab = experts_with_router_logits
    first = lab.runs[0].losses
    again = lab.rerun()
    assert again.losses == first
    assert again.initialization is None
    assert lab.rerun(engine="eager").losses == pytest.approx(first, rel=1e-5)
    assert lab.rerun().initialization is None


def test_analyses_of_a_model_whose_first_forward_puts_hooks_on_its_parts(experts_with_router_logits):
    lab = experts_with_router_logits
    assert lab.profile().nodes
    assert lab.budget("70%", verify=False).solver.ways
    for name in ("eager", "ort"):
        lab.rerun(engine=name)
        assert lab.parity(n=1).ok
