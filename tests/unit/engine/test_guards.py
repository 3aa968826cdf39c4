"""What a forward decides by the values of a batch is checked in each step."""
# ruff: noqa: NPY002 - models draw from numpy's global generator

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fault_cases import Deciding
from torch import nn

import ortlab
from ortlab.errors import BuildError, ExecutionError

pytestmark = [
    pytest.mark.usefixtures("no_fallback"),
    pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def branch(h, x):
    return h * 2 if x.sum() > 0 else h * 3


def number(h, x):
    return h * x.abs().max().item()


def index(h, x):
    return h * (int(x[:, 0].abs().argmax()) + 1)


def turns_over_hits(h, x):
    """As mixtures of experts go over those that a batch has chosen."""
    for row in (x[:, 0] > 0).nonzero():
        h = h.squeeze(0) + row
    return h


def number_in_an_object(h, x):
    return {0: h * float(x.max())}


@pytest.mark.parametrize("decide", [branch, number, index, number_in_an_object, turns_over_hits])
def test_a_batch_for_which_the_graph_would_be_wrong_is_refused(decide, wrap):
    torch.manual_seed(0)
    model = Deciding(decide).train()
    reference, x = copy.deepcopy(model), torch.rand(3, 4)
    wrap(model)

    def tensor(result):
        return result[0] if isinstance(result, dict) else result

    for _ in range(2):
        torch.testing.assert_close(tensor(model(x)), tensor(reference(x)))
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(ExecutionError, match=r"test_guards.py, line \d+") as refusal:
        model(-2 * x.flip(0))
    assert "was exported" in refusal.value.why
    torch.testing.assert_close(model.state_dict(), weights)
    torch.testing.assert_close(tensor(model(x)), tensor(reference(x)))


def test_whole_numbers_are_compared_exactly():
    model = Deciding(lambda h, x: h * int(x.max())).train()
    lab, x = ortlab.wrap(model), torch.rand(3, 4)
    x[0, 0] = 200_000
    model(x)
    x[0, 0] = 200_001
    with pytest.raises(ExecutionError, match="It was 200000 when"):
        model(x)
    lab.unwrap()


def check(h, x):
    """As a validation that passes for every batch, and a branch on a size."""
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    return h * x.shape[0] if x.shape[0] * 2 > 4 else h


def test_a_check_that_passes_is_no_obstacle(wrap):
    torch.manual_seed(0)
    model = Deciding(check).train()
    reference = copy.deepcopy(model)
    wrap(model)
    for rows in (3, 3, 2, 5):
        x = torch.randn(rows, 4)
        for module in (reference, model):
            module.zero_grad()
            module(x).sum().backward()
        torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad)
    with pytest.raises(ExecutionError, match=r"not torch\.isfinite"):
        model(torch.full((3, 4), torch.nan))


def test_a_graph_for_evaluation_is_guarded_too(wrap):
    model = Deciding(branch).eval()
    wrap(model)
    x = torch.rand(3, 4)
    model(x)
    with pytest.raises(ExecutionError, match="depends on a value"):
        model(-x)


def test_a_forward_that_reads_no_value_is_exported_as_before(monkeypatch, wrap):
    from ortlab.engine.tracing import guards

    guarded = []
    monkeypatch.setattr(guards, "GuardedPart", lambda *parts: guarded.append(parts))
    lab = wrap(Deciding(lambda h, x: h * x.shape[0]).train())
    lab.module(torch.rand(3, 4))
    assert not guarded


def test_values_that_are_read_only_where_nothing_is_traced_add_nothing(wrap):
    def untraced(h, x):
        if not torch.jit.is_tracing() and x.sum() > 0:
            return h + h
        return h * 2

    torch.manual_seed(0)
    lab = wrap(Deciding(untraced).train())
    x = torch.rand(3, 4)
    torch.testing.assert_close(lab.module(-x), 2 * lab.module.layer(-x))
    torch.testing.assert_close(lab.module(x), 2 * lab.module.layer(x))


def layer_drop(probability):
    def drop(h, _):
        return h if torch.rand([]) < probability else h * 2

    return drop


def constants(h, _):
    """Read numbers that are the same in each step, whatever the batch."""
    scale = torch.full((2,), 3.0)
    scale[0] = 1.0
    ones = torch.ones_like(scale).sum()
    return h * scale.max().item() if torch.tensor(True) and ones > 1 else h


@pytest.mark.parametrize("decide", [layer_drop(0.0), layer_drop(-1), constants])
def test_what_no_batch_can_change_is_not_guarded(decide, wrap):
    torch.manual_seed(0)
    model = Deciding(decide).train()
    reference = copy.deepcopy(model)
    wrap(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        for module in (reference, model):
            module.zero_grad()
            module(x).sum().backward()
        torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad)


@pytest.mark.parametrize(
    "draw",
    [
        lambda _: torch.rand([]) < 0.5,
        lambda _: torch.rand([]) < torch.tensor(0.5),
        lambda _: torch.rand([]).mul_(9) < 0.0,
        lambda _: torch.rand(2)[0].mul_(-1) < 0.0,
        lambda _: torch.randint(1, 9, ()),
        lambda _: torch.empty(()).bernoulli_(0.5),
        lambda _: len(torch.nonzero(torch.rand(9) < 0.5)),
        lambda x: torch.rand(x.shape).sum(),
        lambda x: torch.randn_like(x).sum(),
    ],
)
def test_a_random_number_that_decides_is_refused_before_the_first_step(draw, wrap):
    model = Deciding(lambda h, x: h * float(draw(x))).train()
    before = copy.deepcopy(model.state_dict())
    wrap(model)
    with pytest.raises(BuildError, match=r"test_guards.py, line \d+") as refusal:
        model(torch.randn(3, 4))
    assert "the first draw" in refusal.value.why
    torch.testing.assert_close(model.state_dict(), before)


def through_a_view(h, x):
    total = torch.zeros(3)
    total[0] = x.sum()
    return h * 2 if total.sum() > 0 else h


def of_weights(h, _):
    return h * 2 if (torch.ones(4) * h).sum() > 0 else h * 3


@pytest.mark.parametrize("decide", [through_a_view, of_weights])
def test_an_input_that_has_any_part_in_a_value_is_guarded(decide, wrap):
    model = Deciding(decide).train()
    torch.nn.init.ones_(model.layer.weight)
    torch.nn.init.zeros_(model.layer.bias)
    x = torch.rand(3, 4)
    wrap(model)
    torch.testing.assert_close(model(x), 2 * model.layer(x))
    with pytest.raises(ExecutionError, match="depends on a value"):
        model(-x)


def test_a_number_made_of_a_size_is_that_of_the_size(wrap):
    model = Deciding(lambda h, x: h * torch.ones_like(x).sum().item()).train()
    wrap(model)
    for rows in (3, 5, 3):
        x = torch.rand(rows, 4)
        torch.testing.assert_close(model(x), 4 * rows * model.layer(x))


def drawn_argument(h):
    return h * random.uniform(1, 2)


@pytest.mark.parametrize(
    ("decide", "line"),
    [
        (lambda h: h * random.random(), "random.random()"),
        (lambda h: h * np.random.rand(), "np.random.rand()"),
        (lambda h: h if random.random() < 0.3 else h * 2, "random.random() < 0.3"),
        (lambda h: h if np.random.random() > 0.5 else h * 2, "np.random.random() > 0.5"),
        (lambda h: h * random.choice([1, 2, 3, 4]), "random.choice"),
        (lambda h: h[:, np.random.permutation(4)], "np.random.permutation"),
        (lambda h: h * float(drawn_early(0.0, 1.0)), "drawn_early(0.0, 1.0)"),
        (drawn_argument, "random.uniform(1, 2)"),
    ],
)
def test_a_draw_that_no_trace_sees_is_refused_with_its_line(decide, line, wrap):
    """As teacher forcing in the tutorials of seq2seq models: losses differed by up to 80 %."""
    states = random.getstate(), np.random.get_state()[1].tolist()
    lab = wrap(Deciding(lambda h, _: decide(h)).train())
    with pytest.raises(BuildError, match=r"Python or numpy draws .*test_guards.py, line \d+") as refusal:
        lab.module(torch.rand(3, 4))
    assert line in refusal.value.what
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


drawn_early = random.uniform
GENERATOR = np.random.default_rng(0)


def by_its_own_seed(h):
    """As BigBird chooses blocks: the same ones in each step."""
    np.random.seed(0)
    return h[:, np.random.permutation(4)] * np.random.rand()


class OfItsOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = random.Random(0)

    def forward(self, h):
        return h * self.generator.randint(2, 9)


class OfItsModule(nn.Module):
    def forward(self, h):
        return h * GENERATOR.integers(1, 9)


class OfAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.masking = SimpleNamespace(generator=random.Random(0))

    def forward(self, h):
        return h * self.masking.generator.random()


class InAFunction(nn.Module):
    def forward(self, h):
        return drawn_outside(h)


def drawn_outside(h):
    return h * GENERATOR.random()


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (OfItsOwn(), r"self\.generator\.randint"),
        (OfItsModule(), r"GENERATOR\.integers"),
        (OfAnObject(), r"self\.masking\.generator\.random"),
        (InAFunction(), r"GENERATOR\.random"),
    ],
)
def test_a_generator_that_a_forward_reaches_is_seen(part, line, wrap):
    lab = wrap(nn.Sequential(nn.Linear(4, 4), part))
    with pytest.raises(BuildError, match=rf"line \d+: return h \* {line}"):
        lab.module(torch.rand(3, 4))


def dropped(probability, draw):
    def drop(h):
        drawn = draw()
        return h * 0 if drawn < probability else h * 2

    return drop


@pytest.mark.parametrize(
    "decide",
    [
        dropped(0.0, lambda: random.random()),  # noqa: PLW0108 - looked up in each call
        dropped(0.0, lambda: random.uniform(0, 1)),
        dropped(-1, lambda: np.random.uniform(0, 1)),
        lambda h: h * 2 if np.random.rand() > 1 or np.random.random() >= 0 else h,
        by_its_own_seed,
    ],
)
def test_draws_that_are_the_same_in_each_step_pass(decide, wrap):
    torch.manual_seed(0)
    model = Deciding(lambda h, _: decide(h)).train()
    reference = copy.deepcopy(model)
    wrap(model)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(model(x), reference(x))


def test_a_draw_that_is_handed_over_has_a_graph_for_each_value(wrap):
    model = Teaching()
    reference, x = copy.deepcopy(model), torch.randn(3, 4)
    lab = wrap(model)
    for forced in (True, False, True, True, False):
        torch.testing.assert_close(model(x, forced), reference(x, forced))
    assert lab.status.executed_by == "ort"


class Teaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, forced):
        h = self.layer(x)
        return self.layer(x) if forced else self.layer(h)


def test_a_forward_that_draws_with_torch_says_nothing(wrap):
    lab = wrap(Deciding(lambda h, _: torch.dropout(h, 0.5, train=True)).train())
    lab.module(torch.rand(3, 4))
    assert not any("random number" in one.text for one in lab.messages)


def test_the_size_of_a_random_choice_is_a_size(wrap):
    """As ViLT chooses patches: which ones is random, how many is not."""

    def patches(h, _):
        chosen = h[:, torch.randint(0, 4, (3,))]
        return chosen if chosen.shape[1] > 2 else h

    lab = wrap(Deciding(patches))
    chosen = lab.module(torch.randn(2, 4))
    assert lab.status.executed_by == "ort"
    assert chosen.shape == (2, 3)


@pytest.mark.parametrize("package", [torch, ortlab])
def test_a_package_whose_name_begins_with_that_of_another_holds_code_of_the_model(package):
    from ortlab.engine.tracing.source_lines import is_model_code

    folder = Path(package.__file__).parent
    assert is_model_code(f"{folder}vision/models/resnet.py")
    assert not is_model_code(str(folder / "models" / "resnet.py"))


class Catching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        try:
            return self.layer(x).view(-1, 3)
        except RuntimeError:
            return self.layer(x) * 2


def test_a_forward_that_catches_an_error_of_torch_is_refused_by_line(wrap):
    model = Catching()
    lab = wrap(model)
    with pytest.raises(
        BuildError, match=r"catches an error of torch: .*test_guards.py, line \d+: return self"
    ) as refused:
        model(torch.randn(2, 4))
    assert "engine='eager'" in refused.value.fix
    lab.set(engine="eager")
    assert model(torch.randn(2, 4)).shape == (2, 4)
